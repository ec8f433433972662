//! What a generated chain should be like.

use mica_block::{Error, ErrorKind, Result};
use mica_units::{ClusterBits, LayerNumber, SECTOR_BYTES};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// The description of a chain. The same spec makes the same chain, byte for byte.
#[derive(Clone, PartialEq, Debug)]
pub struct ChainSpec {
    /// Folder for the layers; created if missing.
    pub dir: PathBuf,
    /// Number of layers, the active one included.
    pub layers: u32,
    /// Length of the disk in bytes.
    pub disk_bytes: u64,
    /// Bytes in a cluster, unless [`Feature::ClusterSizes`] says otherwise.
    pub cluster_bytes: u64,
    /// Part of the disk's clusters that some layer owns, 0.0 to 1.0.
    pub fill: f64,
    /// Which layers own them.
    pub distribution: Distribution,
    /// Seed of everything random.
    pub seed: u64,
    /// What is mixed in.
    pub features: Features,
    /// Whether the guest's data is written too.
    pub data: DataMode,
}

impl ChainSpec {
    /// One layer of 64 KiB clusters, 8 GiB, 30 % of it owned, nothing mixed in.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            layers: 1,
            disk_bytes: 8 << 30,
            cluster_bytes: 64 << 10,
            fill: 0.3,
            distribution: Distribution::Uniform,
            seed: 1,
            features: Features::default(),
            data: DataMode::Written,
        }
    }

    /// Refuses what cannot be made.
    ///
    /// # Errors
    /// `Invalid`, with what to change.
    pub fn validate(&self) -> Result<()> {
        let invalid = |context: String| Err(Error::new(ErrorKind::Invalid, context));
        if self.layers == 0 || self.layers as usize > LayerNumber::COUNT_MAX {
            let max = LayerNumber::COUNT_MAX;
            return invalid(format!("a chain has 1 to {max} layers, not {}", self.layers));
        }
        if self.disk_bytes == 0 || !self.disk_bytes.is_multiple_of(SECTOR_BYTES) {
            let len = self.disk_bytes;
            return invalid(format!("a disk is a positive multiple of 512 bytes long, not {len}"));
        }
        if self.cluster_bits().is_none() {
            let len = self.cluster_bytes;
            return invalid(format!(
                "a cluster has 512 to 2097152 bytes, a power of two, not {len}"
            ));
        }
        if !(0.0..=1.0).contains(&self.fill) {
            return invalid(format!("the fill must be between 0 and 1, not {}", self.fill));
        }
        Ok(())
    }

    /// The cluster size as the header has it.
    pub(crate) fn cluster_bits(&self) -> Option<ClusterBits> {
        self.cluster_bytes
            .is_power_of_two()
            .then(|| ClusterBits::new(self.cluster_bytes.trailing_zeros()))
            .flatten()
    }
}

/// Which layers own the clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Distribution {
    /// Every layer equally many.
    Uniform,
    /// Mostly the newest: the newest tenth of the layers owns nearly half.
    NewestHeavy,
}

impl FromStr for Distribution {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        match name {
            "uniform" => Ok(Self::Uniform),
            "newest-heavy" => Ok(Self::NewestHeavy),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("a distribution is 'uniform' or 'newest-heavy', not '{name}'"),
            )),
        }
    }
}

impl fmt::Display for Distribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uniform => "uniform",
            Self::NewestHeavy => "newest-heavy",
        })
    }
}

/// Whether the guest's data is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DataMode {
    /// Yes: the disk can be verified.
    Written,
    /// No: the data clusters are holes in their files and read as zeros. For disks whose map
    /// matters and whose data would not fit.
    Holes,
}

macro_rules! features {
    ($($(#[$doc:meta])* $variant:ident = $name:literal,)+) => {
        /// Something of the format that is mixed into a chain.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Feature {
            $($(#[$doc])* $variant,)+
        }

        impl Feature {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)+];

            /// Its name on the command line.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)+
                }
            }
        }
    };
}

