//! Makes extents: edits the map, and puts the blocks, the nodes that changed, and the table into
//! one object.
//!
//! ```text
//! segment ─▶ map ─▶ its cuts: nodes of the map, record of a snapshot ─▶ segment … ─▶ nodes, table
//! ```
//!
//! Invariants
//! - I1 An extent has the whole of its segments. Its state is the one before with them applied.
//! - I2 A node follows all that it names, in this extent or in an earlier one.
//! - I3 A snapshot in the middle of an extent costs the nodes that changed since the last one, and
//!   a record. The tree of snapshots is written once, at the end.

mod cuts;

use crate::format::Id;
use crate::format::extent::{ENTRY_BYTES, Entry, HEADER_BYTES, Header, Kind, LEN_MAX};
use crate::format::snapshot::{FRAMED_BYTES_MAX, Record};
use crate::packing::{Packed, Packer};
use crate::place::{BLOCK_BYTES, ExtentId, FramePart, Place};
use crate::recent::Block;
use crate::segment::{Segment, WEIGHT_MAX};
use crate::state::State;
use crate::tree::{Tree, decode_node};
use mica_block::Result;
use mica_map::{Directory, Editor, HEIGHT_MAX, crc32c, encode_node};
use mica_rt::{Buf, Pace, Part, Parts};
use std::sync::Arc;

/// Directories of the map that are held unchanged.
const DIRECTORIES_HELD: usize = 1 << 14;
/// The same of the tree of snapshots, of which mostly the end changes.
const SNAPSHOT_DIRECTORIES_HELD: usize = 1 << 8;

// The nodes of so many scattered blocks, a path of full directories for each, fit beside them. So
// do the two paths of a cleared range, and a snapshot's record with its own path.
const _: () = assert!(
    HEADER_BYTES + 2 * WEIGHT_MAX * (BLOCK_BYTES + 18 * NODE_ROOM_BYTES + 2 * ENTRY_BYTES)
        < LEN_MAX
);
/// Blocks or nodes that are gone through before other tasks have their turn.
const STEPS_AT_ONCE: u64 = 64;
/// Bytes that a directory takes in an extent, at most.
const NODE_ROOM_BYTES: usize =
    mica_map::directory_bytes_max::<Place>().next_multiple_of(Place::UNIT_BYTES);
// So do frames, which take less than their blocks.
const _: () = assert!(2 * WEIGHT_MAX * BLOCK_BYTES <= FramePart::FRAMES_LEN_END);
// A cut takes no more than a block: a record, a path in the tree of snapshots.
const _: () = assert!(
    FRAMED_BYTES_MAX.next_multiple_of(Place::UNIT_BYTES) + HEIGHT_MAX as usize * NODE_ROOM_BYTES
        < BLOCK_BYTES + 18 * NODE_ROOM_BYTES
);

/// Who puts extents: all that is the same in each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signature {
    pub(crate) store: Id,
    pub(crate) volume: Id,
}

/// Makes the extents of a writer, one after the other.
pub(crate) struct Builder {
    signature: Signature,
    map: Editor<Place>,
    snapshots: Editor<Place>,
    state: State,
    pace: Pace,
    /// What makes of blocks what is stored of them; none if that is the blocks.
    packer: Option<Packer>,
}

/// An extent that is to be put.
pub(crate) struct Built {
    /// The state with it.
    pub(crate) state: State,
    /// The object.
    pub(crate) content: Arc<Parts>,
    /// Blocks with data in it, and bytes that they take.
    pub(crate) blocks: usize,
    /// See `blocks`.
    pub(crate) data_len: usize,
    /// Its nodes and records, once more, and where they begin in it.
    pub(crate) nodes: Vec<u8>,
    /// See `nodes`.
    pub(crate) nodes_at: usize,
}

impl Builder {
    /// Goes on from `state`.
    pub(crate) fn new(signature: Signature, state: State) -> Self {
        let map = Editor::new(state.map, DIRECTORIES_HELD);
        let snapshots = Editor::new(state.snapshots, SNAPSHOT_DIRECTORIES_HELD);
        let (pace, packer) = (Pace::new(STEPS_AT_ONCE), None);
        Self { signature, map, snapshots, state, pace, packer }
    }

