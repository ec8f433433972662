//! The sidecar of a frozen layer: the nodes of the map that the layer changed, under a seal.
//!
//! ```text
//! 0        256                                        len
//! +--------+----------+----------+- - -+--------------+
//! | header | slice    | slice    |     | directories  |     nodes as crate map has them
//! +--------+----------+----------+- - -+--------------+
//! ```
//!
//! The map in layer k's sidecar covers layers 0..=k. Its nodes name nodes in this file and in the
//! sidecars of layers below, by layer number. docs/formats/sidecar.md specifies the format.
//!
//! Invariants
//! - I1 A sidecar is derived data: without it everything is slower once, and nothing is wrong.
//! - I2 It is trusted only under its seal: the layer is the file that was indexed, unchanged
//!   ([`Header::fits_unread`], or by content: [`Header::digest`]), and the sidecar below is the one
//!   that it was built on ([`Header::parent`]). Digest and names are collision-resistant even
//!   against the owner of a layer.
//! - I3 It is written whole and put in place by a rename, and every node has a checksum; so a
//!   half-written or damaged one is noticed, and rebuilt.

use super::Root;
use super::node_ref::NodeRef;
use super::tables::TablesDigest;
use mica_block::{Identity, SealState};
use mica_map::{HEIGHT_MAX, crc32c};
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size of the header.
pub(crate) const HEADER_BYTES: usize = 256;

pub(crate) const MAGIC: [u8; 8] = *b"MICAIDX\n";
/// Files of other versions are not sidecars: they are rebuilt.
pub(crate) const VERSION: u32 = 2;

/// Separates the names of sidecars from everything else that is digested.
const CONTEXT: &str = "mica sidecar 2: name of a sidecar";

/// The name of a sidecar: a digest of its contents and of its parent's name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct SidecarId([u8; 32]);

impl SidecarId {
    /// As encoded in a header. Zeros are not a name: nobody can create a sidecar that has it.
    fn to_bytes(this: Option<Self>) -> [u8; 32] {
        this.map_or([0; 32], |id| id.0)
    }

    fn from_bytes(bytes: [u8; 32]) -> Option<Self> {
        (bytes != [0; 32]).then_some(Self(bytes))
    }
}

/// The header of a sidecar, decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Header {
    /// Number of the layer in its chain.
    pub(crate) layer: u16,
    /// Bytes of the disk that the layer covers.
    pub(crate) layer_len: u64,
    /// The layer's file when it was sealed.
    pub(crate) identity: Identity,
    /// When it was sealed, by the clock that stamps files.
    pub(crate) sealed_ns: i128,
    /// Of the layer's header, L1 table and L2 tables.
    pub(crate) digest: TablesDigest,
    /// The sidecar's name.
    pub(crate) id: SidecarId,
    /// The name of the sidecar of the layer below; `None` for the base.
    pub(crate) parent: Option<SidecarId>,
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
    layer_len: U64,
    device: U64,
    inode: U64,
    file_len: U64,
    mtime_ns: I64,
    ctime_ns: I64,
    sealed_ns: I64,
    id: [u8; 32],
    parent: [u8; 32],
    digest: [u8; 32],
    padding: [u8; 68],
    /// CRC-32C of all bytes before this field.
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
            id: self.id.0,
            parent: SidecarId::to_bytes(self.parent),
            digest: *self.digest.as_bytes(),
            layer_len: self.layer_len.into(),
            device: self.identity.device.into(),
            inode: self.identity.inode.into(),
            file_len: self.identity.len.into(),
            mtime_ns: ns_field(self.identity.mtime_ns),
            ctime_ns: ns_field(self.identity.ctime_ns),
            sealed_ns: ns_field(self.sealed_ns),
            padding: [0; 68],
            checksum: 0.into(),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(raw.as_bytes());
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the header in `bytes`; `None` if it is not one of this version.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let raw = RawHeader::read_from_bytes(bytes.get(..HEADER_BYTES)?).ok()?;
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        let root = Root { node: NodeRef::from_le_bytes(raw.root), height: raw.height };
        let is_ours = raw.magic == MAGIC && raw.version == VERSION && raw.checksum == sum;
        // The map of layers 0..=k cannot lie in a sidecar above k's.
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
            digest: TablesDigest::from_bytes(raw.digest),
            id: SidecarId::from_bytes(raw.id)?,
            parent: SidecarId::from_bytes(raw.parent),
            root,
            len: raw.len.get(),
        })
    }

    /// Whether file and timestamps prove that the layer is unchanged, without reading it.
    ///
    /// A layer that was changed just before it was sealed could have been changed again within the
    /// same tick of its file system's clock: it has to be verified by content.
    pub(crate) fn fits_unread(&self, now: &Identity) -> bool {
        self.identity == *now && now.proves_unchanged_since(self.sealed_ns)
    }

    /// The state of this seal for the layer at `position`, which covers `layer_len` bytes of the
    /// disk, is in the file `now`, and stands on one whose sidecar is `parent`.
    pub(crate) fn state(
        &self,
        (position, layer_len): (usize, u64),
        now: &Identity,
        parent: Option<SidecarId>,
    ) -> SealState {
        let fits = usize::from(self.layer) == position
            && self.layer_len == layer_len
            && self.parent == parent
            && (position == 0 || parent.is_some());
        if !fits {
            SealState::Stale
        } else if self.fits_unread(now) {
            SealState::Sealed
        } else if self.identity.len == now.len {
            SealState::Unproven
        } else {
            SealState::Stale
        }
    }

    /// The name that stands for the sidecar of a raw base of `len` bytes, which has none.
    pub(crate) fn id_of_raw_base(len: u64) -> SidecarId {
        Self::id_of(None, None, len, Root::default(), &[])
    }

    /// The name of a sidecar with these contents; without tables if the layer is raw.
    pub(crate) fn id_of(
        parent: Option<SidecarId>,
        digest: Option<TablesDigest>,
        layer_len: u64,
        root: Root,
        nodes: &[u8],
    ) -> SidecarId {
        let mut name = blake3::Hasher::new_derive_key(CONTEXT);
        name.update(&SidecarId::to_bytes(parent));
        name.update(digest.as_ref().map_or(&[0; 32][..], |digest| digest.as_bytes()));
        name.update(&layer_len.to_le_bytes());
        name.update(&NodeRef::to_le_bytes(root.node));
        name.update(&[root.height]);
        name.update(nodes);
        SidecarId(*name.finalize().as_bytes())
    }
}

