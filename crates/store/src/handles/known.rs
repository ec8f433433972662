//! The handles of a process by their files: stores that read one file in one way share a handle.
//!
//! Invariants
//! - I1 A store joins a handle only if its file is certain to be the one that the handle knows,
//!   unchanged: what is compared when it is opened again holds for all that share it. Otherwise it
//!   gets a handle of its own, and later stores join that.
//! - I2 No system call is made, and no handle is locked, under the lock of the registry: a file
//!   whose storage hangs keeps no store of another from being opened or closed.

use super::Handles;
use super::handle::{Handle, Mode};
use crate::direct::Alignment;
use crate::located::Located;
use crate::lock::Locking;
use crate::node::Node;
use mica_block::Result;
use mica_rt::{Access, File};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};

/// A handle as the stores that read its file hold it. The last of them closes it.
pub(crate) struct SharedHandle {
    pub(super) handles: Arc<Handles>,
    pub(super) handle: Arc<Handle>,
    key: Key,
}

/// The inode that is opened, and how. A block device is known by its node: locks are of that.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    node: Node,
    is_direct: bool,
    locking: Locking,
}

/// The handles that some store holds.
#[derive(Default)]
pub(super) struct Known(Mutex<HashMap<Key, Weak<SharedHandle>>>);

impl Key {
    fn of(located: &Located, mode: Mode) -> Self {
        Self::of_node(located.node(), mode)
    }

    fn of_node(node: Node, mode: Mode) -> Self {
        Self { node, is_direct: mode.access == Access::Direct, locking: mode.locking }
    }
}

impl SharedHandle {
    pub(crate) fn handles(&self) -> &Arc<Handles> {
        &self.handles
    }

    pub(crate) fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }
}

impl Drop for SharedHandle {
    fn drop(&mut self) {
        self.handles.known.forget(self.key);
        self.handles.forget(&self.handle);
    }
}

impl Handles {
    /// The handle of what was `located`, if a store has it open in this way, with the same locks.
    /// `located` is refreshed then.
    pub(crate) fn join_open(
        &self,
        located: &mut Located,
        mode: Mode,
    ) -> Result<Option<Arc<SharedHandle>>> {
        let Some(shared) = self.known.find(Key::of(located, mode)) else { return Ok(None) };
        let Some((file, identity)) = shared.handle.opened() else { return Ok(None) };
        located.refresh(&file)?;
        Ok((located.identity(located.regular_len()) == identity).then_some(shared))
    }

    /// The handle of what was `located`, whose file may be open or not: one that other stores have,
    /// or a new one.
    pub(crate) fn join(
        self: &Arc<Self>,
        located: &Located,
        mode: Mode,
        align: Alignment,
    ) -> Arc<SharedHandle> {
        let (key, now) = (Key::of(located, mode), located.identity(located.regular_len()));
        let new = Arc::new(SharedHandle {
            handles: Arc::clone(self),
            handle: Arc::new(Handle::new(located, mode, align)),
            key,
        });
        let mut other = None;
        loop {
            let found = self.known.find_or_insert(&new, other.as_ref());
            if Arc::ptr_eq(&found, &new) || found.handle.is_still(&now) {
                return found;
            }
            other = Some(found);
        }
    }

    /// As [`Self::join`], for a `file` that was opened from it just now, and holds its locks.
    pub(crate) fn join_with(
        self: &Arc<Self>,
        located: &Located,
        mode: Mode,
        (file, align): (File, Alignment),
    ) -> Arc<SharedHandle> {
        let shared = self.join(located, mode, align);
        self.keep(&shared.handle, Arc::new(file));
        shared
    }

    /// Whether a store reads the file at `node` (see [`Located::node`]) and relies on locks that
    /// keep writers out.
    pub(crate) fn is_read_locked(&self, node: Node) -> bool {
        [Access::Buffered, Access::Direct].into_iter().any(|access| {
            let mode = Mode { access, locking: Locking::On };
            self.known.find(Key::of_node(node, mode)).is_some()
        })
    }
}

impl Known {
    fn find(&self, key: Key) -> Option<Arc<SharedHandle>> {
        self.lock().get(&key).and_then(Weak::upgrade)
    }

    /// The known handle of the same file, unless that is `other`; else `new`, which is known from
    /// now on.
    fn find_or_insert(
        &self,
        new: &Arc<SharedHandle>,
        other: Option<&Arc<SharedHandle>>,
    ) -> Arc<SharedHandle> {
        let mut known = self.lock();
        let entry = known.entry(new.key);
        if let Entry::Occupied(entry) = &entry
            && let Some(found) = entry.get().upgrade()
            // The caller holds the other one, too, so that it does not end under the lock.
            && other.is_none_or(|other| !Arc::ptr_eq(&found, other))
        {
            return found;
        }
        entry.insert_entry(Arc::downgrade(new));
        Arc::clone(new)
    }

    /// Forgets a handle that nobody holds any more, unless another one has its place.
    fn forget(&self, key: Key) {
        let mut known = self.lock();
        if known.get(&key).is_some_and(|handle| handle.strong_count() == 0) {
            known.remove(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Weak<SharedHandle>>> {
        self.0.lock()
    }
}
