//! Changes of which bitmaps there are, and of how long they are: another directory, which the
//! header names in one sector once everything that it names is durable. And the end of a crash:
//! bitmaps that are kept are flagged as not in use.

use super::{Recorded, slot_of};
use crate::header_io::{clear_autoclear, read_header};
use crate::snapshots::list_bitmaps;
use crate::write::Writer;
use crate::write::allocate::Reserved;
use mica_block::{Error, ErrorKind, Result, Store, read_exact, write_all};
use mica_qcow2_format::{
    Autoclear, BITMAP_BYTES_MAX, BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapTableEntry,
    BitmapsExtension, Header, Version, bitmap_table_entries, change_bitmap_directory,
    decode_bitmap_directory,
};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset};
use std::sync::atomic::Ordering;

/// Bytes of a table that are copied at a time.
const COPIED_BYTES: u64 = 64 << 10;

/// A bitmap that an image is to have.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct NewBitmap {
    pub(crate) name: String,
    pub(crate) granularity_bits: u8,
    /// Whether writers keep it true.
    pub(crate) is_enabled: bool,
}

/// Clusters with tables and directories that nothing names yet.
#[derive(Default)]
struct Taken(Vec<Reserved>);

/// A table of a bitmap that was copied to a new place.
struct CopiedTable {
    /// Of the bitmap, in the directory.
    index: usize,
    at: HostOffset,
    entries: u32,
}

/// Bitmaps whose tables were made longer for a disk that is about to be.
#[must_use = "they are flagged as in use until the disk has its length"]
pub(in crate::write) struct Lengthened(Vec<usize>);

/// Ends what a crash has left of the bitmaps of the image in `store`, which has this `header`:
/// those that are kept are flagged as not in use, durably. Returns the header that it has then.
///
/// # Errors
/// Any failure to read or to write the image.
pub async fn settle_bitmaps(store: &dyn Store, header: Header) -> Result<Header> {
    let is_kept = |index| header.autoclear.keeps_bitmap(index);
    let Some(place) = header.bitmaps.filter(|_| header.autoclear.bitmaps_consistent) else {
        return Ok(header);
    };
    if header.autoclear.unknown & Autoclear::KEPT_BITMAPS == 0 {
        return Ok(header);
    }
    // Whoever opens the image for writing refuses it, or has the bitmaps end.
    let tables = [
        (header.l1_offset, u64::from(header.l1_entries) * 8),
        (header.refcount_table_offset, {
            header.cluster_bits.bytes_of(u64::from(header.refcount_table_clusters))
        }),
    ];
    let start = place.directory_offset.bytes();
    let end = start.saturating_add(place.directory_bytes);
    let overlaps =
        |(at, len): &(HostOffset, u64)| at.bytes() < end && start < at.bytes().saturating_add(*len);
    if tables.iter().any(overlaps) {
        return Ok(header);
    }
    let (bits, disk_bytes) = (header.cluster_bits, header.disk_bytes());
    let len = usize::try_from(place.directory_bytes).unwrap_or(usize::MAX);
    let mut directory = read_exact(store, place.directory_offset, len).await?;
    let Ok(entries) = decode_bitmap_directory(&directory, &place, bits, disk_bytes) else {
        // The first write says what is wrong with it.
        return Ok(header);
    };
    let mut names = Vec::new();
    change_bitmap_directory(directory.own_bytes(), place.count, |index, fields| {
        let Some(entry) = entries.get(index).filter(|_| fields.in_use && is_kept(index)) else {
            return;
        };
        let needed = bitmap_table_entries(entry.granularity_bits, disk_bytes, bits).get();
        if needed <= u64::from(fields.table_entries) {
            fields.table_entries = u32::try_from(needed).expect("not more than before");
            fields.in_use = false;
            names.push(entry.name.as_str());
        }
    });
    if !names.is_empty() {
        write_all(store, directory, place.directory_offset).await?;
        tracing::warn!(
            image = store.name(),
            bitmaps = names.join(", "),
            "its last writer did not close it: its dirty bitmaps have all that was changed, and \
             what is around it"
        );
    }
    // Also what a process that died here before had written.
    store.sync().await?;
    let mut header = header;
    header.autoclear.unknown &= !Autoclear::KEPT_BITMAPS;
    clear_autoclear(store, Autoclear::KEPT_BITMAPS).await?;
    Ok(header)
}

impl Writer {
    /// The bitmaps that are enabled and true.
    ///
    /// # Errors
    /// If they cannot be read.
    pub(crate) async fn enabled_bitmaps(&self) -> Result<Vec<NewBitmap>> {
        let Some((_, entries)) = self.bitmap_entries().await? else { return Ok(Vec::new()) };
        let is_recorded = |entry: &BitmapEntry| {
            let recorder = self.bitmaps.recorder();
            recorder.is_some_and(|recorder| recorder.all.iter().any(|one| one.name == entry.name))
        };
        let enabled = entries.iter().filter(|entry| entry.auto);
        let enabled = enabled.filter(|entry| !entry.in_use || is_recorded(entry));
        Ok(enabled.map(NewBitmap::like).collect())
    }

