//! The properties of a new image: the user's wishes, once checked, become a plan.

use mica_block::{Error, ErrorKind, Result};
use mica_crypt::luks::NewLuks;
use mica_qcow2_format::{
    Autoclear, BackingName, Compatible, Compression, Encryption, Header, L1Entry, L2Format,
    RefcountWidth, Version,
};
use mica_units::{ClusterBits, HostCluster, HostOffset, SECTOR_BYTES};
use std::ffi::OsString;
use std::str::FromStr;

/// Default size of a cluster; QEMU's.
const CLUSTER_BITS_DEFAULT: u32 = 16;
/// Default size of a cluster in an overlay with subclusters: then a subcluster is the 4 KiB that
/// guests write most, and nothing is copied for them.
const CLUSTER_BITS_OVERLAY: u32 = 17;
/// Clusters of images with extended L2 entries are at least this big.
const CLUSTER_BITS_MIN_EXTENDED: u32 = 14;

/// How much of a new image is allocated when it is created.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Every cluster has a place, and the file a hole there.
    Metadata,
    /// Every cluster has a place, and the file space there.
    Falloc,
    /// Every cluster has a place, and zeros are written there.
    Full,
}

impl Preallocation {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }
}

impl FromStr for Preallocation {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = [Self::Off, Self::Metadata, Self::Falloc, Self::Full];
        all.into_iter().find(|mode| mode.name() == text).ok_or_else(|| {
            invalid(format!("invalid preallocation={text}: use off, metadata, falloc or full"))
        })
    }
}

/// The file beside an image that holds the guest's data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DataFile {
    /// Its name, as the image records it.
    pub name: OsString,
    /// Whether it is a raw disk by itself.
    pub raw: bool,
}

/// The user's wishes for a new image; unset ones take the default.
#[derive(Clone, Default, Debug)]
pub struct ImageWish {
    /// Version of the format.
    pub version: Option<Version>,
    /// Bytes of a cluster.
    pub cluster_bytes: Option<u64>,
    /// Whether clusters have subclusters. An overlay has them unless its clusters are too small.
    pub extended_l2: Option<bool>,
    /// Width of a refcount.
    pub refcount_bits: Option<u64>,
    /// Whether a writer may leave refcounts for later.
    pub lazy_refcounts: Option<bool>,
    /// How compressed clusters will be compressed.
    pub compression: Option<Compression>,
    /// What is allocated at once.
    pub preallocation: Option<Preallocation>,
    /// Name of the backing file.
    pub backing_name: Option<OsString>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Name of the file that holds the data.
    pub data_file: Option<OsString>,
    /// Whether the data file is a raw disk by itself.
    pub data_file_raw: bool,
}

/// The properties of a new image; checked, so that it can be created.
#[derive(Clone, Debug)]
pub struct ImagePlan {
    /// Length of the disk; a multiple of a sector.
    pub size: u64,
    /// Version and table format.
    pub l2: L2Format,
    /// Width of a refcount.
    pub refcount_width: RefcountWidth,
    /// Whether a writer may leave refcounts for later.
    pub lazy_refcounts: bool,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// What is allocated at once.
    pub preallocation: Preallocation,
    /// The backing file.
    pub backing: Option<BackingName>,
    /// The file that holds the data.
    pub data_file: Option<DataFile>,
    /// What the data is encrypted with; see [`ImagePlan::encrypted`].
    pub(crate) encryption: Option<NewLuks>,
}

/// Where the tables of an image are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TablePlaces {
    /// The active L1 table.
    pub l1: HostOffset,
    /// Its entries.
    pub l1_entries: u32,
    /// The refcount table.
    pub refcount_table: HostOffset,
    /// Its clusters.
    pub refcount_table_clusters: u32,
}

