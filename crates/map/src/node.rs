//! The bytes of nodes. The crate's head has the table.

use std::fmt;

/// Bits of a key that one directory decides.
pub const FANOUT_BITS: u32 = 4;
/// Children of a directory.
pub const FANOUT: usize = 1 << FANOUT_BITS;
/// Bytes before a node's payload.
pub const NODE_HEADER_BYTES: usize = 8;
/// Most bytes of a directory node, its header included.
pub const DIRECTORY_BYTES_MAX: usize = NODE_HEADER_BYTES + 2 + 8 * FANOUT;

/// Where a node is: the number of its file and its offset there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeRef(u64);

const OFFSET_BITS: u32 = 48;

impl NodeRef {
    /// The node at `offset` of file `file`; `None` if the offset needs more than 48 bits.
    pub fn new(file: u16, offset: u64) -> Option<Self> {
        (offset >> OFFSET_BITS == 0).then_some(Self(u64::from(file) << OFFSET_BITS | offset))
    }

    /// The number of the file.
    pub fn file(self) -> u16 {
        u16::try_from(self.0 >> OFFSET_BITS).expect("16 bits are left")
    }

    /// The offset in the file, in bytes.
    pub fn offset(self) -> u64 {
        self.0 & ((1 << OFFSET_BITS) - 1)
    }

    /// As it stands in a file. Zero is no node: offset 0 of file 0 is a header.
    pub fn to_le_bytes(this: Option<Self>) -> [u8; 8] {
        this.map_or(0, |node| node.0).to_le_bytes()
    }

    /// The reverse of [`Self::to_le_bytes`].
    pub fn from_le_bytes(bytes: [u8; 8]) -> Option<Self> {
        let bits = u64::from_le_bytes(bytes);
        (bits != 0).then_some(Self(bits))
    }

    /// Whether a node here may name `child` (I2).
    fn may_name(self, child: Self) -> bool {
        child.0 < self.0
    }
}

impl fmt::Debug for NodeRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node {}:{:#x}", self.file(), self.offset())
    }
}

/// A node that cannot be trusted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodeError {
    /// Fewer bytes than the node says that it has.
    Truncated,
    /// The sum does not fit the bytes and the place.
    Checksum,
    /// A directory that names what it must not.
    Malformed,
}

impl fmt::Display for NodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Truncated => "a node is truncated",
            Self::Checksum => "a node's checksum does not fit",
            Self::Malformed => "a directory is malformed",
        })
    }
}

impl std::error::Error for NodeError {}

/// Appends a node with `payload` to `file`, the content so far of the file that `at` names.
///
/// # Panics
/// If `at` is not the end of `file`: the sum would name another place.
pub fn encode_node(file: &mut Vec<u8>, at: NodeRef, payload: &[u8]) {
    assert_eq!(at.offset(), file.len() as u64, "a node is written where its reference says");
    let len = u32::try_from(payload.len()).expect("nodes are small");
    file.extend_from_slice(&len.to_le_bytes());
    file.extend_from_slice(&checksum(at, payload).to_le_bytes());
    file.extend_from_slice(payload);
}

/// Length of a whole node, from its first [`NODE_HEADER_BYTES`] bytes.
pub fn node_len(header: &[u8]) -> Option<usize> {
    let len = u32::from_le_bytes(*header.first_chunk()?);
    usize::try_from(len).ok()?.checked_add(NODE_HEADER_BYTES)
}

/// The payload of the node at `at`; `bytes` starts at the node and may go on after it.
///
/// # Errors
/// If the bytes are too few or are not this node's.
pub fn open_node(bytes: &[u8], at: NodeRef) -> Result<&[u8], NodeError> {
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

fn checksum(at: NodeRef, payload: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&at.0.to_le_bytes());
    digest.update(payload);
    u32::try_from(digest.finalize()).expect("a 32-bit sum")
}

/// A directory: its children by index.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Directory {
    children: [Option<NodeRef>; FANOUT],
}

impl Directory {
    /// The child at `index`.
    pub fn child(&self, index: usize) -> Option<NodeRef> {
        self.children.get(index).copied().flatten()
    }

    /// Puts a child at `index`.
    pub(crate) fn set_child(&mut self, index: usize, child: Option<NodeRef>) {
        self.children[index] = child;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.children.iter().all(Option::is_none)
    }

    /// The payload of the directory's node.
    pub fn encode(&self) -> Vec<u8> {
        let mut bitmap = 0_u16;
        let mut payload = vec![0; 2];
        for (index, child) in self.children.iter().enumerate() {
            if child.is_some() {
                bitmap |= 1 << index;
                payload.extend_from_slice(&NodeRef::to_le_bytes(*child));
            }
        }
        payload[..2].copy_from_slice(&bitmap.to_le_bytes());
        payload
    }

    /// The directory with this payload, which was read at `at`.
    ///
    /// # Errors
    /// If the length does not fit the bitmap, or a child is not older than the directory (I2).
    pub fn decode(payload: &[u8], at: NodeRef) -> Result<Self, NodeError> {
        let (bitmap, refs) = payload.split_first_chunk::<2>().ok_or(NodeError::Malformed)?;
        let bitmap = u16::from_le_bytes(*bitmap);
        let (refs, rest) = refs.as_chunks::<8>();
        if refs.len() != bitmap.count_ones() as usize || !rest.is_empty() {
            return Err(NodeError::Malformed);
        }
        let mut directory = Self::default();
        let present = (0..FANOUT).filter(|index| bitmap & (1 << index) != 0);
        for (index, bytes) in present.zip(refs) {
            let child = NodeRef::from_le_bytes(*bytes).ok_or(NodeError::Malformed)?;
            if !at.may_name(child) {
                return Err(NodeError::Malformed);
            }
            directory.children[index] = Some(child);
        }
        Ok(directory)
    }
}
