//! Listing what is in a folder.

use super::root::Root;
use mica_block::{Entry, LIST_MAX, ObjectName, Result};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Dir, FileType, Stat, statat};
use rustix::io::Errno;
use std::collections::BinaryHeap;
use std::ops::ControlFlow;

/// A folder that is listed.
struct Listed<'a> {
    root: &'a Root,
    /// Its name; `""` for the directory itself.
    name: &'a str,
    fd: OwnedFd,
    /// Whether an object was found whose name may not be durable (I2 of `directory.rs`).
    has_undurable: bool,
}

impl Root {
    /// See [`mica_block::Objects::list`]. Reads all of the folder for each call, and keeps no more
    /// of it than it returns.
    pub(super) fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> Result<Vec<Entry>> {
        let name = folder.map_or("", ObjectName::as_str);
        let Some(fd) = self.open_folder(name)? else { return Ok(Vec::new()) };
        let Some(mut after) = part_after(name, after) else { return Ok(Vec::new()) };
        let mut listed = Listed { root: self, name, fd, has_undurable: false };
        let mut entries = Vec::new();
        while entries.len() < LIST_MAX {
            let asked = LIST_MAX - entries.len();
            let parts = listed.first_parts(&after, asked)?;
            for part in &parts {
                entries.extend(listed.entry(part)?);
            }
            // Folders without objects were no entries, and what was deleted just now.
            match parts.into_iter().nth(asked - 1) {
                Some(last) => after = last,
                None => break,
            }
        }
        if listed.has_undurable {
            self.make_durable(name, &listed.fd)?;
        }
        Ok(entries)
    }
}

/// What the first part that is listed in `folder` has to be greater than; `None` if none is.
fn part_after(folder: &str, after: Option<&ObjectName>) -> Option<String> {
    let Some(after) = after.map(ObjectName::as_str) else { return Some(String::new()) };
    if folder.is_empty() {
        return Some(after.to_owned());
    }
    match after.strip_prefix(folder).and_then(|rest| rest.strip_prefix('/')) {
        Some(rest) => Some(rest.to_owned()),
        None => (*after < *format!("{folder}/")).then(String::new),
    }
}

impl Listed<'_> {
    fn failed(&self, error: Errno) -> mica_block::Error {
        self.root.failed("listing", self.name, error.into())
    }

    /// The name of an object or a folder in it; `None` if no object can have it.
    fn name_of(&self, part: &str) -> Option<ObjectName> {
        match self.name {
            "" => ObjectName::new(part).ok(),
            name => ObjectName::new(&format!("{name}/{part}")).ok(),
        }
    }

    /// The first `count` names in it that are greater than `after`, in order.
    fn first_parts(&self, after: &str, count: usize) -> Result<Vec<String>> {
        let mut first = BinaryHeap::with_capacity(count + 1);
        each_entry(&self.fd, |part, _| {
            let is_wanted = part > after
                && (first.len() < count || first.peek().is_some_and(|last: &String| part < last));
            if is_wanted && ObjectName::new(part).is_ok() {
                first.push(part.to_owned());
                if first.len() > count {
                    first.pop();
                }
            }
            ControlFlow::Continue(())
        })
        .map_err(|error| self.failed(error))?;
        Ok(first.into_sorted_vec())
    }

    /// The entry of what has the name `part` in it, if there is one.
    fn entry(&mut self, part: &str) -> Result<Option<Entry>> {
        let Some(name) = self.name_of(part) else { return Ok(None) };
        let stat = match statat(&self.fd, part, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(self.failed(error)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => {
                self.has_undurable |= stat.st_nlink > 1;
                let len = u64::try_from(stat.st_size).unwrap_or(0);
                Ok(Some(Entry::Object { name, len }))
            }
            FileType::Directory => {
                let has_objects = self.root.has_objects(name.as_str())?;
                Ok(has_objects.then_some(Entry::Folder(name)))
            }
            _ => Err(self.root.not_regular(&name)),
        }
    }
}

impl Root {
    /// Whether an object is in the folder `name`, or in a folder in it.
    fn has_objects(&self, name: &str) -> Result<bool> {
        let mut folders = vec![name.to_owned()];
        while let Some(name) = folders.pop() {
            let Some(fd) = self.open_folder(&name)? else { continue };
            let mut is_found = false;
            let found = each_entry(&fd, |part, kind| {
                let Ok(inner) = ObjectName::new(&format!("{name}/{part}")) else {
                    return ControlFlow::Continue(());
                };
                let is_folder =
                    || statat(&fd, part, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(is_folder);
                if kind == FileType::Directory || (kind == FileType::Unknown && is_folder()) {
                    folders.push(inner.as_str().to_owned());
                    return ControlFlow::Continue(());
                }
                // What is not regular, either: who lists it is told.
                is_found = true;
                ControlFlow::Break(())
            });
            found.map_err(|error| self.failed("listing", &name, error.into()))?;
            if is_found {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

fn is_folder(stat: Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

/// Calls `act` with each name in `folder`, and what has it as far as that is known.
fn each_entry(
    folder: &OwnedFd,
    mut act: impl FnMut(&str, FileType) -> ControlFlow<()>,
) -> rustix::io::Result<()> {
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        // Other names are no objects'.
        let Ok(part) = entry.file_name().to_str() else { continue };
        if act(part, entry.file_type()).is_break() {
            break;
        }
    }
    Ok(())
}
