//! One disk that is backed up again and again, in full and then what has changed since, while
//! guests write all the time and its server is killed at any moment: oVirt's own run has 64 full
//! and 896 incremental backups, without kills.
//!
//! What changed is what `nbdinfo` finds in `qemu:dirty-bitmap:STATE`, and is copied over the copy
//! of the backup before. Each copy is compared with all that is exported, some by `qemu-img`, too,
//! and by [`history`] with what the disk can have been at one instant of the command that began it.
//!
//! `MICA_BACKUPS` is how many full backups there are; `MICA_BACKUP_SEED` is where random numbers
//! begin. What a kill meets depends on the speed of the machine, too.
//!
//! Of six short runs each, six found that parts which were zeroed are not told as changed
//! (`daemon/src/contexts.rs`, broken on purpose), and six that redo logs are ignored at the start
//! (`qcow2/src/redo/recover.rs`).

mod disk;
mod history;

use disk::{Disk, GUESTS};
use history::Tick;
use mica_tests::command::{self, Finished};
use mica_tests::{clock, judge, nbd, qemu, tools};
use mica_units::Rng;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Of a few backups, and of many.
const SIZES: [Size; 2] = [
    Size { bytes: 8 << 20, incremental: 2, killed_percent: 15 },
    Size { bytes: 128 << 20, incremental: 14, killed_percent: 8 },
];
/// So many are many.
const MANY: u64 = 4;
/// How often a backup may be killed before it is one that never ends.
const ATTEMPTS_MAX: u32 = 50;

struct Size {
    bytes: u64,
    /// Incremental backups after each full one.
    incremental: u64,
    /// In how many of a hundred steps of a backup the server is killed.
    killed_percent: u64,
}

/// What happened.
#[derive(Default, Debug)]
struct Counts {
    full: u64,
    incremental: u64,
    /// By the step that was under way.
    kills: [u64; Step::ALL.len()],
    readers: u64,
    dropped: u64,
    copied: u64,
}

/// What the server is asked for when it is killed.
#[derive(Clone, Copy, Debug)]
enum Step {
    Begin,
    Between,
    Read,
    Compare,
    End,
    Drop,
}

impl Step {
    const ALL: [Self; 6] =
        [Self::Begin, Self::Between, Self::Read, Self::Compare, Self::End, Self::Drop];
}

/// The one who makes the backups.
struct Operator<'a> {
    disk: &'a Disk,
    size: &'static Size,
    rng: Rng,
    counts: Counts,
    /// How long each step took, so that kills meet it anywhere.
    took: [Duration; Step::ALL.len()],
    /// When the server was last dead.
    died: Tick,
}

/// A backup that is under way.
struct Backup<'a> {
    state: &'a str,
    since: Option<&'a str>,
    /// When it was first begun.
    first: Tick,
    /// Between which moments its state was taken, once that is known.
    taken: Option<std::ops::Range<Tick>>,
}

#[test]
fn states_are_what_the_disk_was_under_load_and_kills() {
    let judges = [tools::QEMU_IMG, tools::NBDINFO, tools::NBDCOPY];
    if !tools::present(&judges) {
        return;
    }
    let variable = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
    };
    let (full, seed) = (variable("MICA_BACKUPS", 1), variable("MICA_BACKUP_SEED", 1));
    let size = &SIZES[usize::from(full >= MANY)];
    let start = clock::now();
    let disk = Disk::new(size.bytes);
    let mut operator = Operator::new(&disk, size, seed);
    std::thread::scope(|scope| {
        let _ending = disk.until_the_end();
        for number in 0..GUESTS {
            let disk = &disk;
            scope.spawn(move || disk.work(number, seed));
        }
        (0..full).for_each(|cycle| operator.cycle(cycle));
    });
    disk.judge("the disk at the end");
    disk.stop();
    let Operator { counts, took, .. } = operator;
    let Counts { full, incremental, kills, readers, dropped, copied } = counts;
    let (all, mib, requests) = (kills.iter().sum::<u64>(), copied >> 20, disk.history().requests());
    eprintln!(
        "{full} full and {incremental} incremental backups of {} MiB, {mib} MiB copied, under \
         {requests} requests of {GUESTS} guests; {all} kills of the server ({:?}: {kills:?}) and \
         {readers} of readers; {dropped} states dropped; {:?}, the last steps {took:?}; 0 wrong",
        size.bytes >> 20,
        Step::ALL,
        start.elapsed(),
    );
    check_all(disk.dir.path());
}

