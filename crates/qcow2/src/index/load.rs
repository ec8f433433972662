//! Loading slices into the cache: the tree's leaf, with the layers above the tree laid over it.

use crate::index::cache::{HeldSlice, Loaded};
use crate::index::node_ref::NodeRef;
use crate::index::slice::{
    Entry, EntryKind, Run, Runs, SLICE_BITS, SLICE_BYTES, SLICE_SECTORS, Slice,
};
use crate::index::{BadNodeReason, Directory, Sidecar, Tree, count, raw_base_limit};
use crate::map::Map;
use mica_block::{Result, Store, read_exact};
use mica_map::{NODE_HEADER_BYTES, Step, node_len, open_node};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, HostOffset, SECTOR_BYTES};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Slices that are loaded together when the chain has to be walked, or a guest reads in sequence.
pub(crate) const WINDOW_SLICES: u64 = 8;
/// Layers whose tables are read concurrently in a walk.
const WALK_BATCH: usize = 64;
/// Shortest run without an owner for which consulting every layer pays off.
const SKIP_BYTES_MIN: u64 = 1 << 30;
/// Layers above the tree up to which a miss loads one slice; with more, it loads a window.
const FEW_LAYERS: usize = 8;
/// Read for a node whose length is not known yet: most slices and all directories fit.
const NODE_READ_BYTES: usize = 1024;
/// Largest slice in a sidecar: one run for each sector.
const NODE_BYTES_MAX: usize = NODE_HEADER_BYTES + 10 * SLICE_SECTORS as usize;

/// Which layers of a chain are asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    All,
    /// All but the active one: as if there were none.
    Frozen,
}

impl Map {
    /// The slice `number`, from the cache or loaded into it.
    pub(crate) async fn slice(&self, number: u64) -> Result<Arc<HeldSlice>> {
        let window = number / WINDOW_SLICES;
        loop {
            if let Some(slice) = self.index.cache.get(number) {
                return Ok(slice);
            }
            let Some(claim) = self.index.cache.claim(window).await else { continue };
            // Another task may have loaded it between the look and the claim.
            if let Some(slice) = self.index.cache.get(number) {
                return Ok(slice);
            }
            let slice = self.load(number).await;
            drop(claim);
            return slice;
        }
    }

    async fn load(&self, number: u64) -> Result<Arc<HeldSlice>> {
        let mut tree = self.index.tree();
        let above = self.layers().all().len() - tree.covered();
        let last = self.index.last_loaded.load(Ordering::Relaxed);
        let reads_on = number == last.wrapping_add(1);
        let slices = self.len().div_ceil(SLICE_BYTES);
        let (first, end) = if above > FEW_LAYERS {
            let first = number / WINDOW_SLICES * WINDOW_SLICES;
            (first, slices.min(first + WINDOW_SLICES))
        } else if reads_on {
            (number, slices.min((number / WINDOW_SLICES + 1) * WINDOW_SLICES))
        } else {
            (number, number + 1)
        };
        self.index.last_loaded.store(end - 1, Ordering::Relaxed);
        let (versions, loaded) = loop {
            let emptied = self.emptied();
            let versions: Vec<_> =
                (first..end).map(|slice| self.index.cache.version(slice)).collect();
            let loaded = self.load_window(&tree, first..end).await;
            // What was asked may be layers that had left by then, beneath one that became empty.
            if emptied == self.emptied() {
                break (versions, loaded?);
            }
            tree = self.index.tree();
        };
        let mut wanted = None;
        for ((slice_number, version), loaded) in (first..end).zip(versions).zip(loaded) {
            let slice = self.index.cache.insert_loaded(slice_number, loaded, version);
            if slice_number == number {
                wanted = Some(slice);
            }
        }
        Ok(wanted.expect("the window holds the slice"))
    }

    /// Slices `numbers` from the layers, or from what other chains know of them.
    async fn load_window(&self, tree: &Tree, numbers: Range<u64>) -> Result<Vec<Loaded>> {
        if let Some(loaded) = self.load_over_frozen(tree, numbers.clone()).await? {
            return Ok(loaded);
        }
        let runs = self.resolve(Part::All, tree, numbers.start, numbers.end).await?;
        Ok(slices_of(&runs, numbers).map(|(_, slice)| Loaded::Own(slice)).collect())
    }

