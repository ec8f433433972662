//! The images that are written: each kind created again for each run, from the same base.

use crate::chains;
use crate::load::stamp;
use anyhow::{Result, ensure};
use mica_tests::{command, mica, tools};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The generation that has written the base.
pub(crate) const BASE_GENERATION: u64 = 0;
/// Bytes of the base that are made at a time.
const PIECE_BYTES: usize = 4 << 20;

/// What is written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// A raw file without any data.
    Raw,
    /// An empty qcow2 image.
    Empty,
    /// A qcow2 image with all tables, its data clusters being holes in the file.
    Metadata,
    /// The same, with space allocated for its data.
    Falloc,
    /// The same, with zeros written as its data: nothing is ever allocated in it.
    Full,
    /// QEMU's default overlay on a raw file full of data.
    Overlay,
    /// mica's default overlay on it: subclusters of 4 KiB.
    Subclusters,
    /// An overlay on it with clusters of 2 MiB.
    LargeClusters,
}

impl Kind {
    /// All of them, in the order of tables.
    pub(crate) const ALL: [Self; 8] = [
        Self::Raw,
        Self::Empty,
        Self::Metadata,
        Self::Falloc,
        Self::Full,
        Self::Overlay,
        Self::Subclusters,
        Self::LargeClusters,
    ];

    /// Its name in tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Empty => "empty",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
            Self::Overlay => "overlay",
            Self::Subclusters => "overlay-extended_l2",
            Self::LargeClusters => "overlay-2M",
        }
    }

    /// Its format, as passed to servers.
    pub(crate) fn format(self) -> &'static str {
        if self == Self::Raw { "raw" } else { "qcow2" }
    }

    /// Files that it is made of.
    pub(crate) fn layers(self) -> u32 {
        if self.has_base() { 2 } else { 1 }
    }

    /// Whether it has a backing file with data.
    pub(crate) fn has_base(self) -> bool {
        matches!(self, Self::Overlay | Self::Subclusters | Self::LargeClusters)
    }

    /// Whether what a run does not write keeps its initial content.
    pub(crate) fn is_fresh(self) -> bool {
        self != Self::Full
    }

    /// Bytes that are allocated together: the part that a write does not cover is copied.
    fn unit_bytes(self) -> u64 {
        match self {
            Self::Overlay => 64 << 10,
            Self::Subclusters => 4 << 10,
            Self::LargeClusters => 2 << 20,
            _ => 1,
        }
    }

    /// Bytes that have to be copied when writes of `bytes` go to `offsets` one after the other:
    /// the part of each unit that the first write into it does not cover.
    pub(crate) fn copied_bytes(self, offsets: &[u64], bytes: u64) -> u64 {
        let mut units: Vec<_> = offsets.iter().map(|offset| offset / self.unit_bytes()).collect();
        units.sort_unstable();
        units.dedup();
        self.unit_bytes().saturating_sub(bytes) * units.len() as u64
    }
}

/// An image to be written. Dropping it removes it.
pub(crate) struct Image {
    /// Where it is.
    pub(crate) path: PathBuf,
    /// What it is.
    pub(crate) kind: Kind,
}

impl Drop for Image {
    fn drop(&mut self) {
        if self.kind.is_fresh() {
            // The folder is removed in the end in any case.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Makes images.
pub(crate) struct Images<'a> {
    folder: &'a Path,
    disk_bytes: u64,
    /// The program that makes the overlays with subclusters.
    pub(crate) overlays_by: &'static str,
}

impl<'a> Images<'a> {
    /// Makes the base in `folder`, for disks of `disk_bytes`.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn new(folder: &'a Path, disk_bytes: u64) -> Result<Self> {
        let images = Self { folder, disk_bytes, overlays_by: "mica create" };
        let mut base = File::create(images.base())?;
        let mut piece = vec![0; PIECE_BYTES];
        for offset in (0..disk_bytes).step_by(PIECE_BYTES) {
            stamp::fill(&mut piece, offset, BASE_GENERATION);
            base.write_all(&piece)?;
        }
        base.sync_all()?;
        let by_mica = images.make(Kind::Subclusters).is_ok();
        Ok(Self { overlays_by: if by_mica { "mica create" } else { "qemu-img create" }, ..images })
    }

    /// The raw file beneath overlays.
    pub(crate) fn base(&self) -> PathBuf {
        self.folder.join("base.raw")
    }

    /// A new image.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn make(&self, kind: Kind) -> Result<Image> {
        let image = Image { path: self.folder.join(format!("{}.img", kind.name())), kind };
        if kind == Kind::Full && image.path.exists() {
            return Ok(image);
        }
        match kind {
            Kind::Raw => File::create(&image.path)?.set_len(self.disk_bytes)?,
            Kind::Empty => self.create(&image, "preallocation=off")?,
            Kind::Metadata => self.create(&image, "preallocation=metadata")?,
            Kind::Falloc => self.create(&image, "preallocation=falloc")?,
            Kind::Full => self.create(&image, "preallocation=full")?,
            Kind::Overlay => self.create(&image, chains::CLUSTERS)?,
            Kind::LargeClusters => self.create(&image, "cluster_size=2M")?,
            Kind::Subclusters if self.overlays_by == "mica create" => {
                let mut create = Command::new(mica::binary());
                create.arg("create").arg("-q").arg("-b").arg(self.base()).args(["-F", "raw"]);
                done(create.arg(&image.path))?;
            }
            Kind::Subclusters => self.create(&image, chains::SUBCLUSTERS)?,
        }
        // What creating it wrote must not count as the cost of writing to it.
        File::open(&image.path)?.sync_all()?;
        Ok(image)
    }

    fn create(&self, image: &Image, options: &str) -> Result<()> {
        let mut create = Command::new(tools::QEMU_IMG.program);
        create.args(["create", "-q", "-f", "qcow2", "-o", options]);
        if image.kind.has_base() {
            create.arg("-b").arg(self.base()).args(["-F", "raw"]);
        }
        done(create.arg(&image.path).arg(self.disk_bytes.to_string()))
    }
}

/// Checks with QEMU that `image` is neither corrupt nor leaking.
///
/// # Errors
/// With QEMU's output.
pub(crate) fn check(image: &Image) -> Result<()> {
    if image.kind.format() == "raw" {
        return Ok(());
    }
    chains::qemu_checks(&image.path)
}

fn done(command: &mut Command) -> Result<()> {
    let finished = command::finish(command);
    ensure!(finished.status.success(), "{finished}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Kind;

    #[test]
    fn only_the_rest_of_touched_units_is_copied() {
        let two_in_one_cluster = [0, 8192, 1 << 20];
        assert_eq!(Kind::Overlay.copied_bytes(&two_in_one_cluster, 4096), 2 * 60 * 1024);
        assert_eq!(Kind::Subclusters.copied_bytes(&two_in_one_cluster, 4096), 0);
        assert_eq!(Kind::Overlay.copied_bytes(&[0, 65536], 65536), 0);
        assert_eq!(Kind::Empty.copied_bytes(&two_in_one_cluster, 4096), 0);
    }
}
