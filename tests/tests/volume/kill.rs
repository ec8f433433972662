//! A server of a volume is killed, and started again on the same machine: it serves, and what was
//! durable is there.
//!
//! `MICA_KILLS` says how often.

use mica_gen::Rng;
use mica_tests::guest::{Answer, Guest, Request};
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, command, mica, nbd, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::collections::HashMap;
use std::process::Command;
use std::time::Duration;

const KILLS_DEFAULT: u64 = 3;
const BLOCK: usize = 4096;
const DISK_BYTES: u64 = 64 << 20;
/// Requests in flight at once.
const BURST: u64 = 16;

fn kills() -> u64 {
    let told = std::env::var("MICA_KILLS").ok().and_then(|kills| kills.parse().ok());
    told.unwrap_or(KILLS_DEFAULT)
}

pub(crate) fn kill(server: &Server) {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
}

/// What may be in a block.
#[derive(Clone, Copy, Default)]
struct Stamp {
    /// The oldest write that may be there; 0 is nothing.
    least: u64,
    /// The newest that was acknowledged, and the newest that was sent.
    acknowledged: u64,
    sent: u64,
}

/// Guests, one after the other, and what they know of their disk.
struct Guests {
    blocks: Vec<Stamp>,
    sequence: u64,
    rng: Rng,
}

/// A block filled with its number and the sequence number of its write.
fn stamped(block: u64, sequence: u64) -> Vec<u8> {
    let words = [block.to_le_bytes(), sequence.to_le_bytes()].concat();
    words.iter().copied().cycle().take(BLOCK).collect()
}

impl Guests {
    fn new(seed: u64) -> Self {
        let count = usize::try_from(DISK_BYTES).expect("small") / BLOCK;
        Self { blocks: vec![Stamp::default(); count], sequence: 0, rng: Rng::new(seed) }
    }

    /// Writes and flushes until the server is gone.
    fn work(&mut self, server: &Server) {
        let Ok(mut guest) = Guest::connect(server) else { return };
        while self.burst(&mut guest).is_ok() {}
    }

    fn burst(&mut self, guest: &mut Guest) -> anyhow::Result<()> {
        let (mut under_way, part) = (HashMap::new(), self.blocks.len() as u64 / BURST);
        for number in 0..BURST {
            // Each request has its own part of the disk.
            let first = number * part + self.rng.below(part - 40);
            let range = first..first + self.rng.choose(&[1, 1, 2, 8, 39]);
            self.sequence += 1;
            let bytes = range.clone().flat_map(|block| stamped(block, self.sequence)).collect();
            range.clone().for_each(|block| self.block(block).sent = self.sequence);
            let write = Request::Write { offset: first * BLOCK as u64, bytes, fua: false };
            under_way.insert(guest.send(&write)?, (range, self.sequence));
        }
        while !under_way.is_empty() {
            let (cookie, answer) = guest.receive()?;
            assert_eq!(answer, Answer::Done(Vec::new()));
            let (range, sequence) = under_way.remove(&cookie).expect("asked");
            range.for_each(|block| self.block(block).acknowledged = sequence);
        }
        if self.rng.percent(40) && guest.flush()? == 0 {
            self.blocks.iter_mut().for_each(|stamp| stamp.least = stamp.acknowledged);
        }
        Ok(())
    }

    fn block(&mut self, number: u64) -> &mut Stamp {
        &mut self.blocks[usize::try_from(number).expect("small")]
    }

    /// Compares the disk with what may be there, and from then on requires what it found.
    #[track_caller]
    fn judge(&mut self, disk: &[u8], what: &str) {
        for ((number, stamp), now) in (0..).zip(&mut self.blocks).zip(disk.chunks(BLOCK)) {
            let (words, _) = now.as_chunks::<8>();
            let [_, found] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
            let is_whole = found == 0 && now.iter().all(|byte| *byte == 0);
            assert!(is_whole || now == stamped(number, found), "{what}: block {number} is foreign");
            let wanted = stamp.least..=stamp.sent;
            assert!(wanted.contains(&found), "{what}: block {number}: {found}, not {wanted:?}");
            *stamp = Stamp { least: found, acknowledged: found, sent: found };
        }
    }
}

/// What has to be there after a kill.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Promise {
    Flushed,
    Acknowledged,
}

fn survives(store: &Store, more: &[&str], promise: Promise) {
    let seed = std::env::var("MICA_KILL_SEED").ok().map_or(3, |text| text.parse().expect("one"));
    store.create("web", &DISK_BYTES.to_string());
    let mut guests = Guests::new(seed);
    for round in 0..kills() {
        let what = format!("{more:?}, kill {round}, MICA_KILL_SEED={seed}");
        let server = store.serve("web", more).expect("it serves again, without --force");
        let life = Duration::from_micros(500 + guests.rng.below(400_000));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                clock::sleep(life);
                kill(&server);
            });
            guests.work(&server);
        });
        if promise == Promise::Acknowledged {
            guests.blocks.iter_mut().for_each(|stamp| stamp.least = stamp.acknowledged);
        }
        let again = store.serve("web", more).expect("it serves again, without --force");
        let mut client = again.connect(&nbd::Wish::default()).expect("served");
        guests.judge(&client.read_all().expect("read"), &what);
        let stopped = again.stop().expect("it stops");
        assert_eq!(stopped.status.code(), Some(0), "{what}: {stopped:?}");
        let checked = run(["check", &store.volume("web"), "--output", "json"]).json();
        assert_eq!(checked[0]["damaged-count"], 0, "{what}");
    }
}

#[test]
fn what_was_flushed_before_a_kill_is_there_when_it_is_served_again() {
    survives(&Store::new(), &[], Promise::Flushed);
}

