//! `mica create`, `measure`, `resize`, `read` and `write`: what QEMU says of the images, and what
//! happens to existing files.

use mica_tests::{command, mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options that make an image of every shape; the second says which size goes with them.
const SHAPES: &[(&str, &str)] = &[
    ("", "1G"),
    ("", "0"),
    ("", "1000001"),
    ("cluster_size=512", "100M"),
    ("cluster_size=4k", "1G"),
    ("cluster_size=2M", "100G"),
    ("extended_l2=on", "1G"),
    ("extended_l2=on,cluster_size=16k", "1G"),
    ("extended_l2=on,preallocation=metadata", "100M"),
    ("compat=0.10", "1G"),
    ("compat=0.10,preallocation=metadata", "100M"),
    ("refcount_bits=1", "1G"),
    ("refcount_bits=2,preallocation=metadata", "1G"),
    ("refcount_bits=4", "1G"),
    ("refcount_bits=8", "1G"),
    ("refcount_bits=32", "1G"),
    ("refcount_bits=64,preallocation=metadata", "1G"),
    ("lazy_refcounts=on", "1G"),
    ("compression_type=zstd", "1G"),
    ("preallocation=metadata", "20G"),
    ("preallocation=falloc", "20M"),
    ("preallocation=full", "20M"),
    ("preallocation=metadata,cluster_size=512", "20M"),
    ("data_file=data.bin", "20M"),
    ("data_file=data.bin,data_file_raw=on", "20M"),
    ("data_file=data.bin,data_file_raw=on,extended_l2=on", "20M"),
    ("data_file=data.bin,preallocation=falloc", "20M"),
];

/// Runs mica in `dir`.
#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// What QEMU says of an image, without what differs between any two files.
#[track_caller]
fn info(dir: &Path, image: &str) -> Value {
    let mut told = qemu::img(dir, ["info", "--output=json", image]).json();
    let object = told.as_object_mut().expect("an object");
    for field in ["children", "filename", "actual-size"] {
        object.remove(field);
    }
    told
}

#[track_caller]
fn check(dir: &Path, image: &str) {
    let said = qemu::img(dir, ["check", image]);
    assert_eq!(said.code(), Some(0), "{said}");
}

#[test]
fn images_match_qemus_field_by_field() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for (options, size) in SHAPES {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        let with = if options.is_empty() { vec![] } else { vec!["-o", options] };
        let ours = [&["create", "-q"], with.as_slice(), &["image.qcow2", size]].concat();
        mica_in(dir, &ours).ok();
        check(dir, "image.qcow2");
        let told = info(dir, "image.qcow2");
        if *size != "0" && !options.contains("data_file") {
            qemu::io(dir, &[], "image.qcow2", &["write -P 7 1k 700k", "read -P 7 1k 700k"]);
            check(dir, "image.qcow2");
        }
        fs::remove_file(dir.join("image.qcow2")).expect("it was made");
        qemu::create(dir, "image.qcow2", &with, size);
        assert_eq!(told, info(dir, "image.qcow2"), "{options} {size}");
    }
}

#[test]
fn what_qemu_refuses_is_refused_for_its_reason() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for options in [
        "cluster_size=3k",
        "cluster_size=4M",
        "cluster_size=256",
        "refcount_bits=3",
        "refcount_bits=128",
        "compat=0.10,lazy_refcounts=on",
        "compat=0.10,extended_l2=on",
        "compat=0.10,refcount_bits=1",
        "compat=0.10,compression_type=zstd",
        "compat=0.10,data_file=data",
        "extended_l2=on,cluster_size=4k",
        "data_file_raw=on",
        "backing_fmt=qcow2",
    ] {
        let ours = mica_in(dir, &["create", "-o", options, "image.qcow2", "1G"]).refusal();
        let theirs = ["create", "-q", "-f", "qcow2", "-o", options, "image.qcow2", "1G"];
        let theirs = qemu::img(dir, theirs).refusal();
        let reason = |said: &str| said.split_once("image.qcow2: ").map(|said| said.1.to_owned());
        assert_eq!(reason(&ours), reason(&theirs), "{options}: {ours}{theirs}");
        assert!(!dir.join("image.qcow2").exists(), "{options}: a file was left");
    }
    mica_in(dir, &["create", "image.qcow2", "1E"]).refusal();
    mica_in(dir, &["create", "image.qcow2"]).refusal();
    mica_in(dir, &["create", "-b", "none.qcow2", "-F", "qcow2", "image.qcow2"]).refusal();
    mica_in(dir, &["create", "-o", "unknown=1", "image.qcow2", "1G"]).refusal();
    assert!(!dir.join("image.qcow2").exists());
}

