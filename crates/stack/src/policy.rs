//! Decides which files may be opened. Nothing else in mica does.
//!
//! Images are written by strangers and name other files: their backing file, their data file. An
//! image that names /etc/shadow must not get it. So:
//!
//! - I1 The user's own word is law: the image that the user named is opened wherever it is.
//! - I2 Any other file is opened only if it is in an allowed directory or below it. Its place is
//!   determined from the inode that was found, after all symbolic links, and that same inode is
//!   opened: no name is looked up twice.
//! - I3 A directory is allowed because the user gave it (`--names`, `--allow-path`, `standing`), or
//!   because they named an image in it and did not say otherwise. The latter never allows `/`, nor
//!   anything in /dev, /proc or /sys.
//! - I4 A name is a path, never a protocol. One that looks like a protocol is refused, lest someone
//!   expect it to be followed.
//! - I5 What cannot be judged is refused: without /proc, everything but the image that the user
//!   named.

use crate::no_path::refuse_no_path;
use crate::shell_word::shell_word;
use mica_block::{Error, ErrorKind, Result};
use mica_store::{FileKind, Located};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Which files images may name, in addition to those that an option gives.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Names {
    /// Those in the directory of the image that the user named, and below it.
    #[default]
    Beside,
    /// No others.
    Given,
    /// None at all, whatever else is given: in a directory with images of several owners, one
    /// owner's image could name another's.
    None,
}

/// What may be opened.
pub(crate) struct Policy {
    /// The image that the user named, made absolute.
    named: PathBuf,
    names: Names,
    /// Directories, and files of their own, without symbolic links.
    allowed: Vec<PathBuf>,
    /// Where relative names start from, if the user gave one.
    start: PathBuf,
    /// What a name in an image was resolved to last, for the caller to open it.
    resolved: Mutex<Option<Located>>,
}

impl Policy {
    /// The policy for the image that the user `named`, whose layers may name these, and anything in
    /// `allow_paths`.
    pub(crate) fn new(named: &Path, names: Names, allow_paths: &[PathBuf]) -> Result<Self> {
        refuse_no_path(named)?;
        let start = match named.is_absolute() {
            true => PathBuf::new(),
            false => std::env::current_dir()
                .map_err(|error| Error::from_io(format!("finding {}", named.display()), error))?,
        };
        let named = absolute(&start.join(named))?;
        let (allowed, resolved) = (Vec::new(), Mutex::default());
        let mut policy = Self { named, names, allowed, start, resolved };
        if names == Names::None {
            return Ok(policy);
        }
        for path in allow_paths {
            let real = path.canonicalize().map_err(|error| {
                Error::from_io(format!("--allow-path {}", path.display()), error)
            })?;
            policy.allowed.push(real);
        }
        if names == Names::Given {
            return Ok(policy);
        }
        let located = Located::find(&policy.named)?;
        // Both where the user sees it and, behind a symbolic link, where it is: relative names of
        // its backing files start from the former, absolute ones usually name the latter.
        let real = match located.kind() {
            FileKind::Regular => located.real_path().ok(),
            FileKind::BlockDevice => None,
        };
        let seen = match &real {
            // Then no link is in it.
            Some(real) if *real == policy.named => None,
            _ => policy.named.parent().and_then(|parent| parent.canonicalize().ok()),
        };
        let real = real.as_deref().and_then(Path::parent).map(Path::to_owned);
        for directory in [seen, real].into_iter().flatten() {
            if may_be_implied(&directory) && !policy.allowed.contains(&directory) {
                policy.allowed.push(directory);
            }
        }
        Ok(policy)
    }

