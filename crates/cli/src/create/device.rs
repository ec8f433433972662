//! A block device that becomes a qcow2 image.
//!
//! Invariants
//! - I1 It is claimed (O_EXCL) before anything is written to it, until the image is complete: a
//!   device that is mounted, or part of another, is never overwritten.
//! - I2 One that is known to be too small is refused before anything is written.

use crate::failure::Failure;
use mica_block::{Space, Store, write_all};
use mica_qcow2_format::BitmapEntry;
use mica_qcow2_tools::create::{ImagePlan, Preallocation};
use mica_qcow2_tools::measure::{Measure, measure_with_bitmaps};
use mica_rt::Buf;
use mica_units::HostOffset;
use rustix::fd::OwnedFd;
use rustix::fs::{Mode, OFlags, SeekFrom, open, seek};
use rustix::io::Errno;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

/// A block device that nobody else has.
pub(crate) struct Device {
    path: PathBuf,
    claim: OwnedFd,
}

impl Device {
    /// The device at `path`, if there is one.
    pub(crate) fn of(path: &Path) -> Result<Option<Self>, Failure> {
        if !is_block_device(path) {
            return Ok(None);
        }
        Ok(Some(Self { path: path.to_owned(), claim: claim(path)? }))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes at its start that an image of `plan` may take without having written them. It is
    /// refused if it needs more than the device has: space for all of its disk, as the plan may
    /// want, or that for `data_bytes` of clusters, if that is known; and that for `bitmaps`.
    pub(crate) fn room_for(
        &self,
        plan: &ImagePlan,
        data_bytes: Option<u64>,
        bitmaps: &[BitmapEntry],
    ) -> Result<u64, Failure> {
        let there = seek(&self.claim, SeekFrom::End(0)).map_err(|error| {
            let what = format!("asking for the length of {}", self.path.display());
            Failure::from(std::io::Error::from(error)).within(what)
        })?;
        let measured = measure_image(plan, data_bytes.unwrap_or(0), bitmaps);
        let Measure { required, fully_allocated: most } = measured;
        let needed = match (plan.preallocation, data_bytes) {
            (Preallocation::Off, None) => 0,
            (Preallocation::Off, Some(_)) => required,
            _ => most,
        };
        if there < needed {
            return Err(Failure::new(format!(
                "{} is too small: it holds {there} bytes, and the image needs {needed} \
                 (mica measure)",
                self.path.display(),
            )));
        }
        Ok(most.min(there))
    }
}

/// The bytes that the image of `plan` itself takes: what is in a data file is elsewhere.
fn measure_image(plan: &ImagePlan, data_bytes: u64, bitmaps: &[BitmapEntry]) -> Measure {
    let measured = measure_with_bitmaps(plan, data_bytes, bitmaps);
    if plan.data_file.is_none() {
        return measured;
    }
    let data = plan.l2.cluster_bits.bytes_of(plan.clusters());
    let besides = measured.fully_allocated - data;
    Measure { required: besides, fully_allocated: besides }
}

/// Whether `path` names a block device.
pub(crate) fn is_block_device(path: &Path) -> bool {
    path.metadata().is_ok_and(|found| found.file_type().is_block_device())
}

/// Claims the device at `path`: nothing that mounts devices or builds others from them can have it
/// now, or get it.
pub(crate) fn claim(path: &Path) -> Result<OwnedFd, Failure> {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    open(path, flags, Mode::empty()).map_err(|error| {
        let name = path.display();
        Failure::new(match error {
            Errno::BUSY => format!("{name} is in use: it is mounted, or part of another device"),
            error => format!("opening {name}: {}", std::io::Error::from(error)),
        })
    })
}

/// Makes the first `len` bytes of a device read as zeros, durably.
pub(super) async fn zero(device: &dyn Store, len: u64) -> mica_block::Result<()> {
    let mut at = 0;
    while at < len {
        let piece = ZEROED_BYTES_MAX.min(len - at);
        if device.space(Space::Zero, HostOffset::new(at), piece).await.is_err() {
            return write_zeros(device, at, len).await;
        }
        at += piece;
    }
    device.sync().await
}

/// As [`zero`], for a device that only takes them as data.
async fn write_zeros(device: &dyn Store, mut at: u64, len: u64) -> mica_block::Result<()> {
    while at < len {
        let piece = (len - at).min(WRITTEN_BYTES as u64);
        let zeros = Buf::zeroed(usize::try_from(piece).unwrap_or(WRITTEN_BYTES));
        write_all(device, zeros, HostOffset::new(at)).await?;
        at += piece;
    }
    device.sync().await
}

/// Bytes that a device zeroes at a time: it may take long over them.
const ZEROED_BYTES_MAX: u64 = 1 << 30;
/// Bytes of zeros that are written at a time.
const WRITTEN_BYTES: usize = 1 << 20;
