//! Reads a volume as it is at one moment.
//!
//! Invariants
//! - I1 A view is taken under one lock: what was done since, and the state beneath, belong
//!   together. Both stay as they are while it is read, whatever is written meanwhile.
//! - I2 Blocks that are beside each other in one extent are read together.

use crate::known::Now;
use crate::place::{BLOCK_BYTES, Place};
use crate::plans::{PlanOf, Plans};
use crate::recent::{Batch, Block, Known};
use crate::state::Root;
use crate::tree::{Cursor, Tree, follows};
use mica_block::{Error, ErrorKind, Extent, ExtentKind, Result};
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;
use std::sync::Arc;

const SIZE: u64 = BLOCK_BYTES as u64;
/// Blocks with data that one survey goes through; then it ends.
const SURVEY_BLOCKS_MAX: usize = 4096;

/// The blocks that a range of a disk touches.
pub(crate) fn blocks_of(range: GuestRange) -> Range<u64> {
    range.start().bytes() / SIZE..range.end().bytes().div_ceil(SIZE)
}

/// Some blocks of a volume, as they are at one moment (I1).
pub(crate) struct View {
    first: u64,
    sources: Vec<Source>,
    map: Root,
    generation: u64,
}

/// Where the bytes of a block are.
#[derive(Clone, Debug)]
enum Source {
    /// The map was not asked yet.
    Unknown,
    Nothing,
    Memory(Block),
    Store(Place),
}

impl View {
    pub(crate) fn new(now: &Now, blocks: Range<u64>) -> Self {
        let first = blocks.start;
        let has_recent = now.has_recent(&blocks);
        let source = |block| match has_recent.then(|| now.recent(block)).flatten() {
            None => Source::Unknown,
            Some(Known::Nothing) => Source::Nothing,
            Some(Known::Data(data)) => Source::Memory(data),
        };
        let sources = blocks.map(source).collect();
        Self { first, sources, map: now.state.map, generation: now.generation }
    }

    /// Which of the volume's states it is of.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    fn plan(&self) -> PlanOf {
        PlanOf { generation: self.generation, first: self.first }
    }

    /// Has `plans` remember what the map said of the blocks, all of which are known.
    pub(crate) fn keep_in(&self, plans: &Plans) {
        let found = self.sources.iter().map(|source| match source {
            Source::Unknown | Source::Memory(_) => None,
            Source::Nothing => Some(None),
            Source::Store(place) => Some(Some(*place)),
        });
        plans.keep(self.plan(), found);
    }

    /// Learns what the map says of each block from the first on, if that is known.
    fn learn(&mut self, found: &[Option<Option<Place>>]) {
        for (source, found) in self.sources.iter_mut().zip(found) {
            if let (Source::Unknown, Some(found)) = (&*source, found) {
                *source = found.map_or(Source::Nothing, Source::Store);
            }
        }
    }

    /// Asks the map as far as that needs no I/O; what was found for a plan is not looked for again.
    /// Returns whether everything is known.
    pub(crate) fn resolve_cached(&mut self, tree: &Tree, plans: &Plans) -> bool {
        plans.recall(self.plan(), |found| self.learn(found));
        if let [source @ Source::Unknown] = &mut *self.sources {
            // The most frequent case, without the directories that others would share.
            let Some(found) = tree.look_up_cached(self.map, self.first) else { return false };
            *source = found.map_or(Source::Nothing, Source::Store);
            return true;
        }
        let mut cursor = Cursor::new(tree, self.map);
        for (block, source) in (self.first..).zip(&mut self.sources) {
            if matches!(source, Source::Unknown) {
                match cursor.look_up_cached(block) {
                    Some(found) => *source = found.map_or(Source::Nothing, Source::Store),
                    None => return false,
                }
            }
        }
        true
    }

    /// Asks the map.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) async fn resolve(&mut self, tree: &Tree) -> Result<()> {
        let mut cursor = Cursor::new(tree, self.map);
        for (block, source) in (self.first..).zip(&mut self.sources) {
            if matches!(source, Source::Unknown) {
                let found = cursor.look_up(block).await?;
                *source = found.map_or(Source::Nothing, Source::Store);
            }
        }
        Ok(())
    }

    /// The blocks that are in the store.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Range<u64>> {
        let is_stored = |source: &Source| matches!(source, Source::Store(_));
        let mut at = self.first;
        self.sources.chunk_by(move |a, b| is_stored(a) == is_stored(b)).filter_map(move |run| {
            let blocks = at..at + run.len() as u64;
            at = blocks.end;
            is_stored(&run[0]).then_some(blocks)
        })
    }

    /// Appends what the blocks of `range` are, which are all known.
    pub(crate) fn extents(&self, range: GuestRange, extents: &mut Vec<Extent>) {
        for (block, source) in (self.first..).zip(&self.sources) {
            let kind = match source {
                Source::Nothing => ExtentKind::Hole,
                _ => ExtentKind::Encoded,
            };
            push(extents, block..block + 1, kind, range);
        }
    }

    /// Fills `buf` with the bytes of `range`, whose blocks are all known; gives it back whatever
    /// happens.
    pub(crate) async fn read(&self, tree: &Tree, range: GuestRange, buf: Buf) -> (Result<()>, Buf) {
        let (first, sources) = (self.first, &self.sources);
        let end = first + sources.len() as u64;
        let is_whole = range.start().bytes() == first * SIZE && range.end().bytes() == end * SIZE;
        if is_whole {
            return read_whole(tree, sources, buf).await;
        }
        let whole = Buf::new(sources.len() * BLOCK_BYTES);
        let (result, whole) = read_whole(tree, sources, whole).await;
        let skipped = usize::try_from(range.start().bytes() - first * SIZE).expect("in a block");
        let mut buf = buf;
        let len = buf.len();
        buf.put(0, &whole[skipped..skipped + len]);
        (result, buf)
    }
}

