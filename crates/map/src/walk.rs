//! Visits all leaves of a range of keys, in order: to copy a map, or to mark what it needs.
//!
//! The walk says which directory it needs next and is fed it, or told to skip it: so a mark pays
//! nothing below a directory that it has already seen.
//!
//! An untrusted tree may name one directory many times, so that only the keys bound the number of
//! its leaves. A caller that walks one must count, or skip what it has seen.

use crate::node::{Directory, FANOUT, FANOUT_BITS};
use crate::{Reference, Root, above};
use std::ops::RangeInclusive;

/// What a walk needs or has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WalkStep<R> {
    /// Read this directory and feed it, or skip it.
    Read(R),
    /// The leaf of a key.
    Leaf(u64, R),
    /// There are no more.
    Done,
}

/// A directory on the current path, and how far the walk is in it.
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

/// A walk in progress.
pub struct Walk<R> {
    keys: RangeInclusive<u64>,
    frames: Vec<Frame<R>>,
    wanted: Option<Named<R>>,
}

impl<R: Reference> Walk<R> {
    /// A walk over the leaves of `root` whose keys are in `keys`.
    pub fn new(root: Root<R>, keys: RangeInclusive<u64>) -> Self {
        let top = root.node.map(|node| Named { node, level: root.height, prefix: 0 });
        let wanted = top.filter(|top| touches(&keys, top.level, top.prefix));
        Self { keys, frames: Vec::new(), wanted }
    }

    /// Continues. Asks for the same directory until it is fed or skipped.
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

    /// Skips the directory that was asked for, with everything below it.
    pub fn skip(&mut self) {
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
