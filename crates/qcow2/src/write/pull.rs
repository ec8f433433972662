//! What shows through layers that are about to leave the chain becomes this layer's own.
//!
//! It is a transaction like a guest's write: under the claims of the clusters it is looked up once
//! more what shows, and what this layer owns by then is newer and stays. Where a layer that leaves
//! owns a part of a unit, the unit is filled with what shows in the rest of it. Units that hold
//! nothing but zeros, as the holes of a raw base do, become zeros by their entries and take no
//! space.
//!
//! Invariants
//! - I1 Nothing that the layer owns is written.
//! - I2 What the disk shows does not change, now or when the layers are gone.

use super::Writer;
use super::gather::Guest;
use super::plan::clusters_of;
use super::request::Origin;
use super::zero::Units;
use crate::layer::is_zero;
use crate::layers::Layers;
use mica_block::{Extent, ExtentKind, Result};
use mica_qcow2_format::Version;
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, LayerNumber};

/// The layers that leave.
#[derive(Clone, Debug)]
pub(crate) struct Leaving {
    /// By number.
    is_leaving: Vec<bool>,
    /// From here on the shortest of them hides what is beneath.
    hides_from: u64,
    /// The end of the layer on which this one stands afterwards; 0 if there is none.
    below_end: u64,
}

/// What has to be done for some bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Need {
    Data,
    Zeros,
}

impl Leaving {
    /// The layers of `layers` at the positions `from..to`.
    pub(crate) fn new(layers: &Layers, from: usize, to: usize) -> Self {
        let leaving = &layers.all()[from..to];
        let count = leaving.iter().map(|layer| layer.number.index() + 1).max().unwrap_or(0);
        let mut is_leaving = vec![false; count];
        leaving.iter().for_each(|layer| is_leaving[layer.number.index()] = true);
        let hides_from = leaving.iter().map(|layer| layer.len()).min().unwrap_or(u64::MAX);
        let below_end = match from {
            0 => 0,
            from => layers.all()[from - 1].len(),
        };
        Self { is_leaving, hides_from, below_end }
    }

    /// Whether the layer `number` leaves.
    pub(crate) fn has(&self, number: LayerNumber) -> bool {
        self.is_leaving.get(number.index()).copied().unwrap_or(false)
    }

    /// The same, over a layer that ends at `below_end`.
    pub(crate) fn over(self, below_end: u64) -> Self {
        Self { below_end, ..self }
    }

    /// Whether it is of no consequence that nobody owns `range`.
    pub(crate) fn ignores_holes(&self, range: GuestRange) -> bool {
        self.hides_from.max(range.start().bytes()) >= self.below_end.min(range.end().bytes())
    }

    /// The part of `extent` for which something has to be done.
    pub(crate) fn need(&self, extent: &Extent) -> Option<(GuestRange, Need)> {
        let (start, end) = (extent.start.bytes(), extent.range().end().bytes());
        let (start, end, need) = match extent.kind {
            ExtentKind::Data | ExtentKind::Encoded | ExtentKind::DataInHole => {
                self.has(extent.layer).then_some((start, end, Need::Data))?
            }
            ExtentKind::Zero | ExtentKind::ZeroAllocated => {
                let is_leaving = self.has(extent.layer);
                is_leaving.then_some((start, end.min(self.below_end), Need::Zeros))?
            }
            ExtentKind::Hole | ExtentKind::HoleInCluster => {
                (start.max(self.hides_from), end.min(self.below_end), Need::Zeros)
            }
        };
        let range = (start < end)
            .then(|| GuestRange::between(GuestOffset::new(start), GuestOffset::new(end)))??;
        Some((range, need))
    }

    /// The first byte of `extents` for which something has to be done.
    pub(crate) fn first_need(&self, extents: &[Extent]) -> Option<GuestOffset> {
        extents.iter().find_map(|extent| self.need(extent)).map(|(range, _)| range.start())
    }
}

impl Writer {
    /// Takes over what shows in `part`, at most one transaction, through the layers that are
    /// `leaving`. Returns how many bytes of data it took.
    ///
    /// # Errors
    /// Any failure to read those layers or to write this one; what was taken over stays.
    pub(crate) async fn pull(&self, part: GuestRange, leaving: &Leaving) -> Result<u64> {
        self.check_writable(part)?;
        self.mark_before_change().await?;
        let taken = {
            let (first, last) = clusters_of(self.l2.cluster_bits, part);
            let _claimed = self.claim_clusters(first, last).await;
            self.pull_claimed(part, leaving).await?
        };
        self.flush_if_full().await?;
        Ok(taken)
    }

