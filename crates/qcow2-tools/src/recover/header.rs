//! The header fields that a repair changes: single ones, in its first sector, so that a power cut
//! leaves the old header or the new one, and the rest of it is untouched.

use super::Repairer;
use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2_format::bits::{BITMAPS_CONSISTENT, CORRUPT, DIRTY, RAW_EXTERNAL};
use mica_qcow2_format::{Header, field};
use mica_units::{HostOffset, SECTOR_BYTES};

/// Bitmaps, and a raw data file: a repair changes nothing that they describe.
const AUTOCLEAR_KNOWN: u64 = BITMAPS_CONSISTENT | RAW_EXTERNAL;

impl Repairer {
    /// Clears the bits that mark the image as untrustworthy, after everything else is durable.
    pub(super) async fn clear_marks(&mut self) -> Result<()> {
        let incompatible = &mut self.header.incompatible;
        let is_marked = incompatible.dirty || incompatible.corrupt;
        incompatible.dirty = false;
        incompatible.corrupt = false;
        // The name of a log, too: what it had is in the image by now.
        self.clear_autoclear().await?;
        if !is_marked {
            return Ok(());
        }
        change(&*self.store, |sector| {
            keep_bits(sector, field::INCOMPATIBLE, !(DIRTY | CORRUPT));
        })
        .await
    }

    /// Clears the bits that a writer that does not know them must clear, before anything is
    /// written.
    pub(super) async fn clear_autoclear(&mut self) -> Result<()> {
        if self.header.autoclear.unknown == 0 {
            return Ok(());
        }
        self.header.autoclear.unknown = 0;
        change(&*self.store, |sector| keep_bits(sector, field::AUTOCLEAR, AUTOCLEAR_KNOWN)).await
    }
}

/// Writes the place of the refcount table, as in `header`.
pub(super) async fn name_refcount_table(store: &dyn Store, header: &Header) -> Result<()> {
    change(store, |sector| {
        let offset = header.refcount_table_offset.bytes().to_be_bytes();
        let clusters = header.refcount_table_clusters.to_be_bytes();
        let field = sector.iter_mut().skip(field::REFCOUNT_TABLE);
        for (to, from) in field.zip(offset.into_iter().chain(clusters)) {
            *to = from;
        }
    })
    .await
}

/// Writes the place of the snapshot table, as in `header`, which is dirty: the table has no
/// refcounts yet.
pub(super) async fn name_snapshot_table(store: &dyn Store, header: &Header) -> Result<()> {
    change(store, |sector| {
        let field = sector.iter_mut().skip(field::SNAPSHOT_TABLE);
        for (to, from) in field.zip(header.snapshots_offset.bytes().to_be_bytes()) {
            *to = from;
        }
        change_bits(sector, field::INCOMPATIBLE, |bits| bits | DIRTY);
    })
    .await
}

fn keep_bits(sector: &mut [u8], at: usize, mask: u64) {
    change_bits(sector, at, |bits| bits & mask);
}

fn change_bits(sector: &mut [u8], at: usize, change: impl FnOnce(u64) -> u64) {
    let field = sector.get_mut(at..).and_then(|rest| rest.first_chunk_mut::<8>());
    if let Some(field) = field {
        *field = change(u64::from_be_bytes(*field)).to_be_bytes();
    }
}

/// Changes the first sector and makes that durable.
async fn change(store: &dyn Store, change: impl FnOnce(&mut [u8])) -> Result<()> {
    // A few hundred bytes.
    let len = usize::try_from(SECTOR_BYTES).unwrap_or(usize::MAX);
    let mut sector = read_exact(store, HostOffset::ZERO, len).await?;
    change(sector.own_bytes());
    write_all(store, sector, HostOffset::ZERO).await?;
    store.sync().await
}
