//! `mica volume handover`.

use super::session::{SessionArgs, volume};
use crate::failure::Failure;
use crate::output::ReportArgs;
use clap::Args;
use serde_json::json;
use std::process::ExitCode;

/// Hand a volume that no host has open over to another host.
///
/// No other host can open it then, except by force, and nobody can change it before it is served
/// there. `mica ctl handover` does this for a volume that is served. Until it is served there,
/// `--cancel` takes it back, on the host that handed it over.
#[derive(Args)]
pub(super) struct HandoverArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// Take the volume back that this host handed over, if the other has not opened it.
    #[arg(long, conflicts_with = "host")]
    cancel: bool,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
    /// The name of the host, as `uname -n` prints it there.
    #[arg(value_name = "HOST", required_unless_present = "cancel")]
    host: Option<String>,
}

pub(super) fn run(args: &HandoverArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume handover")?;
    let session = args.session.start()?;
    let text = match &args.host {
        Some(host) => {
            session.change(url, async |volumes| volumes.hand_over(&url.name, host).await)?;
            format!("{url}: handed over to {host}\n")
        }
        None => {
            session.change(url, async |volumes| volumes.take_back(&url.name).await)?;
            format!("{url}: taken back\n")
        }
    };
    args.report.print(&text, &json!({ "url": url.to_string(), "handed-to": args.host }))?;
    Ok(ExitCode::SUCCESS)
}
