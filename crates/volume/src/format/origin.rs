//! What a clone was made of: it may stand behind a head.
//!
//! docs/formats/head.md specifies it. Nothing depends on it: what is damaged, or of a newer
//! version, is as good as none.

use super::Id;
use super::frame::Frame;
use crate::names::VolumeName;
use mica_block::ObjectName;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) const ORIGIN_BYTES: usize = 256;

pub(crate) const ORIGIN_MAGIC: [u8; 8] = *b"MICAORG\n";
pub(crate) const ORIGIN_VERSION: u32 = 1;
const FRAME: Frame = Frame { magic: ORIGIN_MAGIC, version: ORIGIN_VERSION, len: ORIGIN_BYTES };

/// What a clone was made of. No volume ever gets another name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Origin {
    /// The source.
    pub volume: Id,
    /// Its name.
    pub name: VolumeName,
    /// The number of its snapshot; `None` if it is what the source itself had.
    pub snapshot: Option<u64>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct RawOrigin {
    pub(super) magic: [u8; 8],
    pub(super) version: U32,
    pub(super) has_snapshot: u8,
    pub(super) name_len: u8,
    pub(super) reserved: [u8; 2],
    pub(super) volume: Id,
    pub(super) snapshot: U64,
    pub(super) name: [u8; ObjectName::PART_LEN_MAX],
    pub(super) padding: [u8; 12],
    /// CRC-32C of all bytes before this field.
    pub(super) checksum: U32,
}

const _: () = assert!(size_of::<RawOrigin>() == ORIGIN_BYTES);

impl Origin {
    /// What stands behind a head.
    pub(super) fn encode(&self) -> Vec<u8> {
        let text = self.name.as_str().as_bytes();
        let mut name = [0; ObjectName::PART_LEN_MAX];
        name[..text.len()].copy_from_slice(text);
        let raw = RawOrigin {
            magic: ORIGIN_MAGIC,
            version: ORIGIN_VERSION.into(),
            has_snapshot: self.snapshot.is_some().into(),
            name_len: u8::try_from(text.len()).expect("at most PART_LEN_MAX bytes"),
            reserved: [0; 2],
            volume: self.volume,
            snapshot: self.snapshot.unwrap_or_default().into(),
            name,
            padding: [0; 12],
            checksum: 0.into(),
        };
        let mut bytes = raw.as_bytes().to_vec();
        FRAME.seal(&mut bytes);
        bytes
    }

    /// What `bytes`, which stand behind a head, begin with; `None` if that is nothing.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let raw = RawOrigin::read_from_bytes(FRAME.open(bytes).ok()?).ok()?;
        let name = std::str::from_utf8(raw.name.get(..raw.name_len.into())?).ok()?;
        let snapshot = match raw.has_snapshot {
            0 => None,
            1 => Some(raw.snapshot.get()),
            _ => return None,
        };
        Some(Self { volume: raw.volume, name: VolumeName::new(name).ok()?, snapshot })
    }

    /// Gives bytes the sum that they should have, if they are as long as this.
    pub(crate) fn mend(bytes: &mut [u8]) {
        if bytes.len() >= ORIGIN_BYTES {
            FRAME.seal(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin() -> Origin {
        let name = VolumeName::new("gold").expect("a name");
        Origin { volume: [7; 16], name, snapshot: Some(3) }
    }

    #[test]
    fn origin_survives() {
        let longest = VolumeName::new(&"g".repeat(ObjectName::PART_LEN_MAX)).expect("a name");
        for origin in [
            origin(),
            Origin { snapshot: None, ..origin() },
            Origin { snapshot: Some(u64::MAX), name: longest, ..origin() },
        ] {
            assert_eq!(Origin::decode(&origin.encode()), Some(origin));
        }
    }

    #[test]
    fn origin_that_is_damaged_or_newer_is_none() {
        let good = origin().encode();
        for bit in 0..ORIGIN_BYTES * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Origin::decode(&bad), None, "bit {bit}");
        }
        for len in 0..ORIGIN_BYTES {
            assert_eq!(Origin::decode(&good[..len]), None);
        }
        // A newer version, a snapshot that is neither there nor not, names that no volume has.
        for (at, byte) in [(8, 2), (12, 2), (13, 0), (13, 201), (40, b'/'), (40, 0xff)] {
            let mut bad = good.clone();
            bad[at] = byte;
            FRAME.seal(&mut bad);
            assert_eq!(Origin::decode(&bad), None, "byte {at}");
        }
    }
}
