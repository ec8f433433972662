//! What `mica convert` and `mica dd` read besides one image: several, a pipe, bitmaps, parts.

use mica_tests::command::{self, Finished};
use mica_tests::{mica, qemu, tools};
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// Two disks of odd lengths, with data at their ends.
fn sources(dir: &Path) {
    for (name, size, ends) in [("a.qcow2", "5000192", "4999680"), ("b.qcow2", "3000320", "2999808")]
    {
        qemu::create(dir, name, &[], size);
        let writes = ["write -P 3 0 100k", "write -P 4 2M 10k", &format!("write -P 5 {ends} 512")];
        qemu::io(dir, &[], name, &writes);
    }
}

#[test]
fn several_sources_follow_each_other_as_in_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    qemu::img(dir, ["convert", "-O", "qcow2", "a.qcow2", "b.qcow2", "a.qcow2", "theirs.qcow2"])
        .ok();
    for more in [&[][..], &["-c"], &["-S", "0"]] {
        let all = ["convert", "--force", "a.qcow2", "b.qcow2", "a.qcow2", "ours.qcow2"];
        mica_in(dir, &[&all, more].concat()).ok();
        qemu::same(dir, ("qcow2", "ours.qcow2"), ("qcow2", "theirs.qcow2"));
        qemu::img(dir, ["check", "ours.qcow2"]).ok();
    }
    mica_in(dir, &["convert", "-O", "raw", "a.qcow2", "b.qcow2", "a.qcow2", "ours.raw"]).ok();
    qemu::same(dir, ("raw", "ours.raw"), ("qcow2", "theirs.qcow2"));
    for (refused, cure) in [
        (&["-l", "x", "a.qcow2", "b.qcow2", "no.qcow2"][..], "snapshots cannot be copied"),
        (&["-B", "a.qcow2", "-F", "qcow2", "a.qcow2", "b.qcow2", "no.qcow2"], "no base"),
        (&["--bitmaps", "a.qcow2", "b.qcow2", "no.qcow2"], "bitmaps cannot be copied"),
        (&["a.qcow2", "b.qcow2", "b.qcow2", "--force"], "part of the source"),
        (&["-t", "unsafe", "a.qcow2", "no.qcow2"], "synced"),
    ] {
        let said = mica_in(dir, &[&["convert"], refused].concat());
        assert_eq!(said.code(), Some(1), "{said}");
        assert!(said.stderr.contains(cure), "{said}");
        assert!(!dir.join("no.qcow2").exists(), "{refused:?}");
    }
}

#[test]
fn a_pipe_becomes_an_image_and_leaves_nothing_else() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    mica_in(dir, &["convert", "-O", "raw", "a.qcow2", "a.raw"]).ok();
    let before = fs::read_dir(dir).expect("a folder").count();
    for (format, copy) in [("qcow2", "copy.qcow2"), ("raw", "copy.raw")] {
        let pipe = File::open(dir.join("a.raw")).expect("it is there");
        let mut convert = Command::new(mica::binary());
        convert.current_dir(dir).stdin(Stdio::from(pipe));
        let words = ["convert", "--format", "raw", "-O", format, "-", copy];
        let said = convert.args(words).output().expect("it runs");
        assert!(said.status.success(), "{said:?}");
        qemu::same(dir, ("raw", "a.raw"), (format, copy));
    }
    assert_eq!(fs::read_dir(dir).expect("a folder").count(), before + 2);
    let said = mica_in(dir, &["convert", "-", "no.qcow2"]).refusal();
    assert!(said.contains("--format raw"), "{said}");
    let said = mica_in(dir, &["convert", "--format", "raw", "-O", "raw", "-", "-"]).refusal();
    assert!(said.contains("cat"), "{said}");
}

/// The story: the temporary file of standard input stayed beside the target after kill -9.
#[test]
fn a_pipe_whose_copy_is_killed_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut convert = Command::new(mica::binary());
    convert.current_dir(dir.path()).args(["convert", "-f", "raw", "-O", "raw", "-", "copy"]);
    let mut convert = convert.stdin(Stdio::piped()).spawn().expect("started");
    // More than a pipe holds: it reads.
    let input = convert.stdin.take().expect("a pipe");
    (&input).write_all(&[7; 4 << 20]).expect("it reads");
    convert.kill().and_then(|()| convert.wait()).expect("it runs");
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

