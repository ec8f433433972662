//! A chain gets layers while it is served. QEMU judges every layer.

use crate::world::{Model, TOOLS, World, layer};
use mica_gen::Rng;
use mica_tests::flag::RaisedAtEnd;
use mica_tests::guest::Guest;
use mica_tests::mounts::Mount;
use mica_tests::server::Server;
use mica_tests::{clock, mica, qemu, tools};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(60);

#[test]
fn every_snapshot_has_what_was_answered_before_and_nothing_else() {
    const SNAPSHOTS: usize = 12;
    for queues in ["1", "2"] {
        let Some(mut world) = World::new(&["--queues", queues]) else { return };
        let mut model = Model::new(7);
        let mut guest = world.guest();
        let mut states = Vec::new();
        for number in 1..=SNAPSHOTS {
            model.work(&mut guest).expect("served");
            states.push(model.bytes.clone());
            let taken = world.snapshot(&layer(number), &["--output", "json"]).json();
            let active = world.folder().join(layer(number)).display().to_string();
            assert_eq!(taken["active"], active.as_str(), "{taken}");
            assert_eq!(taken["layers"], number + 1, "{taken}");
            assert!(taken["pause_us"].is_u64(), "{taken}");
            // Whoever reads what is frozen is not kept out.
            let frozen = taken["frozen"].as_str().expect("an image").to_owned();
            qemu::img(world.folder(), ["info", &frozen]).ok();
            assert_eq!(world.image(), Path::new(&active));
        }
        model.work(&mut guest).expect("served");
        assert!(world.disk() == model.bytes);
        drop(guest);
        world.stop();
        world.check((0..=SNAPSHOTS).map(layer));
        for (number, state) in states.iter().enumerate() {
            assert!(world.content(&layer(number)) == *state, "snapshot {number}");
        }
        assert!(world.content(&layer(SNAPSHOTS)) == model.bytes);
        // The layers are like the first one, and names stay true if the folder moves.
        let info = qemu::img(world.folder(), ["info", "--output=json", &layer(1)]).json();
        assert_eq!(info["cluster-size"], 65536, "{info}");
        assert_eq!(
            (&info["backing-filename"], &info["backing-filename-format"]),
            (&"vm.qcow2".into(), &"qcow2".into())
        );
    }
}

#[test]
fn two_hundred_snapshots_in_a_row_lose_nothing_of_a_guest_that_works_on() {
    const SNAPSHOTS: usize = 200;
    let Some(mut world) = World::new(&["--queues", "2"]) else { return };
    let mut model = Model::new(11);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let mut guest = world.guest();
        let (model, is_over) = (&mut model, &is_over);
        let work = scope.spawn(move || {
            while !is_over.load(Ordering::Relaxed) {
                model.work(&mut guest).expect("served");
            }
        });
        let over = RaisedAtEnd(is_over);
        for number in 1..=SNAPSHOTS {
            world.snapshot(&layer(number), &[]).ok();
        }
        drop(over);
        work.join().expect("it works");
    });
    let status = world.ctl(&["status", "--output", "json"]).json();
    assert_eq!(status["disks"][0]["layers"], SNAPSHOTS + 1, "{status}");
    // The index follows in the background.
    let indexed = || {
        let status = world.ctl(&["status", "--output", "json"]).json();
        (status["disks"][0]["indexed_layers"] == SNAPSHOTS).then_some(())
    };
    clock::poll(LIMIT, Duration::from_millis(50), indexed).expect("indexed");
    assert!(world.disk() == model.bytes);
    world.stop();
    world.check((0..=SNAPSHOTS).step_by(20).map(layer));
    assert!(world.content(&layer(SNAPSHOTS)) == model.bytes);
    // A server that is told of the first image serves the last.
    world.start();
    assert_eq!(world.image(), world.folder().join(layer(SNAPSHOTS)));
    assert!(world.disk() == model.bytes);
}

