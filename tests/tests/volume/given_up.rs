//! What is given up on purpose: logs of volumes that are gone, and snapshots that are old.

use mica_tests::volume::{Store, run};
use mica_tests::{command, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The part of an extent that has its version.
const EXTENT_HEADER: usize = 512;
const TOOLS: &[tools::Tool] = &[tools::QEMU_IO];

fn json(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn log_of_a_deleted_volume_is_listed_as_gone_and_dropped_by_force() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let log = store.folder().join("log").display().to_string();
    let options = ["--log-device", &log, "--log-size", "64M"];
    let server = store.serve("web", &options).expect("served");
    let acts = ["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
    // While a server has it, nobody else looks into it.
    let finished = run(["log", "list", &log]);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
    drop(server);
    let listed = |stores: &[&str]| {
        let words = ["log", "list", "--output", "json", &log];
        json(&run(words.into_iter().chain(stores.iter().copied())).ok())
    };
    let url = store.url();
    let one = listed(&[&url])["logs"][0].clone();
    assert_eq!((&one["name"], &one["gone"]), (&"web".into(), &false.into()), "{one}");
    assert!(one["live-bytes"].as_u64().expect("a number") > 0, "{one}");
    let id = one["volume"].as_str().expect("an identity").to_owned();
    assert!(run(["log", "list", &log, &url]).ok().contains("web"));
    let finished = run(["log", "drop", &log, &id[..8]]);
    if one["records"] != 0 {
        assert_eq!(finished.status.code(), Some(1), "{finished}");
        assert!(finished.stderr.contains("may lack"), "{finished}");
    }
    run(["delete", "--force", &store.volume("web")]).ok();
    let one = listed(&[&url])["logs"][0].clone();
    assert_eq!((&one["name"], &one["gone"]), (&Value::Null, &true.into()), "{one}");
    assert_eq!(listed(&[])["logs"][0]["gone"], Value::Null, "without its store nobody knows");
    // Every ID begins with nothing.
    let refused = run(["log", "drop", "--force", &log, ""]).refusal();
    assert!(refused.contains("VOLUME is empty"), "{refused}");
    run(["log", "drop", "--force", &log, &id[..8]]).ok();
    let one = listed(&[&url])["logs"][0].clone();
    assert_eq!((&one["set-aside"], &one["live-bytes"]), (&true.into(), &0.into()), "{one}");
    let finished = run(["log", "drop", "--force", &log, &id[..8]]);
    assert!(finished.stderr.contains("no log of a volume"), "{finished}");
    run(["log", "drop", &log, "damaged"]).ok();
}

#[test]
fn what_is_no_log_is_left_as_it_is() {
    let store = Store::new();
    let file = store.folder().join("file");
    std::fs::write(&file, vec![0; 1 << 20]).expect("made");
    let text = file.display().to_string();
    let finished = run(["log", "list", &text]);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    assert!(finished.stderr.contains("not a log yet"), "{finished}");
    assert_eq!(std::fs::read(&file).expect("read"), vec![0; 1 << 20]);
    let missing = format!("{text}-2");
    assert_eq!(run(["log", "list", &missing]).status.code(), Some(1));
    assert!(!std::fs::exists(&missing).expect("known"));
}

#[test]
fn rules_keep_snapshots_with_a_label() {
    let store = Store::new();
    store.create("web", "64M");
    let url = store.volume("web");
    for label in ["one", "two", "three"] {
        run(["snapshot", "-q", &url, label]).ok();
    }
    let keep = |words: &[&str]| {
        let words = ["keep", "--output", "json"].into_iter().chain(words.iter().copied());
        json(&run(words).ok())["dropped"].clone()
    };
    assert_eq!(keep(&[&url, "1h/1m"]), Value::Array(Vec::new()));
    // Without their labels they are automatic ones, and the newest of these stays.
    for label in ["one", "two"] {
        run(["label", "-q", &format!("{url}@{label}"), ""]).ok();
    }
    let would = keep(&["--dry-run", &url, "1ms/1ms"]);
    assert_eq!(would.as_array().map(Vec::len), Some(1), "{would}");
    assert_eq!(keep(&[&url, "1ms/1ms"]), would);
    let left = json(&run(["snapshots", "--output", "json", &url]).ok());
    let labels: Vec<_> = left.as_array().expect("a list").iter().map(|s| &s["label"]).collect();
    assert_eq!(labels, [&Value::from(""), &Value::from("three")]);
    let finished = run(["keep", &url, "1h"]);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    assert!(finished.stderr.contains("a rule has a '/'"), "{finished}");
}

/// The story: a server was killed before the store had what its log had, and exports, differences
/// and clones were of what the store had, without a word.
#[test]
fn volume_whose_log_has_what_the_store_lacks_is_not_read_as_it_was() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let url = store.volume("web");
    run(["snapshot", "-q", &url, "old"]).ok();
    let log = store.folder().join("log").display().to_string();
    let options = ["--log-device", &log, "--log-size", "64M", "--inject", "delay=500ms,op=put"];
    let copy = store.folder().join("copy").display().to_string();
    let server = store.serve("web", &options).expect("served");
    let acts = ["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
    drop(server);
    let (old, clone) = (format!("{url}@old"), store.volume("copy"));
    for verb in [
        &["export", "-O", "raw", &url, &copy][..],
        &["diff", &old, &url],
        &["clone", &url, &clone],
        &["snapshot", &url, "new"],
    ] {
        let refusal = run(verb.iter().copied()).refusal();
        assert!(refusal.contains(&log), "{verb:?}: {refusal}");
    }
    let refused = store.serve("web", &["--read-only"]).expect_err("it would be old");
    assert!(refused.to_string().contains(&log), "{refused}");
    run(["export", "-q", "-O", "raw", &old, &copy]).ok();
    // Another log has nothing of it.
    let other = store.folder().join("other").display().to_string();
    let refused = store.serve("web", &["--log-device", &other, "--log-size", "64M"]);
    let refused = refused.expect_err("what is acknowledged would be lost").to_string();
    assert!(refused.contains(&format!("was in {log}")), "{refused}");
    let server = store.serve("web", &["--log-device", &log]).expect("served");
    let acts = ["-r", "-f", "raw", "-c", "read -P 7 0 64k"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    let changed = json(&run(["diff", "--output", "json", &old, &url]).ok());
    assert_eq!(changed[0]["length"], 64 << 10, "{changed}");
}

/// The story: `info` and `list` said of a volume that was handed over that it was closed.
#[test]
fn volume_that_was_handed_over_says_to_whom() {
    let store = Store::new();
    store.create("web", "64M");
    let url = store.volume("web");
    run(["handover", &url, "web2"]).ok();
    let info = json(&run(["info", "--output", "json", &url]).ok());
    let said = (&info["state"], &info["handed-to"], &info["open-on"]);
    assert_eq!(said, (&"handed-over".into(), &"web2".into(), &Value::Null));
    for words in [["info", &url], ["list", &store.url()], ["tree", &store.url()]] {
        let said = run(words).ok();
        assert!(said.contains("handed over to web2"), "{words:?}: {said}");
    }
}

/// The newest head of a volume, of which a bit is wrong from now on.
fn damage_head(store: &Store, name: &str) {
    change_head(store, name, |bytes| bytes[100] ^= 1);
}

fn change_head(store: &Store, name: &str, change: impl FnOnce(&mut [u8])) {
    let folder = store.folder().join("store/volumes").join(name);
    let heads = std::fs::read_dir(folder).expect("a volume");
    let newest = heads.map(|head| head.expect("a head").path()).max().expect("there is one");
    self::change(&newest, change);
}

fn change(object: &Path, change: impl FnOnce(&mut [u8])) {
    let mut bytes = std::fs::read(object).expect("read");
    change(&mut bytes);
    std::fs::remove_file(object).expect("removed");
    std::fs::write(object, bytes).expect("written");
}

/// As a version of mica that is to come would write it.
fn make_newer(bytes: &mut [u8]) {
    bytes[8..12].copy_from_slice(&1000_u32.to_le_bytes());
    let (summed, sum) = bytes.split_at_mut(bytes.len() - 4);
    sum.copy_from_slice(&crc32c(summed).to_le_bytes());
}

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, byte| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| match sum & 1 {
            0 => sum >> 1,
            _ => (sum >> 1) ^ 0x82f6_3b78,
        })
    })
}

