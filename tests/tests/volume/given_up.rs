//! What is given up on purpose: logs of volumes that are gone, and snapshots that are old.

use mica_tests::volume::{Store, run};
use mica_tests::{command, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

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