#[test]
fn nothing_acknowledged_is_lost_if_the_server_is_killed_between_layers() {
    let Some(mut world) = World::new(&["--queues", "1"]) else { return };
    let (mut model, mut rng) = (Model::new(13), Rng::new(17));
    let mut next = 0;
    for round in 0..12 {
        let life = Duration::from_millis(rng.below(120));
        // Before it may be killed.
        let mut guest = world.guest();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                clock::sleep(life);
                world.server.as_ref().expect("it is served").signal(Signal::KILL);
            });
            scope.spawn(|| {
                loop {
                    next += 1;
                    if !world.snapshot(&layer(next), &[]).status.success() {
                        return;
                    }
                }
            });
            while model.work(&mut guest).is_ok() {}
        });
        drop(world.server.take());
        world.start();
        model.judge(world.disk(), &format!("round {round}"));
    }
    world.stop();
    // A kill may leave clusters that nothing uses, and nothing worse.
    for image in world.names().into_iter().filter(|name| name.ends_with(".qcow2")) {
        let said = qemu::img(world.folder(), ["check", &image]);
        assert!(matches!(said.code(), Some(0 | 3)), "{said}");
    }
    let last = world.image_on_disk();
    assert!(world.content(&last) == model.bytes);
}

#[test]
fn refused_snapshots_leave_everything_as_it_was() {
    let Some(mut world) = World::new(&[]) else { return };
    let mut guest = world.guest();
    let mut model = Model::new(19);
    model.work(&mut guest).expect("served");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let there = elsewhere.path().join("vm-1.qcow2").display().to_string();
    let said = world.ctl(&["snapshot", "vm", &there]).refusal();
    assert!(said.contains("--allow-path"), "{said}");
    let said = world.ctl(&["snapshot", "vm", "/nowhere/at/all.qcow2"]).refusal();
    assert!(said.contains("/nowhere"), "{said}");
    qemu::create(world.folder(), "other.qcow2", &[], "8M");
    let said = world.snapshot("other.qcow2", &[]).refusal();
    assert!(said.contains("exists"), "{said}");
    let said = world.snapshot("other.qcow2", &["--reuse"]).refusal();
    assert!(said.contains("not an overlay"), "{said}");
    let said = world.snapshot("vm.qcow2", &["--reuse"]).refusal();
    assert!(said.contains("vm.qcow2 is the active layer of the disk \"vm\""), "{said}");
    world.snapshot("odd.qcow2", &["--cluster-size", "1000"]).refusal();
    world.snapshot("odd.qcow2", &["-o", "size=1G"]).refusal();
    world.ctl(&["snapshot", "db", "odd.qcow2"]).refusal();
    assert_eq!(world.names(), ["other.qcow2", "vm.qcow2"]);
    assert_eq!(world.image(), Path::new("vm.qcow2"), "as it was named");
    model.work(&mut guest).expect("served");
    // One that QEMU made is taken.
    let overlay = ["-b", "vm.qcow2", "-F", "qcow2"];
    let unsafe_overlay: Vec<&str> = overlay.into_iter().chain(["-u"]).collect();
    qemu::create(world.folder(), "theirs.qcow2", &unsafe_overlay, "8M");
    let before = model.bytes.clone();
    world.snapshot("theirs.qcow2", &["--reuse"]).ok();
    model.work(&mut guest).expect("served");
    world.snapshot("wide.qcow2", &["-o", "cluster_size=128k,extended_l2=on"]).ok();
    model.work(&mut guest).expect("served");
    drop(guest);
    world.stop();
    assert!(world.content("vm.qcow2") == before);
    assert!(world.content("wide.qcow2") == model.bytes);
    let info = qemu::img(world.folder(), ["info", "--output=json", "wide.qcow2"]).json();
    assert_eq!(info["format-specific"]["data"]["extended-l2"], true, "{info}");
    world.check(["vm.qcow2", "theirs.qcow2", "wide.qcow2"].map(str::to_owned));
    // Others are told that the first image is not the disk any more.
    let path = world.folder().join("vm.qcow2").display().to_string();
    let said = mica::run(["write", &path, "0"]).refusal();
    assert!(said.contains("frozen") && said.contains("wide.qcow2"), "{said}");
}

#[test]
fn disks_that_cannot_have_layers_say_so() {
    let Some(mut world) = World::new(&["--read-only"]) else { return };
    let said = world.snapshot("vm-1.qcow2", &[]).refusal();
    assert!(said.contains("read-only"), "{said}");
    world.stop();
    world.named = "8M".to_owned();
    world.options = ["--format", "null"].map(str::to_owned).to_vec();
    world.start();
    let path = world.folder().join("vm-1.qcow2").display().to_string();
    let said = world.ctl(&["snapshot", "8M", &path]).refusal();
    assert!(said.contains("neither a qcow2 image nor a raw one"), "{said}");
    assert_eq!(world.names(), ["vm.qcow2"]);
}

