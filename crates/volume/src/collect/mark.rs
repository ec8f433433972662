//! Finds everything that some roots name: a walk of all their trees at once, from the newest extent
//! to the oldest.
//!
//! A place names only older ones. So when the newest extent that anything is wanted of is taken,
//! everything that names something in it was seen: each node is read once, however many trees share
//! it, each extent's nodes are read together, and what is known of an extent then is final.
//!
//! Invariants
//! - I1 An extent is returned after all that name something in it, and what is returned is
//!   complete, unless [`Mark::damage`] has something.
//! - I2 Nothing that was read is trusted: a node is what its place says, and names older ones.
//! - I3 What is held is what is wanted of older extents: the bits of their blocks, eight bytes for
//!   each frame, and their nodes; where it is counted who needs what, four bytes for each block,
//!   too, and a few more for each block of a frame.
//! - I4 No key is needed: nodes are not encrypted, and sums are those of what is stored.

use super::areas::Areas;
use super::client::Client;
use super::extents::PAGE_BYTES;
use super::names::Named;
use super::owners::{Owner, OwnerId, Owners, RootOf, TRACKED_MAX, Who};
use crate::format::extent::{Entry, FrameOf, HEADER_BYTES, frames_in};
use crate::format::snapshot::Record;
use crate::place::{BLOCK_BYTES, ExtentId, FRAME_UNIT_BYTES, FramePart, Place};
use crate::state::Root;
use crate::tree::{damaged, decode_node, decode_record};
use mica_block::{Error, ErrorKind, Result, SnapshotInfo};
use mica_map::{Directory, FANOUT, node_len};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Extents among which those are looked for whose nodes are read ahead.
const AHEAD_MAX: usize = 64;

/// What a place has, with how many levels beneath.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Level {
    /// A node of a map; at level 0 a block.
    Map(u8),
    /// A node of a tree of snapshots; at level 0 a snapshot.
    Snapshots(u8),
}

/// What a node is wanted for.
#[derive(Clone, Copy, Debug)]
struct Why {
    owner: OwnerId,
    /// The first root that it was reached from.
    via: RootOf,
    /// Whether it has to be there. What only a clone names that is not ready may be missing.
    is_firm: bool,
}

#[derive(Clone, Copy, Debug)]
struct Wanted {
    sum: u32,
    level: Level,
    why: Why,
}

/// What is wanted of an extent.
#[derive(Default)]
struct Pending {
    /// Nodes by their unit.
    nodes: BTreeMap<u32, Wanted>,
    parts: Parts,
    owner: OwnerId,
    /// Of each block, where that is counted.
    block_owners: Vec<OwnerId>,
    /// The same of blocks in frames, by where the frame begins, and which of it.
    frame_owners: BTreeMap<(u32, usize), OwnerId>,
    digest: u64,
}

/// Bytes that somebody needs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Bytes {
    /// Blocks of disks.
    pub data: u64,
    /// Nodes of maps, and records of snapshots.
    pub metadata: u64,
}

impl Bytes {
    /// Both.
    pub fn all(self) -> u64 {
        self.data + self.metadata
    }
}

impl std::ops::AddAssign for Bytes {
    fn add_assign(&mut self, more: Self) {
        self.data += more.data;
        self.metadata += more.metadata;
    }
}

impl std::ops::Sub for Bytes {
    type Output = Self;

    fn sub(self, part: Self) -> Self {
        Self { data: self.data - part.data, metadata: self.metadata - part.metadata }
    }
}

/// Who needs how much, counted while it is found.
#[derive(Default)]
pub(crate) struct Tally {
    /// The volume of which each snapshot is told apart, by its number among the names.
    of: Option<u32>,
    pub(crate) bytes: BTreeMap<OwnerId, Bytes>,
    /// How many snapshots each name has.
    pub(crate) snapshots: Vec<u64>,
    /// Those of `of`.
    pub(crate) infos: Vec<SnapshotInfo>,
}