fn ns_field(ns: i128) -> I64 {
    // Years 1678 to 2262; a time outside them compares as changed, which is slower but correct.
    i64::try_from(ns).unwrap_or(i64::MIN).into()
}

#[cfg(test)]
mod page;

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let identity =
            Identity { device: 1, inode: 2, len: 3, mtime_ns: 4_000_000_000, ctime_ns: 5 };
        let digest = TablesDigest::from_bytes([10; 32]);
        Header {
            layer: 7,
            layer_len: 1 << 30,
            identity,
            sealed_ns: 9_000_000_000,
            digest,
            id: SidecarId([11; 32]),
            parent: Some(SidecarId([12; 32])),
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
        header.sealed_ns = header.identity.mtime_ns + 1_000_000_000;
        assert!(!header.fits_unread(&header.identity));
    }

    /// FAT has stamps of two seconds, and only one second passed.
    #[test]
    fn layer_with_stamps_of_two_seconds_is_not_trusted_unread_two_seconds_after() {
        let mut header = header();
        (header.identity.mtime_ns, header.identity.ctime_ns) = (4_000_000_000, 4_000_000_000);
        header.sealed_ns = 5_900_000_000;
        assert!(!header.fits_unread(&header.identity));
    }

    /// A value outside the field means no stamps at all, and equals none.
    #[test]
    fn layer_without_stamps_is_never_trusted_unread() {
        let mut header = header();
        header.identity.ctime_ns = i128::MAX;
        let read = Header::decode(&header.encode()).expect("a header");
        assert!(!read.fits_unread(&header.identity));
    }

    #[test]
    fn name_of_a_sidecar_follows_from_all_that_it_says() {
        let name = |parent, digest, len, root, nodes: &[u8]| {
            Header::id_of(parent, digest, len, root, nodes)
        };
        let [a, b] = [1, 2].map(|byte| TablesDigest::from_bytes([byte; 32]));
        let parent = Some(SidecarId([3; 32]));
        let root = Root { node: NodeRef::new(0, 256), height: 1 };
        let names = [
            name(None, None, 5, root, b"nodes"),
            name(parent, None, 5, root, b"nodes"),
            name(None, Some(a), 5, root, b"nodes"),
            name(None, Some(b), 5, root, b"nodes"),
            name(None, Some(a), 6, root, b"nodes"),
            name(None, Some(a), 5, Root::default(), b"nodes"),
            name(None, Some(a), 5, root, b"other"),
        ];
        for (index, name) in names.iter().enumerate() {
            assert!(!names[..index].contains(name), "{index}");
        }
    }

    #[test]
    fn layer_with_another_ctime_is_not_trusted_unread() {
        let header = header();
        let identity = Identity { ctime_ns: 6, ..header.identity };
        assert!(!header.fits_unread(&identity));
    }
}
