//! Import and export, judged by qemu-img.

use mica_tests::volume::{Store, run};
use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];

/// A chain of three layers that overlap, with zeros that hide data, and that grows.
fn chain(dir: &Path) {
    qemu::create(dir, "base.raw", &["-f", "raw"], "32M");
    qemu::io(dir, &["-f", "raw"], "base.raw", &["write -P 1 0 8M", "write -P 2 31M 1M"]);
    let backed = ["-b", "base.raw", "-F", "raw"];
    qemu::create(dir, "mid.qcow2", &backed, "48M");
    qemu::io(
        dir,
        &[],
        "mid.qcow2",
        &["write -P 3 4M 1M", "write -z 1M 2M", "write -c -P 4 40M 64k"],
    );
    qemu::create(dir, "top.qcow2", &["-b", "mid.qcow2", "-F", "qcow2"], "48M");
    qemu::io(dir, &[], "top.qcow2", &["write -P 5 4M 4k", "write -P 0 31M 512k"]);
}

#[track_caller]
fn same(dir: &Path, a: (&str, &str), b: (&str, &str)) {
    let words = ["compare", "-f", a.0, "-F", b.0, a.1, b.1];
    qemu::img(dir, words).ok();
}

#[test]
fn chain_becomes_a_volume_and_an_image_again() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let dir = store.folder();
    chain(dir);
    let url = store.volume("web");
    let top = dir.join("top.qcow2").display().to_string();
    let imported = run(["import", "--output", "json", &top, &url]).json();
    assert_eq!(imported["virtual-size"], 48 << 20);
    for (format, name) in [("qcow2", "out.qcow2"), ("raw", "out.raw")] {
        let file = dir.join(name).display().to_string();
        run(["export", "-O", format, &url, &file]).ok();
        same(dir, ("qcow2", "top.qcow2"), (format, name));
    }
    let data = |file: &str| {
        let said = command::run("du", ["-k", &dir.join(file).display().to_string()]).ok();
        said.split_whitespace().next().and_then(|text| text.parse::<u64>().ok()).expect("a number")
    };
    assert!(data("out.raw") < 12 << 10, "zeros are left out");
    // Each layer is a snapshot.
    let all = run(["snapshots", &url, "--output", "json"]).json();
    for (snapshot, (label, format)) in all.as_array().expect("an array").iter().zip([
        ("base.raw", "raw"),
        ("mid.qcow2", "qcow2"),
        ("top.qcow2", "qcow2"),
    ]) {
        assert_eq!(snapshot["label"], label);
        let (from, copy) = (format!("{url}@{label}"), format!("copy-of-{label}.raw"));
        let file = dir.join(&copy).display().to_string();
        run(["export", "-O", "raw", &from, &file]).ok();
        same(dir, (format, label), ("raw", &copy));
    }
    assert_eq!(all.as_array().map(Vec::len), Some(3));
    let again = run(["import", &top, &url]).refusal();
    assert!(again.contains("already"), "{again}");
}

#[test]
fn raw_image_of_odd_length_and_empty_image_become_volumes() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let dir = store.folder();
    qemu::create(dir, "odd.raw", &["-f", "raw"], &(3 * 512 + (1 << 20)).to_string());
    qemu::io(dir, &["-f", "raw"], "odd.raw", &["write -P 9 1M 1536"]);
    qemu::create(dir, "empty.qcow2", &[], "1T");
    for (format, name, volume) in [("raw", "odd.raw", "odd"), ("qcow2", "empty.qcow2", "empty")] {
        let (image, url) = (dir.join(name).display().to_string(), store.volume(volume));
        run(["import", "-f", format, &image, &url]).ok();
        let copy = format!("{volume}-copy.qcow2");
        let out = dir.join(&copy).display().to_string();
        run(["export", &url, &out]).ok();
        same(dir, (format, name), ("qcow2", &copy));
    }
}

/// The story: an import that fails must leave nothing that looks like all of the image.
#[test]
fn chain_that_became_shorter_is_imported_as_one_snapshot_with_a_word() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let dir = store.folder();
    qemu::create(dir, "base.raw", &["-f", "raw"], "4M");
    qemu::create(dir, "mid.qcow2", &["-b", "base.raw", "-F", "raw"], "2M");
    qemu::create(dir, "top.qcow2", &["-b", "mid.qcow2", "-F", "qcow2"], "4M");
    let url = store.volume("web");
    let top = dir.join("top.qcow2").display().to_string();
    let said = run(["import", &top, &url]);
    assert!(said.status.success(), "{said}");
    assert!(said.stderr.contains("only the uppermost layer"), "{said}");
    let all = run(["snapshots", &url, "--output", "json"]).json();
    assert_eq!(all.as_array().map(Vec::len), Some(1), "{all}");
}

#[test]
fn import_that_fails_leaves_no_volume() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let dir = store.folder();
    chain(dir);
    std::fs::remove_file(dir.join("base.raw")).expect("removed");
    let top = dir.join("top.qcow2").display().to_string();
    let refused = run(["import", &top, &store.volume("web")]).refusal();
    assert!(refused.contains("base.raw"), "{refused}");
    assert!(run(["info", &store.volume("web")]).code() != Some(0));
}

/// The story: a task that tended the volume still had its lock when the import failed halfway, so
/// that half an image stayed, and looked like all of it.
#[test]
fn import_that_fails_halfway_leaves_no_volume_and_no_lock() {
    if !tools::present(TOOLS) {
        return;
    }
    let store = Store::new();
    let dir = store.folder();
    chain(dir);
    // Only the base is that long.
    let fault = "error=range:31M-32M";
    let top = dir.join("top.qcow2").display().to_string();
    let refused = run(["import", "--inject", fault, &top, &store.volume("web")]).refusal();
    assert!(!refused.contains("delete it"), "{refused}");
    let info = run(["info", &store.volume("web")]).refusal();
    assert!(info.contains("there is no volume web"), "{info}");
    let locks = std::fs::read_dir(dir.join("store/.locks")).expect("a folder").count();
    assert_eq!(locks, 0);
    run(["import", &top, &store.volume("web")]).ok();
}

/// QEMU 1.0 and older made them: the rest of a sector does not count.
#[test]
fn image_that_ends_within_a_sector_becomes_a_volume() {
    let store = Store::new();
    let image = store.folder().join("disk.qcow2");
    let name = image.display().to_string();
    mica::run(["create", "-q", &name, "1M"]).ok();
    let file = fs::OpenOptions::new().write(true).open(&image).expect("there");
    file.write_all_at(&1_000_000_u64.to_be_bytes(), 24).expect("written");
    run(["import", "-q", &name, &store.volume("web")]).ok();
    let info = run(["info", "--output", "json", &store.volume("web")]).ok();
    assert!(info.contains("999936"), "{info}");
}
