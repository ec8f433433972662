//! `mica index`: the sidecars of a chain.

use crate::failure::Failure;
use crate::images::SubjectArgs;
use crate::output::{OutputFormat, human_size, print, print_json, progress_bar};
use clap::{Args, Subcommand};
use mica_block::{Manage, ManageIndex, SealState};
use mica_qcow2::IndexUse;
use serde_json::json;
use std::ops::ControlFlow;
use std::process::ExitCode;

#[derive(Args)]
pub(crate) struct IndexArgs {
    #[command(subcommand)]
    verb: IndexVerb,
}

#[derive(Subcommand)]
enum IndexVerb {
    /// Write sidecars for all frozen layers that have no valid one.
    Build(SubjectArgs),
    /// Show for each frozen layer whether its sidecar is valid.
    Status(SubjectArgs),
    /// Remove the sidecars of all frozen layers.
    Drop(SubjectArgs),
}

pub(crate) fn run(args: &IndexArgs) -> Result<ExitCode, Failure> {
    match &args.verb {
        IndexVerb::Build(args) => build(args),
        IndexVerb::Status(args) => status(args),
        IndexVerb::Drop(args) => drop_index(args),
    }
}

fn index_of(disk: &dyn Manage) -> Result<&dyn ManageIndex, Failure> {
    disk.index().ok_or_else(|| Failure::new("only a chain of qcow2 images has an index"))
}

fn build(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let disk = args.images.open(&args.image, IndexUse::Read).await?;
        let index = index_of(&*disk)?;
        let frozen = disk.layer_count() - 1;
        let bar = progress_bar(frozen as u64, "layers");
        let built = index
            .build(&mut |progress| {
                bar.set_position(progress.layer as u64);
                ControlFlow::Continue(())
            })
            .await?;
        bar.finish_and_clear();
        let indexed = index.covered_layers();
        let outcome = match indexed == frozen {
            true => Ok(ExitCode::SUCCESS),
            false => {
                let what = "a layer changed while it was being indexed: build the index again";
                Err(Failure::new(what))
            }
        };
        let printed = match args.output.output {
            OutputFormat::Human => {
                print(&format!("{indexed} of {frozen} frozen layers indexed, {built} now\n"))
            }
            OutputFormat::Json => {
                print_json(&json!({ "frozen": frozen, "indexed": indexed, "built": built }))
            }
        };
        outcome.and_then(|code| printed.map(|()| code))
    })
}

fn status(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let disk = args.images.open(&args.image, IndexUse::Read).await?;
        let index = index_of(&*disk)?;
        let states = index.seal_states().await;
        let total: u64 = states.iter().map(|(_, bytes)| bytes).sum();
        let layers: Vec<_> = disk
            .layer_paths()
            .iter()
            .zip(&states)
            .map(|(path, (state, bytes))| (path.display().to_string(), state_name(*state), *bytes))
            .collect();
        match args.output.output {
            OutputFormat::Human => {
                let mut text = String::new();
                for (path, state, bytes) in &layers {
                    text += &format!("{state:<9} {:>10}  {path}\n", human_size(*bytes));
                }
                let (indexed, frozen) = (index.covered_layers(), layers.len());
                let total = human_size(total);
                text += &format!("{indexed} of {frozen} frozen layers ready, {total} in all\n");
                print(&text)?;
            }
            OutputFormat::Json => {
                let layers: Vec<_> = layers
                    .iter()
                    .map(|(path, state, bytes)| {
                        json!({ "filename": path, "state": state, "bytes": bytes })
                    })
                    .collect();
                print_json(&json!({
                    "frozen": layers.len(),
                    "indexed": index.covered_layers(),
                    "bytes": total,
                    "layers": layers,
                }))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn state_name(state: SealState) -> &'static str {
    match state {
        SealState::Sealed => "sealed",
        SealState::Missing => "missing",
        SealState::Stale => "stale",
        SealState::Unproven => "unproven",
    }
}

fn drop_index(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let disk = args.images.open(&args.image, IndexUse::Ignore).await?;
        index_of(&*disk)?.remove()?;
        let frozen = disk.layer_count() - 1;
        match args.output.output {
            OutputFormat::Human => {
                print(&format!("removed the sidecars of {frozen} frozen layers\n"))?;
            }
            OutputFormat::Json => print_json(&json!({ "frozen": frozen }))?,
        }
        Ok(ExitCode::SUCCESS)
    })
}