    /// The same, with blocks that are stored as `packer` makes them.
    pub(crate) fn with_packer(self, packer: Option<Packer>) -> Self {
        Self { packer, ..self }
    }

    /// Makes extent `id` of `segments`, one after the other.
    ///
    /// # Errors
    /// If the map cannot be read. The builder is of no use then: a part of the segments is in it.
    ///
    /// # Panics
    /// If there are no segments, or so many that they do not fit.
    pub(crate) async fn build(
        &mut self,
        tree: &Tree,
        id: ExtentId,
        segments: &[Segment],
        nonce: Id,
    ) -> Result<Built> {
        let weight: usize = segments.iter().map(Segment::weight).sum();
        assert!(!segments.is_empty() && weight <= 2 * WEIGHT_MAX, "segments for one extent");
        let blocks = segments.iter().map(|segment| segment.batch.data_blocks()).sum();
        let data = match &mut self.packer {
            None => Data::Blocks(Vec::with_capacity(blocks)),
            Some(packer) => Data::Packed(packer.pack(id, segments, &mut self.pace).await?),
        };
        let mut content = Content::new(id, blocks, data);
        for segment in segments {
            self.apply(tree, segment, &mut content).await?;
            for (index, cut) in segment.cuts.iter().enumerate() {
                self.state.records = segment.records_before(index);
                self.cut(tree, cut, &mut content).await?;
            }
            self.state.records = segment.records;
        }
        self.write_map(tree, &mut content).await;
        let put = |directory: &_| content.push_node(tree, directory);
        self.state.snapshots = self.snapshots.write(put);
        if content.entries.is_empty() {
            // As when a snapshot was dropped by somebody who was faster. A header alone is a fence.
            content.entries.push(Entry::Length { bytes: self.state.len });
        }
        Ok(content.finish(self.signature, nonce, self.state))
    }

    /// Adds the nodes of the map that changed.
    async fn write_map(&mut self, tree: &Tree, content: &mut Content) {
        let count = usize::try_from(STEPS_AT_ONCE).expect("small");
        let mut root = None;
        while root.is_none() {
            root = self.map.write_some(count, |directory| content.push_node(tree, directory));
            self.pace.steps(STEPS_AT_ONCE).await;
        }
        self.state.map = root.expect("it is written");
    }

    async fn apply(&mut self, tree: &Tree, segment: &Segment, content: &mut Content) -> Result<()> {
        for (start, count, data) in segment.batch.pieces() {
            self.pace.steps(1).await;
            match data {
                Some(data) => {
                    let place = content.push(start, &data);
                    self.map.grow_for(start);
                    feed(&mut self.map, tree, content, start).await?;
                    self.map.set(start, Some(place));
                }
                None => {
                    content.entries.push(Entry::Nothing { first: start, count });
                    let last = start + count - 1;
                    feed(&mut self.map, tree, content, start).await?;
                    feed(&mut self.map, tree, content, last).await?;
                    self.map.clear(start..=last);
                }
            }
        }
        if segment.len != self.state.len {
            content.entries.push(Entry::Length { bytes: segment.len });
        }
        self.state = State { len: segment.len, time_ns: segment.time_ns, ..self.state };
        Ok(())
    }
}

/// Feeds an editor what it has to see before `key` is changed.
async fn feed(editor: &mut Editor<Place>, tree: &Tree, content: &Content, key: u64) -> Result<()> {
    while let Some((slot, at)) = editor.missing(key) {
        let directory = match content.framed(at) {
            Some(bytes) => decode_node(bytes, at)?,
            None => Directory::clone(&*tree.node(at).await?),
        };
        editor.feed(slot, directory);
    }
    Ok(())
}

/// The parts of an extent while it is made.
struct Content {
    id: ExtentId,
    /// How many blocks there will be.
    blocks: usize,
    data: Data,
    /// Where the nodes begin: after all blocks that there will be.
    nodes_at: usize,
    nodes: Vec<u8>,
    entries: Vec<Entry>,
}

/// What an extent has between its header and its nodes.
enum Data {
    /// Blocks as they are: those that were added.
    Blocks(Vec<Block>),
    /// All blocks, as they are stored.
    Packed(Packed),
}

