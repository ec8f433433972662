//! Persistent bitmaps: directory, tables, data.
//!
//! QEMU loads the bitmaps when it opens the image, so what it cannot load ends a check before it
//! begins.

use super::{Checker, READ_BYTES_MAX};
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{
    BITMAP_TABLE_ENTRY_BYTES, BitmapEntry, BitmapTableEntry, BitmapsExtension,
    bitmap_table_entries, decode_bitmap_directory,
};
use std::collections::BTreeMap;

impl Checker<'_> {
    /// Counts the references to and from bitmaps.
    pub(super) async fn refer_bitmaps(&mut self) -> Result<()> {
        let header = self.header;
        let Some(extension) = header.bitmaps else { return Ok(()) };
        let BitmapsExtension { directory_offset, directory_bytes, .. } = extension;
        self.refer_place(directory_offset.bytes(), directory_bytes, 1)?;
        // At most 64 MiB, as the extension's decoder has checked.
        let len = usize::try_from(directory_bytes).unwrap_or(usize::MAX);
        let there = self.file_bytes.saturating_sub(directory_offset.bytes());
        if directory_bytes > there.next_multiple_of(header.cluster_bits.bytes()) {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("the bitmap directory at {directory_offset} lies beyond the file's end"),
            ));
        }
        let directory = self.read(directory_offset.bytes(), len).await?;
        let bitmaps = decode_bitmap_directory(
            &directory,
            &extension,
            header.cluster_bits,
            header.disk_bytes(),
        )?;
        drop(directory);
        // Those that share a table are read once.
        let mut tables: BTreeMap<(u64, u64), (&BitmapEntry, u64)> = BTreeMap::new();
        for bitmap in &bitmaps {
            self.check_table_size(bitmap)?;
            let bytes = u64::from(bitmap.table_entries) * BITMAP_TABLE_ENTRY_BYTES;
            let place = (bitmap.table_offset.bytes(), bytes);
            tables.entry(place).or_insert((bitmap, 0)).1 += 1;
        }
        self.check_overlap("the tables of bitmaps", tables.keys().copied())?;
        for ((at, bytes), (bitmap, times)) in tables {
            self.refer_bitmap(bitmap, (at, bytes), times).await?;
        }
        Ok(())
    }

    fn check_table_size(&self, bitmap: &BitmapEntry) -> Result<()> {
        let (bits, disk_bytes) = (self.header.cluster_bits, self.header.disk_bytes());
        let entries = bitmap_table_entries(bitmap.granularity_bits, disk_bytes, bits).get();
        if bitmap.in_use || entries == u64::from(bitmap.table_entries) {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Corrupt,
            format!(
                "bitmap {:?} has a table of {} entries, and the disk needs {entries}",
                bitmap.name, bitmap.table_entries
            ),
        ))
    }

    /// Counts what `times` bitmaps refer to, of which `bitmap` is the first, and whose table has
    /// this place.
    async fn refer_bitmap(
        &mut self,
        bitmap: &BitmapEntry,
        (mut at, bytes): (u64, u64),
        times: u64,
    ) -> Result<()> {
        let bits = self.header.cluster_bits;
        self.refer_place(at, bytes, times)?;
        let end = at.saturating_add(bytes).min(self.file_bytes);
        while at < end {
            let len = usize::try_from(end - at).unwrap_or(usize::MAX).min(READ_BYTES_MAX);
            let piece = self.read(at, len).await?;
            for &entry in piece.as_chunks().0 {
                let entry = BitmapTableEntry::decode(u64::from_be_bytes(entry), bits)
                    .map_err(|error| error.wrap(format!("bitmap {:?}", bitmap.name)))?;
                if let BitmapTableEntry::Data(data) = entry {
                    self.refer_place(data.bytes(), bits.bytes(), times)?;
                }
            }
            at += len as u64;
        }
        Ok(())
    }
}