/// The story: one damaged head stopped all verbs about the whole store, and could not be deleted.
#[test]
fn volume_whose_head_is_damaged_is_no_obstacle_to_others_and_can_be_deleted() {
    let store = Store::new();
    for name in ["db", "web"] {
        store.create(name, "64M");
        run(["snapshot", "-q", &store.volume(name), "one"]).ok();
    }
    damage_head(&store, "db");
    let (url, db) = (store.url(), store.volume("db"));
    for verb in ["list", "tree", "check"] {
        let finished = run([verb, "--output", "json", &url]);
        assert_eq!(finished.status.code(), Some(2), "{verb}: {finished}");
        assert!(finished.stderr.contains("db"), "{verb}: {finished}");
        let all = json(&finished.stdout);
        assert_eq!(all.as_array().map(Vec::len), Some(2), "{verb}: {all}");
    }
    let finished = run(["scrub", &url]);
    assert_eq!(finished.status.code(), Some(2), "{finished}");
    assert!(finished.stderr.contains("head of volume db"), "{finished}");
    let copy = store.folder().join("copy").display().to_string();
    for words in [&["gc", &url][..], &["info", &db], &["export", &db, &copy], &["delete", &db]] {
        let refused = run(words.iter().copied()).refusal();
        assert!(refused.contains("or give volume db up: mica volume delete --force"), "{refused}");
    }
    run(["delete", "--force", &db]).ok();
    for verb in ["list", "tree", "check", "scrub", "gc"] {
        run([verb, &url]).ok();
    }
    store.create("db", "64M");
}

