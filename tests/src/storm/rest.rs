//! What happens to a chain that nobody serves, and the judge's look at it.

use super::chain::Chain;
use super::copies;
use super::cue::Moment;
use super::foreign;
use super::judge;
use super::kinds::Kind;
use super::layers;
use super::life::other_len;
use super::model::View;
use super::stamp::SECTOR;
use super::story::{Fault, Outcome, Wrong};
use super::word;
use mica_units::Rng;
use std::fs;
use std::process::{Command, Stdio};

/// A few of the things that may happen now; the judge looks after some of them.
pub(super) fn rest(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    if rng.percent(40) {
        look(chain, rng, "after a life")?;
    }
    let events = chain.world.kinds.of(&[
        Kind::Write,
        Kind::Commit,
        Kind::Commit,
        Kind::CommitDown,
        Kind::Rebase,
        Kind::Overlay,
        Kind::Snapshot,
        Kind::Snapshot,
        Kind::Copy,
        Kind::Copy,
        Kind::Touch,
        Kind::Repair,
        Kind::Read,
        Kind::Resize,
    ]);
    for _ in 0..if events.is_empty() { 0 } else { rng.choose(&[0, 0, 1, 1, 2, 3]) } {
        let event = rng.choose(&events);
        chain.tell(format_args!("at rest: {event:?}"));
        happen(chain, rng, event)?;
        if rng.percent(60) {
            look(chain, rng, event.name())?;
        }
    }
    Ok(())
}

fn happen(chain: &mut Chain<'_>, rng: &mut Rng, event: Kind) -> Outcome {
    match event {
        Kind::Write => {
            chain.contest();
            let (name, aim) = (chain.active().name.clone(), chain.aim());
            let count = 1 + rng.below(5);
            chain.qemu_writes(rng, &name, &aim, count)
        }
        Kind::Commit => layers::commit_an_overlay(chain, rng),
        Kind::CommitDown => layers::commit_down(chain, rng),
        Kind::Rebase => layers::rebase(chain, rng),
        Kind::Overlay => layers::add_overlay(chain, rng),
        Kind::Snapshot => layers::snapshot(chain, rng),
        Kind::Copy => copies::copy(chain, rng),
        Kind::Touch => copies::touch(chain, rng),
        Kind::Repair => repair(chain),
        Kind::Read => read_by_mica(chain),
        _ => resize(chain, rng),
    }
}

/// Holds the image against what is known: QEMU's check, what QEMU reads, what snapshots hold.
pub(super) fn look(chain: &mut Chain<'_>, rng: &mut Rng, what: &str) -> Outcome {
    chain.tell(format_args!("  the judge looks, {what}"));
    check(chain, what)?;
    let is_pending = chain.state.is_pending;
    let view = if is_pending { View::Lossy } else { View::Kept };
    let content = chain.judge_by_qemu(view, what)?;
    if !is_pending {
        chain.state.model.set_content(&content);
    }
    for snapshot in &chain.state.snapshots {
        if !rng.percent(40) {
            continue;
        }
        let (active, raw) = (&chain.active().name, chain.world.run.join("snapshot.raw"));
        let load = ["-l", &snapshot.name];
        let bytes = foreign::flatten(&chain.world.images, active, &load, &raw)?;
        // QEMU shows as much of a snapshot as the disk is long now.
        let len = snapshot.content.len().min(bytes.len() / SECTOR);
        let mut model = chain.state.model.clone();
        model.set_content(&snapshot.content);
        let what = format!("{what}: snapshot {}", snapshot.name);
        let judged = model.judge(0, &bytes[..len * SECTOR], View::Kept).map(drop);
        judged
            .map_err(|bad| judge::fault(&bad, &what))
            .map_err(|fault| Fault::new(Wrong::Snapshot, fault.what))?;
    }
    Ok(())
}

/// QEMU finds no corruption, and after a clean close no more leaks than there were.
pub(super) fn check(chain: &mut Chain<'_>, what: &str) -> Outcome {
    chain.world.counts.checks.add();
    let name = chain.active().name.clone();
    let (corruptions, leaks) = foreign::check(&chain.world.images, &name)?;
    let may_be_dirty = chain.shape().is_lazy && chain.state.is_pending;
    if corruptions > 0 && may_be_dirty {
        return check_dirty(chain, &name, what);
    }
    if corruptions > 0 {
        let what = format!("{what}: {corruptions} corruptions, {leaks} leaks");
        return Err(Fault::new(Wrong::Corrupt, what));
    }
    if chain.state.is_pending {
        return Ok(());
    }
    if chain.state.leaks.is_some_and(|before| leaks > before) {
        let before = chain.state.leaks.unwrap_or(0);
        let what = format!("{what}: {leaks} leaks, {before} before");
        return Err(Fault::new(Wrong::Leak, what));
    }
    chain.state.leaks = Some(leaks);
    Ok(())
}

/// An image with lazy refcounts is repaired by the next process to open it: a copy of it, here.
fn check_dirty(chain: &Chain<'_>, name: &str, what: &str) -> Outcome {
    let copy = "dirty.qcow2";
    fs::copy(chain.path(name), chain.path(copy))?;
    let dir = &chain.world.images;
    let said = foreign::run("qemu-img", dir, &["check", "-f", "qcow2", "-r", "all", copy])?;
    let (corruptions, _) = foreign::check(dir, copy)?;
    if said.code() != Some(0) || corruptions > 0 {
        return Err(Fault::new(Wrong::Corrupt, format!("{what}: dirty, and repaired: {said}")));
    }
    let raw = chain.world.run.join("dirty.raw");
    let bytes = foreign::flatten(dir, copy, &[], &raw)?;
    fs::remove_file(chain.path(copy))?;
    judge::disk(&chain.state, &bytes, View::Lossy, &format!("{what}, repaired")).map(drop)
}

