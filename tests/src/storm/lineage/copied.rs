//! A copy of one layer of a disk, made while that is served and nobody writes, and put back when
//! its server was killed, or closed the disk.
//!
//! A copy of a frozen layer changes nothing. One of the active layer is an older disk: what it
//! shows to QEMU, unless it lacks nothing but what the killed server's log has; then the disk may
//! be as it was. Anything between the two is wrong. A server that does nothing visible may write at
//! that moment, so that a copy may be torn: one that shows what the disk cannot have held is left
//! alone. One that was begun in the last moment of the writer's life has the name of the log that
//! the killed server left: mica does not tell it from the image (`qcow2/src/redo/mod.rs`, what is
//! not detected), and it only has to be sound.

use super::disk::Disk;
use super::fleet::Fleet;
use super::forms;
use crate::storm::copies::copy_file;
use crate::storm::foreign;
use crate::storm::formats::is_raw;
use crate::storm::kinds::Kind;
use crate::storm::model::{Model, View};
use crate::storm::story::{Fault, Outcome, Wrong};
use crate::storm::world::World;
use mica_units::Rng;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// A copy of a layer.
#[derive(Debug)]
pub(super) struct Copied {
    number: usize,
    file: String,
    /// The disk, when it was made.
    chain: Vec<String>,
    model: Model,
    /// How many merges had gone into the layer.
    merges: u64,
    kept: PathBuf,
    /// When it was begun.
    begun: SystemTime,
}

/// A writer that lives on for so long after a copy was begun has given the image another name: it
/// does so at the first change, or 200 ms after the last time (`qcow2/src/write/renaming.rs`). The
/// rest is for a machine that is busy, and for a group that is under way.
const LAST_MOMENT: Duration = Duration::from_millis(400);

/// Perhaps copies a layer of a disk.
pub(super) fn aside(fleet: &Fleet<'_>, rng: &mut Rng) -> Outcome<Option<Copied>> {
    if !fleet.world.does(rng, Kind::LayerCopy, 35) {
        return Ok(None);
    }
    let number = usize::try_from(rng.below(fleet.disks.len() as u64)).expect("few");
    let disk = &fleet.disks[number];
    let frozen = disk.chain.len() as u64 - 1;
    let at = match frozen {
        1.. if rng.percent(35) => usize::try_from(rng.below(frozen)).expect("few"),
        _ => disk.chain.len() - 1,
    };
    let file = disk.chain[at].clone();
    // The data would not be the copy's.
    if forms::has_data_file(&fleet.world.images, &file)? {
        return Ok(None);
    }
    fleet.tell(format_args!("  a copy of {file}"));
    let (kept, begun) = (fleet.world.run.join("copied"), SystemTime::now());
    copy_file(&fleet.world.images.join(&file), &kept, true)?;
    let (chain, model, merges) = (disk.chain.clone(), disk.model.clone(), merges_into(disk, &file));
    Ok(Some(Copied { number, file, chain, model, merges, kept, begun }))
}

impl Copied {
    /// Puts it back, if it is of the disk as that is now. Nobody serves it.
    pub(super) fn put_back(self, fleet: &mut Fleet<'_>, rng: &mut Rng) -> Outcome<bool> {
        let Fleet { world, disks, .. } = fleet;
        let disk = &mut disks[self.number];
        if disk.chain != self.chain || disk.model.len() != self.model.len() {
            return Ok(false);
        }
        let is_active = self.file == disk.active();
        let view = match is_active {
            true if is_raw(&self.file) => return Ok(false),
            true => match self.view(world, disk)? {
                None => return Ok(false),
                Some(_) if self.is_of_the_last_moment(world)? => {
                    self.judge_soundness(world, disk)?;
                    return Ok(false);
                }
                Some(view) => Some(view),
            },
            // A merge may have begun to change it.
            false if !disk.frozen.contains_key(&self.file) => return Ok(false),
            // Or has changed it, be it the active layer that went into it.
            false if merges_into(disk, &self.file) != self.merges => return Ok(false),
            false => None,
        };
        let (is_renamed, keeps_times) = (rng.percent(50), rng.percent(50));
        world.story.tell(format_args!(
            "  the copy of {} is put back; renamed {is_renamed}, with times {keeps_times}",
            self.file
        ));
        world.counts.copies.add();
        let target = world.images.join(&self.file);
        if is_renamed {
            let new = world.images.join("renamed");
            copy_file(&self.kept, &new, keeps_times)?;
            fs::rename(&new, &target)?;
        } else {
            copy_file(&self.kept, &target, keeps_times)?;
        }
        let shown = disk.shown_by_mica(world)?;
        match view.filter(|view| *view == shown) {
            None => disk.judge(&shown, "after a copy was put back")?,
            Some(view) => {
                let content = self.model.judge(0, &view, View::Lossy);
                disk.model = self.model;
                disk.model.settle(&content.map_err(|bad| {
                    Fault::new(Wrong::Trouble, format!("it was judged before: {bad:?}"))
                })?);
            }
        }
        Ok(true)
    }

    /// In the place of the image it can be read, whatever it shows. The image is put back then.
    fn judge_soundness(&self, world: &World<'_>, disk: &Disk) -> Outcome {
        world.story.tell(format_args!("  the copy of {} is only read in its place", self.file));
        let (image, present) = (world.images.join(&self.file), world.run.join("present"));
        copy_file(&image, &present, true)?;
        copy_file(&self.kept, &image, true)?;
        disk.shown_by_mica(world)?;
        copy_file(&present, &image, true)
    }

    /// Whether the image has still the name that the copy has, and was not written for long after
    /// that.
    fn is_of_the_last_moment(&self, world: &World<'_>) -> Outcome<bool> {
        let image = world.images.join(&self.file);
        let is_named_alike = name_of_log(&image)? == name_of_log(&self.kept)?;
        let lived = fs::metadata(&image)?.modified()?.duration_since(self.begun);
        Ok(is_named_alike && lived.is_ok_and(|lived| lived < LAST_MOMENT))
    }

    /// What QEMU reads from the copy of an active layer; `None` if it is torn.
    fn view(&self, world: &World<'_>, disk: &Disk) -> Outcome<Option<Vec<u8>>> {
        // It finds what it stands on from there.
        let name = format!("{}-copied.qcow2", disk.name);
        let place = world.images.join(&name);
        copy_file(&self.kept, &place, true)?;
        let raw = world.run.join("copied.raw");
        let is_whole = matches!(foreign::check(&world.images, &name), Ok((0, _)));
        let read = foreign::flatten(&world.images, &name, &["-U"], &raw);
        fs::remove_file(&place)?;
        let Ok(bytes) = read else { return Ok(None) };
        let is_known = self.model.judge(0, &bytes, View::Lossy).is_ok();
        Ok((is_whole && is_known).then_some(bytes))
    }
}

fn merges_into(disk: &Disk, file: &str) -> u64 {
    disk.merges.get(file).copied().unwrap_or_default()
}

/// By which name the image at `path` knows the log of its writer.
fn name_of_log(path: &Path) -> Outcome<[u8; 4]> {
    /// The upper half of the autoclear bits.
    const AT: u64 = 88;
    let mut name = [0; 4];
    fs::File::open(path)?.read_exact_at(&mut name, AT)?;
    Ok(name)
}
