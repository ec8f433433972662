//! `mica volume rekey`.

use super::keys::KeyArgs;
use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::ReportArgs;
use clap::Args;
use mica_stack::read_volume_key;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Change the key of a volume that no host has open.
///
/// No block is rewritten: the key wraps the volume's secret, which does not change. Anyone who has
/// the old key and an old copy of the store can still read both; to prevent that, copy the volume
/// with `send` and `receive`. Clones keep their keys, and have the same secret.
#[derive(Args)]
pub(super) struct RekeyArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    #[command(flatten)]
    key: KeyArgs,
    /// The file with the new key of the volume.
    #[arg(long, value_name = "FILE")]
    new_volume_key: PathBuf,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
}

pub(super) fn run(args: &RekeyArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume rekey")?;
    let (old, new) = (args.key.read()?, read_volume_key(&args.new_volume_key)?);
    let session = args.session.start()?;
    let changed =
        session.change(url, async |volumes| volumes.with_key(old).rekey(&url.name, &new).await)?;
    let key = new.name().to_string();
    let text = match changed {
        true => format!("{url}: encrypted with key {key} from now on\n"),
        false => format!("{url}: encrypted with key {key} already\n"),
    };
    let report = json!({ "url": url.to_string(), "key": key, "changed": changed });
    args.report.print(&text, &report)?;
    Ok(ExitCode::SUCCESS)
}