    /// Whether the image has bitmaps, whatever they are like.
    pub(crate) fn has_bitmaps(&self) -> bool {
        self.bitmaps.place().is_some()
    }

    async fn bitmap_entries(&self) -> Result<Option<(BitmapsExtension, Vec<BitmapEntry>)>> {
        let Some(place) = self.bitmaps.place() else { return Ok(None) };
        let header = read_header(&*self.metadata.store).await?;
        let header = Header { bitmaps: Some(place), ..header };
        Ok(Some((place, list_bitmaps(&*self.metadata.store, &header).await?)))
    }

    /// Adds `wanted` bitmaps, without anything dirty, as far as the image does not have them.
    /// Nothing has been written yet. The log does not begin before the first write: what this
    /// changes is durable when it returns, and an image that has a log had no bitmaps before, whose
    /// directory would have to be freed.
    ///
    /// # Errors
    /// `Unsupported` if the image can have no bitmaps, or its header has no room; any failure of a
    /// write or a sync.
    pub(crate) async fn add_bitmaps(&self, wanted: &[NewBitmap]) -> Result<()> {
        assert!(!self.header.is_marked(), "bitmaps are added before the first write");
        let mut taken = Taken::default();
        let added = self.add_bitmaps_in(wanted, &mut taken).await;
        self.end_taking(taken, added)
    }

