//! What the device says of itself: features, and the configuration space (virtio 1.3, section
//! 5.2.4).

use super::request::{RANGE_SECTORS_MAX, RANGES_MAX};
use mica_block::Geometry;
use mica_units::SECTOR_BYTES;

/// VIRTIO_BLK_F_SEG_MAX and its kin, by the number of their bit.
const F_SEG_MAX: u32 = 2;
const F_RO: u32 = 5;
const F_BLK_SIZE: u32 = 6;
pub(super) const F_FLUSH: u32 = 9;
const F_TOPOLOGY: u32 = 10;
const F_MQ: u32 = 12;
const F_DISCARD: u32 = 13;
const F_WRITE_ZEROES: u32 = 14;
/// VHOST_F_LOG_ALL.
pub(super) const F_LOG_ALL: u32 = 26;
const F_RING_INDIRECT_DESC: u32 = 28;
pub(super) const F_RING_EVENT_IDX: u32 = 29;
/// VHOST_USER_F_PROTOCOL_FEATURES.
pub(super) const F_PROTOCOL_FEATURES: u32 = 30;
const F_VERSION_1: u32 = 32;

/// Descriptors of data in one request at most; the header and the status take two of 128.
const SEG_MAX: u32 = 126;

/// Bytes of the configuration space, up to what secure erase would need.
pub(super) const CONFIG_BYTES: usize = 60;

/// The features that are offered.
pub(super) fn features(is_writable: bool) -> u64 {
    let always = [
        F_SEG_MAX,
        F_BLK_SIZE,
        F_FLUSH,
        F_TOPOLOGY,
        F_MQ,
        F_LOG_ALL,
        F_RING_INDIRECT_DESC,
        F_RING_EVENT_IDX,
        F_PROTOCOL_FEATURES,
        F_VERSION_1,
    ];
    let by_mode: &[u32] = if is_writable { &[F_DISCARD, F_WRITE_ZEROES] } else { &[F_RO] };
    always.iter().chain(by_mode).fold(0, |all, bit| all | 1 << bit)
}

/// Whether `bit` is in `features`.
pub(super) fn has(features: u64, bit: u32) -> bool {
    features >> bit & 1 == 1
}

/// The configuration space of a disk of this `geometry`.
pub(super) fn space(geometry: Geometry, queues: u16) -> [u8; CONFIG_BYTES] {
    let mut space = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    let sectors = |bytes: u64| u32::try_from(bytes / SECTOR_BYTES).unwrap_or(u32::MAX);
    let unit = u64::from(geometry.preferred_bytes).max(SECTOR_BYTES);
    let range_sectors = RANGE_SECTORS_MAX.to_le_bytes();
    put(0, &(geometry.len / SECTOR_BYTES).to_le_bytes());
    put(12, &SEG_MAX.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    // A physical block is 4 KiB where the disk is whole in such.
    let physical_exponent = if geometry.len.is_multiple_of(4096) { 3 } else { 0 };
    put(24, &[physical_exponent, 0]);
    put(26, &1_u16.to_le_bytes());
    put(28, &sectors(unit).to_le_bytes());
    // A write cache: what is written is durable after a flush. For drivers without flushes there is
    // none, and they do not read this: it goes with a feature that is not offered.
    put(32, &[1]);
    put(34, &queues.to_le_bytes());
    put(36, &range_sectors);
    put(40, &RANGES_MAX.to_le_bytes());
    put(44, &sectors(unit).to_le_bytes());
    put(48, &range_sectors);
    put(52, &RANGES_MAX.to_le_bytes());
    put(56, &[1]);
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn space_stands_as_the_specification_has_it() {
        let space = space(Geometry { len: 3 << 30, preferred_bytes: 65_536 }, 4);
        assert_eq!(space[..8], (6_u64 << 20).to_le_bytes());
        assert_eq!(space[12..16], 126_u32.to_le_bytes());
        assert_eq!(space[20..24], 512_u32.to_le_bytes());
        assert_eq!(space[34..36], 4_u16.to_le_bytes());
        assert_eq!(space[44..48], 128_u32.to_le_bytes(), "discards in clusters");
        assert_eq!(space[56], 1);
    }

    #[test]
    fn disk_that_is_only_read_says_so() {
        assert!(has(features(false), F_RO) && !has(features(false), F_DISCARD));
        assert!(!has(features(true), F_RO) && has(features(true), F_WRITE_ZEROES));
    }
}
