//! `mica amend`: what it makes of an image QEMU reads, and what the disk shows stays the same.

use mica_tests::command::{self, Finished};
use mica_tests::mounts::Mount;
use mica_tests::{mica, qemu, tools};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

fn facts(dir: &Path, image: &str) -> Value {
    let info = qemu::img(dir, ["info", "--output=json", image]).json();
    let data = &info["format-specific"]["data"];
    let names = ["compat", "lazy-refcounts", "refcount-bits", "data-file-raw"];
    let mut facts: Value = names.iter().map(|name| (*name, data[*name].clone())).collect();
    facts["size"] = info["virtual-size"].clone();
    facts["format"] = info["backing-filename-format"].clone();
    facts
}

/// Does the same to `image` and to a copy of it, by mica and by QEMU, and compares.
#[track_caller]
fn alike(dir: &Path, image: &str, options: &str) {
    fs::copy(dir.join(image), dir.join("theirs.qcow2")).expect("it is there");
    fs::copy(dir.join(image), dir.join("before.qcow2")).expect("it is there");
    mica_in(dir, &["amend", "-q", "-o", options, image]).ok();
    qemu::img(dir, ["amend", "-f", "qcow2", "-o", options, "theirs.qcow2"]).ok();
    assert_eq!(facts(dir, image), facts(dir, "theirs.qcow2"), "{options}");
    for program in ["qemu-img", mica::binary().to_str().expect("a path")] {
        let check = Command::new(program).current_dir(dir).args(["check", image]).output();
        assert_eq!(check.expect("it runs").status.code(), Some(0), "{program} {options}");
    }
    for other in ["theirs.qcow2", "before.qcow2"] {
        let compare = ["compare", "-f", "qcow2", "-F", "qcow2", image, other];
        qemu::img(dir, compare).ok();
    }
    // Both can write what came out.
    qemu::io(dir, &[], image, &["write -P 9 200k 4k", "write -P 9 0 4k"]);
}

/// An image with data, zeros with and without a place, compressed clusters and holes.
fn image(dir: &Path, options: &str, base: Option<&str>) {
    let mut args = vec!["-o", options];
    if let Some(base) = base {
        args.extend(["-b", base, "-F", "qcow2"]);
    }
    qemu::create(dir, "image.qcow2", &args, "20M");
    let mut writes = vec!["write -P 1 1M 3M", "write -P 3 19M 1M"];
    if !options.contains("cluster_size=2M") {
        writes.push("write -c -P 2 8M 64k");
    }
    if base.is_none() {
        writes.extend(["write -z 2M 256k", "write -z -u 3M 256k", "write -z 12M 1M"]);
    }
    qemu::io(dir, &[], "image.qcow2", &writes);
}

#[test]
fn images_get_the_options_that_qemu_gives_them() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in ["compat=1.1", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        image(dir, options, None);
        alike(dir, "image.qcow2", "lazy_refcounts=on");
        // Compressed clusters of 4 KiB share one more often than 1 or 2 bits count: mica refuses
        // that, and QEMU does not end.
        let narrow = if options == "compat=1.1" { ["1", "2"] } else { ["8", "8"] };
        for bits in [narrow[0], "64", "16", narrow[1], "32"] {
            alike(dir, "image.qcow2", &format!("refcount_bits={bits}"));
        }
        alike(dir, "image.qcow2", "refcount_bits=16,compat=0.10");
        alike(dir, "image.qcow2", "compat=v3,refcount_bits=8,lazy_refcounts=on");
        alike(dir, "image.qcow2", "size=30M,lazy_refcounts=off");
        alike(dir, "image.qcow2", "compat=0.10,refcount_bits=16");
        alike(dir, "image.qcow2", "compat=1.1,size=31M");
    }
}

