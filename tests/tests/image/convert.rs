//! `mica convert`: the copy holds the same bytes, also according to QEMU, and is sound.

use mica_tests::{command, mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// A chain of two with data, zeros, holes, an odd length, and an internal snapshot below.
fn sources(dir: &Path) {
    qemu::create(dir, "base.qcow2", &[], "30000128");
    let noise: Vec<u8> = (0_u32..1 << 20)
        .map(|at| at.wrapping_mul(2_654_435_761).rotate_left(at % 31).to_le_bytes()[2])
        .collect();
    fs::write(dir.join("noise.bin"), noise).expect("there is room");
    let commands = ["write -P 1 0 3M", "write -s noise.bin 5M 1M", "write -P 3 29999616 512"];
    qemu::io(dir, &[], "base.qcow2", &commands);
    qemu::img(dir, ["snapshot", "-c", "before", "base.qcow2"]).ok();
    qemu::io(dir, &[], "base.qcow2", &["write -P 9 1M 100k"]);
    qemu::overlay(dir, "top.qcow2", "base.qcow2", &[]);
    qemu::io(dir, &[], "top.qcow2", &["write -P 4 5000k 4k", "write -z 2M 128k", "write 10M 1k"]);
}

/// `copy` is sound and holds what `source` does.
#[track_caller]
fn same(dir: &Path, source: &str, copy: &str, format: &str) {
    if format == "qcow2" {
        let said = qemu::img(dir, ["check", copy]);
        assert_eq!(said.code(), Some(0), "{said}");
    }
    let said = qemu::img(dir, ["compare", "-f", "qcow2", "-F", format, source, copy]);
    assert_eq!(said.code(), Some(0), "{said}");
    assert!(!said.stdout.contains("mismatch"), "{said}");
}

#[test]
fn copies_of_every_shape_hold_the_same_bytes() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    for options in [
        "",
        "-c",
        "-c -o compression_type=zstd",
        "-c -o cluster_size=4k",
        "-c -o refcount_bits=1",
        "-c -o cluster_size=512,refcount_bits=2",
        "-c -o extended_l2=on",
        "-o cluster_size=512",
        "-o cluster_size=2M",
        "-o extended_l2=on",
        "-o compat=0.10",
        "-o preallocation=metadata",
        "-o preallocation=falloc",
        "-o preallocation=full",
        "-o preallocation=metadata,extended_l2=on",
        "-o data_file=copy.data",
        "-o data_file=copy.data,data_file_raw=on",
        "-S 0",
        "-m 1",
        "-m 16 -W",
    ] {
        let words: Vec<_> = options.split_whitespace().collect();
        let all = [&["convert", "--force"], words.as_slice(), &["top.qcow2", "copy.qcow2"]];
        mica_in(dir, &all.concat()).ok();
        same(dir, "top.qcow2", "copy.qcow2", "qcow2");
        mica_in(dir, &["check", "-q", "copy.qcow2"]).ok();
        if options.contains("data_file") {
            continue;
        }
        let theirs = [&["convert", "-O", "qcow2"], words.as_slice(), &["top.qcow2", "qemu.qcow2"]];
        qemu::img(dir, theirs.concat()).ok();
        let len = |name: &str| fs::metadata(dir.join(name)).expect("it is there").len();
        let (ours, theirs) = (len("copy.qcow2"), len("qemu.qcow2"));
        let cluster = qemu::img(dir, ["info", "--output=json", "copy.qcow2"]).json();
        let slack = 2 * cluster["cluster-size"].as_u64().expect("a number") + (16 << 10);
        assert!(ours <= theirs + theirs / 50 + slack, "{options}: {ours} bytes, QEMU's {theirs}");
    }
}

#[test]
fn raw_copies_are_sparse_and_convert_back() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    for sparse in ["4k", "64k", "0"] {
        let to_raw = ["convert", "--force", "-O", "raw", "-S", sparse, "top.qcow2", "copy.raw"];
        mica_in(dir, &to_raw).ok();
        same(dir, "top.qcow2", "copy.raw", "raw");
        let blocks = std::os::unix::fs::MetadataExt::blocks(
            &fs::metadata(dir.join("copy.raw")).expect("it is there"),
        );
        assert_eq!(sparse == "0", blocks * 512 >= 30_000_128, "-S {sparse}: {blocks} blocks");
        mica_in(dir, &["convert", "--force", "-f", "raw", "copy.raw", "copy.qcow2"]).ok();
        same(dir, "top.qcow2", "copy.qcow2", "qcow2");
    }
}

