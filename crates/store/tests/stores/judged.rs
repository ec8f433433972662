//! A store that judges the one beneath it: whatever it is given is a guest's memory, and what it
//! writes stays as it is.

use crate::{on_each_backend, pattern};
use mica_block::{ChangeFuture, IoFuture, Result, Run, Space, Store, StoreIdentity, Witness};
use mica_rt::Buf;
use mica_store::faulty::{
    DelayOptions, DelayStore, ErrorOptions, ErrorStore, LogOptions, LogStore, Operation,
    Operations, When,
};
use mica_store::{CacheMode, Handles, Located, Locking, MemoryStore, WritableFile};
use mica_units::HostOffset;
use std::sync::Arc;
use std::time::Duration;

/// Passes everything on to a store, and judges it.
pub(crate) struct Judged(pub(crate) Arc<dyn Store>);

impl Store for Judged {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.0.read_at(buf.into_foreign(), offset)
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let given = (buf.as_ptr(), buf.to_vec());
        let writing = self.0.write_at(buf.into_foreign(), offset);
        IoFuture::boxed(async move {
            let (result, buf) = writing.await;
            assert_eq!(buf.as_ptr(), given.0, "a write gives its own buffer back");
            assert!(*buf == given.1, "a write leaves its buffer as it is");
            (result, buf)
        })
    }

    fn sync(&self) -> ChangeFuture {
        self.0.sync()
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        self.0.sync_written(bytes, offset)
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        self.0.space(change, offset, len)
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.0.set_len(len)
    }

    fn len(&self) -> Result<u64> {
        self.0.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.0.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.0.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.0.identity()
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.0.reads_unwritten_as_zeros()
    }

    fn witness(&self) -> Witness {
        self.0.witness()
    }
}

/// A write of each alignment to `store`, and a read of it.
async fn judge(store: Arc<dyn Store>, may_fail: bool) {
    let store = Judged(store);
    for (offset, len) in [(0, 8192), (4096, 512), (512, 1024), (1, 5000), (9000, 3), (1 << 20, 1)] {
        let bytes = pattern(len);
        // Not the start of a block: direct I/O cannot take it as it is.
        for skipped in [0, 1] {
            let mut buf = Buf::zeroed(skipped + len);
            buf.advance(skipped);
            buf.copy_from_slice(&bytes);
            let (result, _) = store.write_at(buf, HostOffset::new(offset)).await;
            if may_fail {
                continue;
            }
            result.unwrap();
            let mut buf = Buf::zeroed(skipped + len + 7);
            buf.advance(skipped);
            let (result, buf) = store.read_at(buf, HostOffset::new(offset)).await;
            result.unwrap();
            assert!(buf.starts_with(&bytes), "{len} at {offset}");
        }
    }
}

#[test]
fn files_take_a_guests_memory_and_leave_what_they_write() {
    let folder = tempfile::tempdir().unwrap();
    on_each_backend(async || {
        for cache in [CacheMode::Writeback, CacheMode::None] {
            let path = folder.path().join("file");
            std::fs::write(&path, pattern(10_000)).unwrap();
            let mut located = Located::find(&path).unwrap();
            let handles = Handles::new(4);
            let file = WritableFile::open(&mut located, cache, Locking::On, &handles).unwrap();
            judge(Arc::new(file), false).await;
        }
    });
}

#[test]
fn memory_and_wrapped_stores_take_a_guests_memory_and_leave_what_they_write() {
    on_each_backend(async || {
        let memory = || Arc::new(MemoryStore::new_writable("memory", pattern(10_000)));
        let operations = Operations::READS.with(Operation::Write);
        let time = Duration::from_millis(1);
        judge(memory(), false).await;
        judge(Arc::new(DelayStore::new(memory(), DelayOptions { operations, time })), false).await;
        let sink = Arc::new(|_: &str| {});
        judge(Arc::new(LogStore::new(memory(), LogOptions { sink })), false).await;
        let options = ErrorOptions { operations, when: When::Every(2), errno: libc::EIO };
        judge(Arc::new(ErrorStore::new(memory(), options)), true).await;
        judge(Arc::new(MemoryStore::new("not writable", pattern(10))), true).await;
    });
}
