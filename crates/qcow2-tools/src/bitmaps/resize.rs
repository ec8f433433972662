//! The bitmaps of a disk whose length changes: each gets a table for the new length, which shares
//! the data of the old one. What the disk gains is not dirty, as in QEMU.
//!
//! ```text
//! new tables and a new directory, counted ─▶ durable
//!   ─▶ header with the new length and the new directory ─▶ the old is freed
//! ```
//!
//! Whoever writes that header ([`ResizedBitmaps::of_new_length`]) replaces both at once. Until then
//! nobody may take the bitmaps, which are of the old length, for those of a longer disk.

use super::room::table_entries_for;
use super::{BITMAP_TABLE_ENTRY_BYTES, Change, Editor};
use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2::snapshots::list_bitmaps;
use mica_qcow2::{FileSpace, read_header};
use mica_qcow2_format::{BitmapEntry, BitmapTableEntry, BitmapsExtension, Header};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// The bitmaps of a disk that is about to get another length.
pub(crate) struct ResizedBitmaps {
    /// Names the bitmaps as they were.
    old: BitmapsExtension,
    old_size: u64,
    new: BitmapsExtension,
    /// Where the old tables are, with their entries.
    old_tables: Vec<(HostOffset, u32)>,
    new_tables: Vec<(HostOffset, u32)>,
    /// Data that only the old tables name, and only the new ones.
    old_data: Vec<HostOffset>,
    new_data: Vec<HostOffset>,
}

impl ResizedBitmaps {
    /// Writes what the bitmaps of the image in `store` need when its disk is `size` bytes long.
    /// Nothing if there are none. `header` is that of the image, before and after.
    ///
    /// # Errors
    /// `Invalid` if a bitmap would become too large, and as [`HeaderChange::plan`]: nothing has
    /// changed; any error of the store.
    ///
    /// [`HeaderChange::plan`]: mica_qcow2_format::HeaderChange::plan
    pub(crate) async fn prepare(
        store: &Arc<dyn Store>,
        header: &mut Header,
        size: u64,
    ) -> Result<Option<Self>> {
        if header.bitmaps.is_none() {
            return Ok(None);
        }
        let mut editor = Self::checked(store, header, size).await?;
        if header.autoclear.unknown != 0 {
            // Resizing clears what this version does not know, which may be what makes bitmaps
            // count as true that a writer did not save: so the directory has to say it first.
            editor.write("", Change::Keep, None).await?;
            *header = read_header(&**store).await?;
            editor = Self::checked(store, header, size).await?;
        }
        let Some(old) = header.bitmaps else { return Ok(None) };
        let space = FileSpace::open(Arc::clone(store), header).await?;
        editor.protect_tables(&space).await?;
        let mut all = Self {
            old,
            old_size: header.size,
            new: old,
            old_tables: Vec::new(),
            new_tables: Vec::new(),
            old_data: Vec::new(),
            new_data: Vec::new(),
        };
        for index in 0..editor.entries.len() {
            let entry = editor.entries[index].clone();
            // Of one that is inconsistent the table may be anything, and nobody reads it.
            if !entry.in_use {
                editor.entries[index] = all.resize(&editor, &space, &entry, size).await?;
            }
        }
        all.new = editor.put_directory(&space).await?.unwrap_or(old);
        space.commit().await?;
        // The refcount table may have moved.
        *header = read_header(&**store).await?;
        Ok(Some(all))
    }

    /// What the header names that says the new length.
    pub(crate) fn of_new_length(&self) -> BitmapsExtension {
        self.new
    }