#[test]
fn a_snapshot_is_copied_and_over_a_backing_file_only_what_differs() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    mica_in(dir, &["convert", "-l", "before", "base.qcow2", "before.qcow2"]).ok();
    qemu::img(dir, ["convert", "-l", "before", "-O", "qcow2", "base.qcow2", "theirs.qcow2"]).ok();
    same(dir, "theirs.qcow2", "before.qcow2", "qcow2");

    qemu::io(dir, &[], "top.qcow2", &["write -P 9 256k 4k", "write -z 0 128k"]);
    for options in ["extended_l2=on", "extended_l2=off", "cluster_size=4k", "compat=0.10"] {
        let over = ["-B", "base.qcow2", "-F", "qcow2", "-o", options];
        for compressed in [&[] as &[&str], &["-c"]] {
            let all =
                [&["convert", "--force"], &over[..], compressed, &["top.qcow2", "diff.qcow2"]];
            mica_in(dir, &all.concat()).ok();
            same(dir, "top.qcow2", "diff.qcow2", "qcow2");
            let len = fs::metadata(dir.join("diff.qcow2")).expect("it is there").len();
            assert!(len < 2 << 20, "{options}: only what differs is copied, not {len} bytes");
        }
    }
}

/// The story: clusters were reserved for all of the disk, and the compressed ones put behind them.
#[test]
fn compression_and_preallocation_exclude_each_other_as_in_qemu() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "source.qcow2", &[], "1M");
    for (how, is_refused) in [("metadata", true), ("falloc", true), ("full", true), ("off", false)]
    {
        let option = format!("preallocation={how}");
        let words = ["convert", "-O", "qcow2", "-c", "-o", &option, "source.qcow2", "copy.qcow2"];
        for said in [mica_in(dir, &words), qemu::img(dir, words)] {
            assert_eq!(said.code() == Some(1), is_refused, "{said}");
            let is_said = said.stderr.contains("Compression and preallocation not supported");
            assert_eq!(is_said, is_refused, "{said}");
            let _ = fs::remove_file(dir.join("copy.qcow2"));
        }
    }
}

#[test]
fn nothing_is_copied_over_its_own_source() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    let before = fs::read(dir.join("base.qcow2")).expect("it is there");
    mica_in(dir, &["convert", "--force", "top.qcow2", "base.qcow2"]).refusal();
    mica_in(dir, &["convert", "--force", "base.qcow2", "base.qcow2"]).refusal();
    mica_in(dir, &["convert", "top.qcow2", "base.qcow2"]).refusal();
    assert_eq!(fs::read(dir.join("base.qcow2")).expect("it is there"), before);
    mica_in(dir, &["convert", "-c", "-O", "raw", "top.qcow2", "copy.raw"]).refusal();
    mica_in(dir, &["convert", "-F", "raw", "-O", "raw", "top.qcow2", "copy.raw"]).refusal();
    for format in ["raw", "qcow2"] {
        let sized = ["convert", "-O", format, "-o", "size=1M", "top.qcow2", "sized"];
        let said = mica_in(dir, &sized).refusal();
        assert!(said.contains("-o size"), "{said}");
    }
    assert!(!dir.join("copy.raw").exists() && !dir.join("sized").exists());
    mica_in(dir, &["convert", "-m", "17", "top.qcow2", "copy.qcow2"]).refusal();
    assert!(!dir.join("copy.raw").exists() && !dir.join("copy.qcow2").exists());
}

#[test]
fn nothing_is_copied_over_a_file_of_its_source_by_another_name() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    fs::hard_link(dir.join("base.qcow2"), dir.join("link.qcow2")).expect("linked");
    std::os::unix::fs::symlink("base.qcow2", dir.join("symlink.qcow2")).expect("linked");
    qemu::create(dir, "split.qcow2", &["-o", "data_file=split.data"], "1M");
    qemu::io(dir, &[], "split.qcow2", &["write -P 5 0 1M"]);
    let content = |file: &str| fs::read(dir.join(file)).expect("it is there");
    let before = [content("base.qcow2"), content("split.data"), content("top.qcow2")];
    let over = ["-B", "base.qcow2", "-F", "qcow2"];
    for args in [
        &["top.qcow2", "link.qcow2"][..],
        &["top.qcow2", "symlink.qcow2"],
        &["-O", "raw", "split.qcow2", "split.data"],
        &["-o", "data_file=link.qcow2", "top.qcow2", "copy.qcow2"],
        &[&over[..], &["split.qcow2", "link.qcow2"]].concat(),
    ] {
        // Without locks.
        let said = mica_in(dir, &[&["convert", "-U", "--force"], args].concat()).refusal();
        assert!(said.contains("part of the source"), "{args:?}: {said}");
    }
    let itself = ["convert", "-U", "-o", "data_file=copy.qcow2", "split.qcow2", "copy.qcow2"];
    let said = mica_in(dir, &itself).refusal();
    assert!(said.contains("is the new image itself"), "{said}");
    assert_eq!([content("base.qcow2"), content("split.data"), content("top.qcow2")], before);
    assert!(!dir.join("copy.qcow2").exists());
}
