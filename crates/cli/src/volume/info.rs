//! `mica volume info`.

use super::keys::properties_text;
use super::session::{SessionArgs, described, state_text, time_text, volume};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use clap::Args;
use std::process::ExitCode;

/// Show what a volume is, and who has it open.
#[derive(Args)]
pub(super) struct InfoArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    url: String,
}

pub(super) fn run(args: &InfoArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume info")?;
    let session = args.session.start()?;
    let info = session.executor.block_on(async {
        let store = session.stores.open(&url.store).await?;
        store.volumes().info(&url.name).await
    })?;
    match args.output.output {
        OutputFormat::Json => print_json(&described(&url.store, &info))?,
        OutputFormat::Human => {
            let how = match &*properties_text(&info.properties) {
                "" => String::new(),
                how => format!("data: {how}\n"),
            };
            print(&format!(
                "volume: {url}\nvirtual size: {} ({} bytes)\n{how}state: {}\nwritten: {} (UTC)\n",
                human_size(info.state.len),
                info.state.len,
                state_text(&info),
                time_text(info.state.time_ns),
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
