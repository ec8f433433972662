//! File systems on disks that mica serves: made by their own programs, judged by their own
//! programs. They need not be mounted, so no privileges are needed; if the system has FUSE, they
//! are made on the served disk itself, otherwise they are copied to it and back.

use mica_tests::mounts::FuseFile;
use mica_tests::server::Server;
use mica_tests::{command, qemu, tools};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Serves `disk.qcow2` in `dir` and runs `work` on it as a file.
#[track_caller]
fn with_disk(dir: &Path, work: impl FnOnce(&Path)) {
    let server = Server::mica_writable(&dir.join("disk.qcow2"), "qcow2", &[]).expect("served");
    match FuseFile::mount(&dir.join("fuse"), &server.uri()) {
        Some(disk) => {
            work(&disk.path());
            disk.unmount();
        }
        None => {
            println!("no FUSE here: file systems are copied");
            let copy = dir.join("copy.raw");
            let copy_name = copy.display().to_string();
            command::run("nbdcopy", [&server.uri(), &copy_name]).ok();
            work(&copy);
            command::run("nbdcopy", ["--flush", &copy_name, &server.uri()]).ok();
        }
    }
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success(), "{stopped:?}");
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

/// Files of all kinds, to be put into a file system.
fn files(dir: &Path) -> PathBuf {
    let folder = dir.join("files");
    let mut rng = mica_gen::Rng::new(5);
    for number in 0..40_usize {
        let inner = folder.join(format!("folder-{}", number % 7));
        fs::create_dir_all(&inner).expect("made");
        let len = usize::try_from(rng.below(300_000)).expect("small");
        let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
        let bytes: Vec<u8> = words.take(len / 8).flatten().collect();
        fs::write(inner.join(format!("file-{number}")), bytes).expect("written");
    }
    folder
}

/// Root's programs are not on every user's path.
fn program(tool: tools::Tool) -> String {
    tool.find().expect("it is present").display().to_string()
}

#[track_caller]
fn ext4_on(options: &[&str]) {
    let needed = [tools::QEMU_IMG, tools::MKE2FS, tools::E2FSCK, tools::DEBUGFS, tools::NBDCOPY];
    if !tools::present(&needed) || !tools::present(&[tools::NBDFUSE]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let folder = files(dir);
    fs::write(dir.join("below.raw"), vec![0x55; 20 << 20]).expect("written");
    qemu::create(dir, "disk.qcow2", options, "96M");
    with_disk(dir, |disk| {
        let mut make = Command::new(program(tools::MKE2FS));
        make.args(["-q", "-F", "-t", "ext4", "-E", "discard", "-d"]).arg(&folder).arg(disk);
        command::finish(&mut make).ok();
    });
    // Another session changes it: some files are removed, others added.
    let more = folder.join("folder-3/file-3").display().to_string();
    with_disk(dir, |disk| {
        for request in ["rm folder-1/file-1", "rm folder-2/file-2", &format!("write {more} more")] {
            let mut debugfs = Command::new(program(tools::DEBUGFS));
            debugfs.args(["-w", "-R", request]).arg(disk);
            command::finish(&mut debugfs).ok();
        }
    });
    qemu::flatten(dir, "disk.qcow2", "flat.raw");
    let flat = dir.join("flat.raw").display().to_string();
    command::run(&program(tools::E2FSCK), ["-f", "-n", &flat]).ok();
    let out = dir.join("out").display().to_string();
    for (inside, outside) in [("more", more), ("folder-5/file-5", name(&folder, 5))] {
        let request = format!("dump {inside} {out}");
        command::run(&program(tools::DEBUGFS), ["-R", &request, &flat]).ok();
        assert_eq!(fs::read(&out).expect("dumped"), fs::read(outside).expect("there"), "{inside}");
    }
}

fn name(folder: &Path, number: usize) -> String {
    let file = format!("folder-{}/file-{number}", number % 7);
    folder.join(file).display().to_string()
}

#[test]
fn ext4_is_sound_in_an_empty_image() {
    ext4_on(&[]);
}

#[test]
fn ext4_is_sound_in_an_overlay_with_extended_l2() {
    ext4_on(&["-o", "extended_l2=on", "-b", "below.raw", "-F", "raw"]);
}

#[test]
fn ext4_is_sound_in_small_clusters() {
    ext4_on(&["-o", "cluster_size=4k", "-b", "below.raw", "-F", "raw"]);
}

#[test]
fn xfs_is_sound_in_an_overlay() {
    let needed = [tools::QEMU_IMG, tools::MKFS_XFS, tools::XFS_REPAIR, tools::NBDCOPY];
    if !tools::present(&needed) || !tools::present(&[tools::NBDFUSE]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("below.raw"), vec![0x55; 20 << 20]).expect("written");
    // The smallest size that mkfs.xfs accepts.
    qemu::create(dir, "disk.qcow2", &["-b", "below.raw", "-F", "raw"], "320M");
    with_disk(dir, |disk| {
        let mut make = Command::new(program(tools::MKFS_XFS));
        command::finish(make.args(["-q", "-f"]).arg(disk)).ok();
    });
    with_disk(dir, |disk| {
        let mut judge = Command::new(program(tools::XFS_REPAIR));
        command::finish(judge.args(["-n", "-f"]).arg(disk)).ok();
    });
    qemu::flatten(dir, "disk.qcow2", "flat.raw");
    let flat = dir.join("flat.raw").display().to_string();
    command::run(&program(tools::XFS_REPAIR), ["-n", "-f", &flat]).ok();
}
