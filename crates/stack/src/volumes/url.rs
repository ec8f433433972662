//! URLs of stores, of volumes in them, and of their snapshots.
//!
//! | URL | |
//! |---|---|
//! | `file:///DIR` | a directory |
//! | `s3://BUCKET/PREFIX` | a bucket, or a folder of it |
//! | `rados://POOL/PREFIX` | a pool of Ceph, or a part of it |
//! | `memory:STORE` | memory of this process, for tests |
//!
//! `/NAME` at the end names a volume, and `@SNAPSHOT` behind that a snapshot, by its label or its
//! number. Nothing is decoded: a path is what is written.

use mica_block::{Error, ErrorKind, ObjectName, Result, Which};
use mica_volume::VolumeName;
use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// Where a store of volumes is.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum StoreUrl {
    /// A directory.
    Directory(PathBuf),
    /// A bucket of S3, or of a service that speaks like it, or a folder of one.
    Bucket {
        /// The bucket.
        bucket: String,
        /// The folder.
        prefix: Option<ObjectName>,
    },
    /// A pool of RADOS, or the objects of one whose names begin with a prefix.
    Pool {
        /// The pool.
        pool: String,
        /// The prefix.
        prefix: Option<ObjectName>,
    },
    /// Memory of this process, under this name.
    Memory(String),
}

/// A volume, or a snapshot of one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct VolumeUrl {
    /// The store.
    pub store: StoreUrl,
    /// The volume in it.
    pub name: VolumeName,
    /// The label or the number of a snapshot.
    pub snapshot: Option<String>,
}

/// What there is to choose from, for messages.
const FORMS: &str = "file:///DIR/NAME, s3://BUCKET/PREFIX/NAME or rados://POOL/PREFIX/NAME";

impl FromStr for StoreUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let (scheme, rest) = split_scheme(text)?;
        match scheme {
            Scheme::File => Ok(Self::Directory(directory(text, rest)?)),
            Scheme::S3 => {
                let (bucket, prefix) = place(text, rest, "a bucket")?;
                Ok(Self::Bucket { bucket, prefix })
            }
            Scheme::Rados => {
                let (pool, prefix) = place(text, rest, "a pool")?;
                Ok(Self::Pool { pool, prefix })
            }
            Scheme::Memory => match rest {
                "" => Err(invalid(text, "a store in memory has a name: memory:STORE")),
                name => Ok(Self::Memory(name.to_owned())),
            },
        }
    }
}

impl FromStr for VolumeUrl {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        split_scheme(text)?;
        let (place, last) = text.rsplit_once('/').ok_or_else(|| no_name(text))?;
        let (name, snapshot) = match last.split_once('@') {
            Some((name, snapshot)) => (name, Some(snapshot)),
            None => (last, None),
        };
        // The directory of all directories keeps its slash.
        let place = if place == "file://" { "file:///" } else { place };
        let store: StoreUrl = match (place.parse(), text.parse::<StoreUrl>()) {
            (Ok(store), _) if !name.is_empty() => store,
            (_, Ok(_)) | (Ok(_), _) => return Err(no_name(text)),
            (Err(_), Err(error)) => return Err(error),
        };
        let name = VolumeName::new(name).map_err(|error| error.wrap(text))?;
        let snapshot = snapshot.map(|snapshot| check_snapshot(text, snapshot)).transpose()?;
        Ok(Self { store, name, snapshot })
    }
}

impl StoreUrl {
    /// Whether it is elsewhere, and others answer for it.
    pub(super) fn is_remote(&self) -> bool {
        matches!(self, Self::Bucket { .. } | Self::Pool { .. })
    }

    /// Checks that other processes find what one leaves there.
    ///
    /// # Errors
    /// `Invalid` if they do not.
    pub fn check_lasting(&self) -> Result<()> {
        match self {
            Self::Directory(_) | Self::Bucket { .. } | Self::Pool { .. } => Ok(()),
            Self::Memory(_) => {
                let what = format!(
                    "that is memory of one process, for tests inside it: what is there ends with \
                     it; use {FORMS}"
                );
                Err(invalid(&self.to_string(), &what))
            }
        }
    }
}

