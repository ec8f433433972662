//! Clones: overlays of what is frozen.

use crate::world::{World, layer};
use mica_tests::server::Server;
use mica_tests::{mica, qemu, tools};
use std::fs;
use std::path::Path;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];

fn clone(folder: &Path, words: &[&str], base: &str, new: &str) -> mica_tests::command::Finished {
    let paths = [base, new].map(|name| folder.join(name).display().to_string());
    let words = ["clone"].into_iter().chain(words.iter().copied());
    mica::run(words.chain(paths.iter().map(|path| &**path)))
}

#[test]
fn clones_begin_as_their_base_and_of_that_only_the_header_is_read() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "base.qcow2", &[], "16M");
    qemu::io(folder, &[], "base.qcow2", &["write -P 1 0 4M"]);
    qemu::overlay(folder, "gold.qcow2", "base.qcow2", &[]);
    qemu::io(folder, &[], "gold.qcow2", &["write -P 2 1M 1M"]);
    let made = clone(folder, &["--output", "json"], "gold.qcow2", "web.qcow2").json();
    assert_eq!(made["virtual-size"], 16 << 20, "{made}");
    qemu::img(folder, ["compare", "gold.qcow2", "web.qcow2"]).ok();
    let info = qemu::img(folder, ["info", "--output=json", "web.qcow2"]).json();
    assert_eq!(
        (&info["backing-filename"], &info["backing-filename-format"]),
        (&"gold.qcow2".into(), &"qcow2".into())
    );
    clone(folder, &["-q", "--count", "3"], "gold.qcow2", "desk.qcow2").ok();
    for number in 1..=3 {
        qemu::io(folder, &[], &format!("desk-{number}.qcow2"), &["write -P 3 0 64k"]);
        qemu::img(folder, ["check", &format!("desk-{number}.qcow2")]).ok();
    }
    assert!(!folder.join("desk.qcow2").exists());
    // Elsewhere the name is whole.
    let other = tempfile::tempdir().expect("a folder");
    let there = other.path().join("far.qcow2").display().to_string();
    let gold = folder.join("gold.qcow2").display().to_string();
    mica::run(["clone", &gold, &there]).ok();
    qemu::img(folder, ["compare", "gold.qcow2", &there]).ok();
    // What is beneath the base is not even looked for.
    fs::rename(folder.join("base.qcow2"), folder.join("aside")).expect("moved");
    clone(folder, &[], "gold.qcow2", "late.qcow2").ok();
    let said = clone(folder, &[], "gold.qcow2", "late.qcow2").refusal();
    assert!(said.contains("exists"), "{said}");
    assert!(!said.contains("--force"), "it has no such option: {said}");
    clone(folder, &[], "missing.qcow2", "none.qcow2").refusal();
    clone(folder, &["-o", "size=1G"], "gold.qcow2", "none.qcow2").refusal();
    assert!(!folder.join("none.qcow2").exists());
}

#[test]
fn what_is_being_written_is_not_cloned_but_what_a_snapshot_froze_is() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "vm.qcow2", &[], "16M");
    qemu::io(folder, &[], "vm.qcow2", &["write -P 1 0 4M"]);
    let control = folder.join("control").display().to_string();
    let options = ["--control", &*control];
    let server =
        Server::mica_writable(&folder.join("vm.qcow2"), "qcow2", &options).expect("served");
    let said = clone(folder, &[], "vm.qcow2", "web.qcow2").refusal();
    assert!(said.contains("writing"), "{said}");
    assert!(!folder.join("web.qcow2").exists());
    let next = folder.join("vm-2.qcow2").display().to_string();
    mica::run(["ctl", "--control", &control, "snapshot", "vm", &next]).ok();
    clone(folder, &[], "vm.qcow2", "web.qcow2").ok();
    // Both go their own ways.
    qemu::io(folder, &[], "web.qcow2", &["write -P 2 0 1M"]);
    let write = ["-f", "raw", "-c", "write -P 3 1M 1M", &server.uri()];
    mica_tests::command::run("qemu-io", write).ok();
    assert!(server.stop().expect("it stops").status.success());
    qemu::io(folder, &[], "web.qcow2", &["read -P 2 0 1M", "read -P 1 1M 3M"]);
    qemu::io(folder, &[], "vm-2.qcow2", &["read -P 1 0 1M", "read -P 3 1M 1M"]);
    qemu::io(folder, &["-r"], "vm.qcow2", &["read -P 1 0 4M"]);
    // A server that is killed while it freezes a layer may leave it as if it were written. Another
    // one goes on above it, and it lacks nothing; what is written is not known to be whole.
    for (image, is_cloned) in [("vm.qcow2", true), ("vm-2.qcow2", false)] {
        name_a_log(&folder.join(image));
        let made = clone(folder, &[], image, &format!("late-{image}"));
        assert_eq!(made.status.success(), is_cloned, "{made}");
    }
    qemu::io(folder, &[], "late-vm.qcow2", &["read -P 1 0 4M"]);
}

