//! All leaves of a range of keys, in order: a copy of a map, or a mark of what it needs.
//!
//! The walk says which directory it needs next and is fed it, or told to pass it by: so a mark that
//! knows a directory already costs nothing below it.
//!
//! A tree from outside may name one directory many times, so that there is no bound to its leaves
//! but the keys. Whoever walks one counts, or passes by what was seen.

use crate::node::{Directory, FANOUT, FANOUT_BITS};
use crate::{Reference, Root, above};
use std::ops::RangeInclusive;

/// What a walk needs or has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkStep<R> {
    /// Read this directory and feed it, or pass it by.
    Read(R),
    /// The leaf of a key.
    Leaf(u64, R),
    /// That was all.
    Done,
}

/// A directory on the way, and how far the walk is in it.
struct Frame<R> {
    directory: Directory<R>,
    level: u8,
    prefix: u64,
    next: usize,
}

/// A node that was named: a directory that is to be read, or at level 0 a leaf.
struct Named<R> {
    node: R,
    /// Levels of directories from it down, itself included.
    level: u8,
    /// The bits of its keys above its own.
    prefix: u64,
}

/// A walk on its way.
pub struct Walk<R> {
    keys: RangeInclusive<u64>,
    frames: Vec<Frame<R>>,
    wanted: Option<Named<R>>,
}

impl<R: Reference> Walk<R> {
    /// Over the leaves of `root` whose keys are in `keys`.
    pub fn new(root: Root<R>, keys: RangeInclusive<u64>) -> Self {
        let top = root.node.map(|node| Named { node, level: root.height, prefix: 0 });
        let wanted = top.filter(|top| touches(&keys, top.level, top.prefix));
        Self { keys, frames: Vec::new(), wanted }
    }

    /// Goes on. Asks for the same directory until it is fed or passed by.
    pub fn next_step(&mut self) -> WalkStep<R> {
        loop {
            match self.wanted.take() {
                Some(Named { node, level: 0, prefix }) => return WalkStep::Leaf(prefix, node),
                Some(named) => {
                    let node = named.node;
                    self.wanted = Some(named);
                    return WalkStep::Read(node);
                }
                None => {}
            }
            let Some(frame) = self.frames.last_mut() else { return WalkStep::Done };
            let Some((child, named)) = frame.next_child(&self.keys) else {
                self.frames.pop();
                continue;
            };
            frame.next = child + 1;
            self.wanted = Some(named);
        }
    }

    /// Takes the directory that was asked for.
    ///
    /// # Panics
    /// If none was.
    pub fn feed(&mut self, directory: Directory<R>) {
        let Named { level, prefix, .. } = self.wanted.take().expect("a directory was asked for");
        assert!(level > 0, "a leaf was never asked for");
        self.frames.push(Frame { directory, level, prefix, next: 0 });
    }

    /// Leaves the directory that was asked for out, with all below it.
    pub fn pass_by(&mut self) {
        self.wanted = None;
    }
}

impl<R: Reference> Frame<R> {
    fn next_child(&self, keys: &RangeInclusive<u64>) -> Option<(usize, Named<R>)> {
        let level = self.level - 1;
        (self.next..FANOUT).find_map(|index| {
            let node = self.directory.child(index)?;
            let prefix = child_prefix(self.prefix, index);
            touches(keys, level, prefix).then_some((index, Named { node, level, prefix }))
        })
    }
}

pub(crate) fn child_prefix(prefix: u64, index: usize) -> u64 {
    prefix << FANOUT_BITS | index as u64
}

/// Whether some key in `keys` has this `prefix` above its lowest `level` levels.
pub(crate) fn touches(keys: &RangeInclusive<u64>, level: u8, prefix: u64) -> bool {
    let level = u32::from(level);
    !keys.is_empty() && (above(*keys.start(), level)..=above(*keys.end(), level)).contains(&prefix)
}

#[cfg(test)]
mod tests;
