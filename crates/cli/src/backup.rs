//! `mica backup`: a state of a disk, whole or as what changed, into a folder or a stream.

mod chain;
mod nbd;
mod prune;
mod subject;

use crate::calendar::utc;
use crate::convert::Progress;
use crate::failure::{Failure, tell};
use crate::images::ImageArgs;
use crate::output::{OutputFormat, ReportArgs, human_size, print, print_json};
use crate::sections;
use crate::table::table;
use clap::{Args, Subcommand};
use mica_backup::{
    Begin, Begun, Content, Folder, Packing, Pending, Source, StepWriter, Stored, Total,
    check_state, copy, verify_state,
};
use mica_rt::Executor;
use mica_serve::nbd::client::Uri;
use serde_json::{Value, json};
use std::io::{BufWriter, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use subject::Subject;

/// Write a state of a disk into a folder, or as a stream.
///
/// The source is an image that nobody writes, a state that `mica ctl backup begin` keeps, an
/// internal snapshot, or an export of an NBD server. With --since only what changed is read and
/// written; if the files of that state were changed since it was backed up, it is read too, and
/// compared, or refused if the source is an export. A state is either complete in the folder or not
/// there at all; if this is killed, the same command continues where it stopped, with --as if the
/// state was named after the time. Zeros take no space. `mica restore` restores states.
#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct BackupArgs {
    #[command(subcommand)]
    verb: Option<BackupVerb>,
    #[command(flatten)]
    write: WriteArgs,
}

#[derive(Subcommand)]
enum BackupVerb {
    /// List the states in a folder, oldest first.
    #[command(after_long_help = sections::BACKUP_LIST)]
    List {
        #[command(flatten)]
        report: ReportArgs,
        /// The folder.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
    },
    /// Read the states in a folder, and report what is damaged or missing.
    ///
    /// Down to the extent. Checks all states, or with @STATE that one and those that it is based
    /// on.
    #[command(after_long_help = sections::BACKUP_VERIFY)]
    Verify {
        /// Show progress on stderr.
        #[arg(short = 'p', long)]
        progress: bool,
        #[command(flatten)]
        report: ReportArgs,
        /// The folder, with @STATE for one state in it.
        #[arg(value_name = "DIR[@STATE]")]
        folder: PathBuf,
    },
    /// Remove old states from a folder.
    ///
    /// States that later ones depend on can be removed too: the later ones take over the data that
    /// they need, and are then based on the next older state that stays, or become whole states.
    /// The newest state always stays. What is left of backups that were killed before the newest
    /// state was written goes, too. If this is killed, nothing is lost, and the same command does
    /// the rest.
    #[command(after_long_help = sections::BACKUP_PRUNE)]
    Prune(prune::PruneArgs),
}

// What is written. (A doc comment would become the help of the verb.)
#[derive(Args)]
struct WriteArgs {
    /// Write only what changed since this state in the folder.
    #[arg(long, value_name = "STATE")]
    since: Option<String>,
    /// Write only what changed since the newest state.
    ///
    /// More precisely, the newest one that the disk still has; everything if there is none.
    #[arg(long, conflicts_with = "since")]
    since_last: bool,
    /// Name of the state.
    ///
    /// By default the one given as IMAGE@STATE or by the NBD server, or else the time.
    #[arg(long = "as", value_name = "STATE")]
    state: Option<String>,
    /// Compress with zstd.
    #[arg(short = 'c', long)]
    compress: bool,
    /// Show progress on stderr.
    ///
    /// As `mica convert` does.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    images: ImageArgs,
    /// An image, one of its states or snapshots, or a URI.
    ///
    /// IMAGE@NAME is a state of an image, or a snapshot by ID or name (snapshot.id=ID and
    /// snapshot.name=NAME say which of the two it is); the URI is that of an NBD export.
    #[arg(value_name = "IMAGE[@STATE]|URI", required = true)]
    source: Option<String>,
    /// The folder, created if missing; - for stdout.
    #[arg(value_name = "DIR", required = true)]
    target: Option<PathBuf>,
}