    /// Slices `numbers` from those of the frozen layers, which other chains have, too, and from
    /// what the active layer owns. `None` if that does not work here.
    async fn load_over_frozen(
        &self,
        tree: &Tree,
        numbers: Range<u64>,
    ) -> Result<Option<Vec<Loaded>>> {
        let (cache, layers) = (&self.index.cache, self.layers());
        if !cache.shares_frozen() {
            return Ok(None);
        }
        let cached: Option<Vec<_>> = numbers.clone().map(|at| cache.get_frozen(at)).collect();
        let frozen = match cached {
            Some(frozen) => frozen,
            None => {
                let found = self.resolve(Part::Frozen, tree, numbers.start, numbers.end).await;
                let Ok(runs) = found else { return Ok(None) };
                // What was found is that of the layers taken above, or of others.
                if !Arc::ptr_eq(&layers, &self.layers()) {
                    return Ok(None);
                }
                let slices = slices_of(&runs, numbers.clone());
                slices.map(|(number, slice)| cache.insert_frozen(number, slice)).collect()
            }
        };
        let start = GuestOffset::new(numbers.start << SLICE_BITS);
        let stop = GuestOffset::new((numbers.end << SLICE_BITS).min(self.len()));
        let window = GuestRange::between(start, stop).expect("slices of the disk");
        #[cfg(test)]
        crate::testing::pass("layers are asked");
        let active = layers.active();
        let mut own = active.own_runs(window).await?;
        count(&self.index.counters.layers_walked, 1);
        let active_len = active.len().saturating_sub(start.bytes());
        let limit = sectors_of(window.len().min(active_len));
        own.truncate(limit);
        let mut below = Runs::default();
        for (slice, position) in frozen.iter().zip(0_u32..) {
            slice.append_runs(position * SLICE_SECTORS, &mut below);
        }
        below.truncate(limit);
        let runs = Runs::overlay(&below, &own);
        let slices = slices_of(&runs, numbers).zip(frozen);
        let loaded = slices.map(|((_, slice), frozen)| match slice == **frozen {
            true => Loaded::OfFrozen(frozen),
            false => Loaded::Own(slice),
        });
        Ok(Some(loaded.collect()))
    }

    /// How many bytes from `at` on nobody owns, if that is clear from the L1 tables alone and worth
    /// finding out; at most up to `end`. So an empty disk of an exabyte is planned in a moment.
    pub(crate) async fn skip_unowned(
        &self,
        at: GuestOffset,
        end: GuestOffset,
    ) -> Result<Option<u64>> {
        if end.bytes() - at.bytes() < SKIP_BYTES_MIN {
            return Ok(None);
        }
        // A layer that owns nothing for long is not searched to its end where another one is near.
        let near = GuestOffset::new(at.bytes() + SKIP_BYTES_MIN);
        for layer in self.layers().all() {
            if layer.unowned_until(at, near).await? < near {
                return Ok(None);
            }
        }
        let mut unowned_end = end;
        for layer in self.layers().all() {
            unowned_end = layer.unowned_until(at, unowned_end).await?;
            // Only whole slices, so that a cached slice always describes a whole one.
            let len = (unowned_end.bytes() >> SLICE_BITS << SLICE_BITS).saturating_sub(at.bytes());
            if unowned_end != end && len < SKIP_BYTES_MIN {
                return Ok(None);
            }
        }
        Ok(Some(unowned_end.bytes() - at.bytes()))
    }

