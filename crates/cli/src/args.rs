//! What can be said on the command line. The words are qemu-img's and qemu-nbd's where the job is.

use crate::check::RepairChoice;
use crate::convert::ConvertArgs;
use crate::create::CreateArgs;
use crate::ctl::CtlArgs;
use crate::dd::{ReadArgs, WriteArgs};
use crate::images::ImageArgs;
use crate::measure::MeasureArgs;
use crate::resize::ResizeArgs;
use crate::serve::ServeArgs;
use crate::top::TopArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use mica_daemon::{HELPER_VERB, LogLevel};
use std::path::PathBuf;

/// Virtual disks whose speed, memory and snapshot cost do not depend on how many snapshots lie
/// beneath.
#[derive(Parser)]
#[command(name = "mica", version, max_term_width = 100)]
pub(crate) struct Cli {
    /// What goes to stderr besides errors.
    #[arg(long, global = true, value_enum, default_value = "warn", value_name = "LEVEL")]
    pub(crate) log_level: LogLevel,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

#[derive(Subcommand)]
pub(crate) enum Verb {
    Serve(Box<ServeArgs>),
    Ctl(CtlArgs),
    Top(TopArgs),
    /// Tell about an image: size, format, snapshots, backing files.
    Info(InfoArgs),
    /// Tell which layer owns which bytes of the disk, and where they are.
    Map(MapArgs),
    /// Check an image for corruption and leaked clusters. Changes nothing.
    ///
    /// Exit code: 0 nothing found, 1 the check could not be made, 2 corruption, 3 leaks only.
    Check(CheckArgs),
    /// Compare the content of two disks.
    ///
    /// Exit code: 0 the same, 1 different, 2 an image could not be opened, 3 or more another error.
    Compare(CompareArgs),
    Create(CreateArgs),
    Convert(ConvertArgs),
    Resize(ResizeArgs),
    Measure(MeasureArgs),
    Read(ReadArgs),
    Write(WriteArgs),
    /// Build, look at or drop the index of a chain.
    Index(IndexArgs),
    /// Make chains for tests and measurements.
    Gen(GenArgs),
    /// Do for a server what its sandbox refuses it. Started by servers alone.
    #[command(hide = true, name = HELPER_VERB)]
    Helper,
}

/// How results are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    Human,
    Json,
}

#[derive(Args)]
pub(crate) struct OutputArgs {
    /// How the result is printed.
    #[arg(long, value_enum, default_value = "human", value_name = "FORMAT")]
    pub(crate) output: OutputFormat,
}

// What verbs have that may be told to keep silent. (Words for rustdoc would become a verb's help.)
#[derive(Args)]
pub(crate) struct ReportArgs {
    /// Print only errors.
    #[arg(short = 'q', long)]
    quiet: bool,
    #[command(flatten)]
    output: OutputArgs,
}

impl ReportArgs {
    /// How the result is printed, if it is.
    pub(crate) fn format(&self) -> Option<OutputFormat> {
        Some(self.output.output).filter(|format| !self.quiet || *format == OutputFormat::Json)
    }
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

#[derive(Args)]
pub(crate) struct InfoArgs {
    /// Tell about the whole chain of backing files.
    #[arg(long)]
    pub(crate) backing_chain: bool,
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
}

#[derive(Args)]
pub(crate) struct MapArgs {
    /// Where on the disk to start, in bytes (suffixes k, M, G, T).
    #[arg(short = 's', long, default_value = "0", value_name = "OFFSET")]
    pub(crate) start_offset: String,
    /// How many bytes, to the end by default.
    #[arg(long, value_name = "LENGTH")]
    pub(crate) max_length: Option<String>,
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
}

#[derive(Args)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    /// Repair what is found: leaks only, or all that can be.
    #[arg(short = 'r', long, value_enum, value_name = "WHAT")]
    pub(crate) repair: Option<RepairChoice>,
    /// The image. Its backing files are not checked.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: PathBuf,
}

#[derive(Args)]
pub(crate) struct CompareArgs {
    /// Format of the second image.
    #[arg(short = 'F', long, default_value = "qcow2", value_name = "FORMAT")]
    pub(crate) second_format: String,
    /// Disks of different lengths are different, whatever the tail holds.
    #[arg(short = 's', long)]
    pub(crate) strict: bool,
    /// Show how far it is.
    #[arg(short = 'p', long)]
    pub(crate) progress: bool,
    #[command(flatten)]
    pub(crate) report: ReportArgs,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    /// The first image.
    #[arg(value_name = "IMAGE1")]
    pub(crate) first: PathBuf,
    /// The second image.
    #[arg(value_name = "IMAGE2")]
    pub(crate) second: PathBuf,
}

#[derive(Args)]
pub(crate) struct IndexArgs {
    #[command(subcommand)]
    pub(crate) verb: IndexVerb,
}

#[derive(Subcommand)]
pub(crate) enum IndexVerb {
    /// Write the sidecars of all frozen layers that have none that fits.
    Build(SubjectArgs),
    /// Tell of each frozen layer whether its sidecar fits.
    Status(SubjectArgs),
    /// Remove the sidecars of all frozen layers.
    Drop(SubjectArgs),
}

#[derive(Args)]
pub(crate) struct GenArgs {
    #[command(subcommand)]
    pub(crate) verb: GenVerb,
}

#[derive(Subcommand)]
pub(crate) enum GenVerb {
    /// Make a chain of qcow2 layers whose content can be verified.
    Chain(GenChainArgs),
}

#[derive(Args)]
pub(crate) struct GenChainArgs {
    /// Number of layers, the active one included.
    #[arg(short = 'n', long, default_value_t = 10, value_name = "COUNT")]
    pub(crate) layers: u32,
    /// Length of the disk.
    #[arg(short = 's', long, default_value = "8G", value_name = "SIZE")]
    pub(crate) size: String,
    /// Size of a cluster.
    #[arg(short = 'c', long, default_value = "64k", value_name = "SIZE")]
    pub(crate) cluster_size: String,
    /// Part of the disk that some layer owns, 0.0 to 1.0.
    #[arg(long, default_value_t = 0.3, value_name = "PART")]
    pub(crate) fill: f64,
    /// Which layers own it: uniform, or newest-heavy.
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    pub(crate) distribution: String,
    /// Features mixed in, separated by commas; `all` for all of them.
    #[arg(long, default_value = "", value_name = "LIST")]
    pub(crate) features: String,
    /// Seed of all that is random.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    pub(crate) seed: u64,
    /// Leave the data clusters as holes of their files.
    #[arg(long)]
    pub(crate) no_data: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    /// Directory that gets the layers; made if it is not there.
    #[arg(value_name = "DIRECTORY")]
    pub(crate) dir: PathBuf,
}
