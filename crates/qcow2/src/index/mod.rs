//! The chain index: one map for the whole chain.
//!
//! The map of the frozen layers is a persistent radix tree in their sidecars ([`sidecar`]). A slice
//! in the cache ([`cache`]) is the merge of that tree's leaf with what the layers above it say, so
//! that one look-up answers at any depth. Where there is no sidecar, the slice is resolved by one
//! walk down the chain ([`load`]), kept, and the sidecars are written in the background ([`build`]).
//!
//! Invariants
//! - I1 A slice says for each sector the uppermost layer that owns it: what a walk of the chain,
//!   layer by layer, would find.
//! - I2 A layer hides everything beneath beyond its own end.
//! - I3 What the tree has no leaf for is owned by a raw base, as far as no layer that the tree
//!   speaks for is shorter; else by nobody.
//! - I4 Owners of slices in the cache stay right for the chain's life: frozen layers do not change.

pub(crate) mod build;
pub(crate) mod cache;
pub(crate) mod load;
pub(crate) mod sidecar;
pub(crate) mod slice;

use crate::index::cache::SliceCache;
use crate::layer::Layer;
use mica_block::Store;
use mica_map::{Directory, NodeRef, Root};
use quick_cache::sync::Cache;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

/// Share of the budget that directories of the tree may take: one part in this many.
const DIRECTORY_SHARE: u64 = 8;
/// Bytes of a directory in memory, with what the cache needs for it.
const DIRECTORY_MEMORY_BYTES: u64 = 384;

/// The index of one chain.
pub(crate) struct Index {
    pub(crate) cache: SliceCache,
    directories: Cache<NodeRef, Arc<Directory>>,
    tree: RwLock<Arc<Tree>>,
    /// The sidecars that the tree's nodes lie in, by layer number.
    sidecars: Mutex<HashMap<u16, Arc<dyn Store>>>,
    /// Sidecars that had a bad node: their seals prove nothing until they are written again.
    distrusted: Mutex<HashSet<u16>>,
    pub(crate) counters: Counters,
    /// The slice that was loaded last, to see that a guest reads on.
    last_loaded: AtomicU64,
}

/// What the sidecars say: the map of the lowest layers of the chain.
#[derive(Clone, Default)]
pub(crate) struct Tree {
    /// The tree's root at each layer that it speaks for, from the base.
    pub(crate) roots: Vec<Root>,
    /// The name of the uppermost sidecar; zero if there is none.
    pub(crate) id: u64,
}

impl Tree {
    /// How many layers, from the base, the tree speaks for.
    pub(crate) fn covered(&self) -> usize {
        self.roots.len()
    }

    pub(crate) fn root(&self) -> Root {
        self.roots.last().copied().unwrap_or_default()
    }
}

/// Counted since the chain was opened.
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
    pub(crate) fn new(budget_bytes: u64) -> Self {
        let directory_bytes = budget_bytes / DIRECTORY_SHARE;
        let directories = usize::try_from(directory_bytes / DIRECTORY_MEMORY_BYTES);
        Self {
            cache: SliceCache::new(budget_bytes - directory_bytes),
            directories: Cache::new(directories.unwrap_or(usize::MAX).max(16)),
            tree: RwLock::default(),
            sidecars: Mutex::default(),
            distrusted: Mutex::default(),
            counters: Counters::default(),
            last_loaded: AtomicU64::new(u64::MAX),
        }
    }

    /// The tree as far as it is known now.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        Arc::clone(&self.tree.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn publish(&self, tree: Tree) {
        *self.tree.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(tree);
    }

    /// Forgets the sidecar of layer `number` and all above it: one of its nodes was bad.
    pub(crate) fn distrust(&self, number: u16) {
        let mut tree = self.tree.write().unwrap_or_else(PoisonError::into_inner);
        let covered = usize::from(number);
        if covered < tree.covered() {
            let roots = tree.roots[..covered].to_vec();
            // Without a name nothing can be built on what is left before the seals were read again.
            *tree = Arc::new(Tree { roots, id: 0 });
        }
        drop(tree);
        self.lock_sidecars().retain(|kept, _| *kept < number);
        self.lock_distrusted().insert(number);
    }

    pub(crate) fn is_distrusted(&self, number: u16) -> bool {
        self.lock_distrusted().contains(&number)
    }

    /// The sidecar of layer `number` was written anew.
    pub(crate) fn trust(&self, number: u16) {
        self.lock_distrusted().remove(&number);
    }

    fn lock_distrusted(&self) -> MutexGuard<'_, HashSet<u16>> {
        self.distrusted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn keep_sidecar(&self, number: u16, store: Arc<dyn Store>) {
        self.lock_sidecars().insert(number, store);
    }

    fn lock_sidecars(&self) -> MutexGuard<'_, HashMap<u16, Arc<dyn Store>>> {
        self.sidecars.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far a raw base shows through `layers`, in bytes; zero if the base is no raw image.
pub(crate) fn raw_base_limit(layers: &[Arc<Layer>]) -> u64 {
    match layers.first() {
        Some(base) if base.tables.is_none() => {
            layers.iter().map(|layer| layer.len).min().unwrap_or(0)
        }
        _ => 0,
    }
}
