//! Bytes and holes: what is read, written, zeroed and reported is what QEMU finds in the image.

use super::served::{Served, may_run};
use mica_gen::Rng;
use mica_tests::{judge, nbd, qemu, tools};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

const MIB: u64 = 1 << 20;
const DISK_BYTES: u64 = 24 * MIB;

/// Three layers with data, zeros and holes in each; the disk is `top.qcow2`.
fn chain(dir: &Path) {
    let size = DISK_BYTES.to_string();
    qemu::create(dir, "base.qcow2", &[], &size);
    let writes = ["write -P 1 0 5M", "write -P 2 9M 200k", "write -z 2M 128k", "write -P 3 23M 1M"];
    qemu::io(dir, &["-f", "qcow2"], "base.qcow2", &writes);
    qemu::overlay(dir, "middle.qcow2", "base.qcow2", &[]);
    let writes = ["write -P 4 1M 64k", "write -z 3M 1M", "write -P 5 12345k 777k"];
    qemu::io(dir, &["-f", "qcow2"], "middle.qcow2", &writes);
    qemu::overlay(dir, "top.qcow2", "middle.qcow2", &["-o", "extended_l2=on"]);
    let writes = ["write -P 6 3100k 6k", "write -z -u 4M 300k", "write -P 7 20M 2k"];
    qemu::io(dir, &["-f", "qcow2"], "top.qcow2", &writes);
}

#[test]
fn chain_as_a_file_is_what_qemu_reads() {
    if !may_run(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    qemu::flatten(dir, "top.qcow2", "flat.raw");
    let wanted = fs::read(dir.join("flat.raw")).expect("written");

    let served = Served::start(dir, "top.qcow2", &["--read-only"]);
    judge::same_bytes("the file", &fs::read(served.file()).expect("read"), &wanted);
    let said = qemu::img(dir, ["compare", "-f", "raw", "-F", "raw", "disk", "flat.raw"]);
    assert_eq!(said.code(), Some(0), "{said}");
    let info = qemu::img(dir, ["info", "-f", "raw", "--output", "json", "disk"]).json();
    assert_eq!(info["virtual-size"].as_u64(), Some(DISK_BYTES));
    // Bypassing any page cache.
    let direct = OpenOptions::new().read(true).custom_flags(direct_flag()).open(served.file());
    let direct = direct.expect("opened");
    let mut bytes = vec![0; 3000];
    for at in [1, 511, 4095, 5 * MIB - 1000, DISK_BYTES - 3000] {
        direct.read_exact_at(&mut bytes, at).expect("read");
        let at = usize::try_from(at).expect("small");
        judge::same_bytes("a part", &bytes, &wanted[at..at + 3000]);
    }
    drop(direct);
    served.stop();
}

fn direct_flag() -> i32 {
    i32::try_from(rustix::fs::OFlags::DIRECT.bits()).expect("a flag")
}

/// The data of `file`, as the kernel reports it.
fn data_by_seeking(file: &File) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(start) = seek(file, SeekFrom::Data(at)) {
        let end = seek(file, SeekFrom::Hole(start)).expect("there is a hole at the end");
        found.push(start..end);
        at = end;
    }
    found
}

/// The data of `image` in `dir`, as QEMU reports it.
fn data_by_qemu(dir: &Path, image: &str) -> Vec<Range<u64>> {
    let map = qemu::img(dir, ["map", "-f", "qcow2", "--output", "json", image]).json();
    let number = |extent: &serde_json::Value, name: &str| extent[name].as_u64().expect("a number");
    let mut found: Vec<Range<u64>> = Vec::new();
    for extent in map.as_array().expect("a list") {
        let (start, length) = (number(extent, "start"), number(extent, "length"));
        match found.last_mut() {
            _ if extent["data"] == false => {}
            Some(last) if last.end == start => last.end += length,
            _ => found.push(start..start + length),
        }
    }
    found
}

