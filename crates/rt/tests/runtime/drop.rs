//! A buffer whose future was dropped stays with its operation until the kernel is done with it.

use crate::common::real_backends;
use mica_rt::{Access, Backend, Buf, Executor, File, read_at, simulate, sleep, yield_now};
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

/// The addresses that new buffers of this class get, all held at once.
fn addresses_of_new(count: usize, len: usize) -> Vec<*const u8> {
    let held: Vec<Buf> = (0..count).map(|_| Buf::new(len)).collect();
    held.iter().map(|buf| buf.as_ptr()).collect()
}

/// The kernel holds a read of a pipe for as long as nobody writes. Only io_uring reads a pipe so.
#[test]
fn buffer_of_a_dropped_read_is_not_reused_before_the_kernel_is_done() {
    if !real_backends().contains(&Backend::Uring) {
        return;
    }
    let (reader, mut writer) = std::io::pipe().unwrap();
    let file = Arc::new(File::new(reader.into(), Access::Buffered));
    Executor::new(Backend::Uring).unwrap().block_on(async {
        const LEN: usize = 64 << 10;
        let buf = Buf::zeroed(LEN);
        let address = buf.as_ptr();
        let mut read = Box::pin(read_at(&file, buf, 0));
        std::future::poll_fn(|context| {
            assert!(read.as_mut().poll(context).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        sleep(Duration::from_millis(5)).await;
        drop(read);
        for _ in 0..3 {
            yield_now().await;
            assert!(!addresses_of_new(10, LEN).contains(&address), "reused while in flight");
        }
        assert_eq!(Arc::strong_count(&file), 2, "the operation keeps its file open");
        writer.write_all(b"late").unwrap();
        sleep(Duration::from_millis(20)).await;
        assert_eq!(Arc::strong_count(&file), 1);
        assert!(addresses_of_new(10, LEN).contains(&address), "not given back");
    });
}

#[test]
fn buffer_of_a_dropped_simulated_operation_is_not_reused_before_it_completes() {
    Executor::new(Backend::Sim { seed: 9 }).unwrap().block_on(async {
        const LEN: usize = 64 << 10;
        let buf = Buf::zeroed(LEN);
        let address = buf.as_ptr();
        let work = |buf: &mut Buf| {
            buf.fill(7);
            Ok(buf.len())
        };
        drop(simulate(buf, Duration::from_millis(10), Box::new(work)));
        assert!(!addresses_of_new(10, LEN).contains(&address), "reused while in flight");
        sleep(Duration::from_millis(30)).await;
        assert!(addresses_of_new(10, LEN).contains(&address), "not given back");
    });
}

/// Reads that are dropped at any point of their life, with more in flight than any queue holds.
#[test]
fn reads_dropped_at_any_moment_leave_the_others_alone() {
    let content = crate::common::pattern(1 << 20);
    for backend in real_backends() {
        for access in [Access::Buffered, Access::Direct] {
            let Some(file) = crate::common::file_of(&content, access) else { continue };
            Executor::new(backend).unwrap().block_on(async {
                for round in 0..300_u64 {
                    let mut reads: Vec<_> = (0..8)
                        .map(|number| {
                            let offset = (round * 8 + number) * 4096 % (1 << 20);
                            (offset, Box::pin(read_at(&file, Buf::new(4096), offset)))
                        })
                        .collect();
                    for _ in 0..round % 4 {
                        yield_now().await;
                    }
                    reads.truncate(4);
                    for (offset, read) in reads {
                        let (count, buf) = read.await;
                        assert_eq!(count.unwrap(), 4096);
                        let start = usize::try_from(offset).unwrap();
                        assert!(*buf == content[start..start + 4096], "other bytes at {offset}");
                    }
                }
            });
        }
    }
}
