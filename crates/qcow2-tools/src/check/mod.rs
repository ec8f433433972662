//! The reading check: whether the refcounts and the flags of an image agree with its tables.
//!
//! The verdict is that of `qemu-img check` without `-r`: the same things count, equally often.
//! Nothing is written, unless a repair (`recover`) requests it: then the walk that finds a wrong
//! entry writes the right one.
//!
//! Words: a **reference** is a mention of a cluster by the header, a table or a data structure of
//! the image; a **refcount** is the number of references that the image has recorded. A cluster
//! with fewer references than its refcount is a **leak**: space is lost. One with more is a
//! **corruption**: it may be allocated while it is in use.
//!
//! - I1. Memory is bounded by the length of the file and by the limits of the format, never by the
//!   length of the disk: references to clusters beyond the end of the file are reported, not kept.
//! - I2. A table that is mentioned a thousand times is read once. Snapshots share their tables, so
//!   a check costs what the tables in the file cost, and a malicious image cannot multiply that:
//!   tables that overlap many times end the check, and so do L2 tables that are not at clusters
//!   and are longer together than the file and 1 GiB.
//! - I3. Everything that QEMU counts is independent of the order of reading, except the refcount
//!   blocks among each other, which are counted in the order of the refcount table.
//! - I4. Otherwise an error ends the check only if it ends QEMU's, which is exit status 1 of
//!   `qemu-img`.
//!
//! ```text
//! header ─▶ refcount blocks ─▶ which clusters have refcount one        refcounts.rs
//!        ─▶ L1, snapshots' L1 ─▶ L2 ─▶ references, flags               tables.rs, snapshots.rs
//!        ─▶ refcount table, LUKS header, bitmaps ─▶ references         bitmaps.rs
//!        ─▶ references = refcounts?                                    compare.rs
//!
//! for a repair: what else is kept                                      keep.rs
//!               entries that are written                               mend.rs
//! ```

mod bitmaps;
mod compare;
mod finding;
mod keep;
mod mend;
mod refcounts;
mod snapshots;
mod tables;

pub use finding::Finding;
pub(crate) use keep::{Counted, Kept, Ranges, Task};
pub(crate) use refcounts::Block;

use crate::references::References;
use keep::Keep;
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
use mica_qcow2_format::{Encryption, Header, SnapshotEntry};
use mica_rt::Buf;
use mica_units::{HostOffset, SECTOR_BYTES};
use refcounts::Refcounts;
use std::sync::Arc;
use tables::Tables;

/// How often the tables of one kind may have each of their bytes, on average.
const OVERLAP_MAX: u64 = 16;
/// Longest read.
const READ_BYTES_MAX: usize = 1 << 20;
/// L2 tables that are not at clusters may have this many bytes in any file.
const UNALIGNED_BYTES_MIN: u64 = 1 << 30;
/// Maximum number of clusters that QEMU checks.
const CLUSTER_COUNT_MAX: u64 = i32::MAX as u64;
/// Highest end of a read that QEMU allows.
const HOST_END_MAX: u64 = (i64::MAX as u64) & !((1 << 30) - 1);

/// Checks the image in `store`, whose header is `header` as returned by
/// [`Header::decode_for_check`]. Findings are passed to `observer` as they are made.
///
/// # Errors
/// Anything that keeps `qemu-img check` from a verdict: reads that fail, a malformed snapshot table
/// or bitmaps, a file of more than 2^31 clusters. Also tables that overlap again and again.
pub async fn check(
    store: Arc<dyn Store>,
    header: &Header,
    observer: &mut dyn Observer,
) -> Result<CheckReport> {
    Ok(count(store, header, Task::Judge, observer).await?.report)
}

