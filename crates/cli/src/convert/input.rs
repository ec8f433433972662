//! What is copied: an image, several, one after the other, or standard input.
//!
//! A pipe has no length and is read once, but an image needs to know its length before it gets
//! data: the bytes go to a temporary file beside the target, which is removed after the copy.

use super::stream::is_stream;
use super::{ConvertArgs, options_of};
use crate::create::{Sources, is_any_encrypted, is_block_device};
use crate::failure::Failure;
use crate::images::{export_uri, is_old_export, no_snapshots};
use mica_block::{Disk, Manage};
use mica_qcow2::IndexUse;
use mica_qcow2_format::BitmapEntry;
use mica_stack::{Format, Joined, is_zero, warn_of_luks};
use mica_store::NamelessFile;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of standard input that are read at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// What is copied.
pub(crate) struct Input {
    pub(super) disk: Arc<dyn Disk>,
    /// The files that it is made of.
    pub(super) files: Sources,
    /// Whether any of them is encrypted.
    pub(super) is_encrypted: bool,
    /// What standard input had, in a file that ends when this is dropped.
    pub(super) spooled: Option<NamelessFile>,
    /// The bitmaps that are copied, too.
    pub(super) bitmaps: Vec<BitmapEntry>,
}

impl Input {
    /// A disk that was opened at `path`.
    pub(crate) fn of(path: &Path, disk: Arc<dyn Manage>) -> Self {
        let mut files = Sources::default();
        files.add(path, &*disk);
        let is_encrypted = is_any_encrypted(&*disk);
        Self { disk, files, is_encrypted, spooled: None, bitmaps: Vec::new() }
    }

    /// The same files, of which only `part` is copied.
    pub(crate) fn with_disk(self, part: Arc<dyn Disk>) -> Self {
        Self { disk: part, ..self }
    }
}

/// Whether the target is, or may be for all that is known before it is opened: by what is said of a
/// new one, by its base, or as it is.
fn may_be_encrypted(args: &ConvertArgs, format: Format) -> Result<bool, Failure> {
    let has_secret = !args.images.image_options()?.secrets.is_empty();
    match format {
        Format::Qcow2 if !args.no_create => options_of(args, format)?.encrypt.wants(has_secret),
        _ => Ok(args.no_create && has_secret),
    }
}

/// # Errors
/// If the options ask for something that such a source does not have.
pub(super) fn check(args: &ConvertArgs, format: Format) -> Result<(), Failure> {
    check_exports(args)?;
    let has_stream = args.names.sources.iter().any(|source| is_stream(source));
    if has_stream && args.images.format() != Format::Raw {
        let what = "-: only the bytes of a disk can be read from a pipe: add --format raw";
        return Err(Failure::new(what));
    }
    if has_stream && is_stream(&args.names.target) {
        return Err(Failure::new("-: cat copies standard input to standard output"));
    }
    if has_stream && may_be_encrypted(args, format)? {
        let what = "-: standard input would first be stored in a file that is not encrypted: store \
                    it where only you can read it, and convert that";
        return Err(Failure::new(what));
    }
    if args.names.sources.len() < 2 {
        return Ok(());
    }
    if has_stream {
        return Err(Failure::new(
            "-: standard input must be the only source: concatenate with cat",
        ));
    }
    if args.load_snapshot.is_some() {
        return Err(Failure::new("-l: snapshots cannot be copied from several sources"));
    }
    if args.backing.is_some() {
        return Err(Failure::new("-B: several sources have no base in common"));
    }
    Ok(())
}

/// Exports are read by their URIs, and have only bytes.
fn check_exports(args: &ConvertArgs) -> Result<(), Failure> {
    if export_uri(&args.names.target).is_some() || is_old_export(&args.names.target) {
        let what = "mica convert does not write to NBD servers: nbdcopy does, also from a pipe: \
                    mica convert -O raw IMAGE - | nbdcopy - URI";
        return Err(Failure::new(what));
    }
    let is_export = |path: &&PathBuf| export_uri(path).is_some();
    let Some(export) = args.names.sources.iter().find(is_export) else { return Ok(()) };
    if args.load_snapshot.is_some() {
        return Err(no_snapshots());
    }
    if args.bitmaps {
        let what = "--bitmaps: bitmaps of an NBD export cannot be copied";
        return Err(Failure::new(what).within(export.display()));
    }
    Ok(())
}

/// Opens all sources.
pub(super) async fn open(args: &ConvertArgs) -> Result<Input, Failure> {
    let mut chain = args.images.chain_options(IndexUse::Read)?;
    chain.snapshot = args.load_snapshot.clone();
    let (options, format) = (args.source_options()?, args.images.format());
    let (mut files, mut disks, mut spooled) = (Sources::default(), Vec::new(), None);
    for source in &args.names.sources {
        let mut path = source.clone();
        if is_stream(source) {
            let file = spool(&args.names.target)?;
            path = file.path().to_owned();
            spooled = Some(file);
        }
        let path = &*path;
        let disk = match args.images.open_export(path)? {
            Some(export) => export as _,
            None => {
                let opened = mica_stack::open(path, format, options.clone(), &chain).await;
                let opened = opened.map_err(|error| match spooled {
                    Some(_) => error.wrap("standard input".to_owned()),
                    None => error,
                })?;
                warn_of_luks(source, format, &*opened).await;
                opened
            }
        };
        files.add(path, &*disk);
        disks.push(disk);
    }
    let is_encrypted = disks.iter().any(|disk| is_any_encrypted(&**disk));
    let disk: Arc<dyn Disk> = match disks.pop() {
        Some(only) if disks.is_empty() => only,
        last => Arc::new(Joined::new(disks.into_iter().chain(last).map(|disk| disk as _))),
    };
    Ok(Input { disk, files, is_encrypted, spooled, bitmaps: Vec::new() })
}

/// Writes standard input to a file that never has a name, so that no kill leaves it behind, with
/// holes where it is zeros: there is room for it where the target is.
fn spool(target: &Path) -> Result<NamelessFile, Failure> {
    let folder = match target.parent() {
        _ if is_block_device(target) => std::env::temp_dir(),
        Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
        Some(folder) => folder.to_owned(),
        None => std::env::temp_dir(),
    };
    let spooled = || {
        let file = tempfile::tempfile_in(&folder)?;
        file.set_len(copy_sparsely(&file)?)?;
        Ok::<_, std::io::Error>(file)
    };
    let file = spooled().map_err(|error| {
        let folder = folder.display();
        Failure::new(format!("standard input, in a temporary file in {folder}: {error}"))
    })?;
    Ok(NamelessFile::new(file.into())?)
}

fn copy_sparsely(file: &File) -> std::io::Result<u64> {
    let mut stdin = std::io::stdin().lock();
    let (mut at, mut piece) = (0, Vec::new());
    loop {
        piece.clear();
        stdin.by_ref().take(PIECE_BYTES).read_to_end(&mut piece)?;
        if piece.is_empty() {
            return Ok(at);
        }
        if !is_zero(&piece) {
            file.write_all_at(&piece, at)?;
        }
        at += piece.len() as u64;
    }
}
