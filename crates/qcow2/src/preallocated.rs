//! Whether clusters of an image may lie in holes of its file.
//!
//! An image whose clusters were allocated without being written (`preallocation=metadata`), or that
//! was written around zeros, has more clusters in use than its file occupies. Its map is then
//! reported with the file's holes, as `qemu-img map` does; otherwise the file is not queried, which
//! saves a system call for each extent.

use crate::header_io::read_header;
use mica_block::{Result, Store, read_exact};
use mica_qcow2_format::{Header, RefcountTableEntry};
use mica_units::{HostCluster, HostOffset};

/// QEMU's rule: at least a ninth more clusters in use than fit in the space, plus two.
pub(crate) async fn is_preallocated(store: &dyn Store) -> Result<bool> {
    let header = read_header(store).await?;
    let cluster_bytes = header.cluster_bits.bytes();
    let real_clusters = store.allocated_bytes()? / cluster_bytes;
    let threshold = (real_clusters.saturating_mul(10) / 9).max(real_clusters + 2);
    let end = header.cluster_bits.host_cluster_up(HostOffset::new(store.len()?));
    if end.number() < threshold {
        return Ok(false);
    }
    Ok(count_in_use(store, &header, end, threshold).await? >= threshold)
}

/// How many of the clusters before `end` have a refcount; stops at `enough`, and at more blocks of
/// counts than there is space for: entries of a table that name one block many times prove nothing.
async fn count_in_use(
    store: &dyn Store,
    header: &Header,
    end: HostCluster,
    enough: u64,
) -> Result<u64> {
    let bits = header.cluster_bits;
    let block_entries = header.refcount_width.block_entries(bits);
    let table_entries =
        u64::from(header.refcount_table_clusters) * bits.bytes() / RefcountTableEntry::BYTES as u64;
    let block_len = usize::try_from(bits.bytes()).expect("at most 2 MiB");
    let mut in_use = 0;
    let mut blocks_left = store.allocated_bytes()? / bits.bytes() + 1;
    for index in 0..end.number().div_ceil(block_entries).min(table_entries) {
        let at = header.refcount_table_offset.bytes() + index * RefcountTableEntry::BYTES as u64;
        let bytes = read_exact(store, HostOffset::new(at), RefcountTableEntry::BYTES).await?;
        let Some(entry) = bytes.first_chunk() else { break };
        let entry = RefcountTableEntry(u64::from_be_bytes(*entry));
        let Some(block) = entry.decode(bits)? else { continue };
        let Some(left) = blocks_left.checked_sub(1) else { break };
        blocks_left = left;
        let block = read_exact(store, block, block_len).await?;
        let first = header.refcount_width.first_of_block(bits, index);
        let count = usize::try_from(end.saturating_since(first).min(block_entries));
        let counts =
            (0..count.unwrap_or(usize::MAX)).map_while(|at| header.refcount_width.get(&block, at));
        in_use += counts.filter(|count| *count != 0).count() as u64;
        if in_use >= enough {
            break;
        }
    }
    Ok(in_use)
}
