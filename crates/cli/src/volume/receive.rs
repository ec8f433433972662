//! `mica volume receive`.

use super::keys::NewArgs;
use super::send::{named, of_file};
use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use mica_stack::VolumeUrl;
use mica_volume::{ReceiveOptions, Received};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::process::ExitCode;

/// Make snapshots of a stream that `mica volume send` wrote.
///
/// A whole snapshot makes a new volume. What changed since a snapshot goes into a volume that has
/// that one and was not written since; nobody may have it open. What is there already is left
/// alone, so that a stream that was cut off can be received again.
#[derive(Args)]
pub(super) struct ReceiveArgs {
    /// Give up what was written to the volume since the snapshot that the stream goes on from.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    new: NewArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
    /// The file with the stream; - for standard input.
    #[arg(value_name = "FILE", default_value = "-", hide_default_value = true)]
    file: PathBuf,
}

pub(super) fn run(args: &ReceiveArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume receive")?;
    let mut received = Vec::new();
    let outcome = if args.file.as_os_str() == "-" {
        let mut stdin = std::io::stdin().lock();
        if stdin.is_terminal() {
            let what = "standard input is a terminal: name a FILE, or pipe `mica volume send` in";
            return Err(Failure::new(what));
        }
        receive(args, url, &mut stdin, &mut received)
    } else {
        let file = File::open(&args.file);
        let mut file = file.map_err(|error| of_file(&args.file, error))?;
        receive(args, url, &mut file, &mut received)
    };
    // What was received before a failure is there.
    let text: String = received.iter().map(|step| line(url, step)).collect();
    args.report.print(&text, &received.iter().map(described).collect::<Vec<_>>())?;
    outcome?;
    Ok(ExitCode::SUCCESS)
}

fn receive(
    args: &ReceiveArgs,
    url: &VolumeUrl,
    source: &mut dyn Read,
    received: &mut Vec<Received>,
) -> Result<(), Failure> {
    let key = args.new.read_key()?;
    let session = args.session.start()?;
    session.executor.block_on(async {
        let store = session.stores.open_or_make(&url.store).await?;
        let options = ReceiveOptions { force: args.force, new: args.new.new_volume() };
        let each = |step: &Received| received.push(step.clone());
        store.receive(&url.name, (options, key), source, each).await?;
        Ok(())
    })
}

fn line(url: &VolumeUrl, step: &Received) -> String {
    let (label, size) = (named(&step.snapshot), human_size(step.data_bytes));
    let what = if step.was_there { "was there already" } else { "received" };
    format!("{url}@{label}: {what}, {size} of data\n")
}

fn described(step: &Received) -> Value {
    json!({
        "label": step.snapshot.label,
        "sequence": step.snapshot.number,
        "was-there": step.was_there,
        "data-bytes": step.data_bytes,
    })
}
