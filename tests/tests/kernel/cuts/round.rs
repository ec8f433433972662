//! A round: one recording of a guest at work, and states of the disk that power cuts leave of it.

use super::load::Load;
use super::shapes::{First, IMAGE, SECTORS, SNAPSHOT, Shape};
use anyhow::{Context, Result, ensure};
use mica_gen::Rng;
use mica_tests::guest::Guest;
use mica_tests::mounts::Mount;
use mica_tests::power::{self, Disk, History, Recorder, Recording, SECTOR, stamps};
use mica_tests::server::Server;
use mica_tests::write_log::Step;
use mica_tests::{mica, qemu, tools};
use std::fs::{self, File};
use std::path::Path;

/// States of a shape by default; in CI all shapes together take less than 25 seconds.
const CUTS_DEFAULT: usize = 20;
/// States of one recording; for more, another is made.
const ROUND_CUTS_MAX: usize = 100;
/// Requests of a guest, and how many guests run one after the other.
const REQUESTS: u64 = 160;
const GUESTS: usize = 2;
/// One state in this many is also judged by QEMU, and used further.
const DEEP_EVERY: usize = 4;
/// Memory for the states.
const STATES_MIB: u64 = 256;

/// Runs rounds on `shape`.
#[track_caller]
pub(super) fn all(shape: &Shape) {
    let needed = [tools::QEMU_IMG, tools::QEMU_STORAGE_DAEMON, tools::NBDFUSE, tools::MKE2FS];
    if !tools::present(&needed) {
        return;
    }
    let probe = tempfile::tempdir().expect("a folder");
    if let Some(lack) = power::lacks(probe.path()) {
        return tools::skip(&lack);
    }
    let told = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    let cuts = told("MICA_CUTS").map_or(CUTS_DEFAULT, |cuts| usize::try_from(cuts).expect("few"));
    let seeds = told("MICA_CUT_SEED").unwrap_or(1)..;
    for (seed, first) in seeds.zip((0..cuts).step_by(ROUND_CUTS_MAX)) {
        let cuts = (cuts - first).min(ROUND_CUTS_MAX);
        let run = std::panic::AssertUnwindSafe(|| round(shape, seed, cuts));
        let why = match std::panic::catch_unwind(run) {
            Ok(Ok(())) => continue,
            Ok(Err(error)) => format!("{error:#}"),
            // The panic hook has reported it already.
            Err(_) => "a panic, see above".to_owned(),
        };
        let thread = std::thread::current();
        let test = thread.name().unwrap_or_default();
        panic!(
            "{why}\n  MICA_CUT_SEED={seed} MICA_CUTS={cuts} cargo test -p mica-tests \
             --test kernel -- --exact {test}"
        );
    }
}

fn round(shape: &Shape, seed: u64, cuts: usize) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let worked = record_and_cut(shape, folder.path(), seed, cuts);
    // The disk that failed is worth looking at.
    worked.map_err(|error| error.context(format!("in {}", folder.keep().display())))
}

fn record_and_cut(shape: &Shape, dir: &Path, seed: u64, cuts: usize) -> Result<()> {
    let mut history = History::new(SECTORS, shape.first_effect());
    let (Recording { before, log }, from) =
        record(shape, dir, &mut history, &mut shape.rng(2 * seed))?;
    let mut rng = shape.rng(2 * seed + 1);
    let places = power::places(&log, from, cuts, &mut rng)?;
    let states = Mount::memory(&dir.join("states"), STATES_MIB)?;
    let mut disk = Disk::new(before, &log);
    for (number, (end, cut)) in places.into_iter().enumerate() {
        disk.advance(end)?;
        let survivors = disk.cut(cut, &mut rng);
        let file = states.folder().join(format!("{number}.img"));
        disk.lay_down(&survivors, &file)?;
        let deep = (number % DEEP_EVERY == 0).then_some(&mut rng);
        let judged = judge(shape, &file, |bytes| history.judge(bytes, disk.log_len()), deep);
        fs::remove_file(&file)?;
        if let Err(error) = judged {
            disk.lay_down(&survivors, &dir.join("crash.img"))?;
            let all = log.records().len();
            return Err(error.context(format!("state {number}: {cut:?} at entry {end} of {all}")));
        }
    }
    let all = log.records().len();
    let flushes = log.records().iter().filter(|record| record.step == Step::Flush).count();
    println!("seed {seed}: {cuts} states of {all} entries with {flushes} flushes, none is bad");
    Ok(())
}

