//! Changes the dirty bitmaps of an image that is not in use, as `qemu-img bitmap` does.
//!
//! ```text
//! new tables and a new directory, counted ─▶ durable
//!   ─▶ header that names the new directory ─▶ what only the old directory names is freed
//! ```
//!
//! Invariants
//! - I1 A header that says that bitmaps are true names a directory that is durable, and so is what
//!   that names. A power cut leaves the old bitmaps or the new ones, those of the length that the
//!   disk has; at worst clusters leak.
//! - I2 A bitmap that is inconsistent stays so, whatever is done with others. If a program that
//!   does not know bitmaps wrote to the image, all of them are, and end with the first change, as
//!   in QEMU. What they name is not freed: that program may have used it for something else.
//! - I3 A cluster is freed only after nothing durable names it.

mod resize;
mod room;

pub(crate) use resize::ResizedBitmaps;

use crate::recover::open_for_change;
use mica_block::{Error, ErrorKind, Images, Result, Store, read_exact, write_all};
use mica_qcow2::snapshots::list_bitmaps;
use mica_qcow2::{Bitmap, FileSpace, open_bitmap, read_header};
use mica_qcow2_format::bits::BITMAPS_CONSISTENT;
use mica_qcow2_format::{
    BITMAP_BYTES_MAX, BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapTableEntry, BitmapsExtension,
    Header, HeaderChange, L1Entry, bitmap_bytes, field,
};
use mica_rt::{Buf, Pace};
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::path::Path;
use std::sync::Arc;

/// Granularities of new bitmaps, if none is stated: that of clusters within these bounds.
const GRANULARITY_DEFAULT: [u64; 2] = [4 << 10, 64 << 10];
const GRANULARITY_BITS: std::ops::RangeInclusive<u32> = 9..=31;
const NAME_BYTES_MAX: usize = 1023;
const COUNT_MAX: usize = 65535;
/// Longest directory of bitmaps.
const DIRECTORY_BYTES_MAX: usize = 64 << 20;

/// Something that is done with a bitmap.
pub enum BitmapAction {
    /// It is new, and without dirty parts, with this granularity in bytes.
    Add(Option<u64>),
    /// It is removed.
    Remove,
    /// It has no dirty parts any more.
    Clear,
    /// Writers keep it true from now on.
    Enable,
    /// Writers leave it as it is from now on.
    Disable,
    /// What is dirty in this bitmap of the same image becomes dirty in it.
    Merge(String),
    /// The same, with a bitmap of another image.
    MergeFrom(Bitmap),
}

/// What becomes of a bitmap of the image.
enum Change {
    /// Nothing but its flags.
    Keep,
    /// Its dirty parts are these bits.
    Bits(Vec<u8>),
    /// It has no dirty parts.
    Empty,
}

/// What ended with a change because nothing said any more that it was true (I2).
#[derive(Debug)]
pub struct Ended {
    /// The bitmaps that nobody asked to remove.
    pub also: Vec<String>,
    /// Whether clusters that they named may leak.
    pub may_leak: bool,
}

/// An image whose bitmaps are changed.
struct Editor {
    store: Arc<dyn Store>,
    header: Header,
    entries: Vec<BitmapEntry>,
    /// The names of those that end with the first change (I2).
    ending: Vec<String>,
}

/// Does `actions` with the bitmap called `name` of the image at `path`: all of them, or none.
///
/// # Errors
/// `NotFound` if there is no such bitmap; `Invalid` for an action that makes no sense; `Corrupt` if
/// the bitmap is inconsistent, and is not only to be removed; `Unsupported` if the image cannot
/// have bitmaps; else any error of the store.
pub async fn edit_bitmap(
    images: &dyn Images,
    path: &Path,
    name: &str,
    actions: Vec<BitmapAction>,
) -> Result<Ended> {
    let (image, header) = open_for_change(images, path).await?;
    let step = async {
        room::check_version(&header)?;
        let entries = list_bitmaps(&*image.store, &header).await?;
        let ending = ending(&*image.store, &header).await?;
        let store = Arc::clone(&image.store);
        Editor { store, header, entries, ending }.edit(name, actions).await
    };
    step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
}

