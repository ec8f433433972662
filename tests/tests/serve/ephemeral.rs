//! Disks whose changes are thrown away: clients write, and the image stays as it is.

use crate::membership::{World, table};
use mica_tests::guest::{Answer, Guest};
use mica_tests::server::Server;
use mica_tests::takeover::Process;
use mica_tests::{command, mica, qemu, tools};
use rustix::process::Signal;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

/// The content of all files in `dir`, by name.
fn files(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .expect("a folder")
        .flatten()
        .filter(|entry| entry.path().is_file())
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a plain name");
            (name, fs::read(entry.path()).expect("read"))
        })
        .collect();
    files.sort();
    files
}

/// How many descriptors the process `pid` has of each file in `folder` that has no name.
#[track_caller]
fn nameless(pid: u32, folder: &Path) -> Vec<usize> {
    let folder = folder.canonicalize().expect("there");
    let mut found = BTreeMap::<_, usize>::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("readable").flatten() {
        // One that was closed meanwhile is none of ours.
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if link.starts_with(&folder) && link.to_string_lossy().ends_with(" (deleted)") {
            *found.entry(link).or_default() += 1;
        }
    }
    found.into_values().collect()
}

/// Serves `image` in `dir`, writes, and finds everything as it was afterwards.
#[track_caller]
fn is_left_alone(dir: &Path, image: &str, format: &str, more: &[&str]) {
    let temporary = dir.join("temporary");
    fs::create_dir_all(&temporary).expect("made");
    let before = files(dir);
    let server = Server::start("", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--ephemeral", "--sandbox", "require", "--index", "read"]);
        serve.args(["--format", format]).args(more).arg("--nbd").arg(socket);
        serve.arg(dir.join(image)).env("TMPDIR", &temporary);
        serve
    });
    let server = server.expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    let read = |guest: &mut Guest, at| match guest.read(at, 512).expect("answered") {
        Answer::Done(bytes) => bytes,
        other => panic!("{other:?}"),
    };
    assert_eq!(read(&mut guest, 1 << 20), [1; 512], "what the image has");
    assert_eq!(guest.write(1 << 20, &[9; 512]).expect("answered"), 0);
    assert_eq!(read(&mut guest, 1 << 20), [9; 512]);
    assert_eq!(read(&mut guest, (1 << 20) + 512), [1; 512]);
    // The server's own, and that of the layer which is written: so many are counted for it.
    assert_eq!(nameless(server.pid(), &temporary), [2]);
    drop(guest);
    let stopped = server.stop().expect("it stops");
    assert!(stopped.status.success(), "{stopped:?}");
    assert!(files(dir) == before, "{image} {more:?}: its folder has changed");
    assert_eq!(fs::read_dir(&temporary).expect("a folder").count(), 0, "nothing is left");
}

#[test]
fn what_is_written_is_thrown_away() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "8M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 4M"]);
    qemu::overlay(dir, "disk.qcow2", "base.qcow2", &[]);
    qemu::img(dir, ["convert", "-O", "raw", "base.qcow2", "disk.raw"]).ok();
    is_left_alone(dir, "disk.qcow2", "qcow2", &[]);
    is_left_alone(dir, "disk.raw", "raw", &[]);
    // It may name what the image may name, and no more.
    is_left_alone(dir, "base.qcow2", "qcow2", &["--names", "none"]);
    let mut serve = Command::new(mica::binary());
    serve.current_dir(dir).args(["serve", "--ephemeral", "--names", "none", "--nbd", "socket"]);
    let said = command::finish(serve.arg("disk.qcow2")).refusal();
    assert!(said.contains("base.qcow2"), "{said}");
}