#[test]
fn layers_are_found_again_however_the_disk_comes_and_goes() {
    let Some(mut world) = World::new(&[]) else { return };
    let mut model = Model::new(23);
    let mut number = 0;
    let mut step = |world: &World, model: &mut Model| {
        let mut guest = world.guest();
        model.work(&mut guest).expect("served");
        number += 1;
        world.snapshot(&layer(number), &[]).ok();
        model.work(&mut guest).expect("served");
        world.folder().join(layer(number))
    };
    let is_right = |world: &World, model: &Model, image: &Path| {
        assert_eq!(world.image(), image);
        assert!(world.disk() == model.bytes);
    };
    let image = step(&world, &mut model);
    is_right(&world, &model, &image);
    world.ctl(&["drain", "vm"]).ok();
    // QEMU can have it meanwhile.
    qemu::io(world.folder(), &[], &layer(1), &["write -P 9 0 64k"]);
    model.bytes[..65536].fill(9);
    world.ctl(&["undrain", "vm"]).ok();
    is_right(&world, &model, &image);
    let image = step(&world, &mut model);
    // Another process takes over.
    let mut first = world.server.take().expect("it is served");
    let second = world.serve("second", &["--takeover"]);
    assert_eq!(first.ended(), Some(0), "{}", first.log());
    second.wait_for(&world.folder().join("nbd"));
    world.server = Some(second);
    is_right(&world, &model, &image);
    let image = step(&world, &mut model);
    world.stop();
    world.start();
    is_right(&world, &model, &image);
    world.stop();
    // The layer is lost: nobody writes to the one beneath without being told.
    fs::rename(&image, world.folder().join("aside")).expect("moved");
    let mut refused = world.serve("refused", &[]);
    assert_eq!(refused.ended(), Some(1));
    let said = refused.log();
    assert!(said.contains("missing") && said.contains("mica-above"), "{said}");
    fs::remove_file(world.folder().join(layer(2) + ".mica-above")).expect("removed");
    world.start();
    assert_eq!(world.image(), world.folder().join(layer(2)));
}

/// What a guest agent is asked.
fn requests(stream: &UnixStream) -> impl Iterator<Item = Value> + use<> {
    let lines = BufReader::new(stream.try_clone().expect("a clone")).split(b'\n');
    lines.map_while(Result::ok).map(|mut line| {
        line.retain(|byte| *byte != 0xff);
        serde_json::from_slice(&line).expect("JSON")
    })
}

/// A guest agent that does what it is told; returns what that was, and whether the layer was there.
fn agent(listener: &UnixListener, layer: &Path) -> Vec<(String, bool)> {
    let (mut stream, _) = listener.accept().expect("a client");
    let mut told = Vec::new();
    for asked in requests(&stream) {
        let command = asked["execute"].as_str().expect("a command").to_owned();
        let answer = match &*command {
            "guest-sync-delimited" => {
                stream.write_all(&[0xff]).expect("written");
                asked["arguments"]["id"].to_string()
            }
            _ => "2".to_owned(),
        };
        told.push((command, layer.exists()));
        let answer = format!("{{\"return\": {answer}}}\n");
        if stream.write_all(answer.as_bytes()).is_err() {
            break;
        }
    }
    told
}

#[test]
fn guest_is_frozen_for_a_snapshot_and_thawed_whatever_becomes_of_it() {
    let Some(world) = World::new(&[]) else { return };
    let socket = world.folder().join("agent");
    let listener = UnixListener::bind(&socket).expect("it listens");
    let socket = socket.display().to_string();
    let layer = world.folder().join("vm-1.qcow2");
    for is_taken in [true, false] {
        let told = std::thread::scope(|scope| {
            let told = scope.spawn(|| agent(&listener, &layer));
            let taken = world.snapshot("vm-1.qcow2", &["--quiesce", &socket]);
            assert_eq!(taken.status.success(), is_taken, "the second time it exists: {taken}");
            told.join().expect("it answers")
        });
        let commands: Vec<&str> = told.iter().map(|(command, _)| &**command).collect();
        let [sync, freeze, thaw] =
            ["guest-sync-delimited", "guest-fsfreeze-freeze", "guest-fsfreeze-thaw"];
        assert_eq!(commands, [sync, freeze, sync, thaw]);
        assert_eq!((told[1].1, told[3].1), (!is_taken, true), "it is taken in between");
    }
    let said = world.snapshot("vm-2.qcow2", &["--quiesce", "/nowhere/agent"]).refusal();
    assert!(said.contains("guest agent"), "{said}");
    assert!(!world.folder().join("vm-2.qcow2").exists());
}

