//! Small files beside a layer that say something of it, and the one that says where the writing
//! of its disk goes on, which `above.rs` follows.
//!
//! Invariants
//! - I1 A mark counts only if it is a regular file that only those could have written who can write
//!   the layer: its owner is the layer's owner, this process, or root, and it is not writable by
//!   everyone.
//! - I2 A mark is put in its place whole.

use crate::files::sync_folder_of;
use crate::temporary::{Locked, NEW_ABOVE};
use mica_block::{Error, ErrorKind, Result};
use mica_store::NamelessFile;
use rustix::fs::OFlags;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The ending of a mark's name.
pub(crate) const SUFFIX: &str = ".mica-above";
/// What stands before the name in it.
pub(crate) const KEY: &[u8] = b"above: ";
/// Longest content of a mark, in bytes: a path, and what is around it.
pub(crate) const CONTENT_BYTES_MAX: u64 = 4096 + 64;

/// The mark of one layer.
#[derive(Debug)]
pub(crate) struct Mark {
    /// The file.
    at: PathBuf,
    /// The layer above.
    above: PathBuf,
}

/// The place of a mark of `layer` with this ending, beside where the file really is.
pub(crate) fn place(layer: &Path, suffix: &str) -> Result<PathBuf> {
    let real = layer
        .canonicalize()
        .map_err(|error| Error::from_io(format!("finding {}", layer.display()), error))?;
    let mut name = real.into_os_string();
    name.push(suffix);
    Ok(name.into())
}

impl Mark {
    /// Marks `layer` as frozen beneath `above`. Both names are absolute. It is durable once its
    /// folder is.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn put(layer: &Path, above: &Path) -> Result<Self> {
        let prepared = Prepared::new(layer, above)?;
        prepared.name().inspect_err(|_| prepared.give_up())?;
        Ok(prepared.mark)
    }

    /// Where the mark of `layer` is, and what it has in it if the layer is frozen beneath `above`.
    fn of_layer(layer: &Path, above: &Path) -> Result<(Self, Vec<u8>)> {
        let at = place(layer, SUFFIX)?;
        let is_beside = above.parent().and_then(|folder| folder.canonicalize().ok());
        let is_beside = is_beside.as_deref() == at.parent();
        let name = match above.file_name() {
            Some(name) if is_beside => name,
            _ => above.as_os_str(),
        };
        let content = [KEY, name.as_bytes(), b"\n"].concat();
        Ok((Self { at, above: above.to_owned() }, content))
    }

    /// The mark of `layer`, whose file is this `owner`'s, if it has one.
    pub(crate) fn of(layer: &Path, owner: u32) -> Result<Option<Self>> {
        // Nothing is beside it.
        if NamelessFile::is_at(layer) {
            return Ok(None);
        }
        let at = place(layer, SUFFIX)?;
        let Some(content) = read_trusted(&at, owner, CONTENT_BYTES_MAX)? else { return Ok(None) };
        let Some(name) = name_in(&content) else {
            let what = format!("{} is damaged: {}", at.display(), cure(layer, &at));
            return Err(Error::new(ErrorKind::Corrupt, what));
        };
        let above = at.parent().unwrap_or(Path::new("")).join(name);
        Ok(Some(Self { at, above }))
    }

    /// Removes it.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn remove(&self) -> Result<()> {
        let failed = |error| Error::from_io(format!("removing {}", self.at.display()), error);
        match std::fs::remove_file(&self.at) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
            _ => sync_folder_of(&self.at),
        }
    }

    /// Whether there is a file where a mark of `layer`, which may be gone, would be. Nothing is
    /// followed on that.
    pub(crate) fn is_beside(layer: &Path) -> bool {
        let mut at = layer.as_os_str().to_owned();
        at.push(SUFFIX);
        Path::new(&at).symlink_metadata().is_ok()
    }

    /// Removes the mark of `layer`, if it has one.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn forget(layer: &Path) -> Result<()> {
        Self { at: place(layer, SUFFIX)?, above: PathBuf::new() }.remove()
    }

    /// The layer above.
    pub(crate) fn above(&self) -> &Path {
        &self.above
    }

    /// Its own file.
    pub(crate) fn path(&self) -> &Path {
        &self.at
    }
}

/// A mark that is whole and durable, and has not got its name.
#[derive(Debug)]
pub(crate) struct Prepared {
    mark: Mark,
    new: Locked,
}

impl Prepared {
    /// What marks `layer` as frozen beneath `above`. Both names are absolute.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn new(layer: &Path, above: &Path) -> Result<Self> {
        let (mark, content) = Mark::of_layer(layer, above)?;
        let new = place(layer, NEW_ABOVE)?;
        let new = Locked::write(&new, &content)
            .map_err(|error| Error::from_io(format!("writing {}", mark.at.display()), error))?;
        Ok(Self { mark, new })
    }

    /// Gives it its name, durably once the folder is.
    ///
    /// # Errors
    /// What the system reports.
    pub(crate) fn name(&self) -> Result<()> {
        self.new.name(&self.mark.at)
    }

    /// The mark, which has its name.
    pub(crate) fn mark(&self) -> &Mark {
        &self.mark
    }

    /// Removes it, unless it has its name.
    pub(crate) fn give_up(&self) {
        self.new.remove();
    }
}

/// The name of the layer above in the content of a mark; `None` if that is no mark.
pub(crate) fn name_in(content: &[u8]) -> Option<OsString> {
    let name = content.strip_prefix(KEY)?.strip_suffix(b"\n")?;
    let is_name = !name.is_empty() && !name.contains(&0);
    is_name.then(|| OsString::from_vec(name.to_vec()))
}

/// The content of the mark at `at` of a layer whose file is this `owner`'s, as far as it is not
/// longer than `bytes_max`; `None` if there is none.
///
/// # Errors
/// `Denied` if a stranger may have put it there (I1); else what the system reports.
pub(crate) fn read_trusted(at: &Path, owner: u32, bytes_max: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = open_trusted(at, owner)? else { return Ok(None) };
    let mut content = Vec::new();
    file.take(bytes_max)
        .read_to_end(&mut content)
        .map_err(|error| Error::from_io(format!("reading {}", at.display()), error))?;
    Ok(Some(content))
}

/// The file of that mark, for reading.
///
/// # Errors
/// As [`read_trusted`].
pub(crate) fn open_trusted(at: &Path, owner: u32) -> Result<Option<File>> {
    let failed = |error: io::Error| Error::from_io(format!("reading {}", at.display()), error);
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(at) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        // Nobody can have made one.
        Err(error) if error.kind() == io::ErrorKind::InvalidFilename => return Ok(None),
        Err(error) => return Err(failed(error)),
    };
    let found = file.metadata().map_err(failed)?;
    let me = rustix::process::geteuid().as_raw();
    let is_trusted = [owner, me, 0].contains(&found.uid());
    if !found.is_file() || !is_trusted || found.mode() & 0o002 != 0 {
        let what = format!(
            "{} says that the layer is not to be changed, and may be a stranger's: remove it if it \
             is",
            at.display()
        );
        return Err(Error::new(ErrorKind::Denied, what));
    }
    Ok(Some(file))
}

/// What to do about the `mark` of `layer`.
pub(crate) fn cure(layer: &Path, mark: &Path) -> String {
    format!(
        "name the image that the disk is in now, or, if {} is to be written as it is, remove {}",
        layer.display(),
        mark.display()
    )
}

/// What to do about the mark of the layer at `path`.
pub(crate) fn cure_for(path: &Path) -> String {
    let mark = place(path, SUFFIX).unwrap_or_else(|_| path.to_owned());
    cure(path, &mark)
}
