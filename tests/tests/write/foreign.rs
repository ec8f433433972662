//! A server is killed, and QEMU commits into its image before the next one starts: `qemu-img
//! commit` opens the image for reading, reopens it for writing, and leaves the bits that name the
//! log of the server. The log no longer matches, and it must not overwrite anything that QEMU
//! wrote.

use mica_tests::guest::{Answer, Guest};
use mica_tests::server::Server;
use mica_tests::{qemu, tools};
use std::fs;
use std::path::Path;

const MIB: usize = 1 << 20;
const AUTOCLEAR_AT: usize = 88;
const FLUSHED: u8 = 1;
const WRITTEN: u8 = 2;
const COMMITTED: u8 = 9;

#[track_caller]
fn shown(guest: &mut Guest, mib: usize) -> u8 {
    let len = u32::try_from(MIB).expect("small");
    let read = guest.read((mib * MIB) as u64, len).expect("answered");
    let Answer::Done(bytes) = read else { panic!("{read:?}") };
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{mib} MiB is of two");
    bytes[0]
}

fn name_of_log(image: &Path) -> Vec<u8> {
    fs::read(image).expect("read")[AUTOCLEAR_AT..AUTOCLEAR_AT + 4].to_vec()
}

/// A folder for redo logs, in `dir`.
fn folder_of_logs(dir: &Path) -> String {
    let logs = dir.join("logs");
    fs::create_dir(&logs).expect("made");
    logs.to_str().expect("a plain name").to_owned()
}

/// Makes `disk.qcow2` in `dir`, of which 4 MiB are durable, and kills a server that has its log in
/// `place`, and to which a guest wrote 1 MiB at each of these.
#[track_caller]
fn leave_unflushed(dir: &Path, options: &str, place: &[&str], mibs: &[u64]) {
    qemu::create(dir, "disk.qcow2", &["-o", options], "64M");
    qemu::io(dir, &["-f", "qcow2"], "disk.qcow2", &["write -P 1 0 4M"]);
    let image = dir.join("disk.qcow2");
    let server = Server::mica_writable(&image, "qcow2", place).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    for mib in mibs {
        assert_eq!(guest.write(mib << 20, &vec![WRITTEN; MIB]).expect("answered"), 0);
    }
    // Dropping the server kills it.
    drop(server);
}

/// QEMU does this `write` to an overlay, and commits that into `disk.qcow2`.
#[track_caller]
fn commit_by_qemu(dir: &Path, write: &str) {
    qemu::overlay(dir, "over.qcow2", "disk.qcow2", &[]);
    qemu::io(dir, &["-f", "qcow2"], "over.qcow2", &[write]);
    qemu::img(dir, ["commit", "-q", "-f", "qcow2", "over.qcow2"]).ok();
}

#[track_caller]
fn survives_a_commit(options: &str) {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let image = dir.join("disk.qcow2");
    let logs = folder_of_logs(dir);
    let place = ["--redo-dir", &logs];
    leave_unflushed(dir, options, &place, &[8, 16]);

    let named = name_of_log(&image);
    commit_by_qemu(dir, "write -P 9 24M 4M");
    assert_ne!(named, [0; 4], "the log had a name");
    assert_eq!(
        name_of_log(&image),
        named,
        "QEMU clears the name: this test tests nothing any more"
    );

    for options in [&["--read-only"][..], &[]] {
        let server = Server::mica_writable(&image, "qcow2", &[&place[..], options].concat());
        let server = server.expect("served");
        let mut guest = Guest::connect(&server).expect("served");
        let told = server.log();
        assert!(told.contains("another program has since written"), "{options:?}: {told}");
        assert_eq!(told.contains(".lost"), options.is_empty(), "{options:?}: {told}");
        let mut expect = |mib: std::ops::Range<usize>, byte: u8| {
            mib.for_each(|mib| assert_eq!(shown(&mut guest, mib), byte, "{options:?} {mib} MiB"));
        };
        expect(0..4, FLUSHED);
        expect(24..28, COMMITTED);
        // What was not flushed is lost, which is allowed.
        expect(8..9, 0);
        if options.is_empty() {
            for mib in 40..48 {
                let at = (mib * MIB) as u64;
                assert_eq!(guest.write(at, &vec![WRITTEN; MIB]).expect("answered"), 0);
            }
            assert_eq!(guest.flush().expect("answered"), 0);
            (24..28).for_each(|mib| assert_eq!(shown(&mut guest, mib), COMMITTED));
            assert!(server.stop().expect("it stops").status.success());
        }
    }
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(matches!(said.code(), Some(0 | 3)), "{said}");
    let reads = ["read -P 1 0 4M", "read -P 9 24M 4M", "read -P 2 40M 8M"];
    qemu::io(dir, &["-r", "-f", "qcow2"], "disk.qcow2", &reads);
}

