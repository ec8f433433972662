//! The shapes of images that are written, and the tests: one for each family, so that they run
//! concurrently.

use super::round;
use mica_gen::Rng;
use mica_tests::{qemu, tools};
use std::fs;
use std::path::Path;

const BLOCK_BYTES: u64 = 64 << 10;

/// What is beneath the active layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Below {
    Nothing,
    /// A raw image of this many KiB.
    Raw(u64),
    /// A qcow2 image of this many KiB, made with these options.
    Qcow2(u64, &'static str),
    /// This many layers, each with clusters of another size, the lowest of them shorter.
    Chain(u64),
}

/// What the active layer holds before its first guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Start {
    Empty,
    /// Compressed clusters.
    Packed,
    /// A persistent bitmap; each session of QEMU adds one more.
    Bitmap,
    /// Data that an internal snapshot shares; QEMU makes more of them later.
    Snapshot,
}

/// A shape of image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Its name, for `MICA_FSX_SHAPE`.
    pub(super) name: &'static str,
    /// Length of the disk in KiB.
    pub(super) kib: u64,
    /// Options of `qemu-img create`.
    pub(super) options: &'static str,
    pub(super) below: Below,
    pub(super) start: Start,
}

const fn shape(
    name: &'static str,
    kib: u64,
    options: &'static str,
    below: Below,
    start: Start,
) -> Shape {
    Shape { name, kib, options, below, start }
}

const MIB: u64 = 1 << 10;
use Below::{Chain, Nothing, Qcow2, Raw};
use Start::{Bitmap, Empty, Packed, Snapshot};

const PLAIN: &[Shape] = &[
    shape("default", 16 * MIB, "cluster_size=64k", Nothing, Empty),
    shape("odd-end", 7 * MIB + 1, "cluster_size=64k", Raw(9 * MIB), Empty),
    shape("512", 4 * MIB, "cluster_size=512", Nothing, Empty),
    shape("4k-rc1", 8 * MIB, "cluster_size=4k,refcount_bits=1", Nothing, Empty),
    shape("1k-rc2", 8 * MIB, "cluster_size=1k,refcount_bits=2", Nothing, Empty),
    shape("8k-rc4", 8 * MIB, "cluster_size=8k,refcount_bits=4", Nothing, Empty),
    shape("2M", 32 * MIB, "cluster_size=2M", Nothing, Empty),
    shape("v2", 8 * MIB, "compat=0.10", Nothing, Empty),
    shape("lazy", 8 * MIB, "lazy_refcounts=on", Nothing, Empty),
    shape("metadata", 8 * MIB, "preallocation=metadata", Nothing, Empty),
    shape("falloc", 8 * MIB, "preallocation=falloc", Nothing, Empty),
    shape("full", 8 * MIB, "preallocation=full", Nothing, Empty),
    shape("extended", 16 * MIB, "extended_l2=on", Nothing, Empty),
    shape("extended-metadata", 8 * MIB, "extended_l2=on,preallocation=metadata", Nothing, Empty),
];

const OVERLAYS: &[Shape] = &[
    shape("over-raw", 16 * MIB, "cluster_size=64k", Raw(16 * MIB), Empty),
    shape("over-shorter", 8 * MIB, "cluster_size=512", Raw(4 * MIB + 1), Empty),
    shape("over-longer", 8 * MIB, "cluster_size=64k", Qcow2(12 * MIB, "cluster_size=4k"), Empty),
    shape("2M-over-4k", 16 * MIB, "cluster_size=2M", Qcow2(9 * MIB, "cluster_size=4k"), Empty),
    shape("4k-over-2M", 8 * MIB, "cluster_size=4k", Qcow2(8 * MIB, "cluster_size=2M"), Empty),
    shape("v2-over", 8 * MIB, "compat=0.10", Qcow2(8 * MIB, "compat=0.10"), Empty),
    shape("lazy-over", 8 * MIB, "lazy_refcounts=on,refcount_bits=8", Raw(4 * MIB), Empty),
    shape("extended-over", 16 * MIB, "extended_l2=on", Raw(10 * MIB), Empty),
    shape(
        "extended-16k-over",
        8 * MIB,
        "extended_l2=on,cluster_size=16k",
        Qcow2(10 * MIB, "cluster_size=64k"),
        Empty,
    ),
    shape(
        "extended-2M-over",
        16 * MIB,
        "extended_l2=on,cluster_size=2M",
        Qcow2(16 * MIB, "extended_l2=on"),
        Empty,
    ),
    shape("chain", 8 * MIB, "cluster_size=64k", Chain(4), Empty),
    shape("extended-chain", 8 * MIB, "extended_l2=on,cluster_size=32k", Chain(4), Empty),
];

