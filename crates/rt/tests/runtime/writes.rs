//! Each backend returns the same results: writes, syncs, changes of space, and their errors.

use crate::common::{empty_file, on_each_backend, pattern, real_backends};
use mica_rt::{
    Access, Backend, Buf, Executor, FallocateFlags, File, fallocate, join_all, read_at, set_len,
    sleep, sync_data, write_at, yield_now,
};
use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A special file, open for reading and writing.
fn device(path: &str) -> Arc<File> {
    let opened = std::fs::File::options().read(true).write(true).open(path).unwrap();
    Arc::new(File::new(opened.into(), Access::Buffered))
}

fn read_only(path: &std::path::Path) -> Arc<File> {
    Arc::new(File::new(std::fs::File::open(path).unwrap().into(), Access::Buffered))
}

fn errno<T>(result: std::io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

#[test]
fn file_gets_longer_with_zeros_and_shorter() {
    let Some((path, file)) = empty_file(Access::Buffered) else { return };
    on_each_backend(|| async {
        set_len(&file, 0).await.unwrap();
        write_at(&file, Buf::from_slice(&[7; 100]), 0).await.0.unwrap();
        set_len(&file, 50).await.unwrap();
        set_len(&file, 5000).await.unwrap();
        let content = std::fs::read(&path).unwrap();
        assert_eq!(content.len(), 5000);
        assert!(content[..50].iter().all(|byte| *byte == 7));
        assert!(content[50..].iter().all(|byte| *byte == 0));
        assert_eq!(errno(set_len(&read_only(&path), 0).await), Some(libc::EINVAL));
        assert_eq!(errno(set_len(&device("/dev/null"), 0).await), Some(libc::EINVAL));
    });
}

/// A file that the executor may block on.
fn in_place(path: &std::path::Path) -> Arc<File> {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let file = File::new(file.into(), Access::Buffered);
    Arc::new(file.write_in_place(Arc::new(AtomicBool::new(true))))
}

/// Enough of them that the executor does some by itself.
const LONE_SYNCS: usize = 40;

#[test]
fn sync_has_the_same_outcome_alone_and_beside_others() {
    let Some((path, _)) = empty_file(Access::Buffered) else { return };
    on_each_backend(|| async {
        let file = in_place(&path);
        // No sync is possible there.
        let null = in_place("/dev/null".as_ref());
        for _ in 0..LONE_SYNCS {
            write_at(&file, Buf::zeroed(4096), 0).await.0.unwrap();
            sync_data(&file).await.unwrap();
            assert_eq!(errno(sync_data(&null).await), Some(libc::EINVAL));
        }
        let beside: Vec<_> = (0..LONE_SYNCS).map(|_| sync_data(&file)).collect();
        assert!(join_all(beside).await.iter().all(Result::is_ok));
        sync_data(&file).await.unwrap();
    });
}

#[test]
fn written_data_is_read_back_and_in_the_file() {
    let content = pattern(3 * 4096 + 700);
    for access in [Access::Buffered, Access::Direct] {
        let Some((path, file)) = empty_file(access) else { continue };
        let len = if access == Access::Direct { 3 * 4096 } else { content.len() };
        on_each_backend(|| async {
            std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
            let (count, buf) = write_at(&file, Buf::from_slice(&content[..len]), 8192).await;
            assert_eq!(count.unwrap(), len);
            assert_eq!(*buf, content[..len], "the buffer is returned unchanged");
            sync_data(&file).await.unwrap();
            let (count, buf) = read_at(&file, Buf::new(16_384), 8192).await;
            assert_eq!(count.unwrap(), len);
            assert_eq!(buf[..len], content[..len]);
            let there = std::fs::read(&path).unwrap();
            assert_eq!(there.len(), 8192 + len);
            assert_eq!(there[..8192], [0; 8192]);
            let (count, _) = write_at(&file, Buf::new(0), 0).await;
            assert_eq!(count.unwrap(), 0);
        });
    }
}

/// More at once than a submission queue holds.
#[test]
fn thousands_of_concurrent_writes_all_arrive() {
    let content = pattern(3000 * 61);
    let (path, file) = empty_file(Access::Buffered).unwrap();
    on_each_backend(|| async {
        std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        let writes = content
            .chunks(61)
            .enumerate()
            .map(|(number, part)| write_at(&file, Buf::from_slice(part), number as u64 * 61));
        for (count, buf) in join_all(writes).await {
            assert_eq!((count.unwrap(), buf.len()), (61, 61));
        }
        sync_data(&file).await.unwrap();
        assert!(std::fs::read(&path).unwrap() == content);
    });
}

#[test]
fn space_is_allocated_zeroed_and_freed() {
    let (path, file) = empty_file(Access::Buffered).unwrap();
    let supported = Executor::new(Backend::Pool).unwrap().block_on(async {
        fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).await.is_ok()
            && fallocate(&file, FallocateFlags::ZERO_RANGE, 0, 4096).await.is_ok()
    });
    if !supported {
        eprintln!("skipped: this file system does not support fallocate");
        return;
    }
    on_each_backend(|| async {
        std::fs::write(&path, vec![7; 65_536]).unwrap();
        fallocate(&file, FallocateFlags::empty(), 0, 1 << 20).await.unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, 4096, 4096).await.unwrap();
        fallocate(&file, FallocateFlags::ZERO_RANGE, 16_384, 8192).await.unwrap();
        let there = std::fs::read(&path).unwrap();
        let zeros = [4096..8192, 16_384..24_576, 65_536..1 << 20];
        let is_zero = |at: usize| zeros.iter().any(|range| range.contains(&at));
        assert!(there.iter().enumerate().all(|(at, byte)| (*byte == 0) == is_zero(at)));
    });
}

