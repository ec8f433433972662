//! A disk that clients see in another way: a part of it, with zeros that were found, with a limit,
//! and until the last of them has left.

use mica_tests::guest::{Answer, Guest};
use mica_tests::server::Server;
use mica_tests::{clock, command, mica, qemu, tools};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// A qcow2 image of 8 MiB, each mebibyte of its own byte.
fn image(dir: &Path) {
    qemu::create(dir, "disk.qcow2", &[], "8M");
    let writes: Vec<_> = (0..8).map(|part| format!("write -P {} {part}M 1M", part + 1)).collect();
    let writes: Vec<_> = writes.iter().map(String::as_str).collect();
    qemu::io(dir, &[], "disk.qcow2", &writes);
}

#[track_caller]
fn serve(dir: &Path, format: &str, image: &str, more: &[&str]) -> Server {
    Server::mica_writable(&dir.join(image), format, more).expect("served")
}

/// All that clients see of a server.
#[track_caller]
fn seen(dir: &Path, uri: &str) -> Vec<u8> {
    let copy = dir.join("seen.raw");
    let _ = fs::remove_file(&copy);
    command::run("nbdcopy", [uri, copy.to_str().expect("a path")]).ok();
    fs::read(&copy).expect("it is there")
}

#[test]
fn clients_see_and_change_only_the_part_that_is_served() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDCOPY]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    let part = serve(dir, "qcow2", "disk.qcow2", &["-o", "1M", "--size", "2M", "-A"]);
    let all = seen(dir, &part.uri());
    assert_eq!(all.len() as u64, 2 * MIB);
    assert!(all[..1 << 20].iter().all(|byte| *byte == 2) && all[1 << 20..].iter().all(|b| *b == 3));
    let depth = command::run("nbdinfo", ["--map=qemu:allocation-depth", &part.uri()]).ok();
    assert_eq!(depth.split_whitespace().collect::<Vec<_>>(), ["0", "2097152", "1", "local"]);
    let mut guest = Guest::connect(&part).expect("served");
    assert_eq!(guest.write(512, &[9; 512]).expect("answered"), 0);
    assert_ne!(guest.write(2 * MIB, &[9; 512]).expect("answered"), 0);
    drop(guest);
    assert!(part.stop().expect("it stops").status.success());
    let reads = ["read -P 1 0 1M", "read -P 2 1M 512", "read -P 9 1049088 512", "read -P 4 3M 1M"];
    qemu::io(dir, &[], "disk.qcow2", &reads);
    let rest = serve(dir, "qcow2", "disk.qcow2", &["--offset", "6M"]);
    assert_eq!(seen(dir, &rest.uri()).len() as u64, 2 * MIB);
    drop(rest);
    for wrong in [&["-o", "9M"][..], &["-o", "100"], &["-o", "1M", "--size", "8M"]] {
        let mut mica = Command::new(mica::binary());
        mica.current_dir(dir).args(["serve", "--nbd", "socket", "disk.qcow2"]).args(wrong);
        command::finish(&mut mica).refusal();
    }
}

#[test]
fn a_partition_is_the_one_that_nbdkit_finds() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDCOPY, tools::NBDKIT, tools::SGDISK]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let bytes: Vec<u8> = (0..8 * MIB).map(|at| u8::try_from(at >> 16).unwrap_or(0)).collect();
    fs::write(dir.join("disk.raw"), bytes).expect("there is room");
    let raw = dir.join("disk.raw");
    let raw = raw.to_str().expect("a path");
    let sgdisk = tools::SGDISK.find().expect("it is present");
    let sgdisk = sgdisk.to_str().expect("a path");
    command::run(sgdisk, ["-n", "1:2048:4095", "-n", "3:6144:8191", raw]).ok();
    for number in ["1", "3"] {
        let ours = serve(dir, "raw", "disk.raw", &["-r", "--partition", number]);
        let part = format!("partition={number}");
        let theirs = Server::start("", |socket| {
            let mut nbdkit = Command::new("nbdkit");
            nbdkit.args(["-f", "-r", "--filter=partition", "-U"]).arg(socket);
            nbdkit.args(["file", raw, &part]);
            nbdkit
        });
        let theirs = theirs.expect("served");
        let (ours, theirs) = (seen(dir, &ours.uri()), seen(dir, &theirs.uri()));
        assert!(ours == theirs && ours.len() as u64 == MIB, "{number}");
    }
    let mut mica = Command::new(mica::binary());
    mica.current_dir(dir).args(["serve", "-f", "raw", "--nbd", "socket", "disk.raw"]);
    let refused = command::finish(mica.args(["--partition", "2"])).refusal();
    assert!(refused.contains("no partition 2"), "{refused}");
}

