//! Makes extents: edits the map, and puts the blocks, the nodes that changed, and the table into
//! one object.
//!
//! Invariants
//! - I1 An extent has the whole of its segments. Its state is the one before with them applied.
//! - I2 A node follows all that it names, in this extent or in an earlier one.

use crate::format::Id;
use crate::format::extent::{ENTRY_BYTES, Entry, HEADER_BYTES, Header, Kind, LEN_MAX};
use crate::place::{BLOCK_BYTES, ExtentId, Place};
use crate::recent::Block;
use crate::segment::{Segment, WEIGHT_MAX};
use crate::state::State;
use crate::tree::Tree;
use mica_block::Result;
use mica_map::{Directory, Editor, crc32c, encode_node};
use mica_rt::Buf;
use std::sync::Arc;

/// Directories that an editor holds unchanged.
const DIRECTORIES_HELD: usize = 1 << 14;

// The nodes of so many scattered blocks, a path of full directories for each, fit beside them. So
// do the two paths of a cleared range, and a snapshot's record with its own path.
const _: () = assert!(
    HEADER_BYTES + 2 * WEIGHT_MAX * (BLOCK_BYTES + 18 * NODE_ROOM_BYTES + 2 * ENTRY_BYTES)
        < LEN_MAX
);
/// Bytes that a directory takes in an extent, at most.
const NODE_ROOM_BYTES: usize =
    mica_map::directory_bytes_max::<Place>().next_multiple_of(Place::UNIT_BYTES);

/// Who puts extents: all that is the same in each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Signature {
    pub(crate) store: Id,
    pub(crate) volume: Id,
}

/// Makes the extents of a writer, one after the other.
pub(crate) struct Builder {
    signature: Signature,
    editor: Editor<Place>,
    state: State,
}

/// An extent that is to be put.
pub(crate) struct Built {
    /// The state with it.
    pub(crate) state: State,
    /// The object.
    pub(crate) content: Buf,
}

impl Builder {
    /// Goes on from `state`.
    pub(crate) fn new(signature: Signature, state: State) -> Self {
        Self { signature, editor: Editor::new(state.map, DIRECTORIES_HELD), state }
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
        let mut content = Content::new(id);
        for segment in segments {
            self.apply(tree, segment, &mut content).await?;
            assert!(segment.cuts.is_empty(), "cuts come with the next commit");
        }
        self.state.map = self.editor.write(|directory| content.push_node(tree, directory));
        let content = content.finish(self.signature, nonce, self.state);
        Ok(Built { state: self.state, content })
    }

    async fn apply(&mut self, tree: &Tree, segment: &Segment, content: &mut Content) -> Result<()> {
        for (start, count, data) in segment.batch.pieces() {
            match data {
                Some(data) => {
                    let place = content.push(start, data);
                    self.editor.grow_for(start);
                    self.feed(tree, start).await?;
                    self.editor.set(start, Some(place));
                }
                None => {
                    content.entries.push(Entry::Nothing { first: start, count });
                    let last = start + count - 1;
                    self.feed(tree, start).await?;
                    self.feed(tree, last).await?;
                    self.editor.clear(start..=last);
                }
            }
        }
        if segment.len != self.state.len {
            content.entries.push(Entry::Length { bytes: segment.len });
        }
        self.state = State {
            len: segment.len,
            records: segment.records,
            time_ns: segment.time_ns,
            ..self.state
        };
        Ok(())
    }

    async fn feed(&mut self, tree: &Tree, key: u64) -> Result<()> {
        while let Some((slot, at)) = self.editor.missing(key) {
            self.editor.feed(slot, Directory::clone(&*tree.node(at).await?));
        }
        Ok(())
    }
}

/// The parts of an extent while it is made.
struct Content {
    id: ExtentId,
    blocks: Vec<Block>,
    nodes: Vec<u8>,
    entries: Vec<Entry>,
}

impl Content {
    fn new(id: ExtentId) -> Self {
        Self { id, blocks: Vec::new(), nodes: Vec::new(), entries: Vec::new() }
    }

    /// Adds guest block `number`.
    fn push(&mut self, number: u64, data: &Block) -> Place {
        let offset = HEADER_BYTES + self.blocks.len() * BLOCK_BYTES;
        self.blocks.push(Arc::clone(data));
        match self.entries.last_mut() {
            Some(Entry::Data { first, count }) if *first + *count == number => *count += 1,
            _ => self.entries.push(Entry::Data { first: number, count: 1 }),
        }
        Place::new(self.id, offset, crc32c(&data[..]))
    }

    fn push_node(&mut self, tree: &Tree, directory: &Directory<Place>) -> Place {
        let payload = directory.encode();
        let offset = HEADER_BYTES + self.blocks.len() * BLOCK_BYTES + self.nodes.len();
        let place = Place::new(self.id, offset, crc32c(&payload));
        encode_node(&mut self.nodes, place, &payload);
        self.nodes.resize(self.nodes.len().next_multiple_of(Place::UNIT_BYTES), 0);
        tree.keep(place, Arc::new(directory.clone()));
        place
    }

    fn finish(self, signature: Signature, nonce: Id, state: State) -> Buf {
        let table: Vec<u8> = self.entries.iter().flat_map(|entry| entry.encode()).collect();
        let header = Header {
            kind: Kind::Extent,
            id: self.id,
            store: signature.store,
            volume: signature.volume,
            nonce,
            state,
            by: self.id.writer,
            blocks: self.blocks.len(),
            nodes_len: self.nodes.len(),
            entries: self.entries.len(),
            table_sum: crc32c(&table),
        };
        let mut content = Buf::new(header.len());
        content.put(0, &header.encode());
        for (index, block) in self.blocks.iter().enumerate() {
            content.put(HEADER_BYTES + index * BLOCK_BYTES, &block[..]);
        }
        content.put(header.nodes_at(), &self.nodes);
        content.put(header.table_at(), &table);
        content
    }
}