#[test]
fn names_of_other_files_stay_or_are_said_truly() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let long = format!("{}base.qcow2", "./".repeat(250));
    qemu::create(dir, "base.qcow2", &[], "20M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 7 0 2M"]);
    for base in ["base.qcow2", &long] {
        image(dir, "compat=1.1", Some(base));
        alike(dir, "image.qcow2", "compat=0.10");
        alike(dir, "image.qcow2", "compat=1.1,refcount_bits=64");
        let named = qemu::img(dir, ["info", "--output=json", "image.qcow2"]).json();
        assert_eq!(named["backing-filename"], json!(base));
        fs::remove_file(dir.join("image.qcow2")).expect("it is there");
    }
    // The format that an old image does not state.
    image(dir, "compat=1.1", Some("base.qcow2"));
    qemu::img(dir, ["rebase", "-u", "-f", "qcow2", "-b", "base.qcow2", "image.qcow2"]);
    mica_in(dir, &["amend", "-o", "backing_fmt=qcow2", "image.qcow2"]).ok();
    assert_eq!(facts(dir, "image.qcow2")["format"], json!("qcow2"));
    // As raw it would show the header of the base.
    let said = mica_in(dir, &["amend", "-o", "backing_fmt=raw", "image.qcow2"]).refusal();
    assert!(said.contains("rebase -u"), "{said}");
    qemu::create(dir, "outer.qcow2", &["-o", "data_file=data.raw,data_file_raw=on"], "20M");
    alike(dir, "outer.qcow2", "data_file_raw=off");
    fs::copy(dir.join("data.raw"), dir.join("moved.raw")).expect("it is there");
    alike(dir, "outer.qcow2", "data_file=moved.raw");
    mica_in(dir, &["read", "outer.qcow2", "0", "512"]).ok();
}

#[test]
fn what_no_image_can_be_is_refused_with_a_way_out_and_nothing_changes() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "20M");
    image(dir, "compat=1.1", Some("base.qcow2"));
    qemu::io(dir, &[], "image.qcow2", &["write -z 0 1M"]);
    qemu::create(dir, "subclusters.qcow2", &["-o", "extended_l2=on"], "1M");
    qemu::create(dir, "snapshots.qcow2", &["-o", "refcount_bits=8"], "1M");
    qemu::io(dir, &[], "snapshots.qcow2", &["write 0 64k"]);
    for name in ["a", "b", "c"] {
        qemu::img(dir, ["snapshot", "-c", name, "snapshots.qcow2"]).ok();
    }
    for (image, options, said) in [
        ("image.qcow2", "compat=0.10", "qemu-img amend -o compat=0.10"),
        ("image.qcow2", "size=1M", "mica resize --shrink"),
        ("image.qcow2", "backing_file=other.qcow2", "mica rebase"),
        ("image.qcow2", "cluster_size=4k", "mica convert"),
        ("image.qcow2", "data_file_raw=on", "mica convert -o data_file"),
        ("image.qcow2", "refcount_bits=3", "1, 2, 4, 8"),
        ("image.qcow2", "compat=0.10,refcount_bits=8", "add refcount_bits=16"),
        ("image.qcow2", "compat=0.10,lazy_refcounts=on", "add compat=1.1"),
        ("image.qcow2", "encryption=on", "-o help"),
        ("subclusters.qcow2", "compat=0.10", "mica convert"),
        ("snapshots.qcow2", "refcount_bits=1", "shared more often"),
        ("snapshots.qcow2", "compat=0.10,refcount_bits=16", "internal snapshots"),
    ] {
        let before = fs::read(dir.join(image)).expect("it is there");
        let refused = mica_in(dir, &["amend", "-o", options, image]);
        let refusal = refused.refusal();
        assert!(refusal.contains(said), "{options}: {refusal}");
        assert!(before == fs::read(dir.join(image)).expect("it is there"), "{options}: changed");
    }
    let help = mica_in(dir, &["amend", "-o", "help", "image.qcow2"]).ok();
    assert!(help.contains("refcount_bits"), "{help}");
}

/// The story: the other changes had been made when the size was refused.
#[test]
fn impossible_size_is_refused_before_anything_is_changed() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let create = |options: &str, image: &str| {
        mica_in(dir, &["create", "-q", "-o", options, image, "10M"]).ok();
    };
    create("cluster_size=512", "small.qcow2");
    create("compat=0.10", "old.qcow2");
    create("compat=1.1", "bitmap.qcow2");
    mica_in(dir, &["bitmap", "--add", "-g", "512", "bitmap.qcow2", "b"]).ok();
    create("compat=1.1", "snapshot.qcow2");
    mica_in(dir, &["snapshot", "-c", "s", "snapshot.qcow2"]).ok();
    for (image, options, said) in [
        ("small.qcow2", "lazy_refcounts=on,size=1T", "at most 137438953472 bytes"),
        ("small.qcow2", "refcount_bits=32,size=1T", "at most 137438953472 bytes"),
        ("old.qcow2", "compat=1.1,size=7E", "at most 2251799813685248 bytes"),
        ("old.qcow2", "compat=1.1,size=15E", "below 8 EiB"),
        ("old.qcow2", "compat=1.1,size=", "invalid size"),
        ("bitmap.qcow2", "lazy_refcounts=on,size=100T", "larger granularity"),
        ("snapshot.qcow2", "compat=0.10,size=20M", "snapshots"),
    ] {
        let before = fs::read(dir.join(image)).expect("it is there");
        let refused = mica_in(dir, &["amend", "-o", options, image]).refusal();
        assert!(refused.contains(said), "{options}: {refused}");
        assert!(before == fs::read(dir.join(image)).expect("it is there"), "{options}: changed");
    }
}