/// Bytes of a stream that are written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// A state that is to be copied, with what is known of it.
struct Opened {
    source: Box<dyn Source>,
    begin: Begin,
    /// Of which content it is; `None` if it may be another the next time.
    content: Option<Content>,
    /// Why all of it is copied, if what changed was wanted and that is not because the disk keeps
    /// no state that is in the folder.
    why_whole: Option<String>,
}

pub(crate) fn run(args: &BackupArgs) -> Result<ExitCode, Failure> {
    match &args.verb {
        Some(BackupVerb::List { report, folder }) => list(folder, report),
        Some(BackupVerb::Prune(args)) => prune::run(args),
        Some(BackupVerb::Verify { progress, report, folder }) => verify(folder, *progress, report),
        None => write(&args.write),
    }
}

fn write(args: &WriteArgs) -> Result<ExitCode, Failure> {
    let (Some(source), Some(target)) = (&args.source, &args.target) else {
        return Err(Failure::new("name a disk and a folder"));
    };
    for state in args.since.iter().chain(&args.state) {
        check_state(state)?;
    }
    let executor = args.images.executor()?;
    if target.as_os_str() == "-" {
        return write_stream(args, source, &executor);
    }
    let was_there = target.exists();
    let folder = Folder::make(target)?;
    let opened = executor.block_on(open(args, source, Some(&folder))).inspect_err(|_| {
        if !was_there {
            // It is empty: else it stays.
            let _ = std::fs::remove_dir(target);
        }
    })?;
    let pending = match folder.begin(opened.begin.clone(), opened.content.as_ref())? {
        Begun::Whole(stored) => {
            report_on(args, stored.begin(), stored.total(), Outcome::WasThere)?;
            return Ok(ExitCode::SUCCESS);
        }
        Begun::Pending(pending) => *pending,
    };
    let resumed = pending.resumed_bytes();
    let stored = fill(args, &executor, opened, pending)?;
    let outcome = Outcome::Written { file_bytes: stored.file_bytes(), resumed };
    report_on(args, stored.begin(), stored.total(), outcome)?;
    Ok(ExitCode::SUCCESS)
}

fn fill(
    args: &WriteArgs,
    executor: &Executor,
    mut opened: Opened,
    mut pending: Pending,
) -> Result<Stored, Failure> {
    let progress = Progress::start(opened.begin.len, args.report.progress(args.progress));
    progress.at(pending.resumed_to());
    let at = |position: u64, bytes: u64| {
        progress.at(position);
        progress.wrote(bytes);
    };
    let copied = copy(&mut *opened.source, args.packing(), &mut pending.writer, at);
    executor.block_on(copied)?;
    let stored = pending.complete()?;
    progress.finish();
    Ok(stored)
}

fn write_stream(args: &WriteArgs, source: &str, executor: &Executor) -> Result<ExitCode, Failure> {
    let stdout = std::io::stdout();
    if stdout.is_terminal() {
        let what = "the stream is not text: name a DIR, or pipe it into a file or `mica restore`";
        return Err(Failure::new(what));
    }
    if args.report.is_json() {
        let what = "standard output is the stream: leave out --output json, or name a DIR";
        return Err(Failure::new(what));
    }
    if args.since_last {
        let what = "--since-last: a stream has no older states: name one with --since";
        return Err(Failure::new(what));
    }
    let mut opened = executor.block_on(open(args, source, None))?;
    let progress = Progress::start(opened.begin.len, args.report.progress(args.progress));
    let at = |position: u64, bytes: u64| {
        progress.at(position);
        progress.wrote(bytes);
    };
    let out = BufWriter::with_capacity(BUFFER_BYTES, stdout.lock());
    let written = executor.block_on(async {
        let mut writer = StepWriter::new(out, opened.begin)?;
        copy(&mut *opened.source, args.packing(), &mut writer, at).await?;
        writer.finish()
    });
    match written {
        Ok(_) => {
            progress.finish();
            Ok(ExitCode::SUCCESS)
        }
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()) => {
            Err(Failure::of_stdout(std::io::ErrorKind::BrokenPipe.into()))
        }
        Err(error) => Err(error.into()),
    }
}

