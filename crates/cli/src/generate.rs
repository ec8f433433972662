//! `mica gen`: chains for tests and measurements.

use crate::failure::Failure;
use crate::images::size_of;
use crate::output::{OutputArgs, OutputFormat, print, print_json, progress_bar};
use crate::sections;
use clap::{Args, Subcommand};
use mica_gen::{ChainSpec, DataMode, Features, Fleet, FleetSpec, generate, generate_fleet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Args)]
pub(crate) struct GenArgs {
    #[command(subcommand)]
    verb: GenVerb,
}

#[derive(Subcommand)]
enum GenVerb {
    /// Generate a chain of qcow2 layers whose content can be verified.
    #[command(after_long_help = sections::GEN_CHAIN)]
    Chain(GenChainArgs),
    /// Generate many chains of tiny images, like those of a cloud.
    ///
    /// Lengths, sharing, sizes and times follow figures that were published of a cloud in 2020
    /// (section 3 of "Virtual Disk Snapshot Management at Scale"): for `mica survey` and `mica
    /// tree`, and for comparison with your own. The folder `first` has the disks of the provider,
    /// `third` those of customers, `images` what both are based on.
    #[command(after_long_help = sections::GEN_FLEET)]
    Fleet(GenFleetArgs),
}

#[derive(Args)]
struct GenFleetArgs {
    /// Number of chains.
    #[arg(short = 'n', long, default_value_t = 500, value_name = "COUNT")]
    chains: u64,
    /// Random seed.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    #[command(flatten)]
    output: OutputArgs,
    /// Directory for the fleet; created if it does not exist, otherwise it must be empty.
    #[arg(value_name = "DIRECTORY")]
    dir: PathBuf,
}

#[derive(Args)]
struct GenChainArgs {
    /// Layers, including the active one.
    #[arg(short = 'n', long, default_value_t = 10, value_name = "COUNT")]
    layers: u32,
    /// Length of the disk.
    #[arg(short = 's', long, default_value = "8G", value_name = "SIZE")]
    size: String,
    /// Size of a cluster.
    #[arg(short = 'c', long, default_value = "64k", value_name = "SIZE")]
    cluster_size: String,
    /// Share of the disk with data, 0 to 1.
    #[arg(long, default_value_t = 0.3, value_name = "PART")]
    fill: f64,
    /// Where data is: uniform, or newest-heavy.
    #[arg(long, default_value = "uniform", value_name = "NAME")]
    distribution: String,
    /// Features to mix in, separated by commas; or all.
    #[arg(long, default_value = "", value_name = "LIST")]
    features: String,
    /// Random seed.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
    /// Leave data clusters as holes.
    #[arg(long)]
    no_data: bool,
    /// Overwrite layers in the directory.
    ///
    /// Without this it must be empty. An image that another program uses is never overwritten.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: OutputArgs,
    /// Directory for the layers; created if it does not exist.
    #[arg(value_name = "DIRECTORY")]
    dir: PathBuf,
}

pub(crate) fn run(args: &GenArgs) -> Result<ExitCode, Failure> {
    match &args.verb {
        GenVerb::Chain(args) => chain(args),
        GenVerb::Fleet(args) => fleet(args),
    }
}

fn fleet(args: &GenFleetArgs) -> Result<ExitCode, Failure> {
    if has_entries(&args.dir)? {
        let what = "is not empty: choose a new directory";
        return Err(Failure::new(format!("{} {what}", args.dir.display())));
    }
    let spec = FleetSpec { dir: args.dir.clone(), chains: args.chains, seed: args.seed };
    let bar = progress_bar(args.chains, "chains");
    let fleet = generate_fleet(&spec, |done| bar.set_position(done))?;
    bar.finish_and_clear();
    match args.output.output {
        OutputFormat::Human => {
            let Fleet { chains, images, longest } = fleet;
            let text = format!("{chains} chains of {images} images; the longest has {longest}\n");
            print(&text)?;
        }
        OutputFormat::Json => print_json(&fleet)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn chain(args: &GenChainArgs) -> Result<ExitCode, Failure> {
    let mut spec = ChainSpec::new(&args.dir);
    spec.layers = args.layers;
    spec.disk_bytes = size_of("--size", &args.size)?;
    spec.cluster_bytes = size_of("--cluster-size", &args.cluster_size)?;
    spec.fill = args.fill;
    spec.distribution = args.distribution.parse()?;
    spec.features = args.features.parse::<Features>()?;
    spec.seed = args.seed;
    spec.data = if args.no_data { DataMode::Holes } else { DataMode::Written };
    if !args.force && has_entries(&args.dir)? {
        let what = "is not empty: choose a new directory, or --force overwrites layers there";
        return Err(Failure::new(format!("{} {what}", args.dir.display())));
    }
    let bar = progress_bar(args.layers.into(), "layers");
    let manifest = generate(&spec, |done| bar.set_position(done.into()))?;
    bar.finish_and_clear();
    match args.output.output {
        OutputFormat::Human => {
            let top = spec.dir.join(&manifest.top);
            print(&format!("{} layers; the active one is {}\n", args.layers, top.display()))?;
        }
        OutputFormat::Json => print_json(&manifest)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether there is anything in the directory `dir`.
fn has_entries(dir: &Path) -> Result<bool, Failure> {
    match fs::read_dir(dir) {
        Ok(mut entries) => Ok(entries.next().is_some()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Failure::from(error).within(dir.display())),
    }
}