#[test]
fn overlays_take_their_size_from_below_and_have_subclusters() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "100M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 3M"]);
    mica_in(dir, &["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    let told = info(dir, "top.qcow2");
    assert_eq!(told["virtual-size"], 100 << 20);
    assert_eq!(told["cluster-size"], 128 << 10);
    assert_eq!(told["backing-filename"], "base.qcow2");
    assert_eq!(told["backing-filename-format"], "qcow2");
    assert_eq!(told["format-specific"]["data"]["extended-l2"], true);
    let writes = ["write -P 2 4k 4k", "read -P 1 0 4k", "read -P 2 4k 4k", "read -P 1 8k 1M"];
    qemu::io(dir, &[], "top.qcow2", &writes);
    check(dir, "top.qcow2");

    let plain = ["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "-o", "extended_l2=off"];
    mica_in(dir, &[plain.as_slice(), &["plain.qcow2", "300M"]].concat()).ok();
    let told = info(dir, "plain.qcow2");
    qemu::overlay(dir, "theirs.qcow2", "base.qcow2", &[]);
    qemu::img(dir, ["resize", "-q", "theirs.qcow2", "300M"]).ok();
    assert_eq!(told, info(dir, "theirs.qcow2"));
}

#[test]
fn an_existing_file_is_overwritten_only_by_force() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("image.qcow2"), "precious").expect("there is room");
    let said = mica_in(dir, &["create", "image.qcow2", "1G"]).refusal();
    assert!(said.contains("--force"), "{said}");
    assert_eq!(fs::read(dir.join("image.qcow2")).expect("it is there"), b"precious");
    mica_in(dir, &["create", "-q", "--force", "image.qcow2", "1G"]).ok();
    mica_in(dir, &["check", "image.qcow2"]).ok();
    fs::write(dir.join("empty.qcow2"), "").expect("there is room");
    let told = mica_in(dir, &["create", "--output", "json", "empty.qcow2", "1G"]).json();
    assert_eq!(told["virtual-size"], 1 << 30);
    assert_eq!(told["format"], "qcow2");
}

#[test]
fn an_image_is_not_created_over_its_own_backing_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "base.qcow2", "1G"]).ok();
    mica_in(dir, &["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    fs::hard_link(dir.join("base.qcow2"), dir.join("link.qcow2")).expect("linked");
    let content = |file: &str| fs::read(dir.join(file)).expect("it is there");
    let before = [content("base.qcow2"), content("top.qcow2")];
    for args in [
        // With -u the file is not opened, so that a link to it is known, but not what is beneath.
        ["-b", "base.qcow2", "base.qcow2"].as_slice(),
        &["-u", "-b", "base.qcow2", "base.qcow2"],
        &["-b", "base.qcow2", "link.qcow2"],
        &["-u", "-b", "base.qcow2", "link.qcow2"],
        &["-b", "top.qcow2", "base.qcow2"],
        &["-b", "top.qcow2", "top.qcow2"],
        &["-u", "-b", "top.qcow2", "top.qcow2"],
    ] {
        let args = [&["create", "--force", "-F", "qcow2"], args, &["1G"]].concat();
        let said = mica_in(dir, &args).refusal();
        assert!(said.contains("part of the source"), "{args:?}: {said}");
    }
    assert_eq!([content("base.qcow2"), content("top.qcow2")], before);
}

#[test]
fn scripts_write_overlays_and_read_them() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "10M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 88 0 1M"]);
    mica_in(dir, &["create", "-q", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    let script = "printf 'hello' | \"$0\" write top.qcow2 1001";
    let mut shell = Command::new("bash");
    command::finish(shell.current_dir(dir).arg("-c").arg(script).arg(mica::binary())).ok();
    assert_eq!(mica_in(dir, &["read", "top.qcow2", "1000", "7"]).ok(), "XhelloX");
    check(dir, "top.qcow2");
    qemu::io(dir, &[], "top.qcow2", &["read -P 88 0 1001", "read -P 88 1006 1000k"]);
    mica_in(dir, &["read", "top.qcow2", "10M", "1"]).refusal();
}

#[test]
fn what_fails_halfway_is_removed() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    // A limit on the file's length is a full device that any user can set up.
    let limited = |verb: &str| {
        let script = format!("trap '' XFSZ; ulimit -f 256; exec \"$0\" {verb}");
        let mut shell = Command::new("bash");
        shell.current_dir(dir).arg("-c").arg(script).arg(mica::binary());
        command::finish(&mut shell).refusal()
    };
    limited("create -o preallocation=full image.qcow2 100M");
    assert!(!dir.join("image.qcow2").exists());
    fs::write(dir.join("source.raw"), vec![7; 1 << 20]).expect("there is room");
    limited("convert -f raw source.raw image.qcow2");
    assert!(!dir.join("image.qcow2").exists());
    limited("convert -f raw -O raw source.raw image.raw");
    assert!(!dir.join("image.raw").exists());
}

