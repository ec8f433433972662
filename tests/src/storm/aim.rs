//! Where on a disk something happens: anywhere, or where much already happens, at cluster borders
//! and across them.

use super::stamp::SECTOR;
use mica_units::Rng;
use std::ops::Range;

/// Sectors of the part where much happens.
const HOT_SECTORS: u64 = 1024;
const COUNTS: [u64; 14] = [1, 1, 1, 2, 7, 8, 8, 8, 16, 39, 64, 128, 256, 512];

/// What ranges are chosen by.
#[derive(Clone, Debug)]
pub(super) struct Aim {
    sectors: u64,
    cluster_sectors: u64,
    hot_at: u64,
}

impl Aim {
    /// On a disk of `sectors` sectors whose image has clusters of `cluster` bytes.
    pub(super) fn new(sectors: u64, cluster: u64, hot: u64) -> Self {
        let hot_at = hot % sectors.saturating_sub(HOT_SECTORS).max(1);
        Self { sectors, cluster_sectors: cluster / SECTOR as u64, hot_at }
    }

    /// A range for a write or a read.
    pub(super) fn narrow(&self, rng: &mut Rng) -> Range<u64> {
        let count = rng.choose(&COUNTS);
        self.place(rng, count)
    }

    /// A range for a large write.
    pub(super) fn long(&self, rng: &mut Rng) -> Range<u64> {
        let count = 64 + rng.below(960);
        let room = self.sectors.saturating_sub(count) + 1;
        let at = rng.below(room);
        at..(at + count).min(self.sectors)
    }

    /// A range of any length.
    pub(super) fn wide(&self, rng: &mut Rng) -> Range<u64> {
        let count = match rng.below(10) {
            0 => self.sectors,
            1..4 => self.cluster_sectors * (1 + rng.below(8)),
            _ => 1 + rng.below(4096),
        };
        self.place(rng, count)
    }

    fn place(&self, rng: &mut Rng, count: u64) -> Range<u64> {
        let count = count.clamp(1, self.sectors);
        let room = self.sectors - count + 1;
        let at = match rng.percent(50) {
            true => (self.hot_at + rng.below(HOT_SECTORS)).min(room - 1),
            false => rng.below(room),
        };
        let is_aligned = rng.percent(30);
        let at = if is_aligned { at / self.cluster_sectors * self.cluster_sectors } else { at };
        let ends_well = is_aligned && count > self.cluster_sectors;
        let count =
            if ends_well { count / self.cluster_sectors * self.cluster_sectors } else { count };
        at..at + count
    }

    /// A range of whole clusters that begins at or after sector `from`.
    pub(super) fn clusters(&self, rng: &mut Rng, from: u64) -> Option<Range<u64>> {
        let first = from.div_ceil(self.cluster_sectors) + rng.below(4);
        let end = first + 1 + rng.below(3);
        let range = first * self.cluster_sectors..end * self.cluster_sectors;
        (range.end <= self.sectors).then_some(range)
    }
}
