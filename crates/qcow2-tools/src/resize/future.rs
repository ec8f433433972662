//! An image as it will be: the header seen here already has the new size, while the file still has
//! the old one. So the writing engine prepares the new part of a disk before anyone else sees it.

use mica_block::{
    IoFuture, LocalFuture, OpenImage, Result, Run, Space, Store, StoreIdentity, Witness,
};
use mica_qcow2_format::field;
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// Where the size in the header ends.
const HEADER_END: u64 = field::SIZE as u64 + 8;

/// The `image` as it will be with `size` bytes.
pub(super) fn with_size(image: &OpenImage, size: u64) -> OpenImage {
    let store =
        FutureStore { store: Arc::clone(&image.store), size, identity: StoreIdentity::own() };
    OpenImage { store: Arc::new(store), ..image.clone() }
}

/// A store whose header shows a different size than the file holds.
struct FutureStore {
    store: Arc<dyn Store>,
    size: u64,
    identity: StoreIdentity,
}

/// Puts the part of the size field `field` that lies in `buf`, read from `offset`, into it.
fn patch(buf: &mut Buf, offset: HostOffset, field: &[u8]) {
    for (at, byte) in (field::SIZE as u64..).zip(field) {
        let within = at.checked_sub(offset.bytes()).and_then(|at| usize::try_from(at).ok());
        if let Some(within) = within.filter(|within| *within < buf.len()) {
            buf.put(within, &[*byte]);
        }
    }
}

impl Store for FutureStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let read = self.store.read_at(buf, offset);
        let field = self.size.to_be_bytes();
        IoFuture::boxed(async move {
            let (result, mut buf) = read.await;
            patch(&mut buf, offset, &field);
            (result, buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if offset.bytes() >= HEADER_END {
            return self.store.write_at(buf, offset);
        }
        let store = Arc::clone(&self.store);
        IoFuture::boxed(async move {
            let field = Buf::new(8);
            // What is written stays as it is: the file gets a copy.
            let mut header = Buf::from_slice(&buf);
            match store.read_at(field, HostOffset::new(field::SIZE as u64)).await {
                (Ok(()), field) => patch(&mut header, offset, &field),
                (Err(error), _) => return (Err(error), buf),
            }
            let (result, _) = store.write_at(header, offset).await;
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
        match offset.bytes() >= HEADER_END {
            true => self.store.sync_written(bytes, offset),
            // The file has other bytes there than were written.
            false => self.store.sync(),
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
    use super::{FutureStore, patch};
    use mica_block::{Store, StoreIdentity, read_exact};
    use mica_qcow2_format::field;
    use mica_rt::{Backend, Buf, Executor};
    use mica_store::MemoryStore;
    use mica_units::HostOffset;
    use std::sync::Arc;

    #[test]
    fn written_header_keeps_its_size_in_the_file_and_the_buffer_is_left_as_it_is() {
        let size = |bytes: &[u8]| bytes[field::SIZE..field::SIZE + 8].to_vec();
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("it needs nothing");
        executor.block_on(async {
            let file = Arc::new(MemoryStore::new_writable("file", vec![1; 512]));
            let store = FutureStore {
                store: Arc::clone(&file) as Arc<dyn Store>,
                size: 0x0202_0202_0202_0202,
                identity: StoreIdentity::own(),
            };
            let header = Buf::zeroed(512).into_foreign();
            let (result, header) = store.read_at(header, HostOffset::ZERO).await;
            result.expect("it is there");
            assert_eq!(size(&header), [2; 8]);
            for at in [0, field::SIZE + 3] {
                let mut buf = Buf::zeroed(512 - at).into_foreign();
                buf.fill(3);
                let (result, buf) = store.write_at(buf, HostOffset::new(at as u64)).await;
                result.expect("it is writable");
                assert_eq!(*buf, vec![3; 512 - at]);
                let there = read_exact(&*file, HostOffset::ZERO, 512).await.expect("it is there");
                assert_eq!(size(&there), [1; 8]);
                assert_eq!(there[511], 3);
            }
        });
    }

    #[test]
    fn only_what_lies_in_the_buffer_is_patched() {
        let mut buf = Buf::zeroed(8);
        patch(&mut buf, HostOffset::new(field::SIZE as u64 - 5), &[7; 8]);
        assert_eq!(&*buf, [0, 0, 0, 0, 0, 7, 7, 7]);
        buf.fill(0);
        patch(&mut buf, HostOffset::new(field::SIZE as u64 + 6), &[7; 8]);
        assert_eq!(&*buf, [7, 7, 0, 0, 0, 0, 0, 0]);
        buf.fill(0);
        patch(&mut buf, HostOffset::new(field::SIZE as u64 + 8), &[7; 8]);
        assert_eq!(&*buf, [0; 8]);
    }
}
