//! What was backed up from exports holds what they held, whatever became since of the state that a
//! backup went on from: merges, kills, copies put back, and QEMU's commits into it.

use super::disk::Disk;
use super::state_in;
use crate::storm::kinds::Kind;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::fs;

/// Perhaps backs up the exported state `file` of a disk, which holds `wanted`.
pub(super) fn back_up(
    world: &World<'_>,
    rng: &mut Rng,
    disk: &mut Disk,
    (file, wanted): (&str, &[u8]),
) -> Outcome {
    if !world.does(rng, Kind::Folder, 60) {
        return Ok(());
    }
    let socket = world.run.join(format!("{}.backup", disk.name));
    let uri = format!("nbd+unix:///{}?socket={}", disk.name, text(&socket)?);
    let state = state_in(file).unwrap_or_default().to_owned();
    let run = |state: &str, disk: &Disk| {
        let folder = world.run.join(disk.target.folder(&disk.name));
        let args = ["backup", "-q", "--since-last", "--as", state, &uri, text(&folder)?];
        world.story.tell(format_args!("  {args:?}"));
        world.mica_alone(&args).map(|said| (said, folder))
    };
    let (mut said, mut folder) = run(&state, disk)?;
    if !said.status.success() && said.stderr.contains("already: choose another name") {
        // What it was when it was backed up.
        world.story.tell(format_args!("    refused: {}", said.stderr.trim()));
        disk.target.leave();
        (said, folder) = run(&state, disk)?;
    }
    if !said.status.success() {
        return Err(Fault::new(Wrong::Failed, format!("a backup: {said}")));
    }
    disk.target.note_backup(file);
    world.counts.backups.add();
    let raw = world.run.join("restored.raw");
    let source = format!("{}@{state}", text(&folder)?);
    let said = world.mica_alone(&["restore", "-q", "-O", "raw", &source, text(&raw)?])?;
    if !said.status.success() {
        return Err(Fault::new(Wrong::Unusable, format!("a restore: {said}")));
    }
    let restored = fs::read(&raw)?;
    fs::remove_file(&raw)?;
    if restored == wanted {
        return Ok(());
    }
    let at = restored.iter().zip(wanted).position(|(is, wanted)| is != wanted);
    let what = format!(
        "{source} has {} bytes of {}, the first wrong one at {at:?}",
        restored.len(),
        wanted.len()
    );
    Err(Fault::new(Wrong::Restored, what))
}