#[test]
fn bitmaps_come_along_with_what_they_say() {
    let judges = [tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO];
    if !tools::present(&judges) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "20M");
    for (name, granularity) in [("fine", "4k"), ("coarse", "1M")] {
        qemu::img(dir, ["bitmap", "--add", "-g", granularity, "image.qcow2", name]).ok();
    }
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 1M 5k", "write -P 2 9M 2M"]);
    qemu::img(dir, ["bitmap", "--disable", "image.qcow2", "coarse"]).ok();
    mica_in(dir, &["convert", "--bitmaps", "image.qcow2", "ours.qcow2"]).ok();
    qemu::img(dir, ["convert", "--bitmaps", "-O", "qcow2", "image.qcow2", "theirs.qcow2"]).ok();
    qemu::img(dir, ["check", "ours.qcow2"]).ok();
    qemu::same(dir, ("qcow2", "ours.qcow2"), ("qcow2", "image.qcow2"));
    let bitmaps = |image: &str| super::bitmap::bitmaps(dir, image);
    assert_eq!(bitmaps("ours.qcow2"), bitmaps("theirs.qcow2"));
    for name in ["fine", "coarse"] {
        let dirty = |image: &str| super::bitmap::dirty(dir, image, name);
        assert_eq!(dirty("ours.qcow2"), dirty("image.qcow2"), "{name}");
    }
    let said = mica_in(dir, &["convert", "--bitmaps", "-O", "raw", "image.qcow2", "no.raw"]);
    assert!(said.refusal().contains("only qcow2 images"));
}

/// The story: all was copied first.
#[test]
fn bitmaps_for_a_disk_of_another_length_are_refused_before_anything_is_written() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for (name, len) in [("source.qcow2", "1M"), ("long.qcow2", "2M"), ("same.qcow2", "1M")] {
        qemu::create(dir, name, &[], len);
    }
    mica_in(dir, &["bitmap", "--add", "source.qcow2", "b"]).ok();
    qemu::io(dir, &[], "source.qcow2", &["write -P 1 0 1M"]);
    let before = fs::read(dir.join("long.qcow2")).expect("it is there");
    let said = mica_in(dir, &["convert", "-n", "--bitmaps", "source.qcow2", "long.qcow2"]);
    assert!(said.refusal().contains("a disk of the same length"));
    assert!(fs::read(dir.join("long.qcow2")).expect("it is there") == before, "it was written");
    mica_in(dir, &["convert", "-n", "--bitmaps", "source.qcow2", "same.qcow2"]).ok();
}

/// The story: that the new image could not have the bitmaps was noticed when all was copied.
#[test]
fn bitmaps_that_the_target_cannot_have_are_refused_before_anything_is_written() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    // With such a name a header of 512 bytes is full.
    let base = format!("{}base.qcow2", "./".repeat(175));
    for (name, options) in [("source.qcow2", "compat=1.1"), ("old.qcow2", "compat=0.10")] {
        qemu::create(dir, name, &["-o", options], "1M");
    }
    mica_in(dir, &["create", "-q", "base.qcow2", "1M"]).ok();
    let on_base = ["-o", "cluster_size=512", "-F", "qcow2"];
    let create = [&["create", "-q"][..], &on_base, &["-b", &base, "full.qcow2", "1M"]].concat();
    mica_in(dir, &create).ok();
    mica_in(dir, &["bitmap", "--add", "source.qcow2", "b"]).ok();
    qemu::io(dir, &[], "source.qcow2", &["write -P 1 0 1M"]);
    for (target, why) in [("old.qcow2", "version 2"), ("full.qcow2", "does not fit")] {
        let before = fs::read(dir.join(target)).expect("it is there");
        let said = mica_in(dir, &["convert", "-n", "--bitmaps", "source.qcow2", target]).refusal();
        assert!(said.contains(why) && said.contains(target), "{said}");
        assert!(fs::read(dir.join(target)).expect("it is there") == before, "{target}: written");
    }
    // A second for each sector would be longer than a test may take.
    let convert = ["convert", "--bitmaps", "-r", "512"];
    let convert = [&convert[..], &on_base, &["-B", &base, "source.qcow2", "new.qcow2"]].concat();
    let said = mica_in(dir, &convert).refusal();
    assert!(said.contains("--bitmaps") && said.contains("does not fit"), "{said}");
    assert!(!dir.join("new.qcow2").exists());
}

