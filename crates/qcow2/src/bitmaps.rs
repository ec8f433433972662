//! Reading the dirty bitmaps that images store.
//!
//! A bitmap is read piece by piece as it is asked for: of one of half a gigabyte no more than a
//! few clusters are in memory.

use crate::header_io::read_header;
use crate::snapshots::list_bitmaps;
use mica_block::{Error, ErrorKind, Images, Result, Store, read_exact};
use mica_qcow2_format::{BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapTableEntry, Header};
use mica_units::{ClusterBits, GuestOffset, GuestRange};
use std::path::PathBuf;
use std::sync::Arc;

/// Runs of a bitmap after which [`Bitmap::runs`] ends.
const RUNS_MANY: usize = 4096;
/// Clusters of a bitmap that it reads at most.
const CLUSTERS_MAX: u64 = 16;

/// A dirty bitmap that an image stores.
pub struct Bitmap {
    store: Arc<dyn Store>,
    place: BitmapPlace,
}

/// A bitmap without the file that has it, so that this may be closed.
#[derive(Clone)]
pub(crate) struct BitmapPlace {
    entry: BitmapEntry,
    cluster_bits: ClusterBits,
    disk_bytes: u64,
}

/// The bitmap called `name` of the uppermost of the images at `paths` that has one, in the order
/// from the base, of which the last one is a qcow2 image.
///
/// # Errors
/// `NotFound` if none has it, with the names that there are; `Corrupt` if it does not match the
/// data; else why an image cannot be read.
pub async fn find_bitmap(images: &dyn Images, paths: &[PathBuf], name: &str) -> Result<Bitmap> {
    let mut there = Vec::new();
    for path in paths.iter().rev() {
        let found = async {
            let store = images.open(path)?.store;
            let header = read_header(&*store).await?;
            let found = find_in(&store, &header, name, &mut there).await?;
            Ok::<_, Error>((found, header.backing))
        };
        let (found, below) = found.await.map_err(|error| error.wrap(path.display().to_string()))?;
        if let Some(found) = found {
            return Ok(found);
        }
        // A raw base has no bitmaps, whatever a guest wrote into it.
        if below.is_none_or(|below| below.format.as_deref() != Some("qcow2")) {
            break;
        }
    }
    Err(unknown(name, &there))
}

/// The bitmap called `name` of the image in `store`, which has this `header`.
///
/// # Errors
/// As [`find_bitmap`].
pub async fn open_bitmap(store: &Arc<dyn Store>, header: &Header, name: &str) -> Result<Bitmap> {
    let mut there = Vec::new();
    let found = find_in(store, header, name, &mut there).await?;
    found.ok_or_else(|| unknown(name, &there))
}

/// The error for a bitmap called `name` that is not among those that are `there`.
pub(crate) fn unknown(name: &str, there: &[String]) -> Error {
    let there = if there.is_empty() { "it has none".to_owned() } else { there.join(", ") };
    Error::new(ErrorKind::NotFound, format!("the image has no bitmap {name:?}: {there}"))
}

