//! The places of an image's metadata, so that data is never written over it, whatever the image's
//! refcounts and tables claim.
//!
//! Invariants
//! - I1 Memory is bounded by what the image itself spends: eight bytes for each L2 table and
//!   refcount block that lies apart within its file, less for contiguous ones, nothing for entries
//!   that name places beyond the end of the file.
//! - I2 A table is written only if it is alone in its place: within the file, or created here, and
//!   named once.

mod runs;

use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, HostCluster, HostOffset};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use runs::ClusterRuns;
use std::collections::BTreeMap;

/// Entries of a table that are sorted at once while an image is opened: 4 MiB of them.
const BATCH_ENTRIES: usize = 1 << 19;

/// Metadata of a cluster's length, of which there may be many.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum TableKind {
    L2,
    RefcountBlock,
}

impl TableKind {
    fn name(self) -> &'static str {
        match self {
            Self::L2 => "an L2 table",
            Self::RefcountBlock => "a refcount block",
        }
    }

    fn of_tag(tag: bool) -> Self {
        if tag { Self::RefcountBlock } else { Self::L2 }
    }
}

/// Ranges of the image file that hold metadata.
pub(crate) struct MetadataRanges {
    bits: ClusterBits,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// Header and the tables of tables, of which there is one each: their ends, by their starts.
    areas: BTreeMap<u64, (u64, &'static str)>,
    /// L2 tables and refcount blocks.
    tables: ClusterRuns,
    /// Places where tables and blocks overlap other metadata: nothing is written to these.
    contested: ClusterRuns,
    /// One of the tables of tables that overlaps another one, or the header.
    overlapping: Option<HostOffset>,
    /// Where the file ended when it was opened. A place beyond that counts only if it was allocated
    /// here.
    file_end: Option<HostCluster>,
}

impl MetadataRanges {
    pub(crate) fn new(bits: ClusterBits) -> Self {
        Self { bits, state: RwLock::default() }
    }

    /// The file ends before this cluster; tables named beyond were not made by any writer.
    pub(crate) fn set_file_end(&self, end: HostCluster) {
        self.write().file_end = Some(end);
    }

    /// From now on `what` is at `at`. If other metadata is there, it is contested.
    pub(crate) fn add(&self, at: HostOffset, len: u64, what: &'static str) {
        if len == 0 {
            return;
        }
        let mut state = self.write();
        if state.find(self.bits, at, len).is_some() {
            state.contested.merge(&[self.bits.host_cluster(at)], false, |_| ());
            state.overlapping = Some(at);
        } else {
            state.areas.insert(at.bytes(), (at.bytes().saturating_add(len), what));
        }
    }

    /// From now on a table or block is at `at`. If other metadata is there, it is contested.
    pub(crate) fn add_table(&self, at: HostOffset, kind: TableKind) {
        self.add_sorted(&[self.bits.host_cluster(at)], kind);
    }

    /// Takes in the tables or blocks that a table of an image names, except those beyond the file.
    pub(crate) fn gather(&self, kind: TableKind) -> Gathered<'_> {
        let end = self.read().file_end.unwrap_or(HostCluster::new(u64::MAX));
        Gathered { ranges: self, kind, end, clusters: Vec::new() }
    }

    fn add_sorted(&self, clusters: &[HostCluster], kind: TableKind) {
        let mut state = self.write();
        let State { areas, tables, contested, .. } = &mut *state;
        let mut known = Vec::new();
        let mut rest = clusters;
        for (start, (end, _)) in &*areas {
            let first = self.bits.host_cluster(HostOffset::new(*start));
            let end = self.bits.host_cluster_up(HostOffset::new(*end));
            let (free, later) = rest.split_at(rest.partition_point(|cluster| *cluster < first));
            tables.merge(free, kind == TableKind::RefcountBlock, |cluster| known.push(cluster));
            let (taken, later) = later.split_at(later.partition_point(|cluster| *cluster < end));
            known.extend_from_slice(taken);
            rest = later;
        }
        tables.merge(rest, kind == TableKind::RefcountBlock, |cluster| known.push(cluster));
        // A cluster may be named many times; that is reported once.
        contested.merge(&known, false, |_| ());
    }

