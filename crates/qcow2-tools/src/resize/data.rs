//! Images that keep their data in a separate file: cluster by cluster where the guest has them.

use super::{Resizer, len_of};
use mica_block::{
    Error, ErrorKind, Images, OpenImage, OpenedImages, Result, RunKind, read_exact, write_all,
};
use mica_qcow2::FileSpace;
use mica_qcow2::{open_data_file, read_header};
use mica_qcow2_format::{Header, L1Entry, L2Entry};
use mica_rt::Buf;
use mica_units::{ClusterBits, GuestOffset, HostOffset};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a device that are looked at together.
const READ_BYTES: u64 = 1 << 20;

/// The sectors of a device have as many bytes at most.
const SECTOR_BYTES_MAX: u64 = 4096;

/// The file that holds the data of an image.
pub(super) struct DataFile {
    path: PathBuf,
    image: OpenImage,
    raw: bool,
}

impl DataFile {
    /// Opens the data file of the image at `path`, if it has one.
    pub(super) fn open(images: &dyn Images, path: &Path, header: &Header) -> Result<Option<Self>> {
        if !header.incompatible.external_data_file {
            return Ok(None);
        }
        let (path, image) = open_data_file(images, path, header, true)?;
        Ok(Some(Self { path, image, raw: header.autoclear.raw_external }))
    }

    /// Whether it is a raw disk by itself.
    pub(super) fn is_raw(&self) -> bool {
        self.raw
    }

    /// Makes `images` pass it to whoever opens it.
    pub(super) fn held_by(&self, images: &mut OpenedImages) {
        images.add(&self.path, self.image.clone());
    }

    /// Extends it to a disk of `new` bytes, with nothing but zeros after the `old` ones. Returns
    /// the length that it had.
    ///
    /// # Errors
    /// `Unsupported` if it is a raw disk with data behind its end: that is not ours to remove; or a
    /// device that is too short.
    pub(super) async fn lengthen(&self, old: u64, new: u64, bits: ClusterBits) -> Result<u64> {
        let store = &*self.image.store;
        let len = store.len()?;
        // A writer may have filled the last cluster of the disk.
        let ours = old.next_multiple_of(bits.bytes());
        if self.is_device() {
            self.use_more_of_device((old, ours), new).await?;
            return Ok(len);
        }
        if self.raw && len > ours {
            let behind = store.run_at(HostOffset::new(ours), len - ours)?;
            if behind.kind == RunKind::Data || behind.len < len - ours {
                return Err(self.has_more(&format!("cut it off with `truncate -s {old}` first")));
            }
        }
        // If the file system does not allow it, the file is as it was.
        self.set_len(new).await?;
        if len > old {
            store.set_len(old).await.map_err(|error| error.wrap(store.name()))?;
            self.set_len(new).await?;
        }
        Ok(len)
    }

