//! `mica volume delete`.

use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::ReportArgs;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

/// Delete a volume, with its snapshots.
///
/// Its clones stay as they are. `mica volume gc` frees the space.
#[derive(Args)]
pub(super) struct DeleteArgs {
    /// Delete it even if a host that may be alive has it open.
    ///
    /// That host can write no more, and notices it. Writes that it has not put into the store are
    /// lost.
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
}

pub(super) fn run(args: &DeleteArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume delete")?;
    let session = args.session.start()?;
    session.executor.block_on(async {
        let store = session.stores.open(&url.store).await?;
        store.delete(&url.name, args.force).await
    })?;
    let json = json!({ "deleted": url.to_string() });
    args.report.print(&format!("{url}: deleted\n"), &json)?;
    Ok(ExitCode::SUCCESS)
}
