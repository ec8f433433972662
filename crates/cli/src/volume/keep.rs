//! `mica volume keep`.

use super::rows::{SnapshotRow, snapshot_json, snapshot_table};
use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::ReportArgs;
use clap::Args;
use mica_volume::Keep;
use serde_json::json;
use std::process::ExitCode;

/// Drop automatic snapshots that the rules do not keep.
///
/// No host may have the volume open. Automatic snapshots are those without a label. The newest of
/// them always stays. `mica volume gc` frees the space of those dropped.
#[derive(Args)]
pub(super) struct KeepArgs {
    /// Only show which would be dropped; the volume may be open.
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
    /// How densely to keep them for how long: 60s/10ms,1h/1s,1d/1h.
    #[arg(value_name = "RULES")]
    rules: Keep,
}

pub(super) fn run(args: &KeepArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume keep")?;
    let session = args.session.start()?;
    let dropped = if args.dry_run {
        session.executor.block_on(async {
            let store = session.stores.open(&url.store).await?;
            store.volumes().expired_snapshots(&url.name, &args.rules).await
        })
    } else {
        session.change(url, async |volumes| volumes.keep_snapshots(&url.name, &args.rules).await)
    };
    let dropped: Vec<_> = dropped?.into_iter().map(SnapshotRow::from).collect();
    let would = if args.dry_run { "would drop" } else { "dropped" };
    let text = match dropped.len() {
        0 => format!("{url}: nothing to drop\n"),
        1 => format!("{url}: {would} 1 snapshot\n{}", snapshot_table(&dropped)),
        count => format!("{url}: {would} {count} snapshots\n{}", snapshot_table(&dropped)),
    };
    let rows: Vec<_> = dropped.iter().map(snapshot_json).collect();
    let answer = json!({ "url": url.to_string(), "dry-run": args.dry_run, "dropped": rows });
    args.report.print(&text, &answer)?;
    Ok(ExitCode::SUCCESS)
}
