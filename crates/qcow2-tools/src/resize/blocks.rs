//! Refcount blocks that no longer count anything: they would prevent a shrunk file from ending.

use super::{Resizer, len_of};
use mica_block::{Result, read_exact, write_all};
use mica_qcow2::FileSpace;
use mica_qcow2_format::RefcountTableEntry;
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// A refcount block that the table no longer names.
struct Dropped {
    at: HostOffset,
    /// Whether it held its own count, which is then gone too.
    own: bool,
}

impl Resizer {
    /// Drops the blocks that count nothing but themselves. All counts are durable. Returns the
    /// resulting clusters.
    pub(super) async fn drop_empty_blocks(&self, mut space: FileSpace) -> Result<FileSpace> {
        loop {
            let dropped = self.unname_empty_blocks(&space).await?;
            if dropped.is_empty() {
                return Ok(space);
            }
            // A block counted in another one may leave that empty, too.
            let freed = space.take_freed();
            space = FileSpace::open(Arc::clone(&self.image.store), &self.header).await?;
            space.put_freed(freed);
            for Dropped { at, own } in dropped {
                match own {
                    true => space.put_freed(vec![self.header.cluster_bits.host_cluster(at)]),
                    false => space.free(at, 1).await?,
                }
            }
            space.commit().await?;
        }
    }

    /// Durably removes from the refcount table the blocks that count nothing but themselves.
    async fn unname_empty_blocks(&self, space: &FileSpace) -> Result<Vec<Dropped>> {
        let store = &*self.image.store;
        let table_at = self.header.refcount_table_offset;
        let bytes = self.header.cluster_bits.bytes_of(self.header.refcount_table_clusters.into());
        let mut table = read_exact(store, table_at, len_of(bytes)).await?;
        let mut dropped = Vec::new();
        for (region, entry) in (0..).zip(table.own_bytes().as_chunks_mut::<8>().0) {
            let says = RefcountTableEntry(u64::from_be_bytes(*entry));
            // A malformed entry is left to a check.
            let Ok(Some(at)) = says.decode(self.header.cluster_bits) else { continue };
            if !space.is_alone(at) {
                continue;
            }
            let block = read_exact(store, at, self.cluster_len()).await?;
            if let Some(own) = self.is_empty_block(&block, at, region) {
                dropped.push(Dropped { at, own });
                *entry = [0; 8];
            }
        }
        if !dropped.is_empty() {
            write_all(store, Buf::from_slice(&table), table_at).await?;
            store.sync().await?;
        }
        Ok(dropped)
    }

    /// Whether the block at `at` for `region` counts nothing but itself, and if so, whether it
    /// counts itself.
    fn is_empty_block(&self, block: &[u8], at: HostOffset, region: u64) -> Option<bool> {
        if block.iter().all(|byte| *byte == 0) {
            return Some(false);
        }
        let width = self.header.refcount_width;
        let bits = self.header.cluster_bits;
        let entries = width.block_entries(bits);
        let own = bits.host_cluster(at).checked_since(width.first_of_block(bits, region))?;
        let only = (0..entries).all(|index| {
            let expected = u64::from(index == own);
            width.get(block, len_of(index)) == Some(expected)
        });
        only.then_some(true)
    }
}
