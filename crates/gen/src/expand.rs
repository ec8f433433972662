//! From the plan clusters that a layer is asked to hold to the entries of its own tables, and to
//! the owners after it. No I/O.
//!
//! A layer may have larger or smaller clusters than the plan, or subclusters. It holds whole
//! *grains*: the larger of its own allocation unit and of the unit in which ownership is counted.
//! Layers are expanded from the base up, each over the owners that the ones below it left; so what
//! a layer hides is hidden in the owner map too, whatever its kind.

use crate::owner::{Owner, OwnerMap};
use crate::plan::{DataFile, LayerKind, LayerShape, Qcow2Shape};
use crate::spec::{Feature, Features};
use mica_qcow2_format::{SUBCLUSTER_COUNT, Version};
use mica_units::{ClusterBits, GuestOffset, Rng};

/// A cluster of a layer that the layer says something about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry {
    /// Its number in the layer's own clusters.
    pub(crate) cluster: u64,
    /// What the layer says.
    pub(crate) content: Content,
}

/// What a layer says about a cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Content {
    /// All of it is data.
    Data,
    /// All of it is data, compressed.
    Compressed,
    /// It is zeros.
    Zero,
    /// It is zeros and has a cluster in the file.
    ZeroAllocated,
    /// Its subclusters differ; bit n is for subcluster n. It has a cluster in the file if `placed`.
    Subclusters { allocated: u32, zero: u32, placed: bool },
}

/// Expands what `shape` is asked to hold and gives it to the layer in `owners`. Entries ascend.
pub(crate) fn expand(
    shape: &LayerShape,
    held: &[u32],
    plan_bits: ClusterBits,
    features: Features,
    rng: &mut Rng,
    owners: &mut OwnerMap,
) -> Vec<Entry> {
    owners.resize(shape.len);
    let cluster_bits = match &shape.kind {
        LayerKind::Raw => plan_bits,
        LayerKind::Qcow2(qcow2) => qcow2.l2.cluster_bits,
    };
    let mut layer = Expansion { shape, cluster_bits, features, rng, owners, entries: Vec::new() };
    for cluster in held {
        let start = u64::from(*cluster) << plan_bits.bits();
        if start < shape.len {
            layer.hold(start, (start + plan_bits.bytes()).min(shape.len));
        }
    }
    layer.entries
}

struct Expansion<'a> {
    shape: &'a LayerShape,
    cluster_bits: ClusterBits,
    features: Features,
    rng: &'a mut Rng,
    owners: &'a mut OwnerMap,
    entries: Vec<Entry>,
}

impl Expansion<'_> {
    /// Holds all grains of `start..end`, or some of them where there are several.
    fn hold(&mut self, start: u64, end: u64) {
        let grain = self.shape.allocation_bytes().max(self.owners.unit_bytes());
        let grain = match self.shape.kind {
            LayerKind::Raw => self.cluster_bits.bytes(),
            LayerKind::Qcow2(_) => grain,
        };
        let first = start - start % grain;
        let count = (end - first).div_ceil(grain);
        let cluster_bytes = self.cluster_bits.bytes();
        let whole_clusters = start.is_multiple_of(cluster_bytes) && end - start >= cluster_bytes;
        let whole = count == 1 || self.rng.percent(50);
        if whole && (whole_clusters || grain >= cluster_bytes) {
            return self.put_clusters(first, end);
        }
        let sure = self.rng.below(count);
        for index in 0..count {
            if whole || index == sure || self.rng.percent(40) {
                let at = first + index * grain;
                match grain < cluster_bytes {
                    true => self.put_subclusters(at, at + grain),
                    false => self.put_clusters(at, at + grain),
                }
            }
        }
    }

    /// Whole clusters of one kind.
    fn put_clusters(&mut self, start: u64, end: u64) {
        let content = self.choose_content();
        let end = end.min(self.shape.len);
        let first = self.cluster_number(start);
        for cluster in first..self.cluster_bits.clusters_for(end) {
            if self.entries.last().is_none_or(|last| last.cluster < cluster) {
                self.entries.push(Entry { cluster, content });
                let start = cluster << self.cluster_bits.bits();
                self.own(start, start + self.cluster_bits.bytes(), content);
            }
        }
    }

    fn cluster_number(&self, guest: u64) -> u64 {
        self.cluster_bits.guest_cluster(GuestOffset::new(guest)).number()
    }

    /// Some subclusters of one cluster.
    fn put_subclusters(&mut self, start: u64, end: u64) {
        let cluster = self.cluster_number(start);
        let content = match self.choose_content() {
            Content::Compressed | Content::Subclusters { .. } => Content::Data,
            other => other,
        };
        let within = |offset: u64| self.cluster_bits.offset_within(offset);
        let subcluster = self.cluster_bits.bytes() / u64::from(SUBCLUSTER_COUNT);
        let count = (end - start) / subcluster;
        let mask = (u64::MAX >> (64 - count)) << (within(start) / subcluster);
        let mask = u32::try_from(mask).expect("a grain lies within its cluster");

        if self.entries.last().is_none_or(|last| last.cluster < cluster) {
            let content = Content::Subclusters { allocated: 0, zero: 0, placed: false };
            self.entries.push(Entry { cluster, content });
        }
        let Some(Entry { content: Content::Subclusters { allocated, zero, placed }, .. }) =
            self.entries.last_mut()
        else {
            return; // All of the cluster is held already.
        };
        if (*allocated | *zero) & mask != 0 {
            return;
        }
        match content {
            Content::Zero => *zero |= mask,
            Content::ZeroAllocated => {
                *zero |= mask;
                *placed = true;
            }
            _ => {
                *allocated |= mask;
                *placed = true;
            }
        }
        self.own(start, end, content);
    }

    fn own(&mut self, start: u64, end: u64, content: Content) {
        let number = self.shape.number;
        let owner = match content {
            Content::Zero | Content::ZeroAllocated => Owner::Zero(number),
            _ => Owner::Data(number),
        };
        self.owners.set(start, end, owner);
    }

    fn choose_content(&mut self) -> Content {
        let LayerKind::Qcow2(shape) = &self.shape.kind else { return Content::Data };
        let Qcow2Shape { l2, compressed_percent, data_file, .. } = *shape;
        let roll = self.rng.below(100);
        if l2.version == Version::V3 {
            if roll < 8 && self.features.has(Feature::Zero) {
                return Content::Zero;
            }
            // Version 3 distinguishes offset 0 from no offset, by the refcount flag, only for data:
            // so there are no preallocated zeros in external files here.
            let place = data_file == DataFile::Internal;
            if (8..16).contains(&roll) && place && self.features.has(Feature::ZeroPreallocated) {
                return Content::ZeroAllocated;
            }
        }
        if roll >= 100 - compressed_percent { Content::Compressed } else { Content::Data }
    }
}

#[cfg(test)]
mod tests;