    /// As [`Self::lengthen`], for a device: it keeps its length, which must be enough. Of a disk of
    /// `old` bytes the clusters end at `ours`.
    async fn use_more_of_device(&self, (old, ours): (u64, u64), new: u64) -> Result<()> {
        let store = &*self.image.store;
        let len = store.len()?;
        if len < new {
            let context = format!(
                "{} is a block device of {len} bytes, and the disk of {new} would not fit: make \
                 it longer first",
                store.name()
            );
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        let mut at = ours;
        // Nothing else tells what a device has.
        while self.raw && at < new {
            let piece = len_of(READ_BYTES.min(new - at));
            if read_exact(store, HostOffset::new(at), piece).await?.iter().any(|byte| *byte != 0) {
                // The tool takes whole sectors. Where the disk ends, the rest of one is its own.
                let end = new.next_multiple_of(SECTOR_BYTES_MAX).min(len);
                let device = store.name();
                let cure =
                    format!("`blkdiscard -z -o {ours} -l {} {device}` zeroes it", end - ours);
                return Err(self.has_more(&cure));
            }
            at += piece as u64;
        }
        let written = async {
            let zeros = Buf::zeroed(len_of(ours.min(new) - old));
            write_all(store, zeros, HostOffset::new(old)).await?;
            store.sync().await
        };
        written.await.map_err(|error| error.wrap(store.name()))
    }

    fn has_more(&self, cure: &str) -> Error {
        let name = self.image.store.name();
        let what =
            format!("{name} holds data behind the end of the disk, which would show: {cure}");
        Error::new(ErrorKind::Unsupported, what)
    }

    fn is_device(&self) -> bool {
        self.image.store.identity().is_device()
    }

    /// Truncates it to a disk of `size` bytes, if it can be: the disk has its length already, and
    /// the image names nothing behind it. A device keeps its own length.
    pub(super) async fn shorten(&self, size: u64) -> Result<()> {
        let store = &*self.image.store;
        if self.is_device() || store.len()? <= size {
            return Ok(());
        }
        match self.set_len(size).await {
            // Who reads a raw disk by itself would see another length.
            Err(error) if self.raw => Err(error),
            _ => Ok(()),
        }
    }

    async fn set_len(&self, len: u64) -> Result<()> {
        let store = &*self.image.store;
        let done = async {
            store.set_len(len).await?;
            store.sync().await
        };
        done.await.map_err(|error| error.wrap(store.name()))
    }
}

impl Resizer {
    /// Allocates in the data file every cluster by which the disk grows to `size`, so that readers
    /// of that file alone and of the image see the same, whatever is written through either.
    pub(super) async fn place_new(&mut self, size: u64) -> Result<()> {
        let l2 = self.header.l2_format();
        let bits = l2.cluster_bits;
        let first = bits.guest_cluster_up(GuestOffset::new(self.disk_bytes()));
        let end = bits.guest_cluster_up(GuestOffset::new(size));
        if first >= end {
            return Ok(());
        }
        let store = Arc::clone(&self.image.store);
        let mut l1 = self.read_l1().await?;
        let (from, to) = (l2.table_of(first), l2.l1_index(GuestOffset::new(size - 1)));
        let space = FileSpace::open(Arc::clone(&store), &self.header).await?;
        for (index, entry) in (from..=to).zip(&mut l1[len_of(from)..]) {
            let (at, mut table) = match L1Entry(*entry).decode(bits)? {
                Some(at) => (at, read_exact(&*store, at, self.cluster_len()).await?),
                None => (space.take(1).await?, Buf::zeroed(self.cluster_len())),
            };
            space.check(at)?;
            let start = l2.first_of_table(index);
            let stop = end.min(start.saturating_add(l2.entries()));
            for cluster in first.max(start).up_to(stop) {
                // In the data file a cluster is where it is on the disk.
                let says = L2Entry::Data(HostOffset::new(bits.start_of(cluster).bytes()));
                let index = len_of(l2.index_of(cluster));
                l2.put_raw(table.own_bytes(), index, l2.encode(says, true));
            }
            write_all(&*store, table, at).await?;
            *entry = L1Entry::encode(at, true).0;
        }
        space.commit().await?;
        // The refcount table may have moved in the meantime.
        self.header = read_header(&*store).await?;
        let named: Vec<u8> =
            l1[len_of(from)..=len_of(to)].iter().flat_map(|entry| entry.to_be_bytes()).collect();
        let at = self.header.l1_offset.bytes() + from * L1Entry::BYTES as u64;
        write_all(&*store, Buf::from_slice(&named), HostOffset::new(at)).await?;
        store.sync().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use mica_block::{Identity, ProofSlot};
    use mica_store::MemoryStore;

    fn data_file(store: MemoryStore, raw: bool) -> DataFile {
        let identity = Identity { device: 1, inode: 1, len: 8192, mtime_ns: 1, ctime_ns: 1 };
        let image = OpenImage { store: Arc::new(store), identity, content: ProofSlot::default() };
        DataFile { path: PathBuf::from("data"), image, raw }
    }

    fn shortened(data: &DataFile) -> Result<()> {
        data.shorten(4096).now_or_never().expect("a store of memory never waits")
    }

    #[test]
    fn data_file_that_cannot_be_cut_is_no_error_unless_it_is_a_raw_disk() {
        let fixed = || MemoryStore::new("data", vec![0; 8192]);
        shortened(&data_file(fixed(), false)).expect("nothing is named there");
        shortened(&data_file(fixed(), true)).expect_err("it would have another length");
    }

    #[test]
    fn data_file_that_can_be_cut_ends_with_the_disk() {
        let data = data_file(MemoryStore::new_writable("data", vec![0; 8192]), false);
        shortened(&data).expect("it is cut");
        assert_eq!(data.image.store.len().expect("memory"), 4096);
    }
}