impl Tally {
    /// Counts the blocks of an extent with this `table`, all of which that are wanted are known. Of
    /// a frame each has its share.
    fn count(&mut self, pending: &Pending, table: &[Entry]) {
        let mut add = |owner: OwnerId, bytes: u64| {
            self.bytes.entry(owner).or_default().data += bytes;
        };
        let owners = pending.block_owners.iter().filter(|owner| **owner != OwnerId::default());
        owners.for_each(|owner| add(*owner, BLOCK_BYTES as u64));
        for frame in frames_in(table) {
            let start = start_of(frame.offset);
            let owners = pending.frame_owners.range((start, 0)..=(start, usize::MAX));
            let live = owners.clone().count() as u64;
            let bytes = live_bytes(&frame, live);
            for (index, (_, owner)) in (0..).zip(owners) {
                add(*owner, bytes / live + u64::from(index < bytes % live));
            }
        }
    }
}

/// Bytes of a frame of which so many blocks are alive: as large a share as theirs.
fn live_bytes(frame: &FrameOf, blocks: u64) -> u64 {
    (frame.len * blocks).div_ceil(frame.blocks.max(blocks).max(1))
}

/// What of an extent is alive.
#[derive(Clone, Default, Debug)]
pub(crate) struct Parts {
    /// A bit for each block.
    blocks: Vec<u64>,
    block_count: u32,
    /// The frames of which something is alive, in order.
    frames: Vec<LiveFrame>,
    /// Bytes of these, without what is dead in them.
    frame_bytes: u64,
    /// The nodes: disjoint, the last one first.
    pub(crate) nodes: Vec<Range<u64>>,
    node_bytes: u64,
}

impl Parts {
    fn add_block(&mut self, index: usize) -> bool {
        let (word, bit) = (index / 64, 1 << (index % 64));
        if self.blocks.len() <= word {
            self.blocks.resize(word + 1, 0);
        }
        let is_new = self.blocks[word] & bit == 0;
        self.blocks[word] |= bit;
        self.block_count += u32::from(is_new);
        is_new
    }

    /// Whether the frame is new; `None` if there is one of another class.
    fn add_frame(&mut self, part: FramePart) -> Option<bool> {
        let (start, bit) = (start_of(part.offset), 1 << part.index);
        let class = u16::try_from(part.class).expect("few");
        match self.frames.binary_search_by_key(&start, |frame| frame.start) {
            Ok(at) => {
                let frame = &mut self.frames[at];
                frame.blocks |= bit;
                (frame.class == class).then_some(false)
            }
            Err(at) => {
                self.frames.insert(at, LiveFrame { start, class, blocks: bit });
                Some(true)
            }
        }
    }

    /// Whether something is alive of the frame that begins at `offset`.
    pub(crate) fn has_frame(&self, offset: u64) -> bool {
        self.frame(offset).is_some()
    }

    fn frame(&self, offset: u64) -> Option<&LiveFrame> {
        let start = start_of(offset);
        let at = self.frames.binary_search_by_key(&start, |frame| frame.start).ok()?;
        self.frames.get(at)
    }

    /// Where the frames begin of which something is alive.
    pub(crate) fn frames(&self) -> impl Iterator<Item = u64> {
        self.frames
            .iter()
            .map(|frame| HEADER_BYTES as u64 + u64::from(frame.start) * FRAME_UNIT_BYTES as u64)
    }

    /// Counts the bytes of frames that are alive, in an extent that has all these `frames`: of each
    /// as large a share as that of its blocks.
    fn count_frames(&mut self, frames: impl Iterator<Item = FrameOf>) {
        let live = frames.filter_map(|frame| {
            let blocks = u64::from(self.frame(frame.offset)?.blocks.count_ones());
            Some(live_bytes(&frame, blocks))
        });
        self.frame_bytes = live.sum();
    }

    fn add_node(&mut self, at: u64, len: u64) {
        self.node_bytes += len;
        match self.nodes.last_mut() {
            Some(after) if after.start == at + len => after.start = at,
            _ => self.nodes.push(at..at + len),
        }
    }

    /// Whether block `index` is.
    pub(crate) fn has_block(&self, index: usize) -> bool {
        self.blocks.get(index / 64).is_some_and(|word| word >> (index % 64) & 1 == 1)
    }

    /// How many blocks that are not in frames.
    pub(crate) fn blocks(&self) -> u64 {
        self.block_count.into()
    }

    /// How many bytes.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.block_count) * BLOCK_BYTES as u64 + self.frame_bytes + self.node_bytes
    }
}

/// An extent that something is named in.
pub(crate) struct Marked {
    pub(crate) id: ExtentId,
    pub(crate) parts: Parts,
    pub(crate) owner: OwnerId,
    /// Of the places of all its blocks and frames that are named: [`digest_of`] and
    /// [`digest_of_frame`], combined by exclusive or.
    pub(crate) digest: u64,
}