/// The story: the file system refused the length of a raw data file, or had no room for the tables
/// that name its clusters, when the other changes had been made.
#[test]
fn size_that_the_file_system_refuses_leaves_the_other_options_as_they_are() {
    let dir = tempfile::tempdir().expect("a folder");
    let unchanged = |dir: &Path, options: &str, amend: &mut Command, said: &str| {
        let create = ["create", "-q", "-o", options, "image.qcow2", "1M"];
        mica_in(dir, &create).ok();
        mica_in(dir, &["bitmap", "--add", "image.qcow2", "b"]).ok();
        let before = info(dir);
        let refused = command::finish(amend).refusal();
        assert!(refused.contains(said), "{refused}");
        assert_eq!(info(dir), before);
        assert_eq!(fs::metadata(dir.join("data")).expect("it is there").len(), 1 << 20);
        mica_in(dir, &["check", "image.qcow2"]).ok();
        for file in ["image.qcow2", "data"] {
            fs::remove_file(dir.join(file)).expect("it is there");
        }
    };
    let program = mica::binary().display().to_string();
    let limited = "ulimit -f 2048; exec \"$0\" amend -o refcount_bits=32,size=1G image.qcow2";
    let data = "data_file=data,data_file_raw=on";
    for options in [data, "data_file=data"] {
        let mut amend = Command::new("sh");
        amend.current_dir(dir.path()).args(["-c", limited, &program]);
        unchanged(dir.path(), options, &mut amend, "too large");
    }
    let Ok(small) = Mount::memory(&dir.path().join("small"), 4) else {
        tools::skip("mounting a tmpfs is not allowed here");
        return;
    };
    let mut amend = Command::new(&program);
    let args = ["amend", "-o", "lazy_refcounts=on,size=1G", "image.qcow2"];
    amend.current_dir(small.folder()).args(args);
    unchanged(small.folder(), &format!("{data},cluster_size=512"), &mut amend, "space");
}

fn info(dir: &Path) -> Value {
    let mut info = mica_in(dir, &["info", "--output=json", "image.qcow2"]).json();
    // Room for a longer disk stays the image's.
    for key in ["actual-size", "children"] {
        info.as_object_mut().expect("an object").remove(key);
    }
    info
}

#[test]
fn data_file_that_was_renamed_grows_in_the_same_call() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for raw in ["on", "off"] {
        // The L1 table gets another place.
        let options = format!("cluster_size=512,data_file=data,data_file_raw={raw}");
        mica_in(dir, &["create", "-q", "-o", &options, "image.qcow2", "1M"]).ok();
        mica_in(dir, &["bitmap", "--add", "image.qcow2", "b"]).ok();
        qemu::io(dir, &[], "image.qcow2", &["write -P 7 0 64k"]);
        fs::rename(dir.join("data"), dir.join("renamed")).expect("it is there");
        let options = "data_file=renamed,data_file_raw=off,size=3M";
        mica_in(dir, &["amend", "-q", "-o", options, "image.qcow2"]).ok();
        let info = info(dir);
        assert_eq!(info["virtual-size"], 3 << 20);
        let bitmap = &info["format-specific"]["data"]["bitmaps"][0];
        assert_eq!(bitmap["flags"], serde_json::json!(["auto"]), "{info}");
        mica_in(dir, &["check", "image.qcow2"]).ok();
        let reads = ["read -P 7 0 64k", "read -P 0 64k 3008k", "write -P 8 2M 64k"];
        qemu::io(dir, &[], "image.qcow2", &reads);
        fs::remove_file(dir.join("renamed")).expect("it is there");
        fs::remove_file(dir.join("image.qcow2")).expect("it is there");
    }
}