impl ImageWish {
    /// Checks that the wishes are compatible, and makes a plan of them for a disk of `size` bytes.
    /// What QEMU refuses is refused, in its words.
    ///
    /// # Errors
    /// `Invalid` with the reason.
    pub fn plan(&self, size: u64) -> Result<ImagePlan> {
        let size = size
            .checked_next_multiple_of(SECTOR_BYTES)
            .filter(|size| i64::try_from(*size).is_ok())
            .ok_or_else(|| invalid("Image size must be less than 8 EiB!"))?;
        let version = self.version.unwrap_or(Version::V3);
        let (cluster_bits, extended) = self.clusters(version)?;
        let preallocation = self.preallocation(extended)?;
        if version == Version::V2 {
            self.refuse_new_features()?;
        }
        let plan = ImagePlan {
            size,
            l2: L2Format { cluster_bits, version, extended, data_file: self.data_file.is_some() },
            refcount_width: self.refcount_width(version)?,
            lazy_refcounts: self.lazy_refcounts.unwrap_or(false),
            compression: self.compression.unwrap_or_default(),
            preallocation,
            backing: self.backing()?,
            data_file: self.data_file()?,
            encryption: None,
        };
        plan.l2.check_disk_bytes(size)?;
        Ok(plan)
    }

    fn is_overlay(&self) -> bool {
        self.backing_name.is_some()
    }

    /// The size of a cluster, and whether it has subclusters.
    fn clusters(&self, version: Version) -> Result<(ClusterBits, bool)> {
        let stated = self.cluster_bytes.map(cluster_bits).transpose()?;
        let big_enough = stated.is_none_or(|bits| bits.bits() >= CLUSTER_BITS_MIN_EXTENDED);
        let wanted = self.is_overlay() && version == Version::V3 && big_enough;
        let extended = self.extended_l2.unwrap_or(wanted);
        let default = match extended && self.is_overlay() {
            true => CLUSTER_BITS_OVERLAY,
            false => CLUSTER_BITS_DEFAULT,
        };
        let bits = stated.or_else(|| ClusterBits::new(default)).expect("a valid default");
        if extended && version == Version::V2 {
            return Err(needs_version_3("Extended L2 entries are only supported with"));
        }
        if extended && !big_enough {
            return Err(invalid(format!(
                "Extended L2 entries are only supported with cluster sizes of at least {} bytes",
                1 << CLUSTER_BITS_MIN_EXTENDED
            )));
        }
        Ok((bits, extended))
    }

    fn preallocation(&self, extended: bool) -> Result<Preallocation> {
        let preallocation = self.preallocation.unwrap_or_default();
        if self.is_overlay() && preallocation != Preallocation::Off && !extended {
            return Err(invalid(
                "Backing file and preallocation can only be used at the same time if extended_l2 \
                 is enabled",
            ));
        }
        // Readers of the raw file and of the image must see the same bytes, whatever is written
        // through either: so every cluster has its place from the start, as in QEMU.
        Ok(match preallocation {
            Preallocation::Off if self.data_file_raw => Preallocation::Metadata,
            other => other,
        })
    }

    fn refuse_new_features(&self) -> Result<()> {
        if self.lazy_refcounts == Some(true) {
            return Err(needs_version_3("Lazy refcounts only supported with"));
        }
        if self.data_file.is_some() {
            return Err(needs_version_3("External data files are only supported with"));
        }
        if self.compression.is_some_and(|kind| kind != Compression::Deflate) {
            return Err(needs_version_3("Non-zlib compression type is only supported with"));
        }
        Ok(())
    }

    fn refcount_width(&self, version: Version) -> Result<RefcountWidth> {
        let Some(bits) = self.refcount_bits else { return Ok(RefcountWidth::DEFAULT) };
        let width = Some(bits)
            .filter(|bits| bits.is_power_of_two())
            .and_then(|bits| RefcountWidth::from_order(bits.trailing_zeros()))
            .ok_or_else(|| {
                invalid("Refcount width must be a power of two and may not exceed 64 bits")
            })?;
        if version == Version::V2 && width != RefcountWidth::DEFAULT {
            return Err(invalid(
                "Different refcount widths than 16 bits require compatibility level 1.1 or above \
                 (use version=v3 or greater)",
            ));
        }
        Ok(width)
    }

