//! `mica info` says what `qemu-img info` says, in the same fields.

use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::path::Path;

/// Fields of an image that both must report alike.
const FIELDS: &[&str] = &[
    "virtual-size",
    "format",
    "cluster-size",
    "dirty-flag",
    "backing-filename",
    "backing-filename-format",
    "encrypted",
    "compressed",
];

#[track_caller]
fn same_fields(what: &str, ours: &Value, theirs: &Value) {
    for field in FIELDS {
        assert_eq!(ours.get(field), theirs.get(field), "{what}: {field}\n{ours:#}\n{theirs:#}");
    }
    let name = |json: &Value| {
        json["filename"].as_str().map(|name| name.rsplit('/').next().map(str::to_owned))
    };
    assert_eq!(name(ours), name(theirs), "{what}");
    let specific = |json: &Value| json["format-specific"]["data"].clone();
    let (ours, theirs) = (specific(ours), specific(theirs));
    let fields = theirs.as_object().into_iter().flatten();
    for (field, wanted) in fields.filter(|(field, _)| *field != "bitmaps") {
        assert_eq!(ours.get(field), Some(wanted), "{what}: format-specific {field}");
    }
    let bitmaps = |json: &Value| {
        let names = json["bitmaps"].as_array().cloned().unwrap_or_default();
        let field = |bitmap: &Value, field: &str| bitmap[field].to_string();
        let told = names.iter().map(|bitmap| field(bitmap, "name") + &field(bitmap, "granularity"));
        told.collect::<Vec<_>>()
    };
    assert_eq!(bitmaps(&ours), bitmaps(&theirs), "{what}: bitmaps");
}

#[track_caller]
fn same_info(dir: &Path, image: &str) {
    let path = dir.join(image).display().to_string();
    let ours = mica::run(["info", "--output", "json", "--format", "qcow2", &path]).json();
    let theirs = qemu::img(dir, ["info", "--output=json", "-f", "qcow2", &path]).json();
    same_fields(image, &ours, &theirs);
    let snapshots = |json: &Value| {
        let told = json["snapshots"].as_array().cloned().unwrap_or_default();
        let fields = ["id", "name", "vm-state-size", "date-sec", "date-nsec", "vm-clock-sec"];
        told.iter().map(|one| fields.map(|field| one[field].clone())).collect::<Vec<_>>()
    };
    assert_eq!(snapshots(&ours), snapshots(&theirs), "{image}: snapshots");
}

#[test]
fn images_of_every_kind_are_reported_alike() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in [
        "compat=0.10",
        "refcount_bits=1,cluster_size=512",
        "refcount_bits=64,cluster_size=2M,lazy_refcounts=on",
        "extended_l2=on",
        "compression_type=zstd",
        "data_file=disk.data",
        "data_file=disk.data,data_file_raw=on",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "disk.qcow2", &["-o", options], "5000001k");
        qemu::io(dir.path(), &["-f", "qcow2"], "disk.qcow2", &["write 1M 200k"]);
        println!("{options}");
        same_info(dir.path(), "disk.qcow2");
    }
}

#[test]
fn snapshots_and_bitmaps_are_listed_alike() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "disk.qcow2", &[], "64M");
    for name in ["first", "second one", "tr\u{e8}s"] {
        qemu::io(dir, &[], "disk.qcow2", &["write 1M 200k"]);
        qemu::img(dir, ["snapshot", "-c", name, "disk.qcow2"]).ok();
    }
    qemu::img(dir, ["bitmap", "--add", "-f", "qcow2", "disk.qcow2", "daily"]).ok();
    let fine = ["bitmap", "--add", "-g", "4k", "--disable", "-f", "qcow2", "disk.qcow2", "fine"];
    qemu::img(dir, fine).ok();
    same_info(dir, "disk.qcow2");
}

#[test]
fn a_chain_is_reported_alike_from_the_active_layer_down() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    std::fs::write(dir.join("base.raw"), vec![0; 1 << 20]).expect("written");
    qemu::create(dir, "one.qcow2", &["-b", "base.raw", "-F", "raw"], "");
    std::fs::create_dir(dir.join("below")).expect("made");
    qemu::create(&dir.join("below"), "two.qcow2", &["-b", "../one.qcow2", "-F", "qcow2"], "");
    qemu::create(dir, "three.qcow2", &["-b", "below/two.qcow2", "-F", "qcow2"], "4M");
    let path = dir.join("three.qcow2").display().to_string();
    let allowed = dir.display().to_string();
    let words = ["info", "--backing-chain", "--output", "json", "--allow-path", &allowed, &path];
    let ours = mica::run(words).json();
    let theirs = qemu::img(dir, ["info", "--backing-chain", "--output=json", &path]).json();
    let (ours, theirs) = (ours.as_array().expect("a list"), theirs.as_array().expect("a list"));
    assert_eq!((ours.len(), theirs.len()), (4, 4));
    for (ours, theirs) in ours.iter().zip(theirs) {
        same_fields("chain", ours, theirs);
    }
}

#[test]
fn an_image_is_reported_without_opening_what_it_names() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    // A backing file that does not exist, and some that must not be opened through an image.
    for name in ["missing.qcow2", "/etc/shadow", "nbd://host/export", "json:{\"driver\":\"nbd\"}"] {
        let create = ["-u", "-b", name, "-F", "qcow2"];
        qemu::create(dir, "disk.qcow2", &create, "1M");
        let path = dir.join("disk.qcow2").display().to_string();
        let said = mica::run(["info", "--output", "json", &path]).json();
        assert_eq!(said["backing-filename"], name, "{said}");
        mica::run(["info", "--backing-chain", "--output", "json", &path]).refusal();
    }
}