/// A hash of a block's place in its extent.
pub(crate) fn digest_of(index: usize, sum: u32) -> u64 {
    mica_units::random_at(u64::from(sum), index as u64)
}

/// A hash of a frame's place in its extent.
pub(crate) fn digest_of_frame(part: FramePart, sum: u32) -> u64 {
    // No block has such an index.
    let index = 1 << 40 | u64::from(start_of(part.offset)) << 3 | part.class as u64;
    mica_units::random_at(u64::from(sum), index)
}

fn start_of(offset: u64) -> u32 {
    let start = offset.saturating_sub(HEADER_BYTES as u64) / FRAME_UNIT_BYTES as u64;
    u32::try_from(start).unwrap_or(u32::MAX)
}

/// A frame of which something is alive.
#[derive(Clone, Copy, Debug)]
struct LiveFrame {
    /// Where it begins behind the header, in units of frames.
    start: u32,
    class: u16,
    /// A bit for each of its blocks.
    blocks: u16,
}

/// Something that has to be there and is not, or is something else.
#[derive(Clone, Debug)]
pub(crate) struct Damage {
    pub(crate) at: Place,
    /// One of the roots that need it.
    pub(crate) via: RootOf,
    pub(crate) error: Error,
}

/// See the module.
pub(crate) struct Mark {
    areas: Areas,
    pending: BTreeMap<ExtentId, Pending>,
    pub(crate) owners: Owners,
    /// If it is counted who needs what.
    pub(crate) tally: Option<Tally>,
    /// What was found damaged, with everything beneath it unknown.
    pub(crate) damage: Vec<Damage>,
    /// Nodes that were read.
    pub(crate) nodes: u64,
    /// Snapshots that were found.
    pub(crate) snapshots: u64,
}

impl Mark {
    /// Everything that the heads of `names` name, is to be found.
    pub(crate) fn new(client: &Client, names: &[Arc<Named>]) -> Self {
        Self::with(client, names, None)
    }

    /// As [`Self::new`]; it is counted who needs what: each volume, as long as there are few, or
    /// each snapshot of `of` alone.
    pub(crate) fn counting(client: &Client, names: &[Arc<Named>], of: Option<u32>) -> Self {
        let tally = Tally { of, snapshots: vec![0; names.len()], ..Tally::default() };
        Self::with(client, names, Some(tally))
    }

    fn with(client: &Client, names: &[Arc<Named>], tally: Option<Tally>) -> Self {
        let mut this = Self {
            areas: Areas::new(client.clone()),
            pending: BTreeMap::new(),
            owners: Owners::new(),
            tally,
            damage: Vec::new(),
            nodes: 0,
            snapshots: 0,
        };
        for (number, named) in (0..).zip(names) {
            if named.is_alive() {
                let via = RootOf { name: number, snapshot: None };
                let owner = this.owner_of_root(via);
                let why = Why { owner, via, is_firm: !named.is_pinned() };
                let state = &named.head.state;
                this.add_root(state.map, Level::Map, why);
                let owner = this.owner_of_snapshots(number);
                this.add_root(state.snapshots, Level::Snapshots, Why { owner, ..why });
            }
        }
        this
    }

    /// Whether volume `name` is told apart from others that need the same, and its bit.
    pub(crate) fn tracked(&self, name: u32) -> u64 {
        let Some(tally) = &self.tally else { return 0 };
        match tally.of {
            Some(of) => u64::from(of == name),
            None if tally.snapshots.len() <= TRACKED_MAX => 1 << name,
            None => 0,
        }
    }

    fn owner_of_root(&mut self, root: RootOf) -> OwnerId {
        let is_of = self.tally.as_ref().is_some_and(|tally| tally.of == Some(root.name));
        if root.snapshot.is_some() && !is_of {
            return self.owner_of_snapshots(root.name);
        }
        let tracked = self.tracked(root.name);
        self.owners.id(Owner { who: Who::Root(root), tracked })
    }

    /// Who has the tree of the snapshots of volume `name`, and all that they have if nobody wants
    /// to know more.
    fn owner_of_snapshots(&mut self, name: u32) -> OwnerId {
        let who = if self.tally.is_some() { Who::Volume(name) } else { Who::Many };
        let tracked = self.tracked(name);
        self.owners.id(Owner { who, tracked })
    }

