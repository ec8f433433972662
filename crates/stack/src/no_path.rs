//! Names that are no paths, where the image that a user named has to be one: URLs of exports and
//! volumes, and what QEMU has besides. A file that has such a name is opened nevertheless: nothing
//! here is asked if there is one.

use crate::shell_word::shell_word;
use mica_block::{Error, ErrorKind, Result};
use mica_serve::nbd::client::Uri;
use std::path::Path;

/// Whether `named` is written as something else than a path, so that no folder belongs before it.
pub fn is_no_path(named: &Path) -> bool {
    named.to_str().and_then(Kind::of).is_some()
}

/// Refuses what the user `named` if it is written as something else than a path, and is no file.
///
/// # Errors
/// `Unsupported` with what it is, and what to do instead.
pub fn refuse_no_path(named: &Path) -> Result<()> {
    let Some((text, kind)) = named.to_str().and_then(|text| Some((text, Kind::of(text)?))) else {
        return Ok(());
    };
    if named.exists() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unsupported, format!("{text} {}", kind.instead(text))))
}

/// What a name that is no path is the name of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind<'a> {
    /// An export of an NBD server.
    Export,
    /// The same as QEMU wrote it before there were URIs of them, which nothing here takes.
    OldExport,
    /// Something in a directory, by a URL.
    Directory { path: &'a Path },
    /// A volume in another store.
    Volume,
    /// A description of an image for QEMU.
    Json,
    /// Something that is reached in a way that mica has not.
    Elsewhere { scheme: &'a str },
}

impl<'a> Kind<'a> {
    fn of(text: &'a str) -> Option<Self> {
        let (scheme, rest) = text.split_once(':')?;
        let is_letter = |letter: u8| letter.is_ascii_alphanumeric() || b"+-.".contains(&letter);
        Some(match scheme {
            _ if Uri::is_meant(text) => Self::Export,
            "nbd" => Self::OldExport,
            "json" => Self::Json,
            "file" => Self::Directory { path: Path::new(rest.strip_prefix("//").unwrap_or(rest)) },
            "s3" | "rados" | "memory" => Self::Volume,
            _ if rest.starts_with("//") && !scheme.is_empty() && scheme.bytes().all(is_letter) => {
                Self::Elsewhere { scheme }
            }
            _ => return None,
        })
    }

    /// What it is, and what to do with it where a file is needed.
    fn instead(self, text: &str) -> String {
        let needed = "and a file is needed here";
        match self {
            Self::Export => format!(
                "is an export of a server, {needed}: `mica convert {} copy.qcow2` makes one of it",
                shell_word(Path::new(text))
            ),
            Self::OldExport => format!(
                "is an export of a server, {needed}: `mica convert nbd://HOST:PORT/EXPORT \
                 copy.qcow2` makes one of it"
            ),
            Self::Directory { path } if path.is_file() => {
                format!("is a URL: an image is named by its path, {}", path.display())
            }
            Self::Directory { .. } | Self::Volume => format!(
                "is the URL of a volume, {needed}: --volume serves it (in a configuration, `volume` \
                 instead of `image`), and `mica volume` has what else is done with it"
            ),
            Self::Json => {
                format!("describes an image to QEMU, {needed}: name that, and --format if need be")
            }
            Self::Elsewhere { scheme } => {
                format!("is no file, {needed}: nothing is read from {scheme}://, so copy it first")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_that_is_no_path_says_what_to_do_instead() {
        for (name, part) in [
            ("nbd://h/x", "`mica convert 'nbd://h/x' copy.qcow2`"),
            ("nbd+unix:///?socket=/a b", "`mica convert 'nbd+unix:///?socket=/a b' copy.qcow2`"),
            ("nbd:h:10809:exportname=x", "`mica convert nbd://HOST:PORT/EXPORT copy.qcow2`"),
            ("file:///nowhere/web", "--volume serves it"),
            ("file:///proc/self/status", "its path, /proc/self/status"),
            ("s3://bucket/web", "--volume serves it"),
            ("rados://pool/web", "--volume serves it"),
            ("json:{\"driver\": \"qcow2\"}", "describes an image to QEMU"),
            ("https://h/x.qcow2", "nothing is read from https://"),
        ] {
            assert!(is_no_path(Path::new(name)), "{name}");
            let error = refuse_no_path(Path::new(name)).expect_err("no file");
            let message = error.in_one_line();
            assert!(message.starts_with(name) && message.contains(part), "{message}");
        }
    }

    #[test]
    fn path_with_a_colon_is_a_path() {
        for name in ["a", "./nbd:x", "/a://b", "a:b", "disk:1.qcow2", "://x", "a b://c", ""] {
            assert!(!is_no_path(Path::new(name)), "{name}");
            refuse_no_path(Path::new(name)).expect("a path");
        }
    }

    #[test]
    fn file_of_such_a_name_is_no_mistake() {
        let folder = tempfile::tempdir().expect("a folder");
        // Only a relative name is written like that.
        assert!(refuse_no_path(Path::new("nbd:h:1")).is_err());
        let file = folder.path().join("nbd:h:1");
        std::fs::write(&file, "").expect("writes");
        refuse_no_path(&file).expect("it is there");
    }
}
