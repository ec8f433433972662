//! A raw image gets layers while it is served.

use crate::world::{Model, SIZE, TOOLS, World, layer};
use mica_gen::Rng;
use mica_tests::flag::RaisedAtEnd;
use mica_tests::guest::Request;
use mica_tests::{clock, command, mica, qemu, tools};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const RAW: &str = "vm.raw";

/// Nothing is wrong with the layers `1..=last`.
#[track_caller]
fn check(world: &World, last: usize) {
    world.check((1..=last).map(layer));
}

#[test]
fn raw_image_gets_its_layers_under_a_guest_that_works_on() {
    const SNAPSHOTS: usize = 6;
    for queues in ["1", "2"] {
        let Some(mut world) = World::of_raw(&["--queues", queues]) else { return };
        let mut model = Model::new(7);
        let mut guest = world.guest();
        let mut states = Vec::new();
        for number in 1..=SNAPSHOTS {
            model.work(&mut guest).expect("served");
            states.push(model.bytes.clone());
            let taken = world.snapshot(&layer(number), &["--output", "json"]).json();
            assert_eq!(taken["layers"], number + 1, "{taken}");
            // Whoever reads what is frozen is not kept out.
            let frozen = taken["frozen"].as_str().expect("an image").to_owned();
            let format = if number == 1 { "raw" } else { "qcow2" };
            qemu::img(world.folder(), ["info", "-f", format, &frozen]).ok();
            let status = world.ctl(&["status", "--output", "json"]).json();
            assert_eq!(status["disks"][0]["format"], "qcow2", "{status}");
        }
        model.work(&mut guest).expect("served");
        assert!(world.disk() == model.bytes);
        drop(guest);
        // The story: a server that opened the disk again took the layer for a raw image, as the
        // configuration calls what is beneath.
        world.ctl(&["drain", "vm"]).ok();
        world.ctl(&["undrain", "vm"]).ok();
        assert!(world.disk() == model.bytes);
        world.stop();
        check(&world, SNAPSHOTS);
        assert!(fs::read(world.folder().join(RAW)).expect("it is there") == states[0]);
        for (number, state) in states.iter().enumerate().skip(1) {
            assert!(world.content(&layer(number)) == *state, "snapshot {number}");
        }
        assert!(world.content(&layer(SNAPSHOTS)) == model.bytes);
        let info = qemu::img(world.folder(), ["info", "--output=json", &layer(1)]).json();
        assert_eq!(
            (&info["backing-filename"], &info["backing-filename-format"]),
            (&RAW.into(), &"raw".into())
        );
        // A server that is told of the raw image serves the last layer, and verbs are told.
        world.start();
        assert_eq!(world.image(), world.folder().join(layer(SNAPSHOTS)));
        assert!(world.disk() == model.bytes);
        let path = world.folder().join(RAW).display().to_string();
        let said = mica::run(["write", "--format", "raw", &path, "0"]).refusal();
        assert!(said.contains("frozen") && said.contains(&layer(SNAPSHOTS)), "{said}");
    }
}

#[test]
fn writes_of_several_clients_are_in_one_of_the_two_images_and_nowhere_else() {
    const CLIENTS: u64 = 4;
    const BLOCK: usize = 4096;
    for seed in 0..3 {
        let Some(mut world) = World::of_raw(&["--queues", "2"]) else { return };
        let is_over = AtomicBool::new(false);
        let part = SIZE as u64 / CLIENTS;
        let written: Vec<Vec<u8>> = std::thread::scope(|scope| {
            let (world, is_over) = (&world, &is_over);
            let clients: Vec<_> = (0..CLIENTS)
                .map(|client| {
                    scope.spawn(move || {
                        let (mut guest, mut rng) = (world.guest(), Rng::new(seed * 10 + client));
                        let mut bytes = vec![0; usize::try_from(part).expect("small")];
                        while !is_over.load(Ordering::Relaxed) {
                            let at =
                                usize::try_from(rng.below(part / BLOCK as u64)).expect("small");
                            let fill = u8::try_from(1 + rng.below(255)).expect("a byte");
                            let range = at * BLOCK..(at + 1) * BLOCK;
                            bytes[range.clone()].fill(fill);
                            let offset = client * part + range.start as u64;
                            let bytes = bytes[range].to_vec();
                            let write = Request::Write { offset, bytes, fua: rng.percent(2) };
                            assert_eq!(guest.ask(&write).expect("served").errno(), 0);
                        }
                        bytes
                    })
                })
                .collect();
            let over = RaisedAtEnd(is_over);
            clock::sleep(Duration::from_millis(20));
            world.snapshot(&layer(1), &[]).ok();
            clock::sleep(Duration::from_millis(20));
            drop(over);
            clients.into_iter().map(|client| client.join().expect("it works")).collect()
        });
        assert!(world.disk() == written.concat(), "seed {seed}");
        world.stop();
        check(&world, 1);
        assert!(world.content(&layer(1)) == written.concat(), "seed {seed}");
    }
}