    /// Whether the bitmaps of the image in `store` can be those of a disk of `size` bytes.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    pub(crate) async fn check(store: &Arc<dyn Store>, header: &Header, size: u64) -> Result<()> {
        match header.bitmaps {
            None => Ok(()),
            Some(_) => Self::checked(store, header, size).await.map(drop),
        }
    }

    /// What changes the bitmaps, which can be those of a disk of `size` bytes.
    async fn checked(store: &Arc<dyn Store>, header: &Header, size: u64) -> Result<Editor> {
        let entries = list_bitmaps(&**store, header).await?;
        let editor = Editor::new(Arc::clone(store), header.clone(), entries);
        for entry in &editor.entries {
            table_entries_for(&editor.header, entry, size)?;
        }
        editor.check_room().await?;
        Ok(editor)
    }

    /// Writes a table for `entry` of a disk of `size` bytes; returns the entry that names it.
    async fn resize(
        &mut self,
        editor: &Editor,
        space: &FileSpace,
        entry: &BitmapEntry,
        size: u64,
    ) -> Result<BitmapEntry> {
        let (store, bits) = (&*editor.store, editor.header.cluster_bits);
        let cluster_bytes = usize::try_from(bits.bytes()).expect("at most 2 MiB");
        let len = usize::try_from(u64::from(entry.table_entries) * BITMAP_TABLE_ENTRY_BYTES);
        let before = read_exact(store, entry.table_offset, len.expect("16 MiB")).await?;
        let table_entries = table_entries_for(&editor.header, entry, size)?;
        let bytes = u64::from(table_entries) * BITMAP_TABLE_ENTRY_BYTES;
        let clusters = bits.clusters_for(bytes);
        let mut table = vec![0; usize::try_from(bits.bytes_of(clusters)).expect("16 MiB")];
        let kept = usize::try_from(bytes).expect("16 MiB").min(before.len());
        table[..kept].copy_from_slice(&before[..kept]);
        for word in before[kept..].as_chunks().0 {
            let dropped = BitmapTableEntry::decode(u64::from_be_bytes(*word), bits)?;
            self.old_data.extend(place(dropped));
        }
        // The bits that both lengths have may end within a cluster.
        let common = size.min(editor.header.disk_bytes()).div_ceil(1 << entry.granularity_bits);
        let bits_per_cluster = bits.bytes() * 8;
        let (index, within) = (common / bits_per_cluster, common % bits_per_cluster);
        let index = usize::try_from(index).expect("within the table");
        if within > 0
            && let Some(word) = table.as_chunks_mut::<8>().0.get_mut(index)
        {
            let last = BitmapTableEntry::decode(u64::from_be_bytes(*word), bits)?;
            let mut data = match last {
                BitmapTableEntry::Zeros => Buf::new(0),
                BitmapTableEntry::Ones => {
                    let mut ones = Buf::new(cluster_bytes);
                    ones.fill(u8::MAX);
                    ones
                }
                BitmapTableEntry::Data(at) => read_exact(store, at, cluster_bytes).await?,
            };
            if !data.is_empty() {
                clear_from(data.own_bytes(), within);
                let at = space.take(1).await?;
                write_all(store, data, at).await?;
                *word = BitmapTableEntry::Data(at).encode().to_be_bytes();
                self.new_data.push(at);
                self.old_data.extend(place(last));
            }
        }
        let at = space.take(clusters).await?;
        write_all(store, Buf::from_slice(&table), at).await?;
        self.old_tables.push((entry.table_offset, entry.table_entries));
        self.new_tables.push((at, table_entries));
        Ok(BitmapEntry { table_offset: at, table_entries, ..entry.clone() })
    }

    /// The disk has its new length, or why not: the bitmaps of the length that it does not have are
    /// freed.
    ///
    /// # Errors
    /// That of `resized`, else any error of the store.
    pub(crate) async fn finish(self, store: &Arc<dyn Store>, resized: Result<()>) -> Result<()> {
        let header = read_header(&**store).await?;
        let is_old = header.size == self.old_size;
        if resized.is_err() && !is_old {
            // Something is half done: what nobody names leaks.
            return resized;
        }
        let unused = if is_old { self.new } else { self.old };
        let editor = Editor::new(Arc::clone(store), header, Vec::new());
        let (tables, data) = match is_old {
            true => (self.new_tables, self.new_data),
            false => (self.old_tables, self.old_data),
        };
        let space = FileSpace::open(Arc::clone(store), &editor.header).await?;
        editor.protect_tables(&space).await?;
        let bits = editor.header.cluster_bits;
        for at in data {
            space.free(at, 1).await?;
        }
        for (at, entries) in tables {
            let bytes = u64::from(entries) * BITMAP_TABLE_ENTRY_BYTES;
            space.free(at, bits.clusters_for(bytes)).await?;
        }
        let clusters = bits.clusters_for(unused.directory_bytes);
        space.free(unused.directory_offset, clusters).await?;
        space.commit().await?;
        resized
    }
}

/// Where the bits of a cluster of a bitmap are, if they are anywhere.
fn place(entry: BitmapTableEntry) -> Option<HostOffset> {
    match entry {
        BitmapTableEntry::Data(at) => Some(at),
        BitmapTableEntry::Zeros | BitmapTableEntry::Ones => None,
    }
}

/// Clears all bits from bit `first` on.
fn clear_from(bytes: &mut [u8], first: u64) {
    let at = usize::try_from(first / 8).expect("within a cluster");
    let Some((byte, after)) = bytes.get_mut(at..).and_then(<[u8]>::split_first_mut) else { return };
    *byte &= (1_u8 << (first % 8)) - 1;
    after.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_cleared_from_one_on() {
        let cleared = |first| {
            let mut bytes = [u8::MAX; 3];
            clear_from(&mut bytes, first);
            bytes
        };
        assert_eq!(cleared(0), [0, 0, 0]);
        assert_eq!(cleared(11), [0xff, 0b111, 0]);
        assert_eq!(cleared(16), [0xff, 0xff, 0]);
        assert_eq!(cleared(24), [0xff; 3]);
    }
}
