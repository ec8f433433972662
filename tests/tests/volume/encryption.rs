//! Volumes that are compressed or encrypted, through a kill, snapshots, clones and copies; what
//! their store and log show; and what is said without the key.

use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{nbd, qemu, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::path::{Path, PathBuf};

const BLOCK: usize = 4096;
const MARKER: &[u8] = b"what a guest wrote and nobody is to see.";
const KEY: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n";

fn file(store: &Store, name: &str, content: &str) -> String {
    let path = store.folder().join(name);
    fs::write(&path, content).expect("written");
    path.display().to_string()
}

/// Blocks full of the marker.
fn marked(blocks: usize) -> Vec<u8> {
    MARKER.iter().copied().cycle().take(blocks * BLOCK).collect()
}

/// Blocks that cannot be compressed, which begin with the marker.
fn random(blocks: usize) -> Vec<u8> {
    let mut rng = mica_gen::Rng::new(1);
    let mut bytes: Vec<u8> =
        (0..blocks * BLOCK).map(|_| u8::try_from(rng.below(256)).expect("a byte")).collect();
    bytes.chunks_mut(BLOCK).for_each(|block| block[..MARKER.len()].copy_from_slice(MARKER));
    bytes
}

fn kill(server: &Server) {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("one").path());
    let each = |path: PathBuf| if path.is_dir() { files_below(&path) } else { vec![path] };
    entries.flat_map(each).collect()
}

/// The files of the store, and the log, that have the marker.
fn that_show(store: &Store) -> Vec<PathBuf> {
    let shows = |path: &PathBuf| {
        let bytes = fs::read(path).expect("readable");
        bytes.windows(MARKER.len()).any(|window| window == MARKER)
    };
    let mut files = files_below(&store.folder().join("store"));
    files.push(store.folder().join("log"));
    files.into_iter().filter(shows).collect()
}

fn lives(how: &[&str], is_encrypted: bool) {
    let store = Store::new();
    let key = file(&store, "web.key", KEY);
    let key = if is_encrypted { vec!["--volume-key", &*key] } else { Vec::new() };
    let url = store.volume("web");
    let create = [&["create", "-q"], how, &key, &[&*url, "64M"]].concat();
    run(create.iter().copied()).ok();
    let log = store.folder().join("log").display().to_string();
    let more = [&["--log-device", &*log, "--log-size", "16M"], &*key].concat();
    let server = store.serve("web", &more).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    let wanted = [marked(64), random(64), marked(1), random(1)].concat();
    for (index, piece) in wanted.chunks(16 * BLOCK).enumerate() {
        let at = index as u64 * 16 * BLOCK as u64;
        assert_eq!(guest.write(at, piece).expect("written"), 0);
    }
    assert_eq!(guest.flush().expect("flushed"), 0);
    kill(&server);
    drop((guest, server));
    assert!(!is_encrypted || that_show(&store).is_empty(), "{:?}", that_show(&store));
    let server = store.serve("web", &more).expect("served again");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    assert_eq!(client.read(0, wanted.len() as u64).expect("read"), wanted);
    drop(client);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    assert_eq!(that_show(&store).is_empty(), is_encrypted, "{:?}", that_show(&store));

    // Without the key, from here on, but for what reads blocks.
    run(["snapshot", &url, "first"]).ok();
    let (first, copy) = (store.volume("web@first"), store.volume("copy"));
    run(["clone", &first, &copy]).ok();
    let server = store.serve("web", &key).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &random(16)).expect("written"), 0);
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
    for checked in ["check", "scrub"] {
        let said = run([checked, &store.url()]).ok();
        assert!(said.contains("nothing is damaged"), "{said}");
    }
    run(["gc", &store.url()]).ok();
    let raw = store.folder().join("out.raw").display().to_string();
    for exported in [&first, &copy] {
        let words = [&["export", "-O", "raw"], &*key, &[exported, &*raw]].concat();
        let said = run(words.iter().copied());
        let is_warned = said.stderr.contains("out.raw is not encrypted");
        assert_eq!(is_warned, is_encrypted, "{said}");
        said.ok();
        let bytes = fs::read(&raw).expect("exported");
        assert!(bytes.starts_with(&wanted) && bytes.len() == 64 << 20);
        fs::remove_file(&raw).expect("removed");
    }
    // A stream has plain bytes, and becomes what is asked for.
    let stream = store.folder().join("stream").display().to_string();
    let words = [&["send"], &*key, &[&*first, &*stream]].concat();
    run(words.iter().copied()).ok();
    let received = store.volume("received");
    let words = [&["receive", "-q"], how, &key, &[&*received, &*stream]].concat();
    run(words.iter().copied()).ok();
    let words = [&["export", "-O", "raw"], &*key, &[&*received, &*raw]].concat();
    run(words.iter().copied()).ok();
    assert!(fs::read(&raw).expect("exported").starts_with(&wanted));
    assert_eq!(that_show(&store).is_empty(), is_encrypted, "{:?}", that_show(&store));
    let infos = run(["list", &store.url(), "--output", "json"]).json();
    for info in infos.as_array().expect("an array") {
        let compression =
            if how.contains(&"zstd") { "zstd".into() } else { serde_json::Value::Null };
        assert_eq!(info["compression"], compression, "{info}");
        assert_eq!(info["encryption"].is_null(), !is_encrypted, "{info}");
    }
}

