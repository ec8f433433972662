//! Internal snapshots of which one has the name that is the ID of another: QEMU makes such.

use mica_tests::command::{self, Finished};
use mica_tests::{mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// An image with snapshots "2" (ID 1) of ones, and "3" (ID 2) of twos.
fn ambiguous(dir: &Path) {
    qemu::create(dir, "disk.qcow2", &[], "1M");
    for (pattern, name) in [("1", "2"), ("2", "3")] {
        qemu::io(dir, &[], "disk.qcow2", &[&format!("write -P {pattern} 0 1M")]);
        qemu::img(dir, ["snapshot", "-c", name, "disk.qcow2"]).ok();
    }
}

/// The story: `mica snapshot -d 2` deleted snapshot "3", and `diff`, `backup` and `convert` read
/// that.
#[test]
fn word_that_is_an_id_and_another_name_is_refused_by_all_verbs() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    ambiguous(dir);
    for words in [
        &["snapshot", "-d", "2", "disk.qcow2"][..],
        &["snapshot", "-a", "2", "disk.qcow2"],
        &["diff", "disk.qcow2@2", "disk.qcow2"],
        &["backup", "disk.qcow2@2", "kept"],
        &["convert", "-l", "2", "disk.qcow2", "copy.qcow2"],
        &["measure", "-l", "2", "disk.qcow2"],
    ] {
        let refused = mica_in(dir, words).refusal();
        assert!(refused.contains("snapshot.id=2 or snapshot.name=2"), "{words:?}: {refused}");
    }
    let same = mica_in(dir, &["diff", "--summary", "disk.qcow2@snapshot.id=2", "disk.qcow2"]);
    assert!(same.ok().contains("0 ranges"));
    mica_in(dir, &["snapshot", "-d", "snapshot.name=2", "disk.qcow2"]).ok();
    let left = mica_in(dir, &["snapshot", "-l", "--output", "json", "disk.qcow2"]).json();
    assert_eq!(left.as_array().map(Vec::len), Some(1), "{left}");
    assert_eq!(left[0]["name"], "3");
}

/// The story: both prefixes were cut off, and what was left was taken for an ID first: the copy was
/// that of another snapshot.
#[test]
fn snapshots_are_copied_by_what_the_parameters_say() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    ambiguous(dir);
    for (said, byte) in [
        ("snapshot.name=2", 1),
        ("snapshot.id=2", 2),
        ("snapshot.id=1,snapshot.name=2", 1),
        ("3", 2),
    ] {
        let words = ["convert", "--force", "-O", "raw", "-l", said, "disk.qcow2", "mica.raw"];
        mica_in(dir, &words).ok();
        assert_eq!(fs::read(dir.join("mica.raw")).expect("it is there")[0], byte, "{said}");
        qemu::img(dir, ["convert", "-O", "raw", "-l", said, "disk.qcow2", "qemu.raw"]).ok();
        assert_eq!(fs::read(dir.join("qemu.raw")).expect("it is there")[0], byte, "{said}");
        mica_in(dir, &["measure", "-l", said, "disk.qcow2"]).ok();
    }
    for said in ["snapshot.name=1", "snapshot.id=3", "snapshot.id=1,snapshot.name=3"] {
        let words = ["convert", "-l", said, "disk.qcow2", "none.qcow2"];
        mica_in(dir, &words).refusal();
        mica_in(dir, &["measure", "-l", said, "disk.qcow2"]).refusal();
    }
}
