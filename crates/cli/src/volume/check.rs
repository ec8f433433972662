//! `mica volume check`, with the exit codes of `mica check`.

use super::session::{SessionArgs, Subject, exit_code_with, show_on, url_in};
use crate::failure::{Failure, tell};
use crate::output::{ReportArgs, human_size, progress_bar};
use clap::Args;
use mica_block::ErrorKind;
use mica_volume::{BLOCK_BYTES, Findings};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Read all of a volume or a store, and report what is damaged.
///
/// Changes nothing. If a host has a volume open, the state that it put into the store last is
/// checked. Volumes that only a newer version of mica can read are named, and the exit code is 1 if
/// nothing else is wrong.
#[derive(Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    pub(super) report: ReportArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    /// The volume, or a store.
    #[arg(value_name = "URL")]
    pub(super) url: String,
}

pub(super) fn run(args: &CheckArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let (mut all, mut text, mut damaged) = (Vec::new(), String::new(), 0);
    let bar = progress_bar(0, "extents");
    let newer = session.executor.block_on(async {
        let (store, names, mut newer) = match session.subject(&args.url, "volume check").await? {
            Subject::Volume(store, name) => (store, vec![name], None),
            Subject::Store(store) => {
                let listed = store.volumes().list_with_damaged().await?;
                let whole = listed.volumes.into_iter().map(|info| info.name);
                let damaged = listed.damaged.into_iter().map(|(name, _)| name);
                let mut names: Vec<_> = whole.chain(damaged).collect();
                names.sort();
                (store, names, Some(listed.newer))
            }
        };
        for name in names {
            let found = match (store.volumes().check(&name, &mut show_on(&bar)).await, &mut newer) {
                (Ok(found), _) => found,
                // It is no obstacle to the others.
                (Err(error), Some(newer)) if error.kind() == ErrorKind::Unsupported => {
                    newer.push((name, error));
                    continue;
                }
                (Err(error), _) => return Err(error.into()),
            };
            let url = url_in(store.url(), &name);
            let tell_line = |line| bar.suspend(|| tell(&format!("{url}: {line}")));
            found.damaged.iter().for_each(tell_line);
            damaged += found.damaged_count;
            text += &human(&url, &found);
            all.push(described(&url, &found));
        }
        Ok::<_, Failure>(newer.unwrap_or_default())
    });
    bar.finish_and_clear();
    let newer = newer?;
    args.report.print(&text, &all)?;
    Ok(exit_code_with(&newer, damaged))
}

pub(super) fn human(url: &str, found: &Findings) -> String {
    let Findings { blocks, nodes, extents, damaged_count, .. } = *found;
    let bytes = human_size(blocks * BLOCK_BYTES as u64);
    let verdict = match damaged_count {
        0 => "nothing is damaged".to_owned(),
        1 => "1 part is damaged".to_owned(),
        count => format!("{count} parts are damaged"),
    };
    format!("{url}: {verdict}: {bytes} of data, {nodes} nodes, {extents} extents\n")
}

pub(super) fn described(url: &str, found: &Findings) -> Value {
    json!({
        "url": url,
        "data-bytes": found.blocks * BLOCK_BYTES as u64,
        "nodes": found.nodes,
        "extents": found.extents,
        "damaged-count": found.damaged_count,
        "damaged": found.damaged,
    })
}