/// The story: the overlay of a server that was killed stayed in /tmp.
#[test]
fn what_was_written_does_not_outlive_a_server_that_is_killed() {
    let Some(world) = World::new() else { return };
    let temporary = world.at("temporary");
    fs::create_dir(&temporary).expect("made");
    let left = || fs::read_dir(&temporary).expect("a folder").count();
    let table_of = |name| table(name).replace("nbd =", "ephemeral = true\nnbd =");
    let table = table_of("a");
    fs::write(world.at("mica.toml"), format!("control = \"control\"\n{table}")).expect("written");
    let before = fs::read(world.at("a.qcow2")).expect("there");
    let folder = world.path().display().to_string();
    let options = ["--sandbox", "require", "--disks-in", &folder];
    let mut command = Command::new(mica::binary());
    command.env("TMPDIR", &temporary);
    let mut server = world.serve_by(command, &options);
    let uri = |name| format!("nbd+unix:///?socket={}", world.at(&format!("{name}.sock")).display());
    let write = |name| {
        let writes = ["write -P 9 0 512", "flush", "read -P 9 0 512"];
        qemu::io(world.path(), &["-f", "raw"], &uri(name), &writes);
    };
    write("a");
    assert_eq!(left(), 0, "it has a name");
    // Also by command, and by a configuration that is read again.
    world.add("c", &["--ephemeral"]).ok();
    write("c");
    let more = table_of("b");
    let text = format!("control = \"control\"\n{table}{more}");
    fs::write(world.at("mica.toml"), text).expect("written");
    world.ctl(&["reload"]).ok();
    write("b");
    assert_eq!(nameless(server.pid(), &temporary), [2; 3], "one for each, where TMPDIR says");
    // A disk that is drained keeps what was written.
    world.ctl(&["drain", "c"]).ok();
    world.ctl(&["undrain", "c"]).ok();
    qemu::io(world.path(), &["-f", "raw"], &uri("c"), &["read -P 9 0 512"]);
    server.signal(Signal::KILL);
    assert_eq!(server.ended(), None, "killed");
    assert_eq!(left(), 0, "something is left");
    assert!(fs::read(world.at("a.qcow2")).expect("there") == before, "the image was written");
    for name in ["b", "c"] {
        qemu::io(world.path(), &["-r"], &format!("{name}.qcow2"), &["read -P 0 0 512"]);
    }
}

/// The story: servers of older versions had their overlays in folders, which stayed if they were
/// killed.
#[test]
fn folder_of_a_killed_server_goes_and_that_of_a_living_one_stays() {
    let Some(world) = World::new() else { return };
    let temporary = world.at("temporary");
    let folder = temporary.join("mica-ephemeral-aB3dEf");
    fs::create_dir_all(&folder).expect("made");
    let overlay = folder.join("overlay.qcow2");
    fs::copy(world.at("b.qcow2"), &overlay).expect("copied");
    let make_old = |path: &Path| {
        let then = SystemTime::now() - Duration::from_hours(14 * 24);
        let times = FileTimes::new().set_modified(then);
        File::open(path).and_then(|file| file.set_times(times)).expect("older");
    };
    // As that version had it open: as an image.
    let old = Server::start("", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--nbd").arg(socket).arg(&overlay);
        serve
    });
    let old = old.expect("served");
    let serve_next = || {
        make_old(&overlay);
        make_old(&folder);
        let mut command = Command::new(mica::binary());
        command.env("TMPDIR", &temporary);
        world.serve_by(command, &[]).stop();
    };
    let table = table("a").replace("nbd =", "ephemeral = true\nnbd =");
    fs::write(world.at("mica.toml"), format!("control = \"control\"\n{table}")).expect("written");
    serve_next();
    assert!(overlay.exists(), "its server has it");
    // By SIGKILL.
    drop(old);
    serve_next();
    assert!(!folder.exists(), "nobody has it");
}

