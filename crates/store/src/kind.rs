//! The kinds of files that a store can be in.

use mica_block::{Error, ErrorKind};
use mica_rt::Access;
use mica_units::HostOffset;
use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use std::path::Path;

/// The kind of file that a store is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
}

pub(crate) fn open_flags(access: Access) -> OFlags {
    match access {
        Access::Buffered => OFlags::empty(),
        Access::Direct => OFlags::DIRECT,
    }
}

pub(crate) fn not_an_image(path: &Path, what: &str) -> Error {
    let path = path.display();
    Error::new(
        ErrorKind::Invalid,
        format!("{path} is {what}: an image is a regular file or a block device"),
    )
}

pub(crate) fn no_direct(path: &Path) -> Error {
    let path = path.display();
    let what =
        format!("the file system of {path} does not support O_DIRECT: use --cache writeback");
    Error::new(ErrorKind::Unsupported, what)
}

/// The end of `len` bytes at `offset`, if a file can be that long.
pub(crate) fn end_of(offset: HostOffset, len: u64) -> Option<u64> {
    offset.bytes().checked_add(len).filter(|end| i64::try_from(*end).is_ok())
}

/// A time in nanoseconds.
pub fn nanoseconds(seconds: i64, nanos: u64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanos)
}

/// The current time, by the clock that stamps files: anything that changes after this call is
/// stamped with this time or a later one.
pub fn now_ns() -> i128 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    nanoseconds(now.tv_sec, u64::try_from(now.tv_nsec).unwrap_or(0))
}