#[test]
fn mark_of_an_image_that_is_gone_keeps_its_name_and_nothing_is_left() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    fs::write(folder.join("vm.qcow2.mica-above"), "above: vm-1.qcow2\n").expect("written");
    let said = mica_in(folder, &["create", "vm.qcow2", "8M"]).refusal();
    assert!(said.contains("frozen") && said.contains("vm.qcow2.mica-above"), "{said}");
    assert!(!folder.join("vm.qcow2").exists());
    fs::remove_file(folder.join("vm.qcow2.mica-above")).expect("it is there");
    mica_in(folder, &["create", "vm.qcow2", "8M"]).ok();
}

/// The story: it was said that the link could not be opened, as nothing was there.
#[test]
fn link_that_leads_nowhere_is_named_with_where_it_leads() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    std::os::unix::fs::symlink("missing/disk.qcow2", dir.join("link.qcow2")).expect("a link");
    mica_in(dir, &["create", "-q", "source.qcow2", "1M"]).ok();
    for args in [
        &["create", "link.qcow2", "1M"][..],
        &["clone", "source.qcow2", "link.qcow2"],
        &["convert", "--force", "source.qcow2", "link.qcow2"],
    ] {
        let said = mica_in(dir, args).refusal();
        assert!(said.contains("link.qcow2 is a symbolic link to missing/disk.qcow2"), "{said}");
        assert!(dir.join("link.qcow2").is_symlink());
    }
}

#[test]
fn lengths_are_measured_as_by_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "source.qcow2", &[], "1G");
    let writes = ["write -P 1 0 3M", "write -P 2 20M 64k", "write -z 1M 64k", "write 300M 512"];
    qemu::io(dir, &[], "source.qcow2", &writes);
    qemu::img(dir, ["bitmap", "--add", "source.qcow2", "changes"]).ok();
    for options in [
        "compat=1.1",
        "compat=0.10",
        "cluster_size=4k",
        "extended_l2=on",
        "refcount_bits=1",
        "preallocation=metadata",
        "preallocation=full",
    ] {
        for what in [["source.qcow2", ""], ["--size", "1T"], ["--size", "100001"]] {
            let words: Vec<_> = what.into_iter().filter(|word| !word.is_empty()).collect();
            let all = [&["measure", "-O", "qcow2", "-o", options], words.as_slice()].concat();
            assert_eq!(mica_in(dir, &all).ok(), qemu::img(dir, &all).ok(), "{options} {what:?}");
            let json = [all.as_slice(), &["--output", "json"]].concat();
            assert_eq!(mica_in(dir, &json).json(), qemu::img(dir, &json).json());
        }
    }
    let raw = ["measure", "-O", "raw", "source.qcow2"];
    assert_eq!(mica_in(dir, &raw).ok(), qemu::img(dir, raw).ok());
}

