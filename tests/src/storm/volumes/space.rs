//! What a store takes once nobody needs more than the volumes as they are.

use super::{Fleet, Standing};
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What an extent may take besides its data: its header and its trailer, and what is left of the
/// blocks of the file system that they are in.
const EXTENT_BYTES: u64 = 16 << 10;
/// What is too little to be written again.
const SLACK_BYTES: u64 = 128 << 10;

/// Drops all snapshots and collects: the extents are a quarter longer than what is needed at most.
/// Volumes that are not closed are left as they are, and then this is not judged.
pub(super) fn nothing_is_left(fleet: &Fleet<'_>) -> Outcome {
    if fleet.entries.iter().any(|entry| entry.standing != Standing::Closed) {
        return Ok(());
    }
    for entry in &fleet.entries {
        let url = fleet.url(&entry.disk.name)?;
        let all = json(&fleet.verb_ok(&["snapshots", "--output", "json", &url])?)?;
        for snapshot in all.as_array().into_iter().flatten() {
            let which = match snapshot["label"].as_str() {
                Some(label) if !label.is_empty() => label.to_owned(),
                _ => snapshot["sequence"].to_string(),
            };
            fleet.verb_ok(&["drop", "-q", &format!("{url}@{which}")])?;
        }
    }
    let url = fleet.store_url()?;
    // The first writes again what is left in sparse extents, which the second can delete then.
    for _ in 0..2 {
        fleet.verb_ok(&["gc", "-q", &url])?;
    }
    let told = json(&fleet.verb_ok(&["stats", "--output", "json", &url])?)?;
    let live = told["live-bytes"].as_u64().ok_or_else(|| trouble("no live-bytes"))?;
    let (mut count, mut taken) = (0, 0);
    add_files(&fleet.store.join("extents"), &mut |bytes| {
        count += 1;
        taken += bytes;
    })?;
    if taken > live + live / 4 + count * EXTENT_BYTES + SLACK_BYTES {
        let what = format!("{taken} bytes in {count} extents for {live} that are needed: {told}");
        return Err(Fault::new(Wrong::Space, what));
    }
    fleet.check_all()
}

fn json(text: &str) -> Outcome<serde_json::Value> {
    serde_json::from_str(text).map_err(trouble)
}

/// Calls `add` with the space that each file beneath `folder` takes.
fn add_files(folder: &Path, add: &mut impl FnMut(u64)) -> Outcome {
    // Nobody may have written anything.
    let Ok(entries) = fs::read_dir(folder) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true => add_files(&entry.path(), add)?,
            false => add(entry.metadata()?.blocks() * 512),
        }
    }
    Ok(())
}
