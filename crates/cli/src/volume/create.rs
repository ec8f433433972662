//! `mica volume create`.

use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::images::size_of;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

/// Create a volume that reads as zeros.
///
/// An empty directory, bucket or pool becomes a store of volumes, once it has shown that it keeps
/// what volumes rely on: of several that put an object of one name, one is first.
#[derive(Args)]
pub(super) struct CreateArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume: file:///DIR/NAME, s3://BUCKET/PREFIX/NAME or rados://POOL/PREFIX/NAME.
    #[arg(value_name = "URL")]
    url: String,
    /// Length of the disk, up to 256T. Only what is written takes space.
    #[arg(value_name = "SIZE")]
    size: String,
}

pub(super) fn run(args: &CreateArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume create")?;
    let len = size_of("SIZE", &args.size)?;
    let session = args.session.start()?;
    session.executor.block_on(async {
        let store = session.stores.open_or_make(&url.store).await?;
        store.volumes().create(&url.name, len).await
    })?;
    let json = json!({
        "name": url.name.as_str(),
        "url": url.to_string(),
        "virtual-size": len,
    });
    args.report.print(&format!("{url}: {}, empty\n", human_size(len)), &json)?;
    Ok(ExitCode::SUCCESS)
}
