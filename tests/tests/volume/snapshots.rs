//! Snapshots, clones, rollback and differences, judged by qemu-img through exports and servers.

use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::volume::{Store, run};
use mica_tests::{clock, command, mica, tools};
use serde_json::{Value, json};
use std::process::Command;
use std::time::Duration;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IO, tools::NBDCOPY];
const SIZE: usize = 16 << 20;

/// Writes `byte` to a part of a volume that nobody has open.
#[track_caller]
fn write(store: &Store, name: &str, byte: u8, place: &str) {
    let server = store.serve(name, &[]).expect("served");
    let write = format!("write -P {byte} {place}");
    command::run("qemu-io", ["-f", "raw", "-c", &write, "-c", "flush", &server.uri()]).ok();
    stop(server);
}

#[track_caller]
fn stop(server: Server) {
    assert_eq!(server.stop().expect("it stops").status.code(), Some(0));
}

/// All bytes of a volume or a snapshot, through a server of it.
#[track_caller]
fn content(store: &Store, name: &str) -> Vec<u8> {
    let server = store.serve(name, &["--read-only"]).expect("served");
    let file = store.folder().join("content.raw");
    command::run("nbdcopy", [&*server.uri(), &file.display().to_string()]).ok();
    stop(server);
    std::fs::read(&file).expect("copied")
}

fn expected(parts: &[(usize, usize, u8)]) -> Vec<u8> {
    let mut all = vec![0; SIZE];
    for (start, len, byte) in parts {
        all[*start..start + len].fill(*byte);
    }
    all
}

fn labels(all: &Value) -> Vec<&str> {
    all.as_array().expect("an array").iter().filter_map(|one| one["label"].as_str()).collect()
}

const MB: usize = 1 << 20;
const BLOCK: usize = 4096;

#[test]
fn snapshots_keep_what_was_and_a_rollback_brings_it_back() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let url = store.volume("web");
    write(&store, "web", 1, "0 4M");
    run(["snapshot", &url, "a"]).ok();
    write(&store, "web", 2, "2M 4M");
    let taken = run(["snapshot", &url, "b", "--output", "json"]).json();
    assert_eq!((&taken["label"], &taken["sequence"]), (&"b".into(), &2.into()));
    write(&store, "web", 3, "3M 1M");

    let all = run(["snapshots", &url, "--output", "json"]).json();
    assert_eq!(labels(&all), ["a", "b"]);
    assert!(all[0]["time"].as_str().expect("a time") <= all[1]["time"].as_str().expect("a time"));
    let a = expected(&[(0, 4 * MB, 1)]);
    let b = expected(&[(0, 4 * MB, 1), (2 * MB, 4 * MB, 2)]);
    let now = expected(&[(0, 4 * MB, 1), (2 * MB, 4 * MB, 2), (3 * MB, MB, 3)]);
    assert!(content(&store, "web@a") == a && content(&store, "web@b") == b);
    assert!(content(&store, "web@2") == b, "by its number");
    assert!(content(&store, "web") == now);

    run(["rollback", &format!("{url}@a")]).ok();
    assert!(content(&store, "web") == a);
    assert!(content(&store, "web@b") == b, "later snapshots stay");
    let twice = run(["snapshot", &url, "b"]).refusal();
    assert!(twice.contains('b'), "{twice}");
    run(["label", &format!("{url}@b"), "later"]).ok();
    run(["drop", &format!("{url}@a")]).ok();
    assert_eq!(labels(&run(["snapshots", &url, "--output", "json"]).json()), ["later"]);
    let missing = run(["rollback", &format!("{url}@a")]).refusal();
    assert!(missing.contains('a'), "{missing}");
    assert!(store.serve("web@a", &[]).is_err());
    assert_eq!(run(["check", &url, "--output", "json"]).json()[0]["damaged-count"], 0);
}

