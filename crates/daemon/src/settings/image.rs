//! How images are opened, as it is written on the command line and in a configuration.

use super::{Cache, Size};
use clap::Args;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::{CACHE_BYTES_MIN, ChainOptions, IndexUse};
use mica_stack::{Fault, Format, ImageOptions, Names, RedoPlace, SidecarPlace};
use mica_store::{CacheMode, Handles, Locking, raise_open_files_limit};
use serde::{Deserialize, Deserializer};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Descriptors that are left for sockets, rings and all that is no image.
const HANDLES_RESERVE: usize = 96;

/// Where a Linux system has memory that looks like files.
const SHARED_MEMORY: &str = "/dev/shm";
/// The directory of redo logs that is none.
const NO_REDO_LOGS: &str = "off";
/// The format of images of which nothing is said.
const FORMAT: &str = "qcow2";
/// Most memory for the map of a disk of which nothing is said.
const INDEX_CACHE: Size = Size(32 << 20);

/// Images name no files.
const NAMES_NONE: &str = "none";
/// They name what lies in their own directory and below.
const NAMES_BESIDE: &str = "beside";

/// Whether a part of `names` is a word and not a directory.
fn is_word(name: &Path) -> bool {
    [NAMES_NONE, NAMES_BESIDE].map(OsStr::new).contains(&name.as_os_str())
}

// (Documentation of the struct would become the help of the verb that has these options.)
#[expect(missing_docs, reason = "it would become the help of the verb that has these options")]
#[derive(Args, Deserialize, Clone, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct ImageSettings {
    /// Format of the image: qcow2, raw, or null (a disk of zeros; IMAGE is its size).
    #[arg(short = 'f', long, default_value = FORMAT, value_name = "FORMAT")]
    pub format: String,
    /// Which files images may name, as their backing or data file: those beside them, that is in
    /// the image's own directory and below, which is the default; none; or those in this directory
    /// and below, and no others. Can be repeated. In a directory that holds images of several
    /// owners "none" is the only safe choice: an image could name that of another owner.
    #[arg(long, value_name = "none|beside|DIRECTORY")]
    #[serde(deserialize_with = "one_or_many")]
    pub names: Vec<PathBuf>,
    /// Let images name files in this directory and below, besides those of --names. Can be
    /// repeated.
    #[arg(long, value_name = "DIRECTORY")]
    pub allow_path: Vec<PathBuf>,
    /// How images are read: through the page cache, or past it (O_DIRECT).
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    pub cache: Cache,
    /// Read images although another program has them open for writing: what is read may then
    /// contradict itself. An image that is written is still nobody else's.
    #[arg(short = 'U', long)]
    pub force_share: bool,
    /// Most memory for the map of the disk.
    #[arg(long, default_value_t = INDEX_CACHE, value_name = "SIZE")]
    pub index_cache: Size,
    /// Keep the index in this directory instead of beside the layers.
    #[arg(long, value_name = "DIRECTORY")]
    pub index_dir: Option<PathBuf>,
    /// Keep in this directory, which must be memory of this machine, what was written and not
    /// flushed, in a folder of this user's (mica-UID): if mica is killed, the next one goes on with
    /// it. "off" does without.
    #[arg(long, default_value = SHARED_MEMORY, value_name = "DIRECTORY")]
    pub redo_dir: PathBuf,
    /// Let reads of images go wrong: delay=TIME; error=WHEN,errno=NAME,seed=N; log=FILE.
    #[arg(long, value_name = "FAULT")]
    pub inject: Vec<String>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            format: FORMAT.to_owned(),
            names: Vec::new(),
            allow_path: Vec::new(),
            cache: Cache::default(),
            force_share: false,
            index_cache: INDEX_CACHE,
            index_dir: None,
            redo_dir: SHARED_MEMORY.into(),
            inject: Vec::new(),
        }
    }
}

/// A list, or the only thing on it.
fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<PathBuf>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Said {
        One(PathBuf),
        Many(Vec<PathBuf>),
    }
    Ok(match Said::deserialize(deserializer)? {
        Said::One(one) => vec![one],
        Said::Many(many) => many,
    })
}

