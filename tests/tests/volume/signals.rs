//! Verbs that a signal ends: nothing is left of what they made, and they can be run again.

use crate::collection::overwritten;
use mica_gen::Rng;
use mica_tests::command::{self, ending_signals as signals};
use mica_tests::volume::{Store, run};
use mica_tests::{clock, mica};
use rustix::fs::{FlockOperation, OFlags, fcntl_getfl, fcntl_setfl, flock};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);
const LEN: usize = 24 << 20;

fn start(words: &[&str]) -> Child {
    let mut verb = Command::new(mica::binary());
    verb.arg("volume").args(words).stdin(Stdio::piped());
    verb.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("started")
}

#[track_caller]
fn wait_for(path: &Path) {
    let is_there = || path.exists().then_some(());
    clock::poll(LIMIT, Duration::from_millis(1), is_there).expect("it is made");
}

#[track_caller]
fn wait_for_any(paths: &[&Path]) {
    let is_there = || paths.iter().any(|path| path.exists()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(1), is_there).expect("one is made");
}

/// Returns once it is stopped, or has ended.
#[track_caller]
fn stop(child: &Child) {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP).expect("it is there");
    let states = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    waitid(WaitId::Pid(pid), states).expect("a child");
}

/// Whether somebody has the file at `path` locked; there need not be one.
fn is_locked(path: &Path) -> bool {
    let lock = |file: fs::File| flock(&file, FlockOperation::NonBlockingLockExclusive);
    fs::File::open(path).is_ok_and(|file| lock(file) == Err(Errno::WOULDBLOCK))
}

#[track_caller]
fn end(child: Child, signal: Signal) -> Output {
    kill_process(Pid::from_child(&child), signal).expect("it runs");
    let ended = child.wait_with_output().expect("it ends");
    assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{ended:?}");
    assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
    ended
}

/// The volumes of a store, and what state they are in.
fn states(store: &Store) -> Vec<(String, String)> {
    let all = run(["list", "--output", "json", &store.url()]).json();
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    let of = |one: &Value| (text(&one["name"]), text(&one["state"]));
    all.as_array().expect("an array").iter().map(of).collect()
}

/// An image that cannot be made smaller.
fn source(store: &Store) -> String {
    let mut rng = Rng::new(13);
    let words = (0..LEN / 8).flat_map(|_| rng.next_u64().to_le_bytes());
    let file = store.folder().join("source.raw");
    fs::write(&file, words.collect::<Vec<_>>()).expect("written");
    file.display().to_string()
}

fn importing(image: &str, url: &str) -> Child {
    start(&["import", "-q", "-f", "raw", "--inject", "delay=300ms", image, url])
}

/// The head with the highest number of a volume.
fn last_head(store: &Store, name: &str) -> PathBuf {
    let heads = fs::read_dir(store.folder().join("store/volumes").join(name)).expect("a folder");
    heads.map(|head| head.expect("read").path()).max().expect("heads")
}

fn same(store: &Store, url: &str, image: &str) {
    let copy = store.folder().join("copy.raw").display().to_string();
    run(["export", "-q", "-O", "raw", url, &copy]).ok();
    assert!(fs::read(&copy).expect("read") == fs::read(image).expect("read"));
    fs::remove_file(copy).expect("removed");
}

/// The stories: the volume stayed as a part, its name could not be used, and nobody said why. And
/// it was closed before it was deleted: in between, a part looked like all of it.
#[test]
fn import_that_a_signal_ends_leaves_no_volume() {
    let store = Store::new();
    store.create("other", "16M");
    let image = source(&store);
    let mut rng = Rng::new(14);
    for (round, signal) in signals().into_iter().enumerate() {
        // What is left of one that was deleted has its name until it is collected.
        let name = format!("web{round}");
        let (url, folder) = (store.volume(&name), store.folder().join("store/volumes").join(&name));
        let child = importing(&image, &url);
        wait_for(&folder);
        clock::sleep(Duration::from_micros(rng.below(500_000)));
        kill_process(Pid::from_child(&child), signal).expect("it runs, or has just ended");
        let ended = child.wait_with_output().expect("it ends");
        if ended.status.success() {
            // This test was slow.
            same(&store, &url, &image);
            run(["delete", "-q", &url]).ok();
            continue;
        }
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{ended:?}");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
        assert_eq!(states(&store), [("other".to_owned(), "closed".to_owned())]);
        run(["check", "-q", &store.url()]).ok();
        // As if it had been killed before it put its last head.
        fs::remove_file(last_head(&store, &name)).expect("removed");
        let refused = run(["export", "-q", "-O", "raw", &url, "/dev/null"]).refusal();
        assert!(refused.contains("is incomplete"), "{refused}");
        run(["delete", "-q", "--force", &url]).ok();
    }
    let url = store.volume("web0");
    run(["import", "-q", "-f", "raw", &image, &url]).ok();
    run(["gc", "-q", &store.url()]).ok();
    same(&store, &url, &image);
}

