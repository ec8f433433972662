//! `mica volume receive`.

use super::keys::NewArgs;
use super::send::{named, of_file};
use super::session::{SessionArgs, volume};
use crate::ending::Ending;
use crate::failure::Failure;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use mica_stack::VolumeUrl;
use mica_volume::{ReceiveOptions, Received};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufReader, IsTerminal, Read};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;

/// Create snapshots from a stream that `mica volume send` wrote.
///
/// A whole snapshot makes a new volume. Changes since a snapshot go into a volume that has that
/// snapshot and was not written since; no host may have it open. What is there already is skipped,
/// so that a stream that was cut off or interrupted by a signal can be received again.
#[derive(Args)]
pub(super) struct ReceiveArgs {
    /// Lose what was written to the volume since the snapshot on which the stream is based.
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

/// Bytes that are read at once.
const BUFFER_BYTES: usize = 64 << 10;

pub(super) fn run(args: &ReceiveArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume receive")?;
    let mut received = Vec::new();
    let file = if args.file.as_os_str() == "-" {
        let stdin = std::io::stdin();
        if stdin.is_terminal() {
            let what = "standard input is a terminal: name a FILE, or pipe `mica volume send` in";
            return Err(Failure::new(what));
        }
        // Read without its buffer, in which nobody waits for a signal.
        stdin.as_fd().try_clone_to_owned().map(File::from)
    } else {
        File::open(&args.file)
    };
    let file = file.map_err(|error| of_file(&args.file, error))?;
    let ending = Ending::watch()?;
    let mut source = BufReader::with_capacity(BUFFER_BYTES, ending.reader(file));
    let outcome = receive(args, url, &mut source, &mut received);
    // What was received before a failure is there.
    let text: String = received.iter().map(|step| line(url, step)).collect();
    args.report.print(&text, &received.iter().map(described).collect::<Vec<_>>())?;
    ending.end_if_raised();
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
