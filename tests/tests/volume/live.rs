//! `mica ctl` about the volume of a disk, and its store.

use crate::snapshots::ctl;
use mica_tests::guest::Guest;
use mica_tests::volume::{Store, run, serve};
use mica_tests::{clock, command, mica, tools};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long something is waited for, and how often it is looked.
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(50);
const TOOLS: &[tools::Tool] = &[tools::QEMU_IO];
/// What the verbs are, and what they are about.
const VERBS: [&[&str]; 11] = [
    &["info"],
    &["tree"],
    &["tree", "--store"],
    &["tree", "--dot"],
    &["tree", "--svg", "--store"],
    &["check"],
    &["check", "--store"],
    &["scrub"],
    &["scrub", "--store"],
    &["gc", "--dry-run"],
    &["stats", "--space"],
];

/// The words of `mica volume` for the same.
fn of_volume(store: &Store, verb: &[&str]) -> Vec<String> {
    let is_of_store = verb.contains(&"--store") || verb[0] == "gc";
    let url = if is_of_store { store.url() } else { store.volume("web") };
    let flags = verb.iter().filter(|word| !["--store", "--space"].contains(word));
    flags.map(ToString::to_string).chain([url]).collect()
}

/// Whether it says itself how it is printed.
fn is_drawn(verb: &[&str]) -> bool {
    verb.iter().any(|word| ["--dot", "--svg"].contains(word))
}

/// What is in the log only, when they are asked, is in what they say.
#[test]
fn volume_that_is_served_is_looked_at_by_the_same_verbs() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    store.create("other", "16M");
    let [control, log] = ["control", "log"].map(|name| store.folder().join(name));
    let (control, log) = (control.display().to_string(), log.display().to_string());
    let options =
        ["--control", &control, "--log-device", &log, "--log-size", "64M", "--sandbox", "require"];
    let server = store.serve("web", &options).expect("served");
    let uri = server.uri();
    let io = |what: &str| command::run("qemu-io", ["-f", "raw", "-c", what, &uri]).ok();
    io("write -P 1 0 1M");
    let json_of = |verb: &[&str]| ctl(&store, &[&["--output", "json"], verb].concat()).json();
    assert_eq!(json_of(&["check", "web"])[0]["data-bytes"], 1 << 20);
    io("write -P 2 4M 64k");
    ctl(&store, &["snapshot", "web", "a"]).ok();
    assert_eq!(json_of(&["tree", "web"])[0]["snapshots"][0]["label"], "a");
    io("write -P 3 4M 64k");
    let space = json_of(&["stats", "--space", "web"]);
    assert_eq!(space["data-bytes"], (1 << 20) + 2 * (64 << 10), "{space}");
    assert_eq!(json_of(&["info", "web"])["state"], "open");
    for verb in VERBS {
        let words = of_volume(&store, verb);
        if !is_drawn(verb) {
            let both = [&["--output", "json"], verb, &["web"]].concat();
            let same = run(words.iter().map(String::as_str).chain(["--output", "json"]));
            assert_eq!(ctl(&store, &both).json(), same.json(), "{verb:?}");
        }
        let both = [verb, &["web"]].concat();
        let same = run(words.iter().map(String::as_str));
        assert_eq!(ctl(&store, &both).ok(), same.ok(), "{verb:?}");
    }
    io("write -P 4 0 1M");
    ctl(&store, &["drop", "web", "a"]).ok();
    let freed = json_of(&["gc", "web"]);
    assert!(freed["freed-bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{freed}");
    ctl(&store, &["drain", "web"]).ok();
    assert_eq!(json_of(&["info", "web"])["state"], "closed");
    server.stop().expect("stopped");
}