/// The names of the bitmaps of the image of `header` of which nothing says any more that they are
/// true, as far as they can be read.
async fn ending(store: &dyn Store, header: &Header) -> Result<Vec<String>> {
    let list = async || {
        let bytes = first_cluster(store, header).await?;
        // As if they were true.
        let (at, bits) = (field::AUTOCLEAR, BITMAPS_CONSISTENT.to_be_bytes());
        let mut bytes = bytes.to_vec();
        bytes[at..].iter_mut().zip(bits).for_each(|(byte, bits)| *byte |= bits);
        let header = Header::decode(&bytes, store.len()?)?;
        list_bitmaps(store, &header).await
    };
    if !header.stale_bitmaps {
        return Ok(Vec::new());
    }
    let list = match list().await {
        // Whoever wrote to the image may have overwritten them.
        Err(error) if error.kind() != ErrorKind::Io => Vec::new(),
        list => list?,
    };
    Ok(list.into_iter().map(|entry| entry.name).collect())
}

impl Editor {
    /// Of an image whose bitmaps, if it has any, are true.
    fn new(store: Arc<dyn Store>, header: Header, entries: Vec<BitmapEntry>) -> Self {
        Self { store, header, entries, ending: Vec::new() }
    }

    async fn edit(mut self, name: &str, actions: Vec<BitmapAction>) -> Result<Ended> {
        let mut change = Change::Keep;
        let mut removed = None;
        for action in actions {
            let at = self.entries.iter().position(|entry| entry.name == name);
            let at = match (&action, at) {
                (BitmapAction::Add(granularity), _) => {
                    let entry = room::new_entry(&self.header, &self.entries, name, *granularity)?;
                    self.entries.push(entry);
                    self.ending.retain(|ending| ending != name);
                    change = Change::Empty;
                    continue;
                }
                (BitmapAction::Remove, None) if self.ending.iter().any(|ending| ending == name) => {
                    self.ending.retain(|ending| ending != name);
                    change = Change::Keep;
                    continue;
                }
                (_, None) => return Err(self.unknown(name)),
                (BitmapAction::Remove, Some(at)) => {
                    removed = Some(self.entries.remove(at));
                    change = Change::Keep;
                    continue;
                }
                (_, Some(at)) => at,
            };
            if self.entries[at].in_use {
                let context = format!(
                    "the bitmap {name:?} is inconsistent, as a writer has not saved it: it can only \
                     be removed"
                );
                return Err(Error::new(ErrorKind::Corrupt, context));
            }
            match action {
                BitmapAction::Clear => change = Change::Empty,
                BitmapAction::Enable => self.entries[at].auto = true,
                BitmapAction::Disable => self.entries[at].auto = false,
                BitmapAction::Merge(source) => {
                    let source = open_bitmap(&self.store, &self.header, &source).await?;
                    change = self.merged(at, change, &source).await?;
                }
                BitmapAction::MergeFrom(source) => {
                    change = self.merged(at, change, &source).await?;
                }
                BitmapAction::Add(_) | BitmapAction::Remove => {}
            }
        }
        self.write(name, change, removed).await
    }

    fn unknown(&self, name: &str) -> Error {
        let ending = self.ending.join(", ");
        if self.ending.iter().any(|ending| ending == name) {
            let context = format!(
                "the bitmap {name:?} is inconsistent, as a program that does not know bitmaps wrote \
                 to the image: --remove it, and --add it again"
            );
            return Error::new(ErrorKind::Corrupt, context);
        }
        let names: Vec<_> = self.entries.iter().map(|entry| entry.name.as_str()).collect();
        let there = match (names.is_empty(), self.header.stale_bitmaps) {
            (false, _) => names.join(", "),
            (true, false) => "it has none".to_owned(),
            (true, true) if ending.is_empty() => {
                "those that it has are inconsistent, and cannot be read: --add ends them".to_owned()
            }
            (true, true) => {
                format!("{ending} are inconsistent: --remove them, and --add them again")
            }
        };
        Error::new(ErrorKind::NotFound, format!("no bitmap {name:?}: {there}"))
    }

    fn bytes_of(&self, entry: &BitmapEntry) -> u64 {
        bitmap_bytes(entry.granularity_bits, self.header.disk_bytes())
    }

