//! Many concurrent writes over several connections: fio writes, reads back what it wrote and
//! verifies it by the checksums in it.

use mica_tests::server::Server;
use mica_tests::{command, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What each job writes, in its own quarter of the disk.
const JOBS: &[&[&str]] = &[
    &["--rw=randwrite", "--bsrange=512-64k", "--blockalign=512"],
    &["--rw=randwrite", "--bs=4k"],
    &["--rw=write", "--bs=4k", "--fsync=64"],
    &["--rw=randrw", "--bs=16k", "--fsync=16"],
];
/// MiB that each job writes.
const PART_MIB: usize = 16;
const JOB_LIMIT: Duration = Duration::from_secs(110);

/// Runs fio on an image made with `options`, over `backing_mib` of random bytes if there are any.
#[track_caller]
fn verified(options: &str, backing_mib: usize) {
    if !tools::present(&[tools::QEMU_IMG, tools::FIO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let mut more = vec!["-o", options];
    if backing_mib > 0 {
        let mut rng = mica_gen::Rng::new(7);
        let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
        let bytes: Vec<u8> = words.take((backing_mib << 20) / 8).flatten().collect();
        fs::write(dir.join("below.raw"), bytes).expect("written");
        more.extend(["-b", "below.raw", "-F", "raw"]);
    }
    qemu::create(dir, "disk.qcow2", &more, &format!("{}M", JOBS.len() * PART_MIB));
    let server = Server::mica_writable(&dir.join("disk.qcow2"), "qcow2", &[]).expect("served");
    run_fio(dir, &server.uri());
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success(), "{stopped:?}");
    let said = qemu::img(dir, ["check", "-f", "qcow2", "disk.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

#[track_caller]
fn run_fio(dir: &Path, uri: &str) {
    let mut fio = Command::new("fio");
    fio.current_dir(dir).args(["--ioengine=nbd", "--iodepth=32", "--verify=crc32c"]);
    fio.args(["--verify_fatal=1", "--do_verify=1", "--exitall_on_error", "--thread"]);
    fio.arg(format!("--uri={uri}"));
    for (number, job) in JOBS.iter().enumerate() {
        fio.arg(format!("--name=job-{number}")).args(*job);
        fio.arg(format!("--size={PART_MIB}m")).arg(format!("--offset={}m", number * PART_MIB));
    }
    let said = command::finish_within(&mut fio, JOB_LIMIT);
    assert_eq!(said.code(), Some(0), "{said}");
    assert!(!said.stdout.contains("verify:") && !said.stderr.contains("verify:"), "{said}");
}

#[test]
fn fio_finds_in_an_empty_image_what_it_wrote() {
    verified("cluster_size=64k", 0);
}

#[test]
fn fio_finds_in_an_overlay_what_it_wrote() {
    verified("cluster_size=64k", 40);
}

#[test]
fn fio_finds_in_an_overlay_with_extended_l2_what_it_wrote() {
    verified("extended_l2=on", 40);
}
