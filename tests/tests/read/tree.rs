//! `mica tree` shows the forest that QEMU made, also where it is broken.

use mica_gen::{ChainSpec, generate};
use mica_tests::{clock, mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

#[track_caller]
fn tree(dir: &Path, options: &[&str]) -> String {
    let dir = dir.display().to_string();
    mica::run(["tree"].iter().chain(options).copied().chain([dir.as_str()])).ok()
}

fn chain(dir: &Path, layers: u32) {
    let spec = ChainSpec { layers, disk_bytes: 1 << 20, ..ChainSpec::new(dir) };
    generate(&spec, |_| {}).expect("made");
}

#[track_caller]
fn image<'a>(tree: &'a Value, name: &str) -> &'a Value {
    let ends = |image: &&Value| image["filename"].as_str().expect("a name").ends_with(name);
    tree["images"].as_array().expect("images").iter().find(ends).unwrap_or_else(|| panic!("{name}"))
}

#[test]
fn forest_of_qemus_images_is_drawn_as_it_is() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "1G");
    qemu::overlay(dir, "one.qcow2", "base.qcow2", &[]);
    qemu::overlay(dir, "two.qcow2", "base.qcow2", &["-o", "extended_l2=on"]);
    qemu::overlay(dir, "top.qcow2", "one.qcow2", &[]);
    qemu::create(dir, "gone.qcow2", &[], "1M");
    qemu::overlay(dir, "orphan.qcow2", "gone.qcow2", &[]);
    qemu::img(dir, ["snapshot", "-c", "kept", "two.qcow2"]).ok();
    fs::remove_file(dir.join("gone.qcow2")).expect("removed");
    let names: Vec<String> = tree(dir, &[])
        .lines()
        .map(|line| line.split_once("  ").map_or(line, |(name, _)| name).to_owned())
        .collect();
    let text = tree(dir, &[]);
    let shown: Vec<_> =
        text.lines().map(|line| line.split(".qcow2").next().expect("some")).collect();
    assert_eq!(shown, ["base", "├─ one", "│  └─ top", "└─ two", "orphan"], "{names:?}");
    assert!(text.contains("2 overlays, shared by 2 chains"), "{text}");
    assert!(text.contains("stands on gone.qcow2 (missing)"), "{text}");
    let json = mica::run(["tree", "--output", "json", &dir.display().to_string()]).json();
    let theirs = qemu::img(dir, ["info", "--output=json", "--backing-chain", "top.qcow2"]).json();
    for (depth, info) in (0..).zip(theirs.as_array().expect("a chain").iter().rev()) {
        let ours = image(&json, info["filename"].as_str().expect("a name"));
        assert_eq!(ours["depth"], depth);
        for field in ["virtual-size", "actual-size", "format"] {
            assert_eq!(ours[field], info[field], "{field} of {ours}");
        }
    }
    assert_eq!(image(&json, "two.qcow2")["snapshots"], 1);
    assert_eq!(image(&json, "orphan.qcow2")["backing-problem"], "missing");
    assert_eq!(image(&json, "base.qcow2")["chains"], 2);
}

#[test]
fn long_chains_are_folded_and_all_shows_them() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir, 200);
    let folded = tree(dir, &[]);
    assert_eq!(folded.lines().count(), 4, "{folded}");
    assert!(folded.contains("... 197 more, "), "{folded}");
    assert!(folded.contains("chain of 200"), "{folded}");
    let all = tree(dir, &["--all"]);
    assert_eq!(all.lines().count(), 200);
    assert!(all.lines().all(|line| line.chars().count() < 100), "{all}");
}

#[test]
fn pictures_name_every_image_once_and_are_well_formed() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir, 3);
    symlink("layer-0002.qcow2", dir.join("a<b>&\"c\".qcow2")).expect("a link");
    let svg = tree(dir, &["--svg"]);
    assert_eq!(svg, tree(dir, &["--output", "svg"]));
    for name in ["layer-0000.qcow2", "layer-0001.qcow2"] {
        assert_eq!(svg.matches(name).count(), 1, "{name}");
    }
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert!(svg.contains("prefers-color-scheme") && svg.contains("<title>"));
    assert!(!svg.contains("a<b"), "names cannot leave their place");
    let dot = tree(dir, &["--dot"]);
    assert_eq!(dot.matches(" -> ").count(), 2);
    assert!(dot.starts_with("digraph images {"));
}

#[test]
fn layers_that_are_indexed_are_said_to_be() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir, 4);
    clock::sleep(Duration::from_millis(1200));
    let indexed = || {
        let tree = mica::run(["tree", "--output", "json", &dir.display().to_string()]).json();
        let images = tree["images"].as_array().expect("images").clone();
        images.iter().filter(|image| image["indexed"] == true).count()
    };
    assert_eq!(indexed(), 0);
    mica::run(["index", "build", &dir.join("top.qcow2").display().to_string()]).ok();
    assert_eq!(indexed(), 3);
    // A layer that was touched is not covered any more, nor are those above it.
    let file = fs::File::options().append(true).open(dir.join("layer-0001.qcow2")).expect("opened");
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).expect("set");
    assert_eq!(indexed(), 1);
}

#[test]
fn what_is_no_folder_is_refused_and_strange_files_are_left_out() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    let refused = mica::run(["tree", &dir.join("none").display().to_string()]).refusal();
    assert!(refused.contains("none"), "{refused}");
    fs::write(dir.join("short.qcow2"), b"QFI\xfb").expect("there is room");
    fs::write(dir.join("text.txt"), b"text").expect("there is room");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.join("fifo.qcow2"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .expect("a FIFO");
    let said = mica::run(["tree", "--output", "json", &dir.display().to_string()]).json();
    assert_eq!(said["images"].as_array().map(Vec::len), Some(0), "{said}");
    assert_eq!(said["problems"].as_array().map(Vec::len), Some(1), "{said}");
}

/// The story: nothing was printed, not even for a file that was named and is no image.
#[test]
fn where_no_image_is_it_is_said() {
    let dir = tempfile::tempdir().expect("a folder");
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).expect("made");
    fs::write(dir.path().join("disk.raw"), [0; 512]).expect("written");
    for place in ["empty", "disk.raw", "/dev/null"] {
        let place = dir.path().join(place).display().to_string();
        for verb in ["tree", "survey"] {
            let said = mica::run([verb, &place]);
            assert_eq!(said.code(), Some(0), "{said}");
            let line = format!("{place}: no qcow2 image is there");
            assert!(said.stderr.contains(&line), "{said}");
        }
    }
    chain(&empty, 2);
    let said = mica::run(["tree", &empty.display().to_string()]);
    assert_eq!(said.stderr, "", "{said}");
}