#[test]
fn holes_are_where_qemu_maps_them() {
    if !may_run(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let wanted = data_by_qemu(dir, "top.qcow2");
    assert!(wanted.len() > 5, "{wanted:?}");

    let served = Served::start(dir, "top.qcow2", &["--read-only"]);
    let file = File::open(served.file()).expect("opened");
    assert_eq!(data_by_seeking(&file), wanted);
    assert!(seek(&file, SeekFrom::Data(DISK_BYTES)).is_err());
    assert_eq!(seek(&file, SeekFrom::Hole(1)).ok(), wanted.first().map(|first| first.end));
    drop(file);
    served.stop();
}

/// Random requests of any offset and length, compared with a copy in memory.
#[track_caller]
fn survives_random_requests(options: &[&str], seed: u64) {
    if !may_run(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let mut shadow = vec![0x55; usize::try_from(DISK_BYTES).expect("small")];
    fs::write(dir.join("below.raw"), &shadow).expect("written");
    qemu::create(dir, "top.qcow2", &[&["-b", "below.raw", "-F", "raw"], options].concat(), "");
    let mut rng = Rng::new(seed);
    for session in 0..3 {
        let served = Served::start(dir, "top.qcow2", &[]);
        let plain = served.open();
        let mut direct = OpenOptions::new();
        direct.read(true).write(true).custom_flags(direct_flag());
        let direct = direct.open(served.file()).expect("opened");
        for round in 0..400 {
            let file = if rng.percent(50) { &plain } else { &direct };
            let what = format!("seed {seed}, session {session}, round {round}");
            request(file, &mut shadow, &mut rng, &what);
        }
        judge::same_bytes("all of it", &fs::read(served.file()).expect("read"), &shadow);
        drop((plain, direct));
        served.stop();
    }
    qemu::flatten(dir, "top.qcow2", "flat.raw");
    judge::same_bytes("flat", &fs::read(dir.join("flat.raw")).expect("there"), &shadow);
    let said = qemu::img(dir, ["check", "-f", "qcow2", "top.qcow2"]);
    assert_eq!(said.code(), Some(0), "{said}");
}

fn request(file: &File, shadow: &mut [u8], rng: &mut Rng, what: &str) {
    let at = rng.below(DISK_BYTES - 1);
    let longest = rng.choose(&[600, 5000, 70_000, 3 << 20]);
    let len = (1 + rng.below(longest)).min(DISK_BYTES - at);
    let part = usize::try_from(at).expect("small")..usize::try_from(at + len).expect("small");
    let keep = FallocateFlags::KEEP_SIZE;
    match rng.below(10) {
        0..4 => {
            let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
            let bytes: Vec<u8> = words.flatten().take(part.len()).collect();
            file.write_all_at(&bytes, at).unwrap_or_else(|error| panic!("{what}: {error}"));
            shadow[part].copy_from_slice(&bytes);
        }
        4 => {
            fallocate(file, FallocateFlags::PUNCH_HOLE | keep, at, len).expect(what);
            shadow[part].fill(0);
        }
        5 => {
            fallocate(file, FallocateFlags::ZERO_RANGE | keep, at, len).expect(what);
            shadow[part].fill(0);
        }
        6 => file.sync_data().expect(what),
        _ => {
            let mut bytes = vec![0; part.len()];
            file.read_exact_at(&mut bytes, at).unwrap_or_else(|error| panic!("{what}: {error}"));
            judge::same_bytes(what, &bytes, &shadow[part]);
        }
    }
}

#[test]
fn random_requests_on_an_overlay_leave_what_they_wrote() {
    survives_random_requests(&[], 1);
}

#[test]
fn random_requests_on_small_clusters_leave_what_they_wrote() {
    survives_random_requests(&["-o", "cluster_size=4k"], 2);
}

#[test]
fn random_requests_on_subclusters_leave_what_they_wrote() {
    survives_random_requests(&["-o", "extended_l2=on"], 3);
}

/// The story: each server of a disk had a lock of its own for changes of parts of sectors, so that
/// one wrote back what another had just changed.
#[test]
fn clients_of_two_servers_that_change_parts_of_one_sector_lose_nothing() {
    if !may_run(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "a.qcow2", &[], "1M");
    let socket = dir.path().join("socket");
    let nbd_at = socket.to_str().expect("text");
    let served = Served::start(dir.path(), "a.qcow2", &["--nbd", nbd_at]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = served.open();
            for round in 1..=2000_u32 {
                let (wanted, mut found) = (round.to_le_bytes(), [0; 4]);
                file.write_all_at(&wanted, 4).expect("written");
                file.read_exact_at(&mut found, 4).expect("read");
                if wanted != found {
                    is_over.store(true, Ordering::Relaxed);
                }
                assert_eq!(wanted, found, "through the file, round {round}");
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let client = nbd::Connection::open(&socket, "", &nbd::Wish::default());
        let mut client = client.expect("a session");
        for round in (1_u32..).take_while(|_| !is_over.load(Ordering::Relaxed)) {
            let wanted = round.to_le_bytes();
            let write = nbd::request(nbd::CMD_WRITE, 0, 0, 100, 4);
            client.stream.write_all(&[&write[..], &wanted].concat()).expect("sent");
            let mut reply = [0; nbd::SIMPLE_REPLY_BYTES];
            client.stream.read_exact(&mut reply).expect("a reply");
            assert_eq!(reply[4..8], [0; 4]);
            assert_eq!(client.read(100, 4).expect("read"), wanted, "over NBD, round {round}");
        }
    });
    served.stop();
}
