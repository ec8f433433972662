//! What tells one file from another.

/// Which file it is, whatever its names are; of a device, its node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Node {
    /// The file system.
    pub device: u64,
    /// The number that the file has there.
    pub inode: u64,
}
