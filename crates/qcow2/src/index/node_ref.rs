//! The place of a node of the chain's map: the sidecar, and the offset there.

use mica_map::Reference;
use std::fmt;

/// The number of the layer whose sidecar has the node, and its offset there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct NodeRef(u64);

const OFFSET_BITS: u32 = 48;

impl NodeRef {
    /// The node at `offset` of the sidecar of layer `file`; `None` if the offset needs more than 48
    /// bits.
    pub(crate) fn new(file: u16, offset: u64) -> Option<Self> {
        (offset >> OFFSET_BITS == 0).then_some(Self(u64::from(file) << OFFSET_BITS | offset))
    }

    /// The number of the layer.
    pub(crate) fn file(self) -> u16 {
        u16::try_from(self.0 >> OFFSET_BITS).expect("16 bits are left")
    }

    /// The offset in the sidecar, in bytes.
    pub(crate) fn offset(self) -> u64 {
        self.0 & ((1 << OFFSET_BITS) - 1)
    }

    /// As encoded in a header. Zero is not a node: the header itself is there.
    pub(crate) fn to_le_bytes(this: Option<Self>) -> [u8; 8] {
        this.map_or(0, |node| node.0).to_le_bytes()
    }

    /// The reverse of [`Self::to_le_bytes`].
    pub(crate) fn from_le_bytes(bytes: [u8; 8]) -> Option<Self> {
        let bits = u64::from_le_bytes(bytes);
        (bits != 0).then_some(Self(bits))
    }
}

impl Reference for NodeRef {
    type Bytes = [u8; 8];
    const BYTES: usize = 8;

    fn to_bytes(self) -> [u8; 8] {
        self.0.to_le_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        Self::from_le_bytes(bytes.try_into().ok()?)
    }

    /// Sidecars are written from the base up, and each from its start on.
    fn may_name(self, child: Self) -> bool {
        child < self
    }
}

impl fmt::Debug for NodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}:{:#x}", self.file(), self.offset())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_map::Directory;

    #[test]
    fn reference_survives_its_encoding() {
        for (file, offset) in [(0, 256), (65_535, (1 << OFFSET_BITS) - 1)] {
            let node = NodeRef::new(file, offset).expect("it fits");
            assert_eq!((node.file(), node.offset()), (file, offset));
            assert_eq!(NodeRef::from_bytes(&node.to_bytes()), Some(node));
        }
        assert_eq!(NodeRef::new(0, 1 << OFFSET_BITS), None);
        assert_eq!(NodeRef::from_bytes(&[0; 8]), None);
        assert_eq!(NodeRef::from_bytes(&[1; 7]), None);
    }

    /// The payload by hand: one child at index 2, in the byte order of sidecars.
    #[test]
    fn directory_names_lower_sidecars_and_lower_places_only() {
        let at = NodeRef::new(3, 500).expect("it fits");
        let decode = |file: u64, offset: u64| {
            let mut payload = vec![0b100, 0];
            payload.extend((file << OFFSET_BITS | offset).to_le_bytes());
            Directory::decode(&payload, at).ok().and_then(|directory| directory.child(2))
        };
        assert_eq!(decode(3, 499), NodeRef::new(3, 499));
        assert_eq!(decode(2, 1 << 40), NodeRef::new(2, 1 << 40));
        for (file, offset) in [(3, 500), (3, 501), (4, 0), (0, 0)] {
            assert_eq!(decode(file, offset), None, "{file} {offset}");
        }
    }
}