#[test]
fn nothing_acknowledged_is_lost_if_the_server_of_a_raw_image_is_killed() {
    let Some(mut world) = World::of_raw(&["--queues", "1"]) else { return };
    let (mut model, mut rng) = (Model::new(13), Rng::new(29));
    let mut next = 0;
    for round in 0..8 {
        let life = Duration::from_millis(rng.below(60));
        let mut guest = world.guest();
        // In half of the rounds the image is not raw any more when the server is killed.
        let is_layered = AtomicBool::new(round % 2 == 0);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_layered.load(Ordering::Relaxed) {
                    clock::sleep(Duration::from_millis(1));
                }
                clock::sleep(life);
                world.server.as_ref().expect("it is served").signal(Signal::KILL);
            });
            scope.spawn(|| {
                loop {
                    next += 1;
                    if !world.snapshot(&layer(next), &[]).status.success() {
                        return;
                    }
                    is_layered.store(true, Ordering::Relaxed);
                }
            });
            while model.work(&mut guest).is_ok() {}
        });
        drop(world.server.take());
        world.start();
        model.judge(world.disk(), &format!("round {round}"));
    }
    world.stop();
    let last = world.image_on_disk();
    assert_ne!(last, RAW, "it got a layer");
    assert!(world.content(&last) == model.bytes);
}

#[test]
fn refused_layers_leave_a_raw_image_as_it_was() {
    let Some(mut world) = World::of_raw(&[]) else { return };
    let mut guest = world.guest();
    let mut model = Model::new(19);
    model.work(&mut guest).expect("served");
    for verb in [&["stream", "vm"][..], &["commit", "vm"]] {
        let said = world.ctl(verb).refusal();
        assert!(said.contains("raw image"), "{said}");
    }
    let nbd = world.folder().join("b").display().to_string();
    let said = world.ctl(&["backup", "begin", "vm", "--as", "one", "--nbd", &nbd]).refusal();
    assert!(said.contains("raw image") && said.contains("ctl snapshot"), "{said}");
    // What a guest wrote is no header, whatever it looks like.
    qemu::create(world.folder(), "inner.qcow2", &[], "1M");
    let header = fs::read(world.folder().join("inner.qcow2")).expect("it is there");
    let bytes = header[..64 << 10].to_vec();
    model.bytes[..bytes.len()].copy_from_slice(&bytes);
    let write = Request::Write { offset: 0, bytes, fua: true };
    assert_eq!(guest.ask(&write).expect("served").errno(), 0);
    qemu::create(world.folder(), "probed.qcow2", &["-u", "-b", RAW, "-F", "qcow2"], "8M");
    let said = world.snapshot("probed.qcow2", &["--reuse"]).refusal();
    assert!(said.contains("-F raw"), "{said}");
    qemu::create(world.folder(), "short.qcow2", &["-u", "-b", RAW, "-F", "raw"], "4M");
    let said = world.snapshot("short.qcow2", &["--reuse"]).refusal();
    assert!(said.contains("4194304 bytes"), "{said}");
    assert!(!world.folder().join("vm.raw.mica-above").exists());
    assert_eq!(world.image(), Path::new(RAW), "as it was named");
    model.work(&mut guest).expect("served");
    assert!(world.disk() == model.bytes);
    for refused in ["probed.qcow2", "short.qcow2"] {
        fs::remove_file(world.folder().join(refused)).expect("it is there");
    }
    // One that QEMU made is taken, and goes back into the raw image.
    qemu::create(world.folder(), "theirs.qcow2", &["-u", "-b", RAW, "-F", "raw"], "8M");
    world.snapshot("theirs.qcow2", &["--reuse"]).ok();
    model.work(&mut guest).expect("served");
    world.ctl(&["commit", "vm"]).ok();
    assert!(world.disk() == model.bytes);
    model.work(&mut guest).expect("served");
    let nbd = world.folder().join("b").display().to_string();
    world.ctl(&["backup", "begin", "vm", "--as", "one", "--nbd", &nbd]).ok();
    world.ctl(&["backup", "end", "vm"]).ok();
    drop(guest);
    world.stop();
    assert!(world.content(&world.image_on_disk()) == model.bytes);
}