async fn open(args: &WriteArgs, named: &str, folder: Option<&Folder>) -> Result<Opened, Failure> {
    // The newest first.
    let known: Vec<String> = match folder.filter(|_| args.since_last) {
        None => Vec::new(),
        Some(folder) => {
            let states = folder.states()?;
            let names = states.whole.iter().rev().map(|stored| stored.begin().state.clone());
            names.collect()
        }
    };
    let wanted = Since { named: args.since.as_deref(), newest_of: &known, folder };
    let opened = match Uri::is_meant(named) {
        true => nbd::open(args, named, wanted)?,
        false => chain::open(args, Subject::new(named, args.images.clone())?, wanted).await?,
    };
    if args.since_last && opened.begin.base.is_none() && !known.is_empty() {
        let none = || "the disk no longer keeps any of the states in the folder".to_owned();
        let why = opened.why_whole.clone().unwrap_or_else(none);
        tell(&format!("mica: warning: {why}: making a full backup"));
    }
    Ok(opened)
}

/// What a state is to go on from.
#[derive(Clone, Copy)]
struct Since<'a> {
    named: Option<&'a str>,
    /// Or else the first of these that there is.
    newest_of: &'a [String],
    /// Where it is.
    folder: Option<&'a Folder>,
}

/// Whether a state that a disk keeps is the one of its name in a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum InFolder {
    Yes,
    /// It is another one.
    Another,
    /// It was, before another program changed it.
    Changed,
}

impl InFolder {
    /// What is wrong with the state `base` of the `disk`.
    fn why(self, base: &str, disk: &str) -> String {
        match self {
            Self::Yes | Self::Another => {
                format!("the state {base:?} in the folder is not that of {disk:?}")
            }
            Self::Changed => format!(
                "another program has changed the state {base:?} of {disk:?} since it was backed up"
            ),
        }
    }

    fn refusal(self, base: &str, disk: &str) -> Failure {
        let why = self.why(base, disk);
        Failure::new(format!("{why}: make a full backup into another folder"))
    }
}

impl WriteArgs {
    fn packing(&self) -> Packing {
        if self.compress { Packing::Zstd } else { Packing::Plain }
    }

    /// The name of the state, if the source does not say one. A file of this name may be in the
    /// folder already; then that is said.
    fn state(&self, of_source: Option<String>) -> String {
        let time = || utc(now_ns() / 1_000_000_000).replace(' ', "T") + "Z";
        self.state.clone().or(of_source).unwrap_or_else(time)
    }
}

/// The time, in nanoseconds since 1970.
fn now_ns() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// What became of a state.
enum Outcome {
    WasThere,
    Written { file_bytes: u64, resumed: u64 },
}

fn report_on(
    args: &WriteArgs,
    begin: &Begin,
    total: Total,
    outcome: Outcome,
) -> Result<(), Failure> {
    let Begin { disk, state, base, .. } = begin;
    let what = match base {
        Some(base) => format!("what changed since {base}"),
        None => "whole".to_owned(),
    };
    let data = human_size(total.data_bytes);
    let (how, file_bytes, resumed) = match outcome {
        Outcome::WasThere => ("is there already".to_owned(), None, 0),
        Outcome::Written { file_bytes, resumed } => {
            let gone_on = match resumed {
                0 => String::new(),
                _ => format!(", {} of them by an earlier try", human_size(resumed)),
            };
            let taken = human_size(file_bytes);
            (format!("{what}, {data} of data in {taken}{gone_on}"), Some(file_bytes), resumed)
        }
    };
    let answer = json!({
        "disk": disk,
        "state": state,
        "since": base,
        "virtual-size": begin.len,
        "data-bytes": total.data_bytes,
        "file-bytes": file_bytes,
        "resumed-bytes": resumed,
        "was-there": file_bytes.is_none(),
    });
    args.report.print(&format!("{disk}@{state}: {how}\n"), &answer)
}

