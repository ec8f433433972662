//! The persistent radix tree. Internal crate.
//!
//! A map from a number (a slice of a disk) to a leaf (bytes that its owner understands), as a tree
//! of nodes that are never changed once written. A new version writes the leaves that changed and
//! the directories above them; all else it shares with the version before by reference. So a
//! version costs what changed, however large the map and however many versions lie before it.
//!
//! ```text
//! version 7  root ─┬─▶ directory (7) ─┬─▶ leaf (7)
//!                  │                  └─▶ leaf (3)     written by version 3, shared
//!                  └─▶ directory (5) ──▶ ...           written by version 5, shared
//! ```
//!
//! The crate knows bytes and references and does no I/O: a look-up says which node it needs next
//! ([`Step`]), an edit says which it must be fed ([`Editor::missing`]). Whoever stores the nodes
//! reads them. Nodes lie in *files*, one per version; a [`NodeRef`] names file and offset.
//!
//! # A node's bytes
//! | bytes | meaning |
//! |---|---|
//! | 0..4 | length of the payload, little-endian |
//! | 4..8 | CRC-32C of the node's own reference (8 bytes) and the payload |
//! | 8.. | payload; of a directory: bitmap of present children (2 bytes), then 8 bytes for each |
//!
//! The sum covers the reference, so that a good node at a wrong place is refused too.
//!
//! # Invariants
//! - I1 A node is written once and never changed.
//! - I2 A reference in a version names a node in that version's file or in an earlier one's, and in
//!   its own file one at a lower offset: there are no cycles, whatever the bytes say.
//! - I3 Nothing read is trusted: a payload is used only after its sum and its bounds were checked.

mod editor;
mod node;

pub use editor::{Editor, Slot};
pub use node::{
    DIRECTORY_BYTES_MAX, Directory, FANOUT, FANOUT_BITS, NODE_HEADER_BYTES, NodeError, NodeRef,
    encode_node, node_len, open_node,
};

/// Most levels of directories: 16 levels of 4 bits name every 64-bit key.
pub const HEIGHT_MAX: u8 = 16;

/// The state of a map at one version.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Root {
    /// The top node: a directory, or the leaf of key 0 where the height is 0.
    pub node: Option<NodeRef>,
    /// Levels of directories.
    pub height: u8,
}

impl Root {
    /// Whether `key` is beyond what a tree of this height can hold.
    pub fn is_beyond(&self, key: u64) -> bool {
        let bits = u32::from(self.height) * FANOUT_BITS;
        bits < u64::BITS && key >> bits != 0
    }

    /// Starts a look-up.
    pub fn look_up(&self, key: u64) -> Step {
        match self.node {
            Some(node) if !self.is_beyond(key) => Lookup { key, level: self.height }.arrive(node),
            _ => Step::Absent,
        }
    }
}

/// What a look-up needs or has found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// Read this directory and feed it.
    Read(NodeRef, Lookup),
    /// The leaf of the key.
    Leaf(NodeRef),
    /// The map holds nothing for the key.
    Absent,
}

/// A look-up on its way down.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lookup {
    key: u64,
    /// Levels of directories still to pass, the next included.
    level: u8,
}

impl Lookup {
    fn arrive(self, node: NodeRef) -> Step {
        if self.level == 0 { Step::Leaf(node) } else { Step::Read(node, self) }
    }

    /// Goes on with the directory that was asked for.
    pub fn feed(self, directory: &Directory) -> Step {
        let level = self.level - 1;
        match directory.child(child_index(self.key, level)) {
            Some(child) => Self { key: self.key, level }.arrive(child),
            None => Step::Absent,
        }
    }
}

/// Which child of a directory leads to `key`; the level of the lowest directories is 0.
fn child_index(key: u64, level: u8) -> usize {
    let shift = u32::from(level) * FANOUT_BITS;
    let index = key.checked_shr(shift).unwrap_or(0) & (FANOUT as u64 - 1);
    usize::try_from(index).expect("below the fan-out")
}
