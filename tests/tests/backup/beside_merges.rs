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
    // A new state puts a layer on top, and a snapshot does.
    merge(&world, merges[0]);
    let four = world.path("four.qcow2").display().to_string();
    let snapshot = world.ctl(&["snapshot", "disk", &four]);
    for refused in [world.begin(Some("mon"), "tue").refusal(), snapshot.refusal()] {
        let says = |what: &str| refused.contains(what);
        assert!(says("(stream) under way") && says("`mica ctl cancel disk`"), "{refused}");
    }
    world.ctl(&["cancel", "disk"]).ok();
    world.begin(Some("mon"), "tue").ok();
    world.kill();
    world.start();
    // What the state before it had goes into the layer of this one.
    merge(&world, &["backup", "drop", "disk", "mon"]);
    let refused = world.begin(None, "tue").refusal();
    assert!(refused.contains("changes a layer that the state has"), "{refused}");
}

/// The extents that the server tells.
#[track_caller]
fn told(world: &World, query: &str) -> String {
    let answer = world.extents(query);
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200"), "{query}: {answer}");
    body.to_owned()
}

/// Why it tells none, while a merge is under way.
#[track_caller]
fn told_later(world: &World, query: &str) -> String {
    let answer = world.extents(query);
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 409"), "{query}: {answer}");
    let lower = head.to_ascii_lowercase();
    let after = lower.lines().find_map(|line| line.strip_prefix("retry-after: "));
    let seconds: u64 = after.expect("when to ask again").parse().expect("in seconds");
    assert!((1..=600).contains(&seconds), "{head}");
    assert!(body.contains("`mica ctl cancel disk`"), "{body}");
    body.to_owned()
}

/// The story: backup software asked what had changed between two states, and got no answer for the
/// hours that a merge of layers above them took.
#[test]
fn extents_of_states_are_told_beside_merges_of_what_they_do_not_have() {
    let Some(world) = World::new(4, &[]) else { return };
    let mut guest = world.guest();
    write(&mut guest, 3 * MIB, 1);
    world.begin(None, "mon").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    write(&mut guest, 4 * MIB, 2);
    world.begin(Some("mon"), "tue").ok();
    world.ctl(&["backup", "end", "disk"]).ok();
    write(&mut guest, 5 * MIB, 3);
    for (layer, at, byte) in [("two.qcow2", 4 * MIB, 4), ("three.qcow2", 6 * MIB, 5)] {
        let path = world.path(layer).display().to_string();
        world.ctl(&["snapshot", "disk", &path]).ok();
        write(&mut guest, at, byte);
    }
    let of_states = ["state=mon", "state=tue", "state=tue&since=mon"];
    let expected = of_states.map(|query| told(&world, query));
    assert!(expected[2].contains(&format!("\"byte_offset\":{}", 4 * MIB)), "{}", expected[2]);
    let until_now = told(&world, "since=tue");
    let allocated = told(&world, "");
    let merges: [&[&str]; 2] = [
        &["stream", "disk", "--base", "disk@tue.qcow2"],
        &["commit", "disk", "--top", "two.qcow2", "--base", "disk.qcow2"],
    ];
    for verb in merges {
        merge(&world, verb);
        for (query, expected) in of_states.iter().zip(&expected) {
            assert_eq!(told(&world, query), *expected, "{verb:?}: {query}");
        }
        assert_eq!(told(&world, ""), allocated, "{verb:?}");
        let refused = told_later(&world, "since=tue");
        assert!(refused.contains(&format!("({}) under way", verb[0])), "{refused}");
        world.ctl(&["cancel", "disk"]).ok();
    }
    // What the first state has goes into the second one.
    merge(&world, &["backup", "drop", "disk", "mon"]);
    for query in of_states {
        let refused = told_later(&world, query);
        assert!(refused.contains("(drop) under way"), "{refused}");
        assert!(refused.contains("changes a layer that the state has"), "{refused}");
    }
    assert_eq!(told(&world, ""), allocated);
    world.ctl(&["cancel", "disk"]).ok();
    // What the drop has copied counts as changed between the two.
    for (query, expected) in of_states.iter().zip(&expected).take(2) {
        assert_eq!(told(&world, query), *expected, "after a drop that was cancelled: {query}");
    }
    assert_eq!(told(&world, "since=tue"), until_now);
}