    /// Checks that the table or block at `at` is alone there, so that it may be written.
    ///
    /// # Errors
    /// `Corrupt` if it is not.
    pub(crate) fn check_table(&self, at: HostOffset) -> Result<()> {
        let state = self.read();
        let cluster = self.bits.host_cluster(at);
        let is_beyond = state.file_end.is_some_and(|end| cluster >= end)
            && !state.tables.contains(cluster)
            && !state.areas.contains_key(&at.bytes());
        match is_beyond || state.contested.contains(cluster) {
            true => Err(not_alone(at)),
            false => Ok(()),
        }
    }

    /// Checks that header and tables of tables, which every change writes, do not overlap. An entry
    /// that names one of them is wrong by itself.
    ///
    /// # Errors
    /// `Corrupt` if they do.
    pub(crate) fn check_areas(&self) -> Result<()> {
        self.read().overlapping.map_or(Ok(()), |at| Err(not_alone(at)))
    }

    /// What was at `at` is no longer there.
    pub(crate) fn remove(&self, at: HostOffset) {
        let mut state = self.write();
        if state.areas.remove(&at.bytes()).is_none() {
            state.tables.remove(self.bits.host_cluster(at));
        }
    }

    /// Checks that a range holds no metadata.
    ///
    /// # Errors
    /// `Corrupt` if it does; the image contradicts itself.
    pub(crate) fn check(&self, at: HostOffset, len: u64) -> Result<()> {
        let Some((start, what)) = self.read().find(self.bits, at, len) else { return Ok(()) };
        let context = format!(
            "the image is corrupt: data at {at} would overwrite {what} at {start:#x}; \
             run `mica check -r all`"
        );
        Err(Error::new(ErrorKind::Corrupt, context))
    }

    /// Bytes of memory that it holds.
    #[cfg(test)]
    pub(crate) fn held_bytes(&self) -> usize {
        let state = self.read();
        state.tables.held_bytes() + state.contested.held_bytes()
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }
}

impl State {
    /// Metadata in a range: where it is and what.
    fn find(&self, bits: ClusterBits, at: HostOffset, len: u64) -> Option<(u64, &'static str)> {
        let end = at.bytes().saturating_add(len);
        if let Some((start, (stop, what))) = self.areas.range(..end).next_back()
            && *stop > at.bytes()
        {
            return Some((*start, what));
        }
        let (first, end) = (bits.host_cluster(at), bits.host_cluster_up(HostOffset::new(end)));
        let run = self.tables.overlap(first, end)?;
        let start = bits.start_of(run.first().max(first)).bytes();
        Some((start, TableKind::of_tag(run.tag()).name()))
    }
}

fn not_alone(at: HostOffset) -> Error {
    let context = format!(
        "the image is corrupt: the table at {at} lies over other metadata or beyond the end of the \
         file; run `mica check -r all`"
    );
    Error::new(ErrorKind::Corrupt, context)
}

/// Tables that are being taken in, sorted a batch at a time.
pub(crate) struct Gathered<'a> {
    ranges: &'a MetadataRanges,
    kind: TableKind,
    /// Where the file ends.
    end: HostCluster,
    clusters: Vec<HostCluster>,
}

impl Gathered<'_> {
    /// A table or block is at `at`.
    pub(crate) fn push(&mut self, at: HostOffset) {
        let cluster = self.ranges.bits.host_cluster(at);
        if cluster >= self.end {
            return;
        }
        self.clusters.push(cluster);
        if self.clusters.len() >= BATCH_ENTRIES {
            self.take_in();
        }
    }

    /// All tables have been added.
    pub(crate) fn finish(mut self) {
        self.take_in();
    }

    fn take_in(&mut self) {
        self.clusters.sort_unstable();
        self.ranges.add_sorted(&self.clusters, self.kind);
        self.clusters.clear();
    }
}

#[cfg(test)]
mod tests;
