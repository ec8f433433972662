//! What images look like: all that qcow2 knows, at random.

use super::kinds::{Kind, Kinds};
use mica_units::Rng;

/// How a qcow2 image is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    pub(super) cluster: u64,
    pub(super) is_extended: bool,
    pub(super) refcount_bits: u64,
    pub(super) is_old: bool,
    pub(super) is_lazy: bool,
    pub(super) has_data_file: bool,
    pub(super) is_zstd: bool,
    pub(super) has_compressed: bool,
    pub(super) bitmaps: u64,
    pub(super) is_encrypted: bool,
}

impl Shape {
    /// One of all that the run may do.
    pub(super) fn random(rng: &mut Rng, kinds: &Kinds) -> Self {
        let mut likely = |kind: Kind, percent: u64| rng.percent(percent) && kinds.has(kind);
        let is_old = likely(Kind::Old, 12);
        let is_tiny = likely(Kind::Tiny, 40);
        let is_extended = likely(Kind::Extended, 30) && !is_old && !is_tiny;
        let has_other_refcounts = likely(Kind::Refcounts, if is_tiny { 70 } else { 40 }) && !is_old;
        let is_lazy = likely(Kind::Lazy, 12) && !is_old;
        let has_data_file = likely(Kind::DataFile, 12) && !is_old;
        let has_compressed = likely(Kind::Compressed, 35) && !has_data_file;
        let has_bitmaps = likely(Kind::Bitmaps, 12) && !is_old;
        let cluster = match (is_tiny, is_extended) {
            (true, _) => rng.choose(&[512, 512, 512, 1024, 2048]),
            (_, true) => rng.choose(&[16 << 10, 64 << 10, 128 << 10, 512 << 10]),
            _ => rng.choose(&[4096, 4096, 8192, 16 << 10, 64 << 10, 64 << 10, 256 << 10, 2 << 20]),
        };
        // Wide counts make tables of refcounts grow soonest.
        let refcount_bits = match is_tiny {
            true => rng.choose(&[1, 2, 4, 8, 32, 64, 64, 64, 64, 64]),
            false => rng.choose(&[1, 2, 4, 8, 32, 64, 64]),
        };
        Self {
            cluster,
            is_extended,
            refcount_bits: if has_other_refcounts { refcount_bits } else { 16 },
            is_old,
            is_lazy,
            has_data_file,
            is_zstd: has_compressed && !is_old && rng.percent(25),
            has_compressed,
            bitmaps: if has_bitmaps { 1 + rng.below(2) } else { 0 },
            is_encrypted: false,
        }
    }

    /// The same, or, if it can be, encrypted. QEMU encrypts no compressed clusters, and makes
    /// bitmaps only of images that it needs no key for.
    pub(super) fn perhaps_encrypted(self, rng: &mut Rng) -> Self {
        let can_be = !self.is_old && !self.has_compressed;
        match can_be && rng.percent(40) {
            true => Self { is_encrypted: true, bitmaps: 0, ..self },
            false => self,
        }
    }

    /// Its options, for an image called `name`.
    pub(super) fn options(&self, name: &str) -> String {
        let mut options = format!("cluster_size={}", self.cluster);
        let mut add = |text: &str| {
            options.push(',');
            options.push_str(text);
        };
        if self.is_old {
            add("compat=0.10");
            return options;
        }
        add("compat=1.1");
        add(&format!("refcount_bits={}", self.refcount_bits));
        add(if self.is_extended { "extended_l2=on" } else { "extended_l2=off" });
        if self.is_lazy {
            add("lazy_refcounts=on");
        }
        if self.is_zstd {
            add("compression_type=zstd");
        }
        if self.has_data_file {
            add(&format!("data_file={}", data_file_of(name)));
        }
        options
    }

    /// How many internal snapshots it can have: each needs a reference to every cluster.
    pub(super) fn snapshots_max(&self) -> usize {
        match self.refcount_bits {
            _ if self.has_data_file => 0,
            1 => 0,
            // Compressed clusters share one, each with a reference of its own. QEMU gives up in the
            // middle, with two references to tables that it still says are the image's own.
            2 | 4 if self.has_compressed => 0,
            2 => 1,
            _ => 3,
        }
    }

    /// The longest disk that is worth its time.
    pub(super) fn sectors_max(&self) -> u64 {
        match self.cluster {
            ..1024 => 8 << 11,
            1024..4096 => 24 << 11,
            _ => 64 << 11,
        }
    }
}

/// What the data file of image `name` is called.
pub(super) fn data_file_of(name: &str) -> String {
    format!("{name}.data")
}

/// The length of a disk, in sectors.
pub(super) fn sectors(rng: &mut Rng, most: u64) -> u64 {
    let sectors = match rng.below(20) {
        0..3 => 128 + rng.below(2048),
        3..13 => (1 << 11) + rng.below(7 << 11),
        13..18 => (8 << 11) + rng.below(8 << 11),
        _ => (16 << 11) + rng.below(48 << 11),
    };
    let sectors = sectors.min(most);
    // Many disks end at the end of a cluster, and some do not.
    if rng.percent(50) { (sectors & !127).max(128) } else { sectors }
}