    /// What the bitmap at `at`, which is to have `change`, becomes with what `source` has.
    async fn merged(&self, at: usize, change: Change, source: &Bitmap) -> Result<Change> {
        let entry = &self.entries[at];
        let len = usize::try_from(self.bytes_of(entry)).expect("at most 512 MiB");
        let mut bits = match change {
            Change::Bits(bits) => bits,
            Change::Empty => vec![0; len],
            Change::Keep => {
                let mut bits = vec![0; len];
                let own = open_bitmap(&self.store, &self.header, &entry.name).await?;
                self.add(entry, &own, &mut bits).await?;
                bits
            }
        };
        if source.disk_bytes() != self.header.disk_bytes() {
            return invalid("the bitmap to be merged is of a disk of another length".to_owned());
        }
        self.add(entry, source, &mut bits).await?;
        Ok(Change::Bits(bits))
    }

    /// Sets those of `bits`, which are of `entry`, that cover something dirty in `source`.
    async fn add(&self, entry: &BitmapEntry, source: &Bitmap, bits: &mut [u8]) -> Result<()> {
        /// Runs after which other tasks get a turn.
        const RUNS_PER_TURN: u64 = 1024;
        let mut pace = Pace::new(RUNS_PER_TURN);
        let end = GuestOffset::new(self.header.disk_bytes());
        let mut at = GuestOffset::ZERO;
        while let Some(left) = GuestRange::between(at, end).filter(|left| !left.is_empty()) {
            for (len, is_dirty) in source.runs(left).await? {
                pace.steps(1).await;
                let next = GuestOffset::new(at.bytes() + len);
                if is_dirty {
                    let first = at.bytes() >> entry.granularity_bits;
                    let last = (next.bytes() - 1) >> entry.granularity_bits;
                    set(bits, first, last);
                }
                at = next;
            }
        }
        Ok(())
    }

    /// Writes the bitmaps, of which the one called `name` has a `change`, and frees what they no
    /// longer need.
    async fn write(
        mut self,
        name: &str,
        change: Change,
        removed: Option<BitmapEntry>,
    ) -> Result<Ended> {
        self.check_room().await?;
        let file_len = self.store.len()?;
        let space = FileSpace::open(Arc::clone(&self.store), &self.header).await?;
        self.protect_tables(&space).await?;
        let old_directory = self.header.bitmaps;
        let changed = self.entries.iter().position(|entry| entry.name == name);
        let mut unused: Vec<BitmapEntry> = removed.into_iter().collect();
        if let Some(at) = changed
            && !matches!(change, Change::Keep)
        {
            let before = self.entries[at].clone();
            self.entries[at].table_offset = self.put_table(&space, &before, &change).await?;
            unused.push(before);
        }
        // One that was added just now has no place yet.
        unused.retain(|entry| entry.table_offset != HostOffset::ZERO);
        let directory = self.put_directory(&space).await?;
        space.commit().await?;
        // The refcount table may have moved.
        self.header = read_header(&*self.store).await?;
        self.header.autoclear.unknown = 0;
        self.header.bitmaps = directory;
        self.header.autoclear.bitmaps_consistent = directory.is_some();
        replace_header(&*self.store, &self.header).await?;
        let bits = self.header.cluster_bits;
        for entry in &unused {
            self.free_table(&space, entry).await?;
        }
        if let Some(old) = old_directory {
            space.free(old.directory_offset, bits.clusters_for(old.directory_bytes)).await?;
        }
        space.commit().await?;
        space.give_back(file_len).await?;
        Ok(Ended { also: self.ending, may_leak: self.header.stale_bitmaps })
    }

    /// So that hostile bitmaps free no table.
    async fn protect_tables(&self, space: &FileSpace) -> Result<()> {
        let len = self.header.l1_entries as usize * L1Entry::BYTES;
        let table = read_exact(&*self.store, self.header.l1_offset, len).await?;
        for entry in table.as_chunks().0 {
            space.protect(L1Entry(u64::from_be_bytes(*entry)).offset());
        }
        Ok(())
    }

