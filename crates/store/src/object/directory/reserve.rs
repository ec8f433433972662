//! Space that a store keeps for itself, so that something can be deleted from it when its file
//! system is full: a deletion is recorded by one more object, before anything is freed.
//!
//! It is a file in the folder of new files. A process makes it, if it is not there, with the first
//! object that it puts or deletes. Whoever finds no room for such a record gives it up, and makes
//! it again with the next object that it deletes. It is no promise: others may be faster to take
//! what was given up, and some file systems only seem to set space aside.

use super::new::{FOLDER, open_folder};
use super::root::{FOLDER_FLAGS, Reserve, Root};
use mica_block::Result;
use rustix::fd::AsFd;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, fstat, fsync, openat, statat, unlinkat,
};
use rustix::io::Errno;

/// The file in [`FOLDER`].
pub(super) const NAME: &str = "reserve";
/// Its size: some objects of a few KiB, and blocks of the folders that they are in.
const BYTES: u64 = 256 << 10;
/// In what `stat` counts.
const BLOCK_BYTES: u64 = 512;

impl Root {
    /// Something was put: so there is the reserve, too, if there is room.
    pub(super) fn keep_reserve(&self) {
        let known = *self.reserve.lock();
        if known == Reserve::Unknown {
            self.settle_reserve();
        }
    }

    /// As [`Self::keep_reserve`], when something was deleted: what was given up is made again.
    pub(super) fn restore_reserve(&self) {
        let known = *self.reserve.lock();
        if known != Reserve::Settled {
            self.settle_reserve();
        }
    }

    fn settle_reserve(&self) {
        match self.make_reserve() {
            // There may be room later.
            Err(Errno::NOSPC | Errno::DQUOT) => {}
            Ok(()) | Err(_) => *self.reserve.lock() = Reserve::Settled,
        }
    }

    fn make_reserve(&self) -> rustix::io::Result<()> {
        let folder = open_folder(self)?;
        let open = || {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            openat(&folder, NAME, flags, Mode::RUSR | Mode::WUSR)
        };
        let (mut file, remove) = (open()?, || unlinkat(&folder, NAME, AtFlags::empty()));
        if fstat(&file)?.st_nlink > 1 {
            // A copy of the store has it, too (`cp -al`), so that giving it up would free nothing.
            remove()?;
            file = open()?;
        }
        let has = u64::try_from(fstat(&file)?.st_blocks).unwrap_or(0) * BLOCK_BYTES;
        if has >= BYTES {
            return Ok(());
        }
        let allocated = fallocate(&file, FallocateFlags::empty(), 0, BYTES);
        if allocated.is_err() {
            // Part of it would be missed elsewhere.
            remove()?;
        }
        allocated
    }

    /// See [`mica_block::Objects::give_up_reserve`].
    pub(super) fn give_up_reserve(&self) -> Result<bool> {
        let failed = |error: Errno| self.failed("giving up space in", FOLDER, error.into());
        let folder = match openat(self.file().as_fd(), FOLDER, FOLDER_FLAGS, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(false),
            opened => opened.map_err(failed)?,
        };
        let links = statat(&folder, NAME, AtFlags::SYMLINK_NOFOLLOW).map(|stat| stat.st_nlink);
        let removed = links.and_then(|_| unlinkat(&folder, NAME, AtFlags::empty()));
        // Or another process has.
        *self.reserve.lock() = Reserve::GivenUp;
        match removed {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(false),
            Err(error) => return Err(failed(error)),
        }
        // Some file systems have the space only when that is durable.
        fsync(&folder).map_err(failed)?;
        tracing::info!("{} is full: the space that it had in reserve was given up", self.name());
        Ok(links == Ok(1))
    }
}