#[test]
fn raw_images_are_made_resized_written_and_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "-f", "raw", "disk.raw", "1M"]).ok();
    let len = || fs::metadata(dir.join("disk.raw")).expect("it is there").len();
    assert_eq!(len(), 1 << 20);
    mica_in(dir, &["resize", "-f", "raw", "disk.raw", "+1M"]).ok();
    assert_eq!(len(), 2 << 20);
    mica_in(dir, &["resize", "-f", "raw", "disk.raw", "1M"]).refusal();
    assert_eq!(len(), 2 << 20);
    mica_in(dir, &["resize", "-f", "raw", "--shrink", "disk.raw", "-512k"]).ok();
    assert_eq!(len(), 3 << 19);
    mica_in(dir, &["resize", "-f", "raw", "--shrink", "disk.raw", "-2M"]).refusal();

    let script = "printf 'hello, disk' | \"$0\" write -f raw disk.raw 1000";
    let mut shell = Command::new("bash");
    command::finish(shell.current_dir(dir).arg("-c").arg(script).arg(mica::binary())).ok();
    assert_eq!(mica_in(dir, &["read", "-f", "raw", "disk.raw", "1000", "11"]).ok(), "hello, disk");
    assert_eq!(mica_in(dir, &["read", "-f", "raw", "disk.raw", "999", "1"]).ok(), "\0");
    mica_in(dir, &["read", "-f", "raw", "disk.raw", "2M", "1"]).refusal();
    assert_eq!(len(), 3 << 19, "a write changes no length");
}

/// The story: the image was made without a word, and no other verb opened it.
#[test]
fn an_image_that_may_not_name_its_base_is_warned_of_and_opens_where_that_is_allowed() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().canonicalize().expect("it is there");
    let (bases, config) = (dir.join("bases"), dir.join("config"));
    for folder in [&bases, &config, &dir.join("images"), &config.join("mica")] {
        fs::create_dir(folder).expect("made");
    }
    mica_in(&dir, &["create", "-q", "bases/base.qcow2", "1M"]).ok();
    let base = bases.join("base.qcow2").display().to_string();
    let overlay = ["create", "-q", "-F", "qcow2", "-b", &base];
    let said = mica_in(&dir, &[&overlay[..], &["images/top.qcow2"]].concat());
    let wanted = format!("--allow-path {}", bases.display());
    assert!(said.stderr.lines().count() == 1 && said.stderr.contains(&wanted), "{said}");
    said.ok();
    mica_in(&dir, &["map", "images/top.qcow2"]).refusal();
    let allowing = [&overlay[..], &["--allow-path", "bases", "images/again.qcow2"]].concat();
    assert_eq!(mica_in(&dir, &allowing).stderr, "");

    let map_with = |name: &str, value: &Path, more: &[&str]| {
        let mut mica = Command::new(mica::binary());
        mica.current_dir(&dir).args(["map", "images/top.qcow2"]).args(more).env(name, value);
        command::finish(&mut mica)
    };
    let listed = PathBuf::from(format!("{}/none:{}", dir.display(), bases.display()));
    assert_eq!(map_with("MICA_ALLOW_PATH", &listed, &[]).ok().lines().count(), 1);
    for names in ["none", "images"] {
        map_with("MICA_ALLOW_PATH", &listed, &["--names", names]).refusal();
    }
    let file = config.join("mica/config.toml");
    fs::write(&file, format!("allow-path = [\"{}\"]\n", bases.display())).expect("written");
    let mode = |mode| fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("ours");
    mode(0o600);
    map_with("XDG_CONFIG_HOME", &config, &[]).ok();
    mode(0o666);
    let said = map_with("XDG_CONFIG_HOME", &config, &[]);
    assert!(said.code() == Some(1) && said.stderr.contains("others may write it"), "{said}");
}

#[test]
fn a_name_with_a_colon_is_written_as_a_path() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "a:b.qcow2", "1M"]).ok();
    mica_in(dir, &["create", "-q", "-F", "qcow2", "-b", "a:b.qcow2", "top.qcow2"]).ok();
    mica_in(dir, &["create", "-q", "-o", "data_file=c:d.data", "split.qcow2", "1M"]).ok();
    mica_in(dir, &["convert", "-B", "a:b.qcow2", "-F", "qcow2", "top.qcow2", "copy.qcow2"]).ok();
    for image in ["top.qcow2", "split.qcow2", "copy.qcow2"] {
        mica_in(dir, &["map", image]).ok();
        qemu::img(dir, ["map", image]).ok();
    }
    assert_eq!(info(dir, "top.qcow2")["backing-filename"], "./a:b.qcow2");
    // Nothing is there by that name, so it is a protocol, which other programs may know.
    let unopened = ["create", "-q", "-u", "-F", "raw", "-b", "nbd://host/x", "remote.qcow2", "1M"];
    let said = mica_in(dir, &unopened);
    assert!(said.stderr.contains("protocol"), "{said}");
    assert_eq!(info(dir, "remote.qcow2")["backing-filename"], "nbd://host/x");
}

