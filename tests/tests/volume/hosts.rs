//! Hosts with networks of their own, around one bucket: they are cut off, paused, killed, and take
//! a volume from each other. Nothing that was promised is lost, and whoever has lost the volume
//! says so to its guest.

use mica_gen::Rng;
use mica_gen::linear::{self, Act, OPERATIONS_MAX, Operation};
use mica_tests::bucket::BucketServer;
use mica_tests::command::{self, Finished};
use mica_tests::flag::RaisedAtEnd;
use mica_tests::guest::{Answer, Guest};
use mica_tests::net_room::NetRoom;
use mica_tests::server::Server;
use mica_tests::{clock, mica, nbd, tools};
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const URL: &str = "s3://bucket/volumes/web";
const BLOCK: usize = 4096;
/// How long a host may take until it knows that it lost its volume.
const LEARN_LIMIT: Duration = Duration::from_secs(60);

/// Two hosts and the bucket that they share.
struct Room {
    // Its processes end before their networks.
    bucket: BucketServer,
    net: NetRoom,
    folder: tempfile::TempDir,
}

impl Room {
    /// `None` where there can be none, which is said.
    fn new() -> Option<Self> {
        let net = match NetRoom::new(2) {
            Ok(net) => net,
            Err(why) => {
                tools::skip(&format!("hosts have no networks of their own: {why}"));
                return None;
            }
        };
        let bucket = BucketServer::start_in(&net.switch(), net.address())?;
        bucket.make_bucket("bucket");
        let room = Self { bucket, net, folder: tempfile::tempdir().expect("a folder") };
        room.verb(0, &["create", "-q", URL, "16M"]).ok();
        Some(room)
    }

    fn verb(&self, host: usize, words: &[&str]) -> Finished {
        let mut verb = self.net.on(host);
        verb.arg(mica::binary()).arg("volume").args(words).envs(self.bucket.environment());
        command::finish(&mut verb)
    }

    fn serve(&self, host: usize, more: &[&str]) -> anyhow::Result<Server> {
        Server::start("", |socket| {
            let mut serve = self.net.on(host);
            serve.arg(mica::binary()).args(["serve", "--volume", URL]).args(more);
            serve.arg("--nbd").arg(socket).envs(self.bucket.environment());
            serve
        })
    }

    /// The options of a host that has a log.
    fn log(&self, host: usize) -> [String; 4] {
        let log = self.folder.path().join(format!("log-{host}")).display().to_string();
        ["--log-device".to_owned(), log, "--log-size".to_owned(), "64M".to_owned()]
    }

    fn serve_with_log(&self, host: usize, more: &[&str]) -> anyhow::Result<Server> {
        let log = self.log(host);
        let log: Vec<_> = log.iter().map(String::as_str).collect();
        self.serve(host, &[&log, more].concat())
    }
}

fn signal(server: &Server, signal: Signal) {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, signal).expect("it runs");
}

fn write(guest: &mut Guest, block: u64, byte: u8) -> u32 {
    guest.write(block * BLOCK as u64, &[byte; BLOCK]).expect("answered")
}

#[track_caller]
fn shows(server: &Server, blocks: &[(u64, u8)]) {
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    for (block, byte) in blocks {
        let found = client.read(block * BLOCK as u64, BLOCK as u64).expect("read");
        assert!(found.iter().all(|found| found == byte), "block {block}: {}", found[0]);
    }
}

/// The first error that a guest of a host gets that has lost its volume.
#[track_caller]
fn learns(server: &Server, guest: &mut Guest) -> u32 {
    let error = clock::poll(LEARN_LIMIT, Duration::from_millis(50), || {
        let errors = [write(guest, 9, 9), guest.flush().expect("answered")];
        errors.into_iter().find(|error| *error != 0)
    });
    error.unwrap_or_else(|| panic!("it never learns: {}", server.log()))
}

#[track_caller]
fn ends_well(server: Server) {
    let stopped = server.stop().expect("it stops");
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
}