/// The story: a guest that took longer to freeze than mica waited was never told to thaw.
#[test]
fn guest_that_freezes_too_slowly_is_told_to_thaw_all_the_same() {
    let Some(world) = World::new(&[]) else { return };
    let socket = world.folder().join("agent");
    let listener = UnixListener::bind(&socket).expect("it listens");
    let (told, said) = std::thread::scope(|scope| {
        let told = scope.spawn(|| silent_agent(&listener));
        let socket = socket.display().to_string();
        let said = world.snapshot("vm-1.qcow2", &["--quiesce", &socket, "--quiesce-limit", "1"]);
        (told.join().expect("it reads"), said.refusal())
    });
    assert_eq!(told.last().map(String::as_str), Some("guest-fsfreeze-thaw"), "{told:?}");
    assert!(said.contains("no answer") && said.contains("may still be frozen"), "{said}");
    assert!(!said.contains("Failure"), "{said}");
}

/// A guest agent that answers once, and is busy freezing from then on; returns what it was told.
fn silent_agent(listener: &UnixListener) -> Vec<String> {
    let (mut stream, _) = listener.accept().expect("a client");
    let mut told = Vec::new();
    for asked in requests(&stream) {
        if told.is_empty() {
            let id = &asked["arguments"]["id"];
            stream.write_all(&[0xff]).expect("written");
            stream.write_all(format!("{{\"return\": {id}}}\n").as_bytes()).expect("written");
        }
        told.push(asked["execute"].as_str().expect("a command").to_owned());
    }
    told
}

#[test]
fn snapshot_without_space_changes_nothing_and_the_next_one_succeeds() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let Ok(small) = Mount::memory(&dir.path().join("small"), 32) else {
        tools::skip("mounting a tmpfs is not allowed here");
        return;
    };
    let folder = small.folder();
    qemu::create(folder, "vm.qcow2", &[], "8M");
    let control = dir.path().join("control").display().to_string();
    let server = Server::mica_writable(&folder.join("vm.qcow2"), "qcow2", &["--control", &control]);
    let server = server.expect("served");
    let mut guest = Guest::connect(&server).expect("served");
    let mut model = Model::new(29);
    model.work(&mut guest).expect("served");
    let snapshot = || {
        let file = folder.join("vm-1.qcow2").display().to_string();
        mica::run(["ctl", "--control", &control, "snapshot", "vm", &file])
    };
    let filler = folder.join("filler");
    let left = [0; 64 << 10];
    let mut file = fs::File::create(&filler).expect("made");
    while file.write_all(&left).is_ok() {}
    drop(file);
    let said = snapshot().refusal();
    assert!(said.contains("space"), "{said}");
    let names: Vec<_> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("text"))
        .filter(|name| name.contains("vm-1") || name.contains("above"))
        .collect();
    assert_eq!(names, Vec::<String>::new());
    fs::remove_file(&filler).expect("removed");
    model.work(&mut guest).expect("served");
    let before = model.bytes.clone();
    snapshot().ok();
    model.work(&mut guest).expect("served");
    drop(guest);
    assert!(server.stop().expect("it stops").status.success());
    for (image, bytes) in [("vm.qcow2", &before), ("vm-1.qcow2", &model.bytes)] {
        qemu::img(folder, ["check", image]).ok();
        qemu::flatten(folder, image, "content.raw");
        assert!(fs::read(folder.join("content.raw")).expect("read") == *bytes, "{image}");
    }
    small.unmount();
}