features! {
    /// Clusters that read as zeros and have no place in the file.
    Zero = "zero",
    /// Clusters that read as zeros and have a place in the file, with garbage in it.
    ZeroPreallocated = "zero-preallocated",
    /// Older copies of owned clusters in lower layers.
    Stale = "stale",
    /// Layers with extended L2 entries and partly allocated clusters.
    ExtendedL2 = "extended-l2",
    /// Clusters compressed with deflate.
    Deflate = "deflate",
    /// Clusters compressed with zstd.
    Zstd = "zstd",
    /// Layers of format version 2.
    Version2 = "v2",
    /// Layers of different cluster sizes.
    ClusterSizes = "cluster-sizes",
    /// Layers of different lengths, including shorter ones between longer ones.
    Lengths = "lengths",
    /// Layers with an external data file. Its name is relative, and QEMU takes that relative to its
    /// own working directory: run it in the chain's folder.
    DataFiles = "data-files",
    /// Refcounts of 1 to 64 bits.
    RefcountBits = "refcount-bits",
    /// A raw file as the base.
    RawBase = "raw-base",
    /// Data clusters in no order.
    Shuffled = "shuffled",
}

/// A set of features.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Features {
    bits: u32,
}

impl Features {
    /// All features.
    pub fn all() -> Self {
        Feature::ALL.iter().copied().collect()
    }

    /// Whether `feature` is in the set.
    pub const fn has(self, feature: Feature) -> bool {
        self.bits & (1 << feature as u32) != 0
    }

    /// The features of the set.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.iter().copied().filter(move |feature| self.has(*feature))
    }
}

impl FromIterator<Feature> for Features {
    fn from_iter<I: IntoIterator<Item = Feature>>(features: I) -> Self {
        Self { bits: features.into_iter().fold(0, |bits, feature| bits | (1 << feature as u32)) }
    }
}

impl FromStr for Features {
    type Err = Error;

    /// Reads names with commas between them; `all` and `none` stand for everything and nothing.
    fn from_str(names: &str) -> Result<Self> {
        let one = |name: &str| {
            Feature::ALL.iter().copied().find(|feature| feature.name() == name).ok_or_else(|| {
                let known: Vec<_> = Feature::ALL.iter().map(|feature| feature.name()).collect();
                let known = known.join(", ");
                let context =
                    format!("unknown feature '{name}'; features are {known}, all and none");
                Error::new(ErrorKind::Invalid, context)
            })
        };
        match names {
            "all" => Ok(Self::all()),
            "none" | "" => Ok(Self::default()),
            _ => names.split(',').map(|name| one(name.trim())).collect(),
        }
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.bits == 0 {
            return f.write_str("none");
        }
        let names: Vec<_> = self.iter().map(Feature::name).collect();
        f.write_str(&names.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_named_and_read_back() {
        let set: Features = "zero,v2".parse().expect("both exist");
        assert!(set.has(Feature::Zero) && set.has(Feature::Version2) && !set.has(Feature::Zstd));
        assert_eq!(set.to_string().parse::<Features>().ok(), Some(set));
        assert_eq!("all".parse::<Features>().ok(), Some(Features::all()));
        assert!("zero,nonsense".parse::<Features>().is_err());
    }

    #[test]
    fn impossible_specs_are_refused() {
        let good = ChainSpec::new("dir");
        assert!(good.validate().is_ok());
        for bad in [
            ChainSpec { layers: 0, ..good.clone() },
            ChainSpec { layers: 65537, ..good.clone() },
            ChainSpec { disk_bytes: 0, ..good.clone() },
            ChainSpec { disk_bytes: 513, ..good.clone() },
            ChainSpec { cluster_bytes: 65535, ..good.clone() },
            ChainSpec { cluster_bytes: 4 << 20, ..good.clone() },
            ChainSpec { fill: 1.5, ..good.clone() },
            ChainSpec { fill: f64::NAN, ..good },
        ] {
            assert!(bad.validate().is_err(), "{bad:?}");
        }
    }
}