/// Disks that are no volumes, snapshots that are served, and damage, which has its own exit code.
#[test]
fn verbs_about_volumes_say_what_is_none_and_what_is_damaged() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    run(["snapshot", "-q", &store.volume("web"), "a"]).ok();
    let folder = store.folder().display().to_string();
    let control = format!("{folder}/control");
    let options = ["--control", &control, "--disks-in", &folder];
    let server = store.serve("web", &options).expect("served");
    let image = format!("{folder}/raw.img");
    std::fs::write(&image, [0; 1 << 20]).expect("written");
    let socket = |name: &str| format!("{folder}/{name}.sock");
    let raw = ["add", "--name", "raw", "-f", "raw", "--nbd", &socket("raw"), &image];
    ctl(&store, &raw).ok();
    let snapshot = ["--volume", &store.volume("web@a"), "--name", "old"];
    ctl(&store, &[&["add", "--nbd", &socket("old")], &snapshot[..]].concat()).ok();
    for verb in VERBS {
        let refused = ctl(&store, &[verb, &["raw"]].concat()).refusal();
        assert!(refused.contains(r#"the disk "raw" is not a volume"#), "{verb:?}: {refused}");
        ctl(&store, &[verb, &["old"]].concat()).ok();
    }
    assert!(ctl(&store, &["stats", "--space"]).stderr.contains("<DISK>"));
    let io = |what: &str| command::run("qemu-io", ["-f", "raw", "-c", what, &server.uri()]).ok();
    io("write -P 1 0 1M");
    ctl(&store, &["check", "web"]).ok();
    damage_an_extent(&store);
    for verb in [&["check"][..], &["check", "--store"], &["scrub"], &["scrub", "--store"]] {
        let found = ctl(&store, &[verb, &["web"]].concat());
        assert_eq!(found.code(), Some(2), "{verb:?}: {found}");
        assert!(found.stderr.contains("of the disk"), "{verb:?}: {found}");
    }
    server.stop().expect("stopped");
}

/// The story: everything behind the last '@' was taken for a snapshot, wherever that was.
#[test]
fn volume_in_a_folder_whose_name_has_the_sign_of_snapshots_is_found() {
    let store = Store::new();
    let folder = store.folder().display().to_string();
    let url = format!("file://{folder}/a@b/web");
    run(["create", "-q", &url, "16M"]).ok();
    run(["snapshot", "-q", &url, "one"]).ok();
    let (control, socket) = (format!("{folder}/control"), format!("{folder}/old"));
    let options = ["--control", &control, "--disks-in", &folder];
    let server = serve(&url, &options).expect("served");
    let snapshot = format!("{url}@one");
    ctl(&store, &["add", "--nbd", &socket, "--volume", &snapshot, "--name", "old"]).ok();
    for disk in ["web", "old"] {
        for verb in VERBS {
            ctl(&store, &[verb, &[disk]].concat()).ok();
        }
        let info = ctl(&store, &["--output", "json", "info", disk]).json();
        assert_eq!(info["url"], *url, "{info}");
    }
    server.stop().expect("stopped");
}

/// What the page shows of a volume: its newest snapshots, and how many there are.
#[test]
fn page_has_the_tree_of_a_volume_that_is_served() {
    let store = Store::new();
    store.create("web", "16M");
    let folder = store.folder().display().to_string();
    let control = format!("{folder}/control");
    let options = ["--control", &control, "--disks-in", &folder, "--sandbox", "require"];
    let server = store.serve("web", &options).expect("served");
    let image = format!("{folder}/raw.img");
    std::fs::write(&image, [0; 1 << 20]).expect("written");
    let raw = ["add", "--name", "raw", "-f", "raw", "--nbd", &format!("{folder}/raw.sock"), &image];
    ctl(&store, &raw).ok();
    ctl(&store, &["snapshot", "web", "<b>"]).ok();
    for number in 0..120 {
        ctl(&store, &["snapshot", "web", &format!("s{number}")]).ok();
    }
    let tree = get(&control, "/v1/tree/web");
    let snapshots = tree["snapshots"].as_array().expect("an array");
    assert_eq!((&tree["snapshot_count"], snapshots.len()), (&121.into(), 100), "{tree}");
    assert_eq!(snapshots.last().expect("one")["sequence"], 121);
    assert!(get(&control, "/v1/tree/raw")["error"].is_string());
    assert!(get(&control, "/v1/tree/none")["error"].is_string());
    server.stop().expect("stopped");
}

#[test]
fn page_is_told_what_a_served_clone_was_made_from() {
    let store = Store::new();
    store.create("gold", "16M");
    run(["snapshot", &store.volume("gold"), "v1"]).ok();
    let source = format!("{}@v1", store.volume("gold"));
    run(["clone", &source, &store.volume("web")]).ok();
    let control = store.folder().join("control").display().to_string();
    let server = store.serve("web", &["--control", &control]).expect("served");
    assert_eq!(get(&control, "/v1/tree/web")["cloned_from"], "gold@v1");
    let tree = ctl(&store, &["tree", "web"]).ok();
    assert!(tree.contains(", cloned from gold@v1\n"), "{tree}");
    server.stop().expect("stopped");
}

fn get(control: &str, path: &str) -> serde_json::Value {
    let mut stream = UnixStream::connect(control).expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    let (_, body) = answer.split_once("\r\n\r\n").expect("an answer");
    serde_json::from_str(body).expect("JSON")
}

fn damage_an_extent(store: &Store) {
    let folder = store.folder().join("store/extents");
    let writers = std::fs::read_dir(folder).expect("extents").map(|writer| writer.expect("one"));
    let extents = writers.flat_map(|writer| std::fs::read_dir(writer.path()).expect("extents"));
    let extents = extents.map(|extent| extent.expect("one").path());
    let len = |path: &std::path::PathBuf| path.metadata().expect("there").len();
    let largest = extents.max_by_key(len).expect("there is one");
    let mut bytes = std::fs::read(&largest).expect("read");
    bytes[4096 + 100] ^= 1;
    std::fs::remove_file(&largest).expect("removed");
    std::fs::write(&largest, bytes).expect("written");
}

/// Who was taken over cannot put what it has: that is said, and what is there is shown.
#[test]
fn what_the_store_lacks_is_said() {
    let store = Store::new();
    store.create("web", "16M");
    let control = store.folder().join("control").display().to_string();
    let server = store.serve("web", &["--control", &control]).expect("served");
    let mut guest = Guest::connect(&server).expect("a guest");
    let other = store.serve("web", &["--force"]).expect("served");
    // It does not know yet.
    assert_eq!(guest.write(0, &[7; 4096]).expect("answered"), 0);
    let found = ctl(&store, &["--output", "json", "info", "web"]);
    assert!(found.stderr.contains("the last writes to web may not be in its store"), "{found}");
    assert_eq!(found.json()["state"], "open");
    // It knows it once it is to end; what it has lost stays lost.
    assert_eq!(ctl(&store, &["drain", "web"]).code(), Some(1));
    let found = ctl(&store, &["info", "web"]);
    assert!(found.stderr.contains("the last writes to web may not be in its store"), "{found}");
    drop((server, other));
}

/// A volume whose store does not answer those who open it.
#[test]
fn what_the_store_lacks_of_a_volume_that_is_being_opened_is_not_known() {
    let store = Store::new();
    for name in ["db", "web"] {
        store.create(name, "16M");
    }
    let folder = store.folder().display().to_string();
    let control = format!("{folder}/control");
    let server = store.serve("db", &["--control", &control]).expect("served");
    let mut add = Command::new(mica::binary());
    add.args(["ctl", "--control", &control, "add", "--nbd", &format!("{folder}/socket")]);
    add.args(["--volume", &store.volume("web"), "--inject", "hang=100%,op=read"]);
    let mut adding = add.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("started");
    let found = clock::poll(LIMIT, PAUSE, || {
        let found = ctl(&store, &["info", "web"]);
        found.status.success().then_some(found)
    });
    adding.kill().expect("killed");
    adding.wait().expect("ended");
    let said = found.expect("it is a disk").stderr;
    assert!(said.contains("may not be in its store") && said.contains("being opened"), "{said}");
    drop(server);
}
