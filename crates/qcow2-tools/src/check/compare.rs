//! References against refcounts.

use super::refcounts::Block;
use super::{Checker, Finding};
use mica_block::Result;
use mica_units::HostCluster;

impl Checker<'_> {
    /// Compares the counted references with the refcounts on disk.
    pub(super) async fn compare(&mut self) -> Result<()> {
        let last_end = self.references.end();
        let mut highest = HostCluster::ZERO;
        let mut first = HostCluster::ZERO;
        while first < last_end {
            let index = self.refcounts.block_of(first);
            let end = last_end.min(self.refcounts.clusters_of(index).end);
            match self.refcounts.block(index) {
                Block::Unreadable => {
                    self.report.check_errors += end.saturating_since(first);
                    self.observer.finding(Finding::RefcountUnreadable { cluster: first });
                }
                Block::At(at) if at < self.file_bytes => {
                    let block = self.read(at, self.cluster_len()).await?;
                    if block.iter().all(|&byte| byte == 0) {
                        self.compare_with_zero(first, end, &mut highest);
                    } else {
                        self.compare_with_block(&block, first, end, &mut highest);
                    }
                }
                Block::At(_) | Block::None => self.compare_with_zero(first, end, &mut highest),
            }
            if index < self.refcounts.table_entries() {
                self.went_on(1);
            }
            first = end;
        }
        let end = highest.saturating_add(1);
        self.report.image_end_offset = self.header.cluster_bits.start_of(end).bytes();
        Ok(())
    }

    fn compare_with_block(
        &mut self,
        block: &[u8],
        first: HostCluster,
        end: HostCluster,
        highest: &mut HostCluster,
    ) {
        let width = self.refcounts.width();
        for (index, cluster) in first.up_to(end).enumerate() {
            let refcount = width.get(block, index).unwrap_or(0);
            let references = self.references.get(cluster);
            if refcount | references != 0 {
                *highest = cluster;
            }
            if refcount != references {
                self.differ(cluster, refcount, references);
            }
        }
    }

    /// As [`Self::compare_with_block`] with a block of zeros; skips clusters without references.
    fn compare_with_zero(
        &mut self,
        first: HostCluster,
        end: HostCluster,
        highest: &mut HostCluster,
    ) {
        let mut cluster = first;
        while let Some(next) = self.references.next_counted(cluster).filter(|&next| next < end) {
            let references = self.references.get(next);
            if references != 0 {
                *highest = next;
                self.differ(next, 0, references);
            }
            cluster = next.saturating_add(1);
        }
    }

    fn differ(&mut self, cluster: HostCluster, refcount: u64, references: u64) {
        if refcount < references {
            self.corruption(Finding::RefcountTooLow { cluster, refcount, references }, 1);
        } else {
            self.report.leaks += 1;
            self.observer.finding(Finding::Leak { cluster, refcount, references });
        }
    }
}