/// What is lost is named with what to do: a head that has nothing, the object that says what store
/// this is, and an extent.
#[test]
fn what_a_store_has_lost_is_named_with_what_to_do() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    for name in ["db", "web"] {
        store.create(name, "64M");
    }
    let (url, web) = (store.url(), store.volume("web"));
    let server = store.serve("web", &[]).expect("served");
    let acts = ["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
    server.stop().expect("stopped");
    let (format, away) = (store.folder().join("store/format"), store.folder().join("away"));
    std::fs::rename(&format, &away).expect("moved");
    for words in [&["list", &url][..], &["check", &url], &["info", &web], &["create", &web, "1M"]] {
        let refused = run(words.iter().copied()).refusal();
        let said = "format of file://";
        assert!(refused.contains(said) && refused.contains("from a copy"), "{words:?}: {refused}");
    }
    std::fs::rename(&away, &format).expect("moved back");
    run(["check", &url]).ok();
    std::fs::remove_dir_all(store.folder().join("store/extents")).expect("removed");
    let refused = run(["gc", &url]).refusal();
    assert!(refused.contains("volume web is damaged"), "{refused}");
    assert!(refused.contains("the extent is missing; mica volume check says"), "{refused}");
    change_head(&store, "db", |bytes| bytes.fill(0));
    let refused = run(["info", &store.volume("db")]).refusal();
    assert!(refused.contains("it is empty; restore this head from a copy"), "{refused}");
}

/// The story: a newer mica had made one volume, and nobody could list the others of the store.
#[test]
fn volume_of_a_newer_version_is_named_and_no_obstacle_to_others() {
    let store = Store::new();
    for name in ["db", "web"] {
        store.create(name, "64M");
    }
    change_head(&store, "db", make_newer);
    let url = store.url();
    for (verb, count) in [("list", 2), ("tree", 2), ("check", 1)] {
        let finished = run([verb, "--output", "json", &url]);
        assert_eq!(finished.status.code(), Some(1), "{verb}: {finished}");
        let said = "volume db was made by a newer version of mica";
        assert!(finished.stderr.contains(said), "{verb}: {finished}");
        let all = json(&finished.stdout);
        assert_eq!(all.as_array().map(Vec::len), Some(count), "{verb}: {all}");
        let is_named = finished.stdout.contains("\"newer-version\"");
        assert_eq!(is_named, verb != "check", "{verb}: {all}");
    }
    let finished = run(["scrub", &url]);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    assert!(finished.stderr.contains("volume db was made by a newer version"), "{finished}");
    assert!(finished.stdout.contains("nothing is damaged"), "{finished}");
    for (verb, of) in [("gc", &url), ("stats", &url), ("check", &store.volume("db"))] {
        let finished = run([verb, of]);
        assert_eq!(finished.status.code(), Some(1), "{finished}");
        assert!(finished.stderr.contains("a newer mica reads"), "{finished}");
        let is_refused = finished.stderr.contains("nothing may be deleted: use that version");
        assert_eq!(is_refused, verb != "check", "{finished}");
    }
    // What is damaged besides is what the exit code says.
    damage_head(&store, "web");
    for verb in ["list", "tree", "check"] {
        assert_eq!(run([verb, &url]).status.code(), Some(2), "{verb}");
    }
}

