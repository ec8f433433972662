//! The power is cut beneath a writer that flushes each of its writes, as a database does: the
//! executor then does its syncs itself. Now and then a second writer joins for a while.
//!
//! All that reaches the disk is recorded, and replayed up to some moments. There the file system
//! has to recover, the image has to be sound, and each sector has to hold what was durable, or
//! something newer.

use super::foreign;
use super::kinds::Kind;
use super::story::{Fault, Outcome, Wrong};
use super::world::{World, text};
use crate::guest::{Guest, Request};
use crate::mounts::Mount;
use crate::nbd::Wish;
use crate::power::{self, Disk, Effect, History, Recorder, Recording, SECTOR, stamps};
use crate::server::Server;
use anyhow::{Context, Result, ensure};
use mica_units::Rng;
use parking_lot::Mutex;
use std::fs::{self, File};
use std::ops::Range;
use std::path::Path;
use std::process::Command;

const IMAGE: &str = "disk.img";
const BASE: &str = "base.raw";
const STORE: &str = "store";
const LOG_SIZE: &str = "1M";
/// Formats that are none of images.
const VOLUME: &str = "volume";
const VOLUME_WITH_LOG: &str = "volume-log";
/// Sectors of the disk; the second writer has the last quarter.
const SECTORS: u64 = 4 << 11;
const FIRST_SECTORS: u64 = SECTORS / 4 * 3;
/// Sectors of a part that is written again and again.
const HOT_SECTORS: u64 = 256;
/// Moments that are judged.
const CUTS: usize = 10;
const STATES_MIB: u64 = 160;

/// What is written, and how long the log was when it was known to be durable.
struct Ledger<'a> {
    history: Mutex<History>,
    log: &'a Path,
}

/// Lets a storm go over it.
pub(super) fn storm(world: &World<'_>, rng: &mut Rng) -> Outcome {
    let format = rng.choose(&["qcow2", "qcow2", "qcow2", "raw"]);
    storm_of(world, rng, format)
}

/// The same of a volume in a directory, with its log beside it or without one.
pub(super) fn storm_of_volume(world: &World<'_>, rng: &mut Rng) -> Outcome {
    let format = rng.choose(&[VOLUME, VOLUME_WITH_LOG]);
    storm_of(world, rng, format)
}

fn storm_of(world: &World<'_>, rng: &mut Rng, format: &str) -> Outcome {
    world.counts.power_cuts.add();
    world.counts.lives.add();
    // What shows a base has to take two syncs.
    let has_base = format == "qcow2" && rng.percent(60);
    let folder = world.run.join("power");
    let first = if has_base { Effect::Stamps } else { Effect::Zeros };
    let mut history = History::new(SECTORS, first);
    let (recording, from) = record(world, rng, &folder, (format, has_base), &mut history)?;
    cut(world, rng, &folder, format, &history, recording, from)
}

/// Records the writers. Also returns where in the log they begin.
fn record(
    world: &World<'_>,
    rng: &mut Rng,
    folder: &Path,
    (format, has_base): (&str, bool),
    history: &mut History,
) -> Result<(Recording, u64), Fault> {
    let recorder = Recorder::start(folder, rng.choose(&[1024, 4096]))?;
    let image = recorder.folder().join(IMAGE);
    match format {
        "raw" => File::create_new(&image)?.set_len(SECTORS * SECTOR)?,
        VOLUME | VOLUME_WITH_LOG => {
            let url = volume_url(recorder.folder());
            let len = (SECTORS * SECTOR).to_string();
            foreign::succeeded(world.mica_alone(&["volume", "create", "-q", &url, &len])?)?;
        }
        _ => {
            let options = format!("cluster_size={}", rng.choose(&[512, 4096, 65536]));
            let len = (SECTORS * SECTOR).to_string();
            let mut args = vec!["create", "-q", "-f", format, "-o", &options];
            if has_base {
                fs::write(recorder.folder().join(BASE), stamps(0..SECTORS, 1))?;
                args.extend(["-b", BASE, "-F", "raw"]);
            }
            args.extend([IMAGE, &len]);
            foreign::img(recorder.folder(), &args)?;
        }
    }
    let from = recorder.sync()?;
    let server = serve(world, &image, format, &["--queues", rng.choose(&["1", "2"])])?;
    let writes = 30 + rng.below(90);
    let joins = world.does(rng, Kind::SecondWriter, 70).then(|| rng.below(writes));
    world.story.tell(format_args!(
        "  {format}, on a base: {has_base}: {writes} writes, one joins at {joins:?}"
    ));
    let before = std::mem::replace(history, History::new(0, Effect::Zeros));
    let ledger = Ledger { history: Mutex::new(before), log: recorder.log() };
    let worked = write(&server, &ledger, rng, writes, joins);
    worked.map_err(|error| Fault::new(Wrong::Failed, format!("{error:#}: {}", server.log())))?;
    *history = ledger.history.into_inner();
    let stopped = server.stop()?;
    if !stopped.status.success() {
        return Err(Fault::new(Wrong::Died, format!("{stopped:?}")));
    }
    Ok((recorder.stop()?, from))
}

fn serve(world: &World<'_>, image: &Path, format: &str, more: &[&str]) -> Result<Server> {
    Server::start("", |socket| {
        let mut serve = Command::new(world.binary);
        serve.arg("serve").arg("--nbd").arg(socket);
        if !is_volume(format) {
            serve.args(["--format", format]).args(world.image_args()).args(more).arg(image);
            return serve;
        }
        let folder = image.parent().unwrap_or(image);
        serve.args(["--volume", &volume_url(folder)]).args(more);
        if format == VOLUME_WITH_LOG {
            serve.arg("--log-device").arg(folder.join("log")).args(["--log-size", LOG_SIZE]);
        }
        serve
    })
}