    /// Which of these layers own slices `first..end`: from the top down, each layer gets what no
    /// layer above it has, and at the bottom the tree gets the rest.
    async fn resolve(&self, part: Part, tree: &Tree, first: u64, end: u64) -> Result<Runs> {
        let start = GuestOffset::new(first << SLICE_BITS);
        let len = match part {
            Part::All => self.len(),
            Part::Frozen => u64::MAX,
        };
        let stop = GuestOffset::new((end << SLICE_BITS).min(len));
        let window = GuestRange::between(start, stop).expect("slices of the disk");
        let sectors = sectors_of(window.len());
        // I2: beyond the end of a layer that was passed nobody owns anything.
        let mut limit = sectors;
        let mut runs = Runs::default();
        let layers = self.layers();
        let all = match part {
            Part::All => layers.all(),
            Part::Frozen => layers.frozen(),
        };
        #[cfg(test)]
        crate::testing::pass("layers are asked");
        let upper = all.get(tree.covered()..).unwrap_or_default();
        if upper.len() > FEW_LAYERS {
            count(&self.index.counters.walks, 1);
        }
        for batch in upper.rchunks(WALK_BATCH) {
            let reads = batch.iter().rev().map(|layer| layer.own_runs(window));
            let own_runs = mica_rt::join_all(reads).await;
            count(&self.index.counters.layers_walked, batch.len() as u64);
            for (layer, own) in batch.iter().rev().zip(own_runs) {
                let mut own = match own {
                    // A layer under which nothing shows through need not be readable.
                    Err(_) if runs.cover(limit) => return Ok(runs),
                    own => own?,
                };
                limit = limit.min(sectors_of(layer.len().saturating_sub(start.bytes())));
                own.truncate(limit);
                if !own.is_empty() {
                    runs = Runs::overlay(&own, &runs);
                }
            }
            if runs.cover(limit) {
                return Ok(runs);
            }
        }
        let mut lowest = self.tree_runs(part, tree, first, end).await?;
        lowest.truncate(limit);
        Ok(Runs::overlay(&lowest, &runs))
    }

    /// What the tree has for slices `first..end`.
    async fn tree_runs(&self, part: Part, tree: &Tree, first: u64, end: u64) -> Result<Runs> {
        let mut runs = Runs::default();
        if tree.covered() == 0 {
            return Ok(runs);
        }
        // Concurrently: on a cold device a window takes as long as its slowest slice.
        let leaves = (first..end).map(|number| self.tree_leaf(tree, number));
        let leaves = mica_rt::join_all(leaves).await;
        for ((number, leaf), position) in (first..end).zip(leaves).zip(0_u32..) {
            let sector = position * SLICE_SECTORS;
            match leaf {
                Ok(Some(slice)) => slice.append_runs(sector, &mut runs),
                Ok(None) => {
                    self.base_slice(tree, number).append_runs(sector, &mut runs);
                }
                Err(bad) => {
                    // A sidecar that is wrong is forgotten: the chain itself has the truth.
                    self.forget_sidecar(bad);
                    let tree = self.index.tree();
                    return Box::pin(self.resolve(part, &tree, first, end)).await;
                }
            }
        }
        count(&self.index.counters.index_loads, end - first);
        Ok(runs)
    }

    async fn tree_leaf(
        &self,
        tree: &Tree,
        number: u64,
    ) -> std::result::Result<Option<Slice>, BadNode> {
        let mut step = tree.root().look_up(number);
        loop {
            match step {
                Step::Absent => return Ok(None),
                Step::Read(at, look_up) => {
                    let directory = self.directory(tree, at).await?;
                    step = look_up.feed(&directory);
                }
                Step::Leaf(at) => return self.leaf(tree, at).await.map(Some),
            }
        }
    }

    /// The slice of `tree` in the node at `at`.
    pub(crate) async fn leaf(
        &self,
        tree: &Tree,
        at: NodeRef,
    ) -> std::result::Result<Slice, BadNode> {
        let node = read_node(tree, at).await?;
        let payload = open_node(&node, at).map_err(|_| BadNode::damaged(at))?;
        // A sidecar covers its layer and those below: the owner of a lower layer must not decide
        // what is read from a higher one.
        let positions = usize::from(at.file()) + 1;
        let slice = Slice::decode(payload, positions).ok_or(BadNode::damaged(at))?;
        let layers = self.layers();
        match layers.are_positions_numbers() {
            true => Ok(slice),
            false => slice
                .renamed(|position| layers.number_at(position.index()))
                .ok_or(BadNode::damaged(at)),
        }
    }

