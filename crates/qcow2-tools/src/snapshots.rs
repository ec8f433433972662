//! Internal snapshots of an image that is not in use: made, applied and deleted, as
//! `qemu-img snapshot` does.
//!
//! A snapshot is a copy of the active L1 table, and an entry in the table of snapshots. Everything
//! that the L1 table names, however deep, has one reference more. So every change here is that of a
//! few words of the header, which then name new tables; the rest is counting.
//!
//! ```text
//! new tables ─▶ dirty bit ─▶ counts that are too low ─▶ flags ─▶ the header names the new tables
//!   ─▶ counts that are too high ─▶ flags ─▶ dirty bit
//! ```
//!
//! Each step is durable before the next begins. Counts are found by walking over the image as a
//! check does, with the header that is there or is about to be there.
//!
//! Invariants
//! - I1 No count is ever lower than the number of references of what the header names, or is about
//!   to name: at worst clusters leak.
//! - I2 The header names a snapshot only when no entry of the active tables says any longer that
//!   what it shares with that snapshot is its own.
//! - I3 The header changes in one sector: a power cut leaves the old tables or the new ones.
//! - I4 Counts and flags that do not agree yet are under the dirty bit, where there is one: whoever
//!   opens the image next repairs them. Images of version 2 have none; a check repairs them.
//! - I5 An image that contradicts itself is not changed.
//! - I6 While the disk becomes that of a snapshot its bitmaps are in use. Afterwards those that are
//!   enabled are true again: all of it may have changed, and is dirty.

use crate::check::{Counted, Finding, Task, count};
use crate::recover::{Which, open_for_change, rewrite};
use mica_block::{Error, ErrorKind, Images, OpenImage, Result, Store, read_exact, write_all};
use mica_qcow2::snapshots::{SnapshotSearch, SnapshotSelector, list_bitmaps};
use mica_qcow2::{FileSpace, read_header};
use mica_qcow2_format::bits::{BITMAPS_CONSISTENT, COPIED, DIRTY, RAW_EXTERNAL};
use mica_qcow2_format::{
    BitmapEntry, BitmapFields, BitmapTableEntry, Header, L1_BYTES_MAX, L1Entry, SNAPSHOT_COUNT_MAX,
    SNAPSHOT_TABLE_BYTES_MAX, SnapshotDecoded, SnapshotEntry, Version, change_bitmap_directory,
    field,
};
use mica_rt::Buf;
use mica_units::{HostCluster, HostOffset, SECTOR_BYTES};
use std::path::Path;
use std::sync::Arc;

/// Bytes of the table of snapshots that are read at a time.
const PIECE_BYTES: usize = 1 << 18;
/// Longest name: what an entry has room for.
const NAME_BYTES_MAX: usize = u16::MAX as usize;
/// Autoclear features that stay true: bitmaps have a flag of their own.
const STILL_TRUE: u64 = BITMAPS_CONSISTENT | RAW_EXTERNAL;
/// What QEMU puts in the place of a count of instructions that nobody counted.
const NO_ICOUNT: u64 = u64::MAX;

/// An image whose snapshots are changed.
pub struct SnapshotEditor {
    image: OpenImage,
    header: Header,
    snapshots: Vec<Listed>,
}

/// A snapshot, and its entry as it is in the table.
struct Listed {
    entry: SnapshotEntry,
    bytes: Vec<u8>,
}

/// Tables that the header is about to name.
struct Tables {
    /// Those of snapshots, in their order.
    snapshots: Vec<Listed>,
    /// The active L1 table, if that is another one, and the length of the disk.
    active: Option<(Vec<u64>, u64)>,
    /// An L1 table for the last snapshot.
    copy: Option<Vec<u64>>,
}

/// The snapshots of the image at `path`, in the order of their table.
///
/// # Errors
/// If it is not an image that can be read, or the table is malformed.
pub async fn list(images: &dyn Images, path: &Path) -> Result<Vec<SnapshotEntry>> {
    let image = images.open(path)?;
    let step = async {
        let header = read_header(&*image.store).await?;
        read_snapshots(&*image.store, &header).await
    };
    let all = step.await.map_err(|error: Error| error.wrap(path.display().to_string()))?;
    Ok(all.into_iter().map(|listed| listed.entry).collect())
}