async fn find_in(
    store: &Arc<dyn Store>,
    header: &Header,
    name: &str,
    there: &mut Vec<String>,
) -> Result<Option<Bitmap>> {
    for entry in list_bitmaps(&**store, header).await? {
        if entry.name != name {
            there.push(entry.name);
            continue;
        }
        if entry.in_use || !header.autoclear.bitmaps_consistent {
            let context = format!(
                "its bitmap {name:?} is inconsistent: a writer has not saved it, and it cannot be \
                 used"
            );
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        let store = Arc::clone(store);
        let (cluster_bits, disk_bytes) = (header.cluster_bits, header.disk_bytes());
        let place = BitmapPlace { entry, cluster_bits, disk_bytes };
        return Ok(Some(Bitmap { store, place }));
    }
    Ok(None)
}

impl BitmapPlace {
    /// The bitmap in `store`, where it was found.
    pub(crate) fn of(&self, store: &Arc<dyn Store>) -> Bitmap {
        Bitmap { store: Arc::clone(store), place: self.clone() }
    }
}

impl Bitmap {
    /// Where it is.
    pub(crate) fn place(&self) -> BitmapPlace {
        self.place.clone()
    }

    /// Whether whoever writes the image has to keep it true.
    pub(crate) fn is_enabled(&self) -> bool {
        self.place.entry.auto
    }

    /// Bytes of the disk that it is of.
    pub fn disk_bytes(&self) -> u64 {
        self.place.disk_bytes
    }

    /// Which parts of `range` are dirty: lengths in bytes, from its start, as far as that takes a
    /// bounded amount of memory. What is beyond the disk that it covers is not.
    ///
    /// # Errors
    /// Why it cannot be read.
    pub async fn runs(&self, range: GuestRange) -> Result<Vec<(u64, bool)>> {
        let mut runs = Runs::default();
        let (mut at, mut clusters) = (range.start(), 0);
        while at < range.end() && runs.list.len() < RUNS_MANY && clusters < CLUSTERS_MAX {
            let index = at.bytes() >> self.cluster_span_bits();
            let end = (index + 1) << self.cluster_span_bits();
            let part = GuestRange::between(at, GuestOffset::new(end.min(range.end().bytes())));
            let part = part.expect("the part of a cluster of the bitmap");
            match self.table_entry(index).await? {
                BitmapTableEntry::Zeros => runs.push(part.len(), false),
                BitmapTableEntry::Ones => runs.push(part.len(), true),
                BitmapTableEntry::Data(host) => {
                    let len =
                        usize::try_from(self.place.cluster_bits.bytes()).expect("at most 2 MiB");
                    let bits = read_exact(&*self.store, host, len).await?;
                    self.append(part, &bits, &mut runs);
                    clusters += 1;
                }
            }
            at = part.end();
        }
        Ok(runs.list)
    }

    /// How much of the disk a cluster of the bitmap covers, as a power of two.
    fn cluster_span_bits(&self) -> u32 {
        self.place.cluster_bits.bits() + 3 + u32::from(self.place.entry.granularity_bits)
    }

    async fn table_entry(&self, index: u64) -> Result<BitmapTableEntry> {
        if index >= u64::from(self.place.entry.table_entries) {
            return Ok(BitmapTableEntry::Zeros);
        }
        let at = self.place.entry.table_offset.checked_add(index * BITMAP_TABLE_ENTRY_BYTES);
        let at = at.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a bitmap beyond 64 bits"))?;
        let bytes = read_exact(&*self.store, at, 8).await?;
        let entry = bytes.first_chunk().copied().expect("eight bytes were read");
        BitmapTableEntry::decode(u64::from_be_bytes(entry), self.place.cluster_bits)
    }

    /// Appends what `bits`, a cluster of the bitmap, say of `part`.
    fn append(&self, part: GuestRange, bits: &[u8], runs: &mut Runs) {
        let granularity = u32::from(self.place.entry.granularity_bits);
        let base = part.start().bytes() >> self.cluster_span_bits() << self.cluster_span_bits();
        let mut at = part.start().bytes();
        while at < part.end().bytes() {
            let bit = (at - base) >> granularity;
            let byte = bits[usize::try_from(bit / 8).expect("within a cluster")];
            // Most bytes are all alike.
            let (alike, is_dirty) = match byte {
                0 => (8 - bit % 8, false),
                u8::MAX => (8 - bit % 8, true),
                byte => (1, byte >> (bit % 8) & 1 == 1),
            };
            let end = (base + ((bit + alike) << granularity)).min(part.end().bytes());
            runs.push(end - at, is_dirty);
            at = end;
        }
    }
}

#[derive(Default)]
struct Runs {
    list: Vec<(u64, bool)>,
}

impl Runs {
    fn push(&mut self, len: u64, is_dirty: bool) {
        match self.list.last_mut() {
            Some((before, was_dirty)) if *was_dirty == is_dirty => *before += len,
            _ => self.list.push((len, is_dirty)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::done_at_once;
    use mica_store::MemoryStore;
    use mica_units::HostOffset;

    /// A bitmap of three clusters of 512 bytes, with a bit for 512 bytes: zeros, ones, and `data`.
    fn bitmap(data: &[u8]) -> Bitmap {
        const DATA_AT: u64 = 1024;
        let mut bytes = vec![0; 512];
        let entries = [BitmapTableEntry::Zeros, BitmapTableEntry::Ones];
        let entries = entries.into_iter().chain([BitmapTableEntry::Data(HostOffset::new(DATA_AT))]);
        for (entry, at) in entries.zip((0..).step_by(8)) {
            bytes[at..at + 8].copy_from_slice(&entry.encode().to_be_bytes());
        }
        bytes.resize(1024, 0);
        bytes.extend_from_slice(data);
        bytes.resize(1024 + 512, 0);
        Bitmap {
            store: Arc::new(MemoryStore::new("bitmap", bytes)),
            place: BitmapPlace {
                entry: BitmapEntry {
                    name: "b".to_owned(),
                    table_offset: HostOffset::ZERO,
                    table_entries: 3,
                    granularity_bits: 9,
                    in_use: false,
                    auto: true,
                },
                cluster_bits: ClusterBits::new(9).unwrap(),
                disk_bytes: 4 << 20,
            },
        }
    }

    fn runs(bitmap: &Bitmap, start: u64, len: u64) -> Vec<(u64, bool)> {
        let range = GuestRange::new(GuestOffset::new(start), len).unwrap();
        done_at_once(bitmap.runs(range))
    }

    #[test]
    fn bits_are_taken_from_the_lowest_and_runs_are_joined_across_clusters() {
        const SPAN: u64 = 512 * 8 * 512;
        // The second and third bit, the eighth, and all of the next byte.
        let bitmap = bitmap(&[0b1000_0110, 0xff, 0]);
        assert_eq!(
            runs(&bitmap, 0, 3 * SPAN + 512),
            [
                (SPAN, false),
                (SPAN, true),
                (512, false),
                (1024, true),
                (4 * 512, false),
                (9 * 512, true),
                (SPAN - 16 * 512 + 512, false)
            ]
        );
        // From within a bit to within another.
        assert_eq!(runs(&bitmap, 2 * SPAN + 700, 1000), [(836, true), (164, false)]);
    }
}
