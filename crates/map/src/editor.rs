//! A new version of a map, made from the one before.
//!
//! The editor holds the directories that it has seen; the caller feeds those that are missing. Kept
//! from version to version, it seldom needs the same directory twice.
//!
//! Invariants
//! - E1 Every directory above a changed one is held and counts as changed, too. So a walk of what
//!   changed, from the lowest level up, visits every directory that has to be written, and each
//!   after the children that it names.
//! - E2 Only unchanged directories are evicted. The path to the key that was asked for last stays.
//! - E3 The lowest directory in which a leaf was set last is held and changed, with all above it,
//!   until something else is done with the tree than setting leaves: what is beside it costs one
//!   look-up.

use crate::node::{Directory, FANOUT_BITS};
use crate::{FANOUT, HEIGHT_MAX, Reference, Root, above, child_index};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// Place of a directory in the tree: its level (the lowest is 0) and the bits of the keys above it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot {
    level: u8,
    prefix: u64,
}

impl Slot {
    fn of(key: u64, level: u8) -> Self {
        Self { level, prefix: above(key, u32::from(level) + 1) }
    }
}

struct Held<R> {
    directory: Directory<R>,
    /// When it was last on the path to a key.
    used: u64,
}

/// Edits a map. A key may be set or read only if it was the last key passed to [`Self::missing`].
pub struct Editor<R> {
    /// As it was last written.
    root: Root<R>,
    /// As it will be.
    top: Root<R>,
    held: BTreeMap<Slot, Held<R>>,
    /// Those that changed since the last version, from the lowest level up.
    dirty: BTreeSet<Slot>,
    /// Unchanged directories that are held at most.
    limit: usize,
    /// Counts calls of `missing`.
    now: u64,
    /// Where a leaf was set last (E3).
    last: Option<Slot>,
}

impl<R: Reference> Editor<R> {
    /// Least limit: a few paths from the top.
    pub const LIMIT_MIN: usize = 4 * HEIGHT_MAX as usize;

    /// Starts from `root`. Holds about `limit` directories, at least [`Self::LIMIT_MIN`], besides
    /// those that changed.
    pub fn new(root: Root<R>, limit: usize) -> Self {
        let limit = limit.max(Self::LIMIT_MIN);
        let (held, dirty) = (BTreeMap::new(), BTreeSet::new());
        Self { root, top: root, held, dirty, limit, now: 0, last: None }
    }

    /// The state that was last written.
    pub fn root(&self) -> Root<R> {
        self.root
    }

    /// Number of directories held, including those that changed until they are written.
    pub fn held_len(&self) -> usize {
        self.held.len()
    }

    /// Number of directories changed since the last version: the most that [`Self::write`] will
    /// write.
    pub fn dirty_len(&self) -> usize {
        self.dirty.len()
    }

    /// Makes the tree high enough for `key`. Writes nothing yet.
    pub fn grow_for(&mut self, key: u64) {
        // Directories that are added on top are changed, too: what is beneath stays as it is (E3).
        while self.top.height == 0 || self.top.is_beyond(key) {
            assert!(self.top.height < HEIGHT_MAX, "16 levels hold every key");
            let slot = Slot { level: self.top.height, prefix: 0 };
            let mut directory = Directory::default();
            // The old top's content may not be known here, but its reference is.
            directory.set_child(0, self.top.node.take());
            self.top.height += 1;
            self.hold(slot, directory);
            self.dirty.insert(slot);
        }
    }

    /// The highest directory on the path to `key` that has to be fed before the key can be read or
    /// set, with its place.
    pub fn missing(&mut self, key: u64) -> Option<(Slot, R)> {
        self.now += 1;
        if self.last == Some(Slot::of(key, 0)) {
            return None;
        }
        self.find_missing(key, |held, now| held.used = now)
    }

    fn find_missing(
        &mut self,
        key: u64,
        mut visit: impl FnMut(&mut Held<R>, u64),
    ) -> Option<(Slot, R)> {
        if self.top.is_beyond(key) {
            return None;
        }
        let mut at = self.top.node;
        for level in (0..self.top.height).rev() {
            let slot = Slot::of(key, level);
            match self.held.get_mut(&slot) {
                Some(held) => {
                    visit(held, self.now);
                    at = held.directory.child(child_index(key, level));
                }
                None => return at.map(|node| (slot, node)),
            }
        }
        None
    }

    /// Takes a directory that [`Self::missing`] asked for.
    pub fn feed(&mut self, slot: Slot, directory: Directory<R>) {
        if !self.held.contains_key(&slot) {
            self.hold(slot, directory);
            self.make_room();
        }
    }

    /// The leaf of `key`.
    ///
    /// # Panics
    /// If a directory on the path is missing.
    pub fn leaf(&mut self, key: u64) -> Option<R> {
        assert!(self.find_missing(key, |_, _| ()).is_none(), "a directory was not fed");
        if self.top.height == 0 || self.top.is_beyond(key) {
            return None;
        }
        self.held.get(&Slot::of(key, 0))?.directory.child(child_index(key, 0))
    }

    /// Sets or removes the leaf of `key`.
    ///
    /// # Panics
    /// If the tree was not grown for the key, or a directory on the path is missing.
    pub fn set(&mut self, key: u64, leaf: Option<R>) {
        let lowest = Slot::of(key, 0);
        if self.last != Some(lowest) {
            self.change_path(key);
            self.last = Some(lowest);
        }
        let held = self.held.get_mut(&lowest).expect("it is held (E3)");
        held.directory.set_child(child_index(key, 0), leaf);
    }

