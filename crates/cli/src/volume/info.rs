//! `mica volume info`.

use super::keys::properties_text;
use super::session::{
    SessionArgs, described, instant, source_json, source_text, state_text, time_text, volume,
};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use clap::Args;
use mica_block::Error;
use serde_json::json;
use std::process::ExitCode;

/// Show what a volume is, and who has it open.
#[derive(Args)]
pub(super) struct InfoArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    /// The volume.
    #[arg(value_name = "URL")]
    pub(super) url: String,
}

pub(super) fn run(args: &InfoArgs) -> Result<ExitCode, Failure> {
    let url = volume(&args.url)?;
    let url = url.without_snapshot("volume info")?;
    let session = args.session.start()?;
    let (info, from, boot) = session.executor.block_on(async {
        let store = session.stores.open(&url.store).await?;
        let info = store.volumes().info(&url.name).await?;
        let from = store.volumes().cloned_from(&info).await;
        // Whatever is wrong with it, the volume is what it is.
        let boot = store.volumes().boot_record(&url.name).await.ok().flatten();
        Ok::<_, Error>((info, from, boot))
    })?;
    match args.output.output {
        OutputFormat::Json => {
            let mut described = described(&url.store, &info);
            let boot = boot.map(|boot| {
                json!({
                    "bytes": boot.bytes,
                    "ranges": boot.ranges,
                    "boots": boot.boots,
                    "time": instant(boot.time_ns),
                })
            });
            described.insert("cloned-from".to_owned(), source_json(from.as_ref()));
            described.insert("boot-record".to_owned(), json!(boot));
            print_json(&described)?;
        }
        OutputFormat::Human => {
            let how = match &*properties_text(&info.properties) {
                "" => String::new(),
                how => format!("data: {how}\n"),
            };
            let from =
                from.map_or(String::new(), |from| format!("cloned from: {}\n", source_text(&from)));
            let boot = boot.map_or(String::new(), |boot| {
                let (size, ranges) = (human_size(boot.bytes), boot.ranges);
                format!("boot record: {size} in {ranges} ranges\n")
            });
            print(&format!(
                "volume: {url}\nvirtual size: {} ({} bytes)\n{how}{from}state: {}\n\
                 written: {} (UTC)\n{boot}",
                human_size(info.state.len),
                info.state.len,
                state_text(&info),
                time_text(info.state.time_ns),
            ))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
