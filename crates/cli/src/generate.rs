//! `mica gen`: chains for tests and measurements.

use crate::args::{GenChainArgs, GenVerb, OutputFormat};
use crate::failure::Failure;
use crate::images::size_of;
use crate::output::{print, print_json, progress_bar};
use mica_gen::{ChainSpec, DataMode, Features, generate};
use std::process::ExitCode;

pub(crate) fn run(verb: &GenVerb) -> Result<ExitCode, Failure> {
    let GenVerb::Chain(args) = verb;
    chain(args)
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
