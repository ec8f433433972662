//! The sidecar of a frozen layer: the nodes of the map that the layer changed, under a seal.
//!
//! ```text
//! 0        256                                        len
//! +--------+----------+----------+- - -+--------------+
//! | header | slice    | slice    |     | directories  |     nodes as crate map has them
//! +--------+----------+----------+- - -+--------------+
//! ```
//!
//! The map in layer k's sidecar speaks for layers 0..=k. Its nodes name nodes in this file and in
//! the sidecars of layers below, by layer number.
//!
//! Invariants
//! - I1 A sidecar is derived data: without it everything is slower once, and nothing is wrong.
//! - I2 It is trusted only under its seal: the layer is the file that was indexed, unchanged
//!   ([`Header::fits_unread`], or by content: [`Header::digest`]), and the sidecar below is the one
//!   that it was built on ([`Header::parent`]).
//! - I3 It is written whole and put in place by a rename; every node has a checksum; so a half
//!   written or damaged one is noticed, and rebuilt.

use mica_block::Identity;
use mica_map::{HEIGHT_MAX, NodeRef, Root};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of the header.
pub(crate) const HEADER_BYTES: usize = 256;

const MAGIC: [u8; 8] = *b"MICAIDX\n";
const VERSION: u32 = 1;

/// A change of a file within this time before it was sealed may not show in its timestamps.
const RACY_NS: i128 = 1_000_000_000;

/// The header of a sidecar, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    /// Number of the layer in its chain.
    pub(crate) layer: u16,
    /// Bytes of the disk that the layer speaks for.
    pub(crate) layer_len: u64,
    /// The layer's file when it was sealed.
    pub(crate) identity: Identity,
    /// When it was sealed, by the clock that stamps the file.
    pub(crate) sealed_ns: i128,
    /// Sum of the layer's header, L1 table and L2 tables.
    pub(crate) digest: u64,
    /// The sidecar's name: a sum of what it says and of its parent's name.
    pub(crate) id: u64,
    /// The name of the sidecar of the layer below; zero under the base.
    pub(crate) parent: u64,
    /// The map of the chain up to this layer.
    pub(crate) root: Root,
    /// Length of the whole sidecar in bytes.
    pub(crate) len: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U32,
    layer: U16,
    height: u8,
    reserved: u8,
    root: [u8; 8],
    len: U64,
    id: U64,
    parent: U64,
    digest: U64,
    layer_len: U64,
    device: U64,
    inode: U64,
    file_len: U64,
    mtime_ns: I64,
    ctime_ns: I64,
    sealed_ns: I64,
    padding: [u8; 140],
    /// CRC-32C of all bytes before.
    checksum: U32,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_BYTES);

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let raw = RawHeader {
            magic: MAGIC,
            version: VERSION.into(),
            layer: self.layer.into(),
            height: self.root.height,
            reserved: 0,
            root: NodeRef::to_le_bytes(self.root.node),
            len: self.len.into(),
            id: self.id.into(),
            parent: self.parent.into(),
            digest: self.digest.into(),
            layer_len: self.layer_len.into(),
            device: self.identity.device.into(),
            inode: self.identity.inode.into(),
            file_len: self.identity.len.into(),
            mtime_ns: ns_field(self.identity.mtime_ns),
            ctime_ns: ns_field(self.identity.ctime_ns),
            sealed_ns: ns_field(self.sealed_ns),
            padding: [0; 140],
            checksum: 0.into(),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The header in `bytes`; `None` if they are no header of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let raw = RawHeader::read_from_bytes(bytes.get(..HEADER_BYTES)?).ok()?;
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        let root = Root { node: NodeRef::from_le_bytes(raw.root), height: raw.height };
        let is_ours = raw.magic == MAGIC && raw.version == VERSION && raw.checksum == sum;
        // The map of layers 0..=k can lie in no sidecar above k's.
        let root_is_here = root.node.is_none_or(|node| node.file() <= raw.layer.get());
        if !is_ours || !root_is_here || raw.height > HEIGHT_MAX {
            return None;
        }
        Some(Self {
            layer: raw.layer.get(),
            layer_len: raw.layer_len.get(),
            identity: Identity {
                device: raw.device.get(),
                inode: raw.inode.get(),
                len: raw.file_len.get(),
                mtime_ns: raw.mtime_ns.get().into(),
                ctime_ns: raw.ctime_ns.get().into(),
            },
            sealed_ns: raw.sealed_ns.get().into(),
            digest: raw.digest.get(),
            id: raw.id.get(),
            parent: raw.parent.get(),
            root,
            len: raw.len.get(),
        })
    }

    /// Whether file and timestamps prove that the layer is unchanged, without reading it.
    ///
    /// A layer that was changed just before it was sealed could have been changed again within the
    /// same tick of its file system's clock: it has to prove itself by content.
    pub(crate) fn fits_unread(&self, now: &Identity) -> bool {
        let changed_ns = now.mtime_ns.max(now.ctime_ns);
        self.identity == *now && changed_ns.saturating_add(RACY_NS) < self.sealed_ns
    }

    /// The name of a sidecar with these contents.
    pub(crate) fn id_of(parent: u64, digest: u64, layer_len: u64, root: Root, nodes: &[u8]) -> u64 {
        let mut sum = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc64Nvme);
        sum.update(&parent.to_le_bytes());
        sum.update(&digest.to_le_bytes());
        sum.update(&layer_len.to_le_bytes());
        sum.update(&NodeRef::to_le_bytes(root.node));
        sum.update(&[root.height]);
        sum.update(nodes);
        // Zero means "no parent".
        sum.finalize().max(1)
    }
}

fn ns_field(ns: i128) -> I64 {
    // Years 1678 to 2262; a time beyond compares as changed, which is slower and right.
    i64::try_from(ns).unwrap_or(i64::MIN).into()
}

/// CRC-32C of `bytes`.
pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(sum).expect("a 32-bit sum")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let identity =
            Identity { device: 1, inode: 2, len: 3, mtime_ns: 4_000_000_000, ctime_ns: 5 };
        Header {
            layer: 7,
            layer_len: 1 << 30,
            identity,
            sealed_ns: 9_000_000_000,
            digest: 10,
            id: 11,
            parent: 12,
            root: Root { node: NodeRef::new(7, 256), height: 3 },
            len: 13,
        }
    }

    #[test]
    fn header_survives_its_encoding() {
        assert_eq!(Header::decode(&header().encode()), Some(header()));
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed() {
        let good = header().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn layer_changed_just_before_its_seal_is_not_trusted_unread() {
        let mut header = header();
        assert!(header.fits_unread(&header.identity));
        header.sealed_ns = header.identity.mtime_ns + RACY_NS;
        assert!(!header.fits_unread(&header.identity));
    }

    #[test]
    fn layer_with_another_ctime_is_not_trusted_unread() {
        let header = header();
        let identity = Identity { ctime_ns: 6, ..header.identity };
        assert!(!header.fits_unread(&identity));
    }
}
