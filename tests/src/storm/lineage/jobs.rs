//! Merges that servers carry out.

use super::asking::{LIMIT, ending_of};
use super::fleet::Fleet;
use super::order::Ending;
use crate::clock;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use serde_json::Value;
use std::time::Duration;

const PAUSE: Duration = Duration::from_millis(5);

/// The merge of disk `number` goes on, if one rests.
pub(super) fn resume(fleet: &Fleet<'_>, number: usize) -> Outcome {
    let name = &fleet.disks[number].name;
    fleet.world.mica(&["ctl", "--control", text(&fleet.control)?, "resume", name])?;
    Ok(())
}

/// Waits until no merge of disk `number` is under way; how the last one ended.
pub(super) fn wait_for_job(fleet: &Fleet<'_>, number: usize) -> Outcome<Ending> {
    let name = &*fleet.disks[number].name;
    wait_for_that(fleet, |job| job["disk"] == *name)
}

/// Waits for the end of the merge with this number.
pub(super) fn wait_for_numbered(fleet: &Fleet<'_>, job: u64) -> Outcome<Ending> {
    wait_for_that(fleet, |found| found["number"] == job)
}

/// Waits for the end of the last merge that is the one.
fn wait_for_that(fleet: &Fleet<'_>, is_it: impl Fn(&Value) -> bool) -> Outcome<Ending> {
    let ended = clock::poll(LIMIT, PAUSE, || {
        let jobs = match fleet.ctl_json(&["jobs", "--all"]) {
            Ok(jobs) => jobs,
            Err(fault) => return Some(Err(fault)),
        };
        let job = jobs.as_array()?.iter().rfind(|job| is_it(job)).cloned();
        match job.as_ref().and_then(|job| job["state"].as_str()) {
            Some("running" | "paused" | "cancelling") => None,
            // As its client would be told that it has failed.
            Some("failed") => Some(ending_of(false, job.unwrap_or_default()["failure"].as_str()?)),
            Some("done") => Some(Ok(Ending::Done)),
            _ => Some(Ok(Ending::Open)),
        }
    });
    ended.ok_or_else(|| Fault::new(Wrong::Hang, "a merge does not end"))?
}