    async fn pull_claimed(&self, part: GuestRange, leaving: &Leaving) -> Result<u64> {
        let extents = self.map.plan(part).await?;
        let mut data: Vec<Vec<Extent>> = Vec::new();
        let mut zeros: Vec<GuestRange> = Vec::new();
        for extent in &extents {
            let Some((range, need)) = leaving.need(extent) else { continue };
            match need {
                Need::Data => match data.last_mut() {
                    Some(run) if run.last().is_some_and(|l| l.range().end() == range.start()) => {
                        run.push(*extent);
                    }
                    _ => data.push(vec![*extent]),
                },
                Need::Zeros => match zeros.last_mut() {
                    Some(last) if last.end() == range.start() => {
                        *last = GuestRange::between(last.start(), range.end()).expect("it goes on");
                    }
                    _ => zeros.push(range),
                },
            }
        }
        let (mut pieces, mut units) = (Vec::new(), Vec::new());
        for run in data {
            let range = GuestRange::new(run[0].start, Extent::total_len(&run)).expect("a part");
            let read = self.map.read_extents(run).await?;
            self.divide_zeros(range, read, (&mut pieces, &mut units));
        }
        let taken = pieces.iter().map(|(range, _)| range.len()).sum();
        for range in zeros {
            let [before, whole, after] = match self.l2.version {
                Version::V2 => [Some(range), None, None],
                Version::V3 => self.whole_units_of(range),
            };
            units.extend(whole);
            let zeroed = |range: GuestRange| {
                (range, Buf::zeroed(usize::try_from(range.len()).expect("a transaction")))
            };
            pieces.extend([before, after].into_iter().flatten().map(zeroed));
        }
        pieces.sort_by_key(|(range, _)| range.start());
        let written = async {
            for group in self.by_cluster(pieces) {
                self.write_transaction(Guest::new(group), Origin::Merge).await?;
            }
            for range in units {
                self.zero_entries(range).await?;
            }
            Ok(())
        };
        match written.await {
            Ok(()) => Ok(taken),
            Err(error) => Err(Box::pin(self.note_corruption(error)).await),
        }
    }

    /// Divides `read`, which is of `range`, into pieces of data and whole units of zeros.
    fn divide_zeros(
        &self,
        range: GuestRange,
        mut read: Buf,
        (pieces, units): (&mut Vec<(GuestRange, Buf)>, &mut Vec<GuestRange>),
    ) {
        let whole = match self.l2.version {
            Version::V2 => None,
            Version::V3 => self.whole_units(range, self.map.len()).whole,
        };
        let between = |from, to| {
            GuestRange::between(GuestOffset::new(from), GuestOffset::new(to)).expect("a part")
        };
        // What `read` still has begins here.
        let mut from = range.start().bytes();
        let (mut at, end) = whole.map_or((0, 0), |all| (all.start().bytes(), all.end().bytes()));
        while at < end {
            let next = end.min(at + self.l2.subcluster_bytes());
            let [before, through] =
                [at, next].map(|to| usize::try_from(to - from).expect("a step"));
            if is_zero(&read[before..through]) {
                let data = read.split_to(before);
                if !data.is_empty() {
                    pieces.push((between(from, at), data));
                }
                read.advance(through - before);
                match units.last_mut() {
                    Some(last) if last.end().bytes() == at => {
                        *last = between(last.start().bytes(), next);
                    }
                    _ => units.push(between(at, next)),
                }
                from = next;
            }
            at = next;
        }
        if !read.is_empty() {
            pieces.push((between(from, range.end().bytes()), read));
        }
    }

    /// Groups `pieces`, in rising order, so that each group touches every cluster from its first to
    /// its last.
    fn by_cluster(&self, pieces: Vec<(GuestRange, Buf)>) -> Vec<Vec<(GuestRange, Buf)>> {
        let mut groups: Vec<Vec<(GuestRange, Buf)>> = Vec::new();
        for (range, buf) in pieces {
            let (first, _) = clusters_of(self.l2.cluster_bits, range);
            let follows = |group: &Vec<(GuestRange, Buf)>| {
                group.last().is_some_and(|(before, _)| {
                    let (_, last) = clusters_of(self.l2.cluster_bits, *before);
                    first <= last.saturating_add(1)
                })
            };
            match groups.last_mut() {
                Some(group) if follows(group) => group.push((range, buf)),
                _ => groups.push(vec![(range, buf)]),
            }
        }
        groups
    }

    /// `range` before its whole units, these, and what is after them.
    fn whole_units_of(&self, range: GuestRange) -> [Option<GuestRange>; 3] {
        let Units { before, whole, after } = self.whole_units(range, self.map.len());
        [before, whole, after]
    }
}
