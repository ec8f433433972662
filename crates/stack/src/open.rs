//! From what the user named to a disk.

use crate::{FileImages, ImageOptions, NullDisk, RawDisk};
use mica_block::{Error, ErrorKind, Images, Manage, Result};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_store::lock_patience;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

/// The format of an image, which is always stated: nothing is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// A qcow2 image, with the chain beneath it.
    #[default]
    Qcow2,
    /// The disk's bytes, as they are.
    Raw,
    /// No image: a disk of zeros, for measurements.
    Null,
}

impl Format {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
            Self::Null => "null",
        }
    }
}

/// Formats that qemu-img translates.
const QEMU_FORMATS: [&str; 10] =
    ["bochs", "cloop", "dmg", "parallels", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc"];

impl FromStr for Format {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "qcow2" => Ok(Self::Qcow2),
            "raw" => Ok(Self::Raw),
            "null" => Ok(Self::Null),
            _ => {
                let mut context = format!("unknown format {text:?}: mica knows qcow2 and raw");
                if QEMU_FORMATS.contains(&text) {
                    context +=
                        &format!(", qemu-img convert translates -f {text} to -O qcow2 and back");
                }
                Err(Error::new(ErrorKind::Unsupported, context))
            }
        }
    }
}

/// What a disk is opened for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Purpose {
    Read,
    Write,
}

/// Opens what the user named, for reading; for [`Format::Null`] that is a size in bytes.
///
/// # Errors
/// Anything that makes the image unusable, in one line with its path.
pub async fn open(
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    open_for(Purpose::Read, named, format, images, chain).await
}

/// As [`open`], for reading and writing. The caller must end with [`Manage::close`]. The disk
/// itself reports whether it can be written: an internal snapshot cannot.
///
/// # Errors
/// As [`open`], and if another program has the image open.
pub async fn open_writable(
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    open_for(Purpose::Write, named, format, images, chain).await
}

/// How often to retry an image that a dead process still holds: at first, and at most.
const HELD_TURNS: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];

async fn open_for(
    purpose: Purpose,
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    wait_for_dead(async || open_now(purpose, named, format, images.clone(), chain).await).await
}

/// Calls `open`, and again for a while if only a dead process keeps it from opening an image: the
/// system releases what that process held a moment later. A warning says what is waited for.
///
/// # Errors
/// Those of `open`.
pub async fn wait_for_dead<T>(mut open: impl AsyncFnMut() -> Result<T>) -> Result<T> {
    let [mut turn, turn_max] = HELD_TURNS;
    let start = mica_rt::now();
    let mut is_first = true;
    loop {
        let error = match open().await {
            Err(error) => error,
            opened => return opened,
        };
        match lock_patience(&error) {
            Some(patience) if mica_rt::now().saturating_since(start) < patience => {
                if std::mem::take(&mut is_first) {
                    tracing::warn!("{error}: waiting until the system releases it");
                }
            }
            _ => return Err(error),
        }
        mica_rt::sleep(turn).await;
        turn = (turn * 2).min(turn_max);
    }
}

async fn open_now(
    purpose: Purpose,
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    if chain.snapshot.is_some() && format != Format::Qcow2 {
        let context = "--load-snapshot: only a qcow2 image has snapshots";
        return Err(Error::new(ErrorKind::Invalid, context));
    }
    match format {
        Format::Null => {
            let text = named.to_string_lossy();
            let size = parse_size(&text).ok_or_else(|| {
                let context =
                    format!("invalid size {text:?} for the null format; use for example 8G");
                Error::new(ErrorKind::Invalid, context)
            })?;
            let disk = NullDisk::new(size)?;
            let disk = if purpose == Purpose::Write { disk.writable() } else { disk };
            Ok(Arc::new(disk))
        }
        Format::Raw => {
            let images = FileImages::new(named, images)?;
            let disk = match purpose {
                Purpose::Read => RawDisk::open(&images, named)?,
                Purpose::Write => RawDisk::open_writable(&images, named)?,
            };
            Ok(Arc::new(disk))
        }
        Format::Qcow2 => {
            let images: Arc<dyn Images> = Arc::new(FileImages::new(named, images)?);
            let writable = purpose == Purpose::Write;
            let chain =
                ChainOptions { writable, repair: Some(repair_for_opening), ..chain.clone() };
            Ok(Arc::new(Chain::open(images, named, &chain).await?))
        }
    }
}

/// A size as QEMU writes it: bytes, or a number with k, M, G, T, P or E (powers of 1024).
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = match text.char_indices().last()? {
        (at, 'k' | 'K') => (&text[..at], 10),
        (at, 'm' | 'M') => (&text[..at], 20),
        (at, 'g' | 'G') => (&text[..at], 30),
        (at, 't' | 'T') => (&text[..at], 40),
        (at, 'p' | 'P') => (&text[..at], 50),
        (at, 'e' | 'E') => (&text[..at], 60),
        (at, 'b' | 'B') => (&text[..at], 0),
        _ => (text, 0),
    };
    let whole: u64 = number.parse().ok()?;
    whole.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_in_qemu() {
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("8G"), Some(8 << 30));
        assert_eq!(parse_size("64k"), Some(65536));
        assert_eq!(parse_size("16E"), None, "beyond 64 bits");
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("G"), None);
        assert_eq!(parse_size("-1"), None);
    }
}