fn repair(chain: &mut Chain<'_>) -> Outcome {
    let has_snapshots = !chain.state.snapshots.is_empty();
    if has_snapshots && !chain.world.kinds.has(Kind::RepairSnapshots) {
        return Ok(());
    }
    // QEMU forgets snapshots for an autoclear bit that it knows, too.
    if has_snapshots && chain.shape().bitmaps > 0 {
        return Ok(());
    }
    chain.contest();
    let name = chain.active().name.clone();
    let what = if chain.shape().is_lazy { "all" } else { "leaks" };
    foreign::img(&chain.world.images, &["check", "-q", "-f", "qcow2", "-r", what, &name])?;
    Ok(())
}

/// mica reads and checks the image, and changes nothing.
fn read_by_mica(chain: &mut Chain<'_>) -> Outcome {
    let name = chain.active().name.clone();
    let raw = chain.world.run.join("mica.raw");
    let raw_name = raw.display().to_string();
    let convert = ["convert", "--force", "-f", "qcow2", "-O", "raw", &name, &raw_name];
    foreign::succeeded(chain.world.mica(&convert)?)?;
    let bytes = fs::read(&raw)?;
    fs::remove_file(&raw)?;
    chain.world.counts.reads.add();
    let view = chain.view();
    judge::disk(&chain.state, &bytes, view, &format!("mica convert ({view:?})"))?;
    let said = chain.world.mica(&["check", "-f", "qcow2", &name])?;
    let may_be_dirty = chain.shape().is_lazy && chain.state.is_pending;
    match said.code() {
        Some(0 | 3) => Ok(()),
        Some(2) if may_be_dirty => Ok(()),
        _ => Err(Fault::new(Wrong::Corrupt, format!("mica check: {said}"))),
    }
}

/// The disk gets another length, by mica or by QEMU.
fn resize(chain: &mut Chain<'_>, rng: &mut Rng) -> Outcome {
    let (before, mut after) = (chain.state.model.len(), other_len(chain, rng));
    let cluster = chain.shape().cluster / SECTOR as u64;
    let by_mica = rng.percent(60);
    // QEMU leaves what a cluster held behind the end of the disk, and shows it again.
    if !by_mica && after < before {
        after = after.div_ceil(cluster) * cluster;
    }
    let is_cut = !before.is_multiple_of(cluster) || chain.state.other_len.is_some();
    if !by_mica && is_cut || after == before || chain.state.other_len == Some(after) {
        return Ok(());
    }
    chain.world.counts.resizes.add();
    let (name, size) = (chain.active().name.clone(), (after * SECTOR as u64).to_string());
    let shrink = if after < before || by_mica { &["--shrink"][..] } else { &[] };
    let args = [&["resize", "-q", "-f", "qcow2"], shrink, &[&name, &size]].concat();
    chain.tell(format_args!("  {args:?} by mica: {by_mica}"));
    if !by_mica {
        chain.contest();
        let said = foreign::run("qemu-img", &chain.world.images, &args)?;
        if !said.status.success() {
            chain.refused(&said);
            return Ok(());
        }
        chain.state.model.resize(after);
        return Ok(());
    }
    let view = chain.view();
    let trace = chain.usual_trace()?;
    // Whose end the killed server's grow decides is decided here, too.
    let is_killed = chain.state.other_len.is_none() && chain.world.does(rng, Kind::KillResize, 45);
    if is_killed {
        return killed_resize(chain, rng, &args, after);
    }
    let said = chain.world.mica(&args)?;
    if !said.status.success() {
        chain.refused(&said);
        chain.state.loss.hear(&said.stderr);
        return Ok(());
    }
    // mica opened the image and closed it: whatever a killed server left is decided.
    let state = &mut chain.state;
    state.model.resize(after);
    state.other_len = None;
    let content = chain.judge_by_qemu(view, "mica resize")?;
    if chain.state.model.settle(&content) && view == View::Lossy {
        word::account(chain, trace, &said.stderr);
    }
    chain.state.model.set_content(&content);
    chain.state.settled();
    Ok(())
}

/// `mica resize` is killed: the disk has the old length or the new one, and all else is as it was.
fn killed_resize(chain: &mut Chain<'_>, rng: &mut Rng, args: &[&str], after: u64) -> Outcome {
    let world = &chain.world;
    world.counts.resize_kills.add();
    let log = world.run.join("resize.log");
    let name = chain.active().name.clone();
    let moment = Moment::random(rng);
    chain.tell(format_args!("  killed at {moment:?}"));
    let mut resize = Command::new(world.binary);
    resize.current_dir(&world.images).args(args).args(world.image_args());
    let said = fs::File::create(&log)?;
    let mut resize = resize.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said).spawn()?;
    let waited = moment
        .wait_while(&chain.path(&name), || resize.try_wait().is_ok_and(|status| status.is_none()));
    // It may have ended.
    let _ = resize.kill();
    let status = resize.wait()?;
    waited?;
    let said = fs::read_to_string(&log)?;
    chain.tell(format_args!("  {status}: {}", said.trim()));
    if said.contains("panicked") {
        return Err(Fault::new(Wrong::Panicked, said));
    }
    chain.state.loss.hear(&said);
    chain.state.was_killed(None);
    // The kernel may take a moment to release its locks, for which QEMU waits.
    let len = foreign::len(&chain.world.images, &name)? / SECTOR as u64;
    let before = chain.state.model.len();
    if len != before && len != after {
        let what = format!("a killed resize from {before} to {after} sectors left {len}");
        return Err(Fault::new(Wrong::Length, what));
    }
    chain.state.model.resize(len);
    look(chain, rng, "a killed resize")
}
