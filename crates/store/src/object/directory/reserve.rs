//! Space that a store keeps for itself, so that something can be deleted from it when its file
//! system is full: a deletion is recorded by one more object, before anything is freed.
//!
//! It is a file in the folder of new files, which is made with the first object that is put, and
//! given up by whoever finds no room for such a record. Once there is room, the next object that is
//! put or deleted makes it again. It is no promise: others may be faster to take what was given up.

use super::new::{FOLDER, open_folder};
use super::root::Root;
use mica_block::Result;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, fstat, fsync, openat, unlinkat,
};
use rustix::io::Errno;
use std::sync::atomic::Ordering;

/// The file in [`FOLDER`].
pub(super) const NAME: &str = "reserve";
/// What it takes: some objects of a few KiB, and blocks of the folders that they are in.
const BYTES: u64 = 256 << 10;
/// In what `stat` counts.
const BLOCK_BYTES: u64 = 512;

impl Root {
    /// Something was put or deleted: so there is the reserve, too, if there is room. Once it is
    /// there, nobody looks again.
    pub(super) fn keep_reserve(&self) {
        if !self.has_reserve.load(Ordering::Relaxed) {
            let is_kept = match self.make_reserve() {
                // Without a way to set space aside there is none.
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => true,
                Err(_) => false,
            };
            self.has_reserve.store(is_kept, Ordering::Relaxed);
        }
    }

    fn make_reserve(&self) -> rustix::io::Result<()> {
        let folder = open_folder(self)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&folder, NAME, flags, Mode::RUSR | Mode::WUSR)?;
        let has = u64::try_from(fstat(&file)?.st_blocks).unwrap_or(0) * BLOCK_BYTES;
        if has >= BYTES {
            return Ok(());
        }
        let allocated = fallocate(&file, FallocateFlags::empty(), 0, BYTES);
        if allocated.is_err() {
            // Part of it would be missed elsewhere.
            unlinkat(&folder, NAME, AtFlags::empty())?;
        }
        allocated
    }

    /// See [`mica_block::Objects::give_up_reserve`].
    pub(super) fn give_up_reserve(&self) -> Result<bool> {
        let failed = |error: Errno| self.failed("giving up space in", FOLDER, error.into());
        let folder = open_folder(self).map_err(failed)?;
        self.has_reserve.store(false, Ordering::Relaxed);
        match unlinkat(&folder, NAME, AtFlags::empty()) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(failed(error)),
        }
        // Some file systems have the space only when that is durable.
        fsync(&folder).map_err(failed)?;
        tracing::info!("{} is full: the space that it had in reserve was given up", self.name());
        Ok(true)
    }
}
