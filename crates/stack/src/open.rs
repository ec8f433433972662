//! From what the user named to a disk.

use crate::above::active_layer;
use crate::merged::{Unended, settle_bases};
use crate::{FileImages, ImageOptions, LayeredRaw, MayWrite, NullDisk, RawDisk};
use mica_block::{Error, ErrorKind, Images, Manage, Result, wait_for_dead};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_store::Locking;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// The format of an image, which is always stated: nothing is probed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Format {
    /// A qcow2 image, with the chain beneath it.
    #[default]
    Qcow2,
    /// The disk's bytes, as they are.
    Raw,
    /// The same, encrypted, behind a LUKS header.
    Luks,
    /// No image: a disk of zeros, for measurements.
    Null,
}

impl Format {
    /// As it is written on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Raw => "raw",
            Self::Luks => "luks",
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
            "luks" => Ok(Self::Luks),
            "null" => Ok(Self::Null),
            _ => {
                let mut context =
                    format!("unknown format {text:?}: mica knows qcow2, raw and luks");
                if QEMU_FORMATS.contains(&text) {
                    context +=
                        &format!(", qemu-img convert translates -f {text} to -O qcow2 and back");
                }
                Err(Error::new(ErrorKind::Unsupported, context))
            }
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Format {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Format {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Name;
        impl de::Visitor<'_> for Name {
            type Value = Format;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string")
            }

            // From inside the visitor an error gets its place in the file.
            fn visit_str<E: de::Error>(self, name: &str) -> std::result::Result<Format, E> {
                name.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_str(Name)
    }
}

/// What a disk is opened for.
#[derive(Clone, Debug)]
enum Purpose {
    Read,
    Write(MayWrite),
}

impl Purpose {
    fn images(&self, named: &Path, options: ImageOptions) -> Result<FileImages> {
        match self {
            Self::Read => FileImages::new(named, options),
            Self::Write(may_write) => FileImages::to_write(named, options, may_write.clone()),
        }
    }
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
    open_for(&Purpose::Read, named, format, images, chain).await
}

/// As [`open`], for reading and writing. The caller must end with [`Manage::close`]. The disk
/// itself reports whether it can be written: an internal snapshot cannot.
///
/// # Errors
/// As [`open`], and if another program has the image open, or if it is a frozen layer.
pub async fn open_writable(
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    let may_write = match format {
        Format::Null => MayWrite::new_file(),
        Format::Qcow2 | Format::Raw | Format::Luks => MayWrite::check(named, &images).await?,
    };
    let opened = open_for(&Purpose::Write(may_write), named, format, images.clone(), chain).await?;
    settle_commits(&*opened, &images).await;
    Ok(opened)
}

/// Takes away what a commit into a layer of the chain has left that was killed when it was done.
/// Returns what is left of one that was not.
async fn settle_commits(opened: &dyn Manage, images: &ImageOptions) -> Vec<Unended> {
    match images.locking {
        Locking::On if opened.chain().is_some() => {
            settle_bases(&opened.layer_paths(), images).await
        }
        // Others may be at work.
        _ => Vec::new(),
    }
}

/// As [`open_writable`], for a disk that is served: if a layer was put on top of the image that the
/// user `named`, the one that is written now is opened. Returns its path, too.
///
/// # Errors
/// As [`open_writable`].
pub async fn open_active(
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<(Arc<dyn Manage>, PathBuf)> {
    if !matches!(format, Format::Qcow2 | Format::Raw) || chain.snapshot.is_some() {
        let opened = open_writable(named, format, images, chain).await?;
        return Ok((opened, named.to_owned()));
    }
    let active = active_layer(named, images).await?;
    let (path, options, named_as) = (&active.path, &active.options, &active.named_as);
    let may_write = MayWrite::as_active();
    let is_above = path != named;
    let opened: Arc<dyn Manage> = match format {
        Format::Raw if !is_above => {
            let chain = ChainOptions { repair: Some(repair_for_opening), ..chain.clone() };
            let open = async || {
                let images = FileImages::to_write(path, options.clone(), may_write.clone())?;
                LayeredRaw::open(Arc::new(images), path, &chain)
            };
            Arc::new(wait_for_dead(open).await?)
        }
        // What is put on top of a raw image, too.
        _ => {
            let purpose = Purpose::Write(may_write);
            open_for(&purpose, path, Format::Qcow2, options.clone(), chain).await?
        }
    };
    active.mend();
    for Unended { base, mark } in settle_commits(&*opened, options).await {
        tracing::warn!(
            "{} may have only a part of what goes into it, as {} says: a commit was interrupted; \
             repeat it (`mica ctl commit`, or `mica commit`)",
            base.display(),
            mark.display()
        );
    }
    if is_above {
        let (named, path) = (named.display(), path.display());
        tracing::info!("{named} goes on in {path}");
        if let Some(is) = named_as.as_ref().filter(|is| **is != format.name()) {
            let stated = format.name();
            tracing::warn!(
                "{named} is opened as {stated}, but {path}, which stands on it, names it as {is}: \
                 state --format {is}"
            );
        }
    }
    Ok((opened, active.path))
}

async fn open_for(
    purpose: &Purpose,
    named: &Path,
    format: Format,
    images: ImageOptions,
    chain: &ChainOptions,
) -> Result<Arc<dyn Manage>> {
    wait_for_dead(async || open_now(purpose, named, format, images.clone(), chain).await).await
}

async fn open_now(
    purpose: &Purpose,
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
            Ok(Arc::new(match purpose {
                Purpose::Read => disk,
                Purpose::Write(_) => disk.writable(),
            }))
        }
        Format::Raw => {
            let images = purpose.images(named, images)?;
            let disk = match purpose {
                Purpose::Read => RawDisk::open(&images, named)?,
                Purpose::Write(_) => RawDisk::open_writable(&images, named)?,
            };
            Ok(Arc::new(disk))
        }
        Format::Luks => {
            let images = purpose.images(named, images)?;
            let disk = match purpose {
                Purpose::Read => RawDisk::open_luks(&images, named).await?,
                Purpose::Write(_) => RawDisk::open_luks_writable(&images, named).await?,
            };
            Ok(Arc::new(disk))
        }
        Format::Qcow2 => {
            let images: Arc<dyn Images> = Arc::new(purpose.images(named, images)?);
            let writable = matches!(purpose, Purpose::Write(_));
            let chain =
                ChainOptions { writable, repair: Some(repair_for_opening), ..chain.clone() };
            Ok(Arc::new(Chain::open(images, named, &chain).await?))
        }
    }
}

