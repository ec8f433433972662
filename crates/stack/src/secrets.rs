//! Where the passphrases of encrypted images are, as the user names it.
//!
//! `[PATTERN=]SOURCE`: a file, `fd:NUMBER` for a descriptor that was inherited, `keyring:NAME` for
//! a key of type `user` in the kernel's keyrings. All bytes of it are the passphrase, a line
//! break at
//! the end, too, as for QEMU. A passphrase itself is never given: others see command lines.
//!
//! Invariants
//! - I1 What a passphrase is stays in memory that is erased.
//! - I2 Descriptors and keyrings are read once, before a server's sandbox begins
//!   ([`Secrets::load`]); files whenever an image is opened, so that they may change.

use mica_block::{Error, ErrorKind, Passphrase, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::fd::RawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, LazyLock};
use zeroize::Zeroizing;

/// Before the number of a descriptor, and the name of a key.
const DESCRIPTOR: &str = "fd:";
const KEYRING: &str = "keyring:";
/// Permission of everybody to read.
const OTHERS_READ: u32 = 0o004;

/// Where one passphrase is, and which images have it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Secret {
    /// Of which images: a name, with `*` for anything; `None` for those that no other one is for.
    pattern: Option<String>,
    source: Source,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Source {
    File(PathBuf),
    Descriptor(RawFd),
    Keyring(String),
}

/// All that the user named.
#[derive(Clone, Default, Debug)]
pub struct Secrets(Vec<Secret>);

impl FromStr for Secret {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (pattern, source) = match text.split_once('=') {
            Some((pattern, source)) => (Some(pattern), source),
            None => (None, text),
        };
        if pattern.is_some_and(|pattern| ["data", "id", "file"].contains(&pattern)) {
            let what = match pattern {
                Some("data") => {
                    "--secret takes no passphrase, as others see command lines: put it into a \
                     file, and name that"
                }
                _ => "--secret takes [PATTERN=]FILE, without QEMU's id= and file=",
            };
            return Err(invalid(what));
        }
        if source.is_empty() || pattern.is_some_and(str::is_empty) {
            return Err(invalid(format!("--secret {text}: it takes [PATTERN=]FILE")));
        }
        let source = match (source.strip_prefix(DESCRIPTOR), source.strip_prefix(KEYRING)) {
            (Some(number), _) => {
                let number = number.parse().ok().filter(|number| *number > 2);
                let what = || invalid(format!("--secret {text}: {number:?} is no open descriptor"));
                Source::Descriptor(number.ok_or_else(what)?)
            }
            (_, Some(name)) => Source::Keyring(name.to_owned()),
            _ => Source::File(source.into()),
        };
        Ok(Self { pattern: pattern.map(str::to_owned), source })
    }
}

impl fmt::Display for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(pattern) = &self.pattern {
            write!(f, "{pattern}=")?;
        }
        write!(f, "{}", self.source)
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Descriptor(number) => write!(f, "{DESCRIPTOR}{number}"),
            Self::Keyring(name) => write!(f, "{KEYRING}{name}"),
        }
    }
}

impl Secret {
    /// The file that has it, if one does.
    pub fn file(&self) -> Option<&Path> {
        match &self.source {
            Source::File(path) => Some(path),
            Source::Descriptor(_) | Source::Keyring(_) => None,
        }
    }

    /// Resolves a relative path against `folder`.
    pub fn resolve(&mut self, folder: &Path) {
        if let Source::File(path) = &mut self.source {
            *path = folder.join(&*path);
        }
    }

    /// What it is, whatever images it is for.
    ///
    /// # Errors
    /// As [`Secrets::load`].
    pub fn read(&self) -> Result<Arc<Passphrase>> {
        self.source.load()?;
        self.source.get()
    }
}

impl Secrets {
    /// Those of these words.
    ///
    /// # Errors
    /// `Invalid` if one of them is none.
    pub fn parse(texts: &[String]) -> Result<Self> {
        texts.iter().map(|text| text.parse()).collect::<Result<_>>().map(Self)
    }

    /// Whether none was named.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads what is read only once.
    ///
    /// # Errors
    /// If there is nothing, or too much.
    pub fn load(&self) -> Result<()> {
        self.0.iter().try_for_each(|secret| secret.source.load())
    }

    /// The passphrase of the image at `path`, if one is for it: the first whose pattern matches the
    /// name of its file, or its whole path if the pattern has slashes.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn of(&self, path: &Path) -> Result<Option<Arc<Passphrase>>> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let whole = path.to_string_lossy();
        let fits = |pattern: &str| {
            let text = if pattern.contains('/') { &whole } else { &name };
            matches(pattern.as_bytes(), text.as_bytes())
        };
        let named = |secret: &&Secret| secret.pattern.as_deref().is_some_and(fits);
        let found = self.0.iter().find(named);
        let found = found.or_else(|| self.0.iter().find(|secret| secret.pattern.is_none()));
        found.map(|secret| secret.source.get()).transpose()
    }
}

/// What was read once.
static LOADED: LazyLock<Mutex<HashMap<Source, Arc<Passphrase>>>> = LazyLock::new(Mutex::default);

