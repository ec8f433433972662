//! Where the system refuses io_uring, as the default profile of container engines does, the pool
//! takes over and gives the same results.

use mica_rt::{
    Access, Backend, Buf, Executor, FallocateFlags, Socket, Stream, fallocate, read_at, sync_data,
    write_at,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Makes io_uring_setup fail with EPERM for this thread and those that it starts.
fn refuse_io_uring() {
    let rules = BTreeMap::from([(libc::SYS_io_uring_setup, vec![])]);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM.unsigned_abs()),
        std::env::consts::ARCH.try_into().unwrap(),
    )
    .unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    apply_filter(&program).unwrap();
}

#[test]
fn auto_falls_back_to_the_pool_and_does_the_same() {
    let content = crate::common::pattern(50_000);
    let results = std::thread::scope(|scope| {
        let refused = scope.spawn(|| {
            refuse_io_uring();
            let error = Executor::new(Backend::Uring).err().unwrap();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
            let executor = Executor::new(Backend::Auto).unwrap();
            assert_eq!(executor.backend_name(), "pool");
            results_of(&executor, &content)
        });
        refused.join().unwrap()
    });
    let unfiltered = Executor::new(Backend::Auto).unwrap();
    assert_eq!(results_of(&unfiltered, &content), results);
}

/// The results of a bit of everything.
fn results_of(executor: &Executor, content: &[u8]) -> Vec<(usize, Vec<u8>)> {
    executor.block_on(async {
        let mut results = Vec::new();
        for access in [Access::Buffered, Access::Direct] {
            let Some(file) = crate::common::file_of(content, access) else { continue };
            for offset in [0, 4096, 45_056, 49_152, 1 << 20] {
                let (count, buf) = read_at(&file, Buf::new(8192), offset).await;
                let count = count.unwrap();
                results.push((count, buf[..count].to_vec()));
            }
        }
        let (path, file) = crate::common::empty_file(Access::Buffered).unwrap();
        let (count, buf) = write_at(&file, Buf::from_slice(&content[..9000]), 5000).await;
        results.push((count.unwrap(), buf.to_vec()));
        sync_data(&file).await.unwrap();
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = fallocate(&file, punch, 4096, 4096).await.is_ok();
        results.push((usize::from(punched), std::fs::read(&path).unwrap()));
        let (left, right) = std::os::unix::net::UnixStream::pair().unwrap();
        let left = Stream::Socket(Arc::new(Socket::new(left).unwrap()));
        let right = Stream::Socket(Arc::new(Socket::new(right).unwrap()));
        left.send([Buf::from_slice(b"ab"), Buf::from_slice(b"cd")].into()).await.unwrap();
        let (count, buf) = right.recv(Buf::new(10)).await;
        let count = count.unwrap();
        results.push((count, buf[..count].to_vec()));
        results
    })
}
