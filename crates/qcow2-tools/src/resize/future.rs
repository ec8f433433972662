//! An image as it will be: the header seen here already has the new size, while the file still has
//! the old one. So the writing engine prepares the new part of a disk before anyone else sees it.
//!
//! It sees no bitmaps, which are of the old size and none of its business: what it writes is beyond
//! what they are about. Those of the file stay what they are.

use mica_block::{
    IoFuture, LocalFuture, OpenImage, Result, Run, Space, Store, StoreIdentity, Witness,
};
use mica_qcow2_format::bits::BITMAPS_CONSISTENT;
use mica_qcow2_format::{Version, field};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// Where the last byte of the header ends that is shown otherwise.
const HEADER_END: u64 = BITMAPS_AT as u64 + 1;

/// Where the byte is that says whether bitmaps are true: the lowest one of a number.
const BITMAPS_AT: usize = field::AUTOCLEAR + 7;
const BITMAPS: u8 = BITMAPS_CONSISTENT.to_be_bytes()[7];

/// The `image` of this `version` as it will be with `size` bytes.
pub(super) fn with_size(image: &OpenImage, size: u64, version: Version) -> OpenImage {
    let (store, identity) = (Arc::clone(&image.store), StoreIdentity::own());
    let has_bitmaps = version == Version::V3;
    OpenImage {
        store: Arc::new(FutureStore { store, size, has_bitmaps, identity }),
        ..image.clone()
    }
}

/// A store whose header shows a different size than the file holds, and no bitmaps.
struct FutureStore {
    store: Arc<dyn Store>,
    size: u64,
    /// Whether the header says anything about bitmaps.
    has_bitmaps: bool,
    identity: StoreIdentity,
}

/// Puts the part of the size field `field` that lies in `buf`, read from `offset`, into it.
fn patch(buf: &mut Buf, offset: HostOffset, field: &[u8]) {
    for (at, byte) in (field::SIZE..).zip(field) {
        if let Some(within) = within(buf, offset, at) {
            buf.put(within, &[*byte]);
        }
    }
}

/// Makes the bit that says that bitmaps are true what it is in `as_in`, if it lies in `buf`, read
/// from `offset`.
fn patch_bitmaps(buf: &mut Buf, offset: HostOffset, as_in: u8) {
    if let Some(within) = within(buf, offset, BITMAPS_AT) {
        let byte = buf[within] & !BITMAPS | as_in & BITMAPS;
        buf.put(within, &[byte]);
    }
}

/// Where the header's byte `at` is in `buf`, read from `offset`, if it is there.
fn within(buf: &Buf, offset: HostOffset, at: usize) -> Option<usize> {
    let within = (at as u64).checked_sub(offset.bytes())?;
    usize::try_from(within).ok().filter(|within| *within < buf.len())
}

impl Store for FutureStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let read = self.store.read_at(buf, offset);
        let (field, has_bitmaps) = (self.size.to_be_bytes(), self.has_bitmaps);
        IoFuture::boxed(async move {
            let (result, mut buf) = read.await;
            patch(&mut buf, offset, &field);
            if has_bitmaps {
                patch_bitmaps(&mut buf, offset, 0);
            }
            (result, buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if offset.bytes() >= HEADER_END {
            return self.store.write_at(buf, offset);
        }
        let (store, has_bitmaps) = (Arc::clone(&self.store), self.has_bitmaps);
        IoFuture::boxed(async move {
            let there = Buf::new(usize::try_from(HEADER_END).expect("small"));
            // What is written stays as it is: the file gets a copy.
            let mut header = Buf::from_slice(&buf);
            match store.read_at(there, HostOffset::ZERO).await {
                (Ok(()), there) => {
                    patch(&mut header, offset, &there[field::SIZE..field::SIZE + 8]);
                    if has_bitmaps {
                        patch_bitmaps(&mut header, offset, there[BITMAPS_AT]);
                    }
                }
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
    use super::{BITMAPS_AT, FutureStore, patch, patch_bitmaps};
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
                has_bitmaps: true,
                identity: StoreIdentity::own(),
            };
            let header = Buf::zeroed(512).into_foreign();
            let (result, header) = store.read_at(header, HostOffset::ZERO).await;
            result.expect("it is there");
            assert_eq!(size(&header), [2; 8]);
            assert_eq!(header[BITMAPS_AT], 0, "no bitmaps");
            for at in [0, field::SIZE + 3] {
                let mut buf = Buf::zeroed(512 - at).into_foreign();
                buf.fill(2);
                let (result, buf) = store.write_at(buf, HostOffset::new(at as u64)).await;
                result.expect("it is writable");
                assert_eq!(*buf, vec![2; 512 - at]);
                let there = read_exact(&*file, HostOffset::ZERO, 512).await.expect("it is there");
                assert_eq!(size(&there), [1; 8]);
                assert_eq!(there[511], 2);
                assert_eq!(there[BITMAPS_AT], 3, "the bitmaps are what they were");
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
        buf.fill(4);
        patch_bitmaps(&mut buf, HostOffset::new(BITMAPS_AT as u64 - 7), 0xff);
        assert_eq!(&*buf, [4, 4, 4, 4, 4, 4, 4, 5]);
        patch_bitmaps(&mut buf, HostOffset::new(BITMAPS_AT as u64 - 7), 0);
        patch_bitmaps(&mut buf, HostOffset::new(BITMAPS_AT as u64 + 1), 0xff);
        patch_bitmaps(&mut buf, HostOffset::new(BITMAPS_AT as u64 - 8), 0xff);
        assert_eq!(&*buf, [4; 8]);
    }
}