impl VolumeUrl {
    /// The snapshot, if it is one.
    pub fn which(&self) -> Option<Which> {
        // It was checked when the URL was read.
        self.snapshot.as_deref().and_then(|snapshot| snapshot.parse().ok())
    }

    /// The snapshot.
    ///
    /// # Errors
    /// `Invalid` if there is none, which `verb` needs.
    pub fn needed_snapshot(&self, verb: &str) -> Result<Which> {
        self.which().ok_or_else(|| {
            let url = self.to_string();
            invalid(&url, &format!("{verb} takes a snapshot: {url}@LABEL"))
        })
    }

    /// The volume, without the snapshot.
    ///
    /// # Errors
    /// `Invalid` if there is one, which `verb` cannot do anything with.
    pub fn without_snapshot(&self, verb: &str) -> Result<&Self> {
        match &self.snapshot {
            None => Ok(self),
            Some(snapshot) => {
                let what = format!("{verb} takes a volume: leave out @{snapshot}");
                Err(invalid(&self.to_string(), &what))
            }
        }
    }
}

/// The kinds of stores.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Scheme {
    File,
    S3,
    Rados,
    Memory,
}

/// What a URL begins with, and what follows the colon, without two slashes where they belong.
fn split_scheme(text: &str) -> Result<(Scheme, &str)> {
    let Some((scheme, rest)) = text.split_once(':') else {
        let hint = match Path::new(text).is_absolute() {
            true => format!("file://{text}"),
            false => FORMS.to_owned(),
        };
        return Err(invalid(text, &format!("not a URL of a store or a volume; use {hint}")));
    };
    let remote = |scheme, kind: &str| match rest.strip_prefix("//") {
        Some(rest) => Ok((scheme, rest)),
        None => Err(invalid(text, &format!("it is written {kind}"))),
    };
    match scheme {
        "file" => Ok((Scheme::File, rest)),
        "s3" => remote(Scheme::S3, "s3://BUCKET/PREFIX/NAME"),
        "rados" => remote(Scheme::Rados, "rados://POOL/PREFIX/NAME"),
        "memory" => Ok((Scheme::Memory, rest)),
        "nbd" | "nbd+unix" | "http" | "https" => {
            Err(invalid(text, &format!("no store of volumes is there; use {FORMS}")))
        }
        _ => Err(invalid(text, &format!("there is no store called {scheme}:; use {FORMS}"))),
    }
}

/// The directory of a URL, of which `rest` follows `file:`.
fn directory(text: &str, rest: &str) -> Result<PathBuf> {
    let path = match rest.strip_prefix("//") {
        Some(path) if path.starts_with('/') => Path::new(path),
        Some(path) => {
            let what = format!(
                "a directory has its whole path, which makes three slashes: file:///{path}"
            );
            return Err(invalid(text, &what));
        }
        None if rest.starts_with('/') => {
            return Err(invalid(text, &format!("three slashes are needed: file://{rest}")));
        }
        None => return Err(invalid(text, "a directory has its whole path: file:///DIR")),
    };
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(invalid(text, "leave out the .. in it"));
    }
    // Slashes that change nothing do not make it another one.
    Ok(path.components().collect())
}

/// The first part of a URL, and the others, of which `rest` follows the two slashes.
fn place(text: &str, rest: &str, first: &str) -> Result<(String, Option<ObjectName>)> {
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let (name, prefix) = match rest.split_once('/') {
        Some((name, prefix)) => (name, Some(prefix)),
        None => (rest, None),
    };
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    if name.is_empty() || !name.chars().all(is_plain) {
        return Err(invalid(text, &format!("the name of {first} follows the two slashes")));
    }
    let prefix = prefix.map(ObjectName::new).transpose().map_err(|error| error.wrap(text))?;
    Ok((name.to_owned(), prefix))
}

fn check_snapshot(text: &str, snapshot: &str) -> Result<String> {
    match snapshot.parse::<Which>() {
        Ok(_) => Ok(snapshot.to_owned()),
        Err(error) => Err(error.wrap(format!("{text}: behind the @ is a snapshot"))),
    }
}

fn no_name(text: &str) -> Error {
    let text = match text.trim_end_matches('/') {
        "file:" => "file://",
        text => text,
    };
    invalid(text, &format!("that is a store; add the name of a volume: {text}/NAME"))
}

