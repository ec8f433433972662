//! How images are opened.

use super::{Cache, Size, one_or_many};
use clap::Args;
use mica_block::{Error, ErrorKind, Result};
use mica_qcow2::{CACHE_BYTES_DEFAULT, CACHE_BYTES_MIN, ChainOptions, IndexUse, MapCache};
use mica_stack::{
    Fault, Format, ImageOptions, Names, RedoPlace, Secret, Secrets, SidecarPlace,
    standing_allow_paths,
};
use mica_store::{CacheMode, Handles, Locking, enlarge_descriptor_table, raise_open_files_limit};
use serde::{Deserialize, Serialize};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Descriptors reserved for sockets, rings and everything else that is not an image.
pub(crate) const DESCRIPTORS_RESERVE: usize = 96;

/// Where Linux has memory with file names.
const SHARED_MEMORY: &str = "/dev/shm";
/// The word for no redo logs.
pub(crate) const NO_REDO_LOGS: &str = "off";

/// Images may name no files.
const NAMES_NONE: &str = "none";
/// Images may name files in their own directory and below.
const NAMES_BESIDE: &str = "beside";

/// Whether one of `names` is a word and not a directory.
fn is_word(name: &Path) -> bool {
    [NAMES_NONE, NAMES_BESIDE].map(OsStr::new).contains(&name.as_os_str())
}

#[expect(
    missing_docs,
    reason = "documentation would become the help of the verb that has these options"
)]
#[derive(Args, Deserialize, Serialize, Clone, PartialEq, Eq, Debug)]
#[serde(default, rename_all = "kebab-case")]
pub struct ImageSettings {
    /// Format of the image: qcow2, raw, luks, null.
    ///
    /// qcow2 by default: formats are never probed. null is a disk of zeros; IMAGE is its size.
    #[arg(short = 'f', long, default_value_t, value_name = "FORMAT")]
    #[arg(hide_default_value = true)]
    pub format: Format,
    /// Which files images may name as their backing or data file.
    ///
    /// beside: files in the image's own directory and below, the default; none; or files in this
    /// directory and below, and no others. Can be repeated. In a directory with images of several
    /// owners "none" is the only safe choice: an image could name another owner's file.
    #[arg(long, value_name = "none|beside|DIRECTORY", hide_short_help = true)]
    #[serde(deserialize_with = "one_or_many")]
    pub names: Vec<PathBuf>,
    /// Let images also name files in this directory.
    ///
    /// Files in this directory and below, in addition to those of --names. Can be repeated.
    /// MICA_ALLOW_PATH=DIRECTORY:... and allow-path = ["DIRECTORY", ...] in /etc/mica/config.toml
    /// and ~/.config/mica/config.toml have the same effect, unless --names lists directories.
    #[arg(long, value_name = "DIR")]
    pub allow_path: Vec<PathBuf>,
    /// How images are read: through the page cache, or bypassing it (O_DIRECT).
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    pub cache: Cache,
    /// File with the passphrase of encrypted images; with PATTERN, only of those that match.
    ///
    /// The whole file is the passphrase, including a line break at its end, as for QEMU. PATTERN is
    /// the name of an image's file, with * for anything. Can be repeated. SOURCE is a file, or
    /// fd:NUMBER, or keyring:NAME for a key of type user. No option takes a passphrase itself,
    /// because other users can see command lines.
    #[arg(long, value_name = "[PATTERN=]SOURCE", hide_short_help = true)]
    #[serde(deserialize_with = "one_or_many")]
    pub secret: Vec<String>,
    /// Read images that other processes have open.
    ///
    /// Even for writing: what is read may then be inconsistent. Writing still requires exclusive
    /// access.
    #[arg(short = 'U', long)]
    pub force_share: bool,
    /// Memory budget for the maps of all disks of the process together.
    ///
    /// Disks on the same base share their common part. The volumes of each store have a budget of
    /// their own. If the disks of a configuration have different values, the largest counts. By
    /// default 32M for images, and for volumes a 64th of the memory that the process may use, from
    /// 32M to 1G.
    #[arg(long, value_name = "SIZE", hide_short_help = true, help_heading = "Engine")]
    pub index_cache: Option<Size>,
    /// Keep the index in this directory instead of beside the layers.
    #[arg(long, value_name = "DIRECTORY", hide_short_help = true, help_heading = "Engine")]
    pub index_dir: Option<PathBuf>,
    /// Keep redo logs (writes not flushed yet) in this directory, which must be in memory, in a
    /// folder of this user (mica-UID): if mica is killed, the next process to open the image
    /// replays them. "off" disables them.
    #[arg(long, default_value = SHARED_MEMORY, value_name = "DIRECTORY")]
    #[arg(hide_short_help = true, help_heading = "Engine")]
    pub redo_dir: PathBuf,
    /// Inject faults into image I/O: delay=TIME; error=WHEN,errno=NAME,seed=N; log=FILE;
    /// redo-memory=SIZE (such a log is found only with the same SIZE). Of a volume, into the
    /// requests to its store: delay=TIME; error, lost, hang, slow, late=SHARE; throttle=N:M;
    /// lie=NAME; each with op=read|put|list|delete.
    #[arg(long, value_name = "FAULT", hide_short_help = true, help_heading = "Engine")]
    pub inject: Vec<String>,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            format: Format::default(),
            names: Vec::new(),
            allow_path: Vec::new(),
            cache: Cache::default(),
            secret: Vec::new(),
            force_share: false,
            index_cache: None,
            index_dir: None,
            redo_dir: SHARED_MEMORY.into(),
            inject: Vec::new(),
        }
    }
}

