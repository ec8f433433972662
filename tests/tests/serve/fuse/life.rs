//! Servers that are killed, started twice, or asked for nonsense.

use super::served::{self, Cleared, Served, may_run};
use mica_tests::{command, mica, qemu, tools};
use rustix::io::Errno;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

fn errno<T>(result: io::Result<T>) -> Option<Errno> {
    result.err().and_then(|error| Errno::from_io_error(&error))
}

#[test]
fn killed_server_leaves_a_mount_that_the_next_one_clears() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "16M");
    let path = dir.join("disk");
    let _cleared = Cleared(&path);
    for round in 1..=3_u8 {
        let served = Served::start(dir, "top.qcow2", &["--log-level", "info"]);
        if round > 1 {
            assert!(served.log().contains("cleared the mount"), "{}", served.log());
        }
        let file = served.open();
        let mut before = [0; 4096];
        file.read_exact_at(&mut before, 5000).expect("read");
        assert_eq!(before, [round - 1; 4096]);
        file.write_all_at(&[round; 4096], 5000).expect("written");
        // The kernel remembers its attributes for a second, dead or alive.
        path.metadata().expect("it lives");
        served.kill();
        assert_eq!(errno(file.read_at(&mut [0; 512], 0)), Some(Errno::NOTCONN));
    }
    Served::start(dir, "top.qcow2", &[]).stop();
    // Space that was counted ahead of use may leak after a kill, and nothing worse.
    let said = qemu::img(dir, ["check", "-f", "qcow2", "top.qcow2"]);
    assert!(matches!(said.code(), Some(0 | 3)), "{said}");
}

#[test]
fn second_server_at_one_file_is_refused_and_the_first_continues() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "16M");
    qemu::create(dir, "other.qcow2", &[], "8M");
    let served = Served::start(dir, "top.qcow2", &[]);

    let mut second = served::command(served.file(), &dir.join("other.qcow2"), &[]);
    let refusal = command::finish(&mut second).refusal();

    assert!(refusal.contains("another server is mounted there"), "{refusal}");
    served.open().write_all_at(&[1; 512], 0).expect("it lives");
    served.stop();
}

#[test]
fn missing_file_or_other_inode_is_refused() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "16M");
    for (file, why) in [("missing", "has to exist"), (".", "not a regular file")] {
        let mut serve = served::command(&dir.join(file), &dir.join("top.qcow2"), &[]);
        let refusal = command::finish(&mut serve).refusal();
        assert!(refusal.contains(why), "{refusal}");
    }
}

/// The story: in a sandbox a file that the server had from the start counted as a further one, and
/// a disk that was drained came back with a restart only.
#[test]
fn drained_disk_comes_back() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "16M");
    let control = dir.join("control").display().to_string();
    let ctl = |verb: &str| mica::run(["ctl", verb, "top", "--control", &control]);
    let served = Served::start(dir, "top.qcow2", &["--control", &control]);
    served.open().write_all_at(&[1; 512], 0).expect("written");
    ctl("drain").ok();
    assert_eq!(fs::read(served.file()).expect("unmounted"), served::UNDERNEATH);
    ctl("undrain").ok();
    let mut first = [0; 512];
    served.open().read_exact_at(&mut first, 0).expect("served");
    assert_eq!(first, [1; 512]);
    served.stop();
}

#[test]
fn disk_served_read_only_takes_no_writes() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "top.qcow2", &[], "16M");
    let served = Served::start(dir, "top.qcow2", &["--read-only"]);
    let found = served.file().metadata().expect("stat");
    assert_eq!((found.mode() & 0o7777, found.len()), (0o400, 16 << 20));
    assert_eq!(errno(OpenOptions::new().write(true).open(served.file())), Some(Errno::ROFS));
    assert_eq!(fs::read(served.file()).expect("read"), vec![0; 16 << 20]);
    served.stop();
}