const SHARED: &[Shape] = &[
    shape("snapshot", 8 * MIB, "cluster_size=64k", Raw(8 * MIB), Snapshot),
    shape("snapshot-v2", 8 * MIB, "compat=0.10", Nothing, Snapshot),
    shape("snapshot-rc64", 8 * MIB, "cluster_size=1k,refcount_bits=64", Nothing, Snapshot),
    shape("snapshot-extended", 8 * MIB, "extended_l2=on", Raw(4 * MIB), Snapshot),
    shape("snapshot-lazy", 8 * MIB, "lazy_refcounts=on,cluster_size=4k", Nothing, Snapshot),
    shape("bitmap", 8 * MIB, "cluster_size=64k", Nothing, Bitmap),
    shape("bitmap-extended", 8 * MIB, "extended_l2=on", Raw(8 * MIB), Bitmap),
];

const PACKED: &[Shape] = &[
    shape("packed", 8 * MIB, "cluster_size=64k", Nothing, Packed),
    shape("packed-4k", 4 * MIB, "cluster_size=4k", Nothing, Packed),
    shape("packed-zstd", 8 * MIB, "compression_type=zstd", Nothing, Packed),
    shape("packed-extended", 8 * MIB, "extended_l2=on,compression_type=zstd", Nothing, Packed),
    shape("packed-v2", 8 * MIB, "compat=0.10", Nothing, Packed),
    shape("data-file", 8 * MIB, "data_file=disk.data", Nothing, Empty),
    shape("data-file-over", 8 * MIB, "data_file=disk.data,extended_l2=on", Raw(6 * MIB), Empty),
    shape("data-file-raw", 8 * MIB, "data_file=disk.data,data_file_raw=on", Nothing, Empty),
];

/// A test for each family of shapes.
macro_rules! families {
    ($($name:ident = $shapes:expr;)+) => {
        $(
            #[test]
            fn $name() {
                round::all($shapes);
            }
        )+
    };
}

families! {
    images_of_their_own_keep_what_guests_write = PLAIN;
    overlays_keep_what_guests_write = OVERLAYS;
    snapshots_stay_as_they_are_and_bitmaps_do_not_lie = SHARED;
    compressed_clusters_and_data_files_keep_what_guests_write = PACKED;
}

/// Whether the programs are installed.
pub(super) fn tools_present() -> bool {
    tools::present(&[tools::QEMU_IMG, tools::QEMU_IO])
}