/// With a log nothing is lost that was acknowledged.
#[test]
fn what_was_acknowledged_before_a_kill_is_there_with_the_log_of_the_server() {
    let store = Store::new();
    let log = store.folder().join("log").display().to_string();
    survives(&store, &["--log-device", &log, "--log-size", "64M"], Promise::Acknowledged);
}

/// The story: the server is killed, and somebody starts it without its log.
#[test]
fn volume_is_not_served_without_the_log_that_may_have_more_than_its_store() {
    let store = Store::new();
    store.create("web", "64M");
    let log = store.folder().join("log").display().to_string();
    let with_log = ["--log-device", &*log, "--log-size", "64M"];
    let server = store.serve("web", &with_log).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &[5; BLOCK]).expect("written"), 0);
    assert_eq!(guest.flush().expect("flushed"), 0);
    kill(&server);
    drop(server);
    let refused = format!("{:#}", store.serve("web", &[]).map(drop).expect_err("not so"));
    assert!(refused.contains(&format!("--log-device {log}")), "{refused}");
    let snapshot = run(["snapshot", &store.volume("web"), "a"]).refusal();
    assert!(snapshot.contains(&format!("--log-device {log}")), "{snapshot}");
    let server = store.serve("web", &with_log).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, BLOCK as u64).expect("read"), [5; BLOCK]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    // It was closed: nobody needs the log any more.
    let server = store.serve("web", &[]).expect("served");
    kill(&server);
    drop(server);
    let other = store.folder().join("other").display().to_string();
    let server = store.serve("web", &["--log-device", &other, "--log-size", "64M"]);
    kill(&server.expect("served"));
    let forced = store.serve("web", &["--force"]).expect("what is only in the log is given up");
    assert_eq!(forced.stop().expect("it stops").status.code(), Some(0));
}

/// The story: a folder that hosts share was read on one of them, and nothing said that what was
/// acknowledged on the other might only be in its log.
#[test]
fn reader_of_a_volume_is_told_of_the_log_that_may_have_more_wherever_that_is() {
    let store = Store::new();
    let url = store.volume("web");
    store.create("web", "64M");
    let log = store.folder().join("log").display().to_string();
    let with_log = ["--log-device", &*log, "--log-size", "64M"];
    let server = store.serve("web", &with_log).expect("served");
    let told = |when: &str| {
        let read = run(["diff", &url, &url]);
        assert_eq!(read.code(), Some(0), "{when}: {read}");
        assert!(read.stderr.contains(&log), "{when}: {read}");
        assert!(read.stderr.contains("may be older"), "{when}: {read}");
    };
    told("it is served here");
    kill(&server);
    drop(server);
    let here = run(["diff", &url, &url]).refusal();
    assert!(here.contains("was not closed"), "{here}");
    // As if another machine had written it.
    let lock = store.folder().join("store/.locks/web");
    let note = std::fs::read_to_string(&lock).expect("the file of the lock");
    let elsewhere = note.lines().map(|line| match line.split_once(' ') {
        Some((key @ ("machine" | "boot"), _)) => format!("{key} 0123-4567\n"),
        _ => format!("{line}\n"),
    });
    std::fs::write(&lock, elsewhere.collect::<String>()).expect("written");
    told("it was served on another machine");
}

/// The story: the server of a gold image was killed, and nobody could clone that until somebody
/// served it again.
#[test]
fn volume_whose_server_was_killed_can_be_cloned() {
    let store = Store::new();
    let (url, clone) = (store.volume("gold"), store.volume("clone"));
    store.create("gold", "64M");
    let server = store.serve("gold", &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &[5; BLOCK]).expect("written"), 0);
    assert_eq!(guest.flush().expect("flushed"), 0);
    let alive = run(["clone", &url, &clone]).refusal();
    assert!(alive.contains("take a snapshot"), "{alive}");
    kill(&server);
    drop(server);
    run(["clone", &url, &clone]).ok();
    let server = store.serve("clone", &[]).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, BLOCK as u64).expect("read"), [5; BLOCK]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

/// fio verifies what it wrote, in the same run and in the next server.
#[test]
fn fio_finds_what_it_wrote() {
    if !tools::present(&[tools::FIO]) {
        return;
    }
    let store = Store::new();
    store.create("web", "1G");
    let fio = |server: &Server, rw: &str, more: &[&str]| {
        let mut fio = Command::new("fio");
        fio.current_dir(store.folder());
        fio.args(["--name=v", "--ioengine=nbd", "--bsrange=4k-64k", "--size=64M", "--iodepth=8"]);
        fio.args(["--verify=crc32c", "--randseed=5", &format!("--rw={rw}")]);
        fio.arg(format!("--uri={}", server.uri())).args(more);
        command::finish(&mut fio).ok();
    };
    let server = store.serve("web", &[]).expect("served");
    fio(&server, "randwrite", &["--fsync=16"]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    let server = store.serve("web", &[]).expect("served");
    fio(&server, "randread", &["--verify_only=1"]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

/// The story: the first server hangs, somebody starts a second one; then the first is killed.
#[test]
fn second_server_is_refused_while_the_first_lives_and_serves_once_it_is_dead() {
    let store = Store::new();
    store.create("web", "64M");
    let first = store.serve("web", &[]).expect("served");
    let mut serve = Command::new(mica::binary());
    serve.args(["serve", "--volume", &store.volume("web"), "--nbd"]);
    serve.arg(store.folder().join("second"));
    let refused = command::finish(&mut serve).refusal();
    assert!(refused.contains(&format!("process {}", first.pid())), "{refused}");
    kill(&first);
    let second = store.serve("web", &[]).expect("served");
    assert_eq!(second.stop().expect("it stops").status.code(), Some(0));
}
