//! The kinds of files that a store can be in.

use mica_block::{Error, ErrorKind};
use mica_rt::Access;
use mica_units::HostOffset;
use rustix::fs::{FileType, OFlags};
use std::path::Path;

/// The kind of file that a store is in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileKind {
    /// A regular file.
    Regular,
    /// A block device.
    BlockDevice,
}

impl FileKind {
    /// What the system calls it.
    pub(crate) fn file_type(self) -> FileType {
        match self {
            Self::Regular => FileType::RegularFile,
            Self::BlockDevice => FileType::BlockDevice,
        }
    }
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
