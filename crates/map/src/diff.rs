//! What two versions of a map do not share.
//!
//! Two references that are equal name the same node, and with it the same leaves: so what two
//! versions share is never read, and a diff costs only what changed between them. Their heights may
//! differ: the lower one is the first child of the tree that it would have grown into.

use crate::node::{Directory, FANOUT};
use crate::walk::{child_prefix, touches};
use crate::{Reference, Root};
use std::ops::RangeInclusive;

/// A key that has another leaf in one version than in the other, or a leaf in one of them only.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Change<R> {
    /// The key.
    pub key: u64,
    /// Its leaf before.
    pub before: Option<R>,
    /// Its leaf after.
    pub after: Option<R>,
}

/// What a diff needs or has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DiffStep<R> {
    /// Read this directory and feed it.
    Read(R),
    /// A key that differs.
    Changed(Change<R>),
    /// There are no more.
    Done,
}

/// What a version has in a place.
#[derive(Clone)]
enum Side<R> {
    Nothing,
    /// A node, and the levels of directories from it down, itself included. It may be lower than
    /// its place: then it counts as the first of the children there.
    Node(R, u8),
    /// A directory of the place's own level, already read.
    Read(Directory<R>),
}

impl<R: Reference> Side<R> {
    fn of(node: Option<R>, level: u8) -> Self {
        node.map_or(Self::Nothing, |node| Self::Node(node, level))
    }

    fn leaf(&self) -> Option<R> {
        match self {
            Self::Node(node, 0) => Some(*node),
            _ => None,
        }
    }

    /// What it has in child `index` of a place at this `level`.
    fn child(&self, index: usize, level: u8) -> Self {
        match self {
            Self::Nothing => Self::Nothing,
            Self::Read(directory) => Self::of(directory.child(index), level - 1),
            Self::Node(..) if index == 0 => self.clone(),
            Self::Node(..) => Self::Nothing,
        }
    }

    /// Whether both are known to hold the same.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Nothing, Self::Nothing) => true,
            (Self::Node(one, level), Self::Node(other, other_level)) => {
                (one, level) == (other, other_level)
            }
            _ => false,
        }
    }
}

/// A part of the keys in which the versions differ.
struct Place<R> {
    before: Side<R>,
    after: Side<R>,
    level: u8,
    prefix: u64,
    /// The child to look at next.
    next: usize,
}

impl<R: Reference> Place<R> {
    /// The directory that has to be read before its children are known.
    fn missing(&mut self) -> Option<(&mut Side<R>, R)> {
        [&mut self.before, &mut self.after].into_iter().find_map(|side| match side {
            Side::Node(node, level) if *level == self.level => {
                let node = *node;
                Some((side, node))
            }
            _ => None,
        })
    }
}

/// A diff in progress.
pub struct Diff<R> {
    keys: RangeInclusive<u64>,
    /// Places on the way down, each with two directories at most.
    places: Vec<Place<R>>,
}

impl<R: Reference> Diff<R> {
    /// Between versions `before` and `after`, as far as `keys` go.
    pub fn new(before: Root<R>, after: Root<R>, keys: RangeInclusive<u64>) -> Self {
        let level = before.height.max(after.height);
        let [before, after] = [before, after].map(|root| Side::of(root.node, root.height));
        let mut this = Self { keys, places: Vec::new() };
        this.enter(Place { before, after, level, prefix: 0, next: 0 });
        this
    }

    /// Continues. Asks for the same directory until it is fed.
    pub fn next_step(&mut self) -> DiffStep<R> {
        loop {
            let Some(place) = self.places.last_mut() else { return DiffStep::Done };
            if place.level == 0 {
                let (key, before, after) = (place.prefix, place.before.leaf(), place.after.leaf());
                self.places.pop();
                return DiffStep::Changed(Change { key, before, after });
            }
            if let Some((_, node)) = place.missing() {
                return DiffStep::Read(node);
            }
            if place.next == FANOUT {
                self.places.pop();
                continue;
            }
            let (index, level) = (place.next, place.level);
            place.next += 1;
            let [before, after] =
                [&place.before, &place.after].map(|side| side.child(index, level));
            let prefix = child_prefix(place.prefix, index);
            self.enter(Place { before, after, level: level - 1, prefix, next: 0 });
        }
    }

    /// Takes the directory that was asked for.
    ///
    /// # Panics
    /// If none was.
    pub fn feed(&mut self, directory: Directory<R>) {
        let place = self.places.last_mut().expect("a directory was asked for");
        let (side, _) = place.missing().expect("a directory was asked for");
        *side = Side::Read(directory);
    }

    fn enter(&mut self, place: Place<R>) {
        let differs = !place.before.is_same(&place.after);
        if differs && touches(&self.keys, place.level, place.prefix) {
            self.places.push(place);
        }
    }
}

#[cfg(test)]
mod tests;
