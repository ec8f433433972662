//! The chain index: one map for the whole chain.
//!
//! The map of the frozen layers is a persistent radix tree in their sidecars ([`sidecar`]). A slice
//! in the cache ([`cache`]) is the merge of that tree's leaf with what the layers above the tree
//! own, so that one look-up answers at any depth. Without a sidecar the slice is resolved by one
//! walk down the chain ([`load`]) and kept, and the sidecars are written in the background
//! ([`build`]).
//!
//! Invariants
//! - I1 A slice names for each sector the uppermost layer that owns it: the one that a walk of the
//!   chain, layer by layer, would find.
//! - I2 Beyond its own end a layer hides everything beneath.
//! - I3 A part without a leaf in the tree is owned by a raw base, as far as no layer that the tree
//!   covers is shorter; beyond that by nobody.
//! - I4 Owners in cached slices stay right for the chain's life: frozen layers do not change.

pub(crate) mod build;
pub(crate) mod cache;
pub(crate) mod load;
pub(crate) mod node_ref;
mod scan;
pub(crate) mod seal;
pub(crate) mod sidecar;
pub(crate) mod slice;
mod stage;
pub(crate) mod tables;

use crate::index::cache::{Frozen, MapCache, SliceCache};
use crate::index::sidecar::SidecarId;
use crate::layer::Layer;
use crate::map::ahead::Sequence;
use mica_block::Store;
use node_ref::NodeRef;
use parking_lot::{Mutex, MutexGuard, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The map's state at one layer.
pub(crate) type Root = mica_map::Root<NodeRef>;
/// A directory of the map.
type Directory = mica_map::Directory<NodeRef>;

/// The index of one chain.
pub(crate) struct Index {
    pub(crate) cache: SliceCache,
    tree: RwLock<Arc<Tree>>,
    /// Sidecars that could not be read, and how often; see [`Index::is_distrusted`].
    distrusted: Mutex<HashMap<u16, u32>>,
    pub(crate) counters: Counters,
    /// Beside the counters, which each request changes as well.
    pub(crate) sequence: Sequence,
    /// The slice that was loaded last, to detect a guest that reads sequentially.
    last_loaded: AtomicU64,
}

/// The contents of the sidecars: the map of the lowest layers of the chain.
#[derive(Clone, Default)]
pub(crate) struct Tree {
    /// The tree's root at each layer that it covers, from the base.
    roots: Vec<Root>,
    /// The sidecar of each of those layers; a raw base has none.
    sidecars: Vec<Option<Sidecar>>,
    /// The name of the uppermost sidecar, if there is one.
    id: Option<SidecarId>,
    /// Different from that of every tree whose sidecars may have been others; see
    /// [`Index::next_generation`].
    generation: u64,
}

/// The contents of a sidecar.
#[derive(Clone)]
enum Sidecar {
    /// In its file.
    Kept(Arc<dyn Store>),
    /// In memory: the file is about to be written.
    Staged(Arc<Vec<u8>>),
}

impl Tree {
    /// How many layers, from the base, the tree covers.
    pub(crate) fn covered(&self) -> usize {
        self.roots.len()
    }

    pub(crate) fn root(&self) -> Root {
        self.roots.last().copied().unwrap_or_default()
    }

    fn push(&mut self, root: Root, id: SidecarId, sidecar: Option<Sidecar>) {
        self.roots.push(root);
        self.sidecars.push(sidecar);
        self.id = Some(id);
    }

    /// The sidecar of layer `number`, which was staged, is in its file now.
    fn keep(&mut self, number: usize, store: Arc<dyn Store>) {
        self.sidecars[number] = Some(Sidecar::Kept(store));
    }

    /// Restricts the tree to the lowest `layers` layers from now on.
    fn cut(&mut self, layers: usize, generation: u64) {
        if layers < self.covered() {
            self.roots.truncate(layers);
            self.sidecars.truncate(layers);
            // Without a name nothing can build on the rest until the seals have been read again.
            self.id = None;
            self.generation = generation;
        }
    }

    fn sidecar(&self, number: u16) -> Option<&Sidecar> {
        self.sidecars.get(usize::from(number))?.as_ref()
    }
}

/// Counters since the chain was opened.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) index_loads: AtomicU64,
    pub(crate) walks: AtomicU64,
    pub(crate) layers_walked: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Index {
    /// That of a chain that was opened with `frozen` layers, in the memory of `cache`.
    pub(crate) fn new(cache: MapCache, frozen: Arc<Frozen>) -> Self {
        Self {
            cache: SliceCache::new(cache, frozen),
            tree: RwLock::default(),
            distrusted: Mutex::default(),
            counters: Counters::default(),
            sequence: Sequence::default(),
            last_loaded: AtomicU64::new(u64::MAX),
        }
    }

    /// The tree, as far as it is known now.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        Arc::clone(&self.tree.read())
    }

    /// A number that no tree had before.
    fn next_generation(&self) -> u64 {
        self.cache.shared().next_number()
    }

    /// Makes `tree` the one that slices are loaded from, up to the first sidecar that was found
    /// damaged since the tree was made.
    pub(crate) fn publish(&self, mut tree: Tree) {
        let mut published = self.tree.write();
        let damaged = self.lock_distrusted();
        let damaged = damaged.iter().filter(|(_, failures)| **failures >= FAILURES_MAX);
        if let Some((lowest, _)) = damaged.min() {
            tree.cut(usize::from(*lowest), self.next_generation());
        }
        *published = Arc::new(tree);
    }

    /// Forgets the sidecar of layer `number` and all above it.
    pub(crate) fn forget(&self, number: u16, reason: BadNodeReason) {
        let mut published = self.tree.write();
        let mut distrusted = self.lock_distrusted();
        let failures = distrusted.entry(number).or_default();
        *failures = match reason {
            BadNodeReason::Damaged => FAILURES_MAX,
            BadNodeReason::Unreadable => failures.saturating_add(1),
        };
        drop(distrusted);
        let mut tree = (**published).clone();
        tree.cut(usize::from(number), self.next_generation());
        *published = Arc::new(tree);
    }

    /// Restricts the tree to the lowest `layers` layers from now on.
    pub(crate) fn cut(&self, layers: usize) {
        let mut published = self.tree.write();
        let mut tree = (**published).clone();
        tree.cut(layers, self.next_generation());
        *published = Arc::new(tree);
    }

    /// Whether the sidecar of layer `number` has to be rewritten, whatever its seal: it had a
    /// damaged node, or repeatedly could not be read.
    pub(crate) fn is_distrusted(&self, number: u16) -> bool {
        self.lock_distrusted().get(&number).is_some_and(|failures| *failures >= FAILURES_MAX)
    }

    /// The sidecar of layer `number` was rewritten.
    pub(crate) fn trust(&self, number: u16) {
        self.lock_distrusted().remove(&number);
    }

    /// Layers have other positions from now on, by which sidecars are known.
    pub(crate) fn forget_distrust(&self) {
        self.lock_distrusted().clear();
    }

    /// Taken after the tree's lock if both are held.
    fn lock_distrusted(&self) -> MutexGuard<'_, HashMap<u16, u32>> {
        self.distrusted.lock()
    }
}

/// Why a node of a sidecar is unusable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BadNodeReason {
    /// Its bytes are wrong.
    Damaged,
    /// It could not be read: the file was replaced, or the device failed.
    Unreadable,
}

/// How often a sidecar may be unreadable before it is rewritten.
const FAILURES_MAX: u32 = 3;

/// How far a raw base shows through `layers`, in bytes; zero if the base is not a raw image.
pub(crate) fn raw_base_limit(layers: &[Arc<Layer>]) -> u64 {
    match layers.first() {
        Some(base) if base.tables.is_none() => {
            layers.iter().map(|layer| layer.len()).min().unwrap_or(0)
        }
        _ => 0,
    }
}
