//! Reads a volume as it is at one moment.
//!
//! Invariants
//! - I1 A view is taken under one lock: what was done since, and the state beneath, belong
//!   together. Both stay as they are while it is read, whatever is written meanwhile.
//! - I2 Blocks that are beside each other in one extent are read together.

use crate::known::Now;
use crate::place::{BLOCK_BYTES, Place};
use crate::recent::{Block, Known};
use crate::state::Root;
use crate::tree::{Tree, follows};
use mica_block::{Error, ErrorKind, Extent, ExtentKind, Result};
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;
use std::sync::Arc;

const SIZE: u64 = BLOCK_BYTES as u64;
/// Blocks of one read that are in one object.
const RUN_BLOCKS_MAX: usize = 64;
/// Blocks with data that one survey goes through; then it ends.
const SURVEY_BLOCKS_MAX: u64 = 4096;

/// The blocks that a range of a disk touches.
pub(crate) fn blocks_of(range: GuestRange) -> Range<u64> {
    range.start().bytes() / SIZE..range.end().bytes().div_ceil(SIZE)
}

/// Some blocks of a volume, as they are at one moment (I1).
pub(crate) struct View {
    first: u64,
    /// What was done to each lately.
    recent: Vec<Option<Known>>,
    map: Root,
}

/// Where the bytes of a block are.
#[derive(Clone, Debug)]
enum Source {
    Nothing,
    Memory(Block),
    Store(Place),
}

impl View {
    pub(crate) fn new(now: &Now, blocks: Range<u64>) -> Self {
        let first = blocks.start;
        Self { first, recent: blocks.map(|block| now.recent(block)).collect(), map: now.state.map }
    }

    async fn sources(self, tree: &Tree) -> Result<Vec<Source>> {
        let mut sources = Vec::with_capacity(self.recent.len());
        for (block, known) in (self.first..).zip(self.recent) {
            sources.push(match known {
                Some(Known::Data(data)) => Source::Memory(data),
                Some(Known::Nothing) => Source::Nothing,
                None => match tree.look_up(self.map, block).await? {
                    Some(place) => Source::Store(place),
                    None => Source::Nothing,
                },
            });
        }
        Ok(sources)
    }

    /// What the blocks of `range` are.
    ///
    /// # Errors
    /// If the map cannot be read.
    pub(crate) async fn extents(
        self,
        tree: &Tree,
        range: GuestRange,
        mut extents: Vec<Extent>,
    ) -> Result<Vec<Extent>> {
        let first = self.first;
        for (block, source) in (first..).zip(self.sources(tree).await?) {
            let kind = match source {
                Source::Nothing => ExtentKind::Hole,
                Source::Memory(_) | Source::Store(_) => ExtentKind::Encoded,
            };
            push(&mut extents, block..block + 1, kind, range);
        }
        Ok(extents)
    }

    /// Fills `buf` with the bytes of `range`.
    ///
    /// # Errors
    /// If something cannot be read.
    pub(crate) async fn read(self, tree: &Tree, range: GuestRange, buf: Buf) -> Result<Buf> {
        let first = self.first;
        let sources = self.sources(tree).await?;
        let end = first + sources.len() as u64;
        let is_whole = range.start().bytes() == first * SIZE && range.end().bytes() == end * SIZE;
        if is_whole {
            return read_whole(tree, &sources, buf).await;
        }
        let whole = read_whole(tree, &sources, Buf::new(sources.len() * BLOCK_BYTES)).await?;
        let skipped = usize::try_from(range.start().bytes() - first * SIZE).expect("in a block");
        let mut buf = buf;
        let len = buf.len();
        buf.put(0, &whole[skipped..skipped + len]);
        Ok(buf)
    }
}

/// Fills `buf` with whole blocks.
async fn read_whole(tree: &Tree, sources: &[Source], buf: Buf) -> Result<Buf> {
    let mut rest = buf;
    let mut parts = Vec::new();
    let mut at = 0;
    while at < sources.len() {
        let run = run_at(&sources[at..]);
        let part = rest.split_to(run.len() * BLOCK_BYTES);
        at += run.len();
        parts.push(read_run(tree, run, part));
    }
    let mut whole: Option<Buf> = None;
    for part in join_all(parts).await {
        let part = part?;
        whole = Some(match whole {
            None => part,
            Some(mut front) => {
                front.join(part);
                front
            }
        });
    }
    Ok(whole.unwrap_or(rest))
}

