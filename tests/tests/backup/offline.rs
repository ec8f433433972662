//! States of images that nobody serves.

use crate::restored::restored;
use mica_tests::kept::raw;
use mica_tests::{clock, command, judge, mica, qemu, tools};
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A disk with two kept states and what came after, in a folder.
fn disk() -> Option<TempDir> {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path();
    qemu::create(at, "disk@mon.qcow2", &[], "64M");
    qemu::io(at, &[], "disk@mon.qcow2", &["write -P 1 1M 3M", "write -P 2 40M 100k"]);
    qemu::overlay(at, "disk@tue.qcow2", "disk@mon.qcow2", &[]);
    let changes = ["write -P 3 2M 64k", "write -z 3M 1M", "discard 40M 64k", "write -P 0 50M 1M"];
    qemu::io(at, &[], "disk@tue.qcow2", &changes);
    qemu::overlay(at, "disk.qcow2", "disk@tue.qcow2", &[]);
    qemu::img(at, ["resize", "disk.qcow2", "80M"]).ok();
    qemu::io(at, &[], "disk.qcow2", &["write -P 4 70M 12k", "write -P 5 1M 512"]);
    Some(dir)
}

fn backup(dir: &Path, more: &[&str]) -> command::Finished {
    command::finish(
        Command::new(mica::binary())
            .args(["backup", "--output", "json"])
            .args(more)
            .current_dir(dir),
    )
}

#[test]
fn full_and_incremental_states_are_given_back() {
    let Some(dir) = disk() else { return };
    let at = dir.path();
    let full = backup(at, &["disk.qcow2@mon", "web"]).json();
    assert_eq!((&full["disk"], &full["state"]), (&"disk".into(), &"mon".into()), "{full}");
    assert_eq!(full["data-bytes"], (3 << 20) + (100 << 10), "{full}");
    // The file of a state is that state; and only what changed is read.
    let more = backup(at, &["--compress", "--since", "mon", "disk@tue.qcow2", "web"]).json();
    assert_eq!((&more["state"], &more["since"]), (&"tue".into(), &"mon".into()), "{more}");
    assert_eq!(more["data-bytes"], 64 << 10, "{more}");
    assert!(more["file-bytes"].as_u64().expect("a number") < 4096, "{more}");
    let last = backup(at, &["--since-last", "--as", "now", "disk.qcow2", "web"]).json();
    assert_eq!((&last["since"], &last["virtual-size"]), (&"tue".into(), &(80 << 20).into()));
    // Asked for again, it is there.
    let again = backup(at, &["--since", "mon", "disk.qcow2@tue", "web"]).json();
    assert_eq!(again["was-there"], true, "{again}");
    for (state, image) in
        [("mon", "disk@mon.qcow2"), ("tue", "disk@tue.qcow2"), ("now", "disk.qcow2")]
    {
        let wanted = raw(at, image);
        for format in ["qcow2", "raw"] {
            let given = restored(at, "web", state, format);
            judge::same_bytes(&format!("{state} as {format}"), &given, &wanted);
        }
    }
    // The newest, by default; and sparse.
    let folder = at.join("web").display().to_string();
    let file = at.join("new.qcow2").display().to_string();
    let luks = mica::run(["restore", "-O", "luks", &folder, &file]).refusal();
    assert!(luks.contains("does not create them"), "{luks}");
    let made = mica::run(["restore", "--output", "json", &folder, &file]).json();
    assert_eq!(made["state"], "now", "{made}");
    qemu::img(at, ["compare", "new.qcow2", "disk.qcow2"]).ok();
    qemu::img(at, ["check", "new.qcow2"]).ok();
    let taken = fs::metadata(at.join("new.qcow2")).expect("it is there").len();
    assert!(taken < 8 << 20, "{taken} bytes");
    let listed = mica::run(["backup", "list", "--output", "json", &folder]).json();
    let names = listed.as_array().expect("a list").iter().map(|state| state["state"].clone());
    assert_eq!(names.collect::<Vec<_>>(), ["mon", "tue", "now"]);
    mica::run(["backup", "verify", &folder]).ok();
}