impl<'a> Operator<'a> {
    fn new(disk: &'a Disk, size: &'static Size, seed: u64) -> Self {
        let took = [Duration::from_millis(20); Step::ALL.len()];
        Self { disk, size, rng: Rng::new(seed), counts: Counts::default(), took, died: 0 }
    }

    /// A full backup and incremental ones; then only the last state is kept.
    fn cycle(&mut self, cycle: u64) {
        let incremental = self.size.incremental;
        let state = |night: u64| format!("c{cycle}n{night}");
        for night in 0..=incremental {
            let since = night.checked_sub(1).map(state);
            self.back_up(since.as_deref(), &state(night));
            match since {
                None => self.counts.full += 1,
                Some(_) => self.counts.incremental += 1,
            }
            if self.rng.percent(30) {
                self.drop_one();
            }
        }
        self.until_done(Step::Drop, |disk| disk.ctl(&["backup", "prune", "--keep", "1", "disk"]));
        assert_eq!(self.states(), [state(incremental)]);
        self.disk.judge(&format!("the disk after cycle {cycle}"));
    }

    /// Does a step, and at times kills the server meanwhile; it serves again afterwards. Returns
    /// whether it was killed, too.
    fn step<T>(&mut self, step: Step, work: impl FnOnce(&Disk) -> T) -> (T, bool) {
        let (disk, took) = (self.disk, self.took[step as usize]);
        let within = u64::try_from(took.as_micros()).expect("short") * 5 / 4;
        let moment =
            self.rng.percent(self.size.killed_percent).then(|| self.rng.below(within.max(1)));
        let start = clock::now();
        let done = std::thread::scope(|scope| {
            if let Some(moment) = moment.map(Duration::from_micros) {
                scope.spawn(move || {
                    clock::sleep(moment);
                    disk.kill();
                });
            }
            work(disk)
        });
        if moment.is_none() {
            self.took[step as usize] = start.elapsed();
            return (done, false);
        }
        self.counts.kills[step as usize] += 1;
        self.died = disk.now();
        disk.start();
        (done, true)
    }

    /// Asks the server for something until it does it, whatever becomes of the server.
    fn until_done(&mut self, step: Step, ask: impl Fn(&Disk) -> Finished) {
        for _ in 0..ATTEMPTS_MAX {
            let (answer, was_killed) = self.step(step, &ask);
            match was_killed {
                false => return drop(answer.ok()),
                true => assert!(!answer.stderr.contains("panicked"), "{answer}"),
            }
        }
        panic!("{step:?} was not done in {ATTEMPTS_MAX} attempts");
    }

    /// Makes one backup, and judges it.
    fn back_up(&mut self, since: Option<&str>, state: &str) {
        let mut backup = Backup { state, since, first: self.disk.now(), taken: None };
        let is_done = (0..ATTEMPTS_MAX).any(|_| self.attempt(&mut backup).is_some());
        assert!(is_done, "{state} was not done in {ATTEMPTS_MAX} attempts");
        let copy = fs::read(self.disk.path("copy.raw")).expect("it was compared");
        let taken = backup.taken.expect("it was begun");
        let judged = self.disk.history().judge(&copy, taken);
        judged.unwrap_or_else(|wrong| panic!("{state}: {wrong}"));
        if self.rng.percent(10) {
            let file = format!("disk@{state}.qcow2");
            let args = ["compare", "-U", "-f", "raw", "-F", "qcow2", "copy.raw", &file];
            qemu::img(self.disk.dir.path(), args).ok();
        }
    }