    fn add_root(&mut self, root: Root, level: fn(u8) -> Level, why: Why) {
        if let Some(node) = root.node {
            self.want(node, level(root.height), why);
        }
    }

    /// The newest extent that something is named in, when all that name it were seen.
    ///
    /// # Errors
    /// What the store reports, unless it is damage.
    pub(crate) async fn next(&mut self) -> Result<Option<Marked>> {
        loop {
            let Some(mut newest) = self.pending.last_entry() else { return Ok(None) };
            let id = *newest.key();
            match newest.get_mut().nodes.pop_last() {
                Some((unit, wanted)) => self.visit(id, unit, wanted).await?,
                None => {
                    let pending = newest.remove();
                    let table = match pending.parts.frames.is_empty() {
                        true => Vec::new(),
                        false => self.areas.table_of_frames(id).await?,
                    };
                    if let Some(tally) = &mut self.tally {
                        tally.count(&pending, &table);
                    }
                    let Pending { mut parts, owner, digest, .. } = pending;
                    parts.count_frames(frames_in(&table));
                    return Ok(Some(Marked { id, parts, owner, digest }));
                }
            }
        }
    }

    async fn visit(&mut self, id: ExtentId, unit: u32, wanted: Wanted) -> Result<()> {
        let offset = unit as usize * Place::UNIT_BYTES;
        let at = Place::new(id, offset, wanted.sum);
        if !self.areas.has(id) {
            let newest = self.pending.iter().rev().take(AHEAD_MAX);
            let needed = newest.filter(|(_, pending)| !pending.nodes.is_empty());
            self.areas.read_ahead(id, needed.map(|(id, _)| *id));
        }
        let bytes = match self.areas.bytes(at).await {
            Ok(bytes) => bytes,
            Err(error) => return self.note(at, wanted.why, error),
        };
        let len = node_len(bytes).unwrap_or(0);
        let found = match wanted.level {
            Level::Map(_) | Level::Snapshots(1..) => {
                decode_node(bytes, at).map(|node| Found::Directory(Box::new(node)))
            }
            Level::Snapshots(0) => decode_record(bytes, at).map(Found::Snapshot),
        };
        let found = match found {
            Ok(found) => found,
            // That is as good as deleted.
            Err(_) if !wanted.why.is_firm && is_given_back(bytes, at.offset()) => return Ok(()),
            Err(error) => return self.note(at, wanted.why, error),
        };
        self.nodes += 1;
        let pending = self.pending.get_mut(&id).expect("it is being visited");
        let len = len.next_multiple_of(Place::UNIT_BYTES) as u64;
        pending.parts.add_node(offset as u64, len);
        if let Some(tally) = &mut self.tally {
            tally.bytes.entry(wanted.why.owner).or_default().metadata += len;
        }
        match found {
            Found::Directory(directory) => self.want_children(&directory, at, wanted),
            Found::Snapshot(record) => {
                self.snapshots += 1;
                let via = RootOf { snapshot: Some(record.info.number), ..wanted.why.via };
                let why = Why { via, owner: self.owner_of_root(via), ..wanted.why };
                self.add_root(record.map, Level::Map, why);
                if let Some(tally) = &mut self.tally {
                    tally.snapshots[via.name as usize] += 1;
                    if tally.of == Some(via.name) {
                        tally.infos.push(record.info);
                    }
                }
            }
        }
        Ok(())
    }

    fn want_children(&mut self, directory: &Directory<Place>, at: Place, wanted: Wanted) {
        let level = match wanted.level {
            Level::Map(level) => Level::Map(level - 1),
            Level::Snapshots(level) => Level::Snapshots(level - 1),
        };
        for child in (0..FANOUT).filter_map(|index| directory.child(index)) {
            debug_assert!(mica_map::Reference::may_name(at, child), "decoding checks it");
            self.want(child, level, wanted.why);
        }
    }

