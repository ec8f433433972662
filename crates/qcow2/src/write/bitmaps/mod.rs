//! Dirty bitmaps that stay true while the image is written, also through a crash.
//!
//! ```text
//! first write   load ─▶ header: kept bits ─▶ directory: in use
//! write         region covered? ──────────────────────────────────────▶ bits in memory ─▶ data
//!               └▶ no: the file's bits of the region all become 1 ─▶ sync ─▶ covered ─┘
//! close         the file's bits become those in memory ─▶ sync ─▶ directory: not in use
//!                 ─▶ sync ─▶ header: no kept bits
//! ```
//!
//! The file's own bitmaps are the record of what may be dirty, as of a write-intent log: before the
//! first change of a region of the disk (a 4096th of it, at least 16 MiB) all of it is dirty there.
//! For other programs these bitmaps are in use, and so inconsistent until the image is closed, as
//! the format has it. The kept bits ([`Autoclear::keeps_bitmap`]) say what the file knows better:
//! whoever writes the image and does not know them clears them, and from then on the bitmaps are
//! what their flags say. So after a crash they have everything that was changed, and what was not
//! changed of the regions that were. One thing leaves no trace: a program that opens the image for
//! reading and then writes it, as QEMU's block-commit does with its base.
//! docs/formats/kept-bitmaps.md specifies what is in the file.
//!
//! An image with internal snapshots gets no bit that QEMU does not know: its bitmaps are kept true,
//! but only until a crash.
//!
//! Invariants
//! - B1 No byte of a region changes before the bits of all of it are durable in the file, in every
//!   bitmap that is kept. Until the image is closed they only get more.
//! - B2 A kept bit is durable before the bitmap is flagged as in use, and until it is not any more.
//!   It is set for no bitmap that was in use before, or whose table makes no sense.
//! - B3 A table names a cluster only when the cluster's count and its bits are durable, and the
//!   log no longer calls it unused.
//! - B4 Where there is no room, in memory or in the file, more is dirty, and not less.
//! - B5 Bits behind the end of the disk are zeros in the file.

mod bits;
mod directory;
#[cfg(test)]
mod page;
mod recorder;
#[cfg(test)]
mod tests;

pub(crate) use directory::NewBitmap;
pub use directory::settle_bitmaps;

use super::Writer;
use super::allocate::Reserved;
use crate::snapshots::list_bitmaps;
use bits::{Bits, PAGE_BITS, PAGE_BYTES, Room};
use mica_block::{Error, ErrorKind, Result, read_exact, write_all};
use mica_qcow2_format::{
    Autoclear, BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapFields, BitmapTableEntry,
    BitmapsExtension, Header, bitmap_table_entries, change_bitmap_directory,
};
use mica_rt::sync;
use mica_rt::{Buf, LogLimit};
use mica_units::{GuestRange, HostOffset};
use parking_lot::Mutex;
use recorder::{PageBits, Recorded, Recorder, Table};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// The autoclear bit that there are bitmaps that match their flags.
const CONSISTENT: u64 = 1;

/// The bitmaps of an image that is written.
#[derive(Default)]
pub(crate) struct Bitmaps {
    /// From the first write on, if there are bitmaps to keep.
    recorder: OnceLock<Recorder>,
    /// Where the directory is.
    place: Mutex<Option<BitmapsExtension>>,
    /// The right to write bits of an image that is not closed.
    covering: sync::Mutex,
    /// Whether disabled ones are needed, too.
    takes_disabled: AtomicBool,
    /// What is logged of the lack of space: each flush may meet with it.
    shortages: LogLimit,
}

/// What the header and the directory say while the image is written.
#[derive(Default)]
pub(super) struct Marks {
    /// The autoclear bits of bitmaps.
    pub(super) autoclear: u64,
    directory: Option<(HostOffset, Buf)>,
}

impl Bitmaps {
    pub(super) fn new(header: &Header) -> Self {
        let place = Mutex::new(header.bitmaps.filter(|_| header.autoclear.bitmaps_consistent));
        Self { place, ..Self::default() }
    }

    /// Those that are kept true, from the first write on.
    #[inline]
    pub(super) fn recorder(&self) -> Option<&Recorder> {
        self.recorder.get()
    }

    fn place(&self) -> Option<BitmapsExtension> {
        *self.place.lock()
    }