impl ImageSettings {
    /// The format, if it is known.
    ///
    /// # Errors
    /// `Unsupported` if it is not.
    pub fn format(&self) -> Result<Format> {
        self.format.parse()
    }

    /// Whether the image is a file: of the null format it is the size of a disk of zeros.
    pub(crate) fn is_file(&self) -> bool {
        self.format != "null"
    }

    /// How image files are opened, by a process that has these `handles`.
    ///
    /// # Errors
    /// `Invalid` if a fault is not understood.
    pub fn image_options(&self, handles: Arc<Handles>) -> Result<ImageOptions> {
        let mut options = ImageOptions::new(handles);
        (options.names, options.allow_paths) = self.named_files()?;
        options.cache = match self.cache {
            Cache::Writeback => CacheMode::Writeback,
            Cache::None => CacheMode::None,
        };
        if self.force_share {
            options.locking = Locking::ForceShare;
        }
        if let Some(directory) = &self.index_dir {
            options.sidecars = SidecarPlace::Directory(directory.clone());
        }
        options.redo = match self.redo_dir() {
            None => RedoPlace::Nowhere,
            Some(directory) => {
                let named = directory.display();
                // A place that nobody chose may be missing: that costs what is not flushed, once.
                if directory != Path::new(SHARED_MEMORY) && !directory.is_dir() {
                    let context = format!("--redo-dir {named}: there is no such directory");
                    return Err(Error::new(ErrorKind::NotFound, context));
                }
                RedoPlace::Directory(directory.to_owned())
            }
        };
        for fault in &self.inject {
            options.faults.push(fault.parse::<Fault>()?);
        }
        Ok(options)
    }

    /// Where redo logs are, if they are anywhere.
    pub(crate) fn redo_dir(&self) -> Option<&Path> {
        Some(&*self.redo_dir).filter(|directory| directory.as_os_str() != NO_REDO_LOGS)
    }

    /// Which files images may name, and in which directories besides.
    ///
    /// # Errors
    /// `Invalid` if what was said contradicts itself.
    pub(crate) fn named_files(&self) -> Result<(Names, Vec<PathBuf>)> {
        let has = |word: &str| self.names.iter().any(|name| name.as_os_str() == word);
        if has(NAMES_NONE) {
            if self.names.len() > 1 || !self.allow_path.is_empty() {
                let what = "--names none lets images name no files: leave out what allows some";
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            return Ok((Names::None, Vec::new()));
        }
        let is_beside = self.names.is_empty() || has(NAMES_BESIDE);
        let names = if is_beside { Names::Beside } else { Names::Given };
        let given = self.names.iter().filter(|name| !is_word(name));
        Ok((names, given.chain(&self.allow_path).cloned().collect()))
    }

    /// How a chain is opened.
    ///
    /// # Errors
    /// `Invalid` if the cache is too small.
    pub fn chain_options(&self, index: IndexUse) -> Result<ChainOptions> {
        let Size(cache_bytes) = self.index_cache;
        if cache_bytes < CACHE_BYTES_MIN {
            let least = CACHE_BYTES_MIN >> 10;
            let context = format!("--index-cache: at least {least}k are needed");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        Ok(ChainOptions { cache_bytes, index, ..ChainOptions::default() })
    }

    /// Starts relative paths from `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        self.names.iter_mut().filter(|name| !is_word(name)).for_each(resolve);
        self.allow_path.iter_mut().for_each(resolve);
        self.index_dir.iter_mut().for_each(resolve);
        if self.redo_dir().is_some() {
            resolve(&mut self.redo_dir);
        }
    }

    /// The descriptors that the images of this process share.
    pub fn handles() -> Arc<Handles> {
        if let Err(error) = raise_open_files_limit() {
            tracing::info!(%error, "the limit of open files stays as it is");
        }
        Handles::for_process(HANDLES_RESERVE)
    }
}