fn list(folder: &Path, report: &ReportArgs) -> Result<ExitCode, Failure> {
    let states = Folder::open(folder)?.states()?;
    let rows = states.whole.iter().map(|stored| {
        let (begin, total) = (stored.begin(), stored.total());
        vec![
            begin.state.clone(),
            begin.base.clone().unwrap_or_else(|| "-".to_owned()),
            utc(begin.time_ns / 1_000_000_000),
            human_size(begin.len),
            human_size(total.data_bytes),
            human_size(stored.file_bytes()),
        ]
    });
    let head = ["STATE", "SINCE", "TIME", "LENGTH", "DATA", "TAKES"];
    let text = table(&head, &[3, 4, 5], rows.collect());
    let described: Vec<Value> = states.whole.iter().map(described).collect();
    report.print(&text, &described)?;
    for error in &states.damaged {
        Failure::from(error.clone()).report();
    }
    Ok(if states.damaged.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn described(stored: &Stored) -> Value {
    let (begin, total) = (stored.begin(), stored.total());
    json!({
        "disk": begin.disk,
        "state": begin.state,
        "since": begin.base,
        "time-ns": begin.time_ns,
        "virtual-size": begin.len,
        "data-bytes": total.data_bytes,
        "file-bytes": stored.file_bytes(),
    })
}

/// The folder and the state in it that `named` means.
pub(crate) fn folder_and_state(named: &Path) -> Result<(Folder, Option<String>), Failure> {
    let text = named.to_string_lossy();
    Ok(match text.rsplit_once('@') {
        Some((folder, state)) if !named.exists() && !folder.is_empty() => {
            (Folder::open(Path::new(folder))?, Some(state.to_owned()))
        }
        _ => (Folder::open(named)?, None),
    })
}

fn verify(named: &Path, progress: bool, report: &ReportArgs) -> Result<ExitCode, Failure> {
    let (folder, state) = folder_and_state(named)?;
    let mut errors = Vec::new();
    let states = match state {
        Some(state) => folder.line(&state)?,
        None => {
            let states = folder.states()?;
            errors.extend(states.damaged.into_iter().map(|error| (None, error)));
            // What they go on from is there.
            let lines = states.whole.iter().filter_map(|stored| {
                folder.line(&stored.begin().state).err().map(|error| (None, error))
            });
            errors.extend(lines);
            states.whole
        }
    };
    if states.is_empty() && errors.is_empty() {
        return Err(Failure::new(format!("{} contains no backup", named.display())));
    }
    let total: u64 = states.iter().map(|stored| stored.total().data_bytes).sum();
    let progress = Progress::start(total, report.progress(progress));
    let mut read = 0;
    for stored in &states {
        let damage = verify_state(stored, |_| {});
        let of_state = damage.into_iter().map(|damage| (damage.extent, damage.error));
        errors.extend(of_state);
        read += stored.total().data_bytes;
        progress.at(read);
    }
    progress.finish();
    let is_whole = errors.is_empty();
    if report.is_json() {
        let damage = errors.iter().map(|(extent, error)| {
            json!({
                "start": extent.map(|extent| extent.start()),
                "length": extent.map(|extent| extent.len()),
                "error": error.in_one_line(),
            })
        });
        let states = states.iter().map(|stored| stored.begin().state.clone());
        let (states, damage) = (states.collect::<Vec<_>>(), damage.collect::<Vec<_>>());
        print_json(&json!({ "states": states, "damage": damage }))?;
    } else if is_whole && report.format() == Some(OutputFormat::Human) {
        let (count, total) = (states.len(), human_size(total));
        let noun = if count == 1 { "state is" } else { "states are" };
        print(&format!("{}: {count} {noun} whole, {total} of data\n", named.display()))?;
    }
    errors.into_iter().for_each(|(_, error)| {
        Failure::from(error).report();
    });
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
