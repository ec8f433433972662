//! What QEMU does to the layers of a chain: commits, rebases, overlays, internal snapshots.

use super::chain::Chain;
use super::foreign;
use super::model::View;
use super::shape::{self, Shape, data_file_of};
use super::state::{Layer, Left, Snapshot};
use super::story::{Outcome, trouble};
use mica_units::Rng;
use std::fs;

/// QEMU writes to an overlay and commits it into the image.
pub(super) fn commit_an_overlay(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    chain.contest();
    chain.world.counts.commits.add();
    let shape = Shape::random(rng, chain.world.kinds);
    let name = format!("{}.qcow2", chain.new_name("over"));
    let backing = chain.active().clone();
    chain.create(rng, &name, &shape, Some(&backing), chain.state.model.len())?;
    let (aim, count) = (chain.aim(), 1 + rng.below(6));
    if chain.state.is_pending && chain.state.left.is_none() {
        let content = chain.judge_by_qemu(View::Lossy, "an overlay")?;
        chain.state.left = Some(Left { model: chain.state.model.clone(), content });
    }
    chain.qemu_writes(rng, &name, &aim, count)?;
    if let Some(left) = &chain.state.left {
        chain.state.model.zeros_left_no_trace(&left.model, &left.content);
    }
    foreign::img(&chain.world.images, &["commit", "-q", "-f", "qcow2", &name])?;
    fs::remove_file(chain.path(&name))?;
    if shape.has_data_file {
        fs::remove_file(chain.path(&data_file_of(&name)))?;
    }
    Ok(())
}

/// QEMU commits the image into the layer below, and perhaps empties it.
pub(super) fn commit_down(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    // Snapshots of the image show what is below them.
    if chain.state.layers.len() < 2 || !chain.state.snapshots.is_empty() {
        return Ok(());
    }
    chain.contest();
    chain.world.counts.commits.add();
    let name = chain.active().name.clone();
    let keep = if rng.percent(30) { &["-d"][..] } else { &[] };
    let args = [&["commit", "-q", "-f", "qcow2"], keep, &[&name]].concat();
    let said = foreign::run("qemu-img", &chain.world.images, &args)?;
    if !said.status.success() {
        // A short layer of version 2 on a longer one cannot get longer.
        chain.refused(&said);
    }
    Ok(())
}

/// QEMU gives the image another backing file, or none.
pub(super) fn rebase(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let below = chain.state.layers.len() - 1;
    if below == 0 || !chain.state.snapshots.is_empty() {
        return Ok(());
    }
    chain.contest();
    let onto = rng.below(below as u64 + 1).checked_sub(1);
    let onto = onto.map(|index| usize::try_from(index).expect("few layers"));
    let active = chain.active().clone();
    let backing = onto.map(|index| chain.state.layers[index].clone());
    let mut args = vec!["rebase", "-q", "-f", "qcow2"];
    match &backing {
        Some(layer) => args.extend(["-b", &layer.name, "-F", layer.format()]),
        None => args.extend(["-b", ""]),
    }
    args.push(&active.name);
    chain.tell(format_args!("  {args:?}"));
    let said = foreign::run("qemu-img", &chain.world.images, &args)?;
    if !said.status.success() {
        chain.refused(&said);
        return Ok(());
    }
    let layers = &mut chain.state.layers;
    layers.truncate(onto.map_or(0, |index| index + 1));
    layers.push(active);
    Ok(())
}

/// The image gets an overlay, which is the active layer from then on.
pub(super) fn add_overlay(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    // What a killed server left of a backing file is for the next process to open that as the
    // active layer.
    if chain.state.is_pending || chain.state.layers.len() > 8 {
        return Ok(());
    }
    chain.state.snapshots.clear();
    let shape = Shape::random(rng, chain.world.kinds);
    let (len, most) = (chain.state.model.len(), chain.sectors_max().min(shape.sectors_max()));
    let is_other = chain.world.does(rng, super::kinds::Kind::Lengths, 20);
    let len = if is_other { shape::sectors(rng, most) } else { len };
    chain.add_layer(rng, shape, len)?;
    chain.state.leaks = Some(0);
    chain.add_bitmaps()
}

/// QEMU makes an internal snapshot, goes back to one, or deletes one.
pub(super) fn snapshot(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let (count, most) = (chain.state.snapshots.len(), chain.shape().snapshots_max());
    let name = chain.active().name.clone();
    let verb = rng.below(3);
    if count > 0 && (verb > 0 || count >= most) {
        let at = usize::try_from(rng.below(count as u64)).map_err(trouble)?;
        let snapshot = chain.state.snapshots[at].clone();
        chain.contest();
        chain.world.counts.snapshots.add();
        let flag = if verb == 1 { "-a" } else { "-d" };
        chain.tell(format_args!("  snapshot {flag} {}", snapshot.name));
        let images = &chain.world.images;
        let args = ["snapshot", "-q", flag, &snapshot.name, &name];
        let said = foreign::run("qemu-img", images, &args)?;
        if !said.status.success() {
            chain.refused(&said);
            return Ok(());
        }
        if verb == 1 {
            chain.state.model.set_content(&snapshot.content);
            chain.state.other_len = None;
        } else {
            chain.state.snapshots.remove(at);
        }
        return Ok(());
    }
    if count >= most {
        return Ok(());
    }
    chain.contest();
    chain.world.counts.snapshots.add();
    let snapshot = chain.new_name("snapshot");
    chain.tell(format_args!("  snapshot -c {snapshot}"));
    let args = ["snapshot", "-q", "-c", &snapshot, &name];
    let said = foreign::run("qemu-img", &chain.world.images, &args)?;
    if !said.status.success() {
        chain.refused(&said);
        return Ok(());
    }
    let view = if chain.state.is_pending { View::Lossy } else { View::Kept };
    let content = chain.judge_by_qemu(view, "a new snapshot")?;
    chain.state.snapshots.push(Snapshot { name: snapshot, content });
    Ok(())
}

/// The files of some layers.
pub(super) fn files(layers: &[Layer]) -> Vec<String> {
    let mut files = Vec::new();
    for layer in layers {
        files.push(layer.name.clone());
        if layer.shape.is_some_and(|shape| shape.has_data_file) {
            files.push(data_file_of(&layer.name));
        }
    }
    files
}