/// Walks over the image as [`check`] does, for `task`.
pub(crate) async fn count(
    store: Arc<dyn Store>,
    header: &Header,
    task: Task<'_>,
    observer: &mut dyn Observer,
) -> Result<Counted> {
    // QEMU counts a file in whole sectors.
    let file_bytes = store.len()?.next_multiple_of(SECTOR_BYTES);
    let file_end = header.cluster_bits.host_cluster_up(HostOffset::new(file_bytes));
    let cluster_count = file_end.number();
    if cluster_count > CLUSTER_COUNT_MAX {
        return Err(Error::new(
            ErrorKind::Limit,
            format!(
                "the file of {file_bytes} bytes has {cluster_count} clusters, more than the \
                 {CLUSTER_COUNT_MAX} that can be checked"
            ),
        ));
    }
    let mut checker = Checker {
        file_bytes,
        keep: Keep::for_task(&task),
        task,
        patches: Vec::new(),
        mended: 0,
        references: References::new(header.refcount_width, file_end),
        refcounts: Refcounts::new(header, file_end),
        tables: Tables::default(),
        report: CheckReport {
            total_clusters: header.cluster_bits.clusters_for(header.disk_bytes()),
            ..CheckReport::default()
        },
        progress: Progress::default(),
        store,
        header,
        observer,
    };
    checker.run().await?;
    let Checker { report, references, refcounts, keep, mended, .. } = checker;
    Ok(Counted { report, references, refcounts, file_bytes, mended, kept: keep.finish() })
}

/// Receives the findings of a check and its progress.
pub trait Observer {
    /// Something was found. A fault that counts several times because a table is shared is reported
    /// once.
    fn finding(&mut self, finding: Finding);

    /// The check made progress.
    fn progress(&mut self, progress: Progress) {
        let _ = progress;
    }
}

impl<F: FnMut(Finding)> Observer for F {
    fn finding(&mut self, finding: Finding) {
        self(finding);
    }
}

/// The progress of a check. The total grows while tables are discovered.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Progress {
    /// Tables and refcount blocks that were read.
    pub done: u64,
    /// Tables and refcount blocks known so far.
    pub total: u64,
}

/// The results of a check, in the counts of `qemu-img check`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CheckReport {
    /// Contradictions that may cost data.
    pub corruptions: u64,
    /// Clusters that nobody uses and that cannot be allocated.
    pub leaks: u64,
    /// Things that could not be judged.
    pub check_errors: u64,
    /// End of the last cluster in use.
    pub image_end_offset: u64,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// The ones among them that have a place in the file.
    pub allocated_clusters: u64,
    /// Of those, the ones that do not follow the cluster before them.
    pub fragmented_clusters: u64,
    /// Of those, the ones that are compressed.
    pub compressed_clusters: u64,
}

/// The verdict of a report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Nothing is wrong.
    Clean,
    /// Space is lost, nothing more.
    Leaks,
    /// Data may be lost.
    Corrupt,
    /// Not everything could be judged.
    Incomplete,
}

impl CheckReport {
    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        if self.check_errors > 0 {
            Verdict::Incomplete
        } else if self.corruptions > 0 {
            Verdict::Corrupt
        } else if self.leaks > 0 {
            Verdict::Leaks
        } else {
            Verdict::Clean
        }
    }
}

impl Verdict {
    /// The exit status of `qemu-img check`.
    pub fn exit_status(self) -> u8 {
        match self {
            Self::Clean => 0,
            Self::Incomplete => 1,
            Self::Corrupt => 2,
            Self::Leaks => 3,
        }
    }
}

/// A check in progress.
struct Checker<'a> {
    store: Arc<dyn Store>,
    header: &'a Header,
    observer: &'a mut dyn Observer,
    /// Length of the file in whole sectors.
    file_bytes: u64,
    references: References,
    refcounts: Refcounts,
    tables: Tables,
    report: CheckReport,
    progress: Progress,
    task: Task<'a>,
    keep: Keep,
    /// Words of the current table that are to be written.
    patches: Vec<mend::Patch>,
    /// Words that were written.
    mended: u64,
}