    /// The directory of `tree` in the node at `at`.
    pub(crate) async fn directory(
        &self,
        tree: &Tree,
        at: NodeRef,
    ) -> std::result::Result<Arc<Directory>, BadNode> {
        if let Some(directory) = self.index.cache.shared().directories().get(&(tree.generation, at))
        {
            return Ok(directory);
        }
        let node = read_node(tree, at).await?;
        let payload = open_node(&node, at).map_err(|_| BadNode::damaged(at))?;
        let directory = Directory::decode(payload, at).map_err(|_| BadNode::damaged(at))?;
        let directory = Arc::new(directory);
        let key = (tree.generation, at);
        self.index.cache.shared().directories().insert(key, Arc::clone(&directory));
        Ok(directory)
    }

    /// Slice `number` if `tree` has no leaf for it: a raw base shows through, as far as no layer
    /// that the tree covers is shorter, and nothing else is there.
    pub(crate) fn base_slice(&self, tree: &Tree, number: u64) -> Slice {
        let layers = self.layers();
        let limit = raw_base_limit(&layers.all()[..tree.covered()]);
        let start = number << SLICE_BITS;
        let end = limit.clamp(start, start + SLICE_BYTES);
        let mut runs = Runs::default();
        let host = HostOffset::new(start);
        let entry = Entry::at_host(EntryKind::Data, layers.base().number, host);
        runs.push(Run { start: 0, end: sectors_of(end - start), entry });
        runs.slice_at(0)
    }

    pub(crate) fn forget_sidecar(&self, bad: BadNode) {
        let BadNode { file, reason } = bad;
        if let Some(layer) = self.layers().all().get(usize::from(file)) {
            let path = layer.path.display();
            tracing::warn!(layer = %path, ?reason, "the index of this layer is unusable");
        }
        self.index.forget(file, reason);
        self.index_call.set();
    }
}

async fn read_node(tree: &Tree, at: NodeRef) -> std::result::Result<Buf, BadNode> {
    let store = match tree.sidecar(at.file()).ok_or(BadNode::damaged(at))? {
        Sidecar::Kept(store) => store,
        Sidecar::Staged(content) => return staged_node(content, at).ok_or(BadNode::damaged(at)),
    };
    read_node_in(&**store, at).await
}

/// Reads the node at `at` from its sidecar, which is in `store`.
pub(crate) async fn read_node_in(
    store: &dyn Store,
    at: NodeRef,
) -> std::result::Result<Buf, BadNode> {
    let offset = HostOffset::new(at.offset());
    let read = |len| read_exact(store, offset, len);
    let first = read(NODE_READ_BYTES).await.map_err(|_| BadNode::unreadable(at))?;
    match node_len(&first) {
        Some(len) if len <= first.len() => Ok(first),
        Some(len) if len <= NODE_BYTES_MAX => read(len).await.map_err(|_| BadNode::unreadable(at)),
        _ => Err(BadNode::damaged(at)),
    }
}

fn staged_node(content: &[u8], at: NodeRef) -> Option<Buf> {
    let rest = content.get(usize::try_from(at.offset()).ok()?..)?;
    let node = rest.get(..node_len(rest)?)?;
    let mut buf = Buf::new(node.len());
    buf.copy_from_slice(node);
    Some(buf)
}

/// An unusable node, and with it the sidecar that it lies in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BadNode {
    file: u16,
    reason: BadNodeReason,
}

impl BadNode {
    pub(crate) fn damaged(at: NodeRef) -> Self {
        Self { file: at.file(), reason: BadNodeReason::Damaged }
    }

    fn unreadable(at: NodeRef) -> Self {
        Self { file: at.file(), reason: BadNodeReason::Unreadable }
    }
}

pub(crate) fn sectors_of(bytes: u64) -> u32 {
    u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX)
}

/// The slices `numbers`, of which `runs` begin with the first.
fn slices_of(runs: &Runs, numbers: Range<u64>) -> impl Iterator<Item = (u64, Slice)> {
    let slice = |(number, position)| (number, runs.slice_at(position * SLICE_SECTORS));
    numbers.zip(0_u32..).map(slice)
}