/// The story: a terminal that is closed sends SIGHUP, and its shell another one. The second ended
/// the import before its volume was deleted.
#[test]
fn signals_that_come_together_are_one() {
    let store = Store::new();
    let (image, signals) = (source(&store), signals());
    for round in 0..3 {
        let name = format!("web{round}");
        let child = importing(&image, &store.volume(&name));
        wait_for(&store.folder().join("store/volumes").join(&name));
        for signal in &signals {
            // One that has ended by the first is not waited for yet, and so it is found.
            kill_process(Pid::from_child(&child), *signal).expect("it runs, or has just ended");
        }
        let ended = child.wait_with_output().expect("it ends");
        if ended.status.success() {
            run(["delete", "-q", &store.volume(&name)]).ok();
        }
        assert_eq!(states(&store), [], "{round}: {ended:?}");
    }
}

/// The story: the import failed, and deleted what had its name by then.
#[test]
fn import_whose_volume_was_deleted_leaves_another_of_its_name() {
    let store = Store::new();
    let (image, url) = (source(&store), store.volume("web"));
    let child = importing(&image, &url);
    wait_for(&store.folder().join("store/volumes/web"));
    run(["delete", "-q", "--force", &url]).ok();
    store.create("web", "16M");
    let ended = child.wait_with_output().expect("it ends");
    assert!(!ended.status.success(), "{ended:?}");
    assert_eq!(states(&store), [("web".to_owned(), "closed".to_owned())]);
    assert_eq!(run(["info", "--output", "json", &url]).json()["virtual-size"], 16 << 20);
}

/// The story: a loop of a shell went on after Ctrl-C, as the verb that it hit was done and ended as
/// if nothing had come.
#[test]
fn signal_that_comes_when_a_verb_is_done_ends_it_nevertheless() {
    let store = Store::new();
    store.create("web", "16M");
    let (url, all, image) = (store.volume("web"), store.url(), source(&store));
    let names = ["clone", "image", "copy"];
    let [clone, imported, copy] = names.map(|name| store.volume(name));
    run(["snapshot", "-q", &url, "one"]).ok();
    let stream = store.folder().join("stream").display().to_string();
    run(["send", "-q", &format!("{url}@one"), &stream]).ok();
    let verbs: [&[&str]; 4] = [
        &["clone", &url, &clone],
        &["import", "-f", "raw", &image, &imported],
        &["receive", &copy, &stream],
        &["gc", &all],
    ];
    let signal = signals()[0];
    for words in verbs {
        // It waits until somebody reads what it did.
        let (mut reader, mut writer) = std::io::pipe().expect("a pipe");
        let flags = fcntl_getfl(&writer).expect("flags");
        fcntl_setfl(&writer, flags | OFlags::NONBLOCK).expect("set");
        while writer.write(&[0]).is_ok() {}
        fcntl_setfl(&writer, flags).expect("set");
        let mut verb = Command::new(mica::binary());
        verb.arg("volume").args(words).stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
        let child = verb.spawn().expect("started");
        drop(verb);
        clock::sleep(Duration::from_secs(2));
        kill_process(Pid::from_child(&child), signal).expect("it waits");
        clock::sleep(Duration::from_millis(500));
        std::io::copy(&mut reader, &mut std::io::sink()).expect("read");
        let ended = child.wait_with_output().expect("it ends");
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{words:?}: {ended:?}");
    }
}