#[test]
fn states_that_others_go_on_from_are_removed() {
    let Some(dir) = disk() else { return };
    let at = dir.path();
    backup(at, &["disk.qcow2@mon", "web"]).ok();
    backup(at, &["-c", "--since", "mon", "disk.qcow2@tue", "web"]).ok();
    backup(at, &["--since", "tue", "--as", "now", "disk.qcow2", "web"]).ok();
    let prune = |more: &[&str]| {
        let mut mica = Command::new(mica::binary());
        command::finish(mica.args(["backup", "prune"]).args(more).arg("web").current_dir(at))
    };
    let names = |answer: &serde_json::Value| -> Vec<String> {
        let states = answer.as_array().expect("a list").iter();
        states.map(|state| state["state"].as_str().expect("a name").to_owned()).collect()
    };
    let would = prune(&["-n", "--output", "json", "--keep", "1"]).json();
    assert_eq!(names(&would["removed"]), ["mon", "tue"], "{would}");
    let listed = || mica::run(["backup", "list", "--output", "json", &web(at)]).json();
    assert_eq!(names(&listed()), ["mon", "tue", "now"]);
    // The one in the middle was compressed, and the first goes on without it.
    let all = prune(&["--output", "json", "--keep", "2"]).json();
    assert_eq!(
        (names(&all["removed"]), names(&all["merged"])),
        (vec!["mon".into()], vec!["tue".into()])
    );
    assert_eq!(all["merged"][0]["since"], serde_json::Value::Null, "{all}");
    for (state, image) in [("tue", "disk@tue.qcow2"), ("now", "disk.qcow2")] {
        judge::same_bytes(state, &restored(at, "web", state, "raw"), &raw(at, image));
    }
    // All were taken within the hour.
    let rules = prune(&["--output", "json", "--keep", "4w/1d"]).json();
    assert!(!names(&rules["removed"]).contains(&"now".to_owned()), "{rules}");
    prune(&["--keep", "1"]).ok();
    assert_eq!(names(&listed()), ["now"]);
    mica::run(["backup", "verify", &web(at)]).ok();
    judge::same_bytes("now", &restored(at, "web", "now", "raw"), &raw(at, "disk.qcow2"));
    for (words, why) in [(&["--keep", "0"][..], "at least 1"), (&["--keep", "1d"], "1d/1h")] {
        let said = prune(words);
        assert!(said.stderr.contains(why) && said.code() != Some(0), "{said}");
    }
}

fn web(at: &Path) -> String {
    at.join("web").display().to_string()
}

#[test]
fn streams_that_are_joined_are_a_disk() {
    let Some(dir) = disk() else { return };
    let script = r#"set -eu
        "$mica" backup disk.qcow2@mon - > mon
        "$mica" backup -c --since mon disk.qcow2@tue - > tue
        "$mica" backup --since tue --as now disk.qcow2 - > now
        cat mon tue now | "$mica" restore -q - all.qcow2
        cat mon tue now | "$mica" restore -q -O raw --to tue - tue.raw
        "$mica" backup disk.qcow2@mon web; "$mica" backup --since mon disk.qcow2@tue web
        cat web/mon.*.data web/tue.*.data | "$mica" restore -q - tue.qcow2
        "$mica" backup disk.qcow2@mon - | head -c 100000 > cut
        if "$mica" restore - cut.qcow2 < cut 2> cut.error; then exit 9; fi
        if "$mica" restore - tue2.qcow2 < tue 2> base.error; then exit 9; fi
        if cat mon now | "$mica" restore - gap.qcow2 2> gap.error; then exit 9; fi
        if "$mica" restore --to sun - sun.qcow2 < mon 2> sun.error; then exit 9; fi
        if "$mica" backup --since-last disk.qcow2 - 2> last.error; then exit 9; fi"#;
    let at = dir.path();
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).env("mica", mica::binary()).current_dir(at);
    command::finish(&mut shell).ok();
    for (one, format, other) in [
        ("all.qcow2", "qcow2", "disk.qcow2"),
        ("tue.raw", "raw", "disk@tue.qcow2"),
        ("tue.qcow2", "qcow2", "disk@tue.qcow2"),
    ] {
        qemu::img(at, ["compare", "-f", format, "-F", "qcow2", one, other]).ok();
    }
    for (error, told) in [
        ("cut.error", "ends too early"),
        ("base.error", "changed since \"mon\""),
        ("gap.error", "is not based on"),
        ("sun.error", "no state \"sun\""),
        ("last.error", "name one with --since"),
    ] {
        let error = fs::read_to_string(at.join(error)).expect("an error");
        assert!(error.contains(told) && error.lines().count() == 1, "{error}");
    }
    for file in ["cut.qcow2", "tue2.qcow2", "gap.qcow2", "sun.qcow2"] {
        assert!(!at.join(file).exists(), "{file} is not whole");
    }
}

#[test]
fn internal_snapshots_are_states() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path();
    qemu::create(at, "disk.qcow2", &[], "32M");
    qemu::io(at, &[], "disk.qcow2", &["write -P 1 0 3M"]);
    qemu::img(at, ["snapshot", "-c", "one", "disk.qcow2"]).ok();
    qemu::io(at, &[], "disk.qcow2", &["write -P 2 1M 64k", "write -z 2M 64k"]);
    qemu::img(at, ["snapshot", "-c", "two", "disk.qcow2"]).ok();
    qemu::io(at, &[], "disk.qcow2", &["write -P 9 0 1M"]);
    backup(at, &["disk.qcow2@one", "web"]).ok();
    let two = backup(at, &["--since-last", "disk.qcow2@two", "web"]).json();
    assert_eq!((&two["since"], &two["data-bytes"]), (&"one".into(), &(64 << 10).into()), "{two}");
    for state in ["one", "two"] {
        let from = format!("snapshot.name={state}");
        qemu::img(at, ["convert", "-l", &from, "-O", "raw", "disk.qcow2", "wanted"]).ok();
        let wanted = fs::read(at.join("wanted")).expect("converted");
        judge::same_bytes(state, &restored(at, "web", state, "qcow2"), &wanted);
    }
    // A raw image can be backed up whole.
    qemu::img(at, ["convert", "-O", "raw", "disk.qcow2", "disk.raw"]).ok();
    backup(at, &["--format", "raw", "--as", "now", "disk.raw", "raw"]).ok();
    judge::same_bytes("raw", &restored(at, "raw", "now", "raw"), &raw(at, "disk.qcow2"));
}

