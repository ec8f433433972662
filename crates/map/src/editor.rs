//! A new version of a map, made from the one before.
//!
//! The editor holds the directories that it has seen; the caller feeds those that are missing. Kept
//! from version to version, it never needs the same directory twice.

use crate::node::{Directory, FANOUT_BITS, NodeRef, encode_node};
use crate::{HEIGHT_MAX, Root, child_index};
use std::collections::BTreeMap;

/// Place of a directory in the tree: its level (the lowest is 0) and the bits of the keys above it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Slot {
    level: u8,
    prefix: u64,
}

struct Held {
    directory: Directory,
    dirty: bool,
}

/// Edits a map. Every key that is set or read must have been asked for by [`Self::missing`] first.
pub struct Editor {
    root: Root,
    held: BTreeMap<Slot, Held>,
}

impl Editor {
    /// Starts from `root`.
    pub fn new(root: Root) -> Self {
        Self { root, held: BTreeMap::new() }
    }

    /// The state that was last written.
    pub fn root(&self) -> Root {
        self.root
    }

    /// Makes the tree high enough for `key`. Writes nothing yet.
    pub fn grow_for(&mut self, key: u64) {
        while self.root.height == 0 || self.root.is_beyond(key) {
            assert!(self.root.height < HEIGHT_MAX, "16 levels hold every key");
            let slot = Slot { level: self.root.height, prefix: 0 };
            let mut directory = Directory::default();
            directory.set_child(0, self.root.node);
            // The old top's content is not known here; what is known is where it lies.
            let dirty = true;
            self.held.insert(slot, Held { directory, dirty });
            self.root.height += 1;
            self.root.node = None;
        }
    }

    /// The highest directory on the way to `key` that has to be fed before the key can be read or
    /// set, with its place.
    pub fn missing(&self, key: u64) -> Option<(Slot, NodeRef)> {
        if self.root.is_beyond(key) {
            return None;
        }
        let mut at = self.root.node;
        for level in (0..self.root.height).rev() {
            let slot = slot_of(key, level);
            match self.held.get(&slot) {
                Some(held) => at = held.directory.child(child_index(key, level)),
                None => return at.map(|node| (slot, node)),
            }
        }
        None
    }

    /// Takes a directory that [`Self::missing`] asked for.
    pub fn feed(&mut self, slot: Slot, directory: Directory) {
        self.held.entry(slot).or_insert(Held { directory, dirty: false });
    }

    /// The leaf of `key`.
    ///
    /// # Panics
    /// If a directory on the way is missing.
    pub fn leaf(&self, key: u64) -> Option<NodeRef> {
        assert!(self.missing(key).is_none(), "a directory was not fed");
        if self.root.height == 0 || self.root.is_beyond(key) {
            return None;
        }
        self.held.get(&slot_of(key, 0))?.directory.child(child_index(key, 0))
    }

    /// Sets or removes the leaf of `key`.
    ///
    /// # Panics
    /// If the tree was not grown for the key, or a directory on the way is missing.
    pub fn set(&mut self, key: u64, leaf: Option<NodeRef>) {
        assert!(self.missing(key).is_none(), "a directory was not fed");
        assert!(self.root.height > 0 && !self.root.is_beyond(key), "grow the tree first");
        for level in 0..self.root.height {
            let held = self
                .held
                .entry(slot_of(key, level))
                .or_insert(Held { directory: Directory::default(), dirty: false });
            held.dirty = true;
            if level == 0 {
                held.directory.set_child(child_index(key, 0), leaf);
            }
        }
    }

    /// Removes every leaf whose key is `first` or more. The way to `first` must have been fed.
    ///
    /// # Panics
    /// If a directory on the way is missing.
    pub fn truncate(&mut self, first: u64) {
        if self.root.height == 0 || self.root.is_beyond(first) {
            return;
        }
        assert!(self.missing(first).is_none(), "a directory was not fed");
        for level in 0..self.root.height {
            let Some(held) = self.held.get_mut(&slot_of(first, level)) else { continue };
            let index = child_index(first, level);
            // At the lowest level the key itself goes too; above, its directory was cut already.
            let from = if level == 0 { index } else { index + 1 };
            for child in from..crate::FANOUT {
                held.directory.set_child(child, None);
            }
            held.dirty = true;
        }
        let covers = |slot: &Slot| slot.prefix > first_prefix(first, slot.level);
        self.held.retain(|slot, _| !covers(slot));
    }

    /// Appends the directories that changed to `file`, the content so far of file number `number`,
    /// and gives the new root.
    ///
    /// # Panics
    /// If the file is larger than 256 TiB.
    pub fn write(&mut self, number: u16, file: &mut Vec<u8>) -> Root {
        // From the lowest level up: a parent is written after the children that it names (I2).
        let slots: Vec<Slot> = self.held.keys().copied().collect();
        for slot in slots {
            let Some(held) = self.held.get_mut(&slot) else { continue };
            if !std::mem::take(&mut held.dirty) {
                continue;
            }
            let at = if held.directory.is_empty() {
                None
            } else {
                let at = NodeRef::new(number, file.len() as u64).expect("less than 256 TiB");
                encode_node(file, at, &held.directory.encode());
                Some(at)
            };
            self.set_parent(slot, at);
        }
        self.root
    }

    fn set_parent(&mut self, slot: Slot, at: Option<NodeRef>) {
        let level = slot.level + 1;
        if level == self.root.height {
            self.root.node = at;
            return;
        }
        let parent = Slot { level, prefix: slot.prefix >> FANOUT_BITS };
        let index = usize::try_from(slot.prefix & (crate::FANOUT as u64 - 1)).expect("4 bits");
        let held = self.held.get_mut(&parent).expect("a dirty directory's parent is held");
        held.directory.set_child(index, at);
        held.dirty = true;
    }
}

fn first_prefix(key: u64, level: u8) -> u64 {
    key.checked_shr((u32::from(level) + 1) * FANOUT_BITS).unwrap_or(0)
}

fn slot_of(key: u64, level: u8) -> Slot {
    Slot { level, prefix: first_prefix(key, level) }
}

#[cfg(test)]
mod tests;