#[test]
fn options_that_would_do_nothing_are_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "-o", "size=1M", "disk.qcow2", "1M"]).ok();
    for words in [
        &["create", "-u", "new.qcow2", "1M"][..],
        &["create", "-o", "size=2M", "new.qcow2", "1M"],
        &["measure", "-o", "size=2M", "disk.qcow2"],
        &["measure", "-o", "size=2M", "--size", "1M"],
    ] {
        mica_in(dir, words).refusal();
        assert!(!dir.join("new.qcow2").exists(), "{words:?}");
    }
    mica_in(dir, &["measure", "-o", "size=1M", "disk.qcow2"]).ok();
}

/// The story: a clone that failed said nothing of the hundreds that were there.
#[test]
fn clones_that_were_made_before_one_failed_are_named() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "base.qcow2", "1M"]).ok();
    std::fs::write(dir.join("new-257.qcow2"), "taken").expect("written");
    let said = mica_in(dir, &["clone", "--count", "257", "base.qcow2", "new.qcow2"]).refusal();
    assert!(said.contains("new-1.qcow2 to new-256.qcow2 are made"), "{said}");
    assert!(dir.join("new-256.qcow2").exists());
}

/// The story: with -u a format was written that no verb opens afterwards.
#[test]
fn unknown_format_of_a_backing_file_is_refused_also_unopened() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for (format, said) in [
        ("bogus", "unknown format \"bogus\""),
        ("vmdk", "qemu-img convert translates -f vmdk"),
        ("null", "qcow2, raw or luks"),
    ] {
        let create = ["create", "-u", "-b", "base.img", "-F", format, "new.qcow2", "1M"];
        let refused = mica_in(dir, &create).refusal();
        assert!(refused.contains(said), "{refused}");
        assert!(!dir.join("new.qcow2").exists(), "{format}");
    }
    for format in ["qcow2", "raw", "luks"] {
        let create = ["create", "-q", "--force", "-u", "-b", "base.img", "-F", format];
        mica_in(dir, &[&create[..], &["new.qcow2", "1M"]].concat()).ok();
    }
}

/// The story: raw images had the limits of qcow2's L1 table.
#[test]
fn limits_of_lengths_are_those_of_the_format_and_are_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let longest = "9223372036854775296";
    let measured = mica_in(dir, &["measure", "-O", "raw", "--size", longest]).ok();
    assert!(measured.contains(longest), "{measured}");
    let too_long = ["9223372036854775297", "9223372036854775807", "15E"];
    for size in too_long {
        for words in [
            &["create", "-f", "raw", "new.raw", size][..],
            &["measure", "-O", "raw", "--size", size],
        ] {
            let refused = mica_in(dir, words).refusal();
            assert!(refused.contains(longest), "{words:?}: {refused}");
        }
    }
    // More than a qcow2 image with default clusters can have: the file system decides.
    let long = mica_in(dir, &["create", "-q", "-f", "raw", "new.raw", "3P"]);
    if long.code() != Some(0) {
        let refused = long.refusal();
        assert!(refused.contains("its file system has no files of 3377699720527872"), "{refused}");
        assert!(!dir.join("new.raw").exists());
    }
    for (options, most) in [
        ("cluster_size=512", "137438953472"),
        ("cluster_size=64k", "2251799813685248"),
        ("cluster_size=64k,extended_l2=on", "1125899906842624"),
    ] {
        mica_in(dir, &["create", "-q", "--force", "-o", options, "new.qcow2", most]).ok();
        let grow = mica_in(dir, &["resize", "new.qcow2", "+512"]).refusal();
        let create = ["create", "--force", "-o", options, "new.qcow2", "3P"];
        for refused in [mica_in(dir, &create).refusal(), grow] {
            assert!(refused.contains(&format!("at most {most} bytes")), "{refused}");
        }
    }
}