    /// Makes a backup, unless the server is killed over it.
    fn attempt(&mut self, backup: &mut Backup<'_>) -> Option<()> {
        self.begin(backup)?;
        // Nothing is asked of the server.
        let pause = Duration::from_micros(self.rng.below(20_000));
        self.survived(Step::Between, |_| {
            clock::sleep(pause);
            Ok(0)
        })?;
        if self.rng.percent(15) {
            self.kill_reader();
        }
        let since = backup.since;
        self.counts.copied += self.survived(Step::Read, |disk| copy(disk, since))?;
        let judge = if self.rng.percent(8) { same_by_qemu } else { same };
        self.survived(Step::Compare, |disk| judge(disk).map(|()| 0))?;
        let (ended, was_killed) = self.step(Step::End, |disk| disk.ctl(&["backup", "end", "disk"]));
        // If the server is killed right after it, it is done all the same.
        let is_done = ended.status.success();
        assert!(is_done || was_killed, "{ended}");
        is_done.then_some(())
    }

    /// Begins a backup, again if it was begun before.
    fn begin(&mut self, backup: &mut Backup<'_>) -> Option<()> {
        let (state, start) = (backup.state, self.disk.now());
        let socket = self.disk.path("backup");
        let mut verb = vec!["backup", "begin", "disk", "--as", state, "--nbd", &socket];
        verb.extend(backup.since.iter().flat_map(|since| ["--since", since]));
        let died = self.died;
        let ((begun, end), was_killed) =
            self.step(Step::Begin, |disk| (disk.ctl(&verb), disk.now()));
        if !begun.status.success() {
            assert!(was_killed, "{begun}");
            return None;
        }
        let begun = begun.json();
        let is_resumed = begun["resumed"] == true;
        // It was kept by an attempt that was killed, or by this one.
        assert!(is_resumed || backup.taken.is_none(), "its state is lost: {begun}");
        let first = backup.first;
        backup.taken.get_or_insert(if is_resumed { first..died } else { start..end });
        (!was_killed).then_some(())
    }

    /// Does a step that succeeds unless the server is killed; `None` if it was.
    fn survived(
        &mut self,
        step: Step,
        work: impl FnOnce(&Disk) -> Result<u64, String>,
    ) -> Option<u64> {
        let (done, was_killed) = self.step(step, work);
        match (done, was_killed) {
            (_, true) => None,
            (Ok(done), false) => Some(done),
            (Err(why), false) => panic!("{step:?}: {why}"),
        }
    }

    /// A reader of the export vanishes, which costs nothing.
    fn kill_reader(&mut self) {
        let mut reader = Command::new("nbdcopy");
        reader.args([&export(self.disk), "null:"]).stdin(Stdio::null()).stderr(Stdio::null());
        let mut reader = reader.spawn().expect("started");
        clock::sleep(Duration::from_micros(self.rng.below(30_000)));
        reader.kill().expect("ended");
        reader.wait().expect("ended");
        self.counts.readers += 1;
    }

    /// A state is kept no longer, any but the last.
    fn drop_one(&mut self) {
        let mut states = self.states();
        states.pop();
        let Some(older) = states.len().checked_sub(1) else { return };
        let at = usize::try_from(self.rng.below(older as u64 + 1)).expect("few");
        let state = states[at].clone();
        for _ in 0..ATTEMPTS_MAX {
            let drop = |disk: &Disk| disk.ctl(&["backup", "drop", "disk", &state]);
            let (dropped, was_killed) = self.step(Step::Drop, drop);
            assert!(was_killed || dropped.status.success(), "{dropped}");
            if !self.states().contains(&state) {
                self.counts.dropped += 1;
                return;
            }
            assert!(was_killed, "it is still there: {dropped}");
        }
        panic!("{state} was not dropped in {ATTEMPTS_MAX} attempts");
    }

    /// The states that are kept, from the oldest.
    fn states(&self) -> Vec<String> {
        let listed = self.disk.ctl(&["backup", "list", "disk"]).json();
        let states = listed["states"].as_array().expect("a list").iter();
        states.map(|state| state["state"].as_str().expect("a name").to_owned()).collect()
    }
}