/// The story: a raw disk loses none of its writes with its server, and did so from its first layer
/// on, of which only its status told.
#[test]
fn first_layer_of_a_raw_image_without_redo_logs_is_warned_of() {
    const WARNING: &str = "from its first layer on: writes that are not flushed are lost";
    for (more, is_warned) in [(&["--redo-dir", "off"][..], 1), (&[], 0)] {
        let Some(mut world) = World::of_raw(more) else { return };
        for number in 1..=2 {
            world.snapshot(&layer(number), &[]).ok();
        }
        let log = world.server.as_ref().expect("it is served").log();
        assert_eq!(log.matches(WARNING).count(), is_warned, "{log}");
        world.stop();
    }
}

/// The story: a qcow2 image with a layer on top was served as raw, and the disk was that layer's.
#[test]
fn image_that_goes_on_above_is_warned_of_if_its_format_is_another() {
    let Some(mut world) = World::new(&[]) else { return };
    world.snapshot(&layer(1), &[]).ok();
    for (format, warning) in [("qcow2", None), ("raw", Some("state --format qcow2"))] {
        world.stop();
        world.options = vec!["--format".to_owned(), format.to_owned()];
        world.start();
        let log = world.server.as_ref().expect("it is served").log();
        assert_eq!(log.contains("names it as"), warning.is_some(), "{log}");
        assert!(warning.is_none_or(|warning| log.contains(warning)), "{log}");
    }
    world.stop();
}

#[test]
fn device_gets_no_layer_even_if_the_file_is_there() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("content");
    fs::write(&file, vec![7; SIZE]).expect("there is room");
    let attached = Command::new("losetup").args(["--find", "--show"]).arg(&file).output();
    let Some(attached) = attached.ok().filter(|output| output.status.success()) else {
        return tools::skip("no loop device can be had here");
    };
    let device = String::from_utf8_lossy(&attached.stdout).trim().to_owned();
    std::os::unix::fs::symlink(&device, dir.path().join(RAW)).expect("linked");
    // The sandbox of a server of a device allows no layers anywhere.
    let mut world = World::served(dir, RAW, &["--format", "raw", "--sandbox", "off"]);
    qemu::create(world.folder(), "theirs.qcow2", &["-u", "-b", RAW, "-F", "raw"], "8M");
    let before = fs::read(world.folder().join("theirs.qcow2")).expect("there");
    for (file, more) in [("theirs.qcow2", &["--reuse"][..]), ("new.qcow2", &[])] {
        let said = world.snapshot(file, more).refusal();
        assert!(said.contains("is a block device"), "{said}");
    }
    assert!(!world.folder().join("new.qcow2").exists());
    assert!(fs::read(world.folder().join("theirs.qcow2")).expect("there") == before);
    assert_eq!(world.image(), Path::new(RAW), "as it was named");
    assert!(world.disk() == vec![7; SIZE]);
    world.stop();
    drop(world);
    command::run("losetup", ["--detach", &device]).ok();
}
