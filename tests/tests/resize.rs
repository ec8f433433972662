//! `mica resize` of qcow2 images: what was there stays, what is new reads as zeros, nothing leaks.

use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// Resizes `image`, and holds it against what QEMU makes of a copy of it.
#[track_caller]
fn resized(dir: &Path, image: &str, size: &str) {
    fs::copy(dir.join(image), dir.join("theirs.qcow2")).expect("it is there");
    mica_in(dir, &["resize", "-q", "--shrink", image, size]).ok();
    qemu::img(dir, ["resize", "-q", "--shrink", "-f", "qcow2", "theirs.qcow2", size]).ok();
    let said = qemu::img(dir, ["check", image]);
    assert_eq!(said.code(), Some(0), "{image} {size}: {said}");
    let said = qemu::img(dir, ["compare", "-f", "qcow2", "-F", "qcow2", image, "theirs.qcow2"]);
    assert_eq!(said.code(), Some(0), "{image} {size}: {said}");
    assert!(!said.stdout.contains("mismatch"), "{image} {size}: {said}");
}

#[test]
fn images_of_every_shape_get_longer_and_shorter() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in [
        "compat=1.1",
        "compat=0.10",
        "extended_l2=on",
        "cluster_size=512",
        "cluster_size=2M",
        "refcount_bits=1",
        "refcount_bits=64,cluster_size=4k",
        "lazy_refcounts=on",
        "preallocation=metadata",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "image.qcow2", &["-o", options], "20M");
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 3M", "write -P 2 19M 1M"]);
        qemu::img(dir, ["convert", "-c", "-O", "qcow2", "-o", options, "image.qcow2", "c.qcow2"]);
        for image in ["image.qcow2", "c.qcow2"] {
            if !dir.join(image).exists() {
                continue;
            }
            // QEMU takes minutes to shorten large disks of tiny clusters.
            let is_tiny =
                options.contains("cluster_size=512") || options.contains("cluster_size=4k");
            let large = if is_tiny { "60M" } else { "2G" };
            for size in ["+1M", "40M", large, "19500k", "10M", "30M", "2M", "512"] {
                resized(dir, image, size);
            }
            // QEMU shows here what the cluster held before the disk ended in it.
            mica_in(dir, &["resize", "-q", image, "5M"]).ok();
            qemu::io(dir, &[], image, &["read -P 1 0 512", "read -P 0 512 5242368"]);
            qemu::io(dir, &[], image, &["write -P 3 1M 4M", "read -P 3 1M 4M"]);
            let said = qemu::img(dir, ["check", image]);
            assert_eq!(said.code(), Some(0), "{options}: {said}");
        }
    }
}

#[test]
fn over_a_longer_backing_file_what_is_new_reads_as_zeros() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in ["extended_l2=on", "extended_l2=off", "cluster_size=4k"] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "base.qcow2", &[], "30M");
        qemu::io(dir, &[], "base.qcow2", &["write -P 9 0 30M"]);
        let over = ["-o", options, "-b", "base.qcow2", "-F", "qcow2"];
        qemu::create(dir, "top.qcow2", &over, "10000384");
        qemu::io(dir, &[], "top.qcow2", &["write -P 1 9M 64k"]);
        for size in ["10001408", "12M", "60M", "8M", "20M"] {
            resized(dir, "top.qcow2", size);
        }
        qemu::io(dir, &[], "top.qcow2", &["read -P 9 0 8M", "read -P 0 8M 12M"]);
    }
    // Version 2 has no zero flag, so that QEMU refuses; here zeros are written.
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "30M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 9 0 30M"]);
    let over = ["-o", "compat=0.10", "-b", "base.qcow2", "-F", "qcow2"];
    qemu::create(dir, "top.qcow2", &over, "10000384");
    mica_in(dir, &["resize", "-q", "top.qcow2", "40M"]).ok();
    let read = ["read -P 9 0 10000384", "read -P 0 10000384 30M"];
    qemu::io(dir, &[], "top.qcow2", &read);
    let said = qemu::img(dir, ["check", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

#[test]
fn an_l1_table_longer_than_a_refcount_block_counts_finds_its_place() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &["-o", "cluster_size=512"], "1M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 1M"]);
    mica_in(dir, &["resize", "-q", "image.qcow2", "1G"]).ok();
    let said = qemu::img(dir, ["check", "image.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
    qemu::io(dir, &[], "image.qcow2", &["read -P 1 0 1M", "read -P 0 1M 4M"]);
}

#[test]
fn snapshots_keep_what_they_have() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &["-o", "cluster_size=4k"], "20M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 20M"]);
    qemu::img(dir, ["snapshot", "-c", "before", "image.qcow2"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["write -P 2 3M 10M"]);
    for size in ["30M", "5000k", "20M", "11M"] {
        resized(dir, "image.qcow2", size);
    }
    qemu::img(dir, ["snapshot", "-a", "before", "image.qcow2"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["read -P 1 0 20M"]);

    qemu::create(dir, "old.qcow2", &["-o", "compat=0.10"], "20M");
    qemu::img(dir, ["snapshot", "-c", "before", "old.qcow2"]).ok();
    let said = mica_in(dir, &["resize", "old.qcow2", "30M"]).refusal();
    assert!(said.contains("v2 image which has snapshots"), "{said}");
    qemu::create(dir, "bitmaps.qcow2", &[], "20M");
    qemu::img(dir, ["bitmap", "--add", "bitmaps.qcow2", "changes"]).ok();
    mica_in(dir, &["resize", "bitmaps.qcow2", "30M"]).refusal();
    mica_in(dir, &["resize", "image.qcow2", "1M"]).refusal();
}
