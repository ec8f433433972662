//! Options for opening images, the same for every verb, and the opening itself.

use crate::failure::Failure;
use crate::output::OutputArgs;
use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error as ClapError, FromArgMatches};
use mica_block::Manage;
use mica_daemon::{ImageSettings, IoSettings};
use mica_qcow2::{ChainOptions, IndexUse};
use mica_rt::{Backend, Executor};
use mica_serve::nbd::client::Uri;
use mica_stack::{ExportDisk, Format, ImageOptions, parse_size};
use mica_store::CacheMode;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

// Options of verbs that open images. (A doc comment would become the help of the verb.)
#[derive(Args, Clone, Default)]
pub(crate) struct ImageArgs {
    // Before the settings, which take their values away.
    #[command(flatten)]
    has_named_format: HasNamedFormat,
    #[command(flatten)]
    pub(crate) settings: ImageSettings,
    #[command(flatten)]
    pub(crate) io: IoSettings,
}

/// Whether the user said what format an image has.
#[derive(Clone, Copy, Default)]
struct HasNamedFormat(bool);

impl Args for HasNamedFormat {
    fn augment_args(command: Command) -> Command {
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        command
    }
}

impl FromArgMatches for HasNamedFormat {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, ClapError> {
        Ok(Self(matches.value_source("format") == Some(ValueSource::CommandLine)))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), ClapError> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

// Options of verbs that report on one disk.
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
    pub(crate) fn format(&self) -> Format {
        self.settings.format
    }

    /// What a verb without these options has, with those for files.
    pub(crate) fn with_io(io: IoSettings) -> Self {
        Self { io, ..Self::default() }
    }

    /// The same options for another image, whose format is `named`, or the default.
    pub(crate) fn with_format(&self, named: Option<Format>) -> Self {
        let format = named.unwrap_or_default();
        let settings = ImageSettings { format, ..self.settings.clone() };
        let has_named_format = HasNamedFormat(named.is_some());
        Self { has_named_format, settings, io: self.io.clone() }
    }

    pub(crate) fn backend(&self) -> Backend {
        self.io.backend()
    }

    /// An executor for this thread.
    pub(crate) fn executor(&self) -> Result<Executor, Failure> {
        Executor::new(self.backend())
            .map_err(|error| Failure::new(format!("starting the I/O backend: {error}")))
    }

    /// Options for opening image files.
    pub(crate) fn image_options(&self) -> Result<ImageOptions, Failure> {
        let options = self.settings.image_options(ImageSettings::handles())?;
        options.secrets.load()?;
        Ok(options)
    }

    /// Options for opening a chain.
    pub(crate) fn chain_options(&self, index: IndexUse) -> Result<ChainOptions, Failure> {
        Ok(self.settings.chain_options(index)?)
    }

    /// Opens `image` with these options.
    pub(crate) async fn open(
        &self,
        image: &Path,
        index: IndexUse,
    ) -> Result<Arc<dyn Manage>, Failure> {
        let chain = self.chain_options(index)?;
        let images = self.image_options()?;
        Ok(mica_stack::open(image, self.format(), images, &chain).await?)
    }

    /// As [`Self::open`], for what the user names as a source: also the URI of an export.
    pub(crate) async fn open_source(
        &self,
        named: &Path,
        index: IndexUse,
    ) -> Result<Arc<dyn Manage>, Failure> {
        match self.open_export(named)? {
            Some(export) => Ok(export),
            None => self.open(named, index).await,
        }
    }

    /// The export that the user `named`; `None` if that is no URI of one.
    ///
    /// It is a disk, whatever its server makes it of, so that it has no format but raw.
    pub(crate) fn open_export(&self, named: &Path) -> Result<Option<Arc<ExportDisk>>, Failure> {
        let Some(uri) = export_uri(named) else {
            if is_old_export(named) {
                let what = "write nbd://HOST:PORT/EXPORT or nbd+unix:///EXPORT?socket=PATH";
                return Err(Failure::new(what).within(named.display()));
            }
            return Ok(None);
        };
        let format = self.format();
        if self.has_named_format.0 && format != Format::Raw {
            let what = format!("an NBD export is raw, not {}", format.name());
            return Err(Failure::new(what).within(uri));
        }
        Ok(Some(Arc::new(ExportDisk::open(uri)?)))
    }
}

/// The error of a verb that is to read a snapshot of an export.
pub(crate) fn no_snapshots() -> Failure {
    Failure::new("-l: an NBD export has no snapshots: have the server export the snapshot")
}

/// Whether this is a name of an export, and no file, that QEMU takes, too, but is no URI.
pub(crate) fn is_old_export(named: &Path) -> bool {
    named.as_os_str().as_encoded_bytes().starts_with(b"nbd:")
        && export_uri(named).is_none()
        && !named.exists()
}

/// The URI of an export, if `named` is one.
pub(crate) fn export_uri(named: &Path) -> Option<&str> {
    named.to_str().filter(|named| Uri::is_meant(named))
}

/// A cache mode of qemu-img.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct CacheWord(pub(crate) CacheMode);

impl FromStr for CacheWord {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "writeback" | "writethrough" => Ok(Self(CacheMode::Writeback)),
            "none" | "directsync" => Ok(Self(CacheMode::None)),
            "unsafe" => Err("a copy is always synced, once: leave it out".to_owned()),
            _ => Err("use writeback or none".to_owned()),
        }
    }
}

/// Parses the size given for an option.
pub(crate) fn size_of(option: &str, text: &str) -> Result<u64, Failure> {
    parse_size(text).ok_or_else(|| {
        Failure::new(format!("{option}: invalid size {text:?}; use for example 64k or 8G"))
    })
}