/// Records guests at work. Also returns where in the log they begin.
fn record(
    shape: &Shape,
    dir: &Path,
    history: &mut History,
    rng: &mut Rng,
) -> Result<(Recording, u64)> {
    let recorder = Recorder::start(dir, rng.choose(&[1024, 4096]))?;
    shape.make(recorder.folder())?;
    let from = recorder.sync()?;
    let path = recorder.folder().join(IMAGE);
    let mut acknowledged = Vec::new();
    for number in 1..=GUESTS {
        let cache = rng.choose(&["writeback", "none"]);
        let aio = rng.choose(&["io_uring", "threads"]);
        let queues = rng.choose(&["1", "2"]);
        let options = ["--cache", cache, "--aio", aio, "--queues", queues];
        let server = Server::mica_writable(&path, shape.format, &options)?;
        let guest = Guest::connect(&server)?;
        let image = &File::open(&path)?;
        let log = recorder.log();
        let mut load = Load { guest, history, rng, log, image, acknowledged };
        let worked = load.flush().and_then(|()| load.run(REQUESTS));
        worked.with_context(|| format!("{options:?}; mica said: {}", server.log()))?;
        if number < GUESTS && shape.outlives_the_process() && load.rng.percent(50) {
            acknowledged = load.acknowledged;
            drop(server);
            continue;
        }
        load.guest.disconnect()?;
        acknowledged = Vec::new();
        let stopped = server.stop()?;
        ensure!(stopped.status.success(), "mica ends with {stopped:?}");
    }
    Ok((recorder.stop()?, from))
}

/// Judges the disk in `file`: `may_be` says what the guest's disk may hold. If `deep`, QEMU judges
/// it too, and the image is written.
fn judge(
    shape: &Shape,
    file: &Path,
    may_be: impl Fn(&[u8]) -> Result<()>,
    deep: Option<&mut Rng>,
) -> Result<()> {
    let ext4 = Mount::ext4(file, &file.with_extension("mounted")).context("the file system")?;
    let judge = || -> Result<()> {
        let dir = ext4.folder();
        let image = dir.join(IMAGE);
        if shape.format == "qcow2" {
            let said = mica::run(["check".as_ref(), image.as_os_str()]);
            ensure!(matches!(said.code(), Some(0 | 3)), "{said}");
        }
        let server = Server::mica(&image, shape.format, &[])?;
        let bytes = server.connect(&Default::default())?.read_all()?;
        let stopped = server.stop()?;
        ensure!(stopped.status.success(), "mica ends with {stopped:?}");
        may_be(&bytes)?;
        match deep {
            Some(rng) => lives_on(shape, dir, bytes, rng),
            None => Ok(()),
        }
    };
    let judged = judge();
    ext4.unmount();
    judged
}

/// QEMU finds the image in `dir` sound and reads `bytes`; then mica writes, and QEMU judges again.
fn lives_on(shape: &Shape, dir: &Path, mut bytes: Vec<u8>, rng: &mut Rng) -> Result<()> {
    same_for_qemu(shape, dir, &bytes).context("as QEMU finds it")?;
    let server = Server::mica_writable(&dir.join(IMAGE), shape.format, &[])?;
    let mut guest = Guest::connect(&server)?;
    for number in 1..=4 {
        let len = SECTOR * rng.choose(&[1, 8, 200]);
        let offset = SECTOR * rng.below(SECTORS - len / SECTOR);
        let (start, len) = (usize::try_from(offset)?, usize::try_from(len)?);
        bytes[start..start + len].fill(number);
        let errno = guest.write(offset, &bytes[start..start + len])?;
        ensure!(errno == 0, "a write after the power cut fails with {errno}");
    }
    ensure!(guest.flush()? == 0, "a flush after the power cut fails");
    let stopped = server.stop()?;
    ensure!(stopped.status.success(), "after the power cut mica ends with {stopped:?}");
    same_for_qemu(shape, dir, &bytes).context("after mica has written")
}

/// QEMU finds leaks at most, and reads `bytes`; and in a snapshot the initial content.
fn same_for_qemu(shape: &Shape, dir: &Path, bytes: &[u8]) -> Result<()> {
    if shape.format == "qcow2" {
        let said = qemu::img(dir, ["check", "-f", "qcow2", IMAGE]);
        ensure!(matches!(said.code(), Some(0 | 3)), "{said}");
    }
    let read = |more: &[&str]| -> Result<Vec<u8>> {
        // Beside the file system and not in it, which is small.
        let flat = dir.with_extension("flat");
        let mut args = vec!["convert", "-f", shape.format, "-O", "raw"];
        args.extend(more.iter().chain(&[IMAGE]));
        qemu::img(dir, args.into_iter().map(Path::new).chain([&*flat])).ok();
        let read = fs::read(&flat)?;
        fs::remove_file(&flat)?;
        Ok(read)
    };
    same(&read(&[])?, bytes)?;
    if shape.first == First::Snapshot {
        same(&read(&["-l", SNAPSHOT])?, &stamps(0..SECTORS, 1)).context("the snapshot")?;
    }
    Ok(())
}

fn same(read: &[u8], wanted: &[u8]) -> Result<()> {
    if read == wanted {
        return Ok(());
    }
    let differs = read.iter().zip(wanted).position(|(read, wanted)| read != wanted);
    ensure!(read.len() == wanted.len() && differs.is_none(), "QEMU reads others: {differs:?}");
    Ok(())
}