fn is_volume(format: &str) -> bool {
    [VOLUME, VOLUME_WITH_LOG].contains(&format)
}

fn volume_url(folder: &Path) -> String {
    format!("file://{}/web", folder.join(STORE).display())
}

/// One writer makes `writes` writes, and another one joins it when as many as `joins` are done.
fn write(
    server: &Server,
    ledger: &Ledger<'_>,
    rng: &mut Rng,
    writes: u64,
    joins: Option<u64>,
) -> Result<()> {
    let mut guest = Guest::connect(server)?;
    let (mut first, mut second) = (Rng::new(rng.next_u64()), Rng::new(rng.next_u64()));
    let mut other = |guest: &mut Guest| -> Result<()> {
        let count = 1 + second.below(12);
        (0..count).try_for_each(|_| ledger.step(guest, &mut second, FIRST_SECTORS..SECTORS))
    };
    let alone = joins.unwrap_or(writes);
    let mut steps = |guest: &mut Guest, count: u64| {
        (0..count).try_for_each(|_| ledger.step(guest, &mut first, 0..FIRST_SECTORS))
    };
    steps(&mut guest, alone)?;
    std::thread::scope(|scope| -> Result<()> {
        let joined = joins.map(|_| {
            scope.spawn(|| {
                let mut guest = Guest::connect(server)?;
                other(&mut guest)?;
                guest.disconnect()
            })
        });
        let went = steps(&mut guest, writes - alone);
        let joined = joined.map_or(Ok(Ok(())), std::thread::ScopedJoinHandle::join);
        joined.map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        went
    })?;
    guest.disconnect()
}

impl Ledger<'_> {
    fn history(&self) -> parking_lot::MutexGuard<'_, History> {
        self.history.lock()
    }

    /// One write in `within`, and a flush, which are both answered.
    fn step(&self, guest: &mut Guest, rng: &mut Rng, within: Range<u64>) -> Result<()> {
        let room = if rng.percent(70) { HOT_SECTORS } else { within.end - within.start };
        let count = rng.choose(&[1, 8, 8, 8, 16, 128]);
        let at = within.start + rng.below(room - count) / 8 * 8;
        let sectors = at..at + count;
        let (offset, len) = (at * SECTOR, u32::try_from(count * SECTOR)?);
        let effect = if rng.percent(90) { Effect::Stamps } else { Effect::Zeros };
        let number = self.history().begin(&sectors, effect);
        let fua = rng.percent(10);
        let request = match effect {
            Effect::Stamps => {
                Request::Write { offset, bytes: stamps(sectors.clone(), number), fua }
            }
            _ => Request::Zero { offset, len, no_hole: rng.percent(50), fua },
        };
        let errno = guest.ask(&request)?.errno();
        ensure!(errno == 0, "{sectors:?}: a write fails with {errno}");
        let errno = if fua { 0 } else { guest.flush()? };
        ensure!(errno == 0, "a flush fails with {errno}");
        let log_len = self.log.metadata()?.len();
        self.history().settle(&sectors, number, log_len);
        Ok(())
    }
}

/// Cuts the power at some moments, and judges what that leaves.
fn cut(
    world: &World<'_>,
    rng: &mut Rng,
    folder: &Path,
    format: &str,
    history: &History,
    recording: Recording,
    from: u64,
) -> Outcome {
    let Recording { before, log } = recording;
    let places = power::places(&log, from, CUTS, rng)?;
    let states = Mount::memory(&folder.join("states"), STATES_MIB)?;
    let mut disk = Disk::new(before, &log);
    for (end, cut) in places {
        disk.advance(end)?;
        let survivors = disk.cut(cut, rng);
        let file = states.folder().join("state.img");
        disk.lay_down(&survivors, &file)?;
        world.counts.cuts.add();
        let judged = judge(world, &file, format, history, disk.log_len());
        if let Err(error) = judged {
            fs::copy(&file, folder.join("crash.img"))?;
            let what = format!("{cut:?} at entry {end} of {}: {error:#}", log.records().len());
            return Err(Fault::new(Wrong::LostFlushed, what));
        }
        fs::remove_file(&file)?;
    }
    Ok(())
}

fn judge(
    world: &World<'_>,
    file: &Path,
    format: &str,
    history: &History,
    log_len: u64,
) -> Result<()> {
    let ext4 = Mount::ext4(file, &file.with_extension("mounted")).context("the file system")?;
    let judge = || -> Result<()> {
        let image = ext4.folder().join(IMAGE);
        if format == "qcow2" {
            let name = text(&image).map_err(|fault| anyhow::anyhow!(fault.what))?;
            let (corruptions, leaks) =
                foreign::check(ext4.folder(), name).map_err(|fault| anyhow::anyhow!(fault.what))?;
            ensure!(corruptions == 0, "{corruptions} corruptions, {leaks} leaks");
        }
        // What a log of a volume has is seen by its next writer.
        let more: &[&str] = if is_volume(format) { &[] } else { &["--read-only"] };
        let server = serve(world, &image, format, more)?;
        let bytes = server.connect(&Wish::default())?.read_all()?;
        let stopped = server.stop()?;
        ensure!(stopped.status.success(), "mica ends with {stopped:?}");
        if is_volume(format) {
            let url = volume_url(ext4.folder());
            let said = world.mica_alone(&["volume", "check", "-q", &url]);
            let said = said.map_err(|fault| anyhow::anyhow!(fault.what))?;
            ensure!(said.status.success(), "{said}");
        }
        world.counts.reads.add();
        history.judge(&bytes, log_len)
    };
    let judged = judge();
    ext4.unmount();
    judged
}