fn invalid(text: &str, what: &str) -> Error {
    Error::new(ErrorKind::Invalid, format!("{text}: {what}"))
}

impl fmt::Display for StoreUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, name, prefix) = match self {
            Self::Directory(path) => return write!(f, "file://{}", path.display()),
            Self::Memory(name) => return write!(f, "memory:{name}"),
            Self::Bucket { bucket, prefix } => ("s3", bucket, prefix),
            Self::Pool { pool, prefix } => ("rados", pool, prefix),
        };
        match prefix {
            None => write!(f, "{scheme}://{name}"),
            Some(prefix) => write!(f, "{scheme}://{name}/{prefix}"),
        }
    }
}

impl fmt::Display for VolumeUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, name, snapshot } = self;
        let root = matches!(store, StoreUrl::Directory(path) if path.parent().is_none());
        write!(f, "{store}{}{}", if root { "" } else { "/" }, name.as_str())?;
        snapshot.as_ref().map_or(Ok(()), |snapshot| write!(f, "@{snapshot}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn volume(text: &str) -> VolumeUrl {
        text.parse().unwrap_or_else(|error| panic!("{error}"))
    }

    fn refusal<T: FromStr<Err = Error> + fmt::Debug>(text: &str) -> String {
        let error = text.parse::<T>().expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let line = error.in_one_line();
        assert!(!line.contains('\n'), "{line}");
        line
    }

    #[test]
    fn url_is_read_as_it_is_written() {
        for text in [
            "file:///var/lib/store/web",
            "file:///var/lib/store/web@monday",
            "file:///web",
            "s3://bucket/web",
            "s3://bucket/a/b/web@17",
            "rados://pool/web",
            "rados://pool/a/web@before the update",
            "memory:x/web",
        ] {
            assert_eq!(volume(text).to_string(), text);
        }
        for text in ["file:///", "file:///a/b", "s3://bucket", "s3://b/c/d", "memory:x"] {
            assert_eq!(text.parse::<StoreUrl>().expect("a store").to_string(), text);
        }
        let url = volume("s3://bucket/a/b/web@17");
        assert_eq!((url.name.as_str(), url.snapshot.as_deref()), ("web", Some("17")));
        assert_eq!(url.store, "s3://bucket/a/b".parse().expect("a store"));
    }

    #[test]
    fn slashes_that_change_nothing_make_no_other_store() {
        let store: StoreUrl = "file:///a/b".parse().expect("a store");
        for text in ["file:///a/b/", "file:////a//b", "file:///a/./b"] {
            assert_eq!(text.parse::<StoreUrl>().expect("a store"), store, "{text}");
        }
        assert_eq!("s3://b/".parse::<StoreUrl>().expect("a store").to_string(), "s3://b");
    }

    #[test]
    fn typing_errors_are_told_with_what_would_be_right() {
        for (text, hint) in [
            ("file://a/b/web", "file:///a/b"),
            ("file:/a/web", "file:///a"),
            ("file:a/web", "file:///DIR"),
            ("/a/web", "use file:///a/web"),
            ("web", FORMS),
            ("s4://bucket/web", "no store called s4:"),
            ("s3:/bucket/web", "s3://BUCKET/PREFIX/NAME"),
            ("s3:///web", "a bucket follows"),
            ("rados:///web", "a pool follows"),
            ("s3://bucket", "s3://bucket/NAME"),
            ("s3://bucket/", "s3://bucket/NAME"),
            ("file:///a/b/", "file:///a/b/NAME"),
            ("file:///", "add the name of a volume"),
            ("file:///a/../b/web", "leave out the .."),
            ("file:///a/Web", "is not a valid name of a volume"),
            ("file:///a/web@", "behind the @"),
            ("file:///a/web@a@b", "behind the @"),
            ("https://a/b", "no store of volumes"),
            ("", FORMS),
        ] {
            let line = refusal::<VolumeUrl>(text);
            assert!(line.contains(hint), "{text:?}: {line}");
        }
        assert!(refusal::<StoreUrl>("s3://bucket/Big").contains("s3://bucket/Big"));
    }
}
