//! Which verb it is, and what it is to do with the chain.

use super::bitmaps::Marking;
use super::deed::{Deed, Disk, snapshot_names};
use super::look;
use super::target::{Meanwhile, Target};
use crate::storm::chain::Chain;
use crate::storm::foreign;
use crate::storm::kinds::Kind;
use crate::storm::life::other_len;
use crate::storm::shape::Shape;
use crate::storm::stamp::SECTOR;
use crate::storm::state::{Layer, Snapshot};
use crate::storm::story::{Outcome, trouble};
use mica_units::Rng;
use std::fs;

/// Begins the name of the folder of backups of an image, among the images.
const FOLDER: &str = "backups-of";

/// What makes a deed for a chain.
type Make = fn(&mut Chain<'_>, &mut Rng) -> Outcome<Deed>;

/// Some verb that the chain can have.
pub(super) fn choose(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    look::decide(chain)?;
    let has = |kind: Kind| chain.world.kinds.has(kind);
    let has_layers = chain.state.layers.len() > 1;
    let has_snapshots = !chain.state.snapshots.is_empty();
    let can_have_more = chain.state.snapshots.len() < chain.shape().snapshots_max();
    let all: [(Make, bool); 17] = [
        (commit, has_layers && has(Kind::CommitDown)),
        (commit, has_layers && has(Kind::CommitDown)),
        (rebase, has_layers && has(Kind::Rebase)),
        (rebase, has_layers && has(Kind::Rebase)),
        (rename, has_layers && has(Kind::Rebase)),
        (take_snapshot, can_have_more && has(Kind::Snapshot)),
        (apply_snapshot, has_snapshots && has(Kind::Snapshot)),
        (delete_snapshot, has_snapshots && has(Kind::Snapshot)),
        (amend, true),
        (resize, has(Kind::Resize)),
        (resize, has(Kind::Resize)),
        (bitmap, has(Kind::Bitmaps)),
        (repair, has(Kind::Repair)),
        (convert, true),
        (back_up, has(Kind::Backup)),
        (restore, has(Kind::Backup)),
        (build_index, has(Kind::Index)),
    ];
    let can: Vec<_> = all.iter().filter(|(_, can)| *can).map(|(deed, _)| *deed).collect();
    rng.choose(&can)(chain, rng)
}

fn commit(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let layers = &chain.state.layers;
    let (active, beneath) = layers.split_last().ok_or_else(|| trouble("no layers"))?;
    let at = usize::try_from(rng.below(beneath.len() as u64)).map_err(trouble)?;
    let base = &beneath[at];
    // Layers that have left before were removed.
    let mut args = vec!["commit", "-q", "--ignore-gone", "-b", &base.name, &active.name];
    let keeps = rng.percent(25);
    args.extend(keeps.then_some("-d"));
    let mut deed = Deed::new(args);
    deed.marking = Some(Marking::Write(base.name.clone()));
    if !keeps {
        let mut after = layers[..=at].to_vec();
        after.push(active.clone());
        deed.layers = Some(after);
    }
    Ok(deed)
}

/// Onto a layer further down, or onto none.
fn rebase(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let layers = &chain.state.layers;
    let (active, beneath) = layers.split_last().ok_or_else(|| trouble("no layers"))?;
    let onto = rng.below(beneath.len() as u64 + 1).checked_sub(1);
    let onto = onto.map(usize::try_from).transpose().map_err(trouble)?;
    let mut args = vec!["rebase", "-q"];
    match onto.map(|at| &beneath[at]) {
        Some(base) => args.extend(["-F", base.format(), "-b", &base.name]),
        None => args.extend(["-b", ""]),
    }
    args.push(&active.name);
    let mut deed = Deed::new(args);
    let mut after = layers[..onto.map_or(0, |at| at + 1)].to_vec();
    after.push(active.clone());
    deed.layers = Some(after);
    Ok(deed)
}

/// Onto a copy of the layer beneath, by name.
fn rename(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let copy = chain.new_name("copy");
    let layers = &chain.state.layers;
    let (active, beneath) = layers.split_last().ok_or_else(|| trouble("no layers"))?;
    let base = beneath.last().ok_or_else(|| trouble("no layers"))?;
    if base.shape.is_some_and(|shape| shape.has_data_file) {
        // Both would have the same one.
        return rebase(chain, rng);
    }
    let ending = base.name.rsplit('.').next().unwrap_or_default();
    // A name that needs more room than the one before, perhaps.
    let long = if rng.percent(30) { "-that-is-long".repeat(8) } else { String::new() };
    let name = format!("{copy}{long}.{ending}");
    fs::copy(chain.path(&base.name), chain.path(&name))?;
    let args = ["rebase", "-q", "-u", "-F", base.format(), "-b", &name, &active.name];
    let mut deed = Deed::new(args);
    let mut after = layers[..layers.len() - 2].to_vec();
    after.extend([Layer { name, shape: base.shape }, active.clone()]);
    deed.layers = Some(after);
    Ok(deed)
}

fn take_snapshot(chain: &mut Chain<'_>, _: &mut Rng) -> Outcome<Deed> {
    let name = chain.new_name("taken");
    let mut deed = Deed::new(["snapshot", "-q", "-c", &name, &chain.active().name]);
    let mut names = snapshot_names(&chain.state.snapshots);
    names.push(name);
    (deed.snapshots, deed.was_done) = (Some(names), Some("there is a snapshot"));
    Ok(deed)
}

fn chosen_snapshot(chain: &Chain<'_>, rng: &mut Rng) -> Outcome<Snapshot> {
    let snapshots = &chain.state.snapshots;
    let at = usize::try_from(rng.below(snapshots.len() as u64)).map_err(trouble)?;
    Ok(snapshots[at].clone())
}

fn apply_snapshot(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let Snapshot { name, content } = chosen_snapshot(chain, rng)?;
    let mut deed = Deed::new(["snapshot", "-q", "-a", &name, &chain.active().name]);
    (deed.disk, deed.marking) = (Disk::Content(content), Some(Marking::End));
    Ok(deed)
}

fn delete_snapshot(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let Snapshot { name, .. } = chosen_snapshot(chain, rng)?;
    let mut deed = Deed::new(["snapshot", "-q", "-d", &name, &chain.active().name]);
    let names = snapshot_names(&chain.state.snapshots);
    deed.snapshots = Some(names.into_iter().filter(|other| *other != name).collect());
    deed.was_done = Some("has no snapshot");
    Ok(deed)
}

fn amend(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let (mut shape, mut options) = (chain.shape(), Vec::new());
    let mut disk = Disk::Same;
    if rng.percent(40) {
        let bits: u64 = rng.choose(&[1, 2, 4, 8, 16, 32, 64]);
        options.push(format!("refcount_bits={bits}"));
        shape.refcount_bits = bits;
    }
    if rng.percent(30) {
        shape.is_lazy = rng.percent(50);
        options.push(format!("lazy_refcounts={}", if shape.is_lazy { "on" } else { "off" }));
    }
    if rng.percent(30) {
        shape.is_old = rng.percent(40);
        options.push(format!("compat={}", if shape.is_old { "0.10" } else { "1.1" }));
    }
    if options.is_empty() || rng.percent(30) {
        let len = chain.state.model.len();
        let longer = other_len(chain, rng).max(len);
        options.push(format!("size={}", longer * SECTOR as u64));
        disk = Disk::Len(longer);
    }
    let mut deed = Deed::new(["amend", "-q", "-o", &options.join(","), &chain.active().name]);
    (deed.shape, deed.disk) = (Some(shape), disk);
    Ok(deed)
}

fn resize(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let after = other_len(chain, rng);
    let len = (after * SECTOR as u64).to_string();
    let mut deed = Deed::new(["resize", "-q", "--shrink", &chain.active().name, &len]);
    deed.disk = Disk::Len(after);
    Ok(deed)
}

fn bitmap(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let (_, _, mut there) = look::names(chain)?;
    let active = chain.active().name.clone();
    if there.is_empty() || rng.percent(30) {
        let name = chain.new_name("dirty");
        let granularity = rng.choose(&["512", "4k", "64k", "1M"]);
        let mut deed = Deed::new(["bitmap", "--add", "-g", granularity, &active, &name]);
        there.push(name);
        (deed.bitmaps, deed.was_done) = (Some(there), Some("already"));
        return Ok(deed);
    }
    let at = usize::try_from(rng.below(there.len() as u64)).map_err(trouble)?;
    let name = there[at].clone();
    let action = rng.choose(&["--remove", "--clear", "--enable", "--disable", "--merge"]);
    let mut args = vec!["bitmap", action];
    let other = usize::try_from(rng.below(there.len() as u64)).map_err(trouble)?;
    let other = there[other].clone();
    args.extend((action == "--merge").then_some(&*other));
    args.extend([&*active, &name]);
    let mut deed = Deed::new(args);
    deed.marking = match action {
        "--clear" => Some(Marking::Clear(name)),
        "--merge" => Some(Marking::Merge { from: other, into: name }),
        _ => None,
    };
    if action == "--remove" {
        there.remove(at);
        deed.was_done = Some("no bitmap");
    }
    deed.bitmaps = Some(there);
    Ok(deed)
}

fn repair(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let what = rng.choose(&["leaks", "all"]);
    let mut deed = Deed::new(["check", "-q", "-r", what, &chain.active().name]);
    deed.mends = true;
    Ok(deed)
}

fn build_index(chain: &mut Chain<'_>, _: &mut Rng) -> Outcome<Deed> {
    Ok(Deed::new(["index", "build", &chain.active().name]))
}

/// A copy of the disk, in a new file, in place of another one, or into one that is there.
pub(super) fn convert(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let active = chain.active().name.clone();
    let (meanwhile, format) = (
        rng.choose(&[Meanwhile::Nothing, Meanwhile::Old, Meanwhile::Both]),
        rng.choose(&["qcow2", "qcow2", "raw"]),
    );
    let name = format!("{}.{format}", chain.new_name("target"));
    let model = chain.state.model.clone();
    let folder = String::new();
    let is_of_present = true;
    let mut target = Target { name, format, model, is_of_present, meanwhile, before: None, folder };
    let shape = Shape { has_data_file: false, ..Shape::random(rng, chain.world.kinds) };
    let mut args = vec!["convert".to_owned(), "-q".to_owned(), "-O".to_owned(), format.to_owned()];
    let options = if format == "qcow2" { shape.options(&target.name) } else { String::new() };
    if meanwhile == Meanwhile::Both {
        args.push("-n".to_owned());
    } else if format == "qcow2" {
        args.extend(["-o".to_owned(), options.clone()]);
        args.extend(rng.percent(25).then(|| "-c".to_owned()));
    }
    if meanwhile != Meanwhile::Nothing {
        let len = (chain.state.model.len() * SECTOR as u64).to_string();
        let mut made = vec!["create", "-q", "-f", format];
        if format == "qcow2" {
            made.extend(["-o", &options]);
        }
        made.extend([&*target.name, &len]);
        foreign::img(&chain.world.images, &made)?;
        if rng.percent(60) {
            let half = chain.state.model.len() / 2 * SECTOR as u64;
            let write = format!("write -P 17 0 {}", half.max(SECTOR as u64));
            foreign::io(&chain.world.images, format, &target.name, &[write])?;
        }
        target.before = Some(target.read(chain)?);
    }
    args.extend((meanwhile == Meanwhile::Old).then(|| "--force".to_owned()));
    args.extend([active, target.name.clone()]);
    Ok(Deed::of_target(args, target, "exists"))
}

/// A backup, from which the disk is restored.
pub(super) fn back_up(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let (active, state) = (chain.active().name.clone(), chain.new_name("state"));
    let model = chain.state.model.clone();
    let meanwhile = Meanwhile::Folder;
    let (name, folder) = (state.clone(), format!("{FOLDER}-{active}"));
    let target = Target {
        name,
        format: "qcow2",
        model,
        is_of_present: true,
        meanwhile,
        before: None,
        folder: folder.clone(),
    };
    let mut args = vec!["backup", "-q", &*active, &*folder, "--as", &*state];
    args.extend(rng.percent(60).then_some("--since-last"));
    Ok(Deed::of_target(args, target, "is there already"))
}

/// What is restored from a backup, in a new file or in place of another one.
pub(super) fn restore(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome<Deed> {
    let (active, state) = (chain.active().name.clone(), chain.new_name("state"));
    let folder = format!("{FOLDER}-{active}");
    let made = chain.world.mica(&["backup", "-q", &active, &folder, "--as", &state])?;
    foreign::succeeded(made)?;
    let format = rng.choose(&["qcow2", "qcow2", "raw"]);
    let name = format!("{}.{format}", chain.new_name("restored"));
    let (model, meanwhile) = (chain.state.model.clone(), Meanwhile::Nothing);
    let from = format!("{folder}@{state}");
    let mut target = Target {
        name: name.clone(),
        format,
        model,
        is_of_present: false,
        meanwhile,
        before: None,
        folder,
    };
    let mut args = vec!["restore", "-q", "-O", format, &from, &name];
    if rng.percent(40) {
        args.push("--force");
        foreign::img(&chain.world.images, &["create", "-q", "-f", format, &name, "1M"])?;
        target.meanwhile = Meanwhile::Old;
        target.before = Some(target.read(chain)?);
    }
    Ok(Deed::of_target(args, target, "exists").without_image_options())
}
