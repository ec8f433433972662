//! Look-ups of keys beside each other in one tree.

use super::shortcuts::Shortcuts;
use super::{Node, Tree, found};
use crate::place::Place;
use crate::state::Root;
use mica_block::Result;
use mica_map::{FANOUT, HEIGHT_MAX, Lookup, Step};
use std::sync::atomic::Ordering;

/// Look-ups in one tree, one after the other: those of keys beside each other ask for the
/// directories that they share once.
pub(crate) struct Cursor<'a> {
    tree: &'a Tree,
    root: Root,
    /// The last directory of each level, and where it is.
    path: [Option<(Place, Node)>; HEIGHT_MAX as usize],
    /// What the keys of the last lowest directory have in common.
    lowest: Option<u64>,
}

impl<'a> Cursor<'a> {
    /// For the tree with this root.
    pub(crate) fn new(tree: &'a Tree, root: Root) -> Self {
        Self { tree, root, path: Default::default(), lowest: None }
    }

    /// As [`Tree::look_up`].
    ///
    /// # Errors
    /// As [`Tree::look_up`].
    pub(crate) async fn look_up(&mut self, key: u64) -> Result<Option<Place>> {
        if let Some(known) = self.known(key) {
            return Ok(known);
        }
        let mut step = self.root.look_up(key);
        for level in (0..self.root.height).rev() {
            let Step::Read(at, lookup) = step else { break };
            if !self.is_at(level, at) {
                let node = self.tree.node(at).await?;
                self.path[usize::from(level)] = Some((at, node));
            }
            step = self.go_on(key, level, lookup);
        }
        Ok(found(step))
    }

    /// As [`Tree::look_up_cached`].
    pub(crate) fn look_up_cached(&mut self, key: u64) -> Option<Option<Place>> {
        if let Some(known) = self.known(key) {
            return Some(known);
        }
        if let Some(found) = self.by_shortcut(key) {
            return found;
        }
        let mut step = self.root.look_up(key);
        for level in (0..self.root.height).rev() {
            let Step::Read(at, lookup) = step else { break };
            if !self.is_at(level, at) {
                let node = self.cached(at)?;
                self.keep_shortcut(level, key, (at, &node));
                self.path[usize::from(level)] = Some((at, node));
            }
            step = self.go_on(key, level, lookup);
        }
        Some(found(step))
    }

    /// As [`Self::look_up_cached`], if a shortcut leads there.
    fn by_shortcut(&mut self, key: u64) -> Option<Option<Option<Place>>> {
        let root = self.root.node.filter(|_| !self.root.is_beyond(key))?;
        let [lowest, above] = &self.tree.shared.shortcuts;
        let is_in = |shortcuts: &Shortcuts| self.root.height > shortcuts.level();
        if let Some(held) = lowest.find(root, key).filter(|_| is_in(lowest)) {
            self.tree.shared.hits.fetch_add(1, Ordering::Relaxed);
            return Some(self.arrived(key, held));
        }
        let (_, held) = above.find(root, key).filter(|_| is_in(above))?;
        let index = usize::try_from(key / FANOUT as u64 % FANOUT as u64).expect("small");
        let Some(at) = held.child(index) else { return Some(Some(None)) };
        let Some(node) = self.cached(at) else { return Some(None) };
        lowest.keep(root, key, (at, Node::clone(&node)));
        Some(self.arrived(key, (at, node)))
    }

    /// What the lowest directory of `key` has.
    fn arrived(&mut self, key: u64, lowest: (Place, Node)) -> Option<Option<Place>> {
        self.path[0] = Some(lowest);
        self.lowest = Some(key / FANOUT as u64);
        self.known(key)
    }

    fn keep_shortcut(&self, level: u8, key: u64, (at, node): (Place, &Node)) {
        let shortcuts = &self.tree.shared.shortcuts;
        let of_level = shortcuts.iter().find(|shortcuts| shortcuts.level() == level);
        if let (Some(root), Some(shortcuts)) = (self.root.node, of_level) {
            shortcuts.keep(root, key, (at, Node::clone(node)));
        }
    }

    fn cached(&self, at: Place) -> Option<Node> {
        let node = self.tree.shared.nodes.get(&at)?;
        self.tree.shared.hits.fetch_add(1, Ordering::Relaxed);
        Some(node)
    }

    fn known(&self, key: u64) -> Option<Option<Place>> {
        let is_lowest = self.lowest == Some(key / FANOUT as u64);
        let (_, node) = self.path[0].as_ref().filter(|_| is_lowest)?;
        let index = usize::try_from(key % FANOUT as u64).expect("small");
        Some(node.child(index))
    }

    /// Whether the last directory of `level` is the one at `at`.
    fn is_at(&self, level: u8, at: Place) -> bool {
        self.path[usize::from(level)].as_ref().is_some_and(|(place, _)| *place == at)
    }

    /// The next step of a look-up of `key`, which is at the last directory of `level`.
    fn go_on(&mut self, key: u64, level: u8, lookup: Lookup) -> Step<Place> {
        if level == 0 {
            self.lowest = Some(key / FANOUT as u64);
        }
        let (_, node) = self.path[usize::from(level)].as_ref().expect("it was just found");
        lookup.feed(&**node)
    }
}
