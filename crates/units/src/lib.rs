//! Newtypes for addresses, counts and geometry. Internal crate.
//!
//! A guest offset and a host offset are both 64-bit numbers of bytes and are never the same thing:
//! the first is an address on the disk that a guest sees, the second an address in a file. Mixing
//! them is how disk engines serve a header as data, so here the compiler refuses it. The same holds
//! for the numbers of clusters on the disk and in a file.
//!
//! All arithmetic is checked: a sum that leaves 64 bits is `None`, or the highest value where its
//! method says so, never a wrapped address.

mod cluster;
mod random;
mod rng;

pub use cluster::{Cluster, ClusterBits, GuestCluster, HostCluster};
pub use random::{next_random, random_at};
pub use rng::Rng;
use std::fmt;

/// Bytes in a sector, the smallest unit in which any format of mica maps a disk.
pub const SECTOR_BYTES: u64 = 512;

macro_rules! offset_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(u64);

        impl $name {
            /// Offset zero.
            pub const ZERO: Self = Self(0);

            /// The address `bytes` bytes from the start.
            #[inline]
            pub const fn new(bytes: u64) -> Self {
                Self(bytes)
            }

            /// Bytes from the start.
            #[inline]
            pub const fn bytes(self) -> u64 {
                self.0
            }

            /// The address `len` bytes further on, or `None` where it leaves 64 bits.
            #[inline]
            pub fn checked_add(self, len: u64) -> Option<Self> {
                self.0.checked_add(len).map(Self)
            }

            /// Bytes from `base` to here, or `None` if `base` lies after.
            #[inline]
            pub fn checked_since(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// Whether the address is a multiple of `align`, a power of two.
            #[inline]
            pub fn is_aligned(self, align: u64) -> bool {
                debug_assert!(align.is_power_of_two());
                self.0 & (align - 1) == 0
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({:#x})", stringify!($name), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:#x}", self.0)
            }
        }
    };
}

offset_type! {
    /// An address on the disk that a guest sees, in bytes.
    GuestOffset
}

offset_type! {
    /// An address in a file of the host, in bytes.
    HostOffset
}

/// A run of bytes on the disk. Never wraps: `start + len` fits 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct GuestRange {
    start: GuestOffset,
    len: u64,
}

impl GuestRange {
    /// The `len` bytes from `start`, or `None` where the end leaves 64 bits.
    #[inline]
    pub fn new(start: GuestOffset, len: u64) -> Option<Self> {
        start.checked_add(len)?;
        Some(Self { start, len })
    }

    /// The bytes from `start` up to, not including, `end`; `None` if `end` lies before `start`.
    #[inline]
    pub fn between(start: GuestOffset, end: GuestOffset) -> Option<Self> {
        let len = end.checked_since(start)?;
        Some(Self { start, len })
    }

    /// The range without its first `count` bytes.
    ///
    /// # Panics
    /// If it has fewer.
    #[inline]
    #[must_use]
    pub fn after(self, count: u64) -> Self {
        let rest = self.start.checked_add(count).and_then(|at| Self::between(at, self.end()));
        rest.expect("at most the range's length")
    }

    /// First byte.
    #[inline]
    pub fn start(self) -> GuestOffset {
        self.start
    }

    /// Length in bytes.
    #[inline]
    pub fn len(self) -> u64 {
        self.len
    }

    /// Whether there is no byte in it.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// The byte after the last.
    #[inline]
    pub fn end(self) -> GuestOffset {
        GuestOffset(self.start.0 + self.len)
    }

    /// The part that lies in `other` too, or `None` if there is none.
    #[inline]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let start = self.start.max(other.start);
        let end = self.end().min(other.end());
        if start < end { Self::between(start, end) } else { None }
    }
}

/// By which an open chain knows a layer.
///
/// Layers that are opened together are numbered from the base, which is 0. A layer keeps its number
/// for as long as it is open, wherever others come and go.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct LayerNumber(u16);

impl LayerNumber {
    /// Layer 0.
    pub const BASE: Self = Self(0);
    /// Maximum number of layers that one chain may have.
    pub const COUNT_MAX: usize = 1 << 16;

    /// Layer `number`, or `None` beyond the most layers a chain may have.
    #[inline]
    pub fn new(number: usize) -> Option<Self> {
        u16::try_from(number).ok().map(Self)
    }

    /// Layer `number`.
    #[inline]
    pub const fn from_u16(number: u16) -> Self {
        Self(number)
    }

    /// The number, for use as an index into the layers of a chain.
    #[inline]
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The number.
    #[inline]
    pub const fn as_u16(self) -> u16 {
        self.0
    }
}

impl fmt::Debug for LayerNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_that_leaves_64_bits_is_refused() {
        assert!(GuestRange::new(GuestOffset::new(u64::MAX), 1).is_none());
        assert!(GuestRange::new(GuestOffset::new(u64::MAX), 0).is_some());
    }

    #[test]
    fn ranges_that_touch_do_not_intersect() {
        let range = |start, len| GuestRange::new(GuestOffset::new(start), len).expect("fits");
        assert_eq!(range(0, 10).intersect(range(10, 5)), None);
        assert_eq!(range(0, 10).intersect(range(4, 2)), Some(range(4, 2)));
    }
}
