//! Who may do what to which layer: the cells of docs/layers.md that no other test is about.

use crate::world::World;
use mica_tests::command::Finished;
use mica_tests::{command, mica, qemu};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Verbs that would change the image that comes after them.
const CHANGES: [&[&str]; 5] = [
    &["amend", "-o", "lazy_refcounts=on"],
    &["resize", "--shrink"],
    &["commit"],
    &["rebase", "-u", "-b", "other.qcow2", "-F", "qcow2"],
    &["write"],
];

#[track_caller]
fn change(dir: &Path, verb: &[&str], image: &str) -> Finished {
    let mut mica = Command::new(mica::binary());
    mica.current_dir(dir).args(verb).arg(image);
    command::finish(match verb[0] {
        "resize" => mica.arg("4M"),
        "write" => mica.arg("0"),
        _ => &mut mica,
    })
}

/// A disk with a frozen layer, a kept state and an active layer: their names.
fn layers(world: &World) -> [&'static str; 3] {
    let path = |name: &str| world.folder().join(name).display().to_string();
    world.ctl(&["snapshot", "vm", &path("top.qcow2")]).ok();
    world.ctl(&["backup", "begin", "vm", "--as", "monday", "--nbd", &path("backup")]).ok();
    world.ctl(&["backup", "end", "vm"]).ok();
    ["vm.qcow2", "top@monday.qcow2", "top.qcow2"]
}

#[test]
fn verbs_change_no_layer_of_a_disk_that_is_served() {
    let Some(world) = World::new(&[]) else { return };
    qemu::create(world.folder(), "other.qcow2", &[], "1M");
    for layer in layers(&world) {
        let before = fs::read(world.folder().join(layer)).expect("it is there");
        for verb in CHANGES {
            let refused = change(world.folder(), verb, layer).refusal();
            let why = ["another process", "is frozen"];
            assert!(why.iter().any(|why| refused.contains(why)), "{verb:?} {layer}: {refused}");
        }
        let write = ["-c", "write -P 1 0 512", layer];
        let mut qemu_io = Command::new("qemu-io");
        let refused = command::finish(qemu_io.current_dir(world.folder()).args(write));
        assert_ne!(refused.code(), Some(0), "{layer}: {refused}");
        assert!(refused.stderr.contains("lock"), "{layer}: {refused}");
        assert!(before == fs::read(world.folder().join(layer)).expect("it is there"), "{layer}");
    }
}

#[test]
fn verbs_leave_frozen_layers_and_kept_states_alone() {
    let Some(mut world) = World::new(&[]) else { return };
    let [frozen, kept, active] = layers(&world);
    world.stop();
    for layer in [frozen, kept] {
        let before = fs::read(world.folder().join(layer)).expect("it is there");
        for verb in CHANGES.iter().filter(|verb| verb[0] != "rebase") {
            let refused = change(world.folder(), verb, layer).refusal();
            assert!(refused.contains("is frozen"), "{verb:?} {layer}: {refused}");
        }
        qemu::io(world.folder(), &["-r"], layer, &["read -P 0 0 512"]);
        assert!(before == fs::read(world.folder().join(layer)).expect("it is there"), "{layer}");
    }
    change(world.folder(), CHANGES[0], active).ok();
    change(world.folder(), &["write"], active).ok();
    qemu::img(world.folder(), ["check", active]).ok();
}

#[test]
fn a_server_commits_nothing_into_a_kept_state() {
    let Some(world) = World::new(&[]) else { return };
    let [_, kept, _] = layers(&world);
    let before = fs::read(world.folder().join(kept)).expect("it is there");
    let refused = world.ctl(&["commit", "vm"]).refusal();
    assert!(refused.contains("monday"), "{refused}");
    assert!(before == fs::read(world.folder().join(kept)).expect("it is there"));
}