#[test]
fn frozen_layer_is_changed_by_no_verb_and_repaired_when_asked() {
    let Some(mut world) = World::new(&[]) else { return };
    let mut guest = world.guest();
    Model::new(19).work(&mut guest).expect("served");
    drop(guest);
    world.stop();
    let folder = world.folder().to_owned();
    let at = |name: &str| folder.join(name).display().to_string();
    let (vm, source) = (at("vm.qcow2"), at("source.qcow2"));
    for verb in [
        vec!["snapshot", "-c", "before", &vm],
        vec!["bitmap", "--add", &vm, "old"],
        vec!["create", &at("base.qcow2"), "8M"],
        vec!["create", &source, "8M"],
    ] {
        mica::run(&verb).ok();
    }
    world.start();
    world.snapshot("vm-1.qcow2", &[]).ok();
    world.stop();
    let frozen = fs::read(world.folder().join("vm.qcow2")).expect("read");
    let base = at("base.qcow2");
    let verbs: [&[&str]; 15] = [
        &["snapshot", "-c", "after", &vm],
        &["snapshot", "-a", "before", &vm],
        &["snapshot", "-d", "before", &vm],
        &["bitmap", "--add", &vm, "new"],
        &["bitmap", "--remove", &vm, "old"],
        &["resize", &vm, "16M"],
        &["resize", "--shrink", &vm, "4M"],
        &["resize", "--format", "raw", &vm, "16M"],
        &["rebase", "-u", "-b", &base, "-F", "qcow2", &vm],
        &["rebase", "-b", &base, "-F", "qcow2", &vm],
        &["commit", &vm],
        &["write", &vm, "0"],
        &["write", "--format", "raw", &vm, "0"],
        &["convert", "-n", "-O", "qcow2", &source, &vm],
        &["create", "--force", &vm, "8M"],
    ];
    for verb in verbs {
        let refused = mica::run(verb).refusal();
        assert!(refused.contains("frozen"), "{verb:?}: {refused}");
    }
    let refused = mica::run(["convert", "--force", "-O", "qcow2", &source, &vm]).refusal();
    assert!(refused.contains("frozen"), "{refused}");
    assert!(fs::read(world.folder().join("vm.qcow2")).expect("read") == frozen, "as it was");
    mica::run(["check", "-r", "leaks", &vm]).ok();
    mica::run(["bitmap", "--add", &at("vm-1.qcow2"), "new"]).ok();
    // Who wants the old state back says so.
    fs::remove_file(world.folder().join("vm.qcow2.mica-above")).expect("removed");
    mica::run(["snapshot", "-d", "before", &vm]).ok();
}

/// Snapshots and streams by turns: the mark of the layer that stays leads on in one step, however
/// many layers came and went above it, and those that left lead nobody to write anywhere.
#[test]
fn names_of_frozen_images_lead_on_in_one_step_after_streams_in_a_row() {
    let Some(mut world) = World::new(&[]) else { return };
    let mut model = Model::new(29);
    for number in 1..=5 {
        let mut guest = world.guest();
        model.work(&mut guest).expect("served");
        world.snapshot(&layer(2 * number - 1), &[]).ok();
        model.work(&mut guest).expect("served");
        world.snapshot(&layer(2 * number), &[]).ok();
        model.work(&mut guest).expect("served");
        drop(guest);
        world.ctl(&["stream", "vm", "--base", "vm.qcow2"]).ok();
        let mark = fs::read_to_string(world.folder().join("vm.qcow2.mica-above"));
        assert_eq!(mark.expect("marked"), format!("above: {}\n", layer(2 * number)));
    }
    let image = world.image();
    assert_eq!(image, world.folder().join(layer(10)));
    world.stop();
    world.start();
    assert_eq!(world.image(), image);
    assert!(world.disk() == model.bytes);
    world.stop();
    for number in 1..=9 {
        world.named = layer(number);
        let before = fs::read(world.folder().join(layer(number))).expect("there");
        let mut refused = world.serve("refused", &[]);
        assert_eq!(refused.ended(), Some(1), "{number}");
        let said = refused.log();
        assert!(said.contains("is no longer based on it"), "{number}: {said}");
        assert!(said.contains(&layer(10)), "{number}: it says where the disk is: {said}");
        assert!(fs::read(world.folder().join(layer(number))).expect("there") == before);
    }
}
