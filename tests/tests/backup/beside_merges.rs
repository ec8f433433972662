//! A kept state is exported while layers are merged that it does not have, and no merge changes one
//! that it has.

use mica_tests::kept::{World, command};
use mica_tests::{clock, judge, nbd};
use std::time::Duration;

const MIB: usize = 1 << 20;
/// So slow that a merge is under way until it is cancelled.
const SLOWLY: [&str; 3] = ["--background", "--rate", "64k"];

/// Writes 2 MiB. No layer hides all of one beneath it, so that each merge has something to copy.
fn write(guest: &mut nbd::Connection, at: usize, byte: u8) {
    command(guest, nbd::CMD_WRITE, at, 2 * MIB, &vec![byte; 2 * MIB]);
}

/// What a client of the backup reads.
#[track_caller]
fn exported(world: &World) -> Vec<u8> {
    let export = nbd::Connection::open(&world.path("backup"), "disk", &nbd::Wish::default());
    export.expect("exported").read_all().expect("read")
}

/// Begins a merge, and waits until it has copied something.
#[track_caller]
fn merge(world: &World, verb: &[&str]) {
    world.ctl(&[verb, &SLOWLY].concat()).ok();
    let copies = || {
        let jobs = world.ctl(&["jobs"]).json();
        (!jobs.to_string().contains("\"copied_bytes\":0,")).then_some(())
    };
    clock::poll(Duration::from_secs(60), Duration::from_millis(20), copies).expect("it copies");
}

/// The story: a backup waited for hours for a merge of layers that its state did not have.
#[test]
fn state_is_exported_beside_merges_of_what_it_does_not_have() {
    let Some(mut world) = World::new(3, &[]) else { return };
    let mut guest = world.guest();
    write(&mut guest, 3 * MIB, 1);
    world.begin(None, "mon").ok();
    let expected = exported(&world);
    write(&mut guest, 4 * MIB, 2);
    for (layer, at, byte) in [("two.qcow2", 4 * MIB, 3), ("three.qcow2", 6 * MIB, 4)] {
        let path = world.path(layer).display().to_string();
        world.ctl(&["snapshot", "disk", &path]).ok();
        write(&mut guest, at, byte);
    }
    // Above the state, which is exported.
    merge(&world, &["commit", "disk", "--top", "two.qcow2", "--base", "disk.qcow2"]);
    judge::same_bytes("beside a commit", &exported(&world), &expected);
    world.ctl(&["cancel", "disk"]).ok();
    let into_state = ["commit", "disk", "--top", "two.qcow2", "--base", "disk@mon.qcow2"];
    let refused = world.ctl(&into_state).refusal();
    assert!(refused.contains("the backup \"mon\" under way"), "{refused}");
    drop(guest);
    world.kill();
    world.start();
    // The other way round.
    let merges: [&[&str]; 2] = [
        &["stream", "disk", "--base", "disk@mon.qcow2"],
        &["commit", "disk", "--top", "two.qcow2", "--base", "disk.qcow2"],
    ];
    for verb in merges {
        merge(&world, verb);
        let begun = world.begin(None, "mon").json();
        assert_eq!(begun["resumed"], true, "{begun}");
        judge::same_bytes("beside a merge", &exported(&world), &expected);
        world.ctl(&["cancel", "disk"]).ok();
        judge::same_bytes("after a merge", &exported(&world), &expected);
        world.kill();
        world.start();
    }
    // A new state puts a layer on top.
    merge(&world, merges[0]);
    let refused = world.begin(Some("mon"), "tue").refusal();
    let says = |what: &str| refused.contains(what);
    assert!(says("(stream) under way") && says("`mica ctl cancel disk`"), "{refused}");
    world.ctl(&["cancel", "disk"]).ok();
    world.begin(Some("mon"), "tue").ok();
    world.kill();
    world.start();
    // What the state before it had goes into the layer of this one.
    merge(&world, &["backup", "drop", "disk", "mon"]);
    let refused = world.begin(None, "tue").refusal();
    assert!(refused.contains("changes a layer that the state has"), "{refused}");
}
