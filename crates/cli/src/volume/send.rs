//! `mica volume send`.

use super::keys::KeyArgs;
use super::session::{SessionArgs, volume};
use crate::convert::Progress;
use crate::failure::Failure;
use crate::output::{ReportArgs, human_size};
use crate::unfinished::{Unfinished, wait_if_ending};
use clap::Args;
use mica_block::{Error, ErrorKind};
use mica_stack::VolumeUrl;
use mica_volume::Sent;
use serde_json::{Value, json};
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Write a snapshot as a stream, for `mica volume receive`.
///
/// The whole snapshot, or what changed since an older one of the volume, without reading the rest.
/// The volume may be served meanwhile. The stream is not encrypted, even if the volume is.
#[derive(Args)]
pub(super) struct SendArgs {
    /// The older snapshot, which the receiver has: its label or number.
    #[arg(long, value_name = "LABEL")]
    since: Option<String>,
    /// Also send each earlier snapshot, or each one between the two.
    #[arg(long)]
    each: bool,
    /// Show progress on stderr.
    ///
    /// As `mica convert` does.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    key: KeyArgs,
    /// The snapshot.
    #[arg(value_name = "URL@LABEL")]
    url: String,
    /// The file to create; - for standard output.
    #[arg(value_name = "FILE", default_value = "-", hide_default_value = true)]
    file: PathBuf,
}

/// Bytes that are written at once, at least.
const BUFFER_BYTES: usize = 1 << 20;

pub(super) fn run(args: &SendArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    url.needed_snapshot("volume send")?;
    if args.file.as_os_str() != "-" {
        // A part of a stream is of no use.
        if args.file.symlink_metadata().is_ok() {
            return Err(exists(&args.file));
        }
        let (part, file) = Unfinished::create_beside(&args.file)?;
        let sent = send(args, &url, &file).inspect_err(|_| wait_if_ending())?;
        file.sync_all().map_err(|error| of_file(&args.file, error))?;
        part.finish(&args.file, None).map_err(|failure| match args.file.symlink_metadata() {
            Ok(_) => exists(&args.file),
            Err(_) => failure.within(args.file.display().to_string()),
        })?;
        let text: String = sent.iter().map(|sent| line(&url, sent)).collect();
        args.report.print(&text, &sent.iter().map(described).collect::<Vec<_>>())?;
        return Ok(ExitCode::SUCCESS);
    }
    let stdout = std::io::stdout();
    if stdout.is_terminal() {
        let what = "the stream is not text: name a FILE, or pipe it into `mica volume receive`";
        return Err(Failure::new(what));
    }
    if args.report.is_json() {
        let what = "standard output is the stream: leave out --output json, or name a FILE";
        return Err(Failure::new(what));
    }
    send(args, &url, stdout.lock())?;
    Ok(ExitCode::SUCCESS)
}

fn send(args: &SendArgs, url: &VolumeUrl, out: impl Write) -> Result<Vec<Sent>, Failure> {
    let key = args.key.read()?;
    let session = args.session.start()?;
    let which = url.needed_snapshot("volume send")?;
    let since = args.since.as_deref().map(str::parse).transpose()?;
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    let mut failed: Option<std::io::Error> = None;
    let sent = session.executor.block_on(async {
        let store = session.stores.open(&url.store).await?;
        let len = store.volumes().info(&url.name).await?.state.len;
        let progress = Progress::start(len, args.report.progress(args.progress));
        let write = |bytes: &[u8]| {
            progress.wrote(bytes.len() as u64);
            out.write_all(bytes).map_err(|error| {
                let what = Error::from_io("writing the stream", error.kind().into());
                failed = Some(error);
                what
            })
        };
        let how = (since.as_ref(), args.each);
        let volumes = store.volumes().with_key(key);
        let sent = volumes.send(&url.name, &which, how, write, |at| progress.at(at)).await?;
        progress.finish();
        Ok::<_, Error>(sent)
    });
    let flushed = out.flush();
    match (sent, failed.or(flushed.err())) {
        (_, Some(error)) if args.file.as_os_str() == "-" => Err(Failure::of_stdout(error)),
        (_, Some(error)) => Err(of_file(&args.file, error)),
        (sent, None) => sent.map_err(|error| of_damage(error, url)),
    }
}

/// Why a snapshot cannot be read: of damage, which one it is, and what names all that is lost.
fn of_damage(error: Error, url: &VolumeUrl) -> Failure {
    let is_damage = error.kind() == ErrorKind::Corrupt;
    let failure = Failure::from(error);
    if !is_damage {
        return failure;
    }
    let (message, store, name) = (failure.message(), &url.store, url.name.as_str());
    let check = format!("mica volume check {store}/{name} says what is lost");
    Failure::new(format!("{url} is damaged: {message}; {check}"))
}

fn exists(path: &Path) -> Failure {
    Failure::new(format!("{} exists already: name another file", path.display()))
}

/// Why `path` cannot be used.
pub(super) fn of_file(path: &Path, error: std::io::Error) -> Failure {
    Failure::from(error).within(path.display().to_string())
}

fn line(url: &VolumeUrl, sent: &Sent) -> String {
    let (label, size) = (named(&sent.snapshot), human_size(sent.data_bytes));
    let since = match sent.base {
        Some(base) => format!("what changed since number {base}"),
        None => "whole".to_owned(),
    };
    format!("{}@{label}: {since}, {size} of data\n", url.name.as_str())
}

/// The label of a snapshot, or its number if it has none.
pub(super) fn named(snapshot: &mica_volume::SnapshotInfo) -> String {
    match &*snapshot.label {
        "" => snapshot.number.to_string(),
        label => label.to_owned(),
    }
}

fn described(sent: &Sent) -> Value {
    json!({
        "label": sent.snapshot.label,
        "sequence": sent.snapshot.number,
        "since": sent.base,
        "data-bytes": sent.data_bytes,
    })
}