/// QEMU opens the image for writing, and clears what it does not know: the image names the log no
/// more. The log is still there, and the process that finds it reports once what is lost.
#[test]
fn log_that_qemu_made_nameless_is_reported_once() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let image = dir.join("disk.qcow2");
    let logs = folder_of_logs(dir);
    let place = ["--redo-dir", &logs];
    qemu::create(dir, "disk.qcow2", &[], "64M");
    let server = Server::mica_writable(&image, "qcow2", &place).expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(8 << 20, &vec![WRITTEN; MIB]).expect("answered"), 0);
    // What is dropped is killed.
    drop(server);
    qemu::io(dir, &["-f", "qcow2"], "disk.qcow2", &["write -P 9 24M 1M"]);
    assert_eq!(name_of_log(&image), [0; 4], "QEMU does not clear the name any more");

    for warns in [true, false] {
        let server = Server::mica_writable(&image, "qcow2", &place).expect("served");
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!((shown(&mut guest, 8), shown(&mut guest, 24)), (0, COMMITTED));
        let told = server.log();
        assert_eq!(told.contains("are lost"), warns, "{told}");
        assert_eq!(told.contains(".lost"), warns, "{told}");
        assert!(server.stop().expect("it stops").status.success());
    }
}

#[test]
fn commit_by_qemu_after_a_kill_is_kept() {
    survives_a_commit("cluster_size=64k");
}

#[test]
fn commit_by_qemu_into_small_clusters_is_kept() {
    survives_a_commit("cluster_size=1k,refcount_bits=8");
}

#[test]
fn commit_by_qemu_into_extended_l2_is_kept() {
    survives_a_commit("extended_l2=on");
}

/// QEMU allocates the cluster that the guest was given, for the same place, and fills what it does
/// not write with what it sees, which is zeros: to the tables, the log is already in the image.
#[track_caller]
fn same_cluster_is_not_the_guests(options: &str, keeps_name: bool) {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let image = dir.join("disk.qcow2");
    let logs = folder_of_logs(dir);
    let place = ["--redo-dir", &logs];
    leave_unflushed(dir, options, &place, &[8]);

    let write = "write -P 9 9M 1M";
    if keeps_name {
        commit_by_qemu(dir, write);
    } else {
        qemu::io(dir, &["-f", "qcow2"], "disk.qcow2", &[write]);
    }
    let has_name = name_of_log(&image) != [0; 4];
    assert_eq!(has_name, keeps_name, "QEMU does otherwise: this test tests nothing any more");

    for warns in [true, false] {
        let server = Server::mica_writable(&image, "qcow2", &place).expect("served");
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!([0, 8, 9].map(|mib| shown(&mut guest, mib)), [FLUSHED, 0, COMMITTED]);
        let told = server.log();
        assert_eq!(told.contains("are lost"), warns, "{told}");
        assert!(server.stop().expect("it stops").status.success());
    }
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert!(matches!(said.code(), Some(0 | 3)), "{said}");
}

#[test]
fn cluster_that_qemu_allocated_too_is_reported_as_lost() {
    same_cluster_is_not_the_guests("cluster_size=2M", true);
    same_cluster_is_not_the_guests("cluster_size=2M", false);
}

#[test]
fn cluster_of_a_data_file_that_qemu_allocated_too_is_reported_as_lost() {
    same_cluster_is_not_the_guests("cluster_size=2M,data_file=disk.raw", true);
    same_cluster_is_not_the_guests("cluster_size=2M,data_file=disk.raw", false);
}