/// A stream that is there is whole, also if the signal came when it had its name already.
#[test]
fn send_into_a_file_that_a_signal_ends_leaves_none() {
    let store = Store::new();
    let (image, url) = (source(&store), store.volume("web"));
    run(["import", "-q", "-f", "raw", &image, &url]).ok();
    let stream = store.folder().join("stream");
    let unfinished = store.folder().join(".stream.mica-unfinished");
    let (name, snapshot) = (stream.display().to_string(), format!("{url}@source.raw"));
    for (round, signal) in signals().into_iter().enumerate() {
        let child = start(&["send", "-q", &snapshot, &name]);
        wait_for_any(&[&unfinished, &stream]);
        kill_process(Pid::from_child(&child), signal).expect("it runs, or has just ended");
        let ended = child.wait_with_output().expect("it ends");
        assert!(stream.exists() || !ended.status.success(), "{ended:?}");
        assert!(!unfinished.exists(), "{ended:?}");
        if stream.exists() {
            run(["receive", "-q", &store.volume(&format!("copy{round}")), &name]).ok();
            fs::remove_file(&stream).expect("removed");
        }
    }
    run(["send", "-q", &snapshot, &name]).ok();
    let refused = run(["send", "-q", &snapshot, &name]).refusal();
    assert!(refused.contains("exists already"), "{refused}");
    run(["receive", "-q", &store.volume("copy"), &name]).ok();
}

/// The story: a part of a stream had the name of the whole, and the next one was refused.
#[test]
fn send_into_a_file_that_is_killed_leaves_nothing_of_that_name() {
    let store = Store::new();
    let (image, url) = (source(&store), store.volume("web"));
    run(["import", "-q", "-f", "raw", &image, &url]).ok();
    let (stream, unfinished) =
        (store.folder().join("stream"), store.folder().join(".stream.mica-unfinished"));
    let (name, snapshot) = (stream.display().to_string(), format!("{url}@source.raw"));
    // It may be done before it is stopped, or not have locked the file yet.
    let mut child = loop {
        let child = start(&["send", "-q", &snapshot, &name]);
        wait_for_any(&[&unfinished, &stream]);
        stop(&child);
        if is_locked(&unfinished) && !stream.exists() {
            break child;
        }
        kill_process(Pid::from_child(&child), Signal::CONT).expect("it is there");
        child.wait_with_output().expect("it ends");
        fs::remove_file(&stream).expect("removed");
    };
    let second = run(["send", "-q", &snapshot, &name]).refusal();
    assert!(second.contains("another process"), "{second}");
    child.kill().expect("it is there");
    child.wait().expect("it ends");
    assert!(!stream.exists() && unfinished.exists());
    run(["send", "-q", &snapshot, &name]).ok();
    assert!(!unfinished.exists());
    run(["receive", "-q", &store.volume("copy"), &name]).ok();
    same(&store, &store.volume("copy"), &image);
}