#[test]
fn clone_begins_as_its_source_and_goes_its_own_way() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("gold", "16M");
    write(&store, "gold", 1, "0 4M");
    run(["snapshot", &store.volume("gold"), "v1"]).ok();
    write(&store, "gold", 2, "0 1M");
    let source = format!("{}@v1", store.volume("gold"));
    for clone in ["one", "two"] {
        run(["clone", &source, &store.volume(clone)]).ok();
    }
    write(&store, "one", 3, "1M 1M");
    assert!(content(&store, "one") == expected(&[(0, 4 * MB, 1), (MB, MB, 3)]));
    assert!(content(&store, "two") == expected(&[(0, 4 * MB, 1)]));
    assert!(content(&store, "gold") == expected(&[(0, 4 * MB, 1), (0, MB, 2)]));
    let taken = run(["clone", &source, &store.volume("two")]).refusal();
    assert!(taken.contains("already"), "{taken}");
    let elsewhere = Store::new();
    let far = run(["clone", &source, &elsewhere.volume("three")]).refusal();
    assert!(far.contains("in the store of its source"), "{far}");
    let picture = run(["tree", "--output", "svg", &store.url()]).ok();
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"), "{picture}");
    assert!(picture.contains(">gold<") && picture.contains(">@v1<"), "{picture}");
    assert_eq!(picture.matches(", cloned from gold@v1<").count(), 2, "{picture}");
    run(["delete", &store.volume("gold")]).ok();
    assert!(content(&store, "two") == expected(&[(0, 4 * MB, 1)]), "the source is gone");
    let tree = run(["tree", &store.url()]).ok();
    assert!(tree.contains("─ one ") && tree.contains("─ two "), "{tree}");
    assert!(!tree.contains("─ gold ") && !tree.contains("@v1"), "{tree}");
}

/// What is said of a clone of the first snapshot of `gold`.
fn from_gold(label: Option<&str>, state: &str) -> Value {
    json!({ "name": "gold", "sequence": 1, "label": label, "state": state })
}

