//! Where the bytes of a guest range are, as a plain value.

use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber};

/// What is at an extent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ExtentKind {
    /// No layer holds anything here: reads as zeros. The layer is the one that ends the search:
    /// the base, or the layer above one that is too short to reach here.
    Hole,
    /// A hole within a cluster that the layer has for other subclusters. Reported only by
    /// [`Disk::survey`](crate::Disk::survey).
    HoleInCluster,
    /// The layer says that these bytes are zeros and has no cluster for them.
    Zero,
    /// The layer says that these bytes are zeros and keeps a cluster for them.
    ZeroAllocated,
    /// The bytes are in the layer's data file at the extent's host offset.
    Data,
    /// The layer has a cluster for these bytes, and its file has a hole there: reads as zeros.
    /// Reported only by [`Disk::survey`](crate::Disk::survey).
    DataInHole,
    /// The bytes are in the layer, encoded (compressed): only its format can read them.
    Encoded,
}

impl ExtentKind {
    /// Whether some layer determines it: data, or that it is zeros.
    #[inline]
    pub fn is_present(self) -> bool {
        !matches!(self, Self::Hole | Self::HoleInCluster)
    }

    /// Whether reading gives zeros without any I/O.
    #[inline]
    pub fn reads_as_zero(self) -> bool {
        !matches!(self, Self::Data | Self::Encoded)
    }

    /// Whether [`Extent::host`] is meaningful.
    #[inline]
    pub fn has_host(self) -> bool {
        matches!(self, Self::Data | Self::DataInHole | Self::ZeroAllocated | Self::HoleInCluster)
    }
}

/// A run of guest bytes that are in one place.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// First byte on the disk.
    pub start: GuestOffset,
    /// Length in bytes; never zero in a plan.
    pub len: u64,
    /// What is there.
    pub kind: ExtentKind,
    /// The layer that owns it.
    pub layer: LayerNumber,
    /// Where its first byte is, for kinds that have a place; otherwise zero.
    pub host: HostOffset,
}

impl Extent {
    /// Bytes of a disk that has one layer and no file behind it.
    #[inline]
    pub fn unplaced(range: GuestRange, kind: ExtentKind) -> Self {
        let (start, len) = (range.start(), range.len());
        Self { start, len, kind, layer: LayerNumber::BASE, host: HostOffset::ZERO }
    }

    /// The guest bytes that it covers.
    ///
    /// # Panics
    /// If it was made by hand and its end exceeds 64 bits.
    #[inline]
    pub fn range(&self) -> GuestRange {
        GuestRange::new(self.start, self.len).expect("an extent ends within the disk")
    }

    /// The part that is in `range`, or `None` if there is none.
    #[inline]
    pub fn within(&self, range: GuestRange) -> Option<Self> {
        let part = self.range().intersect(range)?;
        let skipped = part.start().bytes() - self.start.bytes();
        let host =
            if self.kind.has_host() { self.host.checked_add(skipped)? } else { HostOffset::ZERO };
        Some(Self { start: part.start(), len: part.len(), host, ..*self })
    }

    /// Whether `next` continues where this one ends, in the guest and in the host.
    #[inline]
    pub fn continues_into(&self, next: &Self) -> bool {
        self.kind == next.kind
            && self.layer == next.layer
            && self.start.checked_add(self.len) == Some(next.start)
            && (!self.kind.has_host() || self.host.checked_add(self.len) == Some(next.host))
    }

    /// Total bytes of a plan.
    #[inline]
    pub fn total_len(plan: &[Self]) -> u64 {
        plan.iter().map(|extent| extent.len).sum()
    }

    /// Whether `plan` covers `range`: in order, without a gap, and exactly.
    pub fn covers(plan: &[Self], range: GuestRange) -> bool {
        let end = plan.iter().try_fold(range.start(), |at, extent| {
            (extent.start == at && extent.len > 0).then(|| at.checked_add(extent.len)).flatten()
        });
        end == Some(range.end())
    }

    /// Appends `next` to a plan, joined to its last extent if it continues that one.
    #[inline]
    pub fn push_joined(plan: &mut Vec<Self>, next: Self) {
        match plan.last_mut() {
            Some(last) if last.continues_into(&next) => last.len += next.len,
            _ => plan.push(next),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(start: u64, len: u64) -> Extent {
        let range = GuestRange::new(GuestOffset::new(start), len).expect("small");
        Extent::unplaced(range, ExtentKind::Data)
    }

    #[test]
    fn plan_with_a_gap_or_too_short_does_not_cover() {
        let range = GuestRange::new(GuestOffset::ZERO, 1024).expect("fits");
        assert!(Extent::covers(&[extent(0, 512), extent(512, 512)], range));
        assert!(!Extent::covers(&[extent(0, 512)], range));
        assert!(!Extent::covers(&[extent(0, 512), extent(513, 511)], range));
        assert!(!Extent::covers(&[extent(0, 1024), extent(1024, 512)], range));
    }
}
