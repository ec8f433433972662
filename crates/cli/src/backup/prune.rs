//! `mica backup prune`: which states of a folder go, and what becomes of those that go on from
//! them.

use super::{described, now_ns};
use crate::convert::Progress;
use crate::failure::Failure;
use crate::output::{ReportArgs, human_size};
use clap::Args;
use mica_backup::{Folder, Pruned, Stored};
use mica_block::SnapshotInfo;
use mica_volume::Keep;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;

#[derive(Args)]
pub(super) struct PruneArgs {
    /// How many of the newest to keep, or how densely for how long: 7, or 1d/1h,30d/1d.
    #[arg(long, value_name = "COUNT|RULES")]
    keep: Kept,
    /// Only show what would be removed.
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// Show progress on stderr.
    #[arg(short = 'p', long)]
    progress: bool,
    #[command(flatten)]
    report: ReportArgs,
    /// The folder.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

/// Which states stay.
#[derive(Clone, Debug)]
enum Kept {
    /// So many of the newest.
    Newest(usize),
    /// By their times.
    Rules(Keep),
}

impl FromStr for Kept {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(0) => Err("the newest always stays: use at least 1".to_owned()),
            Ok(count) => Ok(Self::Newest(count)),
            Err(_) => text.parse().map(Self::Rules).map_err(|error| {
                let error: mica_block::Error = error;
                format!("not a number, and {error}")
            }),
        }
    }
}

impl Kept {
    /// The states that do not stay, of all, which are in the order in which they were completed.
    fn unwanted(&self, now_ns: u64, all: &[Stored]) -> BTreeSet<String> {
        // From the newest the next backup goes on, whatever its time is.
        let Some((_, older)) = all.split_last() else { return BTreeSet::new() };
        let name = |stored: &Stored| stored.begin().state.clone();
        match self {
            Self::Newest(count) => {
                older.iter().take(all.len().saturating_sub(*count)).map(name).collect()
            }
            Self::Rules(rules) => {
                let times = (0..).zip(all).map(|(number, stored)| SnapshotInfo {
                    number,
                    label: String::new(),
                    time_ns: stored.begin().time_ns,
                    len: stored.len(),
                    records: 0,
                });
                let drops = rules.drops(now_ns, &times.collect::<Vec<_>>());
                let drops: BTreeSet<_> = drops.into_iter().collect();
                let older = (0_u64..).zip(older).filter(|(number, _)| drops.contains(number));
                older.map(|(_, stored)| name(stored)).collect()
            }
        }
    }
}

pub(super) fn run(args: &PruneArgs) -> Result<ExitCode, Failure> {
    let folder = Folder::open(&args.folder)?;
    let all = folder.states()?.whole;
    let unwanted = args.keep.unwanted(now_ns(), &all);
    let pruned = match args.dry_run {
        true => folder.prunable(&unwanted)?,
        false => {
            // What is rewritten is not known before; what goes takes no time.
            let total = folder.prunable(&unwanted)?.merged.iter().map(Stored::len).sum();
            let progress = Progress::start(total, args.report.progress(args.progress));
            let (mut done, mut last) = (0, (String::new(), 0));
            let pruned = folder.prune(&unwanted, |begin, position| {
                if begin.state != last.0 {
                    done += last.1;
                }
                last = (begin.state.clone(), position);
                progress.at((done + position).min(total));
            })?;
            progress.finish();
            pruned
        }
    };
    report_on(args, &pruned)?;
    Ok(ExitCode::SUCCESS)
}

fn report_on(args: &PruneArgs, pruned: &Pruned) -> Result<(), Failure> {
    let Pruned { removed, merged } = pruned;
    let would = if args.dry_run { "would remove" } else { "removed" };
    let list = |states: &[Stored]| {
        let names: Vec<_> = states.iter().map(|stored| &*stored.begin().state).collect();
        names.join(", ")
    };
    let folder = args.folder.display();
    let mut text = match removed.len() {
        0 => format!("{folder}: nothing to remove\n"),
        1 => format!("{folder}: {would} {}\n", list(removed)),
        count => format!("{folder}: {would} {count} states: {}\n", list(removed)),
    };
    for stored in merged.iter().filter(|_| !args.dry_run) {
        let base = match &stored.begin().base {
            Some(base) => format!("based on {base}"),
            None => "whole".to_owned(),
        };
        let taken = human_size(stored.file_bytes());
        text += &format!("{}: now {base}, {taken}\n", stored.begin().state);
    }
    let all = |states: &[Stored]| -> Vec<Value> { states.iter().map(described).collect() };
    let answer = json!({ "dry-run": args.dry_run, "removed": all(removed), "merged": all(merged) });
    args.report.print(&text, &answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_rules_are_told_apart() {
        assert!(matches!("7".parse(), Ok(Kept::Newest(7))));
        assert!(matches!("1d/1h,30d/1d".parse(), Ok(Kept::Rules(_))));
        for bad in ["0", "-1", "", "1d", "seven"] {
            bad.parse::<Kept>().unwrap_err();
        }
    }
}
