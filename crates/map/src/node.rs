//! The bytes of nodes.

use crate::Reference;
use crate::sum::crc32c_of;
use std::fmt;

/// Bits of a key that one directory decides.
pub const FANOUT_BITS: u32 = 4;
/// Children of a directory.
pub const FANOUT: usize = 1 << FANOUT_BITS;
/// Bytes before a node's payload: its length and its sum.
pub const NODE_HEADER_BYTES: usize = 8;
/// Bytes of a directory's payload before its references: which children it has.
pub(crate) const BITMAP_BYTES: usize = FANOUT / 8;

/// Maximum size of a directory node, in bytes, its header included.
pub const fn directory_bytes_max<R: Reference>() -> usize {
    NODE_HEADER_BYTES + BITMAP_BYTES + FANOUT * R::BYTES
}

/// A node that cannot be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeError {
    /// Fewer bytes than the node's length says.
    Truncated,
    /// The checksum does not match the bytes and the place.
    Checksum,
    /// A directory that names something that it must not.
    Malformed,
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncated => "a node is truncated",
            Self::Checksum => "a node's checksum does not match",
            Self::Malformed => "a directory is malformed",
        })
    }
}

impl std::error::Error for NodeError {}

/// Appends a node with `payload`, for the place `at`.
pub fn encode_node<R: Reference>(to: &mut Vec<u8>, at: R, payload: &[u8]) {
    let len = u32::try_from(payload.len()).expect("nodes are small");
    to.extend_from_slice(&len.to_le_bytes());
    to.extend_from_slice(&checksum(at, payload).to_le_bytes());
    to.extend_from_slice(payload);
}

/// Length of a whole node, from its first [`NODE_HEADER_BYTES`] bytes.
pub fn node_len(header: &[u8]) -> Option<usize> {
    let len = u32::from_le_bytes(*header.first_chunk()?);
    usize::try_from(len).ok()?.checked_add(NODE_HEADER_BYTES)
}

/// The payload of the node at `at`; `bytes` starts at the node and may continue past it.
///
/// # Errors
/// If the bytes are too few or are not this node's.
pub fn open_node<R: Reference>(bytes: &[u8], at: R) -> Result<&[u8], NodeError> {
    let len = node_len(bytes).ok_or(NodeError::Truncated)?;
    let node = bytes.get(..len).ok_or(NodeError::Truncated)?;
    let (header, payload) =
        node.split_first_chunk::<NODE_HEADER_BYTES>().ok_or(NodeError::Truncated)?;
    let [.., a, b, c, d] = *header;
    if u32::from_le_bytes([a, b, c, d]) != checksum(at, payload) {
        return Err(NodeError::Checksum);
    }
    Ok(payload)
}

/// Covers the reference, so that a good node at the wrong place is refused too.
fn checksum<R: Reference>(at: R, payload: &[u8]) -> u32 {
    crc32c_of(&[at.to_bytes().as_ref(), payload])
}

/// A directory: its children by index.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Directory<R> {
    children: [Option<R>; FANOUT],
}

impl<R: Reference> Default for Directory<R> {
    fn default() -> Self {
        Self { children: [None; FANOUT] }
    }
}

impl<R: Reference> Directory<R> {
    /// The child at `index`.
    pub fn child(&self, index: usize) -> Option<R> {
        self.children.get(index).copied().flatten()
    }

    /// Puts a child at `index`.
    pub(crate) fn set_child(&mut self, index: usize, child: Option<R>) {
        self.children[index] = child;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.children.iter().all(Option::is_none)
    }

    /// The payload of the directory's node.
    pub fn encode(&self) -> Vec<u8> {
        let mut bitmap = 0_u16;
        let mut payload = vec![0; BITMAP_BYTES];
        for (index, child) in self.children.iter().enumerate() {
            if let Some(child) = child {
                bitmap |= 1 << index;
                let bytes = child.to_bytes();
                assert_eq!(bytes.as_ref().len(), R::BYTES, "a reference of the length it says");
                payload.extend_from_slice(bytes.as_ref());
            }
        }
        payload[..BITMAP_BYTES].copy_from_slice(&bitmap.to_le_bytes());
        payload
    }

    /// The directory with this payload, which was read at `at`.
    ///
    /// # Errors
    /// If the length does not match the bitmap, there is no child, or the directory may not name
    /// one of the children (I2). One without children is never written, and with such ones a walk
    /// of a few nodes that name each other would take for ever to come to a leaf.
    pub fn decode(payload: &[u8], at: R) -> Result<Self, NodeError> {
        let (bitmap, refs) =
            payload.split_first_chunk::<BITMAP_BYTES>().ok_or(NodeError::Malformed)?;
        let bitmap = u16::from_le_bytes(*bitmap);
        if bitmap == 0 || refs.len() != bitmap.count_ones() as usize * R::BYTES {
            return Err(NodeError::Malformed);
        }
        let mut directory = Self::default();
        let present = (0..FANOUT).filter(|index| bitmap & (1 << index) != 0);
        for (index, bytes) in present.zip(refs.chunks_exact(R::BYTES)) {
            let child = R::from_bytes(bytes).ok_or(NodeError::Malformed)?;
            if !at.may_name(child) {
                return Err(NodeError::Malformed);
            }
            directory.children[index] = Some(child);
        }
        Ok(directory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Place;

    const AT: Place = Place { extent: 3, block: 500 };

    #[test]
    fn node_at_another_place_is_refused() {
        let mut file = Vec::new();
        encode_node(&mut file, AT, b"leaf");
        assert_eq!(node_len(&file), Some(file.len()));
        assert_eq!(open_node(&file, AT), Ok(&b"leaf"[..]));
        let other = Place { extent: 4, ..AT };
        assert_eq!(open_node(&file, other), Err(NodeError::Checksum));
    }

    #[test]
    fn node_with_a_flipped_bit_or_a_lost_end_is_refused() {
        let mut good = Vec::new();
        encode_node(&mut good, AT, b"leaf");
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(open_node(&bad, AT).is_err(), "bit {bit}");
        }
        for len in 0..good.len() {
            assert_eq!(open_node(&good[..len], AT), Err(NodeError::Truncated));
        }
    }

    #[test]
    fn directory_that_names_itself_or_a_later_node_is_refused() {
        for child in [AT, Place { block: 501, ..AT }, Place { extent: 4, block: 0 }] {
            let mut directory = Directory::default();
            directory.set_child(2, Some(child));
            assert_eq!(Directory::decode(&directory.encode(), AT), Err(NodeError::Malformed));
        }
    }

    #[test]
    fn directory_without_children_is_refused() {
        let payload = Directory::<Place>::default().encode();
        assert_eq!(Directory::<Place>::decode(&payload, AT), Err(NodeError::Malformed));
    }

    #[test]
    fn directory_round_trips_and_a_wrong_length_is_refused() {
        let mut directory = Directory::default();
        for index in [0, 7, 15] {
            directory.set_child(index, Some(Place { extent: 1, block: 9 }));
        }
        let payload = directory.encode();
        assert_eq!(payload.len(), BITMAP_BYTES + 3 * Place::BYTES);
        assert_eq!(Directory::decode(&payload, AT), Ok(directory));
        for len in (0..payload.len()).chain([payload.len() + 1]) {
            let mut bad = payload.clone();
            bad.resize(len, 0);
            assert_eq!(Directory::<Place>::decode(&bad, AT), Err(NodeError::Malformed));
        }
    }
}