#[test]
fn host_that_is_cut_off_goes_on_with_its_log_and_joins_again_without_loss() {
    let Some(room) = Room::new() else { return };
    let server = room.serve_with_log(0, &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!((write(&mut guest, 0, 1), guest.flush().expect("flushed")), (0, 0));
    room.net.cut_off(0);
    let begun = clock::now();
    for block in 1..200 {
        assert_eq!(write(&mut guest, block, 2), 0);
        assert_eq!(guest.flush().expect("it is in the log"), 0);
    }
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    clock::sleep(Duration::from_secs(2));
    assert_eq!(write(&mut guest, 200, 3), 0);
    drop(guest);
    room.net.join(0);
    ends_well(server);
    let other = room.serve(1, &[]).expect("it was closed");
    shows(&other, &[(0, 1), (1, 2), (199, 2), (200, 3)]);
    ends_well(other);
}

/// The volume is taken from a host that cannot know it, and comes back: what it acknowledged
/// meanwhile was in its log only, and it does not pretend otherwise.
#[test]
fn host_that_was_cut_off_and_overtaken_tells_its_guest_and_later_its_owner() {
    let Some(room) = Room::new() else { return };
    let server = room.serve_with_log(0, &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!((write(&mut guest, 0, 1), guest.flush().expect("flushed")), (0, 0));
    // It is in the store after a second.
    clock::sleep(Duration::from_secs(3));
    room.net.cut_off(0);
    assert_eq!((write(&mut guest, 1, 2), guest.flush().expect("in the log")), (0, 0));
    let refused = room.serve(1, &[]).map(drop).expect_err("it may be alive");
    assert!(format!("{refused:#}").contains("--force"), "{refused:#}");
    let other = room.serve(1, &["--force"]).expect("served");
    shows(&other, &[(0, 1), (1, 0)]);
    let mut others = Guest::connect(&other).expect("served");
    assert_eq!((write(&mut others, 2, 3), others.flush().expect("flushed")), (0, 0));
    room.net.join(0);
    assert_ne!(learns(&server, &mut guest), 0);
    assert!(server.log().contains("was taken over by"), "{}", server.log());
    drop(guest);
    let stopped = server.stop().expect("it stops");
    assert!(!stopped.log.contains("panicked"), "{stopped:?}");
    drop(others);
    ends_well(other);
    // What was only in the log is not replayed over what others did, and that is said.
    let again = room.serve_with_log(0, &[]).expect("served");
    shows(&again, &[(0, 1), (1, 0), (2, 3), (9, 0)]);
    assert!(again.log().contains("set aside"), "{}", again.log());
    ends_well(again);
}

#[test]
fn paused_writer_that_wakes_up_after_a_take_over_acknowledges_nothing() {
    let Some(room) = Room::new() else { return };
    let server = room.serve(0, &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!((write(&mut guest, 0, 1), guest.flush().expect("flushed")), (0, 0));
    assert_eq!(write(&mut guest, 1, 2), 0);
    signal(&server, Signal::STOP);
    let other = room.serve(1, &["--force"]).expect("served");
    let mut others = Guest::connect(&other).expect("served");
    assert_eq!((write(&mut others, 2, 3), others.flush().expect("flushed")), (0, 0));
    signal(&server, Signal::CONT);
    let flushed = guest.flush().expect("answered");
    let is_there = {
        let mut client = other.connect(&nbd::Wish::default()).expect("served");
        client.read(BLOCK as u64, BLOCK as u64).expect("read").iter().all(|byte| *byte == 2)
    };
    assert!(flushed != 0 || is_there, "a flush that was answered is lost");
    assert_ne!(learns(&server, &mut guest), 0);
    shows(&other, &[(0, 1), (2, 3), (9, 0)]);
    drop((guest, others));
    ends_well(other);
    signal(&server, Signal::KILL);
}

/// Blocks that clients share.
const BLOCKS: usize = 4;
const CLIENTS: u64 = 3;

/// What clients did while one server had the volume.
#[derive(Default)]
struct Era {
    blocks: [Vec<Operation>; BLOCKS],
    /// When the flushes were called that were answered.
    flushes: Vec<u64>,
}

/// A client, until its server is gone, refuses something, or it is over.
fn client(
    socket: &Path,
    era: &Mutex<Era>,
    (clock, values): (&AtomicU64, &AtomicU64),
    is_over: &AtomicBool,
    mut rng: Rng,
) {
    let Ok(connection) = nbd::Connection::open(socket, "", &nbd::Wish::default()) else { return };
    let mut guest = Guest::on(connection);
    let tick = || clock.fetch_add(1, Ordering::SeqCst);
    while !is_over.load(Ordering::Relaxed) {
        let block = usize::try_from(rng.below(BLOCKS as u64)).expect("small");
        if rng.below(6) == 0 {
            let called = tick();
            match guest.flush() {
                Ok(0) => era.lock().flushes.push(called),
                _ => return,
            }
            continue;
        }
        let is_write = rng.below(2) == 0;
        let value = if is_write { values.fetch_add(1, Ordering::SeqCst) + 1 } else { 0 };
        let act = if is_write { Act::Write(value) } else { Act::Read(0) };
        let at = {
            let mut era = era.lock();
            let operations = &mut era.blocks[block];
            if operations.len() == OPERATIONS_MAX {
                return;
            }
            operations.push(Operation { act, called: tick(), answered: None, is_owed: false });
            operations.len() - 1
        };
        let offset = (block * BLOCK) as u64;
        let act = match act {
            Act::Write(value) => {
                let bytes = value.to_le_bytes().repeat(BLOCK / 8);
                if guest.write(offset, &bytes).ok() != Some(0) {
                    return;
                }
                act
            }
            Act::Read(_) => match guest.read(offset, 4096) {
                Ok(Answer::Done(bytes)) => Act::Read(number(&bytes)),
                _ => return,
            },
        };
        let answered = Some(tick());
        let mut era = era.lock();
        let operation = &mut era.blocks[block][at];
        (operation.act, operation.answered) = (act, answered);
    }
}

fn number(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    assert!(words.iter().all(|word| *word == words[0]), "a block is torn");
    u64::from_le_bytes(words[0])
}

/// Clients write and read at once; the volume is taken by force from a host that is killed, paused
/// or cut off, again and again.
#[test]
fn what_clients_see_is_linearizable_over_take_overs() {
    let Some(room) = Room::new() else { return };
    let mut rng = Rng::new(7);
    let (clock, values) = (AtomicU64::new(1), AtomicU64::new(0));
    let mut eras: Vec<Mutex<Era>> = Vec::new();
    let mut server = room.serve(0, &[]).expect("served");
    for round in 0..4_u32 {
        let (host, next) = (round % 2, usize::try_from((round + 1) % 2).expect("small"));
        let era = Mutex::new(Era::default());
        let is_over = AtomicBool::new(false);
        let taken = std::thread::scope(|scope| {
            for number in 0..CLIENTS {
                let (era, is_over, clocks) = (&era, &is_over, (&clock, &values));
                let (socket, rng) = (server.socket(), Rng::for_part(round.into(), number));
                scope.spawn(move || client(&socket, era, clocks, is_over, rng));
            }
            let over = RaisedAtEnd(&is_over);
            clock::sleep(Duration::from_millis(100 + rng.below(200)));
            let fate = rng.below(3);
            match fate {
                0 => signal(&server, Signal::KILL),
                1 => signal(&server, Signal::STOP),
                _ => room.net.cut_off(host),
            }
            let taken = room.serve(next, &["--force"]).expect("served");
            match fate {
                0 => {}
                1 => signal(&server, Signal::CONT),
                _ => room.net.join(host),
            }
            clock::sleep(Duration::from_millis(300));
            drop(over);
            // It may be waiting for the store for a long time.
            if fate != 0 {
                signal(&server, Signal::KILL);
            }
            taken
        });
        eras.push(era);
        server = taken;
    }
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    for block in 0..BLOCKS {
        let seen = number(&client.read((block * BLOCK) as u64, BLOCK as u64).expect("read"));
        let known = eras.iter().map(|era| operations(&era.lock(), block));
        let left = linear::explain(&BTreeSet::from([0]), &known.collect::<Vec<_>>());
        assert!(left.contains(&seen), "block {block} has {seen}, not one of {left:?}");
    }
    let total: usize = eras.iter().map(|era| era.lock().blocks.concat().len()).sum();
    assert!(total > 40, "{total} operations");
    drop(client);
    ends_well(server);
    room.verb(0, &["check", "-q", URL]).ok();
}

/// What was done to a block; what was flushed is owed.
fn operations(era: &Era, block: usize) -> Vec<Operation> {
    let last_flush = era.flushes.iter().max().copied().unwrap_or(0);
    let owes = |operation: &Operation| {
        matches!(operation.act, Act::Write(_))
            && operation.answered.is_some_and(|at| at < last_flush)
    };
    let all = era.blocks[block].iter();
    all.map(|operation| Operation { is_owed: owes(operation), ..*operation }).collect()
}
