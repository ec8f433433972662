//! Makes the disk of an image that is not in use longer or shorter.
//!
//! Longer: the data file, if there is one ─▶ room in the L1 table ─▶ zeros where something would
//! show ─▶ the new size, and bitmaps of that. Shorter: a copy of the L2 table in which the disk
//! ends, without what is beyond, and of the L1 table ─▶ the new size with these ─▶ what is beyond
//! is freed, and the file ends where its last cluster does ─▶ the data file.
//!
//! Invariants
//! - I1 What the header names is durable before the header is, so that a power cut leaves the old
//!   length or the new one; at worst clusters leak.
//! - I2 The part by which a disk grew never holds anything but zeros: neither what a longer backing
//!   file has there, nor what the image kept from a time when it was longer.
//! - I3 A cluster is freed only after nothing durable names it.
//! - I4 If there is room for the copies, no entry beyond the end of a shorter disk is left, at any
//!   instant: another program that makes it longer shows what such an entry names.

mod amended;
mod blocks;
mod data;
mod future;

use crate::bitmaps::{ResizedBitmaps, replace_header};
use crate::recover::{open_for_change, repair_dirty};
use data::DataFile;
use future::with_size;
use mica_block::{
    Disk as _, Error, ErrorKind, Images, Manage as _, OpenImage, OpenedImages, Result, Store,
    Zeroes, read_exact, write_all,
};
use mica_qcow2::FileSpace;
use mica_qcow2::read_header;
use mica_qcow2::{Chain, ChainOptions, IndexUse, check_resizable};
use mica_qcow2_format::bits::{BITMAPS_CONSISTENT, DIRTY, RAW_EXTERNAL};
use mica_qcow2_format::{
    Autoclear, BitmapsExtension, Header, L1Entry, L2Entry, L2Format, Version, field,
};
use mica_rt::Buf;
use mica_units::{ClusterBits, GuestOffset, GuestRange, HostOffset, SECTOR_BYTES};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An image whose length is to be changed.
pub struct Resizer {
    images: Arc<dyn Images>,
    path: PathBuf,
    image: OpenImage,
    header: Header,
    data: Option<DataFile>,
}

impl Resizer {
    /// Opens the image at `path` exclusively.
    ///
    /// # Errors
    /// If it is not an image that can be written, or its length cannot be changed.
    pub async fn open(images: Arc<dyn Images>, path: &Path) -> Result<Self> {
        let (image, header) = open_for_change(&*images, path).await?;
        let step = async {
            check_resizable(&header)?;
            DataFile::open(&*images, path, &header)
        };
        let data = step.await.map_err(|error: Error| error.wrap(path.display().to_string()))?;
        Ok(Self { images, path: path.to_owned(), image, header, data })
    }

    /// Length of the disk.
    pub fn disk_bytes(&self) -> u64 {
        self.header.disk_bytes()
    }

    /// Makes the disk `size` bytes long, a multiple of a sector.
    ///
    /// # Errors
    /// `Invalid` if no image with clusters of this size can be that long; any error of the store.
    pub async fn resize(&mut self, size: u64) -> Result<()> {
        let old = self.disk_bytes();
        if size == old {
            return Ok(());
        }
        let room = match size > old {
            true => Some(self.reserve(size).await?),
            false => None,
        };
        self.use_room(size, room).await
    }

    /// Gives the disk, and its bitmaps, `size` bytes; if it becomes longer, it has `room` for them.
    async fn use_room(&mut self, size: u64, room: Option<Room>) -> Result<()> {
        let store = Arc::clone(&self.image.store);
        let bitmaps = match ResizedBitmaps::prepare(&store, &mut self.header, size).await {
            Ok(bitmaps) => bitmaps,
            Err(error) => {
                self.give_up(room).await;
                return Err(error);
            }
        };
        let new_bitmaps = bitmaps.as_ref().map(ResizedBitmaps::of_new_length);
        let resized = match room {
            Some(room) => self.grow(size, room, new_bitmaps).await,
            None => self.shrink(size, new_bitmaps).await,
        };
        match bitmaps {
            Some(bitmaps) => bitmaps.finish(&store, resized).await,
            None => resized,
        }
    }

