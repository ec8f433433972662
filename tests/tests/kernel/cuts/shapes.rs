//! The shapes of images whose power is cut, and the tests: one each, so that they run concurrently.

use super::round;
use mica_gen::Rng;
use mica_tests::power::{Effect, SECTOR, stamps};
use mica_tests::qemu;
use std::fs;
use std::path::Path;

/// Sectors of a disk.
pub(super) const SECTORS: u64 = 8 << 11;
/// The image's name, whatever its format.
pub(super) const IMAGE: &str = "disk.img";
/// The name of the internal snapshot, if there is one.
pub(super) const SNAPSHOT: &str = "first";

/// What a disk holds before the first guest.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum First {
    Zeros,
    /// Stamps of write 1, in a raw base.
    Base,
    /// The same in the image itself.
    Own,
    /// The same, and an internal snapshot shares them.
    Snapshot,
}

/// A shape of image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) format: &'static str,
    /// Options of `qemu-img create`.
    options: &'static str,
    pub(super) first: First,
}

impl Shape {
    const fn qcow2(options: &'static str, first: First) -> Self {
        Self { format: "qcow2", options, first }
    }

    /// Random numbers for this shape alone.
    pub(super) fn rng(&self, seed: u64) -> Rng {
        let name = self.format.bytes().chain(self.options.bytes()).chain([self.first as u8]);
        Rng::for_part(seed, name.fold(7, |hash, byte| hash * 31 % 1_000_003 + u64::from(byte)))
    }

    /// Whether what was acknowledged is there when the server was killed: there is no redo log
    /// where there are snapshots.
    pub(super) fn outlives_the_process(&self) -> bool {
        self.first != First::Snapshot
    }

    /// What sectors are before the first guest.
    pub(super) fn first_effect(&self) -> Effect {
        if self.first == First::Zeros { Effect::Zeros } else { Effect::Stamps }
    }

    /// Makes the image in `dir`.
    pub(super) fn make(&self, dir: &Path) -> anyhow::Result<()> {
        let bytes = (SECTORS * SECTOR).to_string();
        let below = dir.join("below.raw");
        match self.first {
            First::Zeros => qemu::create(dir, IMAGE, &["-o", self.options], &bytes),
            First::Base => {
                fs::write(below, stamps(0..SECTORS, 1))?;
                let options = ["-b", "below.raw", "-F", "raw", "-o", self.options];
                qemu::create(dir, IMAGE, &options, &bytes);
            }
            First::Own => fs::write(dir.join(IMAGE), stamps(0..SECTORS, 1))?,
            First::Snapshot => {
                fs::write(&below, stamps(0..SECTORS, 1))?;
                let convert = ["convert", "-f", "raw", "-O", "qcow2", "-o", self.options];
                qemu::img(dir, convert.iter().chain(&["below.raw", IMAGE])).ok();
                qemu::img(dir, ["snapshot", "-c", SNAPSHOT, IMAGE]).ok();
                fs::remove_file(below)?;
            }
        }
        Ok(())
    }
}

#[test]
fn an_overlay_with_extended_l2_survives_power_cuts() {
    round::all(&Shape::qcow2("extended_l2=on", First::Base));
}

#[test]
fn an_overlay_survives_power_cuts() {
    round::all(&Shape::qcow2("cluster_size=64k", First::Base));
}

#[test]
fn small_clusters_survive_power_cuts() {
    round::all(&Shape::qcow2("cluster_size=4k", First::Base));
}

#[test]
fn an_empty_image_survives_power_cuts() {
    round::all(&Shape::qcow2("cluster_size=64k", First::Zeros));
}

#[test]
fn a_data_file_whose_clusters_are_all_there_survives_power_cuts() {
    let options = "data_file=data.raw,preallocation=metadata";
    round::all(&Shape::qcow2(options, First::Zeros));
}

#[test]
fn what_a_snapshot_shares_survives_power_cuts() {
    round::all(&Shape::qcow2("cluster_size=64k", First::Snapshot));
}

#[test]
fn a_raw_image_survives_power_cuts() {
    round::all(&Shape { format: "raw", options: "", first: First::Own });
}
