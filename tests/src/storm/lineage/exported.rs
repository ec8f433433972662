//! What frozen layers show while their disks are served on: groups, and states that are exported.

use super::fleet::Fleet;
use super::folder;
use super::frozen::{Frozen, Span};
use super::order::{Order, What};
use super::state_in;
use crate::nbd::{Connection, Wish};
use crate::storm::foreign;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::text;
use crate::tools;
use mica_units::Rng;

/// The layers that a group of snapshots froze are all of one instant.
pub(super) fn judge_group(fleet: &mut Fleet<'_>, order: &Order) -> Outcome {
    let mut span = Span::default();
    for (number, what) in &order.disks {
        let Fleet { world, disks, .. } = &mut *fleet;
        let disk = &mut disks[*number];
        let What::Snapshot { file } = what else { return Ok(()) };
        let Some(at) = disk.chain.iter().position(|layer| layer == file) else { return Ok(()) };
        let Some(below) = at.checked_sub(1) else { return Ok(()) };
        let below = disk.chain[below].clone();
        disk.look_at(world, &below, "a layer that was just frozen")?;
        span = span.and(disk.frozen.get(&below).map(Frozen::span).unwrap_or_default());
    }
    match span.is_possible() {
        true => Ok(()),
        false => {
            let what = format!("the layers of a group are of no one instant: {order:?}");
            Err(Fault::new(Wrong::Mixed, what))
        }
    }
}

/// What is exported is the state, and all that has changed since an earlier one is told.
pub(super) fn judge(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    let Fleet { world, disks, .. } = fleet;
    for disk in disks {
        let Some(file) = disk.exported.clone() else { continue };
        let socket = world.run.join(format!("{}.backup", disk.name));
        let read = Connection::open(&socket, &disk.name, &Wish::default())
            .and_then(|mut connection| connection.read_all());
        let bytes = read.map_err(|error| {
            Fault::new(Wrong::Failed, format!("the export of {file}: {error:#}"))
        })?;
        world.counts.reads.add();
        let Some(frozen) = disk.frozen.get_mut(&file) else { continue };
        let content = frozen.decide(&bytes, &format!("the export of {file}"))?;
        folder::back_up(world, rng, disk, (&file, &bytes))?;
        let Some(since) = disk.since.clone() else { continue };
        if !disk.frozen.contains_key(&since) || !tools::NBDINFO.is_there() {
            continue;
        }
        let raw = world.run.join("since.raw");
        let before = foreign::flatten(&world.images, &since, &["-U"], &raw)?;
        let before = match disk.frozen.get_mut(&since) {
            Some(frozen) => frozen.decide(&before, &since)?,
            None => continue,
        };
        let context = format!("qemu:dirty-bitmap:{}", state_in(&since).unwrap_or_default());
        let uri = format!("nbd+unix:///{}?socket={}", disk.name, text(&socket)?);
        let args = ["--json", &format!("--map={context}"), &uri];
        let said = foreign::succeeded(foreign::run("nbdinfo", &world.images, &args)?)?;
        // It may have become longer before it was frozen, by what nobody knows.
        let is_dirty = foreign::dirty_in(&said, bytes.len() / SECTOR)?;
        let missed = (0..content.len())
            .find(|at| !is_dirty[*at] && before.get(*at).copied().unwrap_or(0) != content[*at]);
        if let Some(sector) = missed {
            let what = format!("{file} differs from {since} in sector {sector}, which is not told");
            return Err(Fault::new(Wrong::Untold, what));
        }
    }
    Ok(())
}
