//! Locks of bytes of a file that belong to an open file description (F_OFD_SETLK): they are held
//! until its last descriptor is closed, and two descriptions of one process conflict just as those
//! of two processes do.

use crate::file::File;
use nix::fcntl::{FcntlArg, fcntl};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

impl File {
    /// Takes a shared lock on `len` bytes at `start` without waiting: fails with EAGAIN or EACCES
    /// if someone holds an exclusive one.
    ///
    /// # Errors
    /// Any error of the system.
    pub fn lock_shared(&self, start: u64, len: u64) -> io::Result<()> {
        self.set_lock(libc::F_RDLCK, start, len)?;
        self.has_locks.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Releases the locks on `len` bytes at `start`.
    ///
    /// # Errors
    /// Any error of the system.
    pub fn unlock_range(&self, start: u64, len: u64) -> io::Result<()> {
        self.set_lock(libc::F_UNLCK, start, len)
    }

    /// Releases all locks. Closing does so as well, but not at once: a ring releases a file some
    /// time after its operations are complete, and even after the process has ended.
    pub(crate) fn unlock(&self) {
        if self.has_locks.swap(false, Ordering::Relaxed) {
            // If this fails, closing releases them.
            let _ = self.set_lock(libc::F_UNLCK, 0, 0);
        }
    }

    /// Whether another description of the file holds a lock of any kind on any of `len` bytes at
    /// `start`.
    ///
    /// # Errors
    /// Any error of the system.
    pub fn is_locked_elsewhere(&self, start: u64, len: u64) -> io::Result<bool> {
        let mut answer = lock(libc::F_WRLCK, start, len)?;
        fcntl(self.as_fd(), FcntlArg::F_OFD_GETLK(&mut answer))?;
        Ok(i32::from(answer.l_type) != libc::F_UNLCK)
    }

    fn set_lock(&self, kind: i32, start: u64, len: u64) -> io::Result<()> {
        fcntl(self.as_fd(), FcntlArg::F_OFD_SETLK(&lock(kind, start, len)?))?;
        Ok(())
    }
}

fn lock(kind: i32, start: u64, len: u64) -> io::Result<libc::flock> {
    let offset_of = |value| i64::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
    let small = |value| i16::try_from(value).map_err(|_| io::ErrorKind::InvalidInput);
    Ok(libc::flock {
        l_type: small(kind)?,
        l_whence: small(libc::SEEK_SET)?,
        l_start: offset_of(start)?,
        l_len: offset_of(len)?,
        // The system requires zero here for this kind of lock.
        l_pid: 0,
    })
}
