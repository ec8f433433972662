//! A new image that is filled in the file that has its name already. The file gets the first sector
//! of the header when everything else is there: what a kill leaves of it is no image.

use mica_block::{
    IoFuture, LocalFuture, Result, Run, Space, Store, StoreIdentity, Witness, write_all,
};
use mica_rt::Buf;
use mica_units::{HostOffset, SECTOR_BYTES};
use parking_lot::Mutex;
use std::sync::Arc;

/// Bytes that the file gets last.
const HELD_BYTES: usize = 512;
const _: () = assert!(HELD_BYTES as u64 == SECTOR_BYTES);

/// A file whose first sector is kept in memory.
pub(super) struct HeldStore {
    store: Arc<dyn Store>,
    first: Arc<Mutex<[u8; HELD_BYTES]>>,
    identity: StoreIdentity,
}

impl HeldStore {
    /// An empty file as it will be.
    pub(super) fn over(store: Arc<dyn Store>) -> Self {
        Self { store, first: Arc::new(Mutex::new([0; HELD_BYTES])), identity: StoreIdentity::own() }
    }

    /// Gives the file its first sector, when everything else is durable.
    ///
    /// # Errors
    /// What the system reports.
    pub(super) async fn complete(&self) -> Result<()> {
        self.store.sync().await?;
        let first = Buf::from_slice(&*self.first.lock());
        write_all(&*self.store, first, HostOffset::ZERO).await?;
        self.store.sync().await
    }
}

/// How many bytes at `offset` are in memory, and where.
fn held_at(offset: HostOffset, len: usize) -> Option<std::ops::Range<usize>> {
    let start = usize::try_from(offset.bytes()).ok().filter(|start| *start < HELD_BYTES)?;
    Some(start..HELD_BYTES.min(start.saturating_add(len)))
}

impl Store for HeldStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let read = self.store.read_at(buf, offset);
        let first = Arc::clone(&self.first);
        IoFuture::boxed(async move {
            let (result, mut buf) = read.await;
            if let Some(held) = held_at(offset, buf.len()) {
                buf.put(0, &first.lock()[held]);
            }
            (result, buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let Some(held) = held_at(offset, buf.len()) else {
            return self.store.write_at(buf, offset);
        };
        let len = held.len();
        self.first.lock()[held].copy_from_slice(&buf[..len]);
        let rest = Buf::from_slice(&buf[len..]);
        let store = Arc::clone(&self.store);
        IoFuture::boxed(async move {
            if rest.is_empty() {
                return (Ok(()), buf);
            }
            let (result, _) = store.write_at(rest, HostOffset::new(SECTOR_BYTES)).await;
            (result, buf)
        })
    }

    fn len(&self) -> Result<u64> {
        self.store.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.store.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.store.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.store.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.store.reads_unwritten_as_zeros()
    }

    fn witness(&self) -> Witness {
        self.store.witness()
    }

    fn sync(&self) -> LocalFuture<'static, Result<()>> {
        self.store.sync()
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> LocalFuture<'static, Result<()>> {
        match held_at(offset, bytes.len()) {
            None => self.store.sync_written(bytes, offset),
            // The file has other bytes there than were written.
            Some(_) => self.store.sync(),
        }
    }

    fn space(
        &self,
        change: Space,
        offset: HostOffset,
        len: u64,
    ) -> LocalFuture<'static, Result<()>> {
        self.store.space(change, offset, len)
    }

    fn set_len(&self, len: u64) -> LocalFuture<'static, Result<()>> {
        self.store.set_len(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::read_exact;
    use mica_rt::{Backend, Executor};
    use mica_store::MemoryStore;

    #[test]
    fn first_sector_is_seen_at_once_and_is_in_the_file_at_the_end() {
        Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(async {
            let file = Arc::new(MemoryStore::new_writable("file", vec![0; 2048]));
            let held = HeldStore::over(Arc::clone(&file) as _);
            for (at, len, byte) in [(0, 1024, 1), (100, 8, 2), (508, 8, 3), (1024, 512, 4)] {
                let bytes = Buf::from_slice(&vec![byte; len]);
                write_all(&held, bytes, HostOffset::new(at)).await.expect("written");
            }
            let mut wanted = vec![1; 1024];
            wanted[100..108].fill(2);
            wanted[508..516].fill(3);
            wanted.resize(1536, 4);
            wanted.resize(2048, 0);
            let seen = read_exact(&held, HostOffset::ZERO, 2048).await.expect("read");
            assert_eq!(*seen, wanted);
            let seen = read_exact(&held, HostOffset::new(500), 100).await.expect("read");
            assert_eq!(*seen, wanted[500..600]);
            let there = read_exact(&*file, HostOffset::ZERO, 2048).await.expect("read");
            assert_eq!(there[..512], [0; 512]);
            assert_eq!(there[512..], wanted[512..]);
            held.complete().await.expect("written");
            let there = read_exact(&*file, HostOffset::ZERO, 2048).await.expect("read");
            assert_eq!(*there, wanted);
        });
    }
}