    /// Makes room for a disk of `size` bytes, which is longer: in the data file and the L1 table,
    /// and for the entries that a raw data file needs. Nothing of it shows in the disk.
    ///
    /// # Errors
    /// Any error of a store; then the data file has its old length again.
    async fn reserve(&mut self, size: u64) -> Result<Room> {
        let entries = self.header.l1_entries_for(size)?;
        let (old, bits) = (self.disk_bytes(), self.header.cluster_bits);
        let data_bytes = match &self.data {
            Some(data) => Some(data.lengthen(old, size, bits).await?),
            None => None,
        };
        let room = Room { data_bytes };
        let placed = async {
            if entries > self.header.l1_entries {
                self.grow_l1(entries).await?;
            }
            match self.data.as_ref().is_some_and(DataFile::is_raw) {
                true => self.place_new(size).await,
                false => Ok(()),
            }
        };
        match placed.await {
            Ok(()) => Ok(room),
            Err(error) => {
                self.give_up(Some(room)).await;
                Err(error)
            }
        }
    }

    /// The disk does not become longer.
    async fn give_up(&self, room: Option<Room>) {
        if let (Some(data), Some(len)) = (&self.data, room.and_then(|room| room.data_bytes)) {
            // At worst zeros are left behind the disk, as after a power cut: the next resize takes
            // them for its own.
            let _ = data.shorten(len).await;
        }
    }

    async fn grow(&mut self, size: u64, _: Room, bitmaps: Option<BitmapsExtension>) -> Result<()> {
        // A raw data file has nothing but zeros there, and the image names them.
        if !self.data.as_ref().is_some_and(DataFile::is_raw) {
            self.zero_new(size).await?;
        }
        self.header.size = size;
        self.write_length(bitmaps).await
    }

    /// Makes the L1 table longer, within its clusters if it fits them, otherwise elsewhere.
    async fn grow_l1(&mut self, entries: u32) -> Result<()> {
        let bits = self.header.cluster_bits;
        let bytes = |entries: u32| u64::from(entries) * L1Entry::BYTES as u64;
        let (old, new) = (bytes(self.header.l1_entries), bytes(entries));
        let store = &*self.image.store;
        let has_place = self.header.l1_offset != HostOffset::ZERO;
        if has_place && bits.clusters_for(new) == bits.clusters_for(old) {
            let at = HostOffset::new(self.header.l1_offset.bytes() + old);
            write_all(store, Buf::zeroed(len_of(new - old)), at).await?;
            store.sync().await?;
            self.header.l1_entries = entries;
            return self.write_header().await;
        }
        let mut table = Buf::zeroed(len_of(new));
        let before = read_exact(store, self.header.l1_offset, len_of(old)).await?;
        table.put(0, &before);
        let file_len = store.len()?;
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        let at = match space.take(bits.clusters_for(new)).await {
            Ok(at) => at,
            Err(error) if error.kind() != ErrorKind::NoSpace => return Err(error),
            Err(error) if self.header.version == Version::V2 => return Err(error),
            Err(error) if self.header.bitmaps.is_some() || self.header.stale_bitmaps => {
                // A repair would take their clusters for leaks.
                return Err(error.wrap("remove the bitmaps first, by `mica bitmap --remove`"));
            }
            Err(_) => return self.move_l1_and_count(table, entries).await,
        };
        write_all(store, table, at).await?;
        space.commit().await?;
        let old_at = self.header.l1_offset;
        // The refcount table may have moved in the meantime.
        self.header = read_header(store).await?;
        self.header.l1_offset = at;
        self.header.l1_entries = entries;
        self.write_header().await?;
        if has_place {
            space.forget(old_at);
            space.free(old_at, bits.clusters_for(old)).await?;
        }
        space.commit().await?;
        // What the file had stays in it: a cluster that no refcount counts may be named all the
        // same, and a repair can save it.
        space.give_back(file_len.max(at.bytes() + new)).await
    }