impl Checker<'_> {
    async fn run(&mut self) -> Result<()> {
        let header = self.header;
        let cluster_bytes = header.cluster_bits.bytes();
        let snapshots = self.read_snapshots().await?;
        self.load_refcounts().await?;
        self.refer_place(0, cluster_bytes, 1)?;
        self.refer_l1_tables(&snapshots).await?;
        self.refer_place(header.snapshots_offset.bytes(), snapshots.table_bytes, 1)?;
        if let Encryption::Luks { header: Some((offset, len)) } = header.encryption {
            self.refer_place(offset.bytes(), len, 1)?;
        }
        self.refer_bitmaps().await?;
        match self.task {
            Task::WithoutRefcounts => {
                self.keep_refcount_structure();
                Ok(())
            }
            Task::MendEntries(_) | Task::MendFlags(_) => Ok(()),
            Task::Judge | Task::Keep => {
                let table_bytes = u64::from(header.refcount_table_clusters) * cluster_bytes;
                self.refer_place(header.refcount_table_offset.bytes(), table_bytes, 1)?;
                self.refer_refcount_blocks()?;
                self.compare().await
            }
        }
    }

    /// As [`Self::refer`], for anything that is neither an L2 table nor the guest's: nothing may be
    /// corrected on top of it.
    fn refer_place(&mut self, offset: u64, len: u64, times: u64) -> Result<()> {
        self.keep.place(self.header.cluster_bits, offset, len)?;
        self.refer(offset, len, times)
    }

    /// Counts `times` references to each cluster that the `len` bytes at `offset` touch.
    fn refer(&mut self, offset: u64, len: u64, times: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let bits = self.header.cluster_bits;
        let Some(end) = offset.checked_add(len).filter(|&end| end <= i64::MAX as u64) else {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("a table of {len} bytes at {offset:#x} ends beyond 2^63"),
            ));
        };
        // The last cluster need not be complete.
        if end >= self.file_bytes + bits.bytes() {
            self.corruption(Finding::BeyondEnd { offset, len }, times);
            return self.keep.beyond(bits, offset, len);
        }
        let [first, last] = [offset, end - 1].map(|at| bits.host_cluster(HostOffset::new(at)));
        for cluster in first.through(last) {
            let excess = self.references.add(cluster, times);
            if excess > 0 {
                let offset = bits.start_of(cluster).bytes();
                self.corruption(Finding::TooManyReferences { offset }, excess);
            }
        }
        Ok(())
    }

    /// Refuses `tables` of one kind, in the order of their offsets, each with its bytes, that
    /// overlap so much that each byte would be read very often (I2).
    fn check_overlap(&self, what: &str, tables: impl Iterator<Item = (u64, u64)>) -> Result<()> {
        let (mut total, mut covered, mut covered_to) = (0_u64, 0_u64, 0);
        for (at, bytes) in tables {
            let end = at.saturating_add(bytes).min(self.file_bytes);
            total = total.saturating_add(end.saturating_sub(at));
            covered += end.saturating_sub(at.max(covered_to));
            covered_to = end.max(covered_to);
        }
        if total / OVERLAP_MAX <= covered {
            return Ok(());
        }
        let what =
            format!("{what} overlap: {total} bytes of them have {covered} bytes of the file");
        Err(Error::new(ErrorKind::Corrupt, what))
    }

    fn corruption(&mut self, finding: Finding, times: u64) {
        self.report.corruptions = self.report.corruptions.saturating_add(times);
        self.observer.finding(finding);
    }

    fn expect_more(&mut self, tables: u64) {
        self.progress.total = self.progress.total.saturating_add(tables);
    }

    fn went_on(&mut self, tables: u64) {
        self.progress.done = self.progress.done.saturating_add(tables);
        self.observer.progress(self.progress);
    }

    async fn read(&self, offset: u64, len: usize) -> Result<Buf> {
        read_exact(&*self.store, HostOffset::new(offset), len).await
    }

    /// Bytes in a cluster, at most 2^21.
    fn cluster_len(&self) -> usize {
        1 << self.header.cluster_bits.bits()
    }
}

/// What the checker keeps of the internal snapshots.
struct Snapshots {
    /// L1 tables that are worth examining: place, entries, and how many snapshots have exactly this
    /// one.
    l1_tables: Vec<(HostOffset, u32, u64)>,
    /// Length of the table of snapshots.
    table_bytes: u64,
}

impl Snapshots {
    fn name(entry: &SnapshotEntry) -> (String, String) {
        (entry.id.clone(), entry.name.clone())
    }
}

#[cfg(test)]
mod tests;
