//! What of a piece is stored: its bytes, or fewer if they are compressed.

use crate::format::{Malformed, Piece};
use mica_block::{Error, Result};
use mica_map::crc32c;
use mica_rt::Buf;
use zstd::bulk::{Compressor, Decompressor};

/// Whether what is stored is compressed.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Packing {
    /// As it is.
    #[default]
    Plain,
    /// With zstd, piece by piece, where that saves something.
    Zstd,
}

/// The level of zstd: compressing keeps up with most devices.
const LEVEL: i32 = 3;

/// Makes pieces of data.
pub(crate) struct Packer(Option<Compressor<'static>>);

impl Packer {
    /// # Errors
    /// If there is no memory for it.
    pub(crate) fn new(packing: Packing) -> Result<Self> {
        let failed = |error| Error::from_io("starting to compress", error);
        Ok(Self(match packing {
            Packing::Plain => None,
            Packing::Zstd => Some(Compressor::new(LEVEL).map_err(failed)?),
        }))
    }

    /// The piece that begins at `start` and has `bytes`, and what is stored of it, if that is
    /// something else.
    pub(crate) fn pack(&mut self, start: u64, bytes: &[u8]) -> Result<(Piece, Option<Vec<u8>>)> {
        let failed = |error| Error::from_io("compressing", error);
        let packed = self.0.as_mut().map(|zstd| zstd.compress(bytes)).transpose();
        let packed = packed.map_err(failed)?.filter(|packed| packed.len() < bytes.len() / 16 * 15);
        let stored = packed.as_deref().unwrap_or(bytes).len();
        let stored = u32::try_from(stored).expect("a piece");
        let piece = Piece { start, len: bytes.len() as u64, stored, sum: crc32c(bytes) };
        Ok((piece, packed))
    }
}

/// The bytes of `piece`, of which `stored` is stored. Nothing of it is believed before its sum was
/// compared, and it gets no more memory than it says.
pub(crate) fn unpack(piece: &Piece, stored: Buf) -> std::result::Result<Buf, Malformed> {
    let bytes = match piece.is_packed() {
        false => stored,
        true => {
            let len = usize::try_from(piece.len).expect("a piece is bounded");
            let mut bytes = Buf::new(len);
            let zstd = Decompressor::new();
            let unpacked =
                zstd.and_then(|mut zstd| zstd.decompress_to_buffer(&stored, bytes.own_bytes()));
            if unpacked.ok() != Some(len) {
                return Err(Malformed::Content);
            }
            bytes
        }
    };
    if crc32c(&bytes) == piece.sum { Ok(bytes) } else { Err(Malformed::Checksum) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_is_unpacked_and_damage_is_noticed() {
        let even = vec![3; 1 << 20];
        let mut rng = mica_units::Rng::new(1);
        let noise: Vec<u8> = (0..8192).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
        let mut packer = Packer::new(Packing::Zstd).unwrap();
        let (piece, packed) = packer.pack(4096, &even).unwrap();
        let packed = packed.expect("it saves something");
        assert!(piece.is_packed() && piece.end() == 4096 + (1 << 20));
        assert_eq!(&*unpack(&piece, Buf::from_slice(&packed)).unwrap(), even);
        for at in 0..packed.len() {
            let mut bad = packed.clone();
            bad[at] ^= 1;
            // A bit that says nothing is none of the bytes.
            if let Ok(bytes) = unpack(&piece, Buf::from_slice(&bad)) {
                assert_eq!(&*bytes, even);
            }
        }
        let (piece, packed) = packer.pack(0, &noise).unwrap();
        assert!(packed.is_none() && !piece.is_packed());
        let mut bad = Buf::from_slice(&noise);
        bad.own_bytes()[7] ^= 1;
        assert_eq!(unpack(&piece, bad).err(), Some(Malformed::Checksum));
        // More than it says.
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
        let stored = u32::try_from(bomb.len()).unwrap();
        let piece = Piece { start: 0, len: 1 << 20, stored, sum: 0 };
        assert_eq!(unpack(&piece, Buf::from_slice(&bomb)).err(), Some(Malformed::Content));
    }
}
