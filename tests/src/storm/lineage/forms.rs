//! Layers that are not as mica makes them: of version 2, which has no log of what was acknowledged,
//! and with their data in an external file. Some disks begin with them, and others get them by
//! snapshots that take a file which is there (`--reuse`).

use crate::storm::foreign;
use crate::storm::formats::format_of;
use crate::storm::kinds::Kind;
use crate::storm::stamp::SECTOR;
use crate::storm::story::Outcome;
use crate::storm::world::World;
use mica_units::Rng;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How a layer is not as most are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    /// Version 2, with clusters of so many bytes.
    Old { cluster: u64 },
    /// Its data are in a file of their own, which may be a raw image of the disk.
    DataFile { cluster: u64, is_raw: bool },
}

const CLUSTERS: [u64; 3] = [512, 4 << 10, 64 << 10];

impl Form {
    /// One in so many of a hundred cases.
    pub(super) fn random(world: &World<'_>, rng: &mut Rng, percent: u64) -> Option<Self> {
        let (cluster, is_raw, is_old) = (rng.choose(&CLUSTERS), rng.percent(50), rng.percent(50));
        let (form, kind) = match is_old {
            true => (Self::Old { cluster }, Kind::Old),
            false => (Self::DataFile { cluster, is_raw }, Kind::DataFile),
        };
        world.does(rng, kind, percent).then_some(form)
    }

    /// Whether it can have bitmaps.
    pub(super) fn has_bitmaps(self) -> bool {
        matches!(self, Self::DataFile { .. })
    }

    /// What QEMU makes the layer `file` with, which may stand alone.
    pub(super) fn options(self, file: &str, is_alone: bool) -> String {
        match self {
            Self::Old { cluster } => format!("compat=0.10,cluster_size={cluster}"),
            Self::DataFile { cluster, is_raw } => {
                let raw = if is_raw && is_alone { ",data_file_raw=on" } else { "" };
                format!("cluster_size={cluster},data_file={file}.data{raw}")
            }
        }
    }

    /// Makes the layer `file` of a disk of so many sectors, on top of its layer `beneath`.
    pub(super) fn make(
        self,
        world: &World<'_>,
        (file, beneath): (&str, &str),
        sectors: u64,
    ) -> Outcome {
        let (options, len) = (self.options(file, false), (sectors * SECTOR as u64).to_string());
        let base = ["-u", "-b", beneath, "-F", format_of(beneath)];
        let args = [&["create", "-q", "-f", "qcow2", "-o", &options], &base[..], &[file, &len]];
        let args = args.concat();
        world.story.tell(format_args!("  {args:?}"));
        foreign::img(&world.images, &args).map(drop)
    }
}

/// Whether the layer `file` is of version 2.
pub(super) fn is_old(images: &Path, file: &str) -> Outcome<bool> {
    Ok(header_of(images, file)?.is_some_and(|header| header[4..8] == [0, 0, 0, 2]))
}

/// Whether the layer `file` has its data in a file of their own.
pub(super) fn has_data_file(images: &Path, file: &str) -> Outcome<bool> {
    /// The lowest byte of the incompatible features, and the bit that says so.
    const FEATURES: (usize, u8) = (79, 4);
    let (at, bit) = FEATURES;
    let header = header_of(images, file)?.filter(|header| header[4..8] != [0, 0, 0, 2]);
    Ok(header.is_some_and(|header| header[at] & bit != 0))
}

/// The beginning of the header of a qcow2 image.
fn header_of(images: &Path, file: &str) -> Outcome<Option<[u8; 80]>> {
    if format_of(file) != "qcow2" || !images.join(file).exists() {
        return Ok(None);
    }
    let mut header = [0; 80];
    File::open(images.join(file))?.read_exact_at(&mut header, 0)?;
    Ok(Some(header))
}