#[test]
fn compressed_volume_lives_as_any_other() {
    lives(&["--compress", "zstd"], false);
}

#[test]
fn encrypted_volume_shows_nothing_of_its_guest() {
    lives(&["--encrypt"], true);
}

#[test]
fn compressed_and_encrypted_volume_shows_nothing_of_its_guest() {
    lives(&["--compress", "zstd", "--encrypt"], true);
}

#[test]
fn missing_or_wrong_key_is_one_line_that_names_the_option() {
    let store = Store::new();
    let (key, url) = (file(&store, "web.key", KEY), store.volume("web"));
    let other = file(&store, "other.key", &KEY.replace("00", "ff"));
    let none = file(&store, "none", "secret\n");
    run(["create", "-q", "--encrypt", "--volume-key", &key, &url, "64M"]).ok();
    store.create("plain", "64M");
    let out = store.folder().join("out").display().to_string();
    let name = run(["info", &url, "--output", "json"]).json()["key"].as_str().map(str::to_owned);
    let name = name.expect("it has one");
    let export = |url: &str, more: &[&str]| {
        let words = [&["export", "-O", "raw"], more, &[url, &*out]].concat();
        let said = run(words.iter().copied()).refusal();
        assert_eq!(said.trim().lines().count(), 1, "{said}");
        said
    };
    let serve =
        |more: &[&str]| format!("{:#}", store.serve("web", more).map(drop).expect_err("no"));
    for said in [export(&url, &[]), serve(&[])] {
        assert!(said.contains("--volume-key") && said.contains(&name), "{said}");
    }
    for said in [export(&url, &["--volume-key", &other]), serve(&["--volume-key", &other])] {
        assert!(said.contains("--volume-key") && said.contains("other.key has key"), "{said}");
        assert!(said.contains(&name), "{said}");
    }
    let said = export(&url, &["--volume-key", &none]);
    assert!(said.contains("none has no key"), "{said}");
    let said = export(&store.volume("plain"), &["--volume-key", &key]);
    assert!(said.contains("is not encrypted"), "{said}");
    let refused = run(["create", "--encrypt", &store.volume("new"), "1M"]).refusal();
    assert!(refused.contains("--volume-key"), "{refused}");
    let info = run(["info", &url]).ok();
    assert!(info.contains(&format!("encrypted with key {name}")), "{info}");
    assert!(!fs::exists(&out).expect("looked"), "nothing was made");
}

#[test]
fn chain_becomes_a_compressed_and_encrypted_volume_and_an_image_again() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let store = Store::new();
    let (key, url, dir) = (file(&store, "web.key", KEY), store.volume("web"), store.folder());
    qemu::create(dir, "base.raw", &["-f", "raw"], "32M");
    qemu::io(dir, &["-f", "raw"], "base.raw", &["write -P 1 0 8M", "write -P 2 31M 1M"]);
    qemu::create(dir, "top.qcow2", &["-b", "base.raw", "-F", "raw"], "32M");
    qemu::io(dir, &[], "top.qcow2", &["write -P 5 4M 4k", "write -P 0 31M 512k"]);
    let top = dir.join("top.qcow2").display().to_string();
    let with_key = ["--volume-key", &*key];
    let new = [&["import", "-q", "--compress", "zstd", "--encrypt"], &with_key[..]].concat();
    run(new.iter().copied().chain([&*top, &*url])).ok();
    let file = dir.join("out.qcow2").display().to_string();
    let export = [&["export", "-O", "qcow2"], &with_key[..]].concat();
    run(export.iter().copied().chain([&*url, &*file])).ok();
    qemu::img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", "top.qcow2", "out.qcow2"]).ok();
    let stored: u64 = files_below(&dir.join("store"))
        .iter()
        .map(|path| fs::metadata(path).expect("there").len())
        .sum();
    assert!(stored < 1 << 20, "{stored} bytes of 9 MiB that repeat");
}
