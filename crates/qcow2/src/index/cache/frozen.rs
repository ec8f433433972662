//! The frozen layers that chains have in common: clones of one base.
//!
//! A chain that is opened joins those whose layers beneath the active one are the same files in the
//! same order, if the timestamps of these files prove that none of them changed since the first of
//! those chains was opened: what that found in them holds for all.

use super::{Common, MapCache, Owner, Sharing};
use crate::layer::Layer;
use mica_block::Identity;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, Weak};

/// Layers beneath the active one, as long as a chain has them.
pub(crate) struct Frozen {
    cache: Weak<Common>,
    pub(super) owner: Owner,
    name: blake3::Hash,
    /// When the first chain that has them was about to be opened.
    opening_ns: i128,
}

/// Those that some chain has, by name.
#[derive(Default)]
pub(super) struct KnownFrozen(Mutex<HashMap<blake3::Hash, Weak<Frozen>>>);

impl Drop for Frozen {
    fn drop(&mut self) {
        let Some(common) = self.cache.upgrade() else { return };
        common.frozen.forget(&self.name);
        common.forget(&self.owner);
    }
}

impl MapCache {
    /// What is known of the layers beneath the active one of a chain, `frozen`, which was about to
    /// be opened at `opening_ns`.
    pub(crate) fn frozen(
        &self,
        frozen: &[Arc<Layer>],
        opening_ns: i128,
        sharing: Sharing,
    ) -> Arc<Frozen> {
        let name = name_of(frozen);
        let owner = Owner::new(self);
        let cache = Arc::downgrade(&self.0);
        let new = move || Arc::new(Frozen { cache, owner, name, opening_ns });
        // An image without layers beneath it has nothing in common with others.
        if frozen.is_empty() || sharing == Sharing::Alone {
            return new();
        }
        let mut known = self.0.frozen.lock();
        if let Some(found) = known.get(&name).and_then(Weak::upgrade) {
            let proves =
                |layer: &Arc<Layer>| layer.identity.proves_unchanged_since(found.opening_ns);
            if frozen.iter().all(proves) {
                return found;
            }
            // It may be the last reference, whose end takes the lock.
            drop(known);
            drop(found);
            known = self.0.frozen.lock();
        }
        let new = new();
        known.insert(name, Arc::downgrade(&new));
        new
    }
}

impl KnownFrozen {
    /// Forgets what no chain has any more, unless something else has its place.
    fn forget(&self, name: &blake3::Hash) {
        let mut known = self.lock();
        if known.get(name).is_some_and(|frozen| frozen.strong_count() == 0) {
            known.remove(name);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<blake3::Hash, Weak<Frozen>>> {
        self.0.lock()
    }
}

/// The name of `layers`, which are numbered by their positions: a digest of what they are.
fn name_of(layers: &[Arc<Layer>]) -> blake3::Hash {
    let mut digest = blake3::Hasher::new();
    for layer in layers {
        let Identity { device, inode, len, mtime_ns, ctime_ns } = layer.identity;
        for number in [device, inode, len, layer.len(), u64::from(layer.tables.is_some())] {
            digest.update(&number.to_le_bytes());
        }
        digest.update(&mtime_ns.to_le_bytes());
        digest.update(&ctime_ns.to_le_bytes());
    }
    digest.finalize()
}