/// A size as QEMU reads it: bytes, or a number, perhaps with a fraction, with k, M, G, T, P or E
/// (powers of 1024). KiB and so on mean the same; KB does not, as nobody knows whether it is 1000.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits_end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let unit = unit.trim_start().to_ascii_lowercase();
    let prefix = match unit.as_str() {
        "" | "b" => None,
        unit => Some(unit.strip_suffix("ib").unwrap_or(unit)),
    };
    let shift = match prefix {
        None => 0,
        Some("k") => 10,
        Some("m") => 20,
        Some("g") => 30,
        Some("t") => 40,
        Some("p") => 50,
        Some("e") => 60,
        Some(_) => return None,
    };
    let (whole, fraction) = match number.split_once('.') {
        None => (number, ""),
        // There are no parts of bytes.
        Some(_) if shift == 0 => return None,
        Some((_, "")) => return None,
        Some(parts) => parts,
    };
    let bytes = whole.parse::<u64>().ok()?.checked_mul(1 << shift)?;
    bytes.checked_add(part_of(fraction, 1 << shift)?)
}

/// How much of `unit` the digits behind a decimal point stand for.
fn part_of(fraction: &str, unit: u64) -> Option<u64> {
    // More digits change no byte.
    const DIGITS_MAX: usize = 18;
    if !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let fraction = &fraction[..fraction.len().min(DIGITS_MAX)];
    if fraction.is_empty() {
        return Some(0);
    }
    let digits = u32::try_from(fraction.len()).ok()?;
    let part = fraction.parse::<u128>().ok()? * u128::from(unit) / 10_u128.pow(digits);
    u64::try_from(part).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::lock_patience;
    use mica_rt::{Backend, Executor};
    use mica_store::{CacheMode, Handles, Located, WritableFile};
    use std::time::Duration;

    /// The story: who had waited for a second until an image was let go of, and found that it had
    /// been replaced just then, did not look for it once more.
    #[test]
    fn image_that_is_replaced_when_it_was_waited_for_is_looked_for_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("image");
        std::fs::write(&path, "image").expect("written");
        let handles = Handles::new(4);
        let found = || Located::find(&path).expect("there");
        let open = |mut located: Located| {
            WritableFile::open(&mut located, CacheMode::Writeback, Locking::On, &handles)
        };
        let alone = WritableFile::open_alone(&mut found(), CacheMode::Writeback, &handles);
        let held = open(found()).err().expect("somebody has it");
        drop(alone.expect("nobody had it"));
        let old = found();
        std::fs::write(folder.path().join("new"), "new").expect("written");
        std::fs::rename(folder.path().join("new"), &path).expect("renamed");
        let replaced = open(old).err().expect("another file is there");
        let patience = |error| lock_patience(error).expect("it is waited for");
        assert!(patience(&replaced) < patience(&held));

        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("the simulator");
        let opened = executor.block_on(async {
            let (start, mut was_replaced) = (mica_rt::now(), false);
            let long = patience(&replaced) + Duration::from_millis(500);
            wait_for_dead(async || match mica_rt::now().saturating_since(start) < long {
                true => Err(held.clone()),
                false if !std::mem::replace(&mut was_replaced, true) => Err(replaced.clone()),
                false => Ok(()),
            })
            .await
        });
        opened.expect("it is there");
        let start = executor.block_on(async { mica_rt::now() });
        let given_up = executor.block_on(wait_for_dead(async || Err::<(), _>(replaced.clone())));
        given_up.expect_err("it is replaced again and again");
        let now = executor.block_on(async { mica_rt::now() });
        assert!(now.saturating_since(start) < 2 * patience(&replaced));
    }

    #[test]
    fn sizes_read_as_in_qemu() {
        assert_eq!(parse_size("512"), Some(512));
        assert_eq!(parse_size("8G"), Some(8 << 30));
        assert_eq!(parse_size("64k"), Some(65536));
        assert_eq!(parse_size("16E"), None, "beyond 64 bits");
        assert_eq!(parse_size(""), None);
        assert_eq!(parse_size("G"), None);
        assert_eq!(parse_size("-1"), None);
        assert_eq!(parse_size("1.5G"), Some(3 << 29));
        assert_eq!(parse_size("0.1k"), Some(102));
        assert_eq!(parse_size("15.5E"), Some(31 << 59));
        assert_eq!(parse_size("100b"), Some(100));
    }

    #[test]
    fn units_of_1024_can_be_written_out_and_ambiguous_ones_are_refused() {
        assert_eq!(parse_size("64KiB"), Some(65536));
        assert_eq!(parse_size("64K"), Some(65536));
        assert_eq!(parse_size("1.5 GiB"), Some(3 << 29), "as mica itself prints it");
        for text in ["64KB", "1GB", "1ib", "1.5", "1.5b", "1.", "1.G", ".5G", "1..5G", "1.5.5G"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
        for text in ["1e3", "0x10", "+1G", "1 2", "1G G", "GiB", "1.5\u{663}G"] {
            assert_eq!(parse_size(text), None, "{text}");
        }
    }
}
