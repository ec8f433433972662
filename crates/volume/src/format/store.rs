//! The object that says that a store has volumes, and which store it is.

use super::Id;
use super::frame::{Frame, Malformed};
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Length of the object.
pub(crate) const STORE_BYTES: usize = 512;

pub(crate) const MAGIC: [u8; 8] = *b"MICASTO\n";
pub(crate) const VERSION: u32 = 1;
const FRAME: Frame = Frame { magic: MAGIC, version: VERSION, len: STORE_BYTES };

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawStore {
    magic: [u8; 8],
    version: U32,
    reserved: [u8; 4],
    id: Id,
    padding: [u8; 476],
    /// CRC-32C of all bytes before this field.
    checksum: U32,
}

const _: () = assert!(size_of::<RawStore>() == STORE_BYTES);

/// The object of store `id`.
pub(crate) fn encode(id: Id) -> Vec<u8> {
    let raw = RawStore {
        magic: MAGIC,
        version: VERSION.into(),
        reserved: [0; 4],
        id,
        padding: [0; 476],
        checksum: 0.into(),
    };
    let mut bytes = raw.as_bytes().to_vec();
    FRAME.seal(&mut bytes);
    bytes
}

/// Which store has this object.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn decode(bytes: &[u8]) -> Result<Id, Malformed> {
    let framed = FRAME.open(bytes)?;
    let raw = RawStore::read_from_bytes(framed).map_err(|_| Malformed::Truncated)?;
    Ok(raw.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn store_survives_and_damage_is_found() {
        let good = encode([7; 16]);
        assert_eq!(decode(&good), Ok([7; 16]));
        for bit in 0..STORE_BYTES * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad).is_err(), "bit {bit}");
        }
    }
}
