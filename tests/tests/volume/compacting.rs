//! Sparse extents that are written again, and who has the volume meanwhile: processes that are
//! killed, or stopped, in the middle of that.

use crate::kill::kill;
use mica_tests::guest::Guest;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, mica, nbd};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const PIECE: usize = 64 << 10;
const LEN: usize = 48 << 20;
/// Volumes that are tried until one is caught in the middle.
const TRIES: u32 = 10;

/// A volume of which every other piece was overwritten, and its URL.
fn make_sparse(store: &Store, name: &str) -> String {
    store.create(name, &LEN.to_string());
    let server = store.serve(name, &[]).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    for (round, step) in [(1, 1), (2, 2)] {
        for at in (0..LEN).step_by(PIECE * step) {
            assert_eq!(guest.write(at as u64, &[round; PIECE]).expect("written"), 0);
        }
        assert_eq!(guest.flush().expect("flushed"), 0);
    }
    drop(guest);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    store.volume(name)
}

fn is_as_made(store: &Store, name: &str) {
    let server = store.serve(name, &[]).expect("nobody has it");
    let bytes = server.connect(&nbd::Wish::default()).expect("served").read_all().expect("read");
    for (number, piece) in bytes.chunks(PIECE).enumerate() {
        let wanted = if number % 2 == 0 { 2 } else { 1 };
        assert!(piece.iter().all(|byte| *byte == wanted), "{name}: piece {number}");
    }
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

fn state(url: &str) -> Value {
    run(["info", "--output", "json", url]).json()["state"].clone()
}

fn collect(store: &Store, more: &[&str]) -> Value {
    run(["gc", "--output", "json", &store.url()].into_iter().chain(more.iter().copied())).json()
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).expect("it runs, or has just ended");
}

/// A collection that is stopped while it has a volume open, and the name of that.
fn stopped_in_the_middle(store: &Store) -> (Child, String) {
    for round in 0..TRIES {
        let name = format!("web{round}");
        let url = make_sparse(store, &name);
        let heads = store.folder().join("store/volumes").join(&name);
        let newest = || {
            let heads = fs::read_dir(&heads).expect("a folder");
            heads.map(|head| head.expect("read").file_name()).max()
        };
        let before = newest();
        let mut gc = Command::new(mica::binary());
        gc.args(["volume", "gc", "--output", "json", &store.url()]);
        let child = gc.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started");
        let is_there = || (newest() > before).then_some(());
        clock::poll(LIMIT, Duration::from_millis(1), is_there).expect("it is opened");
        signal(&child, Signal::STOP);
        if state(&url) == "open" {
            return (child, name);
        }
        signal(&child, Signal::CONT);
        assert!(child.wait_with_output().expect("it ends").status.success());
    }
    panic!("no collection was caught in the middle");
}

/// The story: a collection was killed, and each one after it left what that had open as it was.
#[test]
fn volume_whose_collection_was_killed_is_compacted_by_the_next_one() {
    let store = Store::new();
    let (mut child, name) = stopped_in_the_middle(&store);
    child.kill().expect("killed");
    child.wait().expect("ended");
    assert_eq!(state(&store.volume(&name)), "open");
    let would = collect(&store, &["--dry-run"]);
    assert!(would["sparse-bytes"].as_u64() > Some(0), "{would}");
    let finished = run(["gc", &store.url()]);
    assert_eq!((finished.code(), &*finished.stderr), (Some(0), ""), "nothing is lost: {finished}");
    assert_eq!(state(&store.volume(&name)), "closed");
    let left = collect(&store, &["--dry-run"]);
    assert!(left["live-bytes"].as_u64() >= Some(LEN as u64), "{left}");
    assert!(left["bytes"].as_u64() < Some(LEN as u64 * 5 / 4), "{left}");
    is_as_made(&store, &name);
}

/// A collection that lives goes on with what it has, however long it takes.
#[test]
fn collection_beside_another_does_not_take_a_volume_from_it() {
    let store = Store::new();
    let (child, name) = stopped_in_the_middle(&store);
    collect(&store, &[]);
    assert_eq!(state(&store.volume(&name)), "open");
    signal(&child, Signal::CONT);
    let ended = child.wait_with_output().expect("it ends");
    assert!(ended.status.success() && ended.stderr.is_empty(), "{ended:?}");
    let report: Value = serde_json::from_slice(&ended.stdout).expect("JSON");
    assert!(report["freed-bytes"].as_u64() > Some(LEN as u64 / 3), "{report}");
    assert_eq!(state(&store.volume(&name)), "closed");
    is_as_made(&store, &name);
}

/// Nor does it take one from a server that does not move.
#[test]
fn collection_takes_no_volume_from_a_server_that_is_stopped() {
    let store = Store::new();
    make_sparse(&store, "web");
    let server = store.serve("web", &[]).expect("served");
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    let mut guest = Guest::connect(&server).expect("served");
    kill_process(pid, Signal::STOP).expect("stopped");
    collect(&store, &[]);
    kill_process(pid, Signal::CONT).expect("goes on");
    assert_eq!(guest.write(0, &[2; PIECE]).expect("written"), 0);
    assert_eq!(guest.flush().expect("flushed"), 0);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    is_as_made(&store, "web");
}

/// What only its log may have is no collector's to give up.
#[test]
fn collection_leaves_the_volume_of_a_server_that_was_killed_with_a_log() {
    let store = Store::new();
    let url = make_sparse(&store, "web");
    let log = store.folder().join("log").display().to_string();
    let with_log = ["--log-device", &*log, "--log-size", "64M"];
    let server = store.serve("web", &with_log).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &[7; PIECE]).expect("written"), 0);
    kill(&server);
    drop(server);
    assert_eq!(collect(&store, &["--dry-run"])["sparse-bytes"], 0);
    collect(&store, &[]);
    assert_eq!(state(&url), "open");
    let server = store.serve("web", &with_log).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, PIECE as u64).expect("read"), [7; PIECE]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

/// The story: whoever went on with a volume whose collection or server was killed was told that
/// what only a log had was lost, where nobody had had one.
#[test]
fn only_of_a_log_that_there_was_it_is_said_what_it_had() {
    let store = Store::new();
    store.create("web", "16M");
    let server = store.serve("web", &[]).expect("served");
    kill(&server);
    drop(server);
    let taken = run(["snapshot", "-q", &store.volume("web"), "a"]);
    assert_eq!((taken.code(), &*taken.stderr), (Some(0), ""), "{taken}");
    let log = store.folder().join("log").display().to_string();
    let server = store.serve("web", &["--log-device", &log, "--log-size", "64M"]).expect("served");
    kill(&server);
    drop(server);
    let forced = store.serve("web", &["--force"]).expect("served");
    let said = forced.stop().expect("it stops").log;
    assert!(said.contains("what only a log on"), "{said}");
    let server = store.serve("web", &[]).expect("served");
    let forced = store.serve("web", &["--force"]).expect("served");
    let said = forced.stop().expect("it stops").log;
    assert!(said.contains("not in the store yet"), "{said}");
    drop(server);
}