/// The story: of a store with a hundred clones nobody could tell what each was made from.
#[test]
fn tree_and_info_say_what_a_clone_was_made_from() {
    let store = Store::new();
    store.create("gold", "16M");
    let [gold, web, copy] = ["gold", "web", "copy"].map(|name| store.volume(name));
    run(["snapshot", &gold, "v1"]).ok();
    run(["clone", &format!("{gold}@v1"), &web]).ok();
    run(["clone", &web, &copy]).ok();
    let of_tree = |name: &str| {
        let all = run(["tree", &store.url(), "--output", "json"]).json();
        let all = all.as_array().expect("volumes").clone();
        all.into_iter().find(|one| one["name"] == name).expect("it is there")["cloned-from"].clone()
    };
    let info = |url: &str| run(["info", url, "--output", "json"]).json()["cloned-from"].clone();
    let alone = |url: &str| run(["tree", url, "--output", "json"]).json()[0]["cloned-from"].clone();
    let is_said = |wanted: &Value, text: &str| {
        for said in [of_tree("web"), info(&web), alone(&web)] {
            assert_eq!(said, *wanted);
        }
        let said = run(["info", &web]).ok();
        assert!(said.contains(&format!("\ncloned from: {text}\n")), "{said}");
        for url in [&store.url(), &web] {
            let said = run(["tree", url]).ok();
            assert!(said.contains(&format!(", closed, cloned from {text}\n")), "{said}");
        }
    };
    assert_eq!((of_tree("gold"), info(&gold)), (Value::Null, Value::Null));
    is_said(&from_gold(Some("v1"), "there"), "gold@v1");
    let whole = json!({ "name": "web", "sequence": null, "label": null, "state": "there" });
    assert_eq!((of_tree("copy"), info(&copy)), (whole.clone(), whole));
    let drawn = run(["tree", "--dot", &store.url()]).ok();
    for edge in [r#""gold@1" -> "web" [style=dashed];"#, r#""web" -> "copy" [style=dashed];"#] {
        assert!(drawn.contains(edge), "{drawn}");
    }
    let drawn = run(["tree", "--dot", &web]).ok();
    assert!(drawn.contains(r#""/web" [label="gold@v1", style=dashed];"#), "{drawn}");
    assert!(drawn.contains(r#""/web" -> "web" [style=dashed];"#), "{drawn}");

    run(["label", &format!("{gold}@v1"), "v2"]).ok();
    is_said(&from_gold(Some("v2"), "there"), "gold@v2");
    run(["drop", &format!("{gold}@v2")]).ok();
    is_said(&from_gold(None, "snapshot-dropped"), "gold, snapshot 1 (since dropped)");
    run(["delete", &gold]).ok();
    store.create("gold", "16M");
    is_said(&from_gold(None, "deleted"), "gold (since deleted), snapshot 1");
}

#[test]
fn differences_cover_what_was_changed_and_no_more_than_its_blocks() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let url = store.volume("web");
    write(&store, "web", 1, "0 4M");
    run(["snapshot", &url, "a"]).ok();
    write(&store, "web", 2, "1M 64k");
    write(&store, "web", 3, "8M 4k");
    run(["snapshot", &url, "b"]).ok();
    let [a, b] = ["a", "b"].map(|label| format!("{url}@{label}"));
    let found = run(["diff", &a, &b, "--output", "json"]).json();
    let wanted = serde_json::json!([
        {"start": MB, "length": 64 << 10},
        {"start": 8 * MB, "length": 4096},
    ]);
    assert_eq!(found, wanted);
    assert_eq!(run(["diff", &a, &a, "--output", "json"]).json(), serde_json::json!([]));
    assert_eq!(run(["diff", &b, &url, "--output", "json"]).json(), serde_json::json!([]));
}

/// The story: the host lost its server, and somebody takes a snapshot before it is started again.
#[test]
fn snapshot_after_a_kill_has_what_was_flushed() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let server = store.serve("web", &[]).expect("served");
    let uri = server.uri();
    command::run("qemu-io", ["-f", "raw", "-c", "write -P 9 0 1M", "-c", "flush", &uri]).ok();
    let open = run(["snapshot", &store.volume("web"), "early"]).refusal();
    assert!(open.contains("mica ctl snapshot web early"), "{open}");
    drop(server);
    run(["snapshot", &store.volume("web"), "late"]).ok();
    assert!(content(&store, "web@late") == expected(&[(0, MB, 9)]));
}

#[test]
fn snapshot_is_taken_while_a_guest_writes() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let control = store.folder().join("control").display().to_string();
    let server = store.serve("web", &["--control", &control]).expect("served");
    let ctl = |words: &[&str]| ctl(&store, &[&["--output", "json"], words].concat());
    let uri = server.uri();
    let io = |write: &str| command::run("qemu-io", ["-f", "raw", "-c", write, &uri]).ok();
    io("write -P 1 0 1M");
    let taken = ctl(&["snapshot", "web", "a"]).json();
    assert_eq!((&taken["label"], &taken["sequence"]), (&"a".into(), &1.into()));
    io("write -P 2 0 1M");
    ctl(&["snapshot", "web", "b"]).json();
    io("write -P 3 0 1M");
    assert_eq!(labels(&ctl(&["snapshots", "web"]).json()), ["a", "b"]);
    ctl(&["label", "web", "b", "c"]).json();
    ctl(&["drop", "web", "a"]).json();
    assert_eq!(labels(&ctl(&["snapshots", "web"]).json()), ["c"]);
    stop(server);
    assert!(content(&store, "web@c") == expected(&[(0, MB, 2)]));
    assert!(content(&store, "web") == expected(&[(0, MB, 3)]));
}

#[test]
fn volume_that_is_served_is_cloned_and_compared() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let control = store.folder().join("control").display().to_string();
    let log = store.folder().join("log").display().to_string();
    let options =
        ["--control", &control, "--log-device", &log, "--log-size", "64M", "--sandbox", "require"];
    let server = store.serve("web", &options).expect("served");
    let ctl = |words: &[&str]| ctl(&store, &[&["--output", "json"], words].concat());
    let uri = server.uri();
    let io = |write: &str| command::run("qemu-io", ["-f", "raw", "-c", write, &uri]).ok();
    io("write -P 1 0 1M");
    ctl(&["snapshot", "web", "a"]).json();
    io("write -P 2 4M 64k");
    ctl(&["snapshot", "web", "b"]).json();
    io("write -P 3 8M 4k");
    let range = |start: usize, len: usize| json!({ "start": start, "length": len });
    let since = [range(4 * MB, 64 << 10), range(8 * MB, 4 << 10)];
    assert_eq!(ctl(&["diff", "web@a"]).json(), json!(since));
    assert_eq!(ctl(&["diff", "web@a", "b"]).json(), json!(since[..1]));
    assert_eq!(ctl(&["clone", "web@a", "one"]).json()["volume"], "one");
    ctl(&["clone", "web", "two"]).json();
    for (name, sequence) in [("one", json!(1)), ("two", Value::Null)] {
        let info = run(["info", &store.volume(name), "--output", "json"]).json();
        let from = &info["cloned-from"];
        assert_eq!((&from["name"], &from["sequence"]), (&"web".into(), &sequence));
    }
    assert_eq!(labels(&ctl(&["snapshots", "web"]).json()), ["a", "b"], "nothing is left of it");
    for (words, why) in [
        (&["clone", "web@a", "one"][..], "already"),
        (&["clone", "web@c", "three"], "no snapshot"),
        (&["diff", "web"], "DISK@LABEL"),
    ] {
        let refused = ctl(words).refusal();
        assert!(refused.contains(why), "{refused}");
    }
    io("write -P 4 0 4k");
    stop(server);
    assert!(content(&store, "one") == expected(&[(0, MB, 1)]));
    let now = [(0, MB, 1), (4 * MB, 64 << 10, 2), (8 * MB, 4 << 10, 3)];
    assert!(content(&store, "two") == expected(&now));
}