#[test]
fn a_rate_is_kept_and_other_options_of_qemu_change_no_byte() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "6M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 6M"]);
    qemu::img(dir, ["snapshot", "-c", "before", "image.qcow2"]).ok();
    let said = mica_in(dir, &["convert", "-r", "10M", "image.qcow2", "slow.qcow2"]);
    // The sixth mebibyte is due half a second after the first.
    assert!(said.wall.as_millis() >= 450, "{:?}", said.wall);
    said.ok();
    qemu::same(dir, ("qcow2", "image.qcow2"), ("qcow2", "slow.qcow2"));
    qemu::io(dir, &[], "image.qcow2", &["write -P 2 0 6M"]);
    let words = ["convert", "-t", "writethrough", "-T", "writeback", "image.qcow2", "copy.qcow2"];
    mica_in(dir, &words).ok();
    qemu::same(dir, ("qcow2", "image.qcow2"), ("qcow2", "copy.qcow2"));
    let words = ["convert", "-l", "snapshot.name=before", "image.qcow2", "then.qcow2"];
    mica_in(dir, &words).ok();
    qemu::same(dir, ("qcow2", "slow.qcow2"), ("qcow2", "then.qcow2"));
}

#[test]
fn blocks_are_copied_as_by_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    sources(dir);
    for words in [
        &["bs=64k", "count=4", "skip=1"][..],
        &["bs=1M"],
        &["count=3"],
        &["bs=512", "skip=9000"],
        &["bs=1M", "count=100", "skip=2"],
    ] {
        let ours = [&["dd", "--force", "if=a.qcow2", "of=ours.raw"], words].concat();
        mica_in(dir, &ours).ok();
        let dd = ["dd", "-f", "qcow2", "-O", "raw", "if=a.qcow2", "of=theirs.raw"];
        qemu::img(dir, [&dd, words].concat()).ok();
        let read = |name: &str| fs::read(dir.join(name)).expect("it is there");
        assert!(read("ours.raw") == read("theirs.raw"), "{words:?}");
        let ours = ["dd", "--force", "-O", "qcow2", "if=a.qcow2", "of=ours.qcow2"];
        mica_in(dir, &[&ours, words].concat()).ok();
        qemu::same(dir, ("raw", "theirs.raw"), ("qcow2", "ours.qcow2"));
    }
    let said = mica_in(dir, &["dd", "if=a.qcow2", "of=ours.raw"]).refusal();
    assert!(said.contains("--force"), "{said}");
    let said = mica_in(dir, &["dd", "if=a.qcow2", "of=no.raw", "seek=1"]).refusal();
    assert!(said.contains("skip="), "{said}");
}

#[test]
fn a_benchmark_sends_what_it_is_told_to() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "image.qcow2", &[], "4M");
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 4M"]);
    let read = ["bench", "-c", "1000", "-d", "8", "-s", "64k", "image.qcow2"];
    let said = mica_in(dir, &read).ok();
    let theirs =
        qemu::img(dir, ["bench", "-c", "1000", "-d", "8", "-s", "65536", "image.qcow2"]).ok();
    assert_eq!(said.lines().next(), theirs.lines().next());
    assert!(said.contains("Run completed in "), "{said}");
    qemu::io(dir, &[], "image.qcow2", &["read -P 1 0 4M"]);
    for flush in [&["--flush-interval", "16"][..], &["--flush-interval", "16", "--no-drain"], &[]] {
        let write =
            ["bench", "-w", "--pattern", "7", "-c", "64", "-d", "4", "-o", "1M", "-S", "8k"];
        let write = [&write, flush, &["--output", "json", "image.qcow2"]].concat();
        let said = mica_in(dir, &write).json();
        assert_eq!((said["requests"].as_u64(), said["kind"].as_str()), (Some(64), Some("write")));
        let reads = [
            "read -P 7 1M 4k",
            "read -P 1 1028k 4k",
            "read -P 7 1528k 4k",
            "read -P 1 1532k 2564k",
        ];
        qemu::io(dir, &[], "image.qcow2", &reads);
        qemu::io(dir, &[], "image.qcow2", &["write -P 1 0 4M"]);
    }
    let said = mica_in(dir, &["bench", "-d", "0", "image.qcow2"]).refusal();
    assert!(said.contains("-d between 1 and 1024"), "{said}");
}