#[test]
fn what_cannot_be_backed_up_is_refused_in_a_line() {
    let Some(dir) = disk() else { return };
    let at = dir.path();
    let missing = backup(at, &["--since", "mon", "disk.qcow2@tue", "web"]).refusal();
    assert!(missing.contains("\"mon\"") && missing.contains("has none"), "{missing}");
    backup(at, &["disk.qcow2@mon", "web"]).ok();
    let unknown = backup(at, &["--since", "sun", "disk.qcow2@tue", "web"]).refusal();
    assert!(unknown.contains("mon, tue are kept"), "{unknown}");
    let nowhere = backup(at, &["disk.qcow2@sun", "web"]).refusal();
    assert!(nowhere.contains("sun"), "{nowhere}");
    let taken = backup(at, &["--as", "mon", "disk.qcow2", "web"]).refusal();
    assert!(taken.contains("already"), "{taken}");
    qemu::create(at, "other.qcow2", &[], "64M");
    let other = backup(at, &["--as", "x", "other.qcow2", "web"]).refusal();
    assert!(other.contains("\"disk\"") && other.contains("\"other\""), "{other}");
    backup(at, &["--as", "../x", "disk.qcow2", "web"]).refusal();
    // Another disk has the names by now.
    qemu::create(at, "disk@mon.qcow2", &[], "64M");
    qemu::io(at, &[], "disk@mon.qcow2", &["write -P 9 1M 3M"]);
    let another = backup(at, &["--since", "mon", "disk.qcow2@tue", "web"]).refusal();
    assert!(another.contains("is not that of"), "{another}");
    let full = backup(at, &["--since-last", "disk.qcow2@tue", "web"]);
    assert!(full.stderr.contains("making a full backup"), "{full}");
    assert!(full.json()["since"].is_null());
    backup(at, &["--as", "x", "disk.qcow2", "disk.qcow2"]).refusal();
    let none = mica::run(["restore", &at.display().to_string(), "/nowhere/x"]).refusal();
    assert!(none.contains("no state"), "{none}");
    let states =
        mica::run(["backup", "list", "--output", "json", &at.join("web").display().to_string()]);
    assert_eq!(states.json().as_array().map(Vec::len), Some(2));
}

/// The story: the file of an image that was restored into an empty file had a header before it had
/// any data: what a kill left was a valid image with part of the content.
#[test]
fn restore_that_is_killed_leaves_no_image_in_the_file_that_had_the_name() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let at = dir.path();
    let noise = |number: u32| number.wrapping_mul(2_654_435_761).rotate_left(number % 31);
    let bytes: Vec<u8> = (0..4 << 20).map(noise).flat_map(u32::to_le_bytes).collect();
    fs::write(at.join("disk.raw"), &bytes).expect("there is room");
    qemu::img(at, ["convert", "-f", "raw", "-O", "qcow2", "disk.raw", "disk.qcow2"]).ok();
    let mut backup = Command::new(mica::binary());
    let made = backup.args(["backup", "--as", "mon", "disk.qcow2", "-"]).current_dir(at).output();
    let stream = made.expect("it runs").stdout;
    assert!(stream.len() > 16 << 20, "{} bytes", stream.len());

    fs::write(at.join("new.qcow2"), "").expect("there is room");
    let restore = || {
        let mut command = Command::new(mica::binary());
        command.args(["restore", "-", "new.qcow2"]).current_dir(at);
        command.stdin(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it runs")
    };
    let mut killed = restore();
    let mut pipe = killed.stdin.take().expect("a pipe");
    pipe.write_all(&stream[..stream.len() - (1 << 20)]).expect("it reads");
    let left = at.join("new.qcow2");
    let is_filled = || fs::metadata(&left).is_ok_and(|file| file.len() > 1 << 20).then_some(());
    clock::poll(LIMIT, Duration::from_millis(2), is_filled).expect("it is being filled");
    killed.kill().expect("it runs still");
    killed.wait().expect("it was killed");
    mica::run(["info", &left.display().to_string()]).refusal();

    fs::write(&left, "").expect("there is room");
    let mut whole = restore();
    whole.stdin.take().expect("a pipe").write_all(&stream).expect("it reads");
    assert!(whole.wait().expect("it ends").success());
    qemu::img(at, ["check", "new.qcow2"]).ok();
    judge::same_bytes("restored in place", &raw(at, "new.qcow2"), &bytes);
}
