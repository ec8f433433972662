//! `mica volume log`: what is in the file of a log, and giving up what nobody needs.

use super::sections;
use super::session::SessionArgs;
use crate::failure::{Failure, tell};
use crate::output::{OutputArgs, OutputFormat, ReportArgs, human_size, print, print_json};
use crate::plain::plain;
use crate::table::table;
use clap::{Args, Subcommand};
use mica_block::Error;
use mica_stack::{StoreUrl, Stores};
use mica_volume::{DropLog, Id, LogSummary};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

/// Show the logs of this machine's volumes, and release those that nobody needs.
#[derive(Args)]
pub(super) struct LogArgs {
    #[command(subcommand)]
    verb: LogVerb,
}

#[derive(Subcommand)]
enum LogVerb {
    #[command(after_long_help = sections::LOG_LIST)]
    List(ListArgs),
    #[command(after_long_help = sections::LOG_DROP)]
    Drop(DropArgs),
}

/// List the volumes that have a log in a file, which no server may have open.
///
/// The file identifies them by ID; if stores are given, their names are shown too, and which of
/// them no longer exist.
#[derive(Args)]
struct ListArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The file, or the device.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Stores in which to look for the volumes.
    #[arg(value_name = "STORE")]
    stores: Vec<String>,
}

/// Release the log of a volume, so that others can use its space.
///
/// Refused if the log has writes that the volume's store may lack: either serve the volume with
/// this log once, or lose them with `--force`.
#[derive(Args)]
struct DropArgs {
    /// Lose the writes that the store may lack.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The file, or the device.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The ID of the volume, as `mica volume log list` shows it, or its first digits; or `damaged`,
    /// for the segments whose headers are damaged.
    #[arg(value_name = "VOLUME")]
    volume: String,
}

/// What stands for all segments whose headers are damaged.
const DAMAGED: &str = "damaged";

pub(super) fn run(args: &LogArgs) -> Result<ExitCode, Failure> {
    match &args.verb {
        LogVerb::List(args) => list(args),
        LogVerb::Drop(args) => drop_one(args),
    }
}

fn list(args: &ListArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let (all, damaged, names) = session.executor.block_on(async {
        let log = session.stores.existing_log(&args.file).await?;
        let names = names(&session.stores, &args.stores).await?;
        Ok::<_, Failure>((log.summaries().await?, log.damaged_segments(), names))
    })?;
    let file = args.file.display();
    for at in &damaged {
        tell(&format!("{file}: the header of the segment at {at} is damaged"));
    }
    match args.output.output {
        OutputFormat::Json => {
            let logs: Vec<_> = all.iter().map(|summary| described(summary, &names)).collect();
            print_json(&json!({ "logs": logs, "damaged-segments": damaged }))?;
        }
        OutputFormat::Human => {
            let head = ["VOLUME", "STORE", "NAME", "RECORDS", "LAST", "SIZE"];
            let rows = all.iter().map(|summary| row(summary, &names)).collect();
            print(&table(&head, &[3, 4, 5], rows))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn drop_one(args: &DropArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let how = if args.force { DropLog::Anyway } else { DropLog::IfStored };
    let text = session.executor.block_on(async {
        let log = session.stores.existing_log(&args.file).await?;
        if args.volume == DAMAGED {
            if !args.force && !log.damaged_segments().is_empty() {
                let what = "damaged segments may have writes that a volume lacks: --force discards \
                            them";
                return Err(Failure::new(what));
            }
            return Ok(format!("{} damaged segments discarded", log.drop_damaged().await?));
        }
        let all = log.summaries().await?;
        let found = one_of(&all, &args.volume)?;
        log.drop_log(found.found.volume, how).await?;
        Ok(format!("log of volume {} released", hex(&found.found.volume)))
    })?;
    let answer = json!({ "file": args.file.display().to_string(), "done": text });
    args.report.print(&format!("{}: {text}\n", args.file.display()), &answer)?;
    Ok(ExitCode::SUCCESS)
}

/// The log of the volume whose identity begins so.
fn one_of<'a>(all: &'a [LogSummary], wanted: &str) -> Result<&'a LogSummary, Failure> {
    if wanted.is_empty() {
        let what = "VOLUME is empty, which every ID begins with: `mica volume log list` shows them";
        return Err(Failure::new(what));
    }
    let is_it = |summary: &&LogSummary| {
        !summary.found.is_set_aside && hex(&summary.found.volume).starts_with(wanted)
    };
    let mut found = all.iter().filter(is_it);
    match (found.next(), found.next()) {
        (Some(one), None) => Ok(one),
        (None, _) => Err(Failure::new(format!("there is no log of a volume {wanted:?} here"))),
        (Some(_), Some(_)) => {
            Err(Failure::new(format!("the IDs of several volumes begin with {wanted:?}")))
        }
    }
}

/// The volumes of some stores, by their identities.
type Names = BTreeMap<Id, BTreeMap<Id, String>>;

async fn names(stores: &Stores, urls: &[String]) -> Result<Names, Error> {
    let mut all = Names::new();
    for url in urls {
        let store = stores.open(&StoreUrl::from_str(url)?).await?;
        let volumes = store.volumes();
        let of_store = all.entry(volumes.identity()).or_default();
        for info in volumes.list().await? {
            of_store.insert(info.volume, info.name.as_str().to_owned());
        }
    }
    Ok(all)
}

/// What a volume is called; `None` if its store is not known.
fn name_of<'a>(summary: &LogSummary, names: &'a Names) -> Option<Option<&'a str>> {
    let of_store = names.get(&summary.found.store)?;
    Some(of_store.get(&summary.found.volume).map(String::as_str))
}

fn described(summary: &LogSummary, names: &Names) -> Value {
    let LogSummary { found, records, live_bytes } = summary;
    let name = name_of(summary, names);
    json!({
        "volume": hex(&found.volume),
        "store": hex(&found.store),
        "name": name.flatten(),
        "gone": name.map(|name| name.is_none()),
        "set-aside": found.is_set_aside,
        "records": records.end - records.start,
        "last-record": records.end.checked_sub(1),
        "live-bytes": live_bytes,
    })
}

fn row(summary: &LogSummary, names: &Names) -> Vec<String> {
    let LogSummary { found, records, live_bytes } = summary;
    let name = match name_of(summary, names) {
        _ if found.is_set_aside => "(set aside)".to_owned(),
        None => "-".to_owned(),
        Some(None) => "(gone)".to_owned(),
        Some(Some(name)) => plain(name),
    };
    let last = records.end.checked_sub(1).map_or("-".to_owned(), |last| last.to_string());
    let count = (records.end - records.start).to_string();
    vec![hex(&found.volume), hex(&found.store), name, count, last, human_size(*live_bytes)]
}

fn hex(id: &Id) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}
