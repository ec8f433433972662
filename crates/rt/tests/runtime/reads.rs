//! Each backend reads the same way, one read or thousands at once.

use crate::common::{Group, file_of, on_each_backend, pattern};
use mica_rt::{Access, Buf, read_at};
use std::rc::Rc;
use std::sync::Arc;

#[test]
fn reads_are_whole_and_short_only_at_the_end() {
    let content = pattern(100_000);
    on_each_backend(|| async {
        let file = file_of(&content, Access::Buffered).unwrap();
        for (offset, len, expected) in [
            (0, 100_000, 100_000),
            (1, 4095, 4095),
            (99_000, 4096, 1000),
            (99_999, 1, 1),
            (100_000, 1, 0),
            (1 << 40, 512, 0),
            (5, 0, 0),
        ] {
            let (count, buf) = read_at(&file, Buf::new(len), offset as u64).await;
            assert_eq!(count.unwrap(), expected, "{len} bytes at {offset}");
            let start = offset.min(content.len());
            assert_eq!(buf[..expected], content[start..start + expected]);
        }
    });
}

#[test]
fn direct_reads_reach_an_end_that_is_not_aligned() {
    for len in [8192, 8192 + 512, 8192 + 1, 511, 4096 + 4095] {
        let content = pattern(len);
        let Some(file) = file_of(&content, Access::Direct) else { return };
        on_each_backend(|| async {
            let (count, buf) = read_at(&file, Buf::new(16384), 0).await;
            assert_eq!(count.unwrap(), len);
            assert_eq!(buf[..len], content);
            let (count, buf) = read_at(&file, Buf::new(8192), 4096).await;
            let expected = len.saturating_sub(4096);
            assert_eq!(count.unwrap(), expected);
            assert_eq!(buf[..expected], content[len - expected..]);
        });
    }
}

#[test]
fn error_of_the_system_is_returned_with_the_buffer() {
    on_each_backend(|| async {
        let directory = std::fs::File::open(std::env::temp_dir()).unwrap();
        let file = Arc::new(mica_rt::File::new(directory.into(), Access::Buffered));
        let (result, buf) = read_at(&file, Buf::new(4096), 0).await;
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EISDIR));
        assert_eq!(buf.len(), 4096);
    });
}

/// More at once than a submission queue holds, and than a completion queue holds.
#[test]
fn thousands_of_concurrent_reads_all_complete() {
    let content = pattern(1 << 20);
    on_each_backend(|| async {
        let file = file_of(&content, Access::Buffered).unwrap();
        let content = Rc::new(content.clone());
        let group = Group::new();
        for number in 0..6000_u64 {
            let (file, content) = (Arc::clone(&file), Rc::clone(&content));
            group.spawn(async move {
                let offset = number * 97;
                let (count, buf) = read_at(&file, Buf::new(64), offset).await;
                assert_eq!(count.unwrap(), 64);
                let start = usize::try_from(offset).unwrap();
                assert_eq!(*buf, content[start..start + 64]);
            });
        }
        group.finish().await;
    });
}

#[test]
fn concurrent_direct_reads_all_complete() {
    let content = pattern(1 << 20);
    let Some(file) = file_of(&content, Access::Direct) else { return };
    on_each_backend(|| async {
        let content = Rc::new(content.clone());
        let group = Group::new();
        for number in 0..512_u64 {
            let (file, content) = (Arc::clone(&file), Rc::clone(&content));
            group.spawn(async move {
                let offset = number * 4096 % (1 << 20);
                let (count, buf) = read_at(&file, Buf::new(4096), offset).await;
                assert_eq!(count.unwrap(), 4096);
                let start = usize::try_from(offset).unwrap();
                assert_eq!(*buf, content[start..start + 4096]);
            });
        }
        group.finish().await;
    });
}
