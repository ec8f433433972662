//! Disks that were drained and then lost their names: whoever drained one wants its image left
//! alone, and does not say otherwise by giving the disk another name.

use super::{DiskConfig, LeftClosed};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Drained disks that the configuration no longer has, by their images.
#[derive(Default)]
pub(crate) struct GoneDisks(BTreeMap<PathBuf, GoneDisk>);

/// One of them.
pub(crate) struct GoneDisk {
    pub(crate) name: String,
    pub(crate) left: LeftClosed,
}

impl GoneDisks {
    /// Adds one. Of two that had the same image, the one that has lost something counts.
    pub(crate) fn add(&mut self, image: PathBuf, disk: GoneDisk) {
        match self.0.get(&image) {
            Some(other) if other.left.loss.is_some() => {}
            _ => drop(self.0.insert(image, disk)),
        }
    }

    /// Which of them `disk` is, under its new name. None if `is_known` says that a disk of this
    /// name was there beside it. Nor is it one of them if it only reads the image: many may do that
    /// at the same time. Ephemeral disks are among those: what clients of one wrote is found under
    /// its name only, as the next one above the same image may be another guest's.
    pub(crate) fn renamed(
        &self,
        disk: &DiskConfig,
        is_known: impl FnOnce(&str) -> bool,
    ) -> Option<&GoneDisk> {
        let gone = self.0.get(&disk.image)?;
        (disk.writes() && !is_known(&disk.name)).then_some(gone)
    }
}
