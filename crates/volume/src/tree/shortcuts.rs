//! Directories near the leaves, found by the root and the key without those between them: a look-up
//! asks the cache for one node, or none, instead of one for each level.
//!
//! Invariants
//! - I1 A root's place and a key's prefix name the same directory for ever: what is here is never
//!   wrong, only of no use once the volume has another root.
//! - I2 Directories that are held here only take a part of the budget of the cache. No memory is
//!   taken before there is one.

use super::{NODE_MEMORY_BYTES, Node};
use crate::place::Place;
use mica_map::{FANOUT, FANOUT_BITS};
use parking_lot::Mutex;
use std::sync::OnceLock;

/// How many are held at most: the lowest directories of a GiB of a disk.
const COUNT_MAX: u64 = 1 << 14;

/// Directories of one level. See the module.
pub(super) struct Shortcuts {
    level: u8,
    /// Each prefix has one slot in which it can be.
    slots: OnceLock<Box<[Slot]>>,
    count: u64,
}

type Slot = Mutex<Option<Shortcut>>;

struct Shortcut {
    root: Place,
    prefix: u64,
    directory: (Place, Node),
}

impl Shortcuts {
    /// Of directories of `level`, as many as fit `bytes`.
    pub(super) fn new(level: u8, bytes: u64) -> Self {
        let count = (bytes / NODE_MEMORY_BYTES).min(COUNT_MAX);
        Self { level, slots: OnceLock::new(), count }
    }

    /// What they may take.
    pub(super) fn budget_bytes(&self) -> u64 {
        self.count * NODE_MEMORY_BYTES
    }

    /// What their slots take; a directory is most often in the cache of nodes, too.
    pub(super) fn slot_bytes(&self) -> u64 {
        self.slots.get().map_or(0, |slots| size_of_val(&**slots) as u64)
    }

    /// The level of the directories; the lowest is 0.
    pub(super) fn level(&self) -> u8 {
        self.level
    }

    fn prefix(&self, key: u64) -> u64 {
        key.checked_shr((u32::from(self.level) + 1) * FANOUT_BITS).unwrap_or(0)
    }

    fn slot<'a>(&self, slots: &'a [Slot], prefix: u64) -> Option<&'a Slot> {
        slots.get(usize::try_from(prefix.checked_rem(self.count)?).expect("small"))
    }

    /// The directory of `key` on the way from `root`, and where it is, if it is held.
    pub(super) fn find(&self, root: Place, key: u64) -> Option<(Place, Node)> {
        self.with(root, key, Clone::clone)
    }

    /// What the directory of `key` has of it, if it is held: without a count of who has the
    /// directory, which is one more line of memory that is in no cache of the processor.
    pub(super) fn child(&self, root: Place, key: u64) -> Option<Option<Place>> {
        let index = key.checked_shr(u32::from(self.level) * FANOUT_BITS).unwrap_or(0);
        let index = usize::try_from(index % FANOUT as u64).expect("small");
        self.with(root, key, |(_, directory)| directory.child(index))
    }

    fn with<T>(&self, root: Place, key: u64, act: impl FnOnce(&(Place, Node)) -> T) -> Option<T> {
        let prefix = self.prefix(key);
        let slot = self.slot(self.slots.get()?, prefix)?;
        let slot = slot.lock();
        let held = slot.as_ref().filter(|held| (held.root, held.prefix) == (root, prefix))?;
        Some(act(&held.directory))
    }

    /// Holds `directory`, with where it is, to which a look-up of `key` from `root` came.
    pub(super) fn keep(&self, root: Place, key: u64, directory: (Place, Node)) {
        let prefix = self.prefix(key);
        let slots = self.slots.get_or_init(|| (0..self.count).map(|_| Mutex::default()).collect());
        let Some(slot) = self.slot(slots, prefix) else { return };
        let shortcut = Shortcut { root, prefix, directory };
        let before = slot.lock().replace(shortcut);
        // Which may be the last to hold its directory.
        drop(before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::{ExtentId, Writer};
    use mica_map::{Directory, Reference};

    fn place(unit: usize) -> Place {
        Place::new(ExtentId { writer: Writer::FIRST, sequence: 0 }, 16 * unit, 0)
    }

    /// A directory that has its fourth child only.
    fn directory() -> Node {
        let mut bytes = Vec::from((1_u16 << 3).to_le_bytes());
        bytes.extend(place(5).to_bytes());
        Node::new(Directory::decode(&bytes, place(6)).expect("a directory"))
    }

    #[test]
    fn shortcut_counts_for_its_root_and_prefix_only() {
        let (one, other) = (place(1), place(2));
        for level in [0, 1, 15] {
            let shortcuts = Shortcuts::new(level, 4 * NODE_MEMORY_BYTES);
            let found = |root, key| shortcuts.find(root, key).map(|(at, _)| at);
            let keep = |key, at| shortcuts.keep(one, key, (place(at), directory()));
            assert_eq!(found(one, 0), None);
            keep(0, 7);
            let beneath = 1 << (FANOUT_BITS * u32::from(level));
            assert_eq!([found(one, 0), found(one, 15 * beneath)], [Some(place(7)); 2]);
            assert_eq!(found(other, 0), None);
            let child = |root, key| shortcuts.child(root, key);
            assert_eq!(
                [child(one, 3 * beneath), child(one, 0)],
                [Some(Some(place(5))), Some(None)]
            );
            assert_eq!(child(other, 3 * beneath), None);
            if level < 15 {
                // Which has the same slot.
                let far = 4 * 16 * beneath;
                assert_eq!(found(one, far), None);
                keep(far, 8);
                assert_eq!([found(one, far), found(one, 0)], [Some(place(8)), None]);
            }
        }
    }

    #[test]
    fn without_room_there_are_none() {
        let shortcuts = Shortcuts::new(0, NODE_MEMORY_BYTES - 1);
        shortcuts.keep(place(1), 0, (place(7), Node::default()));
        assert!(shortcuts.find(place(1), 0).is_none());
        assert_eq!(shortcuts.budget_bytes(), 0);
    }
}