impl Shape {
    /// Length of the disk in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.kib << 10
    }

    /// Bytes of a cluster.
    pub(super) fn cluster_bytes(&self) -> u64 {
        let stated =
            self.options.split(',').find_map(|option| option.strip_prefix("cluster_size="));
        let Some(stated) = stated else { return 64 << 10 };
        let (number, shift) = match stated.as_bytes().last() {
            Some(b'k') => (&stated[..stated.len() - 1], 10),
            Some(b'M') => (&stated[..stated.len() - 1], 20),
            _ => (stated, 0),
        };
        number.parse::<u64>().expect("a number") << shift
    }

    /// Makes `disk.qcow2` of this shape in `dir`.
    pub(super) fn make(&self, dir: &Path, rng: &mut Rng) {
        let mut backing: Vec<&str> = Vec::new();
        match self.below {
            Nothing => {}
            Raw(kib) => {
                fill_raw(&dir.join("below.raw"), kib << 10, rng);
                backing.extend(["-b", "below.raw", "-F", "raw"]);
            }
            Qcow2(kib, options) => {
                fill_raw(&dir.join("below.raw"), kib << 10, rng);
                let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", options];
                qemu::img(dir, convert.iter().chain(&["below.raw", "below.qcow2"])).ok();
                backing.extend(["-b", "below.qcow2", "-F", "qcow2"]);
            }
            Chain(layers) => {
                make_chain(dir, layers, self.bytes(), rng);
                backing.extend(["-b", "below.qcow2", "-F", "qcow2"]);
            }
        }
        let options = ["-o", self.options];
        if self.start == Packed {
            fill_raw(&dir.join("packed.raw"), self.bytes(), rng);
            let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", self.options];
            qemu::img(dir, convert.iter().chain(&["packed.raw", "disk.qcow2"])).ok();
            return;
        }
        let size = self.bytes().to_string();
        qemu::create(dir, "disk.qcow2", &[&backing[..], &options].concat(), &size);
        match self.start {
            Empty | Packed => {}
            Bitmap => {
                qemu::img(dir, ["bitmap", "--add", "disk.qcow2", "first"]).ok();
                write_some(dir, "disk.qcow2", self.bytes(), rng);
            }
            Snapshot => write_some(dir, "disk.qcow2", self.bytes(), rng),
        }
    }
}

/// A raw file in which some blocks hold data, most of it easily compressed.
fn fill_raw(path: &Path, len: u64, rng: &mut Rng) {
    let mut bytes = vec![0; usize::try_from(len).expect("small")];
    for block in bytes.chunks_mut(usize::try_from(BLOCK_BYTES).expect("small")) {
        if rng.percent(60) {
            let bytes = super::burst::content(rng, block.len());
            block.copy_from_slice(&bytes);
        }
    }
    fs::write(path, bytes).expect("written");
}

/// Writes of QEMU's to `image`.
fn write_some(dir: &Path, image: &str, len: u64, rng: &mut Rng) {
    let commands: Vec<_> = (0..8).map(|_| random_write(len, rng)).collect();
    let commands: Vec<_> = commands.iter().map(String::as_str).collect();
    qemu::io(dir, &["-f", "qcow2"], image, &commands);
}

/// A command of qemu-io that writes somewhere.
pub(super) fn random_write(len: u64, rng: &mut Rng) -> String {
    let offset = rng.below(len / 512) * 512;
    let bytes = rng.choose(&[512, 4096, 65536, 70_144, 200_192]).min(len - offset);
    let kind = match rng.below(10) {
        0 => "-z".to_owned(),
        1 => "-z -u".to_owned(),
        _ => format!("-P {}", rng.below(255) + 1),
    };
    format!("write {kind} {offset} {bytes}")
}

fn make_chain(dir: &Path, layers: u64, len: u64, rng: &mut Rng) {
    const SIZES: &[&str] =
        &["cluster_size=64k", "cluster_size=4k", "extended_l2=on", "compat=0.10"];
    for layer in 0..layers {
        let name = format!("layer-{layer}.qcow2");
        let options = SIZES[usize::try_from(layer).expect("few") % SIZES.len()];
        let beneath = format!("layer-{}.qcow2", layer.saturating_sub(1));
        let (backing, len) = match layer {
            0 => (vec![], len / 2),
            _ => (vec!["-b", &beneath, "-F", "qcow2"], len),
        };
        let size = len.to_string();
        qemu::create(dir, &name, &[&backing[..], &["-o", options]].concat(), &size);
        write_some(dir, &name, len, rng);
    }
    let last = format!("layer-{}.qcow2", layers - 1);
    fs::rename(dir.join(last), dir.join("below.qcow2")).expect("renamed");
}