/// The story: a drained disk lost what was written to it when a reload gave it other settings, and
/// also when that was refused: its guest found the bare image under a disk that it knew.
#[test]
fn drained_disk_keeps_what_was_written_when_its_settings_change() {
    let Some(world) = World::new() else { return };
    let table = table("a").replace("nbd =", "ephemeral = true\nnbd =");
    let configure = |table: &str| {
        let text = format!("control = \"control\"\n{table}");
        fs::write(world.at("mica.toml"), text).expect("written");
    };
    let uri = |name| format!("nbd+unix:///?socket={}", world.at(&format!("{name}.sock")).display());
    let io = |name, commands: &[&str]| {
        qemu::io(world.path(), &["-f", "raw"], &uri(name), commands);
    };
    configure(&table);
    let folder = world.path().display().to_string();
    let server = world.serve(&["--sandbox", "require", "--disks-in", &folder]);
    io("a", &["write -P 9 0 512"]);
    world.add("c", &[]).ok();

    world.ctl(&["drain", "a"]).ok();
    configure(&format!("{table}shared = 3\n"));
    let changed = world.json(&["reload"])["notes"].to_string();
    assert!(changed.contains("has new settings"), "{changed}");
    world.ctl(&["undrain", "a"]).ok();
    io("a", &["read -P 9 0 512", "write -P 8 512 512"]);

    world.ctl(&["drain", "a"]).ok();
    let taken = table.replace("a.sock", "c.sock");
    configure(&format!("{taken}export-name = \"c\"\n"));
    let reloaded = world.ctl(&["reload", "--output", "json"]);
    assert_eq!(reloaded.code(), Some(1), "its place is taken: {}", reloaded.stdout);
    let answer: Value = serde_json::from_str(&reloaded.stdout).expect("JSON");
    assert_eq!(answer["refused"][0]["disk"], "a", "{answer}");
    world.ctl(&["undrain", "a"]).ok();
    io("a", &["read -P 9 0 512", "read -P 8 512 512"]);

    // What is written above one image is nothing above another, and nothing for another guest.
    world.ctl(&["drain", "a"]).ok();
    configure(&table.replace("a.qcow2", "b.qcow2"));
    world.ctl(&["reload"]).ok();
    world.ctl(&["undrain", "a"]).ok();
    io("a", &["read -P 0 0 512", "write -P 7 0 512"]);
    world.ctl(&["drain", "a"]).ok();
    configure(&table.replace("a.qcow2", "b.qcow2").replace("\"a\"", "\"x\""));
    world.ctl(&["reload"]).ok();
    world.is(&[("c", "serving"), ("x", "serving")]);
    io("a", &["read -P 0 0 512"]);
    server.stop();
}

/// The story: a drained disk that had been added by command was handed over without what was
/// written to it.
#[test]
fn drained_disk_is_not_handed_over_without_what_was_written() {
    let Some(world) = World::new() else { return };
    world.configure(&["a"]);
    let old = world.serve(&[]);
    world.add("c", &["--ephemeral"]).ok();
    world.ctl(&["drain", "c"]).ok();
    let config = world.at("mica.toml").display().to_string();
    let mut new = Process::start(world.path(), "new", &["--config", &config, "--takeover"]);
    assert_eq!(new.ended(), Some(1), "{}", new.log());
    let said = new.log();
    assert!(said.contains("disk \"c\" is ephemeral"), "{said}");
    world.is(&[("a", "serving"), ("c", "drained")]);
    old.stop();
}

#[test]
fn contradictions_are_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let serve = |options: &[&str]| {
        let mut serve = Command::new(mica::binary());
        serve.current_dir(dir.path()).arg("serve").args(options);
        command::finish(&mut serve)
    };
    let zeros = serve(&["--ephemeral", "--nbd", "socket", "--format", "null", "1M"]).refusal();
    assert!(zeros.contains("neither a volume nor a disk of zeros"), "{zeros}");
    let disk = "[[disk]]\nname = \"a\"\nimage = \"i\"\nnbd = [\"s\"]\nephemeral = true\n";
    for (more, why) in [("read-only = true", "leave it out"), ("", "cannot take over")] {
        fs::write(dir.path().join("mica.toml"), format!("{disk}{more}\n")).expect("written");
        let options = ["--config", "mica.toml", "--takeover", "--control", "control"];
        let said = serve(&options).refusal();
        assert!(said.contains("disk \"a\": ephemeral") && said.contains(why), "{said}");
    }
}
