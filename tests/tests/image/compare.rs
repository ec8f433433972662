//! `mica compare` judges as `qemu-img compare` does, with its exit codes.

use mica_tests::{mica, qemu, tools};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Two images that differ in `dir`, as files and formats; both programs give `code`.
#[track_caller]
fn same_verdict(dir: &Path, first: [&str; 2], second: [&str; 2], strict: bool, code: i32) {
    let flag: &[&str] = if strict { &["-s"] } else { &[] };
    let formats = ["-f", first[1], "-F", second[1]];
    let [one, other] = [first, second].map(|[name, _]| dir.join(name).display().to_string());
    let words = || flag.iter().chain(&formats).copied().chain([one.as_str(), other.as_str()]);
    let ours = mica::run(["compare"].into_iter().chain(words()));
    assert_eq!(ours.code(), Some(code), "{ours}");
    if !strict {
        // In strict mode QEMU compares allocation too, which mica does not.
        let theirs = qemu::img(dir, ["compare"].into_iter().chain(words()));
        assert_eq!(theirs.code(), Some(code), "{theirs}");
    }
}

#[test]
fn verdicts_are_qemus() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let writes = ["write -P 1 0 3M", "write -P 2 20M 64k", "write -z 1M 64k"];
    qemu::create(dir, "one.qcow2", &[], "30M");
    qemu::io(dir, &[], "one.qcow2", &writes);
    qemu::flatten(dir, "one.qcow2", "one.raw");
    let other = ["convert", "-O", "qcow2", "-o", "cluster_size=4k,compat=0.10", "one.qcow2"];
    qemu::img(dir, other.iter().chain(&["same.qcow2"])).ok();
    qemu::overlay(dir, "longer.qcow2", "one.qcow2", &[]);
    qemu::img(dir, ["resize", "-q", "-f", "qcow2", "longer.qcow2", "40M"]).ok();
    qemu::overlay(dir, "different.qcow2", "one.qcow2", &[]);
    qemu::io(dir, &[], "different.qcow2", &["write -P 3 20M 512"]);
    qemu::overlay(dir, "tail.qcow2", "longer.qcow2", &[]);
    qemu::io(dir, &[], "tail.qcow2", &["write -P 3 39M 512"]);

    let one = ["one.qcow2", "qcow2"];
    same_verdict(dir, one, ["one.raw", "raw"], false, 0);
    same_verdict(dir, one, ["same.qcow2", "qcow2"], false, 0);
    same_verdict(dir, one, ["longer.qcow2", "qcow2"], false, 0);
    same_verdict(dir, one, ["longer.qcow2", "qcow2"], true, 1);
    same_verdict(dir, one, ["different.qcow2", "qcow2"], false, 1);
    same_verdict(dir, one, ["tail.qcow2", "qcow2"], false, 1);
    same_verdict(dir, one, ["none.qcow2", "qcow2"], false, 2);
}

#[test]
fn data_beyond_the_end_of_the_shorter_disk_is_found_to_the_last_byte() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    const LONG: u64 = (40 << 20) + 512;
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let file = |name: &str, len: u64| {
        let file = File::create(dir.join(name)).expect("made");
        file.set_len(len).expect("set");
        file
    };
    let (short, long) = (["short", "raw"], ["long", "raw"]);
    for (len, at) in [(1 << 20, LONG - 1), (1 << 20, 1 << 20), ((3 << 20) + 512, (3 << 20) + 512)] {
        file("short", len);
        let data = file("long", LONG);
        same_verdict(dir, short, long, false, 0);
        data.write_all_at(&[1], at).expect("written");
        same_verdict(dir, short, long, false, 1);
        same_verdict(dir, long, short, false, 1);
        let paths = ["long", "short"].map(|name| dir.join(name).display().to_string());
        let said = mica::run(["compare", "-f", "raw", "-F", "raw", &paths[0], &paths[1]]);
        assert!(said.stdout.contains(&format!("at offset {at}!")), "{said}");
    }
}

/// The story: identical images were different where nobody could be told that they are not.
#[test]
fn failures_are_no_verdict() {
    let dir = tempfile::tempdir().expect("a folder");
    let zeros = dir.path().join("zeros");
    std::fs::File::create(&zeros).and_then(|file| file.set_len(1 << 20)).expect("made");
    let zeros = zeros.display().to_string();
    let compare = ["compare", "-f", "raw", "-F", "raw", &zeros, &zeros];
    assert_eq!(mica::run(compare).code(), Some(0));
    let full = std::fs::File::options().write(true).open("/dev/full").expect("there");
    let mut untold = Command::new(mica::binary());
    let status = untold.args(compare).stdout(full).stderr(Stdio::null()).status();
    assert_eq!(status.expect("it runs").code(), Some(3));
    for (verb, code) in [("compare", 3), ("check", 1), ("info", 1), ("create", 1)] {
        let said = mica::run([verb, "--outptu", "json", &zeros]);
        assert_eq!(said.code(), Some(code), "{verb}: {said}");
        let said = mica::run(["--log-level", "error", verb]);
        assert_eq!(said.code(), Some(code), "{verb}: {said}");
        assert_eq!(mica::run([verb, "--help"]).code(), Some(0));
    }
}
