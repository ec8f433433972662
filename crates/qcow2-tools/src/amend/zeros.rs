//! Clusters that version 3 marks as zeros, in an image that is to have version 2, which knows no
//! such mark.
//!
//! Without a backing file, a cluster that has no place reads as zeros in both versions, and one
//! that has a place can hold zeros. Over a backing file zeros would need places, which the chain
//! would have to find: that is refused.

use mica_block::{Error, ErrorKind, Result, Store, read_exact, write_all};
use mica_qcow2_format::{Encryption, Header, L1Entry, L2Entry, RawL2Entry};
use mica_rt::{Buf, Pace};
use mica_units::HostOffset;

/// The mark, in an entry.
const ZERO: u64 = 1;
/// Entries after which other tasks get a turn.
const ENTRIES_PER_TURN: u64 = 1 << 16;

/// The tables of the disk of `header` that have marked clusters.
///
/// # Errors
/// `Unsupported` if these clusters cannot be changed one by one; `Corrupt` if tables contradict
/// themselves.
pub(super) async fn find(store: &dyn Store, header: &Header) -> Result<Vec<HostOffset>> {
    let (l2, mut pace) = (header.l2_format(), Pace::new(ENTRIES_PER_TURN));
    let refuse = |why: &str| {
        let cure = "`qemu-img amend -o compat=0.10` does it, and `mica convert -o compat=0.10` \
                    makes a copy";
        Err(Error::new(ErrorKind::Unsupported, format!("{why}: {cure}")))
    };
    if header.snapshot_count > 0 {
        return refuse("compat=0.10: the image has internal snapshots");
    }
    let mut found = Vec::new();
    for at in tables(store, header).await? {
        let table = read_exact(store, at.0, cluster_len(header)).await?;
        let mut has_zeros = false;
        for index in 0..entries(header) {
            let Some(raw) = l2.raw(&table, index) else { break };
            has_zeros |= match l2.interpret(raw)? {
                L2Entry::ZeroAllocated(_) if header.encryption != Encryption::None => {
                    return refuse(
                        "compat=0.10: the image is encrypted, and has zeros in clusters of their \
                         own: `mica convert` makes a copy",
                    );
                }
                L2Entry::Zero | L2Entry::ZeroAllocated(_) => true,
                _ => continue,
            };
            if header.backing.is_some() {
                return refuse("compat=0.10: the image hides parts of its backing file with zeros");
            }
            let owns_it = raw.copied() || matches!(l2.interpret(raw)?, L2Entry::Zero);
            if !at.1 || !owns_it {
                let what = "tables and refcounts contradict each other: `mica check -r all`";
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        pace.steps(entries(header) as u64).await;
        if has_zeros {
            found.push(at.0);
        }
    }
    Ok(found)
}

/// Clears the marks in `tables`, as [`find`] returned them. What the disk shows stays the same at
/// every instant.
///
/// # Errors
/// Any failure of a read, a write or a sync.
pub(super) async fn clear(store: &dyn Store, header: &Header, tables: &[HostOffset]) -> Result<()> {
    let l2 = header.l2_format();
    for at in tables {
        let mut table = read_exact(store, *at, cluster_len(header)).await?;
        for index in 0..entries(header) {
            let Some(raw) = l2.raw(&table, index) else { break };
            let entry = match l2.interpret(raw)? {
                L2Entry::Zero => 0,
                L2Entry::ZeroAllocated(host) => {
                    write_all(store, Buf::zeroed(cluster_len(header)), host).await?;
                    raw.entry & !ZERO
                }
                _ => continue,
            };
            l2.put_raw(table.own_bytes(), index, RawL2Entry { entry, ..raw });
        }
        // Before an entry says that they are the guest's.
        store.sync().await?;
        write_all(store, table, *at).await?;
    }
    if tables.is_empty() { Ok(()) } else { store.sync().await }
}

/// Where the L2 tables are, and whether each is the disk's own.
async fn tables(store: &dyn Store, header: &Header) -> Result<Vec<(HostOffset, bool)>> {
    let len = header.l1_entries as usize * L1Entry::BYTES;
    let l1 = read_exact(store, header.l1_offset, len).await?;
    let mut found = Vec::new();
    for entry in l1.as_chunks().0 {
        let entry = L1Entry(u64::from_be_bytes(*entry));
        if let Some(at) = entry.decode(header.cluster_bits)? {
            found.push((at, entry.copied()));
        }
    }
    Ok(found)
}

fn entries(header: &Header) -> usize {
    1 << header.l2_format().entries_bits()
}

fn cluster_len(header: &Header) -> usize {
    1 << header.cluster_bits.bits()
}
