//! A frozen layer that another program changed is noticed at open, the index is rebuilt, and the
//! right bytes are served.

use mica_tests::{clock, judge, mica, qemu, tools};
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A chain of four layers, indexed.
fn chain(dir: &Path) {
    qemu::create(dir, "layer-0.qcow2", &[], "16M");
    qemu::io(dir, &[], "layer-0.qcow2", &["write -P 1 0 4M", "write -P 2 10M 1M"]);
    for layer in 1..4 {
        let (name, below) = (format!("layer-{layer}.qcow2"), format!("layer-{}.qcow2", layer - 1));
        qemu::overlay(dir, &name, &below, &[]);
        let write = format!("write -P {} {layer}M 600k", 16 + layer);
        qemu::io(dir, &[], &name, &[&write]);
    }
    build(dir);
}

fn active(dir: &Path) -> String {
    dir.join("layer-3.qcow2").display().to_string()
}

/// Builds the index and waits until timestamps prove that it matches, which they do only for layers
/// that have been left alone for a second.
fn build(dir: &Path) {
    let sealed = clock::poll(Duration::from_secs(120), Duration::from_millis(300), || {
        mica::run(["index", "build", &active(dir)]).ok();
        (sealed(dir) == 3).then_some(())
    });
    assert!(sealed.is_some(), "all frozen layers are indexed");
}

/// How many sidecars are proven to match.
fn sealed(dir: &Path) -> usize {
    let said = mica::run(["index", "status", "--output", "json", &active(dir)]).json();
    let layers = said["layers"].as_array().expect("layers").iter();
    layers.filter(|layer| layer["state"] == "sealed").count()
}

#[track_caller]
fn noticed(what: &str, change: impl FnOnce(&Path)) {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    judge::same_as_qemu(dir, "layer-3.qcow2");
    change(dir);
    assert!(sealed(dir) < 3, "{what}: every sidecar is still said to fit");
    judge::same_as_qemu(dir, "layer-3.qcow2");
    // Once more, with what the first run left behind.
    judge::same_as_qemu(dir, "layer-3.qcow2");
    build(dir);
    judge::same_as_qemu(dir, "layer-3.qcow2");
}

#[test]
fn an_overlay_committed_into_a_frozen_layer_is_noticed() {
    noticed("commit", |dir| {
        // Layer 2 is committed into layer 1; what is above sees the same, but from elsewhere.
        qemu::img(dir, ["commit", "-q", "-f", "qcow2", "layer-2.qcow2"]).ok();
    });
}

#[test]
fn a_write_through_a_reopen_is_noticed() {
    noticed("reopen", |dir| {
        let reopen = ["reopen -w", "write -P 99 3M 100k", "write -P 98 12M 64k"];
        qemu::io(dir, &["-r", "-f", "qcow2"], "layer-1.qcow2", &reopen);
    });
}

#[test]
fn a_plain_write_into_a_frozen_layer_is_noticed() {
    noticed("write", |dir| {
        qemu::io(dir, &["-f", "qcow2"], "layer-0.qcow2", &["write -P 77 9M 64k"]);
    });
}

#[test]
fn a_replacement_of_the_same_size_and_time_is_noticed() {
    noticed("replacement", |dir| {
        let old = dir.join("layer-1.qcow2");
        let kept = fs::metadata(&old).expect("there");
        // The same writes elsewhere, so that the file has the same length.
        qemu::overlay(dir, "new.qcow2", "layer-0.qcow2", &[]);
        qemu::io(dir, &[], "new.qcow2", &["write -P 55 5M 600k"]);
        let new = dir.join("new.qcow2");
        assert_eq!(fs::metadata(&new).expect("there").len(), kept.len(), "the same size");
        let times = fs::FileTimes::new().set_modified(kept.modified().expect("a time"));
        fs::rename(&new, &old).expect("replaced");
        let file = File::options().write(true).open(&old).expect("there");
        file.set_times(times).expect("set");
    });
}

#[test]
fn a_change_in_place_with_the_time_set_back_is_noticed() {
    noticed("set back", |dir| {
        let path = dir.join("layer-1.qcow2");
        let before = fs::metadata(&path).expect("there");
        let len = before.len();
        // Guest clusters are swapped: the same L2 table, other entries.
        qemu::io(dir, &["-f", "qcow2"], "layer-1.qcow2", &["write -z 1M 128k"]);
        let file = File::options().write(true).open(&path).expect("there");
        file.set_len(len).expect("the same length");
        let modified = before.modified().expect("a time");
        file.set_times(fs::FileTimes::new().set_modified(modified)).expect("set");
    });
}

#[test]
fn a_chain_that_was_copied_is_served_right() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let [old, new] = [(); 2].map(|()| tempfile::tempdir().expect("a folder"));
    chain(old.path());
    for file in fs::read_dir(old.path()).expect("listed") {
        let file = file.expect("listed");
        fs::copy(file.path(), new.path().join(file.file_name())).expect("copied");
    }
    judge::same_as_qemu(new.path(), "layer-3.qcow2");
    // The copy is changed further: its old index must not be trusted for it.
    qemu::io(new.path(), &["-f", "qcow2"], "layer-1.qcow2", &["write -P 66 6M 1M"]);
    judge::same_as_qemu(new.path(), "layer-3.qcow2");
    judge::same_as_qemu(old.path(), "layer-3.qcow2");
}

#[test]
fn a_layer_that_was_only_touched_is_served_right() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    chain(dir.path());
    let file = File::options().write(true).open(dir.path().join("layer-1.qcow2")).expect("there");
    file.set_modified(SystemTime::now()).expect("set");
    judge::same_as_qemu(dir.path(), "layer-3.qcow2");
}
