//! How images are opened, as it is written on the command line and in a configuration.

use super::{Cache, Size};
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::{CACHE_BYTES_MIN, ChainOptions, IndexUse};
use mica_stack::{Fault, Format, ImageOptions, Names, RedoPlace, SidecarPlace};
use mica_store::{CacheMode, Handles, Locking, raise_open_files_limit};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Descriptors that are left for sockets, rings and all that is no image.
const HANDLES_RESERVE: usize = 96;

/// Where a Linux system has memory that looks like files.
pub(crate) fn shared_memory() -> PathBuf {
    PathBuf::from("/dev/shm")
}

/// Images name no files.
pub(crate) const NAMES_NONE: &str = "none";
/// They name what lies in their own directory and below.
pub(crate) const NAMES_BESIDE: &str = "beside";

/// Whether a part of `names` is a word and not a directory.
pub(crate) fn is_word(name: &Path) -> bool {
    [NAMES_NONE, NAMES_BESIDE].map(OsStr::new).contains(&name.as_os_str())
}

/// How images are opened. The words are those of the command line.
#[derive(Clone, Debug)]
pub struct ImageConfig {
    /// Format of the image.
    pub format: String,
    /// Which files images may name: `none`, `beside`, directories; of nothing it is `beside`.
    pub names: Vec<PathBuf>,
    /// Directories whose files they may name besides.
    pub allow_path: Vec<PathBuf>,
    /// How images are read.
    pub cache: Cache,
    /// Whether images are read although others write them.
    pub force_share: bool,
    /// Most memory for the map of the disk.
    pub index_cache: Size,
    /// Where the index is, if not beside the layers.
    pub index_dir: Option<PathBuf>,
    /// Where writers leave what was not flushed; `off` for nowhere.
    pub redo_dir: PathBuf,
    /// What shall go wrong.
    pub inject: Vec<String>,
}

impl ImageConfig {
    /// The format, if it is known.
    ///
    /// # Errors
    /// `Unsupported` if it is not.
    pub fn format(&self) -> Result<Format> {
        self.format.parse()
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
        options.redo = match &self.redo_dir {
            off if off.as_os_str() == "off" => RedoPlace::Nowhere,
            directory => {
                let named = directory.display();
                // A place that nobody chose may be missing: that costs what is not flushed, once.
                if *directory != shared_memory() && !directory.is_dir() {
                    let context = format!("--redo-dir {named}: there is no such directory");
                    return Err(Error::new(ErrorKind::NotFound, context));
                }
                RedoPlace::Directory(directory.clone())
            }
        };
        for fault in &self.inject {
            options.faults.push(fault.parse::<Fault>()?);
        }
        Ok(options)
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

    /// The descriptors that the images of this process share.
    pub fn handles() -> Arc<Handles> {
        if let Err(error) = raise_open_files_limit() {
            tracing::info!(%error, "the limit of open files stays as it is");
        }
        Handles::for_process(HANDLES_RESERVE)
    }
}