#[test]
fn errors_of_the_system_are_returned() {
    let (path, _) = empty_file(Access::Buffered).unwrap();
    on_each_backend(|| async {
        let full = device("/dev/full");
        let (result, buf) = write_at(&full, Buf::zeroed(8192), 0).await;
        assert_eq!((errno(result), buf.len()), (Some(libc::ENOSPC), 8192));
        let refused = fallocate(&full, FallocateFlags::empty(), 0, 1).await;
        assert_eq!(errno(refused), Some(libc::ENODEV));
        assert_eq!(errno(sync_data(&full).await), Some(libc::EINVAL));

        let file = read_only(&path);
        let (result, buf) = write_at(&file, Buf::zeroed(100), 0).await;
        assert_eq!((errno(result), buf.len()), (Some(libc::EBADF), 100));
        let refused = fallocate(&file, FallocateFlags::empty(), 0, 4096).await;
        assert_eq!(errno(refused), Some(libc::EBADF));
        sync_data(&file).await.unwrap();
    });
}

#[test]
fn simulator_has_no_files() {
    let (_, file) = empty_file(Access::Buffered).unwrap();
    Executor::new(Backend::Sim { seed: 3 }).unwrap().block_on(async {
        let (result, buf) = write_at(&file, Buf::zeroed(5), 0).await;
        assert_eq!((errno(result), buf.len()), (Some(libc::ENOSYS), 5));
        assert_eq!(errno(sync_data(&file).await), Some(libc::ENOSYS));
        let refused = fallocate(&file, FallocateFlags::empty(), 0, 1).await;
        assert_eq!(errno(refused), Some(libc::ENOSYS));
    });
}

