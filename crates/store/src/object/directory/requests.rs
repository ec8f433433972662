//! What is asked of a store in a directory, apart from listings.

use super::early::EarlyNames;
use super::new::{Content, NewFile, remove_second_name};
use super::root::Root;
use crate::file::{CacheMode, FileStore};
use crate::kind::FileKind;
use crate::located::Located;
use mica_block::{Error, ErrorKind, ObjectName, PROBE_FOLDER, Put, Result};
use mica_units::SECTOR_BYTES;
use rustix::fd::OwnedFd;
use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, fstat, openat, statat, unlinkat,
};
use rustix::io::Errno;
use std::ops::Range;

/// Bytes beyond the end of an object that become a hole to see whether there are any.
const PUNCHED_BEYOND: u64 = 4096;
/// Descriptors of an object, its folder, and the folder of new files, which is opened twice to be
/// listed.
const NAMES_DESCRIPTORS: usize = 4;

/// When the name of an object is durable.
#[derive(Clone, Copy)]
pub(super) enum Names<'a> {
    /// When the put is answered; with those that were left for it.
    Now(&'a EarlyNames),
    /// With the next object in its folder.
    Later(&'a EarlyNames),
}

impl Root {
    /// See [`mica_block::Objects::put_if_absent`] and [`mica_block::Objects::put_early`].
    pub(super) fn put(
        &self,
        name: &ObjectName,
        content: Content<'_>,
        names: Names<'_>,
    ) -> Result<Put> {
        let failed = |error| self.failed("putting", name.as_str(), error);
        // The new file, the folder of new files, and the folder of the object.
        let _descriptors = self.handles.set_aside(3);
        let (folder_name, last) = split(name);
        let folder = self.make_folder(folder_name)?;
        if self.is_there(name, &folder)? {
            return Ok(Put::Exists);
        }
        let mut new = NewFile::create(self)?;
        new.fill(content).map_err(failed)?;
        match new.link(&folder, last) {
            Ok(()) => {
                let (new, early) = match names {
                    Names::Now(early) => (Some(new), early),
                    Names::Later(early) => (early.leave(folder_name, new), early),
                };
                let Some(new) = new else { return Ok(Put::Done) };
                // Those that were linked before the sync. On an error all keep both names (I2).
                let early = early.take(folder_name);
                self.make_durable(folder_name, &folder)?;
                early.into_iter().chain([new]).for_each(NewFile::remove);
                self.keep_reserve();
                Ok(Put::Done)
            }
            Err(Errno::EXIST) if self.is_there(name, &folder)? => Ok(Put::Exists),
            // Removed as abandoned, or the folder was, or an object that was there: not for good.
            Err(error @ (Errno::NOENT | Errno::EXIST)) => {
                let what = format!("putting {}: {error}", self.path_of(name.as_str()).display());
                Err(Error::new(ErrorKind::Io, what))
            }
            Err(Errno::PERM | Errno::OPNOTSUPP | Errno::MLINK) => {
                let what = format!("the file system of {} has no hard links", self.name());
                Err(Error::new(ErrorKind::Unsupported, what))
            }
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Whether `folder` has the object `name`, which is durable then.
    fn is_there(&self, name: &ObjectName, folder: &OwnedFd) -> Result<bool> {
        let (folder_name, last) = split(name);
        match statat(folder, last, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => {
                self.check_regular(name, &stat)?;
                if stat.st_nlink > 1 {
                    self.make_durable(folder_name, folder)?;
                }
                Ok(true)
            }
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(self.failed("putting", name.as_str(), error.into())),
        }
    }

    /// The file of an object, opened, and its length.
    pub(super) fn find(&self, name: &ObjectName) -> Result<(FileStore, u64)> {
        let (folder_name, last) = split(name);
        let Some(folder) = self.open_folder(folder_name)? else {
            let what = format!("{} has no object {name}", self.name());
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let located = Located::find_in(&folder, last, &self.path_of(name.as_str()))?;
        let Some(len) = located.known_len().filter(|_| located.kind() == FileKind::Regular) else {
            return Err(self.not_regular(name));
        };
        match located.has_other_names() {
            true => self.make_durable(folder_name, &folder)?,
            false => self.note_durable(folder_name),
        }
        Ok((FileStore::new_opened(&located, CacheMode::Writeback, &self.handles)?, len))
    }

    /// See [`mica_block::Objects::delete`].
    pub(super) fn delete(&self, name: &ObjectName) -> Result<()> {
        let (folder_name, last) = split(name);
        let Some(folder) = self.open_folder(folder_name)? else { return Ok(()) };
        let _descriptors = self.handles.set_aside(NAMES_DESCRIPTORS);
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = openat(&folder, last, flags, Mode::empty())
            .and_then(|file| fstat(&file).map(|stat| (file, stat)));
        let deleted = match found {
            // The file stays open: no other one gets its inode number meanwhile.
            Ok((_file, stat)) => {
                self.check_regular(name, &stat)?;
                // Otherwise it would take its space for as long as the other name is there.
                unlinkat(&folder, last, AtFlags::empty())
                    .and_then(|()| remove_second_name(self, &stat))
            }
            Err(error) => Err(error),
        };
        match deleted {
            Ok(()) | Err(Errno::NOENT) => {
                self.remove_probed(folder_name);
                self.restore_reserve();
                Ok(())
            }
            Err(error) => Err(self.failed("deleting", name.as_str(), error.into())),
        }
    }

    /// Removes a folder of a probe, and that of all probes, once they are empty: other folders may
    /// be about to get an object. What cannot be removed stays.
    fn remove_probed(&self, folder: &str) {
        let Some((PROBE_FOLDER, probe)) = folder.split_once('/') else { return };
        let Ok(Some(probes)) = self.open_folder(PROBE_FOLDER) else { return };
        if unlinkat(&probes, probe, AtFlags::REMOVEDIR).is_ok() {
            let _ = unlinkat(self.file(), PROBE_FOLDER, AtFlags::REMOVEDIR);
        }
    }
}

impl Root {
    /// See [`mica_block::Objects::punch`]: pages of the file become holes. Those of a file with
    /// another name stay: a copy of the store may have it (`cp -al`), whose volumes need what these
    /// do not.
    pub(super) fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> Result<u64> {
        let failed = |error: Errno| match error {
            Errno::OPNOTSUPP | Errno::NOSYS => {
                let what = format!("the file system of {} makes no holes", self.name());
                Error::new(ErrorKind::Unsupported, what)
            }
            error => self.failed("giving back parts of", name.as_str(), error.into()),
        };
        let (folder_name, last) = split(name);
        let Some(folder) = self.open_folder(folder_name)? else { return Ok(0) };
        let _descriptors = self.handles.set_aside(NAMES_DESCRIPTORS);
        let flags = OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match openat(&folder, last, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(0),
            Err(error) => return Err(failed(error)),
        };
        let mut before = fstat(&file).map_err(failed)?;
        self.check_regular(name, &before)?;
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if ranges.is_empty() {
            // Changes nothing, and asks the file system.
            let end = u64::try_from(before.st_size).unwrap_or(0).next_multiple_of(PUNCHED_BEYOND);
            fallocate(&file, mode, end, PUNCHED_BEYOND).map_err(failed)?;
        }
        if before.st_nlink > 1 {
            // Of a process that was killed: nothing else would end that for an hour (I2).
            self.make_durable(folder_name, &folder)?;
            remove_second_name(self, &before).map_err(failed)?;
            before = fstat(&file).map_err(failed)?;
        }
        if before.st_nlink > 1 {
            return Ok(0);
        }
        for range in ranges {
            let len = range.end.saturating_sub(range.start);
            fallocate(&file, mode, range.start, len).map_err(failed)?;
        }
        let after = fstat(&file).map_err(failed)?;
        let sectors = u64::try_from(before.st_blocks.saturating_sub(after.st_blocks));
        Ok(sectors.unwrap_or(0) * SECTOR_BYTES)
    }
}

/// The folder that an object is in, and its name there.
fn split(name: &ObjectName) -> (&str, &str) {
    name.as_str().rsplit_once('/').unwrap_or(("", name.as_str()))
}
