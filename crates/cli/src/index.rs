//! `mica index`: the sidecars of a chain.

use crate::failure::Failure;
use crate::images::SubjectArgs;
use crate::output::{OutputFormat, human_size, print, print_json, progress_bar};
use crate::sections;
use clap::{Args, Subcommand};
use mica_block::{Manage, ManageIndex, SealState};
use mica_qcow2::IndexUse;
use serde_json::json;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Args)]
pub(crate) struct IndexArgs {
    #[command(subcommand)]
    verb: IndexVerb,
}

#[derive(Subcommand)]
enum IndexVerb {
    /// Write sidecars for all frozen layers that have no valid one.
    ///
    /// Waits for a second if a layer has just been changed: until then its timestamps do not prove
    /// that it was not changed again.
    #[command(after_long_help = sections::INDEX_BUILD)]
    Build(SubjectArgs),
    /// Show for each frozen layer whether its sidecar is valid.
    ///
    /// sealed: the sidecar is used at once. unproven: it is used once the layer's tables have been
    /// read and their digest matches, because timestamps prove nothing (the layer was copied,
    /// moved, or changed within a second of being indexed); `mica index build` seals it again.
    /// stale: it describes another state of the layer, or of a layer below. missing: there is none.
    #[command(after_long_help = sections::INDEX_STATUS)]
    Status(SubjectArgs),
    /// Remove the sidecars of all frozen layers.
    #[command(after_long_help = sections::INDEX_DROP)]
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

/// Time after which a layer that was changed just before it was sealed can be sealed for good.
const SETTLES_AFTER: Duration = Duration::from_millis(1100);

fn build(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let mut outcome = build_once(args).await?;
        if outcome.unproven > 0 {
            // Those that changed within the last second: what was built is only sealed again.
            mica_rt::sleep(SETTLES_AFTER).await;
            let built = outcome.built;
            outcome = build_once(args).await?;
            outcome.built = built;
        }
        let Outcome { frozen, indexed, built, unproven } = outcome;
        match args.output.output {
            OutputFormat::Human => {
                let mut text =
                    format!("{indexed} of {frozen} frozen layers indexed, {built} now\n");
                if unproven > 0 {
                    text += &format!(
                        "the file system's timestamps do not prove {unproven} of them unchanged: \
                         their tables are read whenever the chain is opened\n"
                    );
                }
                print(&text)?;
            }
            OutputFormat::Json => print_json(&json!({
                "frozen": frozen,
                "indexed": indexed,
                "built": built,
                "unproven": unproven,
            }))?,
        }
        if indexed < frozen {
            let what = "a layer changed while it was being indexed: build the index again";
            return Err(Failure::new(what));
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// The result of building an index: counts of layers.
struct Outcome {
    frozen: usize,
    indexed: usize,
    built: usize,
    /// Indexed, but the next process has to read their tables before it uses that.
    unproven: usize,
}

async fn build_once(args: &SubjectArgs) -> Result<Outcome, Failure> {
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
    let states = index.seal_states().await;
    let unproven = states.iter().filter(|(state, _)| *state == SealState::Unproven).count();
    Ok(Outcome { frozen, indexed: index.covered_layers(), built, unproven })
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
        let (indexed, frozen) = (index.covered_layers(), layers.len());
        let usable = |state| matches!(state, SealState::Sealed | SealState::Unproven);
        let usable = states.iter().take_while(|(state, _)| usable(*state)).count();
        let after_reading = usable.saturating_sub(indexed);
        match args.output.output {
            OutputFormat::Human => {
                let mut text = String::new();
                for (path, state, bytes) in &layers {
                    text += &format!("{state:<9} {:>10}  {path}\n", human_size(*bytes));
                }
                text += &format!("{indexed} of {frozen} frozen layers ready");
                if after_reading > 0 {
                    text += &format!(", {after_reading} once their tables are read");
                }
                text += &format!(", {} in all\n", human_size(total));
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
                    "frozen": frozen,
                    "indexed": indexed,
                    "after-reading": after_reading,
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
