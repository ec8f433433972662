//! A file that is written mostly in order: runs are gathered and written in large pieces.

use mica_block::{Error, ErrorKind, Result};
use mica_store::{CacheMode, Handles, Located, Locking, WritableFile};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Bytes gathered before they are written.
const GATHERED_BYTES_MAX: usize = 2 << 20;

/// A file being written. Whatever is never written stays a hole.
pub(crate) struct Sink {
    file: File,
    /// Keeps other programs out until the file is complete.
    _locks: WritableFile,
    path: PathBuf,
    gathered: Vec<u8>,
    /// Where the gathered bytes belong.
    start: u64,
}

impl Sink {
    /// Makes the file, empty. An existing one is truncated, unless another program uses it.
    pub(crate) fn create(path: &Path) -> Result<Self> {
        let failed = |error| Error::from_io(format!("creating {}", path.display()), error);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(path).map_err(failed)?;
        let locks = lock(path)?;
        file.set_len(0).map_err(failed)?;
        Ok(Self { file, _locks: locks, path: path.to_owned(), gathered: Vec::new(), start: 0 })
    }

    /// A zeroed buffer for the `len` bytes at `offset`, for the caller to fill.
    pub(crate) fn room(&mut self, offset: u64, len: usize) -> Result<&mut [u8]> {
        let end = self.start + self.gathered.len() as u64;
        if offset != end || self.gathered.len() + len > GATHERED_BYTES_MAX {
            self.flush()?;
            self.start = offset;
        }
        let before = self.gathered.len();
        self.gathered.resize(before + len, 0);
        Ok(&mut self.gathered[before..])
    }

    /// Writes `bytes` at `offset`.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.room(offset, bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    /// Writes what is gathered and makes the file `len` bytes long.
    pub(crate) fn finish(mut self, len: u64) -> Result<()> {
        self.flush()?;
        self.file.set_len(len).map_err(|error| self.error(error))
    }

    fn flush(&mut self) -> Result<()> {
        let written = self.file.write_all_at(&self.gathered, self.start);
        self.gathered.clear();
        written.map_err(|error| self.error(error))
    }

    fn error(&self, error: std::io::Error) -> Error {
        Error::from_io(format!("writing {}", self.path.display()), error)
    }
}

/// Checks that no other program uses the image at `path`, if there is one.
pub(crate) fn check_unused(path: &Path) -> Result<()> {
    match lock(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Takes QEMU's locks of an image that is written.
fn lock(path: &Path) -> Result<WritableFile> {
    let mut located = Located::find(path)?;
    WritableFile::open(&mut located, CacheMode::Writeback, Locking::On, &Handles::new(0))
}
