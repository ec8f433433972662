//! What QEMU sees of a chain that a verb was to change.

use crate::storm::chain::Chain;
use crate::storm::foreign;
use crate::storm::judge;
use crate::storm::model::View;
use crate::storm::stamp::SECTOR;
use crate::storm::state::Snapshot;
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// What happened before a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum After {
    /// A verb came to its end: it left nothing.
    End,
    /// One that leaves no leaks at all in the active layer.
    Repair,
    /// A verb was killed: clusters may leak.
    Kill,
    /// One that changes which snapshots there are: in the active layer counts and flags may not
    /// agree, and of version 2 nothing says so.
    KillAmidCounting,
    /// QEMU wrote, and may leave leaks.
    Anything,
}

/// Clusters that leak, by layer.
#[derive(Default, Debug)]
pub(super) struct Leaks(BTreeMap<String, u64>);

impl Leaks {
    /// QEMU finds no corruption in any layer, and no more leaks than there may be.
    pub(super) fn look(&mut self, chain: &mut Chain<'_>, after: After, what: &str) -> Outcome {
        let layers = chain.state.layers.clone();
        for layer in &layers {
            let Some(shape) = layer.shape else { continue };
            chain.world.counts.checks.add();
            let is_active = layer.name == chain.active().name;
            let (corruptions, leaks) = foreign::check(&chain.world.images, &layer.name)?;
            let may_be_dirty = is_dirty(chain, &layer.name)?
                || shape.is_old && is_active && after == After::KillAmidCounting;
            if corruptions > 0 && !may_be_dirty {
                let what =
                    format!("{what}: {} has {corruptions} corruptions, {leaks} leaks", layer.name);
                return Err(Fault::new(Wrong::Corrupt, what));
            }
            if corruptions > 0 {
                check_repaired(chain, &layer.name, what)?;
            }
            // What is seen first may be a copy of what leaks.
            let before = self.0.insert(layer.name.clone(), leaks).unwrap_or(leaks);
            let most = match after {
                After::End => before,
                After::Repair if is_active => 0,
                After::Repair => before,
                After::Kill | After::KillAmidCounting | After::Anything => u64::MAX,
            };
            if leaks > most {
                let what = format!("{what}: {} has {leaks} leaks, {before} before", layer.name);
                return Err(Fault::new(Wrong::Leak, what));
            }
        }
        Ok(())
    }
}

/// Whether the image says that the next process to open it has to repair it.
fn is_dirty(chain: &Chain<'_>, name: &str) -> Outcome<bool> {
    let mut header = [0; 80];
    File::open(chain.path(name))?.read_exact_at(&mut header, 0)?;
    // Version 2 has no features.
    Ok(header[7] == 3 && header[79] & 1 != 0)
}

/// An image that is dirty is repaired by the next process to open it: a copy of it, here.
fn check_repaired(chain: &Chain<'_>, name: &str, what: &str) -> Outcome {
    let dir = &chain.world.images;
    let copy = "dirty.qcow2";
    fs::copy(chain.path(name), chain.path(copy))?;
    let (options, image) = foreign::opened(dir, "qcow2", copy)?;
    let mut args = vec!["check", "-q", "-r", "all"];
    args.extend(options.iter().map(String::as_str));
    args.push(&image);
    let said = foreign::run("qemu-img", dir, &args)?;
    let (corruptions, _) = foreign::check(dir, copy)?;
    fs::remove_file(chain.path(copy))?;
    match corruptions {
        0 => Ok(()),
        _ => {
            let what = format!("{what}: {name} is dirty, and repaired: {said}");
            Err(Fault::new(Wrong::Corrupt, what))
        }
    }
}

/// What the disk holds now is what QEMU reads, if that is right.
pub(super) fn decide(chain: &mut Chain<'_>) -> Outcome {
    let content = chain.judge_by_qemu(View::Kept, "between verbs")?;
    chain.state.model.set_content(&content);
    Ok(())
}

/// The disk is one of these. Which one.
pub(super) fn content_is_one_of(
    chain: &mut Chain<'_>,
    contents: &[Vec<u64>],
    what: &str,
) -> Outcome<usize> {
    let raw = chain.world.run.join("flat.raw");
    let name = chain.active().name.clone();
    let bytes = foreign::flatten(&chain.world.images, &name, &[], &raw)?;
    chain.world.counts.reads.add();
    let mut faults = Vec::new();
    for (at, content) in contents.iter().enumerate() {
        let mut model = chain.state.model.clone();
        model.set_content(content);
        if bytes.len() as u64 != model.len() * SECTOR as u64 {
            let (is, wanted) = (bytes.len() / SECTOR, model.len());
            let what = format!("{what}: the disk has {is} sectors, not {wanted}");
            faults.push(Fault::new(Wrong::Length, what));
            continue;
        }
        match model.judge(0, &bytes, View::Kept) {
            Ok(content) => {
                chain.state.model.set_content(&content);
                return Ok(at);
            }
            Err(bad) => faults.push(judge::fault(&bad, what)),
        }
    }
    let told: Vec<_> = faults.iter().map(|fault| fault.what.clone()).collect();
    let wrong = faults.first().map_or(Wrong::Foreign, |fault| fault.wrong);
    Err(Fault::new(wrong, told.join("\nnor: ")))
}

/// The snapshots hold what they held.
pub(super) fn judge_snapshots(chain: &Chain<'_>, snapshots: &[Snapshot], what: &str) -> Outcome {
    let raw = chain.world.run.join("snapshot.raw");
    for snapshot in snapshots {
        let load = ["-l", &*snapshot.name];
        let name = &chain.active().name;
        let bytes = foreign::flatten(&chain.world.images, name, &load, &raw)?;
        // QEMU shows as much of a snapshot as the disk is long now.
        let len = snapshot.content.len().min(bytes.len() / SECTOR);
        let mut model = chain.state.model.clone();
        model.set_content(&snapshot.content);
        let judged = model.judge(0, &bytes[..len * SECTOR], View::Kept).map(drop);
        let what = format!("{what}: snapshot {}", snapshot.name);
        judged.map_err(|bad| Fault::new(Wrong::Snapshot, judge::fault(&bad, &what).what))?;
    }
    Ok(())
}

/// What QEMU says of image `name`, of all its layers from the uppermost.
pub(super) fn info(chain: &Chain<'_>, name: &str) -> Outcome<Vec<Value>> {
    let args = ["info", "-f", "qcow2", "--backing-chain", "--output", "json", name];
    let told = foreign::img(&chain.world.images, &args)?;
    let told: Value = serde_json::from_str(&told).map_err(trouble)?;
    Ok(told.as_array().cloned().unwrap_or_default())
}

/// The names of the layers of the chain, from the base, and those of the snapshots of the active
/// one, and of its bitmaps.
pub(super) fn names(chain: &Chain<'_>) -> Outcome<(Vec<String>, Vec<String>, Vec<String>)> {
    let told = info(chain, &chain.active().name)?;
    let name = |layer: &Value| {
        let file = layer["filename"].as_str().unwrap_or_default();
        file.rsplit('/').next().unwrap_or_default().to_owned()
    };
    let layers = told.iter().rev().map(name).collect();
    let named = |list: &Value| {
        let all = list.as_array().into_iter().flatten();
        all.map(|one| one["name"].as_str().unwrap_or_default().to_owned()).collect()
    };
    let active = told.first().cloned().unwrap_or_default();
    let bitmaps = &active["format-specific"]["data"]["bitmaps"];
    Ok((layers, named(&active["snapshots"]), named(bitmaps)))
}
