//! What is to be done about the extents that were listed, from what was found to be named.

use super::extents::Listed;
use super::mark::{Mark, Marked, Parts};
use super::names::Named;
use super::owners::{OwnerId, Owners, RootOf, Who};
use super::{Collected, Sparse};
use crate::names::VolumeName;
use crate::place::{ExtentId, Writer};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Extents are sparse below this share, in percent.
const SPARSE_PERCENT: u64 = 60;
/// Extents of a volume are taken until it has at most this share of what is alive, in percent, …
const TARGET_PERCENT: u64 = 118;
/// … but none above this one: what it would give is not worth writing the rest.
const DENSE_PERCENT: u64 = 90;
/// Parts of what compaction cannot take are given back if they are more than this share of an
/// extent, in percent. Each hole is a request to a file system, and asked for again each time.
const PUNCH_PERCENT: u64 = 15;

/// What is to be done.
pub(crate) struct Plan<'a> {
    listed: &'a [Listed],
    above: HashMap<Writer, u32>,
    punch: bool,
    /// The numbers of names whose blocks nobody writes again who has no key.
    encrypted: BTreeSet<u32>,
    /// What is alive, the newest first.
    pub(crate) kept: Vec<Kept>,
    parts: HashMap<ExtentId, Parts>,
    pub(crate) dead: Vec<Listed>,
    pub(crate) holes: Vec<(Listed, Parts)>,
    /// Heads below the highest of a name.
    pub(crate) heads: Vec<(VolumeName, Vec<u64>)>,
    pub(crate) collected: Collected,
}

/// An extent that something is named in.
pub(crate) struct Kept {
    pub(crate) id: ExtentId,
    live: u64,
    pub(crate) owner: OwnerId,
}

impl<'a> Plan<'a> {
    pub(crate) fn new(listed: &'a [Listed], names: &[Arc<Named>], punch: bool) -> Self {
        let above = names.iter().filter_map(|named| named.above()).collect();
        let lower = |named: &Arc<Named>| (named.name.clone(), named.lower.clone());
        Self {
            listed,
            above,
            punch,
            encrypted: (0..)
                .zip(names)
                .filter(|(_, named)| named.head.properties.key().is_some())
                .map(|(number, _)| number)
                .collect(),
            kept: Vec::new(),
            parts: HashMap::new(),
            dead: Vec::new(),
            holes: Vec::new(),
            heads: names.iter().map(lower).filter(|(_, lower)| !lower.is_empty()).collect(),
            collected: Collected::default(),
        }
    }

    /// How many extents are kept so far.
    pub(crate) fn kept(&self) -> u64 {
        self.kept.len() as u64
    }

    /// Something is named in an extent: older than all before.
    pub(crate) fn keep(&mut self, marked: Marked, owners: &Owners) {
        let Marked { id, parts, owner, .. } = marked;
        let live = parts.bytes();
        self.kept.push(Kept { id, live, owner });
        let len = self.len_of(id);
        let is_sparse = len.saturating_sub(live) * 100 > len * PUNCH_PERCENT;
        let is_rewritten =
            only(owners, owner).is_some_and(|number| !self.encrypted.contains(&number));
        if self.punch && is_sparse && !is_rewritten {
            self.parts.insert(id, parts);
        }
    }

    /// The length of an extent that was listed.
    pub(crate) fn len_of(&self, id: ExtentId) -> u64 {
        let at = self.listed.binary_search_by_key(&id, |listed| listed.id);
        at.map_or(0, |at| self.listed[at].len)
    }

    /// Everything that is named was kept.
    pub(crate) fn finish(mut self, names: &[Arc<Named>], mark: &Mark) -> Self {
        self.collected.volumes = names.iter().filter(|named| named.is_alive()).count() as u64;
        (self.collected.nodes, self.collected.snapshots) = (mark.nodes, mark.snapshots);
        let mut kept = std::mem::take(&mut self.kept).into_iter().rev().peekable();
        let mut of_volumes: BTreeMap<u32, Vec<(Listed, u64)>> = BTreeMap::new();
        for &listed in self.listed {
            let Listed { id, len } = listed;
            self.collected.extents += 1;
            self.collected.bytes += len;
            while kept.next_if(|kept| kept.id < id).is_some() {}
            let found = kept.next_if(|kept| kept.id == id);
            // Whoever goes on from the head finds it.
            if self.above.get(&id.writer).is_some_and(|first| id.sequence >= *first) {
                self.collected.live_bytes += len;
                self.collected.recent_bytes += len;
                continue;
            }
            let Some(Kept { live, owner, .. }) = found else {
                self.collected.freed_extents += 1;
                self.collected.freed_bytes += len;
                self.dead.push(listed);
                continue;
            };
            self.collected.live_bytes += live;
            let tenth = usize::try_from(live * 10 / len).unwrap_or(9).min(9);
            self.collected.shares[tenth] += 1;
            if let Some(number) = only(&mark.owners, owner) {
                of_volumes.entry(number).or_default().push((listed, live));
            }
            if let Some(parts) = self.parts.remove(&id) {
                self.holes.push((listed, parts));
            }
        }
        for (number, extents) in of_volumes {
            self.collected.sparse.extend(sparse(&names[number as usize].name, extents));
        }
        self
    }
}

/// The volume whose present map is all that names something.
fn only(owners: &Owners, owner: OwnerId) -> Option<u32> {
    match owners.of(owner).who {
        Who::Root(RootOf { name, snapshot: None }) => Some(name),
        Who::Root(_) | Who::Volume(_) | Who::Many | Who::Nobody => None,
    }
}

/// What is to be compacted of these extents of a volume.
fn sparse(name: &VolumeName, mut extents: Vec<(Listed, u64)>) -> Option<Sparse> {
    let mut bytes: u64 = extents.iter().map(|(listed, _)| listed.len).sum();
    let all_live: u64 = extents.iter().map(|(_, live)| live).sum();
    extents.sort_by_key(|(listed, live)| live * 1000 / listed.len);
    let mut taken = Sparse { name: name.clone(), extents: Vec::new(), bytes: 0, live_bytes: 0 };
    for (Listed { id, len }, live) in extents {
        let share = live * 100 / len;
        let is_enough = bytes * 100 <= all_live * TARGET_PERCENT;
        if share >= DENSE_PERCENT || share >= SPARSE_PERCENT && is_enough {
            break;
        }
        taken.extents.push(id);
        taken.bytes += len;
        taken.live_bytes += live;
        bytes = bytes - len + live;
    }
    taken.extents.sort_unstable();
    // New extents have headers and tables, too: a few small ones that are full stay as they are.
    let gives = taken.bytes - taken.live_bytes;
    (gives >= GAIN_MIN && gives * 10 >= taken.bytes).then_some(taken)
}

/// Compaction of less than this is not worth a new extent.
const GAIN_MIN: u64 = 16 << 10;
