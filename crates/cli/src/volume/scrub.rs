//! `mica volume scrub`, with the exit codes of `mica volume check`.

use super::check::{EXIT_DAMAGED, described, human};
use super::session::SessionArgs;
use crate::failure::{Failure, tell};
use crate::output::{OutputFormat, ReportArgs, print, print_json, progress_bar};
use clap::Args;
use mica_stack::StoreUrl;
use mica_volume::Speed;
use std::process::ExitCode;

/// Read every extent of a store whole, and say which volumes and snapshots have lost what.
#[derive(Args)]
pub(super) struct ScrubArgs {
    #[command(flatten)]
    report: ReportArgs,
    #[command(flatten)]
    session: SessionArgs,
    /// The store.
    #[arg(value_name = "STORE")]
    store: String,
}

pub(super) fn run(args: &ScrubArgs) -> Result<ExitCode, Failure> {
    let url: StoreUrl = args.store.parse()?;
    let session = args.session.start()?;
    let bar = progress_bar(0, "extents");
    let found = session.executor.block_on(async {
        let store = session.stores.open(&url).await?;
        let mut show = |at: mica_volume::Progress| {
            bar.set_length(at.of_extents);
            bar.set_position(at.extents);
        };
        store.volumes().scrub(Speed::default(), &mut show).await
    });
    bar.finish_and_clear();
    let (found, url) = (found?, url.to_string());
    found.damaged.iter().for_each(|line| tell(&format!("{url}: {line}")));
    match args.report.format() {
        None => {}
        Some(OutputFormat::Human) => print(&human(&url, &found))?,
        Some(OutputFormat::Json) => print_json(&described(&url, &found))?,
    }
    let is_damaged = found.damaged_count > 0;
    Ok(if is_damaged { ExitCode::from(EXIT_DAMAGED) } else { ExitCode::SUCCESS })
}
