//! Clones that are moved to a third folder. The notes of their bases name them where they were, if
//! at all, until the user says where they are (`mica rebase -u`), which may be much later. Until
//! then nobody says that what is gone was removed (`--ignore-gone`): it was not.

use super::disk::{Disk, FAR};
use crate::clock;
use crate::storm::kinds::Kind;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::fs;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The folder, among the images, to which clones are moved.
const THIRD: &str = "third";

/// A clone is moved there, or it is said of one that is there already.
pub(super) fn on(world: &World<'_>, rng: &mut Rng, disk: &mut Disk, at: usize) -> Outcome {
    let clone = disk.clones[at].clone();
    let chain = disk.read_chain(world, &world.images.join(&clone))?;
    let [.., base, _] = &*chain else { return Err(trouble("a clone stands on nothing")) };
    if clone.starts_with(THIRD) {
        if tell(world, rng, &clone, base)? {
            disk.untold.remove(&clone);
        }
        return Ok(());
    }
    let is_noted = clone.starts_with(FAR);
    // Its base is in the folder in which it was, and nothing names it there.
    if !is_noted && !tell(world, rng, &clone, base)? {
        return Ok(());
    }
    let name = format!("{THIRD}/{}", disk.new_name("moved"));
    world.story.tell(format_args!("  the clone {clone} is moved to {name}"));
    fs::create_dir_all(world.images.join(THIRD))?;
    let (from, to) = (world.images.join(&clone), world.images.join(&name));
    fs::rename(&from, &to)?;
    let is_told = (!is_noted || rng.percent(50)) && tell(world, rng, &name, base)?;
    if !is_noted && !is_told {
        world.story.tell("    and back");
        fs::rename(to, from)?;
        return Ok(());
    }
    if !is_told {
        disk.untold.insert(name.clone());
    }
    if let Some(content) = disk.frozen.remove(&clone) {
        disk.frozen.insert(name.clone(), content);
    }
    disk.clones[at] = name;
    world.counts.clones_moved.add();
    Ok(())
}

/// Says that the image at `name` stands on `base`. Whether that is known then: a merge that was
/// killed may keep it from that. The first attempt may be killed.
fn tell(world: &World<'_>, rng: &mut Rng, name: &str, base: &str) -> Outcome<bool> {
    let path = world.images.join(base);
    let args = ["rebase", "-q", "-u", "-b", text(&path)?, "-F", "qcow2", name];
    world.story.tell(format_args!("    {args:?}"));
    if world.does(rng, Kind::Kill, 25) {
        let mut verb = Command::new(world.binary);
        verb.current_dir(&world.images).args(args).stdin(Stdio::null());
        let mut verb = verb.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
        clock::sleep(Duration::from_micros(rng.below(20_000)));
        // It may have ended.
        let _ = verb.kill();
        verb.wait()?;
        world.counts.kills.add();
    }
    let said = world.mica(&args)?;
    let is_merged = world.images.join(format!("{base}.mica-merged")).exists();
    match said.status.success() {
        true => Ok(true),
        false if is_merged && said.stderr.contains("merged") => Ok(false),
        false => Err(Fault::new(Wrong::Failed, format!("a clone that was moved: {said}"))),
    }
}