impl Source {
    /// Reads it, if it is read only once.
    fn load(&self) -> Result<()> {
        let mut loaded = LOADED.lock();
        let passphrase = match self {
            Self::File(_) => return Ok(()),
            _ if loaded.contains_key(self) => return Ok(()),
            Self::Descriptor(number) => {
                let path = PathBuf::from(format!("/proc/self/fd/{number}"));
                read_file(&path, format!("descriptor {number}"))?
            }
            Self::Keyring(name) => {
                let key = mica_rt::read_user_key(name, Passphrase::BYTES_MAX);
                let context = || format!("the key {name:?} of the kernel's keyrings");
                let key = key.map_err(|error| Error::from_io(context(), error))?;
                Passphrase::new(context(), Zeroizing::new(key))
            }
        };
        loaded.insert(self.clone(), Arc::new(passphrase));
        Ok(())
    }

    fn get(&self) -> Result<Arc<Passphrase>> {
        if let Self::File(path) = self {
            warn_if_open_to_others(path);
            return read_file(path, path.display().to_string()).map(Arc::new);
        }
        let loaded = LOADED.lock();
        loaded.get(self).cloned().ok_or_else(|| {
            let what = format!("--secret {self}: it is read when a server starts, and not later");
            Error::new(ErrorKind::Denied, what)
        })
    }
}

/// The passphrase that the file at `path` has, which is called `from`.
fn read_file(path: &Path, from: String) -> Result<Passphrase> {
    let failed = |error| Error::from_io(format!("the passphrase in {from}"), error);
    // Never moved: what a growing vector leaves behind is not erased.
    let mut bytes = Zeroizing::new(Vec::with_capacity(Passphrase::BYTES_MAX + 1));
    let file = File::open(path).map_err(failed)?;
    let limit = Passphrase::BYTES_MAX as u64 + 1;
    file.take(limit).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() {
        0 => Err(invalid(format!("{from} has no passphrase: it is empty"))),
        len if len > Passphrase::BYTES_MAX => {
            let most = Passphrase::BYTES_MAX;
            Err(invalid(format!("{from} has no passphrase: it is longer than {most} bytes")))
        }
        _ => Ok(Passphrase::new(from, bytes)),
    }
}

/// Warns, once, of a file that everybody may read.
fn warn_if_open_to_others(path: &Path) {
    static WARNED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let Ok(found) = path.metadata() else { return };
    if !found.is_file() || found.permissions().mode() & OTHERS_READ == 0 {
        return;
    }
    let mut warned = WARNED.lock();
    if !warned.iter().any(|known| known == path) {
        warned.push(path.to_owned());
        tracing::warn!("everybody may read the passphrase in {}: chmod 600", path.display());
    }
}

/// Whether `text` is what `pattern` says, in which `*` stands for anything.
fn matches(pattern: &[u8], text: &[u8]) -> bool {
    let mut parts = pattern.split(|letter| *letter == b'*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts.filter(|part| !part.is_empty()) {
        let Some(at) = rest.windows(part.len()).position(|window| window == part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

fn invalid(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, text, fits) in [
            ("a.qcow2", "a.qcow2", true),
            ("a.qcow2", "b.qcow2", false),
            ("a", "ab", false),
            ("*", "", true),
            ("a*", "ab", true),
            ("*.qcow2", "a.qcow2", true),
            ("*.qcow2", "a.raw", false),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXc", false),
            ("ab*b", "ab", false),
        ] {
            assert_eq!(matches(pattern.as_bytes(), text.as_bytes()), fits, "{pattern} {text}");
        }
    }

    #[test]
    fn secret_is_a_file_and_never_the_passphrase_itself() {
        let parse = |text: &str| text.parse::<Secret>();
        for text in ["key", "base*=key", "/a/b=c=d", "fd:7", "x=fd:7", "keyring:mica"] {
            assert_eq!(parse(text).expect("understood").to_string(), text);
        }
        assert!(parse("fd:0").is_err() && parse("fd:x").is_err());
        assert!(parse("").is_err() && parse("=key").is_err() && parse("a=").is_err());
        let refused = parse("data=hunter2").expect_err("refused").to_string();
        assert!(refused.contains("takes no passphrase"), "{refused}");
        assert!(!refused.contains("hunter2"));
        let mut relative = parse("a=key").expect("understood");
        relative.resolve(Path::new("/etc"));
        assert_eq!(relative.to_string(), "a=/etc/key");
    }

    #[test]
    fn image_gets_the_secret_that_is_for_it_and_otherwise_the_one_for_all() {
        let folder = tempfile::tempdir().expect("a folder");
        let place = |name: &str| folder.path().join(name).display().to_string();
        std::fs::write(place("one"), "first").expect("written");
        std::fs::write(place("two"), "second\n").expect("written");
        std::fs::write(place("none"), "").expect("written");
        let secrets = [
            format!("base*={}", place("one")),
            place("two"),
            format!("/there/*={}", place("none")),
        ];
        let secrets = Secrets::parse(&secrets).expect("understood");
        let of = |image: &str| secrets.of(Path::new(image));
        assert_eq!(of("/a/base.qcow2").expect("read").expect("one").bytes(), b"first");
        assert_eq!(of("/a/top.qcow2").expect("read").expect("one").bytes(), b"second\n");
        let empty = of("/there/top.qcow2").expect_err("empty");
        assert!(empty.to_string().ends_with("has no passphrase: it is empty"), "{empty}");
        let named = Secrets::parse(&[format!("base={}", place("one"))]).expect("understood");
        assert!(named.of(Path::new("top")).expect("asked").is_none());
    }
}
