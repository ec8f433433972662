//! `mica volume gc`.

use super::session::SessionArgs;
use crate::failure::{Failure, tell};
use crate::output::{OutputFormat, ReportArgs, human_size, print, print_json, progress_bar};
use clap::Args;
use mica_block::ErrorKind;
use mica_stack::StoreUrl;
use mica_volume::{CollectOptions, Collected, Step, Volumes};
use serde_json::json;
use std::process::ExitCode;

/// Delete what no volume, snapshot or clone of a store needs.
///
/// Sparse extents of volumes that nobody has open are written again. Whatever is done in the store
/// meanwhile goes on; it may be stopped at any time.
#[derive(Args)]
pub(super) struct GcArgs {
    /// Only say what would be freed.
    #[arg(short = 'n', long)]
    dry_run: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The store: file:///DIR, s3://BUCKET/PREFIX or rados://POOL/PREFIX.
    #[arg(value_name = "STORE")]
    store: String,
}

pub(super) fn run(args: &GcArgs) -> Result<ExitCode, Failure> {
    let url: StoreUrl = args.store.parse()?;
    let session = args.session.start()?;
    let bar = progress_bar(0, "extents");
    let collected = session.executor.block_on(async {
        let store = session.stores.open(&url).await?;
        let options = CollectOptions { dry_run: args.dry_run, ..CollectOptions::default() };
        let mut show = |at: mica_volume::Progress| {
            bar.set_length(at.of_extents.max(at.extents));
            bar.set_position(if at.step == Step::Free { at.of_extents } else { at.extents });
        };
        let mut collected = store.volumes().collect(options, &mut show).await?;
        if args.dry_run || !compact(store.volumes(), &collected).await? {
            return Ok::<_, Failure>(collected);
        }
        let again = store.volumes().collect(options, &mut show).await?;
        collected.freed_extents += again.freed_extents;
        collected.freed_bytes += again.freed_bytes;
        collected.punched_bytes += again.punched_bytes;
        collected.freed_heads += again.freed_heads;
        collected.freed_claims += again.freed_claims;
        collected.failed += again.failed;
        collected.failure = collected.failure.or(again.failure);
        Ok(collected)
    });
    bar.finish_and_clear();
    let collected = collected?;
    if let Some(error) = &collected.failure {
        tell(&format!("mica: {} objects stay: {}", collected.failed, error.in_one_line()));
    }
    match args.report.format() {
        None => {}
        Some(OutputFormat::Human) => print(&human(args, &collected))?,
        Some(OutputFormat::Json) => print_json(&json!({
            "dry-run": args.dry_run,
            "volumes": collected.volumes,
            "snapshots": collected.snapshots,
            "extents": collected.extents,
            "bytes": collected.bytes,
            "live-bytes": collected.live_bytes,
            "freed-extents": collected.freed_extents,
            "freed-bytes": collected.freed_bytes,
            "punched-bytes": collected.punched_bytes,
            "freed-heads": collected.freed_heads,
            "freed-claims": collected.freed_claims,
            "failed": collected.failed,
        }))?,
    }
    Ok(if collected.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes again what is in sparse extents of volumes that nobody has open; whether there was any.
async fn compact(volumes: &Volumes, collected: &Collected) -> Result<bool, Failure> {
    let mut is_any = false;
    for sparse in &collected.sparse {
        match volumes.compact(sparse).await {
            Ok(blocks) => is_any |= blocks > 0,
            // Its server has it, or it is gone.
            Err(error) if matches!(error.kind(), ErrorKind::Denied | ErrorKind::NotFound) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(is_any)
}

fn human(args: &GcArgs, collected: &Collected) -> String {
    let would = if args.dry_run { "would free" } else { "freed" };
    let freed = human_size(collected.freed_bytes + collected.punched_bytes);
    let (all, live) = (human_size(collected.bytes), human_size(collected.live_bytes));
    format!(
        "{would} {freed} in {} extents; {all} were there, {live} of them needed by {} volumes with \
         {} snapshots\n",
        collected.freed_extents, collected.volumes, collected.snapshots
    )
}