/// The header of an image says that its writer keeps a log.
fn name_a_log(image: &Path) {
    /// The upper half of the autoclear bits, none of which QEMU knows.
    const AUTOCLEAR_AT: usize = 88;
    let mut bytes = fs::read(image).expect("read");
    bytes[AUTOCLEAR_AT..AUTOCLEAR_AT + 4].fill(1);
    fs::write(image, bytes).expect("written");
}

/// The mark of a base leads to the disk whose layers they are, and to no clone.
#[test]
fn disk_that_is_rebased_is_found_from_its_base_and_a_clone_is_not() {
    const MIB: usize = 1 << 20;
    let Some(mut world) = World::new(&[]) else { return };
    for number in 1..=2_u8 {
        let at = u64::from(number) << 20;
        assert_eq!(world.guest().write(at, &[number; MIB]).expect("served"), 0);
        world.snapshot(&layer(number.into()), &[]).ok();
    }
    assert_eq!(world.guest().write(3 << 20, &[3; MIB]).expect("served"), 0);
    let disk = world.disk();
    world.stop();
    let folder = world.folder();
    let mark = || fs::read_to_string(folder.join("vm.qcow2.mica-above")).expect("a mark");
    let rebase = |image: &str| {
        let image = folder.join(image).display().to_string();
        mica::run(["rebase", "-b", &layer(0), "-F", "qcow2", &image]).ok();
    };
    let before = mark();
    clone(folder, &[], &layer(1), "clone.qcow2").ok();
    rebase("clone.qcow2");
    assert_eq!(mark(), before, "the disk goes on where it did");
    rebase(&layer(2));
    assert_eq!(mark(), format!("above: {}\n", layer(2)));
    world.start();
    assert_eq!(world.image().file_name(), Some(layer(2).as_ref()));
    assert!(world.disk() == disk, "the disk changed");
}

/// The story: a clone of a layer was served, and got its base for its backing file, past that
/// layer. The server of the disk that was cloned served the clone when it was started again.
#[test]
fn clone_that_is_merged_while_it_is_served_leaves_the_mark_of_the_disk() {
    let Some(mut world) = World::new(&[]) else { return };
    for number in 1..=2_u8 {
        let at = u64::from(number) << 20;
        assert_eq!(world.guest().write(at, &[number; 1 << 20]).expect("served"), 0);
        world.snapshot(&layer(number.into()), &[]).ok();
    }
    let disk = world.disk();
    let folder = world.folder().to_owned();
    clone(&folder, &[], &layer(1), "clone.qcow2").ok();
    let control = folder.join("control-of-clone").display().to_string();
    let options = ["--control", &*control];
    let server =
        Server::mica_writable(&folder.join("clone.qcow2"), "qcow2", &options).expect("served");
    let base = folder.join(layer(0)).display().to_string();
    let stream = ["ctl", "--control", &control, "stream", "clone", "--base", &base];
    mica::run(stream).ok();
    assert!(server.stop().expect("it stops").status.success());
    qemu::io(&folder, &[], "clone.qcow2", &["read -P 2 2M 1M", "write -P 9 0 1M"]);
    world.stop();
    world.start();
    assert_eq!(world.image().file_name(), Some(layer(2).as_ref()));
    assert!(world.disk() == disk, "the disk changed");
}

/// The story: a clone was merged into its base, on which a served disk stood in another folder. The
/// disk then showed what the clone had.
#[test]
fn clone_is_not_merged_into_what_a_disk_in_another_folder_stands_on() {
    let elsewhere = tempfile::tempdir().expect("a folder");
    let there = elsewhere.path().display().to_string();
    let Some(mut world) = World::new(&["--allow-path", &there]) else { return };
    let active = elsewhere.path().join("vm-1.qcow2");
    world.ctl(&["snapshot", "vm", &active.display().to_string()]).ok();
    clone(world.folder(), &[], "vm.qcow2", "web.qcow2").ok();
    qemu::io(world.folder(), &[], "web.qcow2", &["write -P 9 0 64k"]);
    let web = world.folder().join("web.qcow2").display().to_string();
    world.stop();
    let commit = ["commit", "--allow-path", &there, &web];
    let said = mica::run(commit).refusal();
    assert!(said.contains("vm-1.qcow2 stands on"), "{said}");
    world.named = "web.qcow2".to_owned();
    world.start();
    let said = world.ctl(&["commit", "web"]).refusal();
    assert!(said.contains("vm-1.qcow2 stands on"), "{said}");
    world.stop();
    // A folder that is not there now says nothing of the disk in it.
    fs::rename(&active, elsewhere.path().join("aside")).expect("moved");
    let said = mica::run(commit).refusal();
    assert!(said.contains("which is missing") && said.contains("vm.qcow2.mica-above"), "{said}");
    fs::remove_file(world.folder().join("vm.qcow2.mica-above")).expect("it is there");
    mica::run(commit).ok();
}