    /// The directories on the path to `key` are held, and changed, from now on.
    fn change_path(&mut self, key: u64) {
        assert!(self.find_missing(key, |_, _| ()).is_none(), "a directory was not fed");
        assert!(self.top.height > 0 && !self.top.is_beyond(key), "grow the tree first");
        for level in 0..self.top.height {
            let slot = Slot::of(key, level);
            if !self.held.contains_key(&slot) {
                self.hold(slot, Directory::default());
            }
            self.dirty.insert(slot);
        }
    }

    /// Removes every leaf whose key is in `keys`, however many there are: costs two paths. Those to
    /// the first and the last key must have been fed, in whichever order, one after the other.
    ///
    /// # Panics
    /// If a directory on these paths is missing.
    pub fn clear(&mut self, keys: RangeInclusive<u64>) {
        self.last = None;
        let (first, last) = keys.into_inner();
        if first > last || self.top.height == 0 || self.top.is_beyond(first) {
            return;
        }
        // Without a last key everything after the first is removed.
        let last = (!self.top.is_beyond(last)).then_some(last);
        for key in [Some(first), last].into_iter().flatten() {
            assert!(self.find_missing(key, |_, _| ()).is_none(), "a directory was not fed");
        }
        for level in 0..self.top.height {
            self.clear_at(level, first, last);
        }
        let is_inside = |slot: &Slot| {
            let prefix = |key| Slot::of(key, slot.level).prefix;
            slot.prefix > prefix(first) && last.is_none_or(|last| slot.prefix < prefix(last))
        };
        self.held.retain(|slot, _| !is_inside(slot));
        self.dirty.retain(|slot| !is_inside(slot));
    }

    /// In the one or two directories of `level` that lie on the paths to `first` and `last`,
    /// removes the children between.
    fn clear_at(&mut self, level: u8, first: u64, last: Option<u64>) {
        // Above the lowest level the children on the paths were cut already.
        let on_path = usize::from(level > 0);
        let from = child_index(first, level) + on_path;
        let end = |last| (child_index(last, level) + 1).saturating_sub(on_path);
        let lowest = Slot::of(first, level);
        let parts = match last.map(|last| (Slot::of(last, level), end(last))) {
            None => [(lowest, from..FANOUT), (lowest, 0..0)],
            Some((slot, end)) if slot == lowest => [(lowest, from..end), (lowest, 0..0)],
            Some((slot, end)) => [(lowest, from..FANOUT), (slot, 0..end)],
        };
        for (slot, children) in parts {
            let Some(held) = self.held.get_mut(&slot) else { continue };
            for child in children {
                held.directory.set_child(child, None);
            }
            self.dirty.insert(slot);
        }
    }

    /// Passes the directories that changed to `put`, which returns the reference of each, and
    /// returns the new root. A directory comes after those that it names.
    pub fn write(&mut self, mut put: impl FnMut(&Directory<R>) -> R) -> Root<R> {
        loop {
            if let Some(root) = self.write_some(usize::MAX, &mut put) {
                return root;
            }
        }
    }

    /// As [`Self::write`], of at most `count` directories: `None` if there are more, for which this
    /// is called again before anything is changed.
    pub fn write_some(
        &mut self,
        count: usize,
        mut put: impl FnMut(&Directory<R>) -> R,
    ) -> Option<Root<R>> {
        self.last = None;
        for _ in 0..count {
            let Some(slot) = self.dirty.pop_first() else { break };
            let held = self.held.get(&slot).expect("a changed directory is held");
            let at = (!held.directory.is_empty()).then(|| put(&held.directory));
            self.set_parent(slot, at);
        }
        if !self.dirty.is_empty() {
            return None;
        }
        self.make_room();
        self.root = self.top;
        Some(self.root)
    }

    fn set_parent(&mut self, slot: Slot, at: Option<R>) {
        let level = slot.level + 1;
        if level == self.top.height {
            self.top.node = at;
            return;
        }
        let parent = Slot { level, prefix: slot.prefix >> FANOUT_BITS };
        assert!(self.dirty.contains(&parent), "a directory above a change is changed, too");
        let index = usize::try_from(slot.prefix & (FANOUT as u64 - 1)).expect("4 bits");
        let held = self.held.get_mut(&parent).expect("a changed directory is held");
        held.directory.set_child(index, at);
    }

    fn hold(&mut self, slot: Slot, directory: Directory<R>) {
        self.held.insert(slot, Held { directory, used: self.now });
    }

    /// Evicts the least recently used half of the unchanged directories if there are more than the
    /// limit.
    fn make_room(&mut self) {
        if self.held.len() - self.dirty.len() <= self.limit {
            return;
        }
        let clean = self.held.iter().filter(|(slot, _)| !self.dirty.contains(slot));
        let mut used: Vec<u64> = clean.map(|(_, held)| held.used).collect();
        let middle = used.len() / 2;
        let (_, oldest_kept, _) = used.select_nth_unstable(middle);
        let (oldest_kept, dirty) = (*oldest_kept, &self.dirty);
        self.held.retain(|slot, held| held.used >= oldest_kept || dirty.contains(slot));
    }
}

#[cfg(test)]
mod tests;
