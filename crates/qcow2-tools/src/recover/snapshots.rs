//! Snapshots without the extra data that version 3 requires: the table is rewritten with it.
//!
//! The new table is in clusters that nothing names until the header does, in one sector. Its
//! refcounts, and those of the old one, are corrected with all others afterwards: until then the
//! image is dirty, so that nobody takes those clusters for free ones after a power cut.

use super::header::name_snapshot_table;
use super::rebuild::Free;
use super::refcounts::cluster_len;
use crate::check::Counted;
use mica_block::{Error, ErrorKind, Result, Store, read_exact, write_all};
use mica_qcow2_format::{
    Header, SNAPSHOT_TABLE_BYTES_MAX, SnapshotDecoded, SnapshotEntry, Version,
};
use mica_rt::Buf;
use mica_units::HostOffset;

/// Bytes of the old table that are read at a time.
const PIECE_BYTES: usize = 1 << 18;
/// The field of an entry that holds the length of its extra data.
const EXTRA_LEN_AT: usize = 36;
const FIXED_BYTES: usize = 40;
/// Extra data that version 3 requires: the length of the machine's state and that of the disk.
const EXTRA_BYTES: usize = 16;

/// Rewrites the table with everything that entries lack; returns the header that names it.
pub(super) async fn complete(
    store: &dyn Store,
    header: &Header,
    counted: &Counted,
) -> Result<Header> {
    debug_assert!(header.version == Version::V3, "version 2 requires nothing");
    let mut table = complete_table(store, header).await?;
    if table.len() as u64 > SNAPSHOT_TABLE_BYTES_MAX {
        let context = "the snapshot table is too long to be completed";
        return Err(Error::new(ErrorKind::Limit, context));
    }
    let bits = header.cluster_bits;
    table.resize(table.len().next_multiple_of(cluster_len(bits)), 0);
    let cluster = Free::new(counted).first_run(bits.clusters_for(table.len() as u64));
    let mut header = header.clone();
    header.snapshots_offset = bits.start_of(cluster);
    header.incompatible.dirty = true;
    write_all(store, Buf::from_slice(&table), header.snapshots_offset).await?;
    store.sync().await?;
    name_snapshot_table(store, &header).await?;
    Ok(header)
}

async fn complete_table(store: &dyn Store, header: &Header) -> Result<Vec<u8>> {
    let mut table = Vec::new();
    let mut old = Vec::new();
    let mut at = 0;
    for _ in 0..header.snapshot_count {
        let (entry, len) = loop {
            let rest = old.get(at..).unwrap_or_default();
            match SnapshotEntry::decode(rest)? {
                SnapshotDecoded::Entry { entry, len } => break (entry, len),
                SnapshotDecoded::NeedMore(_) => {
                    let from = header.snapshots_offset.bytes() + old.len() as u64;
                    let piece = read_exact(store, HostOffset::new(from), PIECE_BYTES).await?;
                    old.extend_from_slice(&piece);
                }
            }
        };
        table.resize(table.len().next_multiple_of(8), 0);
        let bytes = old.get(at..at + len).unwrap_or_default();
        append_complete(&mut table, bytes, &entry, header.disk_bytes());
        at = (at + len).next_multiple_of(8);
    }
    Ok(table)
}

/// Appends the entry in `bytes`, unchanged but for missing extra data.
fn append_complete(table: &mut Vec<u8>, bytes: &[u8], entry: &SnapshotEntry, disk_bytes: u64) {
    let extra_len = usize::try_from(entry.extra_bytes).unwrap_or(usize::MAX);
    let (fixed, rest) = bytes.split_at_checked(FIXED_BYTES).unwrap_or_default();
    let (extra, names) = rest.split_at_checked(extra_len).unwrap_or_default();
    if extra_len >= EXTRA_BYTES {
        table.extend_from_slice(bytes);
        return;
    }
    table.extend_from_slice(fixed.get(..EXTRA_LEN_AT).unwrap_or_default());
    // Sixteen: the numbers that follow.
    table.extend_from_slice(&16_u32.to_be_bytes());
    match extra.first_chunk::<8>() {
        Some(state) => table.extend_from_slice(state),
        None => table.extend_from_slice(&entry.vm_state_bytes.to_be_bytes()),
    }
    table.extend_from_slice(&entry.disk_bytes.unwrap_or(disk_bytes).to_be_bytes());
    table.extend_from_slice(names);
}
