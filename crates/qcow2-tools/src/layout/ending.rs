//! The end of an image that is written in one go: L1 table, refcounts, header.

use super::refcounts::{RefcountArea, refcount_area};
use super::{Place, Write};
use crate::create::{ImagePlan, TablePlaces};
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2_format::{L1Entry, REFCOUNT_TABLE_BYTES_MAX, RefcountTableEntry};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::collections::BTreeMap;

/// The end of an image. The header is last, when everything else is durable.
#[derive(Debug)]
pub struct Ending {
    plan: ImagePlan,
    l1: Vec<u8>,
    /// Where the refcount blocks start; the table follows them.
    blocks_at: u64,
    area: RefcountArea,
    shared: BTreeMap<u64, u64>,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    L1,
    Block(u64),
    Table,
    Done,
}

impl Ending {
    pub(super) fn new(
        plan: ImagePlan,
        l1: Vec<u8>,
        end: u64,
        shared: BTreeMap<u64, u64>,
    ) -> Result<Self> {
        let bits = plan.l2.cluster_bits;
        let area = refcount_area(plan.refcount_width, bits, bits.clusters_for(end));
        if area.table << bits.bits() > REFCOUNT_TABLE_BYTES_MAX {
            let what = "the image needs a longer refcount table than QEMU reads: larger clusters \
                        or narrower refcounts make it shorter";
            return Err(Error::new(ErrorKind::Limit, what));
        }
        Ok(Self { plan, l1, blocks_at: end, area, shared, stage: Stage::L1 })
    }

    /// Length of the file.
    pub fn len(&self) -> u64 {
        self.table_at() + (self.area.table << self.plan.l2.cluster_bits.bits())
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
        let write = |at: u64, bytes: &[u8]| Write {
            place: Place::Image,
            at: HostOffset::new(at),
            bytes: Buf::from_slice(bytes),
        };
        Ok(Some(match self.stage {
            Stage::L1 => {
                self.stage = Stage::Block(0);
                if self.l1.is_empty() {
                    return self.next_write_after_l1();
                }
                write(self.plan.l2.cluster_bits.bytes(), &self.l1)
            }
            Stage::Block(_) => return self.next_write_after_l1(),
            Stage::Table => {
                self.stage = Stage::Done;
                write(self.table_at(), &self.table())
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
            true => 0,
            false => self.plan.l2.cluster_bits.bytes(),
        };
        let places = TablePlaces {
            l1: HostOffset::new(l1),
            l1_entries: narrow((self.l1.len() / L1Entry::BYTES) as u64)?,
            refcount_table: HostOffset::new(self.table_at()),
            refcount_table_clusters: narrow(self.area.table)?,
        };
        self.plan.header(places).encode()
    }

    fn next_write_after_l1(&mut self) -> Result<Option<Write>> {
        let Stage::Block(number) = self.stage else { return Ok(None) };
        let bits = self.plan.l2.cluster_bits;
        let at = HostOffset::new(self.blocks_at + (number << bits.bits()));
        let bytes = self.block(number)?;
        self.stage = match number + 1 == self.area.blocks {
            true => Stage::Table,
            false => Stage::Block(number + 1),
        };
        Ok(Some(Write { place: Place::Image, at, bytes }))
    }

    fn table_at(&self) -> u64 {
        self.blocks_at + (self.area.blocks << self.plan.l2.cluster_bits.bits())
    }

    fn table(&self) -> Vec<u8> {
        let bits = self.plan.l2.cluster_bits.bits();
        let at = |number: u64| HostOffset::new(self.blocks_at + (number << bits));
        (0..self.area.blocks)
            .flat_map(|number| RefcountTableEntry::encode(at(number)).0.to_be_bytes())
            .collect()
    }

    /// Refcount block `number`: every cluster up to the end once, more often where it is shared.
    fn block(&self, number: u64) -> Result<Buf> {
        let (bits, width) = (self.plan.l2.cluster_bits, self.plan.refcount_width);
        let entries = width.block_entries(bits);
        let first = number * entries;
        let end = bits.clusters_for(self.len()).min(first + entries);
        let mut block = Buf::zeroed(usize::try_from(bits.bytes()).expect("at most 2 MiB"));
        let mut set = |cluster: u64, count: u64| {
            let index = usize::try_from(cluster - first).unwrap_or(usize::MAX);
            width.set(block.own_bytes(), index, count).ok_or_else(|| {
                let what = format!("refcount {count} does not fit {} bits", width.bits());
                Error::new(ErrorKind::Limit, what)
            })
        };
        for cluster in first..end {
            set(cluster, 1)?;
        }
        for (cluster, more) in self.shared.range(first..end.max(first)) {
            set(*cluster, 1 + more)?;
        }
        Ok(block)
    }
}