/// Fills `buf` with whole blocks; gives it back whatever happens.
async fn read_whole(tree: &Tree, sources: &[Source], buf: Buf) -> (Result<()>, Buf) {
    let first = run_at(tree, sources);
    if first.len() == sources.len() {
        return read_run(tree, first, buf).await;
    }
    let mut rest = buf;
    let mut parts = Vec::new();
    let mut at = 0;
    while at < sources.len() {
        let run = run_at(tree, &sources[at..]);
        let part = rest.split_to(run.len() * BLOCK_BYTES);
        at += run.len();
        parts.push(read_run(tree, run, part));
    }
    let mut outcome = Ok(());
    let mut whole: Option<Buf> = None;
    for (result, part) in join_all(parts).await {
        outcome = outcome.and(result);
        match &mut whole {
            None => whole = Some(part),
            Some(front) => front.join(part),
        }
    }
    (outcome, whole.unwrap_or(rest))
}

/// The first of `sources`, with those that are read together with it.
fn run_at<'a>(tree: &Tree, sources: &'a [Source]) -> &'a [Source] {
    let goes_on = |pair: &[Source]| match pair {
        [Source::Store(place), Source::Store(next)] => follows(*place, *next),
        [Source::Nothing, Source::Nothing] => true,
        _ => false,
    };
    let count = 1 + sources.windows(2).take_while(|pair| goes_on(pair)).count();
    &sources[..count.min(tree.run_blocks_max()).min(sources.len())]
}

async fn read_run(tree: &Tree, run: &[Source], mut part: Buf) -> (Result<()>, Buf) {
    match run.first() {
        None => (Ok(()), part),
        Some(Source::Unknown) => unreachable!("the map was asked"),
        Some(Source::Nothing) => {
            part.fill(0);
            (Ok(()), part)
        }
        Some(Source::Memory(data)) => {
            part.put(0, &data[..]);
            (Ok(()), part)
        }
        Some(Source::Store(first)) => {
            let places = run.iter().filter_map(|source| match source {
                Source::Store(place) => Some(*place),
                _ => None,
            });
            tree.fill_blocks(*first, places, part).await
        }
    }
}

/// Where `block` is in a state's map, and its bytes; zeros if it has none.
///
/// # Errors
/// If it cannot be read.
pub(crate) async fn stored_block(
    tree: &Tree,
    map: Root,
    block: u64,
) -> Result<(Option<Place>, Block)> {
    let Some(place) = tree.look_up(map, block).await? else {
        return Ok((None, Block::new(&[0; BLOCK_BYTES])));
    };
    let buf = tree.read_blocks(place, [place], Buf::new(BLOCK_BYTES)).await?;
    let block = Block::all_of(buf, 0).next();
    Ok((Some(place), block.expect("a block was read")))
}

/// What the blocks of `range` are, from its start on: those of a state's map, with `recent` over
/// it, oldest first. Of as much as goes through a bounded number of blocks with data.
///
/// # Errors
/// If the map cannot be read.
pub(crate) async fn survey(
    tree: &Tree,
    map: Root,
    recent: &[Arc<Batch>],
    range: GuestRange,
) -> Result<Vec<Extent>> {
    let mut blocks = blocks_of(range);
    let mut extents = Vec::new();
    let Some(last) = blocks.end.checked_sub(1).filter(|last| *last >= blocks.start) else {
        return Ok(extents);
    };
    let mut data = Vec::new();
    let mut walk = Walk::new(map, blocks.start..=last);
    loop {
        match walk.next_step() {
            WalkStep::Read(node) => walk.feed(Directory::clone(&*tree.node(node).await?)),
            WalkStep::Leaf(block, _) => data.push(block),
            WalkStep::Done => break,
        }
        if data.len() == SURVEY_BLOCKS_MAX {
            blocks.end = data.last().map_or(blocks.end, |last| last + 1);
            break;
        }
    }
    let mut newer = Batch::default();
    recent.iter().for_each(|batch| newer.add_part(batch, &blocks));
    data.retain(|block| newer.get(*block).is_none());
    data.extend(newer.pieces().filter(|(.., data)| data.is_some()).map(|(block, ..)| block));
    data.sort_unstable();
    let mut at = blocks.start;
    for block in data {
        push(&mut extents, at..block, ExtentKind::Hole, range);
        push(&mut extents, block..block + 1, ExtentKind::Encoded, range);
        at = block + 1;
    }
    push(&mut extents, at..blocks.end, ExtentKind::Hole, range);
    Ok(extents)
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

/// Checks that a range is on a disk of `len` bytes.
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