    async fn add_bitmaps_in(&self, wanted: &[NewBitmap], taken: &mut Taken) -> Result<()> {
        let (mut place, entries) = match self.bitmap_entries().await? {
            Some((place, entries)) => (Some(place), entries),
            None => (None, Vec::new()),
        };
        let is_new = |wanted: &&NewBitmap| !entries.iter().any(|entry| entry.name == wanted.name);
        let wanted: Vec<_> = wanted.iter().filter(is_new).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        if self.l2.version == Version::V2 {
            let context = "images of version 2 have no bitmaps";
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        // A header without room is better found before anything is written.
        let bits = self.l2.cluster_bits;
        let somewhere = |count| BitmapsExtension {
            count,
            directory_bytes: bits.bytes(),
            directory_offset: HostOffset::new(bits.bytes()),
        };
        let check = self.metadata.check_header(bits, |header| header.bitmaps = Some(somewhere(1)));
        check.await?;
        self.wrote.store(true, Ordering::Release);
        let mut directory = match place {
            None => Vec::new(),
            Some(place) => {
                let len = usize::try_from(place.directory_bytes).unwrap_or(usize::MAX);
                read_exact(&*self.metadata.store, place.directory_offset, len).await?.to_vec()
            }
        };
        let mut count = place.map_or(0, |place| place.count);
        for new in wanted {
            let entries = self.table_entries(new.granularity_bits, self.map.len())?;
            let table = vec![BitmapTableEntry::Zeros; slot_of(u64::from(entries))];
            let table_offset = self.put_table(&table, taken).await?;
            let entry = BitmapEntry {
                name: new.name.clone(),
                table_offset,
                table_entries: entries,
                granularity_bits: new.granularity_bits,
                in_use: false,
                auto: new.is_enabled,
            };
            entry.encode(&mut directory);
            count += 1;
        }
        self.replace_directory(&mut place, (&directory, count), taken).await
    }

    fn table_entries(&self, granularity_bits: u8, disk_bytes: u64) -> Result<u32> {
        let bits = self.l2.cluster_bits;
        let entries = bitmap_table_entries(granularity_bits, disk_bytes, bits).get();
        if bits.bytes_of(entries) > BITMAP_BYTES_MAX {
            let context = "a dirty bitmap would be too large: it needs a larger granularity";
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        Ok(u32::try_from(entries).unwrap_or(u32::MAX))
    }

    /// Writes a table to a new place, which is returned.
    async fn put_table(
        &self,
        entries: &[BitmapTableEntry],
        taken: &mut Taken,
    ) -> Result<HostOffset> {
        let bytes: Vec<u8> =
            entries.iter().flat_map(|entry| entry.encode().to_be_bytes()).collect();
        self.put_in_new_place(&bytes, taken).await
    }

    /// Writes `bytes`, and zeros up to the end of a cluster, to a new place.
    async fn put_in_new_place(&self, bytes: &[u8], taken: &mut Taken) -> Result<HostOffset> {
        let (at, len) = self.take_place(bytes.len() as u64, taken).await?;
        let mut buf = Buf::zeroed(usize::try_from(len).expect("at most 64 MiB"));
        buf.put(0, bytes);
        write_all(&*self.metadata.store, buf, at).await?;
        Ok(at)
    }

    /// A place for `bytes`, where nothing is, and how long it is.
    async fn take_place(&self, bytes: u64, Taken(taken): &mut Taken) -> Result<(HostOffset, u64)> {
        let bits = self.l2.cluster_bits;
        let count = bits.clusters_for(bytes).max(1);
        let len = bits.bytes_of(count);
        let what = "the tables of its dirty bitmaps in one piece: bitmaps of a larger granularity \
                    need less";
        let run = self.reserve_run(count, what).await?;
        taken.push(run);
        let at = bits.start_of(run.first);
        self.metadata.ranges.check(at, len)?;
        self.metadata.lock().drop_cluster(at, len);
        Ok((at, len))
    }

    /// What was `done` with the clusters that were `taken` has ended: if it failed, and nothing
    /// names them, they are free again. What the header names after a failed write nobody knows,
    /// and nothing is allocated any more.
    fn end_taking<T>(&self, Taken(taken): Taken, done: Result<T>) -> Result<T> {
        if done.is_err() && self.check_usable().is_ok() {
            taken.into_iter().for_each(|run| self.space.give_back(run));
        }
        done
    }

    /// Writes another directory, and makes the header name it, durably. What the old one took, if
    /// there was one, is freed.
    async fn replace_directory(
        &self,
        place: &mut Option<BitmapsExtension>,
        (directory, count): (&[u8], u32),
        taken: &mut Taken,
    ) -> Result<()> {
        let directory_offset = self.put_in_new_place(directory, taken).await?;
        // With the counts of everything.
        self.flush().await?;
        self.log_reserved().await?;
        let directory_bytes = directory.len() as u64;
        let next = BitmapsExtension { count, directory_bytes, directory_offset };
        let bits = self.l2.cluster_bits;
        let named = self.metadata.replace_header(bits, |header| {
            header.bitmaps = Some(next);
            header.autoclear.bitmaps_consistent = true;
        });
        named.await?;
        self.bitmaps.set_place(Some(next));
        if let Some(old) = place.replace(next) {
            self.free_run(old.directory_offset, old.directory_bytes);
        }
        Ok(())
    }

    /// The clusters of `len` bytes at `at` lose a reference with the next group.
    fn free_run(&self, at: HostOffset, len: u64) {
        let bits = self.l2.cluster_bits;
        let first = bits.host_cluster(at);
        let freed = first.up_to(first.saturating_add(bits.clusters_for(len)));
        self.metadata.lock().group.freed.extend(freed);
    }
}

impl Writer {
    /// Gives the bitmaps tables for a disk of `len` bytes; [`Self::end_growth`] follows. Until the
    /// disk has that length they are flagged as in use.
    ///
    /// # Errors
    /// `Invalid` if a bitmap would be too large; any failure of a write or a sync.
    pub(in crate::write) async fn lengthen_bitmaps(&self, len: u64) -> Result<Lengthened> {
        let mut taken = Taken::default();
        let lengthened = self.lengthen_bitmaps_in(len, &mut taken).await;
        self.end_taking(taken, lengthened)
    }

    async fn lengthen_bitmaps_in(&self, len: u64, taken: &mut Taken) -> Result<Lengthened> {
        let none = Ok(Lengthened(Vec::new()));
        let recorder = self.bitmaps.recorder();
        if recorder.is_some_and(|recorder| recorder.len_max() < len) {
            let context = "its dirty bitmaps can be made so long only while nobody uses the image";
            return Err(Error::new(ErrorKind::Unsupported, context));
        }
        let _locked = self.bitmaps.covering.lock().await;
        let Some((place, entries)) = self.bitmap_entries().await? else { return none };
        let bits = self.l2.cluster_bits;
        let mut tables = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let recorded = self.recorded(index);
            let needed = bitmap_table_entries(entry.granularity_bits, len, bits).get();
            // What a table says beyond the disk as it was before is nobody's, and checked by
            // nobody.
            let before = bitmap_table_entries(entry.granularity_bits, self.map.len(), bits).get();
            let known = recorded.map_or(before, Recorded::table_len);
            let fits = needed == u64::from(entry.table_entries) && needed == known;
            if entry.in_use && recorded.is_none() || fits {
                continue;
            }
            let table_entries = self.table_entries(entry.granularity_bits, len)?;
            tables.push(self.copy_table((index, entry), (table_entries, known), taken).await?);
        }
        if tables.is_empty() {
            return none;
        }
        let bytes = usize::try_from(place.directory_bytes).unwrap_or(usize::MAX);
        let mut directory =
            read_exact(&*self.metadata.store, place.directory_offset, bytes).await?;
        let mut flagged = Vec::new();
        change_bitmap_directory(directory.own_bytes(), place.count, |index, fields| {
            let Some(table) = tables.iter().find(|table| table.index == index) else { return };
            fields.table_offset = table.at;
            fields.table_entries = table.entries;
            if !fields.in_use {
                fields.in_use = true;
                flagged.push(index);
            }
        });
        self.replace_directory(&mut Some(place), (&directory, place.count), taken).await?;
        for table in tables {
            let old = &entries[table.index];
            let old_bytes = u64::from(old.table_entries) * BITMAP_TABLE_ENTRY_BYTES;
            self.free_run(old.table_offset, old_bytes);
            if let Some(recorded) = self.recorded(table.index) {
                let mut now = recorded.table();
                now.at = table.at;
                now.entries.resize(slot_of(table.entries.into()), BitmapTableEntry::Zeros);
            }
        }
        Ok(Lengthened(flagged))
    }

    fn recorded(&self, index: usize) -> Option<&Recorded> {
        self.bitmaps.recorder()?.all.iter().find(|bitmap| bitmap.index == index)
    }

    /// Copies the first `known` entries of the table of the bitmap with this `index` to a new
    /// place, where it has as many `entries`, a piece at a time: it may be long, and there may be
    /// many.
    async fn copy_table(
        &self,
        (index, entry): (usize, &BitmapEntry),
        (entries, known): (u32, u64),
        taken: &mut Taken,
    ) -> Result<CopiedTable> {
        let (store, bits) = (&*self.metadata.store, self.l2.cluster_bits);
        let known = known.min(entries.min(entry.table_entries).into());
        let old_bytes = known * BITMAP_TABLE_ENTRY_BYTES;
        let entries_bytes = u64::from(entries) * BITMAP_TABLE_ENTRY_BYTES;
        let (at, len) = self.take_place(entries_bytes, taken).await?;
        let mut done = 0;
        while done < len {
            let piece = COPIED_BYTES.min(len - done);
            let mut buf = Buf::zeroed(usize::try_from(piece).expect("a piece"));
            let old = usize::try_from(old_bytes.saturating_sub(done).min(piece)).expect("a piece");
            let from = HostOffset::new(entry.table_offset.bytes() + done);
            let part = read_exact(store, from, old).await?;
            let words = part.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word));
            for (slot, word) in (0..).zip(words) {
                let says = BitmapTableEntry::decode(word, bits)?;
                buf.put(slot * size_of::<u64>(), &says.encode().to_be_bytes());
            }
            write_all(store, buf, HostOffset::new(at.bytes() + done)).await?;
            done += piece;
        }
        Ok(CopiedTable { index, at, entries })
    }

    /// The disk, which had `old` bytes, has `len` bytes now, or it has not become longer: the new
    /// part is dirty.
    pub(in crate::write) async fn end_growth(
        &self,
        Lengthened(flagged): Lengthened,
        (old, len): (u64, u64),
    ) -> Result<()> {
        if let Some(recorder) = self.bitmaps.recorder() {
            let locked = self.bitmaps.covering.lock().await;
            recorder.set_len(len);
            drop(locked);
            let new = GuestRange::between(GuestOffset::new(old), GuestOffset::new(len));
            if let Some(new) = new.filter(|new| !new.is_empty()) {
                self.record(new).await?;
            }
        }
        if flagged.is_empty() {
            return Ok(());
        }
        self.fit_tables(len, |index| flagged.contains(&index)).await
    }

    /// The bitmaps that `are_done` are not in use any more, and have tables of a disk of `len`
    /// bytes, durably.
    pub(super) async fn fit_tables(
        &self,
        len: u64,
        are_done: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let Some((_, entries)) = self.bitmap_entries().await? else { return Ok(()) };
        let needed: Vec<_> = entries
            .iter()
            .map(|entry| {
                bitmap_table_entries(entry.granularity_bits, len, self.l2.cluster_bits).get()
            })
            .collect();
        self.change_directory(|index, fields| {
            if are_done(index) {
                fields.in_use = false;
                let needed = needed.get(index).and_then(|needed| u32::try_from(*needed).ok());
                fields.table_entries = needed.unwrap_or(u32::MAX).min(fields.table_entries);
            }
        })
        .await
    }

    /// From now on disabled bitmaps are kept, too: something is merged into them.
    pub(crate) fn take_disabled_bitmaps(&self) {
        self.bitmaps.takes_disabled.store(true, Ordering::Release);
    }
}

impl NewBitmap {
    /// One like that of `entry`.
    pub(crate) fn like(entry: &BitmapEntry) -> Self {
        Self {
            name: entry.name.clone(),
            granularity_bits: entry.granularity_bits,
            is_enabled: entry.auto,
        }
    }
}