    fn backing(&self) -> Result<Option<BackingName>> {
        match (&self.backing_name, &self.backing_format) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(invalid("Backing format cannot be used without backing file")),
            (Some(_), None) => {
                Err(invalid("backing file specified without backing format: say it with -F"))
            }
            (Some(_), Some(_)) if self.data_file_raw => {
                Err(invalid("Backing file and data-file-raw cannot be used at the same time"))
            }
            (Some(name), Some(format)) => {
                Ok(Some(BackingName { name: name.clone(), format: Some(format.clone()) }))
            }
        }
    }

    fn data_file(&self) -> Result<Option<DataFile>> {
        match &self.data_file {
            None if self.data_file_raw => Err(invalid("data-file-raw requires data-file")),
            None => Ok(None),
            Some(name) => Ok(Some(DataFile { name: name.clone(), raw: self.data_file_raw })),
        }
    }
}

impl ImagePlan {
    /// L1 entries that the disk needs.
    pub fn l1_entries(&self) -> u64 {
        self.size.div_ceil(self.l2.table_bytes())
    }

    /// Clusters of the disk, the last one rounded up.
    pub fn clusters(&self) -> u64 {
        self.l2.cluster_bits.clusters_for(self.size)
    }

    /// The same, encrypted with `luks`.
    ///
    /// # Errors
    /// `Invalid` if such an image cannot be encrypted.
    pub fn encrypted(mut self, luks: NewLuks) -> Result<Self> {
        if self.has_raw_data_file() {
            return Err(invalid("a data file that is a raw disk by itself cannot be encrypted"));
        }
        if self.l2.version == Version::V2 && self.preallocation != Preallocation::Off {
            // It has no entries that say "zeros, with a place", and places read as anything.
            return Err(invalid(
                "Encryption and preallocation together are only supported with compatibility level \
                 1.1 and above (use version=v3 or greater)",
            ));
        }
        self.encryption = Some(luks);
        Ok(self)
    }

    /// What it is encrypted with.
    pub fn encryption(&self) -> Option<&NewLuks> {
        self.encryption.as_ref()
    }

    /// Clusters of the L1 table.
    pub(crate) fn l1_clusters(&self) -> u64 {
        self.l2.cluster_bits.clusters_for(self.l1_entries() * L1Entry::BYTES as u64)
    }

    /// Where the LUKS header is, and its length: after the L1 table, which follows the header.
    pub(crate) fn luks_place(&self) -> Option<(HostOffset, u64)> {
        let luks = self.encryption.as_ref()?;
        let at = HostCluster::new(1 + self.l1_clusters());
        Some((self.l2.cluster_bits.start_of(at), luks.bytes().len() as u64))
    }

    /// Whether the data file is a raw disk by itself.
    pub fn has_raw_data_file(&self) -> bool {
        self.data_file.as_ref().is_some_and(|file| file.raw)
    }

    /// The header of an image with its tables at `places`.
    pub fn header(&self, places: TablePlaces) -> Header {
        Header {
            size: self.size,
            l1_entries: places.l1_entries,
            l1_offset: places.l1,
            refcount_table_offset: places.refcount_table,
            refcount_table_clusters: places.refcount_table_clusters,
            refcount_width: self.refcount_width,
            compatible: Compatible { lazy_refcounts: self.lazy_refcounts, unknown: 0 },
            autoclear: Autoclear { raw_external: self.has_raw_data_file(), ..Autoclear::default() },
            backing: self.backing.clone(),
            data_file_name: self.data_file.as_ref().map(|file| file.name.clone()),
            encryption: match self.luks_place() {
                Some(place) => Encryption::Luks { header: Some(place) },
                None => Encryption::None,
            },
            ..Header::new(self.l2, self.compression)
        }
    }
}

fn cluster_bits(bytes: u64) -> Result<ClusterBits> {
    let bits = Some(bytes).filter(|bytes| bytes.is_power_of_two()).map(u64::trailing_zeros);
    bits.and_then(ClusterBits::new)
        .ok_or_else(|| invalid("Cluster size must be a power of two between 512 and 2048k"))
}

fn needs_version_3(what: &str) -> Error {
    invalid(format!("{what} compatibility level 1.1 and above (use version=v3 or greater)"))
}

fn invalid(context: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, context)
}
