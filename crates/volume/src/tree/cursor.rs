//! Look-ups of keys beside each other in one tree.

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
        let mut step = self.root.look_up(key);
        for level in (0..self.root.height).rev() {
            let Step::Read(at, lookup) = step else { break };
            if !self.is_at(level, at) {
                let node = self.tree.shared.nodes.get(&at)?;
                self.tree.shared.hits.fetch_add(1, Ordering::Relaxed);
                self.path[usize::from(level)] = Some((at, node));
            }
            step = self.go_on(key, level, lookup);
        }
        Some(found(step))
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
