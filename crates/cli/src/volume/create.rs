//! `mica volume create`.

use super::keys::{NewArgs, add_properties, properties_text};
use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::images::size_of;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use mica_block::Error;
use mica_volume::check_len;
use serde_json::Map;
use std::process::ExitCode;

/// Create a volume that reads as zeros.
///
/// An empty directory, bucket or pool becomes a store of volumes, once it has been shown to provide
/// what volumes rely on: if several clients create an object of one name, exactly one succeeds.
#[derive(Args)]
pub(super) struct CreateArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    new: NewArgs,
    /// The volume: file:///DIR/NAME, s3://BUCKET/PREFIX/NAME or rados://POOL/PREFIX/NAME.
    #[arg(value_name = "URL")]
    url: String,
    /// Length of the disk, up to 256T. Only written data takes space.
    #[arg(value_name = "SIZE")]
    size: String,
}

pub(super) fn run(args: &CreateArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume create")?;
    let len = size_of("SIZE", &args.size)?;
    check_len(len)?;
    let key = args.new.read_key()?;
    let session = args.session.start()?;
    let properties = session.executor.block_on(async {
        let store = session.stores.open_or_make(&url.store).await?;
        let volumes = store.volumes().with_key(key);
        volumes.create_as(&url.name, len, args.new.new_volume()).await?;
        Ok::<_, Error>(volumes.info(&url.name).await?.properties)
    })?;
    let mut json = Map::new();
    json.insert("name".to_owned(), url.name.as_str().into());
    json.insert("url".to_owned(), url.to_string().into());
    json.insert("virtual-size".to_owned(), len.into());
    add_properties(&mut json, &properties);
    let how = properties_text(&properties);
    let how = if how.is_empty() { how } else { format!(", {how}") };
    args.report.print(&format!("{url}: {}, empty{how}\n", human_size(len)), &json)?;
    Ok(ExitCode::SUCCESS)
}
