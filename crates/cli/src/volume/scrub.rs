//! `mica volume scrub`, with the exit codes of `mica volume check`.

use super::check::{described, human};
use super::session::{SessionArgs, Subject, exit_code_with, show_on, url_in};
use crate::failure::{Failure, tell};
use crate::output::{ReportArgs, progress_bar};
use clap::Args;
use mica_volume::Speed;
use std::process::ExitCode;

/// Read all extents of a store, and report which volumes and snapshots have lost what.
///
/// Includes extents that no volume needs any more. For a single volume it reads what `mica volume
/// check` reads.
#[derive(Args)]
pub(super) struct ScrubArgs {
    #[command(flatten)]
    pub(super) report: ReportArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    /// The store, or a volume.
    #[arg(value_name = "URL")]
    pub(super) url: String,
}

pub(super) fn run(args: &ScrubArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let bar = progress_bar(0, "extents");
    let found = session.executor.block_on(async {
        let mut show = show_on(&bar);
        match session.subject(&args.url, "volume scrub").await? {
            Subject::Store(store) => {
                let found = store.volumes().scrub(Speed::default(), &mut show).await?;
                Ok((store.url().to_string(), found))
            }
            Subject::Volume(store, name) => {
                let found = store.volumes().check(&name, &mut show).await?;
                Ok::<_, Failure>((url_in(store.url(), &name), found))
            }
        }
    });
    bar.finish_and_clear();
    let (url, found) = found?;
    found.damaged.iter().for_each(|line| tell(&format!("{url}: {line}")));
    args.report.print(&human(&url, &found), &described(&url, &found))?;
    Ok(exit_code_with(&found.newer, found.damaged_count))
}