    /// Puts the L1 table at the end, where it is not counted, under the dirty bit, and then repairs
    /// all refcounts. So a table that is longer than what a refcount block counts finds a place,
    /// too.
    async fn move_l1_and_count(&mut self, table: Buf, entries: u32) -> Result<()> {
        let store = &*self.image.store;
        // Clusters that were reserved in the search were never written.
        self.header = read_header(store).await?;
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        let at = space.end(self.header.cluster_bits.clusters_for(table.len() as u64)).await?;
        write_all(store, table, at).await?;
        store.sync().await?;
        self.header.l1_offset = at;
        self.header.l1_entries = entries;
        self.header.incompatible.dirty = true;
        self.write_header().await?;
        self.header = repair_dirty(Arc::clone(&self.image.store), &self.header).await?;
        if self.header.incompatible.dirty {
            let what = "the refcounts could not be repaired: `mica check` says what is wrong";
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok(())
    }

    /// Writes zeros over what would show in a disk of `size` bytes (I2).
    async fn zero_new(&self, size: u64) -> Result<()> {
        let old = self.disk_bytes();
        let kept = self.kept_end(old).await?.min(size);
        if kept <= old && self.header.backing.is_none() {
            return Ok(());
        }
        let mut images = OpenedImages::new(Arc::clone(&self.images));
        images.add(&self.path, with_size(&self.image, size, self.header.version));
        if let Some(data) = &self.data {
            data.held_by(&mut images);
        }
        // It was repaired as it was opened. Another repair, which is not shown the bitmaps, would
        // free what they have.
        let options =
            ChainOptions { index: IndexUse::Ignore, writable: true, ..ChainOptions::default() };
        let chain = Chain::open(Arc::new(images), &self.path, &options).await?;
        let beneath = chain.backing_len().min(size);
        let end = GuestOffset::new(kept.max(beneath));
        let zeroed = match GuestRange::between(GuestOffset::new(old), end) {
            Some(range) if !range.is_empty() => {
                let how = Zeroes { may_unmap: true, fast: false };
                chain.write_zeroes(range, how).await
            }
            _ => Ok(()),
        };
        let closed = chain.close().await;
        zeroed.and(closed)
    }

    /// The end of what the tables cover beyond `end`; `end` if they cover nothing there.
    async fn kept_end(&self, end: u64) -> Result<u64> {
        let l2 = self.header.l2_format();
        let l1 = self.read_l1().await?;
        let first = l2.l1_index(GuestOffset::new(end));
        let named = |entry: &u64| L1Entry(*entry).offset() != HostOffset::ZERO;
        let beyond = l1.iter().skip(len_of(first)).rposition(named);
        match beyond {
            None => Ok(end),
            Some(0) => {
                // Only the table in which the disk ends exists, which is the usual case.
                let Some(at) = L1Entry(l1[len_of(first)]).decode(l2.cluster_bits)? else {
                    return Ok(end);
                };
                let table = read_exact(&*self.image.store, at, self.cluster_len()).await?;
                let start = l2.l2_index(GuestOffset::new(end));
                let used = (start..l2.entries())
                    .rfind(|index| l2.raw(&table, len_of(*index)) != Some(Default::default()));
                Ok(used.map_or(end, |index| {
                    let after = l2.first_of_table(first).saturating_add(index + 1);
                    l2.cluster_bits.start_of(after).bytes()
                }))
            }
            Some(more) => Ok(l2.table_start(first + more as u64 + 1).bytes()),
        }
    }

    async fn shrink(&mut self, size: u64, bitmaps: Option<BitmapsExtension>) -> Result<()> {
        let (bits, entries) = (self.header.cluster_bits, self.header.l1_entries_for(size)?);
        let mut l1 = self.read_l1().await?;
        let beyond = l1.split_off(len_of(entries.into()));
        let old_at = self.header.l1_offset;
        let cut = self.cut_table(&l1, size).await?;
        let copies = match &cut {
            Some(cut) => self.copy_tables((&l1, &beyond), cut).await?,
            None => None,
        };
        self.header.size = size;
        self.header.l1_entries = entries;
        if let Some(copies) = copies {
            self.header.l1_offset = copies.l1;
        }
        self.write_length(bitmaps).await?;

        let mut space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        if let Some(cut) = &cut {
            space.check(cut.at)?;
        }
        // What is beyond the end may name anything.
        self.read_l1().await?.iter().for_each(|entry| space.protect(L1Entry(*entry).offset()));
        if let Some(cut) = &cut {
            self.end_cut(&space, cut, copies).await?;
        }
        for entry in &beyond {
            let Some(at) = L1Entry(*entry).decode(bits)? else { continue };
            space.check(at)?;
            let table = read_exact(&*self.image.store, at, self.cluster_len()).await?;
            self.free_entries(&space, &table, 0).await?;
            space.free(at, 1).await?;
        }
        let all = l1_clusters(bits, l1.len() + beyond.len());
        let kept = if copies.is_some() { 0 } else { l1_clusters(bits, l1.len()) };
        space.free(HostOffset::new(old_at.bytes() + bits.bytes_of(kept)), all - kept).await?;
        space.commit().await?;
        if let (Some(cut), Some(copies)) = (&cut, copies) {
            // Before any of what is free now is used again.
            self.give_back(&space).await?;
            space = self.bring_down(&l1, cut, copies).await?;
        }
        let space = self.drop_empty_blocks(space).await?;
        self.give_back(&space).await?;
        match &self.data {
            Some(data) => data.shorten(size).await,
            None => Ok(()),
        }
    }

    /// Returns free space to the file system, except before the last table.
    async fn give_back(&self, space: &FileSpace) -> Result<()> {
        let tables = self.read_l1().await?.into_iter().map(|entry| L1Entry(entry).offset());
        let last_table = tables.map(HostOffset::bytes).max().unwrap_or(0);
        space.give_back(last_table.saturating_add(self.header.cluster_bits.bytes())).await
    }

    /// Brings the copies of tables, which were made while what is beyond the end was still there,
    /// nearer to the start, so that the file can end earlier.
    async fn bring_down(&mut self, l1: &[u64], cut: &Cut, before: Copies) -> Result<FileSpace> {
        let mut named = l1.to_vec();
        named[cut.index] = L1Entry::encode(before.l2, true).0;
        let again = self.copy_tables((&named, &[]), cut).await?;
        let mut unused = None;
        if let Some(again) = again {
            let last = |copies: Copies| copies.l1.max(copies.l2);
            let is_nearer = last(again) < last(before);
            unused = Some(if is_nearer { before } else { again });
            if is_nearer {
                self.header.l1_offset = again.l1;
                self.write_header().await?;
            }
        }
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        if let Some(unused) = unused {
            space.free(unused.l2, 1).await?;
            space.free(unused.l1, l1_clusters(self.header.cluster_bits, l1.len())).await?;
            space.commit().await?;
        }
        Ok(space)
    }

    /// What has to be cleared in the table in which a disk of `size` bytes ends, if that has
    /// anything beyond.
    async fn cut_table(&self, l1: &[u64], size: u64) -> Result<Option<Cut>> {
        let l2 = self.header.l2_format();
        let end = size.next_multiple_of(l2.cluster_bits.bytes());
        if end.is_multiple_of(l2.table_bytes()) {
            return Ok(None);
        }
        let index = len_of(l2.l1_index(GuestOffset::new(end)));
        let entry = L1Entry(l1[index]);
        let Some(at) = entry.decode(l2.cluster_bits)? else { return Ok(None) };
        let table = read_exact(&*self.image.store, at, self.cluster_len()).await?;
        let first = l2.l2_index(GuestOffset::new(end));
        let beyond = &table[len_of(first) * l2.entry_bytes()..];
        let has_any = beyond.iter().any(|byte| *byte != 0);
        Ok(has_any.then_some(Cut { index, at, is_own: entry.copied(), table, first }))
    }

    /// Puts copies of the table that is `cut`, and of the L1 table with the entries `l1` without
    /// those that are `beyond`, in new places, if there is room. An image that contradicts itself
    /// gets no copies.
    async fn copy_tables(
        &mut self,
        (l1, beyond): (&[u64], &[u64]),
        cut: &Cut,
    ) -> Result<Option<Copies>> {
        let (l2, store) = (self.header.l2_format(), &*self.image.store);
        let bits = l2.cluster_bits;
        let counts_of_block = bits.bytes() * 8 / u64::from(self.header.refcount_width.bits());
        let tables = || l1.iter().chain(beyond).map(|entry| L1Entry(*entry).offset());
        let own = L1Entry(l1[cut.index]).offset();
        let is_alone = tables().filter(|table| *table == own).count() == 1;
        if !is_alone || l1_clusters(bits, l1.len()) > counts_of_block / 2 {
            return Ok(None);
        }
        let space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
        tables().for_each(|table| space.protect(table));
        let written = async {
            let copies = Copies {
                l2: space.take(1).await?,
                l1: space.take(l1_clusters(bits, l1.len())).await?,
            };
            let mut entries = l1.to_vec();
            entries[cut.index] = L1Entry::encode(copies.l2, true).0;
            let mut table = Buf::zeroed(len_of(bits.bytes()) * len_of(l1_clusters(bits, l1.len())));
            let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_be_bytes()).collect();
            table.put(0, &bytes);
            write_all(store, cut.cleared(l2), copies.l2).await?;
            write_all(store, table, copies.l1).await?;
            space.commit().await?;
            Ok(copies)
        };
        let written: Result<Copies> = written.await;
        // The refcount table may have moved in the meantime.
        self.header = read_header(store).await?;
        // Whatever it was: nothing names what was written.
        Ok(written.ok())
    }