/// The story: `tree` of a store ended at the first volume whose snapshots could not be read.
#[test]
fn volume_whose_snapshots_a_newer_version_has_put_is_no_obstacle_to_a_tree() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    for name in ["db", "web"] {
        store.create(name, "64M");
    }
    let server = store.serve("db", &[]).expect("served");
    let acts = ["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
    drop(server);
    // No head has it yet, and its snapshots are in what comes last.
    let last = extents_of(&store).pop().expect("there is one");
    change(&last, |bytes| make_newer(&mut bytes[..EXTENT_HEADER]));
    let (url, db) = (store.url(), store.volume("db"));
    let finished = run(["tree", "--output", "json", &url]);
    assert_eq!(finished.status.code(), Some(1), "{finished}");
    assert!(finished.stderr.contains("volume db was made by a newer version"), "{finished}");
    let all = json(&finished.stdout);
    let known = |at: usize| (all[at]["name"].clone(), all[at]["state"].clone());
    assert_eq!(known(0), ("web".into(), "closed".into()), "{all}");
    assert_eq!(known(1), ("db".into(), "newer-version".into()), "{all}");
    let refused = run(["tree", &db]).refusal();
    assert!(refused.contains("a newer mica reads"), "{refused}");
}

/// The extents of a store, by name.
fn extents_of(store: &Store) -> Vec<PathBuf> {
    let entries = |folder: PathBuf| {
        let entries = std::fs::read_dir(folder).expect("a folder");
        entries.map(|entry| entry.expect("readable").path())
    };
    let mut all: Vec<_> = entries(store.folder().join("store/extents")).flat_map(entries).collect();
    all.sort();
    all
}

/// The story: the server of the old host went on behind a lock that another process could not take.
#[test]
fn server_that_hangs_is_taken_over_by_force_on_its_own_machine() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let old = store.serve("web", &[]).expect("served");
    let acts = ["-f", "raw", "-c", "write -P 7 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*old.uri()])).ok();
    let pid = i32::try_from(old.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::STOP).expect("stopped");
    let refused = store.serve("web", &[]).expect_err("it is open").to_string();
    assert!(refused.contains(&format!("process {}", old.pid())), "{refused}");
    let new = store.serve("web", &["--force"]).expect("served");
    assert!(new.log().contains(&format!("process {}", old.pid())), "{}", new.log());
    let acts = ["-f", "raw", "-c", "read -P 7 0 64k", "-c", "write -P 8 0 64k", "-c", "flush"];
    command::run("qemu-io", acts.into_iter().chain([&*new.uri()])).ok();
    kill_process(pid, Signal::CONT).expect("it goes on");
    let acts = ["-f", "raw", "-c", "write -P 9 0 64k", "-c", "flush"];
    let late = command::run("qemu-io", acts.into_iter().chain([&*old.uri()]));
    assert!(!late.status.success(), "{late}");
    // Once it knows, it reads nothing that is old.
    let late = command::run("qemu-io", ["-r", "-f", "raw", "-c", "read 0 64k", &*old.uri()]);
    assert!(!late.status.success(), "{late}");
    drop(old);
    assert_eq!(new.stop().expect("it stops").status.code(), Some(0));
    let server = store.serve("web", &["--read-only"]).expect("served");
    let acts = ["-r", "-f", "raw", "-c", "read -P 8 0 64k"];
    command::run("qemu-io", acts.into_iter().chain([&*server.uri()])).ok();
}
