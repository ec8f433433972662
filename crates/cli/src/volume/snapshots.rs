//! `mica volume snapshots`, `snapshot`, `drop`, `label` and `rollback`: what is done with the
//! snapshots of one volume.

use super::keys::{add_properties, properties_text};
use super::rows::{SnapshotRow, snapshot_json, snapshot_table};
use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, ReportArgs, print, print_json};
use clap::Args;
use mica_block::{Error, ErrorKind};
use mica_stack::VolumeUrl;
use serde_json::json;
use std::process::ExitCode;

/// List the snapshots of a volume.
///
/// If a host has the volume open, includes those that it has taken since.
#[derive(Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
}

/// Take a snapshot of a volume that no host has open.
///
/// `mica ctl snapshot` takes one of a volume that is served.
#[derive(Args)]
pub(super) struct TakeArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
    /// Its label, which no other snapshot of the volume may have.
    #[arg(value_name = "LABEL")]
    label: String,
}

/// Drop a snapshot of a volume that no host has open.
///
/// `mica volume gc` frees the space that only it used. Its clones stay as they are.
#[derive(Args)]
pub(super) struct DropArgs {
    #[command(flatten)]
    one: OneArgs,
}

/// Relabel a snapshot.
#[derive(Args)]
pub(super) struct LabelArgs {
    #[command(flatten)]
    one: OneArgs,
    /// The new label.
    #[arg(value_name = "LABEL")]
    label: String,
}

/// Roll a volume back to one of its snapshots.
///
/// No host may have it open. Anything written since is lost, unless another snapshot has it; all
/// snapshots stay, later ones too.
#[derive(Args)]
pub(super) struct RollbackArgs {
    #[command(flatten)]
    one: OneArgs,
}

// What names one snapshot. (A doc comment would become the help of the verb.)
#[derive(Args)]
struct OneArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The snapshot.
    #[arg(value_name = "URL@LABEL")]
    url: String,
}

pub(super) fn list(args: &ListArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume snapshots")?;
    let session = args.session.start()?;
    let (all, properties) = session.executor.block_on(async {
        let store = session.stores.open(&url.store).await?;
        let all = store.volumes().snapshots(&url.name).await?;
        Ok::<_, Error>((all, store.volumes().info(&url.name).await?.properties))
    })?;
    let all: Vec<_> = all.into_iter().map(SnapshotRow::from).collect();
    match args.output.output {
        OutputFormat::Json => {
            let json = |row| {
                let mut json = snapshot_json(row);
                json.as_object_mut().into_iter().for_each(|all| add_properties(all, &properties));
                json
            };
            print_json(&all.iter().map(json).collect::<Vec<_>>())?;
        }
        OutputFormat::Human => {
            let how = match &*properties_text(&properties) {
                "" => String::new(),
                how => format!("data: {how}\n"),
            };
            print(&(snapshot_table(&all) + &how))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn take(args: &TakeArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume snapshot")?;
    let session = args.session.start()?;
    let taken =
        session.change(url, async |volumes| volumes.take_snapshot(&url.name, &args.label).await);
    let taken = taken.map_err(|error| where_it_is_served(error, url, "snapshot", &args.label))?;
    let text = match &*taken.label {
        "" => format!("{url}@{}: taken\n", taken.number),
        label => format!("{url}@{label}: taken\n"),
    };
    args.report.print(&text, &snapshot_json(&taken.into()))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn drop_one(args: &DropArgs) -> Result<ExitCode, Failure> {
    let DropArgs { one: OneArgs { report: how, session, url } } = args;
    let url = volume(url)?;
    let which = url.needed_snapshot("volume drop")?;
    let session = session.start()?;
    let dropped =
        session.change(&url, async |volumes| volumes.drop_snapshot(&url.name, &which).await);
    dropped.map_err(|error| where_it_is_served(error, &url, "drop", &which_text(&url)))?;
    how.print(&format!("{url}: dropped\n"), &json!({ "dropped": url.to_string() }))?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn label(args: &LabelArgs) -> Result<ExitCode, Failure> {
    let LabelArgs { one: OneArgs { report: how, session, url }, label } = args;
    let url = volume(url)?;
    let which = url.needed_snapshot("volume label")?;
    let session = session.start()?;
    let labelled = session
        .change(&url, async |volumes| volumes.label_snapshot(&url.name, &which, label).await);
    let what = format!("{} {label}", which_text(&url));
    labelled.map_err(|error| where_it_is_served(error, &url, "label", &what))?;
    let now = VolumeUrl { snapshot: Some(label.clone()), ..url.clone() };
    let answer = json!({ "before": url.to_string(), "now": now.to_string() });
    how.print(&format!("{url} is now {now}\n"), &answer)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) fn rollback(args: &RollbackArgs) -> Result<ExitCode, Failure> {
    let RollbackArgs { one: OneArgs { report: how, session, url } } = args;
    let url = volume(url)?;
    let which = url.needed_snapshot("volume rollback")?;
    let session = session.start()?;
    let rolled = session.change(&url, async |volumes| volumes.rollback(&url.name, &which).await);
    rolled.map_err(|error| where_it_is_drained(error, &url))?;
    let text = format!("{}: rolled back to {}\n", url.name.as_str(), which_text(&url));
    how.print(&text, &json!({ "rolled-back-to": url.to_string() }))?;
    Ok(ExitCode::SUCCESS)
}

/// Why a volume cannot be changed that is open: its server can do it.
fn where_it_is_served(error: Error, url: &VolumeUrl, verb: &str, what: &str) -> Failure {
    let is_denied = error.kind() == ErrorKind::Denied;
    let failure = Failure::from(error);
    if !is_denied {
        return failure;
    }
    let message = failure.message();
    let name = url.name.as_str();
    Failure::new(format!("{message}; where it is served: mica ctl {verb} {name} {what}"))
}

/// Why a volume cannot be rolled back that is open: a guest would go on with what it has read.
fn where_it_is_drained(error: Error, url: &VolumeUrl) -> Failure {
    let is_denied = error.kind() == ErrorKind::Denied;
    let failure = Failure::from(error);
    if !is_denied {
        return failure;
    }
    let (message, name, label) = (failure.message(), url.name.as_str(), which_text(url));
    Failure::new(format!(
        "{message}; where it is served: mica ctl drain {name}, mica ctl rollback {name}@{label}, and \
         mica ctl undrain {name}"
    ))
}

fn which_text(url: &VolumeUrl) -> String {
    url.snapshot.clone().unwrap_or_default()
}