    /// Frees what was `cut`. Without copies the table is cleared where it is; one that a snapshot
    /// has too stays, and its entries beyond the end are zeroed if the disk grows again.
    async fn end_cut(&self, space: &FileSpace, cut: &Cut, copies: Option<Copies>) -> Result<()> {
        if copies.is_some() {
            space.free(cut.at, 1).await?;
        } else if cut.is_own {
            let store = &*self.image.store;
            write_all(store, cut.cleared(self.header.l2_format()), cut.at).await?;
            store.sync().await?;
        } else {
            return Ok(());
        }
        self.free_entries(space, &cut.table, cut.first).await
    }

    /// Frees what the entries of `table` name, from entry `first` on.
    async fn free_entries(&self, space: &FileSpace, table: &[u8], first: u64) -> Result<()> {
        let l2 = self.header.l2_format();
        if l2.data_file {
            // They name places in the data file, which counts nothing.
            return Ok(());
        }
        for index in first..l2.entries() {
            let Some(raw) = l2.raw(table, len_of(index)) else { break };
            match l2.interpret(raw) {
                Ok(L2Entry::Compressed(compressed)) => {
                    let end = HostOffset::new(compressed.host.bytes() + compressed.len_max);
                    let first = l2.cluster_bits.host_cluster(compressed.host);
                    let count = l2.cluster_bits.host_cluster_up(end).saturating_since(first);
                    space.free(l2.cluster_bits.start_of(first), count).await?;
                }
                Ok(entry) => {
                    if let Some(host) = entry.host() {
                        space.free(host, 1).await?;
                    }
                }
                // Its target is not known: it leaks, and a check repairs that.
                Err(_) => {}
            }
        }
        Ok(())
    }

