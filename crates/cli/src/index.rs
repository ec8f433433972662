//! `mica index`: the sidecars of a chain.

use crate::args::{IndexVerb, OutputFormat, SubjectArgs};
use crate::failure::Failure;
use crate::output::{human_size, print, print_json, progress_bar};
use mica_qcow2::{Chain, IndexUse, SealState};
use serde_json::json;
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;

pub(crate) fn run(verb: &IndexVerb) -> Result<ExitCode, Failure> {
    match verb {
        IndexVerb::Build(args) => build(args),
        IndexVerb::Status(args) => status(args),
        IndexVerb::Drop(args) => drop_index(args),
    }
}

async fn open(args: &SubjectArgs, index: IndexUse) -> Result<Arc<Chain>, Failure> {
    let opened = args.images.open(&args.image, index).await?;
    opened.chain.ok_or_else(|| Failure::new("only a chain of qcow2 images has an index"))
}

fn build(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let chain = open(args, IndexUse::Read).await?;
        let frozen = chain.layer_count() - 1;
        let bar = progress_bar(frozen as u64, "layers");
        let built = chain
            .build_index(&mut |progress| {
                bar.set_position(progress.layer as u64);
                ControlFlow::Continue(())
            })
            .await?;
        bar.finish_and_clear();
        let indexed = chain.indexed_layers();
        match args.output.output {
            OutputFormat::Human => {
                print(&format!("{indexed} of {frozen} frozen layers indexed, {built} now\n"))?;
            }
            OutputFormat::Json => {
                print_json(&json!({ "frozen": frozen, "indexed": indexed, "built": built }))?;
            }
        }
        if indexed == frozen {
            return Ok(ExitCode::SUCCESS);
        }
        Err(Failure::new("a layer changed while it was indexed: build the index again"))
    })
}

fn status(args: &SubjectArgs) -> Result<ExitCode, Failure> {
    args.images.executor()?.block_on(async {
        let chain = open(args, IndexUse::Read).await?;
        let states = chain.seal_states().await;
        let total: u64 = states.iter().map(|(_, bytes)| bytes).sum();
        let layers: Vec<_> = chain
            .paths()
            .zip(&states)
            .map(|(path, (state, bytes))| (path.display().to_string(), state_name(*state), *bytes))
            .collect();
        match args.output.output {
            OutputFormat::Human => {
                let mut text = String::new();
                for (path, state, bytes) in &layers {
                    text += &format!("{state:<9} {:>10}  {path}\n", human_size(*bytes));
                }
                let (indexed, frozen) = (chain.indexed_layers(), layers.len());
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
                    "indexed": chain.indexed_layers(),
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
        let chain = open(args, IndexUse::Ignore).await?;
        chain.drop_index()?;
        let frozen = chain.layer_count() - 1;
        match args.output.output {
            OutputFormat::Human => {
                print(&format!("the sidecars of {frozen} frozen layers are gone\n"))?;
            }
            OutputFormat::Json => print_json(&json!({ "frozen": frozen }))?,
        }
        Ok(ExitCode::SUCCESS)
    })
}