#[test]
fn zeros_that_are_written_take_no_space() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for (mode, is_found, is_kept) in
        [("off", false, true), ("on", true, true), ("unmap", true, false)]
    {
        let _ = fs::remove_file(dir.join("disk.qcow2"));
        image(dir);
        let server = serve(dir, "qcow2", "disk.qcow2", &["--detect-zeroes", mode]);
        let mut guest = Guest::connect(&server).expect("served");
        assert_eq!(guest.write(MIB, &[0; 1 << 16]).expect("answered"), 0);
        assert_eq!(guest.write(2 * MIB, &[5; 1 << 16]).expect("answered"), 0);
        match guest.read(MIB, 512).expect("answered") {
            Answer::Done(bytes) => assert_eq!(bytes, [0; 512]),
            other => panic!("{other:?}"),
        }
        drop(guest);
        assert!(server.stop().expect("it stops").status.success());
        let map = qemu::img(dir, ["map", "--output=json", "disk.qcow2"]).json();
        let parts = map.as_array().expect("a list");
        let part = parts.iter().rfind(|part| part["start"].as_u64().is_some_and(|at| at <= MIB));
        let part = part.expect("the disk begins at 0");
        let expected = is_found.then_some((MIB, 1 << 16));
        let place = (part["start"].as_u64().unwrap_or(0), part["length"].as_u64().unwrap_or(0));
        assert_eq!((part["zero"] == true).then_some(place), expected, "{mode}: {map}");
        let has_place = part["offset"].is_u64();
        assert_eq!(has_place, is_kept, "{mode}: {map}");
        qemu::img(dir, ["check", "disk.qcow2"]).ok();
        qemu::io(dir, &[], "disk.qcow2", &["read -P 5 2M 64k", "read -P 0 1M 64k"]);
    }
}

#[test]
fn a_limit_holds_for_nbd_clients_together() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    let limits = ["--iops", "100", "--iops-burst", "1"];
    let server = serve(dir, "qcow2", "disk.qcow2", &limits);
    let mut guests = [0, 1].map(|_| Guest::connect(&server).expect("served"));
    let began = clock::now();
    for round in 0..15 {
        for guest in &mut guests {
            assert_eq!(guest.write(round * 4096, &[3; 4096]).expect("answered"), 0);
        }
    }
    // The thirtieth request is due 290 ms after the first.
    assert!(began.elapsed() >= Duration::from_millis(280), "{:?}", began.elapsed());
}

#[test]
fn the_server_ends_with_its_last_client() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDINFO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    image(dir);
    let mut serve = Command::new(mica::binary());
    serve.current_dir(dir).args(["serve", "--exit-after-last", "--nbd", "socket", "disk.qcow2"]);
    let mut server = serve.spawn().expect("it runs");
    while !dir.join("socket").exists() {
        clock::sleep(Duration::from_millis(5));
    }
    clock::sleep(Duration::from_millis(200));
    assert!(server.try_wait().expect("a child").is_none(), "nobody was there yet");
    let uri = format!("nbd+unix:///?socket={}", dir.join("socket").display());
    command::run("nbdinfo", ["--size", &uri]).ok();
    let status = command::wait(&mut server, Duration::from_secs(20)).expect("it ends");
    assert!(status.success(), "{status}");
    assert!(!dir.join("socket").exists());
}