/// It waits for more of the stream when the signal comes: of a new volume, and of one that is.
#[test]
fn receive_that_a_signal_ends_leaves_what_there_was() {
    let store = Store::new();
    let (image, url) = (source(&store), store.volume("web"));
    run(["import", "-q", "-f", "raw", &image, &url]).ok();
    run(["snapshot", "-q", &url, "two"]).ok();
    let file = |name: &str| store.folder().join(name).display().to_string();
    let (first, second) = (file("first"), file("second"));
    run(["send", "-q", &format!("{url}@source.raw"), &first]).ok();
    // Written again with other bytes.
    let server = store.serve("web", &[]).expect("served");
    let mut guest = mica_tests::guest::Guest::connect(&server).expect("a guest");
    assert_eq!(guest.write(0, &vec![3; 8 << 20]).expect("written"), 0);
    drop(guest);
    server.stop().expect("stopped");
    run(["snapshot", "-q", &url, "three"]).ok();
    run(["send", "-q", "--since", "source.raw", &format!("{url}@three"), &second]).ok();
    let copy = store.volume("copy");
    let closed = |name: &str| (name.to_owned(), "closed".to_owned());
    let interrupted = |stream: &str, signal| {
        let stream = fs::read(stream).expect("read");
        let mut child = start(&["receive", "-q", &copy]);
        let mut input = child.stdin.take().expect("a pipe");
        input.write_all(&stream[..stream.len() / 2]).expect("taken");
        wait_for(&store.folder().join("store/volumes/copy"));
        end(child, signal);
        drop(input);
        run(["check", "-q", &store.url()]).ok();
    };
    for signal in signals() {
        interrupted(&first, signal);
        assert_eq!(states(&store), [closed("web")]);
    }
    run(["receive", "-q", &copy, &first]).ok();
    let labels = || {
        let all = run(["snapshots", "--output", "json", &copy]).json();
        let all = all.as_array().expect("an array").clone();
        all.iter().map(|one| one["label"].as_str().expect("text").to_owned()).collect::<Vec<_>>()
    };
    for signal in signals() {
        interrupted(&second, signal);
        assert_eq!(states(&store), [closed("copy"), closed("web")]);
        assert_eq!(labels(), ["source.raw"]);
    }
    run(["receive", "-q", &copy, &second]).ok();
    assert_eq!(labels(), ["source.raw", "three"]);
    let [here, there] = [("web@three", "here.raw"), ("copy@three", "there.raw")].map(|(of, to)| {
        run(["export", "-q", "-O", "raw", &store.volume(of), &file(to)]).ok();
        fs::read(file(to)).expect("read")
    });
    assert!(here == there);
}

/// A clone is there whole or not at all, and what it could not be made of is no obstacle.
#[test]
fn clone_that_a_signal_ends_is_whole_or_not_there() {
    let store = Store::new();
    store.create("web", "16M");
    let (url, clone) = (store.volume("web"), store.volume("clone"));
    let mut rng = Rng::new(15);
    let signals = signals();
    for round in 0..60 {
        let child = start(&["clone", "-q", &url, &clone]);
        clock::sleep(Duration::from_micros(rng.below(20_000)));
        kill_process(Pid::from_child(&child), signals[round % signals.len()])
            .expect("it runs, or has ended");
        let ended = child.wait_with_output().expect("it ends");
        let states = states(&store);
        let made = states.iter().find(|(name, _)| name == "clone");
        assert!(made.is_none_or(|(_, state)| state == "closed"), "{round}: {states:?}, {ended:?}");
        if made.is_some() {
            run(["delete", "-q", &clone]).ok();
        }
    }
    let words = ["volume", "clone", "-q", &url, &clone];
    command::finish(Command::new(mica::binary()).args(words)).ok();
}

/// It is ended while it collects, while it writes extents again, and while it collects what that
/// left: whatever was done stays, and the next one does the rest.
#[test]
fn gc_that_a_signal_ends_leaves_what_the_next_one_frees() {
    const STEP: Duration = Duration::from_millis(8);
    let store = Store::new();
    store.create("web", "16M");
    let (server, has) = overwritten(&store, 256, &["--gc", "off"]);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    let image = store.folder().join("image.raw");
    fs::write(&image, has.iter().flat_map(|byte| [*byte; 1 << 16]).collect::<Vec<_>>())
        .expect("written");
    let (url, all, image) = (store.volume("web"), store.url(), image.display().to_string());
    let signals = signals();
    for round in 0.. {
        let child = start(&["gc", "-q", &all]);
        clock::sleep(STEP * u32::try_from(round).expect("few"));
        let signal = signals[round % signals.len()];
        kill_process(Pid::from_child(&child), signal).expect("it runs, or has just ended");
        let ended = child.wait_with_output().expect("it ends");
        assert_eq!(String::from_utf8_lossy(&ended.stderr), "");
        assert_eq!(states(&store), [("web".to_owned(), "closed".to_owned())], "{round}");
        run(["check", "-q", &all]).ok();
        same(&store, &url, &image);
        if ended.status.success() {
            break;
        }
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{ended:?}");
    }
    let left = run(["gc", "-n", "--output", "json", &all]).json();
    assert_eq!((&left["freed-extents"], &left["sparse-bytes"]), (&0.into(), &0.into()), "{left}");
    run(["scrub", "-q", &all]).ok();
}
