//! The options that say how images are opened, the same for every verb, and the opening.

use crate::failure::Failure;
use crate::output::OutputArgs;
use clap::Args;
use mica_block::Manage;
use mica_daemon::{Aio, Cache, ImageConfig, Size};
use mica_qcow2::{ChainOptions, IndexUse};
use mica_rt::{Backend, Executor};
use mica_stack::{Format, ImageOptions, parse_size};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Args, Clone)]
pub(crate) struct ImageArgs {
    /// Format of the image: qcow2, raw, or null (a disk of zeros; IMAGE is its size).
    #[arg(short = 'f', long, default_value = "qcow2", value_name = "FORMAT")]
    pub(crate) format: String,
    /// Which files images may name, as their backing or data file: those beside them, that is in
    /// the image's own directory and below, which is the default; none; or those in this directory
    /// and below, and no others. Can be repeated. In a directory that holds images of several
    /// owners "none" is the only safe choice: an image could name that of another owner.
    #[arg(long, value_name = "none|beside|DIRECTORY")]
    names: Vec<PathBuf>,
    /// Let images name files in this directory and below, besides those of --names. Can be
    /// repeated.
    #[arg(long, value_name = "DIRECTORY")]
    allow_path: Vec<PathBuf>,
    /// How images are read: through the page cache, or past it (O_DIRECT).
    #[arg(long, value_enum, default_value = "writeback", value_name = "MODE")]
    cache: Cache,
    /// Read images although another program has them open for writing: what is read may then
    /// contradict itself. An image that is written is still nobody else's.
    #[arg(short = 'U', long)]
    force_share: bool,
    /// How I/O is done: io_uring, threads, or io_uring where the system lets us.
    #[arg(long, value_enum, default_value = "auto", value_name = "BACKEND")]
    pub(crate) aio: Aio,
    /// Most memory for the map of the disk.
    #[arg(long, default_value = "32M", value_name = "SIZE")]
    index_cache: Size,
    /// Keep the index in this directory instead of beside the layers.
    #[arg(long, value_name = "DIRECTORY")]
    index_dir: Option<PathBuf>,
    /// Keep in this directory, which must be memory of this machine, what was written and not
    /// flushed, in a folder of this user's (mica-UID): if mica is killed, the next one goes on with
    /// it. "off" does without.
    #[arg(long, default_value = "/dev/shm", value_name = "DIRECTORY")]
    redo_dir: PathBuf,
    /// Let reads of images go wrong: delay=TIME; error=WHEN,errno=NAME,seed=N; log=FILE.
    #[arg(long, value_name = "FAULT")]
    inject: Vec<String>,
}

// What verbs have that tell something of one disk.
#[derive(Args)]
pub(crate) struct SubjectArgs {
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    /// The image: for a chain, its active layer.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
}

impl ImageArgs {
    /// The same as a configuration has it.
    pub(crate) fn config(&self) -> ImageConfig {
        ImageConfig {
            format: self.format.clone(),
            names: self.names.clone(),
            allow_path: self.allow_path.clone(),
            cache: self.cache,
            force_share: self.force_share,
            index_cache: self.index_cache,
            index_dir: self.index_dir.clone(),
            redo_dir: self.redo_dir.clone(),
            inject: self.inject.clone(),
        }
    }

    pub(crate) fn format(&self) -> Result<Format, Failure> {
        Ok(self.config().format()?)
    }

    pub(crate) fn backend(&self) -> Backend {
        self.aio.backend()
    }

    /// An executor for this thread.
    pub(crate) fn executor(&self) -> Result<Executor, Failure> {
        Executor::new(self.backend())
            .map_err(|error| Failure::new(format!("starting the I/O backend: {error}")))
    }

    /// How image files are opened.
    pub(crate) fn image_options(&self) -> Result<ImageOptions, Failure> {
        Ok(self.config().image_options(ImageConfig::handles())?)
    }

    /// How a chain is opened.
    pub(crate) fn chain_options(&self, index: IndexUse) -> Result<ChainOptions, Failure> {
        Ok(self.config().chain_options(index)?)
    }

    /// Opens `image` as these options say.
    pub(crate) async fn open(
        &self,
        image: &Path,
        index: IndexUse,
    ) -> Result<Arc<dyn Manage>, Failure> {
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