    async fn read_l1(&self) -> Result<Vec<u64>> {
        let len = len_of(u64::from(self.header.l1_entries)) * L1Entry::BYTES;
        let bytes = read_exact(&*self.image.store, self.header.l1_offset, len).await?;
        Ok(bytes.as_chunks().0.iter().map(|entry| u64::from_be_bytes(*entry)).collect())
    }

    fn cluster_len(&self) -> usize {
        len_of(self.header.cluster_bits.bytes())
    }

    /// As [`Self::write_header`], with these `bitmaps`, if the image has some.
    async fn write_length(&mut self, bitmaps: Option<BitmapsExtension>) -> Result<()> {
        let Some(bitmaps) = bitmaps else { return self.write_header().await };
        let Header { size, l1_entries, l1_offset, .. } = self.header;
        // The refcount table may have moved.
        let mut header = read_header(&*self.image.store).await?;
        header.autoclear = Autoclear { unknown: 0, bitmaps_consistent: true, ..header.autoclear };
        self.header = Header { size, l1_entries, l1_offset, bitmaps: Some(bitmaps), ..header };
        replace_header(&*self.image.store, &self.header).await
    }

    /// Writes size and L1 table into the header's first sector in one write, and makes that
    /// durable.
    async fn write_header(&self) -> Result<()> {
        let store: &dyn Store = &*self.image.store;
        let mut sector = read_exact(store, HostOffset::ZERO, len_of(SECTOR_BYTES)).await?;
        sector.put(field::SIZE, &self.header.size.to_be_bytes());
        sector.put(field::L1_ENTRIES, &self.header.l1_entries.to_be_bytes());
        sector.put(field::L1_OFFSET, &self.header.l1_offset.bytes().to_be_bytes());
        if self.header.version == Version::V3 {
            let field = &mut sector.own_bytes()[field::AUTOCLEAR..field::AUTOCLEAR + 8];
            let bits = field.first_chunk().map_or(0, |bits| u64::from_be_bytes(*bits));
            field.copy_from_slice(&(bits & (BITMAPS_CONSISTENT | RAW_EXTERNAL)).to_be_bytes());
            if self.header.incompatible.dirty {
                let field = &mut sector.own_bytes()[field::INCOMPATIBLE..field::INCOMPATIBLE + 8];
                let bits = field.first_chunk().map_or(0, |bits| u64::from_be_bytes(*bits));
                field.copy_from_slice(&(bits | DIRTY).to_be_bytes());
            }
        }
        write_all(store, sector, HostOffset::ZERO).await?;
        store.sync().await
    }
}

/// Room for a longer disk.
struct Room {
    /// The length that the data file had before.
    data_bytes: Option<u64>,
}

/// Where copies of two tables are.
#[derive(Clone, Copy)]
struct Copies {
    l1: HostOffset,
    l2: HostOffset,
}

/// The table in which a shorter disk ends, as it was.
struct Cut {
    /// Its entry in the L1 table.
    index: usize,
    at: HostOffset,
    /// No snapshot has it too.
    is_own: bool,
    table: Buf,
    /// The first entry beyond the end.
    first: u64,
}

impl Cut {
    /// The table without what is beyond the end.
    fn cleared(&self, l2: L2Format) -> Buf {
        let mut table = Buf::from_slice(&self.table);
        table.fill_part(len_of(self.first) * l2.entry_bytes()..table.len(), 0);
        table
    }
}

/// Clusters of an L1 table with this many entries.
fn l1_clusters(bits: ClusterBits, entries: usize) -> u64 {
    bits.clusters_for((entries * L1Entry::BYTES) as u64)
}

/// A length that was checked to be small.
fn len_of(len: u64) -> usize {
    usize::try_from(len).expect("a table fits the memory")
}