/// The story: a volume was rolled back under its guest, which wrote what it had read before into
/// what there was then.
#[test]
fn volume_that_is_served_is_rolled_back_once_it_is_drained() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let control = store.folder().join("control").display().to_string();
    let log = store.folder().join("log").display().to_string();
    let options =
        ["--control", &control, "--log-device", &log, "--log-size", "64M", "--sandbox", "require"];
    let server = store.serve("web", &options).expect("served");
    let uri = server.uri();
    let io = |what: &str| command::run("qemu-io", ["-f", "raw", "-c", what, &uri]).ok();
    io("write -P 1 0 1M");
    ctl(&store, &["snapshot", "web", "a"]).ok();
    io("write -P 2 512k 1M");
    let back = ["rollback", "web@a"];
    let refused = ctl(&store, &back).refusal();
    assert!(refused.contains("mica ctl drain web"), "{refused}");
    let refused = run(["rollback", &store.volume("web@a")]).refusal();
    assert!(refused.contains("mica ctl rollback web@a"), "{refused}");
    io("read -P 2 512k 1M");
    ctl(&store, &["drain", "web"]).ok();
    for (words, why) in [(["rollback", "web@b"], "no snapshot"), (["rollback", "web"], "@LABEL")] {
        let refused = ctl(&store, &words).refusal();
        assert!(refused.contains(why), "{refused}");
    }
    assert_eq!(ctl(&store, &back).ok(), "web: rolled back to a\n");
    ctl(&store, &["undrain", "web"]).ok();
    io("read -P 1 0 1M");
    io("read -P 0 1M 15M");
    io("write -P 3 1M 4k");
    stop(server);
    assert!(content(&store, "web") == expected(&[(0, MB, 1), (MB, 4 << 10, 3)]));
}

/// The story: a server that only reads a volume changed it.
#[test]
fn drained_volume_that_is_served_read_only_is_not_rolled_back_by_its_server() {
    let store = Store::new();
    store.create("web", "16M");
    run(["snapshot", "-q", &store.volume("web"), "a"]).ok();
    let control = store.folder().join("control").display().to_string();
    // Nothing else keeps it from that.
    let options = ["--read-only", "--control", &control, "--sandbox", "off"];
    let server = store.serve("web", &options).expect("served");
    ctl(&store, &["drain", "web"]).ok();
    let refused = ctl(&store, &["rollback", "web@a"]).refusal();
    assert!(refused.contains("read-only"), "{refused}");
    run(["rollback", "-q", &store.volume("web@a")]).ok();
    stop(server);
}

/// Serves the volumes `names` of one store at one socket, with one log and a control socket.
fn serve_all(store: &Store, names: &[&str], more: &str) -> Server {
    let (config, log) = (store.folder().join("mica.toml"), store.folder().join("log"));
    let control = store.folder().join("control");
    let started = Server::start(names[0], |socket| {
        let table = |name: &&str| {
            format!(
                "[[disk]]\nname = {name:?}\nvolume = {:?}\nnbd = {:?}\nlog-device = {:?}\n\
                 log-size = \"64M\"\n{more}\n",
                store.volume(name),
                socket.display().to_string(),
                log.display().to_string(),
            )
        };
        std::fs::write(&config, names.iter().map(table).collect::<String>()).expect("written");
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--config").arg(&config).arg("--control").arg(&control);
        serve
    });
    started.expect("served")
}

pub(crate) fn ctl(store: &Store, words: &[&str]) -> command::Finished {
    let control = store.folder().join("control").display().to_string();
    mica::run(["ctl", "--control", &control].into_iter().chain(words.iter().copied()))
}

