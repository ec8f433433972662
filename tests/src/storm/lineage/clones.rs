//! Overlays of frozen layers, which belong to nobody here: made by several verbs and by QEMU, in
//! the folder of the disks and in another one, moved within that and to a third one, and removed.

use super::disk::{Disk, FAR};
use super::fleet::Fleet;
use super::moved;
use crate::clock;
use crate::storm::foreign;
use crate::storm::formats::is_qcow2;
use crate::storm::keys;
use crate::storm::kinds::Kind;
use crate::storm::stamp::SECTOR;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use crate::storm::world::{World, text};
use mica_units::Rng;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Clones of a disk, at most.
const CLONES_MAX: usize = 3;

/// Who makes an overlay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Maker {
    Clone,
    Create,
    /// It tells nobody, so that it is found only in the folder of its base.
    Qemu,
}

/// A disk gets a clone, or something happens to one.
pub(super) fn change(fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome {
    let number = usize::try_from(rng.below(fleet.disks.len() as u64)).map_err(trouble)?;
    let Fleet { world, disks, .. } = fleet;
    let disk = &mut disks[number];
    let is_anywhere = world.kinds.has(Kind::CloneAnywhere);
    if is_anywhere && !disk.clones.is_empty() && rng.percent(30) {
        return shift(world, rng, disk);
    }
    if disk.clones.len() == CLONES_MAX {
        return Ok(());
    }
    let frozen: Vec<_> = (0..disk.chain.len() - 1)
        .filter(|at| disk.frozen.contains_key(&disk.chain[*at]) && is_qcow2(&disk.chain[*at]))
        .collect();
    if frozen.is_empty() {
        return Ok(());
    }
    let base = disk.chain[rng.choose(&frozen)].clone();
    // What it begins as is decided before anybody may change it.
    disk.look_at(world, &base, "before it is cloned")?;
    let maker = match is_anywhere {
        true => rng.choose(&[Maker::Clone, Maker::Clone, Maker::Create, Maker::Qemu]),
        false => Maker::Clone,
    };
    let mut name = disk.new_name("clone");
    if is_anywhere && maker != Maker::Qemu && rng.percent(60) {
        fs::create_dir_all(world.images.join(FAR))?;
        name = format!("{FAR}/{name}");
    }
    world.story.tell(format_args!("  {name} is a clone of {base}, made by {maker:?}"));
    if maker != Maker::Qemu && world.does(rng, Kind::Kill, 25) {
        make_and_kill(world, rng, maker, (&base, &name))?;
    }
    if !make(world, disk, maker, (&base, &name))? {
        return Ok(());
    }
    let left = unfinished(&world.images.join(&name));
    if left.exists() {
        return Err(Fault::new(Wrong::Failed, format!("{} is left", left.display())));
    }
    world.counts.clones.add();
    if let Some(content) = disk.frozen.get(&base).cloned() {
        disk.frozen.insert(name.clone(), content);
    }
    disk.clones.push(name);
    Ok(())
}

/// Where an image is until it is complete.
fn unfinished(image: &Path) -> PathBuf {
    let name = image.file_name().unwrap_or_default().to_string_lossy();
    image.with_file_name(format!(".{name}.mica-unfinished"))
}

/// The verb is killed over it. What has the clone's name then is whole, and the user removes it.
fn make_and_kill(
    world: &World<'_>,
    rng: &mut Rng,
    maker: Maker,
    (base, name): (&str, &str),
) -> Outcome {
    let pause = Duration::from_micros(rng.below(30_000));
    world.story.tell(format_args!("    whose first attempt is killed after {pause:?}"));
    let path = world.images.join(base);
    let path = text(&path)?;
    let args: &[&str] = match maker {
        Maker::Create => &["create", "-q", "-b", path, "-F", "qcow2", name],
        Maker::Clone | Maker::Qemu => &["clone", "-q", path, name],
    };
    let mut verb = Command::new(world.binary);
    verb.current_dir(&world.images).args(args).args(keys::options(&world.images));
    verb.stdin(Stdio::null());
    let mut verb = verb.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    clock::sleep(pause);
    // It may have ended.
    let _ = verb.kill();
    verb.wait()?;
    world.counts.kills.add();
    let image = world.images.join(name);
    if image.exists() {
        let (corruptions, leaks) = foreign::check(&world.images, name)?;
        if (corruptions, leaks) != (0, 0) {
            let what =
                format!("a killed verb left {name}: {corruptions} corruptions, {leaks} leaks");
            return Err(Fault::new(Wrong::Corrupt, what));
        }
        fs::remove_file(image)?;
    }
    Ok(())
}

/// Whether it is made: a merge that was killed may keep it from that.
fn make(world: &World<'_>, disk: &Disk, maker: Maker, (base, name): (&str, &str)) -> Outcome<bool> {
    let path = world.images.join(base);
    let path = text(&path)?;
    let said = match maker {
        Maker::Clone => {
            let keys = keys::options(&world.images);
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            world.mica_alone(&[&["clone", "-q", path, name], &keys[..]].concat())?
        }
        Maker::Create => world.mica(&["create", "-q", "-b", path, "-F", "qcow2", name])?,
        Maker::Qemu => {
            let len = disk.frozen.get(base).map_or(0, |frozen| frozen.len() * SECTOR as u64);
            let len = len.to_string();
            let args = ["create", "-q", "-f", "qcow2", "-u", "-b", base, "-F", "qcow2", name, &len];
            foreign::img(&world.images, &args)?;
            return Ok(true);
        }
    };
    if said.status.success() {
        return Ok(true);
    }
    let is_merged = world.images.join(format!("{base}.mica-merged")).exists();
    match is_merged && said.stderr.contains("being merged") {
        true => Ok(false),
        false => Err(Fault::new(Wrong::Failed, format!("a clone: {said}"))),
    }
}

/// A clone goes, is moved to another folder, or gets another name in its own.
fn shift(world: &World<'_>, rng: &mut Rng, disk: &mut Disk) -> Outcome {
    let at = usize::try_from(rng.below(disk.clones.len() as u64)).map_err(trouble)?;
    if rng.percent(50) {
        return moved::on(world, rng, disk, at);
    }
    // Nobody would know of it by that name.
    if disk.untold.contains(&disk.clones[at]) {
        return Ok(());
    }
    let clone = disk.clones.swap_remove(at);
    let content = disk.frozen.remove(&clone);
    let path = world.images.join(&clone);
    if rng.percent(60) {
        world.story.tell(format_args!("  the clone {clone} is removed"));
        // Nobody can tell that it was not moved: merges are told that it was not (`--ignore-gone`).
        fs::remove_file(path)?;
        return Ok(());
    }
    let mut name = disk.new_name("moved");
    if let Some((folder, _)) = clone.rsplit_once('/') {
        name = format!("{folder}/{name}");
    }
    world.story.tell(format_args!("  the clone {clone} is called {name} from now on"));
    fs::rename(path, world.images.join(&name))?;
    disk.frozen.extend(content.map(|content| (name.clone(), content)));
    disk.clones.push(name);
    Ok(())
}