impl SnapshotEditor {
    /// Opens the image at `path` exclusively.
    ///
    /// # Errors
    /// If it is not an image that can be written, if it contradicts itself, or if it keeps its data
    /// in an external file, which cannot have snapshots.
    pub async fn open(images: &dyn Images, path: &Path) -> Result<Self> {
        let (image, header) = open_for_change(images, path).await?;
        let step = async {
            if header.incompatible.external_data_file {
                let what = "the image keeps its data in an external file: it has no snapshots";
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            let snapshots = read_snapshots(&*image.store, &header).await?;
            Ok(Self { image, header, snapshots })
        };
        step.await.map_err(|error: Error| error.wrap(path.display().to_string()))
    }

    /// The snapshots, in the order of their table.
    pub fn list(&self) -> impl Iterator<Item = &SnapshotEntry> {
        self.snapshots.iter().map(|listed| &listed.entry)
    }

    /// Makes a snapshot called `name` of the disk as it is, `now_ns` nanoseconds after 1970.
    ///
    /// # Errors
    /// `Invalid` if a snapshot has that name or id; `Limit` if the image can have no more, or if a
    /// refcount has no room for it; `Corrupt` if the image contradicts itself; otherwise those of
    /// the store.
    pub async fn create(&mut self, name: &str, now_ns: i128) -> Result<()> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            let what = format!("a snapshot has a name of 1 to {NAME_BYTES_MAX} bytes");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if self.list().any(|entry| entry.name == name || entry.id == name) {
            let what = format!("there is a snapshot {name:?} already: delete it, or take another");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if self.snapshots.len() >= SNAPSHOT_COUNT_MAX as usize {
            let what = format!("the image already has {SNAPSHOT_COUNT_MAX} snapshots");
            return Err(Error::new(ErrorKind::Limit, what));
        }
        let seconds = now_ns.div_euclid(1_000_000_000);
        let entry = SnapshotEntry {
            id: self.next_id(),
            name: name.to_owned(),
            // Where it is, is known when it has a place.
            l1_offset: HostOffset::ZERO,
            l1_entries: self.header.l1_entries,
            date_seconds: u32::try_from(seconds).unwrap_or(u32::MAX),
            date_nanoseconds: u32::try_from(now_ns.rem_euclid(1_000_000_000)).unwrap_or(0),
            vm_clock_nanoseconds: 0,
            vm_state_bytes: 0,
            disk_bytes: Some(self.header.size),
            icount: Some(NO_ICOUNT),
            extra_bytes: 0,
            unknown_extra: Vec::new(),
        };
        let l1 = self.read_l1(self.header.l1_offset, self.header.l1_entries).await?;
        let mut snapshots = std::mem::take(&mut self.snapshots);
        snapshots.push(Listed { entry, bytes: Vec::new() });
        self.change(Tables { snapshots, active: None, copy: Some(l1) }).await
    }

    /// Makes the disk what it was when the snapshot that is `wanted` was taken. What was written
    /// since is lost; the snapshots stay.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Invalid` if there are two; otherwise as [`Self::create`].
    pub async fn apply(&mut self, wanted: &SnapshotSelector) -> Result<()> {
        let SnapshotEntry { l1_offset, l1_entries, disk_bytes, .. } =
            self.snapshots[self.find(wanted)?].entry.clone();
        // It is read before a check of the whole image says the same.
        let l1_bytes = u64::from(l1_entries) * L1Entry::BYTES as u64;
        if l1_bytes > L1_BYTES_MAX || !l1_offset.is_aligned(self.header.cluster_bits.bytes()) {
            let what = format!("the L1 table of snapshot {wanted} is too long, or off a cluster");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let size = disk_bytes.unwrap_or(self.header.size);
        if self.header.l1_entries_for(size)? > l1_entries {
            let what = format!("the L1 table of snapshot {wanted} is too short for its disk");
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        if size != self.header.size && self.header.bitmaps.is_some() {
            let what = "the image has bitmaps, and the snapshot a disk of another length: remove \
                        them first";
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let l1 = self.read_l1(l1_offset, l1_entries).await?;
        let snapshots = std::mem::take(&mut self.snapshots);
        self.change(Tables { snapshots, active: Some((l1, size)), copy: None }).await
    }

    /// Deletes the snapshot that is `wanted`.
    ///
    /// # Errors
    /// As [`Self::apply`].
    pub async fn delete(&mut self, wanted: &SnapshotSelector) -> Result<()> {
        let at = self.find(wanted)?;
        let mut snapshots = std::mem::take(&mut self.snapshots);
        snapshots.remove(at);
        self.change(Tables { snapshots, active: None, copy: None }).await
    }

    fn find(&self, wanted: &SnapshotSelector) -> Result<usize> {
        let mut search = SnapshotSearch::new(wanted);
        let _ = self.list().all(|entry| search.see(entry));
        search.end().map(|(position, _)| position)
    }

    /// One more than the highest id that is a number, as in QEMU, unless a snapshot is called that:
    /// a word is to mean one of them.
    fn next_id(&self) -> String {
        let ids = self.list().filter_map(|entry| entry.id.parse::<u64>().ok());
        let mut next = ids.max().unwrap_or(0).saturating_add(1);
        while next < u64::MAX && self.list().any(|entry| entry.name == next.to_string()) {
            next += 1;
        }
        next.to_string()
    }

    /// Puts `tables` in the place of those that there are.
    async fn change(&mut self, tables: Tables) -> Result<()> {
        let changed = self.change_to(tables).await;
        let listed = match &changed {
            Ok(()) => read_snapshots(self.store(), &self.header).await?,
            // What there is now is not known.
            Err(_) => Vec::new(),
        };
        self.snapshots = listed;
        changed
    }

    async fn change_to(&mut self, tables: Tables) -> Result<()> {
        let (counted, _) = self.count(&self.header, Task::Keep).await?;
        if counted.report.corruptions > 0 || counted.report.check_errors > 0 {
            let what = "the image contradicts itself: `mica check` says how, and -r all repairs it";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        drop(counted);
        let changes_content = tables.active.is_some();
        let next = self.write_tables(tables).await?;
        self.set_dirty(true).await?;
        let (counted, overflows) = self.count(&next, Task::Keep).await?;
        if overflows {
            self.settle().await?;
            let bits = self.header.refcount_width.bits();
            let what = format!("refcounts of {bits} bits have no room for another snapshot");
            return Err(Error::new(ErrorKind::Limit, what));
        }
        rewrite(self.store(), &counted, Which::TooLow, &mut |_| {}).await?;
        let bitmaps = match changes_content {
            true => self.outdate_bitmaps().await?,
            false => Vec::new(),
        };
        self.store().sync().await?;
        self.fill_bitmaps(&bitmaps).await?;
        self.mend_flags(&next, &counted).await?;
        drop(counted);
        self.write_header(&next).await?;
        self.header = next;
        self.settle().await?;
        self.end_filling(&bitmaps).await
    }

    /// Writes new tables where nothing is; returns the header that names them.
    async fn write_tables(&mut self, tables: Tables) -> Result<Header> {
        let Tables { mut snapshots, active, copy } = tables;
        let bits = self.header.cluster_bits;
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        let mut next = self.header.clone();
        if let (Some(l1), Some(last)) = (copy, snapshots.last_mut()) {
            last.entry.l1_offset = self.put(&space, &l1_bytes(&l1)).await?;
        }
        if let Some((l1, size)) = active {
            next.l1_offset = self.put(&space, &l1_bytes(&l1)).await?;
            next.l1_entries = u32::try_from(l1.len()).unwrap_or(u32::MAX);
            next.size = size;
        } else {
            let mut table = Vec::new();
            for Listed { entry, bytes } in &snapshots {
                table.resize(table.len().next_multiple_of(8), 0);
                match bytes.is_empty() {
                    true => entry.encode(&mut table),
                    false => table.extend_from_slice(bytes),
                }
            }
            if table.len() as u64 > SNAPSHOT_TABLE_BYTES_MAX {
                let what = "the table of snapshots would become too long";
                return Err(Error::new(ErrorKind::Limit, what));
            }
            next.snapshots_offset = self.put(&space, &table).await?;
            next.snapshot_count = u32::try_from(snapshots.len()).unwrap_or(u32::MAX);
        }
        space.commit().await?;
        // The refcount table may have moved in the meantime.
        let now = read_header(self.store()).await?;
        next.refcount_table_offset = now.refcount_table_offset;
        next.refcount_table_clusters = now.refcount_table_clusters;
        debug_assert!(bits == now.cluster_bits, "it is the same image");
        self.header = now;
        Ok(next)
    }

    /// Writes a table into clusters of its own; an empty one needs none.
    async fn put(&self, space: &FileSpace, table: &[u8]) -> Result<HostOffset> {
        let count = self.header.cluster_bits.clusters_for(table.len() as u64);
        if count == 0 {
            return Ok(HostOffset::ZERO);
        }
        let at = space.take(count).await?;
        let len = usize::try_from(self.header.cluster_bits.bytes_of(count)).unwrap_or(usize::MAX);
        let mut padded = Buf::zeroed(len);
        padded.put(0, table);
        write_all(self.store(), padded, at).await?;
        Ok(at)
    }

    /// Makes counts and flags those of what the header names, and takes the dirty bit away.
    async fn settle(&mut self) -> Result<()> {
        let (counted, _) = self.count(&self.header, Task::Keep).await?;
        let mut freed = Vec::new();
        let note = &mut |cluster| freed.push(cluster);
        rewrite(self.store(), &counted, Which::Wrong, note).await?;
        self.store().sync().await?;
        self.mend_flags(&self.header, &counted).await?;
        self.set_dirty(false).await?;
        self.give_back(freed).await
    }

    /// Returns the space of clusters that have just lost their last reference to the file system:
    /// all that are free may be most of a large file.
    async fn give_back(&self, freed: Vec<HostCluster>) -> Result<()> {
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        space.put_freed(freed);
        space.give_back(0).await
    }

    async fn mend_flags(&self, header: &Header, counted: &Counted) -> Result<()> {
        let (mended, _) = self.count(header, Task::MendFlags(&counted.kept.places)).await?;
        if mended.mended > 0 {
            self.store().sync().await?;
        }
        Ok(())
    }

    /// What a walk for `task` over what `header` names counts, and whether a refcount would have no
    /// room.
    async fn count(&self, header: &Header, task: Task<'_>) -> Result<(Counted, bool)> {
        let mut overflows = false;
        let observer = &mut |finding: Finding| {
            overflows |= matches!(finding, Finding::TooManyReferences { .. });
        };
        let counted = count(Arc::clone(&self.image.store), header, task, observer).await?;
        Ok((counted, overflows))
    }

    /// Bitmaps are about what the disk was: from now on they do not match it. Returns those that
    /// are to be true afterwards: what is enabled and consistent, as all of the disk may change.
    async fn outdate_bitmaps(&self) -> Result<Vec<(usize, BitmapEntry)>> {
        let entries = list_bitmaps(self.store(), &self.header).await?;
        let is_true = |entry: &BitmapEntry| entry.auto && !entry.in_use;
        self.change_bitmaps(|_, fields| fields.in_use = true).await?;
        Ok(entries.into_iter().enumerate().filter(|(_, entry)| is_true(entry)).collect())
    }

    /// Makes all of the disk dirty in `bitmaps`, which are in use, durably. The clusters that had
    /// their bits are not named any more.
    async fn fill_bitmaps(&self, bitmaps: &[(usize, BitmapEntry)]) -> Result<()> {
        if bitmaps.is_empty() {
            return Ok(());
        }
        for (_, BitmapEntry { table_offset, table_entries, .. }) in bitmaps {
            let dirty = BitmapTableEntry::Ones.encode().to_be_bytes();
            let table = dirty.repeat(usize::try_from(*table_entries).unwrap_or(usize::MAX));
            write_all(self.store(), Buf::from_slice(&table), *table_offset).await?;
        }
        self.store().sync().await
    }

    /// The `bitmaps` are true.
    async fn end_filling(&self, bitmaps: &[(usize, BitmapEntry)]) -> Result<()> {
        if bitmaps.is_empty() {
            return Ok(());
        }
        let is_one = |index| bitmaps.iter().any(|(at, _)| *at == index);
        self.change_bitmaps(|index, fields| fields.in_use &= !is_one(index)).await?;
        self.store().sync().await
    }

    /// Changes fields of the directory of bitmaps, if there is one, where it is.
    async fn change_bitmaps(&self, change: impl FnMut(usize, &mut BitmapFields)) -> Result<()> {
        let Some(bitmaps) = &self.header.bitmaps else { return Ok(()) };
        let len = usize::try_from(bitmaps.directory_bytes).unwrap_or(usize::MAX);
        let mut directory = read_exact(self.store(), bitmaps.directory_offset, len).await?;
        if !change_bitmap_directory(directory.own_bytes(), bitmaps.count, change) {
            let what = "the bitmaps of the image are damaged: remove them first";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        write_all(self.store(), directory, bitmaps.directory_offset).await
    }

    async fn set_dirty(&mut self, dirty: bool) -> Result<()> {
        if self.header.version == Version::V2 {
            return Ok(());
        }
        self.change_sector(|sector| {
            let bits = word(sector, field::INCOMPATIBLE);
            let bits = if dirty { bits | DIRTY } else { bits & !DIRTY };
            put(sector, field::INCOMPATIBLE, &bits.to_be_bytes());
            let kept = word(sector, field::AUTOCLEAR) & STILL_TRUE;
            put(sector, field::AUTOCLEAR, &kept.to_be_bytes());
        })
        .await?;
        self.header.autoclear.unknown = 0;
        Ok(())
    }

    /// Names other tables (I3).
    async fn write_header(&self, next: &Header) -> Result<()> {
        self.change_sector(|sector| {
            put(sector, field::SIZE, &next.size.to_be_bytes());
            put(sector, field::L1_ENTRIES, &next.l1_entries.to_be_bytes());
            put(sector, field::L1_OFFSET, &next.l1_offset.bytes().to_be_bytes());
            put(sector, field::SNAPSHOT_COUNT, &next.snapshot_count.to_be_bytes());
            put(sector, field::SNAPSHOT_TABLE, &next.snapshots_offset.bytes().to_be_bytes());
        })
        .await
    }

    /// Changes the first sector and makes that durable.
    async fn change_sector(&self, change: impl FnOnce(&mut [u8])) -> Result<()> {
        let len = usize::try_from(SECTOR_BYTES).unwrap_or(usize::MAX);
        let mut sector = read_exact(self.store(), HostOffset::ZERO, len).await?;
        change(sector.own_bytes());
        write_all(self.store(), sector, HostOffset::ZERO).await?;
        self.store().sync().await
    }

    /// The entries of an L1 table, none of which says that what it names is its own.
    async fn read_l1(&self, at: HostOffset, entries: u32) -> Result<Vec<u64>> {
        let len = entries as usize * L1Entry::BYTES;
        let bytes = read_exact(self.store(), at, len).await?;
        let words = bytes.as_chunks().0.iter();
        Ok(words.map(|word| u64::from_be_bytes(*word) & !COPIED).collect())
    }

    fn store(&self) -> &dyn Store {
        &*self.image.store
    }
}

fn l1_bytes(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_be_bytes()).collect()
}

fn word(sector: &[u8], at: usize) -> u64 {
    let bytes = sector.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_be_bytes(*bytes))
}

fn put(sector: &mut [u8], at: usize, bytes: &[u8]) {
    if let Some(field) = sector.get_mut(at..at + bytes.len()) {
        field.copy_from_slice(bytes);
    }
}

/// All snapshots of an image, with their bytes.
async fn read_snapshots(store: &dyn Store, header: &Header) -> Result<Vec<Listed>> {
    header.check_snapshot_table()?;
    let mut all = Vec::new();
    let (mut bytes, mut at) = (Vec::new(), 0_usize);
    while all.len() < header.snapshot_count as usize {
        match SnapshotEntry::decode(bytes.get(at..).unwrap_or_default())? {
            SnapshotDecoded::Entry { entry, len } => {
                let own = bytes.get(at..at + len).unwrap_or_default().to_vec();
                all.push(Listed { entry, bytes: own });
                at = (at + len).next_multiple_of(8);
            }
            SnapshotDecoded::NeedMore(_) => {
                let known = bytes.len() as u64;
                if known > SNAPSHOT_TABLE_BYTES_MAX {
                    let what = "the snapshot table is longer than 64 MiB";
                    return Err(Error::new(ErrorKind::Limit, what));
                }
                let from = HostOffset::new(header.snapshots_offset.bytes().saturating_add(known));
                bytes.extend_from_slice(&read_exact(store, from, PIECE_BYTES).await?);
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