/// Where a backup is exported.
fn export(disk: &Disk) -> String {
    format!("nbd+unix:///disk?socket={}", disk.path("backup"))
}

/// The copy is what is exported.
fn same(disk: &Disk) -> Result<(), String> {
    let export = disk.dir.path().join("backup");
    let shown = nbd::read_disk(&export).map_err(|error| format!("{error:#}"))?;
    let copied = fs::read(disk.path("copy.raw")).expect("it was copied");
    judge::same_bytes("the copy", &copied, &shown);
    Ok(())
}

/// The same by QEMU, which takes its time for a disk in many pieces.
fn same_by_qemu(disk: &Disk) -> Result<(), String> {
    let args = ["compare", "-f", "raw", "-F", "raw", "copy.raw", &export(disk)];
    let compared = qemu::img(disk.dir.path(), args);
    // Its other codes say that it could not read.
    assert_ne!(compared.code(), Some(1), "the copy is not what is exported: {compared}");
    succeeded(&compared)
}

fn succeeded(finished: &Finished) -> Result<(), String> {
    if finished.status.success() { Ok(()) } else { Err(finished.to_string()) }
}

/// Copies what is exported, or what of it has changed `since` a state. Returns how many bytes.
fn copy(disk: &Disk, since: Option<&str>) -> Result<u64, String> {
    let (uri, target) = (export(disk), disk.path("copy.raw"));
    let Some(since) = since else {
        // A copy of before is of another chain of backups.
        let _ = fs::remove_file(&target);
        succeeded(&command::run("nbdcopy", [&*uri, &*target]))?;
        return fs::metadata(target).map(|copy| copy.len()).map_err(|error| error.to_string());
    };
    let map = format!("--map=qemu:dirty-bitmap:{since}");
    let told = command::run("nbdinfo", ["--json", &map, &uri]);
    succeeded(&told)?;
    let told = told.json();
    let export = disk.dir.path().join("backup");
    let client = nbd::Connection::open(&export, "disk", &nbd::Wish::default());
    let mut client = client.map_err(|error| format!("{error:#}"))?;
    let target = File::options().write(true).open(target).expect("the full backup is there");
    let (mut copied, mut end) = (0, 0);
    for part in told.as_array().expect("a list") {
        let number = |key: &str| part[key].as_u64().expect("a number");
        let (at, len) = (number("offset"), number("length"));
        assert_eq!(at, end, "all of the disk is told of: {told}");
        end = at + len;
        if number("type") == 1 {
            let bytes = client.read(at, len).map_err(|error| format!("{error:#}"))?;
            target.write_all_at(&bytes, at).expect("written");
            copied += len;
        }
    }
    assert_eq!(end, client.len, "all of the disk is told of: {told}");
    Ok(copied)
}

/// QEMU finds nothing wrong with any layer of the disk in `folder`. Files of states that are no
/// layers any more are told: a server that is killed at the end of a drop leaves one.
fn check_all(folder: &Path) {
    let info = ["info", "--backing-chain", "--output", "json", "disk.qcow2"];
    let chain = qemu::img(folder, info).json();
    let name = |layer: &serde_json::Value| layer["filename"].as_str().expect("a name").to_owned();
    let layers: Vec<_> = chain.as_array().expect("a list").iter().map(name).collect();
    for layer in &layers {
        // Clusters that a killed server had taken may be lost.
        const LEAKS_ONLY: i32 = 3;
        let checked = qemu::img(folder, ["check", layer]);
        assert!(matches!(checked.code(), Some(0 | LEAKS_ONLY)), "{checked:?}");
    }
    for entry in fs::read_dir(folder).expect("a folder") {
        let name = entry.expect("an entry").file_name().into_string().expect("text");
        assert!(!name.ends_with(".new"), "{name}");
        if name.ends_with(".qcow2") && !layers.iter().any(|layer| layer.ends_with(&name)) {
            eprintln!("left behind by a kill: {name}");
        }
    }
}