/// The first of `sources`, with those that are read together with it.
fn run_at(sources: &[Source]) -> &[Source] {
    let goes_on = |pair: &[Source]| match pair {
        [Source::Store(place), Source::Store(next)] => follows(*place, *next),
        [Source::Nothing, Source::Nothing] => true,
        _ => false,
    };
    let count = 1 + sources.windows(2).take_while(|pair| goes_on(pair)).count();
    &sources[..count.min(RUN_BLOCKS_MAX)]
}

async fn read_run(tree: &Tree, run: &[Source], mut part: Buf) -> Result<Buf> {
    match &run[0] {
        Source::Nothing => {
            part.fill(0);
            Ok(part)
        }
        Source::Memory(data) => {
            part.put(0, &data[..]);
            Ok(part)
        }
        Source::Store(_) => {
            let places: Vec<Place> = run
                .iter()
                .filter_map(|source| match source {
                    Source::Store(place) => Some(*place),
                    _ => None,
                })
                .collect();
            tree.read_blocks(&places, part).await
        }
    }
}

/// The bytes of `block` in a state's map; zeros if it has none.
///
/// # Errors
/// If it cannot be read.
pub(crate) async fn stored_block(tree: &Tree, map: Root, block: u64) -> Result<Block> {
    let Some(place) = tree.look_up(map, block).await? else {
        return Ok(Arc::new([0; BLOCK_BYTES]));
    };
    let buf = tree.read_blocks(&[place], Buf::new(BLOCK_BYTES)).await?;
    let bytes: [u8; BLOCK_BYTES] = (*buf).try_into().expect("a block");
    Ok(Arc::new(bytes))
}

/// What the blocks of a state's map are in `range`, from its start on: of as much as goes through a
/// bounded number of blocks with data.
///
/// # Errors
/// If the map cannot be read.
pub(crate) async fn survey_map(tree: &Tree, map: Root, range: GuestRange) -> Result<Vec<Extent>> {
    let blocks = blocks_of(range);
    let mut extents = Vec::new();
    let Some(last) = blocks.end.checked_sub(1).filter(|last| *last >= blocks.start) else {
        return Ok(extents);
    };
    let mut walk = Walk::new(map, blocks.start..=last);
    let (mut at, mut seen) = (blocks.start, 0);
    loop {
        match walk.next_step() {
            WalkStep::Read(node) => {
                let node = tree.node(node).await?;
                walk.feed(Directory::clone(&node));
            }
            WalkStep::Leaf(block, _) => {
                push(&mut extents, at..block, ExtentKind::Hole, range);
                push(&mut extents, block..block + 1, ExtentKind::Encoded, range);
                (at, seen) = (block + 1, seen + 1);
                if seen == SURVEY_BLOCKS_MAX {
                    return Ok(extents);
                }
            }
            WalkStep::Done => {
                push(&mut extents, at..blocks.end, ExtentKind::Hole, range);
                return Ok(extents);
            }
        }
    }
}

/// Appends what of `blocks` is in `range`.
fn push(extents: &mut Vec<Extent>, blocks: Range<u64>, kind: ExtentKind, range: GuestRange) {
    let start = GuestOffset::new(blocks.start.saturating_mul(SIZE));
    let end = GuestOffset::new(blocks.end.saturating_mul(SIZE));
    let part = GuestRange::between(start, end).and_then(|part| part.intersect(range));
    if let Some(part) = part.filter(|part| !part.is_empty()) {
        Extent::push_joined(extents, Extent::unplaced(part, kind));
    }
}

/// That a range is on a disk of `len` bytes.
///
/// # Errors
/// `Invalid` if it is not.
pub(crate) fn check_range(range: GuestRange, len: u64) -> Result<()> {
    if range.end().bytes() <= len {
        return Ok(());
    }
    let what = format!("{range:?} is beyond the end of a disk of {len} bytes");
    Err(Error::new(ErrorKind::Invalid, what))
}
