//! `mica volume list`.

use super::keys::properties_text;
use super::session::{
    DAMAGED, NEWER, SessionArgs, described, described_unread, exit_code_of, state_text, store,
    time_text,
};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json};
use crate::table::table;
use clap::Args;
use mica_block::Error;
use mica_volume::VolumeName;
use std::process::ExitCode;

/// List the volumes of a store.
///
/// For a volume that a host has open, shows the state that it put into the store last. If the head
/// of a volume is damaged, the exit code is 2, as with `mica volume check`; if only a newer version
/// of mica can read one, it is 1. All others are listed.
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
    let listed = session.executor.block_on(async {
        let store = session.stores.open(&url).await?;
        store.volumes().list_with_damaged().await
    })?;
    match args.output.output {
        OutputFormat::Json => {
            let whole = listed.volumes.iter().map(|info| described(&url, info));
            let all: Vec<_> = whole.chain(described_unread(&url, &listed)).collect();
            print_json(&all)?;
        }
        OutputFormat::Human => {
            let rows = listed.volumes.iter().map(|info| {
                let name = info.name.as_str().to_owned();
                let size = human_size(info.state.len);
                let data = match properties_text(&info.properties) {
                    none if none.is_empty() => "-".to_owned(),
                    how => how,
                };
                vec![name, size, state_text(info), time_text(info.state.time_ns), data]
            });
            let unknown = || "-".to_owned();
            let unread = |state: &'static str| {
                move |(name, _): &(VolumeName, Error)| {
                    let (name, state) = (name.as_str().to_owned(), state.to_owned());
                    vec![name, unknown(), state, unknown(), unknown()]
                }
            };
            let rows = rows.chain(listed.damaged.iter().map(unread(DAMAGED)));
            let rows = rows.chain(listed.newer.iter().map(unread(NEWER)));
            let titles = ["VOLUME", "SIZE", "STATE", "WRITTEN (UTC)", "DATA"];
            print(&table(&titles, &[1], rows.collect()))?;
        }
    }
    Ok(exit_code_of(&listed))
}
