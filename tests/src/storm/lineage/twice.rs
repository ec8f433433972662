//! A server was killed in a takeover, while layers were merged or right after that. Whatever
//! survived it may go on writing to the active layers, and to nothing else: what is frozen is read
//! twice, at once and some time later, and must not have changed in between.
//!
//! That holds for files of which nobody knows what they show, too: a base into which a merge was
//! cut short stays as it is until somebody merges into it again.

use super::disk::Disk;
use super::fleet::Fleet;
use super::jobs;
use crate::clock;
use crate::storm::foreign;
use crate::storm::formats::{format_of, is_raw};
use crate::storm::stamp::{self, SECTOR};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::World;
use std::collections::BTreeSet;
use std::fs;
use std::time::Duration;

/// The time between the two.
const PAUSE: Duration = Duration::from_secs(2);

/// What a file showed: of the disk at this position.
type Shown = Vec<((usize, String), Vec<u8>)>;

/// Reads all of it twice. A server goes on, or none does.
pub(super) fn judge(fleet: &mut Fleet<'_>, serves: bool) -> Outcome {
    if serves {
        for number in 0..fleet.disks.len() {
            // One that the server began again would change its base.
            jobs::wait_for_job(fleet, number)?;
        }
    }
    let first = read_all(fleet)?;
    clock::sleep(PAUSE);
    let second = read_all(fleet)?;
    fleet.world.counts.twice.add();
    for ((of, before), (_, after)) in first.iter().zip(&second) {
        if before != after {
            return Err(changed(&fleet.disks[of.0], &of.1, before, after));
        }
    }
    if fleet.open.is_some() {
        // Nobody knows yet what the command has changed whose server was killed.
        return Ok(());
    }
    for ((number, file), bytes) in second {
        if let Some(frozen) = fleet.disks[number].frozen.get_mut(&file) {
            frozen.decide(&bytes, &format!("after a takeover: {file}"))?;
        }
    }
    Ok(())
}

fn read_all(fleet: &Fleet<'_>) -> Outcome<Shown> {
    let mut all = Vec::new();
    for (number, disk) in fleet.disks.iter().enumerate() {
        for file in files(&fleet.world, disk) {
            let bytes = read(&fleet.world, &file)?;
            all.push(((number, file), bytes));
        }
    }
    Ok(all)
}

/// The files that nobody may change. Without a server nobody changes the active layer, either, but
/// what QEMU reads of it lacks what is in the log.
fn files(world: &World<'_>, disk: &Disk) -> Vec<String> {
    let layers = disk.chain.split_last().map_or(&[][..], |(_, frozen)| frozen);
    let known = disk.frozen.keys().filter(|file| *file != disk.active());
    let all: BTreeSet<_> = layers.iter().chain(known).chain(&disk.clones).collect();
    let is_there = |file: &&String| world.images.join(file).exists();
    all.into_iter().filter(is_there).cloned().collect()
}

fn read(world: &World<'_>, file: &str) -> Outcome<Vec<u8>> {
    world.counts.reads.add();
    if is_raw(file) {
        return Ok(fs::read(world.images.join(file))?);
    }
    let raw = world.run.join("twice.raw");
    foreign::flatten_as(&world.images, (format_of(file), file), &["-U"], &raw)
}

fn changed(disk: &Disk, file: &str, before: &[u8], after: &[u8]) -> Fault {
    let sectors = before.chunks(SECTOR).zip(after.chunks(SECTOR)).enumerate();
    let differ = sectors.filter(|(_, (one, other))| one != other);
    let differ: Vec<_> = differ
        .map(|(sector, (one, other))| {
            let id = disk.stamper.disk();
            let [one, other] = [one, other].map(|bytes| stamp::read(id, sector as u64, bytes));
            format!("sector {sector} was {one:?} and is {other:?}")
        })
        .collect();
    let lengths = (before.len() / SECTOR, after.len() / SECTOR);
    let what = format!(
        "{file} is frozen, and changed between two reads: {} sectors of {lengths:?}: {}",
        differ.len(),
        differ.iter().take(8).cloned().collect::<Vec<_>>().join(", ")
    );
    Fault::new(Wrong::Thawed, what)
}
