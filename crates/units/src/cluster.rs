//! Numbers of clusters, and the size of a cluster, which turns them into addresses and back.

use crate::{GuestOffset, GuestRange, HostOffset};
use std::fmt;

/// A number of a cluster: [`GuestCluster`] or [`HostCluster`].
pub trait Cluster: Copy + sealed::Sealed {
    /// An address where such clusters are.
    type Offset;

    #[doc(hidden)]
    fn start_in(self, bits: ClusterBits) -> Self::Offset;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! cluster_type {
    ($(#[$doc:meta])* $name:ident at $offset:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(u64);

        impl $name {
            /// Cluster 0.
            pub const ZERO: Self = Self(0);

            /// Cluster `number`, counted from 0.
            #[inline]
            pub const fn new(number: u64) -> Self {
                Self(number)
            }

            /// The number, counted from 0.
            #[inline]
            pub const fn number(self) -> u64 {
                self.0
            }

            /// The cluster `count` clusters further on; the highest number where that leaves 64
            /// bits.
            #[inline]
            pub const fn saturating_add(self, count: u64) -> Self {
                Self(self.0.saturating_add(count))
            }

            /// Clusters from `base` to here, or `None` if `base` lies after.
            #[inline]
            pub const fn checked_since(self, base: Self) -> Option<u64> {
                self.0.checked_sub(base.0)
            }

            /// Clusters from `base` to here; 0 if `base` lies after.
            #[inline]
            pub const fn saturating_since(self, base: Self) -> u64 {
                self.0.saturating_sub(base.0)
            }

            /// This cluster and those after it up to, not including, `end`.
            #[inline]
            pub fn up_to(self, end: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
                (self.0..end.0).map(Self)
            }

            /// This cluster and those after it up to, and including, `last`.
            #[inline]
            pub fn through(self, last: Self) -> impl DoubleEndedIterator<Item = Self> + Clone {
                (self.0..=last.0).map(Self)
            }
        }

        impl sealed::Sealed for $name {}

        impl Cluster for $name {
            type Offset = $offset;

            #[inline]
            fn start_in(self, bits: ClusterBits) -> $offset {
                $offset::new(bits.bytes_before(self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({})", stringify!($name), self.0)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

cluster_type! {
    /// A number of a cluster on the disk that a guest sees.
    GuestCluster at GuestOffset
}

cluster_type! {
    /// A number of a cluster in a file of the host.
    HostCluster at HostOffset
}

/// A cluster size as a power of two, within what qcow2 allows: 512 B to 2 MiB.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ClusterBits(u8);

impl ClusterBits {
    /// Least value of the qcow2 header field.
    pub const MIN: u32 = 9;
    /// Largest value that QEMU and mica accept.
    pub const MAX: u32 = 21;

    /// Checks `bits` against [`Self::MIN`] and [`Self::MAX`].
    pub fn new(bits: u32) -> Option<Self> {
        if (Self::MIN..=Self::MAX).contains(&bits) {
            u8::try_from(bits).ok().map(Self)
        } else {
            None
        }
    }

    /// The exponent.
    #[inline]
    pub const fn bits(self) -> u32 {
        self.0 as u32
    }

    /// Bytes in a cluster.
    #[inline]
    pub const fn bytes(self) -> u64 {
        1 << self.0
    }

    /// Bytes in `count` clusters; the highest number where that leaves 64 bits.
    #[inline]
    pub const fn bytes_of(self, count: u64) -> u64 {
        count.saturating_mul(self.bytes())
    }

    /// Bytes of `offset` past the start of its cluster.
    #[inline]
    pub const fn offset_within(self, offset: u64) -> u64 {
        offset & (self.bytes() - 1)
    }

    /// Clusters needed for `bytes` bytes.
    #[inline]
    pub const fn clusters_for(self, bytes: u64) -> u64 {
        bytes.div_ceil(self.bytes())
    }

    /// The cluster of the disk that holds the byte at `at`.
    #[inline]
    pub const fn guest_cluster(self, at: GuestOffset) -> GuestCluster {
        GuestCluster(at.bytes() >> self.0)
    }

    /// The cluster of the file that holds the byte at `at`.
    #[inline]
    pub const fn host_cluster(self, at: HostOffset) -> HostCluster {
        HostCluster(at.bytes() >> self.0)
    }

    /// The first cluster of the disk that starts at `at` or after it: where a range that ends at
    /// `at` has its end.
    #[inline]
    pub const fn guest_cluster_up(self, at: GuestOffset) -> GuestCluster {
        GuestCluster(self.clusters_for(at.bytes()))
    }

    /// The first cluster of the file that starts at `at` or after it: where a range that ends at
    /// `at` has its end.
    #[inline]
    pub const fn host_cluster_up(self, at: HostOffset) -> HostCluster {
        HostCluster(self.clusters_for(at.bytes()))
    }

    /// The first byte of `cluster`. All clusters beyond 64 bits of bytes start where the last one
    /// within them does, which is beyond the end of any disk and any file.
    #[inline]
    pub fn start_of<C: Cluster>(self, cluster: C) -> C::Offset {
        cluster.start_in(self)
    }

    /// The bytes of `cluster`, or `None` where the end leaves 64 bits.
    #[inline]
    pub fn range_of(self, cluster: GuestCluster) -> Option<GuestRange> {
        GuestRange::new(GuestOffset::new(cluster.0.checked_mul(self.bytes())?), self.bytes())
    }

    const fn bytes_before(self, number: u64) -> u64 {
        let last = u64::MAX >> self.0;
        (if number < last { number } else { last }) << self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(bits: u32) -> ClusterBits {
        ClusterBits::new(bits).expect("valid")
    }

    #[test]
    fn cluster_bits_outside_the_format_are_refused() {
        assert!(ClusterBits::new(8).is_none());
        assert!(ClusterBits::new(22).is_none());
        assert_eq!(ClusterBits::new(16).map(ClusterBits::bytes), Some(65536));
    }

    #[test]
    fn addresses_become_clusters_and_back() {
        let bits = bits(16);
        let (host, guest) = (HostOffset::new(0x2_ffff), GuestOffset::new(0x2_0000));
        assert_eq!(bits.host_cluster(host), HostCluster::new(2));
        assert_eq!(bits.host_cluster_up(host), HostCluster::new(3));
        assert_eq!(bits.guest_cluster(guest), GuestCluster::new(2));
        assert_eq!(bits.guest_cluster_up(guest), GuestCluster::new(2));
        assert_eq!(bits.start_of(HostCluster::new(2)), HostOffset::new(0x2_0000));
        assert_eq!(bits.start_of(GuestCluster::new(2)), guest);
        assert_eq!(bits.range_of(GuestCluster::new(2)), GuestRange::new(guest, 0x1_0000));
        assert_eq!(bits.bytes_of(3), 0x3_0000);
    }

    #[test]
    fn clusters_beyond_64_bits_have_no_wrapped_address() {
        for bits in [bits(ClusterBits::MIN), bits(ClusterBits::MAX)] {
            let last = bits.host_cluster(HostOffset::new(u64::MAX));
            let start = HostOffset::new(u64::MAX - bits.bytes() + 1);
            assert_eq!(bits.start_of(last), start);
            assert_eq!(bits.start_of(last.saturating_add(1)), start);
            assert_eq!(bits.start_of(HostCluster::new(u64::MAX)), start);
            assert_eq!(bits.range_of(GuestCluster::new(last.number())), None);
            assert_eq!(bits.range_of(GuestCluster::new(u64::MAX)), None);
            assert_eq!(bits.bytes_of(u64::MAX), u64::MAX);
        }
        let highest = HostCluster::new(u64::MAX);
        assert_eq!(highest.saturating_add(1), highest);
    }

    #[test]
    fn runs_of_clusters_end_where_they_say() {
        let [two, four] = [2, 4].map(HostCluster::new);
        assert_eq!(two.up_to(four).map(HostCluster::number).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(two.through(four).map(HostCluster::number).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(four.up_to(two).count() + four.through(two).count(), 0);
        assert_eq!((four.checked_since(two), two.checked_since(four)), (Some(2), None));
        assert_eq!((four.saturating_since(two), two.saturating_since(four)), (2, 0));
    }
}
