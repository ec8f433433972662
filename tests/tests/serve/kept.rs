//! Dirty bitmaps of QEMU's that mica keeps true while it writes, judged by QEMU.

use crate::contexts::map;
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{mica, qemu, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO];
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// What is dirty, from where to where, in a bitmap that `server` tells.
fn dirty_at(server: &Server, name: &str) -> Vec<(u64, u64)> {
    let parts = map(server, &format!("qemu:dirty-bitmap:{name}"));
    let number = |value: &Value| value.as_u64().expect("a number");
    let parts = parts.as_array().expect("a list").iter();
    let parts = parts.map(|part| (number(&part[0]), number(&part[1]), number(&part[2])));
    parts.filter(|part| part.2 == 1).map(|(at, len, _)| (at, at + len)).collect()
}

/// The same as QEMU reads it from the image.
fn dirty_to_qemu(image: &Path, name: &str) -> Vec<(u64, u64)> {
    let server = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2", "-B", name, "-k"]).arg(socket).arg(image);
        nbd
    });
    dirty_at(&server.expect("served"), name)
}

/// The flags of each bitmap, as QEMU tells them.
fn flags(folder: &Path, image: &str) -> Vec<(String, String)> {
    let info = qemu::img(folder, ["info", "-U", "--output=json", image]).json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let flags = |value: &Value| {
        let all: Vec<_> = value.as_array().expect("flags").iter().map(text).collect();
        all.join(" ")
    };
    let bitmaps = bitmaps.unwrap_or_default().into_iter();
    bitmaps.map(|bitmap| (text(&bitmap["name"]), flags(&bitmap["flags"]))).collect()
}

fn check(folder: &Path, image: &str) {
    let said = qemu::img(folder, ["check", image]);
    assert_eq!(said.code(), Some(0), "{said}");
}

fn kill(server: Server) {
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::KILL).expect("killed");
    drop(server);
}

fn write(server: &Server, at: u64, len: u64) {
    let mut guest = Guest::connect(server).expect("served");
    let bytes = vec![3; usize::try_from(len).expect("a few")];
    assert_eq!(guest.write(at, &bytes).expect("answered"), 0);
    guest.disconnect().expect("it leaves");
}

fn covers(dirty: &[(u64, u64)], from: u64, to: u64) -> bool {
    dirty.iter().any(|(start, end)| *start <= from && to <= *end)
}

#[test]
fn bitmaps_are_true_when_the_server_stops_and_while_it_serves() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "disk.qcow2", &[], "100M");
    qemu::img(folder, ["bitmap", "--add", "disk.qcow2", "on"]).ok();
    qemu::img(folder, ["bitmap", "--add", "--disable", "disk.qcow2", "off"]).ok();
    qemu::io(folder, &[], "disk.qcow2", &["write 1M 64k"]);
    let image = folder.join("disk.qcow2");
    let asked = ["-B", "on", "-B", "off"];
    let server = Server::mica_writable(&image, "qcow2", &asked).expect("served");
    assert_eq!(dirty_at(&server, "on"), [(MIB, MIB + 64 * KIB)]);
    write(&server, 50 * MIB + 4 * KIB, 4 * KIB);
    write(&server, MIB + 512, 512);
    let expected = [(MIB, MIB + 64 * KIB), (50 * MIB, 50 * MIB + 64 * KIB)];
    assert_eq!(dirty_at(&server, "on"), expected);
    assert_eq!(dirty_at(&server, "off"), []);
    let flag = |name: &str, flags: &str| (name.to_owned(), flags.to_owned());
    assert_eq!(flags(folder, "disk.qcow2"), [flag("on", "in-use auto"), flag("off", "")]);
    server.stop().expect("it stops");
    assert_eq!(flags(folder, "disk.qcow2"), [flag("on", "auto"), flag("off", "")]);
    check(folder, "disk.qcow2");
    assert_eq!(dirty_to_qemu(&image, "on"), expected);
    // The next writer may be QEMU, and then mica again.
    qemu::io(folder, &[], "disk.qcow2", &["write 70M 64k"]);
    let path = image.display().to_string();
    mica::run(["resize", &path, "+10M"]).ok();
    let expected = [&expected[..], &[(70 * MIB, 70 * MIB + 64 * KIB)]].concat();
    assert_eq!(dirty_to_qemu(&image, "on"), expected);
}