impl Content {
    /// An extent that will have so many blocks.
    fn new(id: ExtentId, blocks: usize, data: Data) -> Self {
        let data_len = match &data {
            Data::Blocks(_) => blocks * BLOCK_BYTES,
            Data::Packed(packed) => packed.area.len(),
        };
        let (nodes, entries) = (Vec::new(), Vec::new());
        Self { id, blocks, data, nodes_at: HEADER_BYTES + data_len, nodes, entries }
    }

    /// Adds guest block `number`.
    fn push(&mut self, number: u64, data: &Block) -> Place {
        let place = match &mut self.data {
            Data::Blocks(blocks) => {
                let offset = HEADER_BYTES + blocks.len() * BLOCK_BYTES;
                blocks.push(data.clone());
                Place::new(self.id, offset, data.sum())
            }
            Data::Packed(packed) => {
                let spot = packed.spots.pop_front().expect("all blocks were packed (I2)");
                if let Some((count, len)) = spot.frame {
                    self.entries.push(Entry::Frame { first: number, count, len });
                }
                if spot.place.frame().is_some() {
                    return spot.place;
                }
                spot.place
            }
        };
        match self.entries.last_mut() {
            Some(Entry::Data { first, count }) if *first + *count == number => *count += 1,
            _ => self.entries.push(Entry::Data { first: number, count: 1 }),
        }
        place
    }

    fn push_node(&mut self, tree: &Tree, directory: &Directory<Place>) -> Place {
        let place = self.push_framed(&directory.encode());
        tree.keep(place, Arc::new(directory.clone()));
        place
    }

    fn push_record(&mut self, tree: &Tree, record: &Arc<Record>) -> Place {
        let place = self.push_framed(&record.encode());
        tree.keep_record(place, Arc::clone(record));
        place
    }

    fn push_framed(&mut self, payload: &[u8]) -> Place {
        let place = Place::new(self.id, self.nodes_at + self.nodes.len(), crc32c(payload));
        encode_node(&mut self.nodes, place, payload);
        self.nodes.resize(self.nodes.len().next_multiple_of(Place::UNIT_BYTES), 0);
        place
    }

    /// What is at `at` and follows it, if that is in this extent: nobody else has it yet.
    fn framed(&self, at: Place) -> Option<&[u8]> {
        if at.extent() != self.id {
            return None;
        }
        self.nodes.get(usize::try_from(at.offset()).ok()?.checked_sub(self.nodes_at)?..)
    }

    fn finish(self, signature: Signature, nonce: Id, state: State) -> Built {
        let (blocks, frames_len) = match &self.data {
            Data::Blocks(blocks) => (blocks.len(), 0),
            Data::Packed(packed) => (packed.blocks, packed.frames_len),
        };
        let data_len = blocks * BLOCK_BYTES + frames_len;
        assert_eq!(HEADER_BYTES + data_len, self.nodes_at, "as announced");
        let mut entries = self.entries;
        if frames_len > 0 {
            entries.push(Entry::End { entries: entries.len() as u64 + 1 });
        }
        let table: Vec<u8> = entries.iter().flat_map(|entry| entry.encode()).collect();
        let header = Header {
            kind: Kind::Extent,
            id: self.id,
            store: signature.store,
            volume: signature.volume,
            nonce,
            state,
            by: self.id.writer,
            blocks,
            frames_len,
            nodes_len: self.nodes.len(),
            entries: entries.len(),
            table_sum: crc32c(&table),
        };
        let mut content = Parts::default();
        let mut push = |buf: Buf| {
            let len = buf.len();
            content.push(Part::new(Arc::new(buf), 0..len));
        };
        push(Buf::from_slice(&header.encode()));
        match self.data {
            Data::Packed(packed) => push(packed.area),
            Data::Blocks(blocks) => blocks.iter().for_each(|block| content.push(block.part())),
        }
        let end = [&self.nodes[..], &table].concat();
        content.push(Part::new(Arc::new(Buf::from_slice(&end)), 0..end.len()));
        assert_eq!(content.len(), header.len(), "as its header says");
        let content = Arc::new(content);
        let (blocks, nodes_at) = (self.blocks, header.nodes_at());
        Built { state, content, blocks, data_len, nodes: self.nodes, nodes_at }
    }
}

#[cfg(test)]
mod tests;