#[test]
fn group_of_volumes_gets_snapshots_together_or_none() {
    let store = Store::new();
    for name in ["web", "db"] {
        store.create(name, "16M");
    }
    let server = serve_all(&store, &["web", "db"], "");
    let taken = ctl(&store, &["--output", "json", "snapshot", "web", "one", "--with", "db"]).json();
    let disks: Vec<_> = taken.as_array().expect("two").iter().map(|one| &one["disk"]).collect();
    assert_eq!(disks, ["web", "db"]);
    ctl(&store, &["snapshot", "db", "two"]).ok();
    for (words, why) in [
        (["snapshot", "web", "two", "--with", "db"], "volume db: there is a snapshot \"two\""),
        (["snapshot", "web", "two", "--with", "web"], "named twice"),
        (["snapshot", "web", "two", "--with", "no"], "no disk"),
    ] {
        let refused = ctl(&store, &words).refusal();
        assert!(refused.contains(why), "{refused}");
    }
    ctl(&store, &["drain", "db"]).ok();
    let refused = ctl(&store, &["snapshot", "web", "two", "--with", "db"]).refusal();
    assert!(refused.contains("disk db"), "{refused}");
    stop(server);
    for (name, expected) in [("web", &["one"][..]), ("db", &["one", "two"])] {
        let all = run(["snapshots", &store.volume(name), "--output", "json"]).json();
        assert_eq!(labels(&all), expected);
    }
}

#[test]
fn server_takes_snapshots_by_rules_while_the_volume_is_written() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    store.create("web", "16M");
    let server = serve_all(&store, &["web"], "keep = \"1h/50ms\"");
    for byte in 1..=5 {
        let before = ctl(&store, &["--output", "json", "snapshots", "web"]).json();
        // One block: no snapshot has a part of it.
        let write = format!("write -P {byte} 0 {BLOCK}");
        command::run("qemu-io", ["-f", "raw", "-c", &write, "-c", "flush", &server.uri()]).ok();
        let count = |all: &Value| all.as_array().map_or(0, Vec::len);
        let is_taken = || {
            let after = ctl(&store, &["--output", "json", "snapshots", "web"]).json();
            (count(&after) > count(&before)).then_some(())
        };
        let limit = Duration::from_secs(20);
        assert!(clock::poll(limit, Duration::from_millis(20), is_taken).is_some(), "{byte}");
    }
    stop(server);
    // The newest has what was written last.
    let all = run(["snapshots", &store.volume("web"), "--output", "json"]).json();
    let last = all.as_array().and_then(|all| all.last()).expect("five")["sequence"].clone();
    assert!(labels(&all).iter().all(|label| label.is_empty()));
    let content = content(&store, &format!("web@{last}"));
    assert!(content[..BLOCK].iter().all(|byte| *byte == 5));
}

/// The story: somebody deleted a file, and every state of the disk before was there.
#[test]
fn each_write_or_each_flush_of_a_guest_has_a_snapshot() {
    let labelled = |text: &str| format!("keep = \"1h/1ms\"\nsnapshot-per = {text:?}");
    for (per, flushes, wanted) in [("write", false, 5), ("flush", true, 5), ("flush", false, 0)] {
        let store = Store::new();
        store.create("web", "16M");
        let server = serve_all(&store, &["web"], &labelled(per));
        let mut guest = Guest::connect(&server).expect("served");
        for byte in 1..=5 {
            assert_eq!(guest.write(0, &[byte; BLOCK]).expect("written"), 0);
            if flushes {
                assert_eq!(guest.flush().expect("flushed"), 0);
                assert_eq!(guest.flush().expect("nothing is new"), 0);
            }
        }
        // Rules drop at most one of each millisecond, and no snapshot is taken in so little time
        // but where nothing is awaited in between.
        let all = ctl(&store, &["--output", "json", "snapshots", "web"]).json();
        let last = all.as_array().and_then(|all| all.last()).map(|last| last["sequence"].clone());
        assert_eq!(last.unwrap_or_else(|| 0.into()), wanted, "{per}: {all}");
        if wanted == 0 {
            assert_eq!(all, serde_json::json!([]));
        }
        // qemu-nbd and others flush when they leave.
        drop(guest);
        stop(server);
        let third = all.as_array().into_iter().flatten().find(|one| one["sequence"] == 3);
        if let (Some(_), true) = (third, tools::present(TOOLS)) {
            assert!(content(&store, "web@3")[..BLOCK].iter().all(|byte| *byte == 3), "{per}");
        }
    }
    let store = Store::new();
    store.create("web", "16M");
    let refused = format!("{:#}", store.serve("web", &["--snapshot-per", "write"]).unwrap_err());
    assert!(refused.contains("--keep"), "{refused}");
}