    /// Writes a table for `entry`, and its data; returns where it is.
    async fn put_table(
        &self,
        space: &FileSpace,
        entry: &BitmapEntry,
        change: &Change,
    ) -> Result<HostOffset> {
        let (store, bits) = (&*self.store, self.header.cluster_bits);
        let cluster_bytes = usize::try_from(bits.bytes()).expect("at most 2 MiB");
        let table_bytes = u64::from(entry.table_entries) * BITMAP_TABLE_ENTRY_BYTES;
        let clusters = bits.clusters_for(table_bytes);
        let at = space.take(clusters).await?;
        let mut table = vec![0; usize::try_from(bits.bytes_of(clusters)).expect("16 MiB")];
        let all: &[u8] = if let Change::Bits(all) = change { all } else { &[] };
        for (data, to) in all.chunks(cluster_bytes).zip(table.as_chunks_mut::<8>().0) {
            if data.iter().all(|byte| *byte == 0) {
                continue;
            }
            let data_at = space.take(1).await?;
            let mut cluster = Buf::zeroed(cluster_bytes);
            cluster.put(0, data);
            write_all(store, cluster, data_at).await?;
            *to = BitmapTableEntry::Data(data_at).encode().to_be_bytes();
        }
        write_all(store, Buf::from_slice(&table), at).await?;
        Ok(at)
    }

    /// Writes the directory; `None` if there are no bitmaps.
    async fn put_directory(&self, space: &FileSpace) -> Result<Option<BitmapsExtension>> {
        if self.entries.is_empty() {
            return Ok(None);
        }
        let mut bytes = room::directory(&self.entries)?;
        let directory_bytes = bytes.len() as u64;
        let clusters = self.header.cluster_bits.clusters_for(directory_bytes);
        let directory_offset = space.take(clusters).await?;
        let whole = self.header.cluster_bits.bytes_of(clusters);
        bytes.resize(usize::try_from(whole).expect("64 MiB"), 0);
        write_all(&*self.store, Buf::from_slice(&bytes), directory_offset).await?;
        let count = u32::try_from(self.entries.len()).expect("checked when they were added");
        Ok(Some(BitmapsExtension { count, directory_bytes, directory_offset }))
    }

    /// Frees the table of a bitmap, and its data.
    async fn free_table(&self, space: &FileSpace, entry: &BitmapEntry) -> Result<()> {
        let bits = self.header.cluster_bits;
        let len = u64::from(entry.table_entries) * BITMAP_TABLE_ENTRY_BYTES;
        let len = usize::try_from(len).expect("bounded by the directory's decoder");
        let table = read_exact(&*self.store, entry.table_offset, len).await?;
        for raw in table.as_chunks().0 {
            // Of one that is inconsistent the table may be anything: what it names leaks.
            if let Ok(BitmapTableEntry::Data(data)) =
                BitmapTableEntry::decode(u64::from_be_bytes(*raw), bits)
            {
                space.free(data, 1).await?;
            }
        }
        space.free(entry.table_offset, bits.clusters_for(len as u64)).await
    }

    /// Makes sure that [`replace_header`] can write a header that names bitmaps.
    ///
    /// # Errors
    /// As [`HeaderChange::plan`].
    async fn check_room(&self) -> Result<()> {
        room::check_header(&self.header, &first_cluster(&*self.store, &self.header).await?)
    }
}

async fn first_cluster(store: &dyn Store, header: &Header) -> Result<Buf> {
    let len = usize::try_from(header.cluster_bits.bytes()).expect("at most 2 MiB");
    read_exact(store, HostOffset::ZERO, len).await
}

/// Writes `header`, durably: a power cut leaves the old one or the new one.
///
/// # Errors
/// As [`HeaderChange::plan`]; any error of the store.
pub(crate) async fn replace_header(store: &dyn Store, header: &Header) -> Result<()> {
    let HeaderChange { name, sector } =
        HeaderChange::plan(&first_cluster(store, header).await?, header)?;
    for (at, bytes) in name.into_iter().chain([(0, sector)]) {
        let at = HostOffset::new(at as u64);
        write_all(store, Buf::from_slice(&bytes), at).await?;
        store.sync().await?;
    }
    Ok(())
}

/// Sets the bits from `first` to `last`.
fn set(bits: &mut [u8], first: u64, last: u64) {
    let at = |bit: u64| usize::try_from(bit / 8).expect("within memory");
    let (from, to) = (at(first), at(last));
    let mask = |low: u64, high: u64| (u8::MAX << low) & (u8::MAX >> (7 - high));
    if from == to {
        bits[from] |= mask(first % 8, last % 8);
        return;
    }
    bits[from] |= mask(first % 8, 7);
    bits[from + 1..to].fill(u8::MAX);
    bits[to] |= mask(0, last % 8);
}

fn invalid<T>(what: String) -> Result<T> {
    Err(Error::new(ErrorKind::Invalid, what))
}

#[cfg(test)]
mod tests;
