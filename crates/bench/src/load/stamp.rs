//! Content that says where it belongs and which writer wrote it, so that any sector can be verified
//! alone.

use mica_gen::Rng;
use std::sync::OnceLock;

/// Bytes that are stamped individually.
const SECTOR_BYTES: usize = 512;
/// Bytes of a stamp: offset and generation.
const STAMP_BYTES: usize = 16;

/// Fills `room`, which will be at `offset`, with what `generation` writes there.
pub(crate) fn fill(room: &mut [u8], offset: u64, generation: u64) {
    for sector in room.chunks_mut(SECTOR_BYTES) {
        if let Some(rest) = sector.get_mut(STAMP_BYTES..) {
            rest.copy_from_slice(&filler()[..rest.len()]);
        }
    }
    stamp(room, offset, generation);
}

/// Stamps `room`, which [`fill`] has filled before for any place and generation.
pub(crate) fn stamp(room: &mut [u8], offset: u64, generation: u64) {
    for (sector, at) in room.chunks_mut(SECTOR_BYTES).zip((offset..).step_by(SECTOR_BYTES)) {
        if let Some(stamp) = sector.get_mut(..STAMP_BYTES) {
            stamp[..8].copy_from_slice(&at.to_le_bytes());
            stamp[8..].copy_from_slice(&generation.to_le_bytes());
        }
    }
}

/// The offset of the first sector of `bytes`, read at `offset`, that is not as `generation` wrote
/// it.
pub(crate) fn first_wrong(bytes: &[u8], offset: u64, generation: u64) -> Option<u64> {
    let mut sectors = bytes.chunks(SECTOR_BYTES).zip((offset..).step_by(SECTOR_BYTES));
    let right = |sector: &[u8], at: u64| {
        let stamp = [at.to_le_bytes(), generation.to_le_bytes()].concat();
        sector.starts_with(&stamp) && filler().starts_with(&sector[STAMP_BYTES..])
    };
    sectors.find(|&(sector, at)| !right(sector, at)).map(|(_, at)| at)
}

/// Bytes that no layer of storage makes smaller within a block.
fn filler() -> &'static [u8] {
    static FILLER: OnceLock<Vec<u8>> = OnceLock::new();
    FILLER.get_or_init(|| {
        let mut rng = Rng::new(11);
        (0..SECTOR_BYTES / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::{fill, first_wrong, stamp};

    #[test]
    fn a_stamp_knows_its_place_and_its_writer() {
        let mut room = vec![0; 4096];
        fill(&mut room, 8192, 3);
        assert_eq!(first_wrong(&room, 8192, 3), None);
        assert_eq!(first_wrong(&room, 4096, 3), Some(4096), "another place");
        assert_eq!(first_wrong(&room, 8192, 2), Some(8192), "another writer");
        room[1024 + 100] ^= 1;
        assert_eq!(first_wrong(&room, 8192, 3), Some(8192 + 1024), "a damaged sector");
        room[1024 + 100] ^= 1;
        stamp(&mut room, 0, 4);
        assert_eq!(first_wrong(&room, 0, 4), None);
    }
}