    fn want(&mut self, at: Place, level: Level, why: Why) {
        let pending = self.pending.entry(at.extent()).or_default();
        pending.owner = self.owners.join(pending.owner, why.owner);
        let offset = usize::try_from(at.offset()).expect("an extent is small");
        if let Some(part) = at.frame() {
            let is_new = (level == Level::Map(0)).then(|| pending.parts.add_frame(part)).flatten();
            match is_new {
                Some(true) => pending.digest ^= digest_of_frame(part, at.sum()),
                Some(false) => {}
                None => {
                    return self.contradiction(at, why, &"it is named as two different things");
                }
            }
            if self.tally.is_some() {
                let of_block = pending.frame_owners.entry((start_of(part.offset), part.index));
                let owner = of_block.or_default();
                *owner = self.owners.join(*owner, why.owner);
            }
            return;
        }
        if level == Level::Map(0) {
            let from_first = offset.checked_sub(HEADER_BYTES);
            match from_first.filter(|from| from.is_multiple_of(BLOCK_BYTES)) {
                Some(from_first) => {
                    let index = from_first / BLOCK_BYTES;
                    if pending.parts.add_block(index) {
                        pending.digest ^= digest_of(index, at.sum());
                    }
                    if self.tally.is_some() {
                        let of_blocks = &mut pending.block_owners;
                        if of_blocks.len() <= index {
                            of_blocks.resize(index + 1, OwnerId::default());
                        }
                        of_blocks[index] = self.owners.join(of_blocks[index], why.owner);
                    }
                }
                None => self.contradiction(at, why, &"no block begins there"),
            }
            return;
        }
        let unit = u32::try_from(offset / Place::UNIT_BYTES).expect("an extent is small");
        let new = Wanted { sum: at.sum(), level, why };
        let wanted = pending.nodes.entry(unit).or_insert(new);
        if (wanted.sum, wanted.level) != (new.sum, new.level) {
            return self.contradiction(at, why, &"it is named as two different things");
        }
        wanted.why.owner = self.owners.join(wanted.why.owner, why.owner);
        if why.is_firm && !wanted.why.is_firm {
            (wanted.why.via, wanted.why.is_firm) = (why.via, true);
        }
    }

    fn contradiction(&mut self, at: Place, why: Why, what: &dyn std::fmt::Display) {
        let error = damaged(at, "what a map names", what);
        self.damage.push(Damage { at, via: why.via, error });
    }

    /// Keeps `error` in mind if it is damage.
    fn note(&mut self, at: Place, why: Why, error: Error) -> Result<()> {
        match error.kind() {
            ErrorKind::NotFound if !why.is_firm => Ok(()),
            ErrorKind::NotFound | ErrorKind::Corrupt => {
                self.damage.push(Damage { at, via: why.via, error });
                Ok(())
            }
            _ => Err(error),
        }
    }
}

/// Whether the node at `offset`, which `bytes` begin with, was given back, or the part of it that
/// is in another page: of that only zeros are left, and of whatever follows it there.
fn is_given_back(bytes: &[u8], offset: u64) -> bool {
    let in_page = usize::try_from(PAGE_BYTES - offset % PAGE_BYTES).expect("a page is small");
    let (first, rest) = bytes.split_at(in_page.min(bytes.len()));
    let is_zeros = |part: &[u8]| !part.is_empty() && part.iter().all(|byte| *byte == 0);
    let goes_on = node_len(first).is_some_and(|len| len > first.len());
    is_zeros(first) || goes_on && is_zeros(rest)
}

enum Found {
    Directory(Box<Directory<Place>>),
    Snapshot(Record),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_was_given_back_if_a_page_of_it_is_zeros() {
        let page = usize::try_from(PAGE_BYTES).expect("small");
        // A node of 100 bytes, and others behind it.
        let node = [&92_u32.to_le_bytes()[..], &[7; 300]].concat();
        let zeros_from = |kept: usize| {
            let mut bytes = node.clone();
            bytes[kept..].fill(0);
            bytes
        };
        for (bytes, offset, wanted) in [
            (node.clone(), page - 48, false),
            (zeros_from(0), page, true),
            (zeros_from(0), page + 512, true),
            // It begins in a page that stays; another one in the next page does, too.
            (zeros_from(48), page - 48, true),
            ([&zeros_from(48)[..300], &[7]].concat(), page - 48, false),
            // It ends in its page, or there is damage that is not of whole pages.
            (zeros_from(48), page, false),
            (zeros_from(112), page - 112, false),
            (zeros_from(64), page - 48, false),
            (Vec::new(), page, false),
        ] {
            assert_eq!(is_given_back(&bytes, offset as u64), wanted, "{offset} {bytes:?}");
        }
    }
}