#[test]
fn bitmaps_outlive_a_server_that_is_killed() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "disk.qcow2", &[], "100M");
    qemu::img(folder, ["bitmap", "--add", "disk.qcow2", "on"]).ok();
    let image = folder.join("disk.qcow2");
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("served");
    write(&server, 50 * MIB, 4 * KIB);
    write(&server, MIB, 4 * KIB);
    kill(server);
    assert!(flags(folder, "disk.qcow2")[0].1.contains("in-use"));
    let server = Server::mica_writable(&image, "qcow2", &["-B", "on"]).expect("served");
    assert!(server.log().contains("have all that was changed"), "{}", server.log());
    write(&server, 90 * MIB, 4 * KIB);
    let live = dirty_at(&server, "on");
    server.stop().expect("it stops");
    check(folder, "disk.qcow2");
    let dirty = dirty_to_qemu(&image, "on");
    assert_eq!(dirty, live);
    for at in [MIB, 50 * MIB, 90 * MIB] {
        assert!(covers(&dirty, at, at + 4 * KIB), "{at}: {dirty:?}");
    }
    // Only what is around it, in regions of 16 MiB.
    assert!(!dirty.iter().any(|(start, end)| *start < 32 * MIB && *end > 20 * MIB), "{dirty:?}");

    // QEMU in between: nobody knows what it wrote.
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("served");
    write(&server, 0, 512);
    kill(server);
    qemu::io(folder, &[], "disk.qcow2", &["write 40M 64k"]);
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("served");
    assert!(server.log().contains("inconsistent"), "{}", server.log());
    write(&server, 512, 512);
    server.stop().expect("it stops");
    assert!(flags(folder, "disk.qcow2")[0].1.contains("in-use"));
}

#[test]
fn bitmaps_go_on_through_snapshots_commits_and_growth() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "disk.qcow2", &["-o", "cluster_size=4k"], "100M");
    qemu::img(folder, ["bitmap", "--add", "-g", "4k", "disk.qcow2", "on"]).ok();
    qemu::img(folder, ["bitmap", "--add", "-g", "4k", "--disable", "disk.qcow2", "off"]).ok();
    let image = folder.join("disk.qcow2");
    let control = folder.join("control").display().to_string();
    let options = ["--control", &control, "-B", "on"];
    let server = Server::mica_writable(&image, "qcow2", &options).expect("served");
    let ctl = |words: &[&str]| {
        mica::run([&["ctl", "--control", &control], words].concat()).ok();
    };
    let top = folder.join("top.qcow2").display().to_string();
    write(&server, MIB, 4 * KIB);
    ctl(&["snapshot", "disk", &top]);
    write(&server, 50 * MIB, 4 * KIB);
    let all = [(MIB, MIB + 4 * KIB), (50 * MIB, 50 * MIB + 4 * KIB)];
    assert_eq!(dirty_at(&server, "on"), all);
    // QEMU asks each layer.
    assert_eq!(dirty_to_qemu(&image, "on"), all[..1]);
    ctl(&["commit", "disk"]);
    assert_eq!(dirty_at(&server, "on"), all);
    assert_eq!(dirty_to_qemu(&image, "on"), all);
    // More than the tables have room for: 128 MiB for each entry.
    ctl(&["resize", "disk", "300M"]);
    write(&server, 290 * MIB, 4 * KIB);
    let grown = [&all[..], &[(100 * MIB, 300 * MIB)]].concat();
    assert_eq!(dirty_at(&server, "on"), grown);
    server.stop().expect("it stops");
    for image in ["disk.qcow2", "top.qcow2"] {
        check(folder, image);
    }
    let upper = dirty_to_qemu(Path::new(&top), "on");
    assert!(covers(&upper, 100 * MIB, 300 * MIB), "{upper:?}");
}