/// The kernel holds a write into a full pipe until somebody reads. Only io_uring writes a pipe so.
#[test]
fn buffer_of_a_dropped_write_is_not_reused_before_the_kernel_is_done() {
    const LEN: usize = 64 << 10;
    if !real_backends().contains(&Backend::Uring) {
        return;
    }
    let (mut reader, writer) = std::io::pipe().unwrap();
    let mut filler = writer.try_clone().unwrap();
    filler.write_all(&vec![1; LEN]).unwrap();
    drop(filler);
    let file = Arc::new(File::new(writer.into(), Access::Buffered));
    Executor::new(Backend::Uring).unwrap().block_on(async {
        let mut write = Box::pin(write_at(&file, Buf::from_slice(&[2; LEN]), 0));
        std::future::poll_fn(|context| {
            assert!(write.as_mut().poll(context).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        sleep(Duration::from_millis(5)).await;
        drop(write);
        for _ in 0..3 {
            yield_now().await;
            let others: Vec<Buf> = (0..10).map(|_| Buf::from_slice(&[3; LEN])).collect();
            assert!(others.iter().all(|buf| buf[0] == 3));
        }
        assert_eq!(Arc::strong_count(&file), 2, "the operation keeps its file open");
        let mut read = vec![0; LEN];
        reader.read_exact(&mut read).unwrap();
        assert_eq!(read, [1; LEN]);
        // The kernel continues the write when the executor lets it.
        sleep(Duration::from_millis(20)).await;
        reader.read_exact(&mut read).unwrap();
        assert_eq!(read, [2; LEN], "the buffer was reused while in flight");
        assert_eq!(Arc::strong_count(&file), 1);
    });
}

#[test]
fn locks_are_seen_by_other_descriptions_of_the_file_and_end_with_theirs() {
    let (path, file) = empty_file(Access::Buffered).unwrap();
    let other = read_only(&path);
    file.lock_shared(100, 2).unwrap();
    other.lock_shared(101, 1).unwrap();
    assert!(other.is_locked_elsewhere(100, 1).unwrap());
    assert!(!other.is_locked_elsewhere(102, 50).unwrap());
    assert!(!file.is_locked_elsewhere(100, 1).unwrap(), "its own lock does not conflict");
    assert!(file.is_locked_elsewhere(90, 20).unwrap());
    drop(other);
    assert!(!file.is_locked_elsewhere(90, 20).unwrap());
    let no_file = File::new(std::io::pipe().unwrap().0.into(), Access::Buffered);
    assert!(no_file.lock_shared(u64::MAX, 1).is_err());
}

/// Writes of so many bytes take long enough for the executor to leave some to a thread.
#[test]
fn many_writes_at_once_are_all_done_whoever_does_them() {
    const AT_ONCE: u64 = 40;
    const LEN: usize = 64 << 10;
    let Some((path, _)) = empty_file(Access::Buffered) else { return };
    on_each_backend(|| async {
        let file = in_place(&path);
        for round in 0..200_u64 {
            let byte = |number: u64| u8::try_from((round + number) % 251).unwrap();
            let writes = (0..AT_ONCE).map(|number| {
                write_at(&file, Buf::from_slice(&[byte(number); LEN]), number * LEN as u64)
            });
            for (count, buf) in join_all(writes).await {
                assert_eq!((count.unwrap(), buf.len()), (LEN, LEN));
            }
            let there = std::fs::read(&path).unwrap();
            assert!(there.chunks(LEN).zip(0..).all(|(part, number)| part == [byte(number); LEN]));
        }
    });
}

#[test]
fn executors_that_write_one_file_at_once_all_come_to_an_end() {
    const TASKS: u64 = 64;
    const LEN_MAX: usize = 64 << 10;
    let Some((path, _)) = empty_file(Access::Buffered) else { return };
    let file = in_place(&path);
    let write = async |file: Arc<File>, place: u64| {
        for round in 0..400 {
            let len = if round % 3 == 0 { LEN_MAX } else { 4096 };
            write_at(&file, Buf::zeroed(len), place * LEN_MAX as u64).await.0.unwrap();
            if (round + place).is_multiple_of(50) {
                sleep(Duration::from_micros(100)).await;
            }
        }
    };
    std::thread::scope(|scope| {
        for executor in 0..2 {
            let file = &file;
            scope.spawn(move || {
                Executor::new(Backend::Auto).unwrap().block_on(async {
                    let places = executor * TASKS..(executor + 1) * TASKS;
                    join_all(places.map(|place| write(Arc::clone(file), place))).await;
                });
            });
        }
    });
    let len = std::fs::metadata(&path).unwrap().len();
    assert_eq!(len, 2 * TASKS * LEN_MAX as u64);
}
