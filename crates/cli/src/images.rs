//! The options that say how images are opened, the same for every verb, and the opening.

use crate::failure::Failure;
use clap::{Args, ValueEnum};
use mica_qcow2::{CACHE_BYTES_MIN, ChainOptions, IndexUse};
use mica_rt::{Backend, Executor};
use mica_stack::{Fault, Format, HandoverPlace, ImageOptions, OpenDisk, SidecarPlace, parse_size};
use mica_store::{CacheMode, Handles, Locking, raise_open_files_limit};
use std::path::{Path, PathBuf};

/// Descriptors that are left for sockets, rings and all that is no image.
const HANDLES_RESERVE: usize = 96;

#[derive(Args, Clone)]
pub(crate) struct ImageArgs {
    /// Format of the image: qcow2, raw, or null (a disk of zeros; IMAGE is its size).
    #[arg(short = 'f', long, default_value = "qcow2", value_name = "FORMAT")]
    pub(crate) format: String,
    /// Let images name files in this directory and below, besides their own. Can be repeated.
    #[arg(long, value_name = "DIRECTORY")]
    allow_path: Vec<PathBuf>,
    /// How images are read: through the page cache, or past it (O_DIRECT).
    #[arg(long, value_enum, default_value = "writeback", value_name = "MODE")]
    cache: CacheChoice,
    /// Read images although another program has them open for writing: what is read may then
    /// contradict itself. An image that is written is still nobody else's.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// How I/O is done: io_uring, threads, or io_uring where the system lets us.
    #[arg(long, value_enum, default_value = "auto", value_name = "BACKEND")]
    aio: AioChoice,
    /// Most memory for the map of the disk.
    #[arg(long, default_value = "32M", value_name = "SIZE")]
    index_cache: String,
    /// Keep the index in this directory instead of beside the layers.
    #[arg(long, value_name = "DIRECTORY")]
    index_dir: Option<PathBuf>,
    /// Keep in this directory, which must be memory of this machine, what was written and not
    /// flushed: if mica is killed, the next one goes on with it. "off" does without.
    #[arg(long, default_value = "/dev/shm", value_name = "DIRECTORY")]
    handover_dir: PathBuf,
    /// Let reads of images go wrong: delay=TIME; error=WHEN,errno=NAME,seed=N; log=FILE.
    #[arg(long, value_name = "FAULT")]
    inject: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum CacheChoice {
    Writeback,
    None,
}

#[derive(Clone, Copy, ValueEnum)]
enum AioChoice {
    Auto,
    #[value(name = "io_uring")]
    IoUring,
    Threads,
}

impl ImageArgs {
    pub(crate) fn format(&self) -> Result<Format, Failure> {
        Ok(self.format.parse()?)
    }

    pub(crate) fn backend(&self) -> Backend {
        match self.aio {
            AioChoice::Auto => Backend::Auto,
            AioChoice::IoUring => Backend::Uring,
            AioChoice::Threads => Backend::Pool,
        }
    }

    /// An executor for this thread.
    pub(crate) fn executor(&self) -> Result<Executor, Failure> {
        Executor::new(self.backend())
            .map_err(|error| Failure::new(format!("starting the I/O backend: {error}")))
    }

    /// How image files are opened.
    pub(crate) fn image_options(&self) -> Result<ImageOptions, Failure> {
        if let Err(error) = raise_open_files_limit() {
            tracing::info!(%error, "the limit of open files stays as it is");
        }
        let mut options = ImageOptions::new(Handles::for_process(HANDLES_RESERVE));
        options.allow_paths.clone_from(&self.allow_path);
        options.cache = match self.cache {
            CacheChoice::Writeback => CacheMode::Writeback,
            CacheChoice::None => CacheMode::None,
        };
        if self.force_share {
            options.locking = Locking::ForceShare;
        }
        if let Some(directory) = &self.index_dir {
            options.sidecars = SidecarPlace::Directory(directory.clone());
        }
        options.handover = match &self.handover_dir {
            off if off.as_os_str() == "off" => HandoverPlace::Nowhere,
            directory => HandoverPlace::Directory(directory.clone()),
        };
        for fault in &self.inject {
            options.faults.push(fault.parse::<Fault>()?);
        }
        Ok(options)
    }

    /// How a chain is opened.
    pub(crate) fn chain_options(&self, index: IndexUse) -> Result<ChainOptions, Failure> {
        let cache_bytes = size_of("--index-cache", &self.index_cache)?;
        if cache_bytes < CACHE_BYTES_MIN {
            let least = CACHE_BYTES_MIN >> 10;
            return Err(Failure::new(format!("--index-cache: at least {least}k are needed")));
        }
        Ok(ChainOptions { cache_bytes, index, ..ChainOptions::default() })
    }

    /// Opens `image` as these options say.
    pub(crate) async fn open(&self, image: &Path, index: IndexUse) -> Result<OpenDisk, Failure> {
        let chain = self.chain_options(index)?;
        let images = self.image_options()?;
        Ok(mica_stack::open(image, self.format()?, images, &chain).await?)
    }
}

/// The size that an option says.
pub(crate) fn size_of(option: &str, text: &str) -> Result<u64, Failure> {
    parse_size(text).ok_or_else(|| {
        Failure::new(format!("{option}: {text:?} is no size: write it like 64k or 8G"))
    })
}