    fn set_place(&self, place: Option<BitmapsExtension>) {
        *self.place.lock() = place;
    }
}

impl Writer {
    /// Loads the bitmaps that are to be kept. Returns the marks that the image gets before it is
    /// written; `can_be_kept` if the header may have bits that QEMU does not know.
    pub(super) async fn load_bitmaps(&self, can_be_kept: bool) -> Result<Marks> {
        let Some(place) = self.bitmaps.place() else { return Ok(Marks::default()) };
        let store = &*self.metadata.store;
        let header = crate::header_io::read_header(store).await?;
        let header = Header { bitmaps: Some(place), ..header };
        let entries = match list_bitmaps(store, &header).await {
            Ok(entries) => entries,
            Err(error) => {
                tracing::warn!(%error, "its dirty bitmaps cannot be read, and end here");
                // The header is about to say so, and nothing looks for them again.
                self.bitmaps.set_place(None);
                return Ok(Marks::default());
            }
        };
        let (mut all, mut kept, mut in_use) = (Vec::new(), 0, vec![false; entries.len()]);
        for (index, entry) in entries.iter().enumerate() {
            if entry.in_use {
                continue;
            }
            let is_wanted = entry.auto || self.bitmaps.takes_disabled.load(Ordering::Acquire);
            if is_wanted {
                in_use[index] = true;
                if all.len() == Autoclear::KEPT_BITMAPS_MAX {
                    let name = &entry.name;
                    tracing::warn!(name, "a dirty bitmap ends, as the image has too many");
                    continue;
                }
                match self.load_bitmap(index, entry, header.disk_bytes()).await {
                    Ok(recorded) => all.push(recorded),
                    Err(error) => {
                        let name = &entry.name;
                        tracing::warn!(%error, name, "a dirty bitmap ends, as it cannot be read");
                        continue;
                    }
                }
            }
            kept |= Autoclear::kept_bitmap(index);
        }
        let len = usize::try_from(place.directory_bytes).unwrap_or(usize::MAX);
        let mut directory = read_exact(store, place.directory_offset, len).await?;
        change_bitmap_directory(directory.own_bytes(), place.count, |index, fields| {
            fields.in_use |= in_use.get(index).copied().unwrap_or(true);
        });
        self.metadata.ranges.check(place.directory_offset, place.directory_bytes)?;
        if !all.is_empty() {
            let recorder = Recorder::new(all, header.disk_bytes());
            assert!(self.bitmaps.recorder.set(recorder).is_ok(), "bitmaps are loaded once");
        }
        let autoclear = CONSISTENT | if can_be_kept { kept } else { 0 };
        let directory = in_use.contains(&true).then_some((place.directory_offset, directory));
        Ok(Marks { autoclear, directory })
    }

    /// Flags the bitmaps as in use, durably; the header has its marks (B2).
    pub(super) async fn mark_bitmaps(&self, marks: Marks) -> Result<()> {
        let Some((at, directory)) = marks.directory else { return Ok(()) };
        self.metadata.write_through(directory, at).await?;
        self.metadata.sync().await
    }