impl ImageSettings {
    /// Whether the image is a file: with the null format it is the size of a disk of zeros.
    pub(crate) fn is_file(&self) -> bool {
        self.format != Format::Null
    }

    /// Options for opening image files with the descriptors in `handles`.
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
                // The default place may be missing: that costs no more than unflushed writes after
                // a kill.
                if directory != Path::new(SHARED_MEMORY) && !directory.is_dir() {
                    let context = format!("--redo-dir {named}: there is no such directory");
                    return Err(Error::new(ErrorKind::NotFound, context));
                }
                RedoPlace::Directory(directory.to_owned())
            }
        };
        options.secrets = self.secrets()?;
        for fault in &self.inject {
            options.faults.push(fault.parse::<Fault>()?);
        }
        Ok(options)
    }

    /// Where the passphrases of encrypted images are.
    ///
    /// # Errors
    /// `Invalid` if one of them is not understood.
    pub fn secrets(&self) -> Result<Secrets> {
        Secrets::parse(&self.secret)
    }

    /// The files that have passphrases.
    pub(crate) fn secret_files(&self) -> Vec<PathBuf> {
        let secrets = self.secret.iter().filter_map(|text| text.parse::<Secret>().ok());
        secrets.filter_map(|secret| secret.file().map(Path::to_owned)).collect()
    }

    /// The files to which faults write what they see.
    pub(crate) fn fault_logs(&self) -> impl Iterator<Item = &Path> {
        let files = self.inject.iter().filter_map(|fault| fault.strip_prefix("log="));
        files.filter(|file| *file != "-").map(Path::new)
    }

    /// The directory of redo logs, if there are to be any.
    pub(crate) fn redo_dir(&self) -> Option<&Path> {
        Some(&*self.redo_dir).filter(|directory| directory.as_os_str() != NO_REDO_LOGS)
    }

    /// Which files images may name, and in which further directories.
    ///
    /// # Errors
    /// `Invalid` if the settings contradict each other.
    pub(crate) fn named_files(&self) -> Result<(Names, Vec<PathBuf>)> {
        let has = |word: &str| self.names.iter().any(|name| name.as_os_str() == word);
        if has(NAMES_NONE) {
            if self.names.len() > 1 || !self.allow_path.is_empty() {
                let what =
                    "--names none lets images name no files: leave out the options that allow some";
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            return Ok((Names::None, Vec::new()));
        }
        let is_beside = self.names.is_empty() || has(NAMES_BESIDE);
        let names = if is_beside { Names::Beside } else { Names::Given };
        let given = self.names.iter().filter(|name| !is_word(name)).chain(&self.allow_path);
        // Whoever lists directories wants no others.
        let standing = if is_beside { standing_allow_paths() } else { &[] };
        Ok((names, given.chain(standing).cloned().collect()))
    }

    /// Memory for the maps of chains, in bytes.
    ///
    /// # Errors
    /// `Invalid` if that is too little.
    pub(crate) fn cache_bytes(&self) -> Result<u64> {
        let cache_bytes = self.index_cache.map_or(CACHE_BYTES_DEFAULT, |Size(bytes)| bytes);
        if cache_bytes < CACHE_BYTES_MIN {
            let least = CACHE_BYTES_MIN >> 10;
            let context = format!("--index-cache: at least {least}k is needed");
            return Err(Error::new(ErrorKind::Invalid, context));
        }
        Ok(cache_bytes)
    }

    /// Options for opening a chain.
    ///
    /// # Errors
    /// `Invalid` if the cache is too small.
    pub fn chain_options(&self, index: IndexUse) -> Result<ChainOptions> {
        let cache = MapCache::new(self.cache_bytes()?);
        Ok(ChainOptions { cache, index, ..ChainOptions::default() })
    }

    /// Resolves relative paths against `folder`.
    pub(crate) fn resolve(&mut self, folder: &Path) {
        let resolve = |path: &mut PathBuf| *path = folder.join(&*path);
        self.names.iter_mut().filter(|name| !is_word(name)).for_each(resolve);
        self.allow_path.iter_mut().for_each(resolve);
        self.index_dir.iter_mut().for_each(resolve);
        for text in &mut self.secret {
            // What is not understood is reported when it is used.
            if let Ok(mut secret) = text.parse::<Secret>() {
                secret.resolve(folder);
                *text = secret.to_string();
            }
        }
        if self.redo_dir().is_some() {
            resolve(&mut self.redo_dir);
        }
    }

    /// The file descriptors that all images of this process share.
    pub fn handles() -> Arc<Handles> {
        if let Err(error) = raise_open_files_limit() {
            tracing::info!(%error, "cannot raise the limit on open files");
        }
        enlarge_descriptor_table();
        Handles::for_process(DESCRIPTORS_RESERVE)
    }
}
