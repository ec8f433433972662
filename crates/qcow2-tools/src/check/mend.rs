//! Entries of tables that a walk corrects where it finds them wrong.
//!
//! - I1. A table is written only if nothing else of the image's own is there: no header, no
//!   refcounts, no other kind of table. Otherwise a malicious entry that names the header as a
//!   table would cause the header to be overwritten.
//! - I2. An entry lies in one sector, so a power cut leaves it old or new.

use super::tables::has_data;
use super::{Checker, Finding, Task};
use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2_format::bits::COPIED;
use mica_qcow2_format::{L2Format, RawL2Entry};
use mica_units::{HostOffset, SECTOR_BYTES};

/// Maximum number of bytes that are read and written at once around words that change.
const SPAN_BYTES_MAX: u64 = 1 << 16;

/// A word of eight bytes to be written.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Patch {
    pub(super) at: u64,
    pub(super) word: u64,
}

impl Checker<'_> {
    /// A flag is wrong in the entry `word` at `at`: it is reported, or flipped.
    pub(super) fn wrong_flag(&mut self, finding: Finding, at: u64, word: u64, times: u64) {
        match self.task {
            Task::MendFlags(_) => self.patches.push(Patch { at, word: word ^ COPIED }),
            _ => self.corruption(finding, times),
        }
    }

    /// A cluster without data has an invalid place: QEMU makes it a cluster of zeros without a
    /// place, which reads the same.
    pub(super) fn mend_unaligned(&mut self, raw: RawL2Entry, format: L2Format, at: u64) {
        let aligned = raw.offset().is_aligned(format.cluster_bits.bytes());
        if !matches!(self.task, Task::MendEntries(_)) || aligned || has_data(raw, format) {
            return;
        }
        if format.extended {
            // No subcluster is allocated; those that are zero stay so.
            self.patches.push(Patch { at, word: 0 });
        } else {
            self.patches.push(Patch { at, word: 1 });
        }
    }

    /// Writes what changes in the active L1 table, unless something else is there too.
    pub(super) async fn apply_to_l1(&mut self) -> Result<()> {
        let patches = std::mem::take(&mut self.patches);
        let Task::MendFlags(places) = self.task else { return Ok(()) };
        let bits = self.header.cluster_bits;
        let patches: Vec<_> = patches
            .into_iter()
            .filter(|patch| places.covering(bits.host_cluster(HostOffset::new(patch.at))) == 1)
            .collect();
        self.mended += patches.len() as u64;
        write_words(&*self.store, patches).await
    }

    /// Writes what changes in the L2 table at `table_at`, unless something else is there.
    pub(super) async fn apply_to_l2(&mut self, table_at: u64) -> Result<()> {
        let patches = std::mem::take(&mut self.patches);
        let (Task::MendFlags(places) | Task::MendEntries(places)) = self.task else {
            return Ok(());
        };
        let bits = self.header.cluster_bits;
        let alone = places.covering(bits.host_cluster(HostOffset::new(table_at))) == 0;
        if bits.offset_within(table_at) != 0 || !alone {
            return Ok(());
        }
        self.mended += patches.len() as u64;
        write_words(&*self.store, patches).await
    }
}

/// Writes each word in its place.
async fn write_words(store: &dyn Store, mut patches: Vec<Patch>) -> Result<()> {
    patches.sort_unstable();
    let mut rest = patches.as_slice();
    while let Some(first) = rest.first() {
        let start = first.at - first.at % SECTOR_BYTES;
        let count = rest.partition_point(|patch| patch.at < start + SPAN_BYTES_MAX);
        let (now, later) = rest.split_at(count);
        let last = now.last().unwrap_or(first);
        let end = (last.at + 8).next_multiple_of(SECTOR_BYTES);
        let len = usize::try_from(end - start).unwrap_or(usize::MAX);
        let mut span = read_exact(store, HostOffset::new(start), len).await?;
        for patch in now {
            let at = usize::try_from(patch.at - start).unwrap_or(usize::MAX);
            if let Some(word) =
                span.own_bytes().get_mut(at..).and_then(|rest| rest.first_chunk_mut())
            {
                *word = patch.word.to_be_bytes();
            }
        }
        write_all(store, span, HostOffset::new(start)).await?;
        rest = later;
    }
    Ok(())
}
