//! The table of internal snapshots.

use super::{Checker, Finding, Snapshots};
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{
    L1_BYTES_MAX, L1Entry, SNAPSHOT_TABLE_BYTES_MAX, SnapshotDecoded, SnapshotEntry, Version,
};
use mica_units::HostOffset;
use std::collections::BTreeMap;

/// Bytes of the table that are read at a time.
const PIECE_BYTES: usize = 1 << 18;
/// Extra data that version 3 requires.
const EXTRA_BYTES_MIN: u32 = 16;

impl Checker<'_> {
    /// Reads the table and judges its entries.
    pub(super) async fn read_snapshots(&mut self) -> Result<Snapshots> {
        let header = self.header;
        header.check_snapshot_table()?;
        let start = header.snapshots_offset.bytes();
        let mut l1_tables: BTreeMap<(HostOffset, u32), u64> = BTreeMap::new();
        let mut window = Window { at: start, bytes: Vec::new() };
        let mut end = start;
        for index in 0..header.snapshot_count {
            let entry_at = end.next_multiple_of(8);
            let (entry, len) = self.read_entry(&mut window, entry_at).await?;
            end = entry_at + len as u64;
            if end - start > SNAPSHOT_TABLE_BYTES_MAX {
                return Err(Error::new(
                    ErrorKind::Corrupt,
                    format!("the snapshot table exceeds {SNAPSHOT_TABLE_BYTES_MAX} bytes"),
                ));
            }
            if header.version == Version::V3 && entry.extra_bytes < EXTRA_BYTES_MIN {
                self.corruption(Finding::SnapshotIncomplete { index }, 1);
            }
            if self.has_l1(&entry) && entry.l1_entries > 0 {
                *l1_tables.entry((entry.l1_offset, entry.l1_entries)).or_default() += 1;
            }
        }
        if header.incompatible.external_data_file && header.snapshot_count > 0 {
            let count = header.snapshot_count;
            self.corruption(Finding::SnapshotsWithDataFile { count }, 1);
        }
        let places = l1_tables.keys().map(|&(at, entries)| (at.bytes(), l1_bytes(entries)));
        self.check_overlap("the L1 tables of snapshots", places)?;
        let l1_tables =
            l1_tables.into_iter().map(|((at, entries), times)| (at, entries, times)).collect();
        Ok(Snapshots { l1_tables, table_bytes: end - start })
    }

    async fn read_entry(&self, window: &mut Window, at: u64) -> Result<(SnapshotEntry, usize)> {
        window.forget_before(at);
        loop {
            match SnapshotEntry::decode(&window.bytes)? {
                SnapshotDecoded::Entry { entry, len } => return Ok((entry, len)),
                SnapshotDecoded::NeedMore(needed) => {
                    let missing = needed.saturating_sub(window.bytes.len()).max(PIECE_BYTES);
                    let from = window.at + window.bytes.len() as u64;
                    let piece = self.read(from, missing).await?;
                    window.bytes.extend_from_slice(&piece);
                }
            }
        }
    }

    /// Whether the entry's L1 table can be examined.
    fn has_l1(&mut self, entry: &SnapshotEntry) -> bool {
        let bytes = l1_bytes(entry.l1_entries);
        let (id, name) = Snapshots::name(entry);
        if !entry.l1_offset.is_aligned(self.header.cluster_bits.bytes()) {
            let offset = entry.l1_offset;
            self.corruption(Finding::SnapshotL1Unaligned { id, name, offset }, 1);
            return false;
        }
        if bytes > L1_BYTES_MAX {
            let entries = entry.l1_entries;
            self.corruption(Finding::SnapshotL1TooLarge { id, name, entries }, 1);
            return false;
        }
        true
    }
}

fn l1_bytes(entries: u32) -> u64 {
    u64::from(entries) * L1Entry::BYTES as u64
}

/// The part of the table in memory: its next bytes, from `at` on.
struct Window {
    at: u64,
    bytes: Vec<u8>,
}

impl Window {
    fn forget_before(&mut self, at: u64) {
        let known = self.bytes.len() as u64;
        let gone = usize::try_from((at - self.at).min(known)).unwrap_or(self.bytes.len());
        self.bytes.drain(..gone);
        self.at = at;
    }
}
