//! `mica volume list`.

use super::keys::properties_text;
use super::session::{SessionArgs, described, state_text, store, time_text};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use crate::table::table;
use clap::Args;
use std::process::ExitCode;

/// List the volumes of a store.
///
/// Of one that is open somewhere, what its host has said of it last.
#[derive(Args)]
pub(super) struct ListArgs {
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The store: file:///DIR, s3://BUCKET/PREFIX or rados://POOL/PREFIX.
    #[arg(value_name = "STORE")]
    store: String,
}

pub(super) fn run(args: &ListArgs) -> Result<ExitCode, Failure> {
    let url = store(&args.store)?;
    let session = args.session.start()?;
    let all = session.executor.block_on(async {
        let store = session.stores.open(&url).await?;
        store.volumes().list().await
    })?;
    match args.output.output {
        OutputFormat::Json => {
            print_json(&all.iter().map(|info| described(&url, info)).collect::<Vec<_>>())?;
        }
        OutputFormat::Human => {
            let rows = all.iter().map(|info| {
                let name = info.name.as_str().to_owned();
                let size = human_size(info.state.len);
                let data = match properties_text(&info.properties) {
                    none if none.is_empty() => "-".to_owned(),
                    how => how,
                };
                vec![name, size, state_text(info), time_text(info.state.time_ns), data]
            });
            let titles = ["VOLUME", "SIZE", "STATE", "WRITTEN (UTC)", "DATA"];
            print(&table(&titles, &[1], rows.collect()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
