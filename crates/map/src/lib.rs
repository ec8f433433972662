//! The persistent radix tree. Internal crate.
//!
//! A map from a number (a slice of a disk) to a leaf (bytes that its owner understands), as a tree
//! of nodes that are never changed once written. A new version writes the leaves that changed and
//! the directories above them; everything else it shares with the previous version by reference. So
//! a version costs only what changed, however large the map and however many versions precede it.
//!
//! ```text
//! version 7  root ─┬─▶ directory (7) ─┬─▶ leaf (7)
//!                  │                  └─▶ leaf (3)     written by version 3, shared
//!                  └─▶ directory (5) ──▶ ...           written by version 5, shared
//! ```
//!
//! The crate knows bytes and references and does no I/O. The map's owner decides what a
//! [`Reference`] is: file and offset, object and block. Every traversal of a tree proceeds in
//! steps, which say what has to be read next:
//!
//! | to | use |
//! |---|---|
//! | look a key up | [`Root::look_up`], [`Step`] |
//! | make a new version | [`Editor`] |
//! | see all keys of a range, or mark all nodes | [`Walk`] |
//! | see what two versions do not share | [`Diff`] |
//!
//! docs/formats/map-node.md has the bytes of a node.
//!
//! # Invariants
//! - I1 A node is written once and never changed.
//! - I2 A directory names only nodes that [`Reference::may_name`] lets it name, which are older:
//!   there are no cycles, whatever the bytes say.
//! - I3 Nothing read is trusted: a payload is used only after its sum and its bounds were checked.
//! - I4 What a step holds is bounded by the height of the tree, and what an editor holds by its
//!   limit and by what was changed since it last wrote.

mod diff;
mod editor;
mod node;
#[cfg(test)]
mod page;
mod sum;
#[cfg(test)]
mod testing;
mod walk;

pub use diff::{Change, Diff, DiffStep};
pub use editor::{Editor, Slot};
pub use node::{
    Directory, FANOUT, FANOUT_BITS, NODE_HEADER_BYTES, NodeError, directory_bytes_max, encode_node,
    node_len, open_node,
};
pub use sum::{RunningSum, Shift, crc32c, crc32c_of};
pub use walk::{Walk, WalkStep};

use std::fmt::Debug;
use std::hash::Hash;

/// Maximum number of levels of directories: 16 levels of 4 bits name every 64-bit key.
pub const HEIGHT_MAX: u8 = 16;

/// Names a node, for as long as it is kept: two references that are equal name the same bytes.
pub trait Reference: Copy + Eq + Hash + Debug {
    /// A reference as it is stored in a directory.
    type Bytes: AsRef<[u8]>;

    /// Length of that.
    const BYTES: usize;

    /// The reference as it is stored in a directory.
    fn to_bytes(self) -> Self::Bytes;

    /// The reverse, from [`Self::BYTES`] untrusted bytes; `None` if they are not a reference.
    fn from_bytes(bytes: &[u8]) -> Option<Self>;

    /// Whether a directory here may name `child`. It has to be a strict order, so that no chain of
    /// references returns to its start: a directory is written after what it names.
    fn may_name(self, child: Self) -> bool;
}

/// The state of a map at one version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Root<R> {
    /// The top node: a directory, or the leaf of key 0 where the height is 0.
    pub node: Option<R>,
    /// Levels of directories.
    pub height: u8,
}

impl<R> Default for Root<R> {
    fn default() -> Self {
        Self { node: None, height: 0 }
    }
}

impl<R: Reference> Root<R> {
    /// Whether `key` is beyond what a tree of this height can hold.
    pub fn is_beyond(&self, key: u64) -> bool {
        let bits = u32::from(self.height) * FANOUT_BITS;
        bits < u64::BITS && key >> bits != 0
    }

    /// Starts a look-up.
    pub fn look_up(&self, key: u64) -> Step<R> {
        match self.node {
            Some(node) if !self.is_beyond(key) => Lookup { key, level: self.height }.arrive(node),
            _ => Step::Absent,
        }
    }
}

/// What a look-up needs or has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step<R> {
    /// Read this directory and feed it.
    Read(R, Lookup),
    /// The leaf of the key.
    Leaf(R),
    /// The map holds nothing for the key.
    Absent,
}

/// A look-up in progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lookup {
    key: u64,
    /// Levels of directories still to pass, the next included.
    level: u8,
}

impl Lookup {
    fn arrive<R>(self, node: R) -> Step<R> {
        if self.level == 0 { Step::Leaf(node) } else { Step::Read(node, self) }
    }

    /// Continues with the directory that was asked for.
    pub fn feed<R: Reference>(self, directory: &Directory<R>) -> Step<R> {
        let level = self.level - 1;
        match directory.child(child_index(self.key, level)) {
            Some(child) => Self { key: self.key, level }.arrive(child),
            None => Step::Absent,
        }
    }
}

/// Which child of a directory leads to `key`; the level of the lowest directories is 0.
fn child_index(key: u64, level: u8) -> usize {
    let index = above(key, u32::from(level)) & (FANOUT as u64 - 1);
    usize::try_from(index).expect("below the fan-out")
}

/// The bits of `key` above the lowest `levels` levels.
fn above(key: u64, levels: u32) -> u64 {
    key.checked_shr(levels * FANOUT_BITS).unwrap_or(0)
}
