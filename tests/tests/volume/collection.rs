//! Collection and scrub, by their verbs.

use mica_tests::guest::{Answer, Guest};
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, command, mica, tools};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IO];

fn qemu_io(server: &Server, acts: &[&str]) {
    let mut words = vec!["-f", "raw"];
    acts.iter().for_each(|act| words.extend(["-c", act]));
    let uri = server.uri();
    words.push(&uri);
    command::run("qemu-io", words).ok();
}

/// Serves a volume, does `acts` to it, and stops.
fn with(store: &Store, name: &str, acts: &[&str]) {
    let server = store.serve(name, &[]).expect("served");
    qemu_io(&server, acts);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

fn report(words: &[&str]) -> Value {
    let finished = run(words.iter().copied().chain(["--output", "json"]));
    serde_json::from_str(&finished.ok()).expect("JSON")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("one").path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// The URLs of a volume of 16 MiB with a snapshot "old", and of a clone of that.
fn volume_and_clone(store: &Store) -> (String, String) {
    store.create("web", "64M");
    let (url, clone) = (store.volume("web"), store.volume("clone"));
    with(store, "web", &["write -P 1 0 16M", "flush"]);
    run(["snapshot", &url, "old"]).ok();
    run(["clone", &format!("{url}@old"), &clone]).ok();
    (url, clone)
}

#[test]
fn gc_frees_what_only_a_dropped_snapshot_and_a_deleted_clone_had() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let (url, clone) = volume_and_clone(&store);
    with(&store, "web", &["write -P 2 0 16M", "flush"]);
    // Small extents with what became of snapshots may go.
    let frees_data = |words: &[&str]| {
        let report = report(words);
        report["freed-bytes"].as_u64().expect("a number") >= 16 << 20
    };
    assert!(!frees_data(&["gc", &store.url()]), "a snapshot needs it");
    run(["drop", &format!("{url}@old")]).ok();
    assert!(!frees_data(&["gc", &store.url()]), "a clone needs it");
    run(["delete", &clone]).ok();
    assert!(frees_data(&["gc", "--dry-run", &store.url()]));
    assert!(frees_data(&["gc", &store.url()]));
    assert_eq!(report(&["gc", &store.url()])["freed-bytes"], 0, "nothing is left to free");
    with(&store, "web", &["read -P 2 0 16M", "read -P 0 16M 48M"]);
    run(["check", &url]).ok();
}

#[test]
fn gc_beside_a_server_takes_nothing_that_it_needs() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    let server = store.serve("web", &[]).expect("served");
    for round in 1..=4 {
        qemu_io(&server, &[&format!("write -P {round} 0 8M"), "flush"]);
        run(["gc", &store.url()]).ok();
        qemu_io(&server, &[&format!("read -P {round} 0 8M"), "read -P 0 8M 56M"]);
    }
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    run(["gc", &store.url()]).ok();
    with(&store, "web", &["read -P 4 0 8M"]);
    run(["scrub", &store.url()]).ok();
}

#[test]
fn scrub_names_the_volume_and_the_place_of_what_is_damaged() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    with(&store, "web", &["write -P 1 1M 1M", "flush"]);
    run(["scrub", &store.url()]).ok();
    let folder = store.folder().join("store/extents");
    let extents = files(&folder).into_iter();
    let extent = extents.max_by_key(|path| fs::metadata(path).map_or(0, |meta| meta.len()));
    let extent = extent.expect("an extent");
    let mut bytes = fs::read(&extent).expect("read");
    bytes[8192] ^= 1;
    fs::write(&extent, bytes).expect("damaged");
    let finished = run(["scrub", &store.url()]);
    assert_eq!(finished.status.code(), Some(2), "{finished}");
    assert!(finished.stderr.contains("web"), "{finished}");
    // Collection goes by the map, which is whole.
    run(["gc", &store.url()]).ok();
}

/// The story: an export named an object of the store, and nobody knew what of the disk that was.
#[test]
fn export_of_what_is_damaged_names_volume_snapshot_and_place() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "64M");
    with(&store, "web", &["write -P 1 1M 1M", "flush"]);
    run(["snapshot", "-q", &store.volume("web"), "old"]).ok();
    let extents = files(&store.folder().join("store/extents")).into_iter();
    let extent = extents.max_by_key(|path| fs::metadata(path).map_or(0, |meta| meta.len()));
    let extent = extent.expect("an extent");
    let mut bytes = fs::read(&extent).expect("read");
    let first = bytes.windows(4096).position(|block| block == [1; 4096]).expect("its data");
    bytes[first + 9 * 4096] ^= 1;
    fs::write(&extent, bytes).expect("damaged");
    let copy = store.folder().join("copy").display().to_string();
    let place = (1 << 20) + 9 * 4096;
    for (name, format) in [("web", "raw"), ("web@old", "raw"), ("web@old", "qcow2")] {
        let refused = run(["export", "-q", "-O", format, &store.volume(name), &copy]).refusal();
        let wanted = format!("mica: {name}: 4096 bytes at {place} of the disk");
        assert!(refused.starts_with(&wanted), "{refused}");
    }
    assert!(!Path::new(&copy).exists());
}

