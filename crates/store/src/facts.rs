//! What the system reports about an open file: its length, its space, its holes.

use crate::kind::FileKind;
use crate::stamp::nanoseconds;
use mica_block::{Error, ErrorKind, Result, Run, RunKind, Witness};
use mica_rt::File;
use mica_units::SECTOR_BYTES;
use rustix::fs::{AtFlags, SeekFrom, StatxFlags, fstat, seek, statx};
use rustix::io::Errno;
use std::path::Path;

/// An open file, and its name in messages.
#[derive(Clone, Copy)]
pub(crate) struct Facts<'a> {
    pub(crate) file: &'a File,
    pub(crate) path: &'a Path,
    pub(crate) kind: FileKind,
}

impl Facts<'_> {
    pub(crate) fn len(self) -> Result<u64> {
        let len = match self.kind {
            FileKind::Regular => {
                fstat(self.file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0))
            }
            // Nothing reads at the descriptor's own position, so it may move.
            FileKind::BlockDevice => seek(self.file, SeekFrom::End(0)),
        };
        len.map_err(|error| self.failed("asking for the length of", error))
    }

    pub(crate) fn allocated_bytes(self) -> Result<u64> {
        let stat = fstat(self.file);
        let stat = stat.map_err(|error| self.failed("asking for the size of", error))?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(SECTOR_BYTES))
    }

    pub(crate) fn run_at(self, offset: u64, len: u64) -> Result<Run> {
        let nothing_more = Run { kind: RunKind::Hole, len };
        let data = |end: u64| Run { kind: RunKind::Data, len: len.min(end - offset) };
        let file_len = self.len()?;
        if offset >= file_len {
            return Ok(nothing_more);
        }
        let next = match seek(self.file, SeekFrom::Data(offset)) {
            // Only a hole up to the end, or the file was truncated just now.
            Err(Errno::NXIO) => return Ok(nothing_more),
            // Devices and some file systems do not report holes: all of it is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(data(file_len)),
            Err(error) => return Err(self.failed("looking for data in", error)),
            Ok(next) => next,
        };
        if next > offset {
            return Ok(Run { kind: RunKind::Hole, len: len.min(next - offset) });
        }
        match seek(self.file, SeekFrom::Hole(offset)) {
            Ok(end) if end > offset => Ok(data(end)),
            // Someone punched or truncated the file in between. Calling it data is always safe.
            Ok(_) | Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(data(file_len)),
            Err(error) => Err(self.failed("looking for a hole in", error)),
        }
    }

    /// As [`Self::witness`], for a file whose mount generation is not known yet.
    pub(crate) fn witness_now(self) -> Witness {
        let generation =
            fstat(self.file).ok().and_then(|stat| crate::mount_generation::of(self.kind, &stat));
        self.witness(generation)
    }

    /// What shows whether the file, which has this mount generation, lost what was written.
    pub(crate) fn witness(self, mount_generation: Option<u64>) -> Witness {
        let ask = |flags| statx(self.file, c"", AtFlags::EMPTY_PATH | flags, StatxFlags::CTIME);
        match (mount_generation, self.kind) {
            (Some(generation), _) => Witness::MountGeneration(generation),
            // A network file system would write everything out first to be exact.
            (None, FileKind::Regular) => {
                ask(AtFlags::STATX_DONT_SYNC).map_or(Witness::None, |stat| {
                    let time = stat.stx_ctime;
                    Witness::Changed(nanoseconds(time.tv_sec, u64::from(time.tv_nsec)))
                })
            }
            // No timestamp shows that a device was written.
            (None, FileKind::BlockDevice) => Witness::None,
        }
    }

    fn failed(self, doing: &str, error: Errno) -> Error {
        Error::from_io(format!("{doing} {}", self.path.display()), error.into())
    }
}

pub(crate) fn check_run_len(len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::new(ErrorKind::Invalid, "a run of zero bytes was requested"));
    }
    Ok(())
}
