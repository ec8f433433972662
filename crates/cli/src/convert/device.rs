//! A block device that becomes a qcow2 image.

use super::existing::claim;
use crate::create::is_block_device;
use crate::failure::Failure;
use mica_block::Disk;
use mica_qcow2_tools::create::ImagePlan;
use mica_qcow2_tools::measure::{data_bytes, measure};
use rustix::fd::OwnedFd;
use rustix::fs::{SeekFrom, seek};
use std::path::{Path, PathBuf};

/// A block device that nobody else has.
pub(super) struct Device {
    path: PathBuf,
    claim: OwnedFd,
}

impl Device {
    /// The device at `path`, if there is one.
    pub(super) fn of(path: &Path) -> Result<Option<Self>, Failure> {
        if !is_block_device(path) {
            return Ok(None);
        }
        Ok(Some(Self { path: path.to_owned(), claim: claim(path)? }))
    }

    /// The most bytes that an image of `plan` takes, which is refused if a copy of `source` alone
    /// needs more than the device has.
    pub(super) async fn room_for(
        &self,
        plan: &ImagePlan,
        source: Option<&dyn Disk>,
    ) -> Result<u64, Failure> {
        let there = seek(&self.claim, SeekFrom::End(0)).map_err(|error| {
            let what = format!("asking for the length of {}", self.path.display());
            Failure::from(std::io::Error::from(error)).within(what)
        })?;
        let data = match source {
            Some(source) => data_bytes(source, plan.l2.cluster_bits).await?,
            None => 0,
        };
        let measured = measure(plan, data);
        if source.is_some() && there < measured.required {
            return Err(Failure::new(format!(
                "{} is too small: it holds {there} bytes, and the image needs {} (mica measure)",
                self.path.display(),
                measured.required
            )));
        }
        Ok(measured.fully_allocated)
    }
}