/// The snapshot has what was overwritten since, the clone what it wrote itself.
#[test]
fn stats_say_what_volumes_and_snapshots_have_alone() {
    if !tools::present(TOOLS) {
        return;
    }
    const MB: u64 = 1 << 20;
    let store = Store::new();
    let (url, _) = volume_and_clone(&store);
    with(&store, "web", &["write -P 2 0 4M", "flush"]);
    with(&store, "clone", &["write -P 3 0 8M", "flush"]);
    let report_of = |url: &str| run(["stats", url, "--output", "json"]).json();
    let near = |value: &Value, megabytes: u64| {
        let bytes = value.as_u64().expect("a number");
        assert!(bytes >= megabytes * MB && bytes < megabytes * MB + MB / 2, "{value}");
    };
    let all = report_of(&store.url());
    let [of_clone, of_web] = [0, 1].map(|at| &all["volumes"][at]);
    assert_eq!((&of_clone["name"], &of_web["name"]), (&"clone".into(), &"web".into()));
    near(&of_web["live-bytes"], 20);
    near(&of_web["exclusive-bytes"], 12);
    near(&of_clone["live-bytes"], 16);
    near(&of_clone["exclusive-bytes"], 8);
    near(&all["shared-bytes"], 8);
    near(&all["live-bytes"], 28);
    assert_eq!(of_web["snapshot-count"], 1);
    let web = report_of(&url);
    let old = &web["snapshots"][0];
    assert_eq!(old["label"], "old");
    // Of 16 that were overwritten here and there, 4 and 8 of the same ones: nobody else has 4.
    near(&old["exclusive-bytes"], 4);
    near(&web["only-now-bytes"], 4);
    let text = run(["stats", &url]).ok();
    assert!(text.contains("old") && text.contains("alone: "), "{text}");
    assert!(run(["stats", &store.url()]).ok().contains("garbage: "));
    // What the snapshot has alone can go when it is dropped.
    run(["drop", &format!("{url}@old")]).ok();
    let all = report_of(&store.url());
    let free = ["garbage-bytes", "sparse-bytes"].map(|key| all[key].as_u64().expect("a number"));
    assert!(free.iter().sum::<u64>() >= 4 * MB, "{free:?}");
    let missing = run(["stats", &store.volume("none")]).refusal();
    assert!(missing.contains("none"), "{missing}");
}

/// Bytes of all files of a store.
fn stored(store: &Store) -> u64 {
    let len = |path: &PathBuf| fs::metadata(path).map_or(0, |meta| meta.len());
    files(&store.folder().join("store")).iter().map(len).sum()
}

/// Serves a volume of so many blocks of 64 KiB, overwrites them at random, eight times as many as
/// there are, and returns the server and what each block has.
pub(crate) fn overwritten(store: &Store, blocks: u64, more: &[&str]) -> (Server, Vec<u8>) {
    let path = |name: &str| store.folder().join(name).display().to_string();
    let (control, log) = (path("control"), path("log"));
    let options = ["--control", &control, "--log-device", &log, "--log-size", "64M"];
    let server = store.serve("web", &[&options, more].concat()).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    let mut has = vec![0; usize::try_from(blocks).expect("small")];
    let mut state = 1_u64;
    for number in 0..8 * blocks {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let block = if number < blocks { number } else { (state >> 33) % blocks };
        let byte = u8::try_from(number % 251).expect("small") + 1;
        assert_eq!(guest.write(block << 16, &[byte; 1 << 16]).expect("written"), 0);
        has[usize::try_from(block).expect("small")] = byte;
    }
    assert_eq!(guest.flush().expect("flushed"), 0);
    (server, has)
}

fn status(store: &Store) -> Value {
    let control = store.folder().join("control").display().to_string();
    mica::run(["ctl", "--control", &control, "--output", "json", "status"]).json()
}

/// The story: volumes that stayed open for months filled their store.
#[test]
fn server_collects_what_an_open_volume_no_longer_needs() {
    const BLOCKS: u64 = 1024;
    let store = Store::new();
    store.create("web", "64M");
    let (server, has) = overwritten(&store, BLOCKS, &[]);
    let live = BLOCKS << 16;
    let is_small = || (stored(&store) * 100 <= live * 145).then_some(());
    let found = clock::poll(Duration::from_secs(60), Duration::from_millis(200), is_small);
    let told = status(&store)["stores"][0].clone();
    assert!(found.is_some(), "{} bytes for {live}: {told}", stored(&store));
    assert!(told["gc_passes"].as_u64().expect("a number") > 0, "{told}");
    // What is overwritten before it is put is no garbage.
    assert!(told["gc_freed_bytes"].as_u64().expect("a number") > live / 2, "{told}");
    assert_eq!((&told["gc_failures"], &told["gc_failure"]), (&0.into(), &Value::Null));
    let mut guest = Guest::connect(&server).expect("served");
    for (block, byte) in (0..).zip(&has) {
        let read = guest.read(block << 16, 1 << 16).expect("read");
        assert!(read == Answer::Done(vec![*byte; 1 << 16]), "block {block}");
    }
    drop(guest);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    run(["scrub", &store.url()]).ok();
}

#[test]
fn server_that_is_told_not_to_collects_nothing() {
    const BLOCKS: u64 = 256;
    let store = Store::new();
    store.create("web", "16M");
    let (server, _) = overwritten(&store, BLOCKS, &["--gc", "off"]);
    assert_eq!(status(&store)["stores"], Value::Array(Vec::new()));
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    assert!(stored(&store) >= (2 * BLOCKS) << 16, "garbage stays");
}
