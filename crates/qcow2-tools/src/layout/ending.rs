//! The end of an image that is written in one go: L1 table, refcounts, header.

use super::refcounts::{RefcountArea, refcount_area};
use super::{Place, Write};
use crate::create::{ImagePlan, TablePlaces};
use crate::references::References;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{L1Entry, REFCOUNT_TABLE_BYTES_MAX, RefcountTableEntry};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostCluster, HostOffset};

/// The L1 table follows the header.
const L1_AT: HostCluster = HostCluster::new(1);

/// The end of an image. The header is last, when everything else is durable.
#[derive(Debug)]
pub struct Ending {
    plan: ImagePlan,
    l1: Vec<u8>,
    /// Where the refcount blocks start; the table follows them.
    blocks_at: HostCluster,
    area: RefcountArea,
    shared: References,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    L1,
    Luks,
    Block(u64),
    Table,
    Done,
}

impl Ending {
    pub(super) fn new(
        plan: ImagePlan,
        l1: Vec<u8>,
        end: HostCluster,
        shared: References,
    ) -> Result<Self> {
        let bits = plan.l2.cluster_bits;
        let area = refcount_area(plan.refcount_width, bits, end.number());
        if bits.bytes_of(area.table) > REFCOUNT_TABLE_BYTES_MAX {
            let what = "the image needs a longer refcount table than QEMU reads: larger clusters \
                        or narrower refcounts make it shorter";
            return Err(Error::new(ErrorKind::Limit, what));
        }
        Ok(Self { plan, l1, blocks_at: end, area, shared, stage: Stage::L1 })
    }

    /// Length of the file.
    pub fn len(&self) -> u64 {
        self.plan.l2.cluster_bits.start_of(self.end()).bytes()
    }

    /// Whether the file is empty: never, as it has a header.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The next bytes to be written, `None` when everything but the header has been.
    ///
    /// # Errors
    /// `Limit` if a refcount does not fit, which would be a bug of the writer.
    pub fn next_write(&mut self) -> Result<Option<Write>> {
        let bits = self.plan.l2.cluster_bits;
        let write = |at: HostOffset, bytes: &[u8]| Write {
            place: Place::Image,
            at,
            bytes: whole_clusters(bits, bytes),
        };
        Ok(Some(match self.stage {
            Stage::L1 => {
                self.stage = Stage::Luks;
                if self.l1.is_empty() {
                    return self.next_write();
                }
                write(self.place_of(L1_AT), &self.l1)
            }
            Stage::Luks => {
                self.stage = Stage::Block(0);
                match (self.plan.luks_place(), self.plan.encryption()) {
                    (Some((at, _)), Some(luks)) => write(at, luks.bytes()),
                    _ => return self.next_write_after_l1(),
                }
            }
            Stage::Block(_) => return self.next_write_after_l1(),
            Stage::Table => {
                self.stage = Stage::Done;
                write(self.place_of(self.table_at()), &self.table())
            }
            Stage::Done => return Ok(None),
        }))
    }

    /// The header's bytes.
    ///
    /// # Errors
    /// `Limit` if the names in it do not fit a cluster.
    pub fn header(&self) -> Result<Vec<u8>> {
        let narrow = |count: u64| {
            u32::try_from(count).map_err(|_| {
                Error::new(ErrorKind::Limit, format!("{count} does not fit the header"))
            })
        };
        let l1 = match self.l1.is_empty() {
            true => HostOffset::ZERO,
            false => self.place_of(L1_AT),
        };
        let places = TablePlaces {
            l1,
            l1_entries: narrow((self.l1.len() / L1Entry::BYTES) as u64)?,
            refcount_table: self.place_of(self.table_at()),
            refcount_table_clusters: narrow(self.area.table)?,
        };
        self.plan.header(places).encode()
    }

    fn next_write_after_l1(&mut self) -> Result<Option<Write>> {
        let Stage::Block(number) = self.stage else { return Ok(None) };
        let at = self.place_of(self.blocks_at.saturating_add(number));
        let bytes = self.block(number)?;
        self.stage = match number + 1 == self.area.blocks {
            true => Stage::Table,
            false => Stage::Block(number + 1),
        };
        Ok(Some(Write { place: Place::Image, at, bytes }))
    }

    fn table_at(&self) -> HostCluster {
        self.blocks_at.saturating_add(self.area.blocks)
    }

    fn end(&self) -> HostCluster {
        self.table_at().saturating_add(self.area.table)
    }

    fn place_of(&self, cluster: HostCluster) -> HostOffset {
        self.plan.l2.cluster_bits.start_of(cluster)
    }

    fn table(&self) -> Vec<u8> {
        self.blocks_at
            .up_to(self.table_at())
            .flat_map(|block| RefcountTableEntry::encode(self.place_of(block)).0.to_be_bytes())
            .collect()
    }

    /// Refcount block `number`: every cluster up to the end once, more often where it is shared.
    fn block(&self, number: u64) -> Result<Buf> {
        let (bits, width) = (self.plan.l2.cluster_bits, self.plan.refcount_width);
        let entries = width.block_entries(bits);
        let first = width.first_of_block(bits, number);
        let end = self.end().min(first.saturating_add(entries));
        let mut block = Buf::zeroed(usize::try_from(bits.bytes()).expect("at most 2 MiB"));
        let mut set = |cluster: HostCluster, count: u64| {
            let index = usize::try_from(cluster.saturating_since(first)).unwrap_or(usize::MAX);
            width.set(block.own_bytes(), index, count).ok_or_else(|| {
                let what = format!("refcount {count} does not fit {} bits", width.bits());
                Error::new(ErrorKind::Limit, what)
            })
        };
        for cluster in first.up_to(end) {
            set(cluster, 1 + self.shared.get(cluster))?;
        }
        Ok(block)
    }
}

/// `bytes`, and zeros up to the end of their last cluster: a device has something else there, which
/// readers of a refcount table would take for its entries.
fn whole_clusters(bits: ClusterBits, bytes: &[u8]) -> Buf {
    let len = bits.bytes_of(bits.clusters_for(bytes.len() as u64));
    let mut whole = Buf::zeroed(usize::try_from(len).expect("a table fits the memory"));
    whole.put(0, bytes);
    whole
}