    /// The bitmap `entry`, which has this `index`, of a disk of `disk_bytes`, as it is in the file.
    async fn load_bitmap(
        &self,
        index: usize,
        entry: &BitmapEntry,
        disk_bytes: u64,
    ) -> Result<Recorded> {
        let (store, cluster_bits) = (&*self.metadata.store, self.l2.cluster_bits);
        // A longer table says nothing more of the disk.
        let needed = bitmap_table_entries(entry.granularity_bits, disk_bytes, cluster_bits).get();
        let count = needed.min(u64::from(entry.table_entries));
        let bits = Bits::new(Room::new(self.map.index.cache.shared().bitmap_bytes()));
        bits.room().take_table(count)?;
        let table_bytes = count * BITMAP_TABLE_ENTRY_BYTES;
        self.metadata.ranges.check(entry.table_offset, table_bytes)?;
        let table_len = usize::try_from(table_bytes).expect("bounded by the directory's decoder");
        let table = read_exact(store, entry.table_offset, table_len).await?;
        let words = table.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word));
        let entries = words.map(|word| BitmapTableEntry::decode(word, cluster_bits));
        let entries = entries.collect::<Result<Vec<_>>>()?;
        self.load_bits(&bits, &entries).await?;
        Ok(Recorded {
            name: entry.name.clone(),
            index,
            granularity_bits: entry.granularity_bits,
            is_enabled: entry.auto,
            bits,
            table: Mutex::new(Table { at: entry.table_offset, entries }),
        })
    }

    /// Sets in `bits` what is dirty according to the table of these `entries`.
    async fn load_bits(&self, bits: &Bits, entries: &[BitmapTableEntry]) -> Result<()> {
        let (store, cluster_bits) = (&*self.metadata.store, self.l2.cluster_bits);
        let cluster_pages = cluster_bits.bytes() / PAGE_BYTES as u64;
        for (number, entry) in (0..).zip(entries) {
            let first = number * cluster_pages;
            match *entry {
                BitmapTableEntry::Zeros => {}
                BitmapTableEntry::Ones => fill(bits, number, cluster_pages),
                BitmapTableEntry::Data(at) => {
                    self.metadata.ranges.check(at, cluster_bits.bytes())?;
                    let cluster_len = usize::try_from(cluster_bits.bytes()).expect("2 MiB");
                    let data = read_exact(store, at, cluster_len).await?;
                    for (page, bytes) in (first..).zip(data.chunks(PAGE_BYTES)) {
                        bits.add_page(page, bytes);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Everything is dirty of which `bits` are in cluster `number` of the bitmap.
fn fill(bits: &Bits, number: u64, cluster_pages: u64) {
    let first = number * cluster_pages * PAGE_BITS;
    bits.set(first, first + cluster_pages * PAGE_BITS - 1);
}

impl Writer {
    /// Records that `range` is about to change, in every bitmap that is enabled (B1).
    #[inline]
    pub(super) async fn record(&self, range: GuestRange) -> Result<()> {
        let Some(recorder) = self.bitmaps.recorder() else { return Ok(()) };
        if !recorder.note(range.start().bytes(), range.len()) {
            Box::pin(self.cover(recorder, range)).await?;
            recorder.set(range.start().bytes()..range.end().bytes());
        }
        Ok(())
    }

    /// The names of the bitmaps that are kept, from the first write on.
    pub(crate) fn recorded_bitmaps(&self) -> Vec<String> {
        let recorder = self.bitmaps.recorder();
        recorder.iter().flat_map(|recorder| &recorder.all).map(|one| one.name.clone()).collect()
    }

    /// Makes `range` dirty in the bitmap called `name`. Returns whether that is kept. Of no range
    /// only that is returned.
    pub(crate) async fn make_dirty(&self, name: &str, range: GuestRange) -> Result<bool> {
        let Some(recorder) = self.bitmaps.recorder() else { return Ok(false) };
        let named = recorder.all.iter().find(|bitmap| bitmap.name == name);
        let Some(bitmap) = named else { return Ok(false) };
        if range.is_empty() {
            return Ok(true);
        }
        self.cover(recorder, range).await?;
        bitmap.set(range.start().bytes()..range.end().bytes(), recorder.len());
        Ok(true)
    }

    /// Which parts of `range` are dirty in the bitmap called `name`, if something was written and
    /// that is kept: lengths in bytes, from its start, at most `runs_max`. And whether it is
    /// enabled.
    pub(crate) fn dirty_runs(
        &self,
        name: &str,
        range: GuestRange,
        runs_max: usize,
    ) -> Option<(Vec<(u64, bool)>, bool)> {
        self.bitmaps.recorder()?.runs(name, range, runs_max)
    }

    /// Makes all of the regions of `range` dirty in the file, durably.
    async fn cover(&self, recorder: &Recorder, range: GuestRange) -> Result<()> {
        let _locked = self.bitmaps.covering.lock().await;
        let regions = recorder.uncovered(range);
        if regions.is_empty() {
            return Ok(());
        }
        let mut fresh = Vec::new();
        for bitmap in &recorder.all {
            fresh.extend(self.write_covered(recorder, bitmap, &regions).await?);
        }
        if !fresh.is_empty() {
            self.place_bits(recorder, &fresh, &regions).await?;
        }
        self.metadata.sync().await?;
        recorder.cover(regions);
        Ok(())
    }

    /// Writes the bits of `regions` that have a place; returns which clusters have none.
    async fn write_covered<'a>(
        &self,
        recorder: &Recorder,
        bitmap: &'a Recorded,
        regions: &Range<u64>,
    ) -> Result<Vec<(&'a Recorded, u64)>> {
        let mut fresh = Vec::new();
        for (number, pages) in self.pages_by_cluster(bitmap.pages_of(recorder.bytes_of(regions))) {
            match bitmap.entry(number) {
                // The disk is longer than its bitmap: then all of it counts as dirty elsewhere.
                None | Some(BitmapTableEntry::Ones) => {}
                Some(BitmapTableEntry::Zeros) => fresh.push((bitmap, number)),
                Some(BitmapTableEntry::Data(at)) => {
                    let buf = pages_in(pages.clone(), |page| {
                        recorder.put_covered(bitmap, page, regions);
                    });
                    self.write_bits((at, number), pages.start, buf).await?;
                }
            }
        }
        Ok(fresh)
    }

    /// Gives clusters of bitmaps that have no place one, with the bits of `regions` (B3). Without
    /// room for them all that they stand for is dirty (B4).
    async fn place_bits(
        &self,
        recorder: &Recorder,
        fresh: &[(&Recorded, u64)],
        regions: &Range<u64>,
    ) -> Result<()> {
        let mut reserved = Vec::new();
        let placed = async {
            for (bitmap, number) in fresh {
                let run = self.space.reserve(1).await?;
                reserved.push(run);
                self.write_fresh(recorder, (bitmap, *number), run, regions).await?;
            }
            // Not what lies beneath: the first write of each region would wait for a snapshot.
            self.flush_own().await?;
            self.log_reserved().await
        };
        let is_short = match placed.await {
            Ok(()) => false,
            Err(error) => {
                reserved.drain(..).for_each(|run| self.space.give_back(run));
                if error.kind() != ErrorKind::NoSpace {
                    return Err(Box::pin(self.note_corruption(error)).await);
                }
                if let Some(omitted) = self.bitmaps.shortages.admit() {
                    tracing::warn!(
                        %error,
                        "dirty bitmaps say more than is dirty, for lack of space{omitted}"
                    );
                }
                true
            }
        };
        let cluster_pages = self.l2.cluster_bits.bytes() / PAGE_BYTES as u64;
        for (index, (bitmap, number)) in fresh.iter().enumerate() {
            let entry = match reserved.get(index) {
                Some(run) => BitmapTableEntry::Data(self.l2.cluster_bits.start_of(run.first)),
                // Given back.
                None => BitmapTableEntry::Ones,
            };
            let at = bitmap.table().at.bytes() + number * BITMAP_TABLE_ENTRY_BYTES;
            let at = HostOffset::new(at);
            self.check_place(at, BITMAP_TABLE_ENTRY_BYTES).await?;
            let bytes = Buf::from_slice(&entry.encode().to_be_bytes());
            write_all(&*self.metadata.store, bytes, at).await?;
            if is_short {
                fill(&bitmap.bits, *number, cluster_pages);
            }
            if let Some(slot) = bitmap.table().entries.get_mut(slot_of(*number)) {
                *slot = entry;
            }
        }
        Ok(())
    }

    /// Clusters were reserved, their counts are durable, and something is about to name them that
    /// is no page: from now on the log does not call them unused. If they came from the pool, no
    /// group has told it.
    async fn log_reserved(&self) -> Result<()> {
        // What is in them is metadata, and no page: of an image with a data file a group may have
        // synced only that.
        if self.l2.data_file {
            self.metadata.sync().await?;
        }
        self.metadata.lock().log_state(self.space.state());
        self.metadata.unname_before_group().await
    }

    /// Writes the bits of a whole cluster of a bitmap to `run`, where nothing is.
    async fn write_fresh(
        &self,
        recorder: &Recorder,
        (bitmap, number): (&Recorded, u64),
        run: Reserved,
        regions: &Range<u64>,
    ) -> Result<()> {
        let bits = self.l2.cluster_bits;
        let at = bits.start_of(run.first);
        self.metadata.ranges.check(at, bits.bytes())?;
        self.metadata.lock().drop_cluster(at, bits.bytes());
        let first = number * (bits.bytes() / PAGE_BYTES as u64);
        let pages = first..first + bits.bytes() / PAGE_BYTES as u64;
        let buf = pages_in(pages, |page| recorder.put_covered(bitmap, page, regions));
        write_all(&*self.metadata.store, buf, at).await
    }

    /// Writes `buf`, the bits from page `first` on, into cluster `number` of a bitmap, which is at
    /// `at`.
    async fn write_bits(
        &self,
        (at, number): (HostOffset, u64),
        first: u64,
        buf: Buf,
    ) -> Result<()> {
        self.check_place(at, self.l2.cluster_bits.bytes()).await?;
        let cluster_pages = self.l2.cluster_bits.bytes() / PAGE_BYTES as u64;
        let within = (first - number * cluster_pages) * PAGE_BYTES as u64;
        write_all(&*self.metadata.store, buf, HostOffset::new(at.bytes() + within)).await
    }

    /// Makes sure that the `len` bytes at `at`, which a bitmap has, are of no other table. That was
    /// checked before; if their count is wrong, one may have been put there since: then the image
    /// contradicts itself.
    async fn check_place(&self, at: HostOffset, len: u64) -> Result<()> {
        match self.metadata.ranges.check(at, len) {
            Err(error) => Err(Box::pin(self.note_corruption(error)).await),
            fine => fine,
        }
    }

    /// Splits `pages` of a bitmap where a cluster ends: with the number of each cluster.
    fn pages_by_cluster(
        &self,
        pages: Range<u64>,
    ) -> impl Iterator<Item = (u64, Range<u64>)> + use<> {
        let count = self.l2.cluster_bits.bytes() / PAGE_BYTES as u64;
        let numbers = match pages.is_empty() {
            true => 0..0,
            false => pages.start / count..(pages.end - 1) / count + 1,
        };
        numbers.map(move |number| {
            let (start, end) = (number * count, (number + 1) * count);
            (number, pages.start.max(start)..pages.end.min(end))
        })
    }
}

impl Writer {
    /// Stores the bitmaps of an image that nobody writes any more.
    pub(super) async fn store_bitmaps(&self) -> Result<()> {
        let Some(recorder) = self.bitmaps.recorder() else { return Ok(()) };
        let _locked = self.bitmaps.covering.lock().await;
        for bitmap in &recorder.all {
            for regions in recorder.covered_runs() {
                let pages = bitmap.pages_of(recorder.bytes_of(&regions));
                for (number, pages) in self.pages_by_cluster(pages) {
                    let Some(BitmapTableEntry::Data(at)) = bitmap.entry(number) else { continue };
                    let exact = |page: PageBits<'_>| recorder.put_exact(bitmap, page);
                    let buf = pages_in(pages.clone(), exact);
                    self.write_bits((at, number), pages.start, buf).await?;
                }
            }
        }
        self.metadata.sync().await?;
        let is_kept = |index| recorder.all.iter().any(|bitmap| bitmap.index == index);
        self.fit_tables(recorder.len(), is_kept).await
    }

    /// Changes fields of the directory where it is, durably.
    async fn change_directory(&self, change: impl FnMut(usize, &mut BitmapFields)) -> Result<()> {
        let Some(place) = self.bitmaps.place() else { return Ok(()) };
        let len = usize::try_from(place.directory_bytes).unwrap_or(usize::MAX);
        self.metadata.ranges.check(place.directory_offset, place.directory_bytes)?;
        let mut directory = read_exact(&*self.metadata.store, place.directory_offset, len).await?;
        if !change_bitmap_directory(directory.own_bytes(), place.count, change) {
            let context = "the directory of its bitmaps has changed";
            return Err(Error::new(ErrorKind::Corrupt, context));
        }
        self.metadata.write_through(directory, place.directory_offset).await?;
        self.metadata.sync().await
    }
}

/// The bytes of `pages` as `put` makes them from zeros.
fn pages_in(pages: Range<u64>, mut put: impl FnMut(PageBits<'_>)) -> Buf {
    let len = usize::try_from(pages.end - pages.start).expect("within a cluster") * PAGE_BYTES;
    let mut buf = Buf::zeroed(len);
    for (number, bytes) in pages.zip(buf.own_bytes().chunks_mut(PAGE_BYTES)) {
        put(PageBits { number, bytes });
    }
    buf
}

fn slot_of(number: u64) -> usize {
    usize::try_from(number).expect("an index in a table")
}
