//! Block status (`base:allocation`, `qemu:allocation-depth`) against what the disks hold, and
//! against what QEMU says of the same chains when nobody serves them.
//!
//! - What is said to be zeros reads as zeros.
//! - What a guest or QEMU wrote is never said to be a hole.
//! - The depth of each sector is QEMU's.

use super::fleet::Fleet;
use crate::clock;
use crate::nbd;
use crate::storm::foreign;
use crate::storm::formats::is_qcow2;
use crate::storm::kinds::Kind;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::{World, text};
use crate::tools;
use mica_units::Rng;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const ALLOCATION: &str = "base:allocation";
const DEPTH: &str = "qemu:allocation-depth";
/// Bits of the first.
const HOLE: u64 = 1;
const ZERO: u64 = 2;
/// How long QEMU's server may take to begin, and to end.
const LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(2);

/// What is said of each sector.
type Flags = Vec<u64>;

/// The depths of the sectors of some disks, by their number.
#[derive(Debug, Default)]
pub(super) struct Depths(Vec<(usize, Flags)>);

/// Whether the run has it.
pub(super) fn is_wanted(world: &World<'_>) -> bool {
    world.kinds.has(Kind::BlockStatus) && tools::NBDINFO.is_there()
}

/// Nobody writes to the disks, which are served.
pub(super) fn judge(fleet: &Fleet<'_>, rng: &mut Rng) -> Outcome {
    if !is_wanted(&fleet.world) || !rng.percent(40) {
        return Ok(());
    }
    for disk in &fleet.disks {
        let told = map(&fleet.world, (&disk.name, &disk.socket), ALLOCATION)?;
        let bytes = nbd::read_disk(&disk.socket)?;
        fleet.world.counts.statuses.add();
        if told.len() != bytes.len() / SECTOR {
            let what = format!("{}: {} sectors are told of", disk.name, told.len());
            return Err(Fault::new(Wrong::Status, what));
        }
        for (sector, (told, bytes)) in told.iter().zip(bytes.chunks(SECTOR)).enumerate() {
            if told & (HOLE | ZERO) != 0 && bytes.iter().any(|byte| *byte != 0) {
                let what = format!("{}: sector {sector} has data, and is {told}", disk.name);
                return Err(Fault::new(Wrong::Status, what));
            }
        }
    }
    Ok(())
}

/// The depths of the disks, which are about to be closed.
pub(super) fn depths(fleet: &Fleet<'_>, rng: &mut Rng) -> Outcome<Depths> {
    let is_there = is_wanted(&fleet.world) && tools::QEMU_NBD.is_there();
    if !is_there || !rng.percent(40) {
        return Ok(Depths::default());
    }
    let disks = fleet.disks.iter().enumerate();
    let deep = disks.filter(|(_, disk)| disk.tells_depth());
    let told = deep
        .map(|(number, disk)| Ok((number, map(&fleet.world, (&disk.name, &disk.socket), DEPTH)?)));
    Ok(Depths(told.collect::<Outcome<_>>()?))
}

impl Depths {
    /// Nobody serves the disks any more: they are what QEMU says.
    pub(super) fn judge(self, fleet: &Fleet<'_>) -> Outcome {
        let world = &fleet.world;
        for (number, told) in self.0 {
            let disk = &fleet.disks[number];
            if !is_qcow2(disk.active()) {
                continue;
            }
            let theirs = depth_by_qemu(world, disk.active())?;
            world.counts.statuses.add();
            let sectors = told.iter().zip(&theirs).enumerate();
            let mut differ = sectors.filter(|(_, (one, other))| one != other);
            if let Some((sector, (ours, theirs))) = differ.next() {
                let what = format!(
                    "{}: sector {sector}, and {} more, has the depth {ours}, and QEMU says \
                     {theirs}",
                    disk.name,
                    differ.count()
                );
                return Err(Fault::new(Wrong::Status, what));
            }
            if told.len() != theirs.len() {
                let what = format!("{}: {} and {} sectors", disk.name, told.len(), theirs.len());
                return Err(Fault::new(Wrong::Status, what));
            }
        }
        Ok(())
    }
}

/// What `context` says of each sector of an export.
fn map(world: &World<'_>, (export, socket): (&str, &Path), context: &str) -> Outcome<Flags> {
    let uri = format!("nbd+unix:///{export}?socket={}", text(socket)?);
    let args = ["--json", &format!("--map={context}"), &uri];
    let said = foreign::succeeded(foreign::run("nbdinfo", &world.images, &args)?)?;
    let parts: Value = serde_json::from_str(&said).map_err(trouble)?;
    let mut told = Flags::new();
    for part in parts.as_array().into_iter().flatten() {
        let number = |key: &str| part[key].as_u64();
        let (Some(len), Some(kind)) = (number("length"), number("type")) else {
            return Err(trouble(format!("no part of a map: {part}")));
        };
        // A guest can see no less than a sector, and layers have no smaller parts.
        let count = usize::try_from(len / SECTOR as u64).map_err(trouble)?;
        told.extend(std::iter::repeat_n(kind, count));
    }
    Ok(told)
}

/// The depth of each sector, as QEMU's server tells it of the same image.
fn depth_by_qemu(world: &World<'_>, image: &str) -> Outcome<Flags> {
    let socket = world.run.join("depth.nbd");
    // There is none if no other one was asked.
    let _ = fs::remove_file(&socket);
    let (options, image) = foreign::opened(&world.images, "qcow2", image)?;
    let mut server = Command::new("qemu-nbd");
    server.current_dir(&world.images).args(["-r", "-A", "-k", text(&socket)?]);
    server.args(options).arg(image).stdin(Stdio::null());
    let mut server = server.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    let there = clock::poll(LIMIT, PAUSE, || socket.exists().then_some(()));
    // It ends with its only client.
    let told = match there {
        Some(()) => map(world, ("", &socket), DEPTH),
        None => Err(trouble("qemu-nbd does not begin")),
    };
    if told.is_err() {
        // It may have ended.
        let _ = server.kill();
    }
    server.wait()?;
    told
}