    /// The file that `name`, as recorded in the image at `referrer`, refers to.
    pub(crate) fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        // Whoever asked before did not open it.
        drop(self.resolved().take());
        let bytes = name.as_os_str().as_bytes();
        if bytes.is_empty() || bytes.contains(&0) {
            let what = format!("{} names a file {name:?}", referrer.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        if looks_like_protocol(bytes) {
            let what = format!(
                "{} names {name:?}: a name with a protocol is never followed",
                referrer.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if self.names == Names::None {
            // Before anything is looked up, so that an image cannot find out what exists.
            let what = format!(
                "{} names the file {name:?}, and --names none lets images name no files: if it \
                 may, give --names beside, or --names DIRECTORY",
                referrer.display()
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        // As QEMU does: relative to the directory of the referrer's name.
        let path = referrer.parent().unwrap_or(Path::new("")).join(name);
        match self.find(&path) {
            Ok(located) => {
                *self.resolved() = Some(located);
                Ok(path)
            }
            Err(error) if error.kind() == ErrorKind::Denied => Err(error),
            // It cannot be found. That is reported only for places where it might be opened, so
            // that an image cannot find out what else is on this host.
            Err(_) => self.judge(&path, &likely_place(&self.absolute(&path)?)).map(|()| path),
        }
    }

    /// Finds the file at `path`, if it may be opened.
    pub(crate) fn find(&self, path: &Path) -> Result<Located> {
        let resolved = self.resolved().take();
        let whole = self.absolute(path)?;
        if let Some(resolved) = resolved
            && resolved.path() == whole
        {
            // It was judged just now.
            return Ok(resolved);
        }
        let is_named = whole == self.named;
        let located = Located::find_absolute(path, whole)?;
        if !is_named {
            let place = located.real_path().map_err(|error| {
                let what = format!("without /proc, it is unknown whether {path:?} may be opened");
                Error::new(ErrorKind::Denied, format!("{what} ({error})"))
            })?;
            self.judge(path, &place)?;
        }
        Ok(located)
    }

    /// The name of a file that is about to be made at `path`, made absolute, if it may be opened
    /// there afterwards.
    pub(crate) fn find_new(&self, path: &Path) -> Result<PathBuf> {
        let whole = self.absolute(path)?;
        let (Some(folder), Some(name)) = (whole.parent(), whole.file_name()) else {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{path:?} is not the name of a file"),
            ));
        };
        let real = folder.canonicalize().map_err(|error| {
            Error::from_io(format!("finding the folder of {}", path.display()), error)
        })?;
        self.judge(path, &real.join(name))?;
        Ok(whole)
    }

    fn absolute(&self, path: &Path) -> Result<PathBuf> {
        match path.is_absolute() {
            true => absolute(path),
            false => absolute(&self.start.join(path)),
        }
    }

    fn resolved(&self) -> MutexGuard<'_, Option<Located>> {
        self.resolved.lock()
    }

    /// Refuses a file whose real place is outside of what is allowed.
    fn judge(&self, path: &Path, place: &Path) -> Result<()> {
        if self.allowed.iter().any(|allowed| place.starts_with(allowed)) {
            return Ok(());
        }
        let directory = place.parent().unwrap_or(place);
        let what = format!(
            "{path:?} lies in {directory:?}, which this chain may not open files in: \
             to allow it, add --allow-path {}",
            shell_word(directory)
        );
        Err(Error::new(ErrorKind::Denied, what))
    }
}

/// The directories, and individual files, in which a chain may open what its layers name: for a
/// caller that passes them to the kernel. The image that the user `named` may be elsewhere.
///
/// # Errors
/// If there is no such image, or an option names a directory that does not exist.
pub fn allowed_places(named: &Path, names: Names, allow_paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    Ok(Policy::new(named, names, allow_paths)?.allowed)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path)
        .map_err(|error| Error::from_io(format!("finding {}", path.display()), error))
}

/// Whether an image in one place may open a file in the other (I3).
fn may_be_implied(directory: &Path) -> bool {
    let special = ["/dev", "/proc", "/sys"];
    directory.parent().is_some() && !special.iter().any(|place| directory.starts_with(place))
}

/// A colon before any slash is how QEMU recognizes a protocol, including `json:`.
pub fn looks_like_protocol(name: &[u8]) -> bool {
    name.iter().take_while(|byte| **byte != b'/').any(|byte| *byte == b':')
}

/// Where a path that cannot be found would be: its deepest ancestor that exists, without symbolic
/// links, and the rest as it is.
pub(crate) fn likely_place(path: &Path) -> PathBuf {
    let mut rest: Vec<&OsStr> = Vec::new();
    let mut ancestor = path;
    loop {
        if let Ok(mut place) = ancestor.canonicalize() {
            place.extend(rest.iter().rev());
            return place;
        }
        match (ancestor.parent(), ancestor.file_name()) {
            (Some(parent), Some(name)) => {
                rest.push(name);
                ancestor = parent;
            }
            // It goes up from something that does not exist: nowhere that may be opened.
            _ => return PathBuf::new(),
        }
    }
}

#[cfg(test)]
mod tests;
