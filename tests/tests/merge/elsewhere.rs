//! Images in other folders that stand on a layer: found before that is changed, or its file is
//! removed.

use crate::chain::{Chain, KINDS};
use crate::live::{ctl, serve, serve_image, stop};
use mica_tests::{qemu, tools};
use std::fs;
use std::os::unix::fs::symlink;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];

/// Whatever puts an image in another folder on a layer, a commit into that finds it.
#[test]
fn layers_that_images_in_other_folders_need_are_not_changed() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    fs::create_dir(chain.path("far")).expect("made");
    symlink("far", chain.path("link")).expect("made");
    let layer = chain.path("three.qcow2").display().to_string();
    let layer = &*layer;
    let makers: [(&str, &[&[&str]]); 5] = [
        ("far/new.qcow2", &[&["clone", "three.qcow2", "far/new.qcow2"]]),
        ("far/new.qcow2", &[&["create", "-q", "-b", layer, "-F", "qcow2", "link/new.qcow2"]]),
        (
            "far/new.qcow2",
            &[&["convert", "-O", "qcow2", "-B", layer, "-F", "qcow2", layer, "far/new.qcow2"]],
        ),
        (
            "far/new.qcow2",
            &[
                &["create", "-q", "far/new.qcow2", "24M"],
                &["rebase", "-b", layer, "-F", "qcow2", "far/new.qcow2"],
            ],
        ),
        ("far/new-2.qcow2", &[&["clone", "--count", "2", "three.qcow2", "far/new.qcow2"]]),
    ];
    for (found, verbs) in makers {
        verbs.iter().for_each(|verb| drop(chain.mica(verb).ok()));
        let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
        assert!(refused.contains(found) && refused.contains("three.qcow2"), "{refused}");
        fs::rename(chain.path(found), chain.path("far/moved.qcow2")).expect("renamed");
        if found.ends_with("-2.qcow2") {
            let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
            assert!(refused.contains("far/moved.qcow2"), "{refused}");
        }
        for gone in ["far/moved.qcow2", "far/new-1.qcow2"] {
            let _ = fs::remove_file(chain.path(gone));
        }
    }
    // Nothing tells one that was removed from one that was moved.
    let note = chain.path("three.qcow2.mica-overlays");
    let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
    assert!(refused.contains("far/new-1.qcow2, which is not there any more"), "{refused}");
    assert!(refused.contains("--ignore-gone"), "{refused}");
    // One that is there counts all the same, be it by another name.
    chain.mica(&["clone", "three.qcow2", "far/new.qcow2"]).ok();
    fs::rename(chain.path("far/new.qcow2"), chain.path("far/moved.qcow2")).expect("renamed");
    for _ in 0..2 {
        let refused = chain.mica(&["commit", "--ignore-gone", "top.qcow2"]).refusal();
        assert!(refused.contains("far/moved.qcow2 stands on"), "{refused}");
        assert!(!refused.contains("any more"), "{refused}");
    }
    fs::remove_file(chain.path("far/moved.qcow2")).expect("removed");
    chain.mica(&["commit", "--ignore-gone", "top.qcow2"]).ok();
    assert!(!note.exists());
    chain.judge(&chain.expected());
}

/// The story: a rebase was killed when the image named its new base, and nothing beside that said
/// so.
#[test]
fn image_is_noted_of_its_new_base_before_it_names_that() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    fs::create_dir(chain.path("far")).expect("made");
    chain.mica(&["create", "-q", "far/new.qcow2", "24M"]).ok();
    let note = chain.path("three.qcow2.mica-overlays");
    // No header has room for the name. With -u, where nothing is copied first, that is found out
    // when the name is written, and so it ends where a kill would end it.
    let long = format!("../{}three.qcow2", "./".repeat(600));
    let rebase = ["-b", &long, "-F", "qcow2", "far/new.qcow2"];
    for mode in [&["rebase"][..], &["rebase", "-u"]] {
        assert!(!note.exists());
        let said = chain.mica(&[mode, &rebase].concat()).refusal();
        assert!(said.contains("maximum is 1023"), "{said}");
    }
    let noted = fs::read_to_string(note).expect("a note");
    assert!(noted.contains("far/new.qcow2"), "{noted}");
    // As the kill left it, a moment later.
    let three = chain.path("three.qcow2").display().to_string();
    qemu::img(&chain.path("far"), ["rebase", "-u", "-b", &three, "-F", "qcow2", "new.qcow2"]).ok();
    let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
    assert!(refused.contains("far/new.qcow2 stands on"), "{refused}");
}

#[test]
fn layers_that_only_removed_images_stood_on_are_merged_if_the_user_says_that_they_are_gone() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    fs::create_dir(chain.path("far")).expect("made");
    let served = serve(&chain);
    chain.mica(&["clone", "two.qcow2", "far/new.qcow2"]).ok();
    fs::remove_file(chain.path("far/new.qcow2")).expect("removed");
    let merge = ["commit", "top", "--top", "three.qcow2"];
    let refused = ctl(&chain, &merge).refusal();
    assert!(refused.contains("far/new.qcow2, which is not there any more"), "{refused}");
    assert!(refused.contains("--ignore-gone"), "{refused}");
    ctl(&chain, &[&merge[..], &["--ignore-gone"]].concat()).ok();
    assert!(!chain.path("two.qcow2.mica-overlays").exists());
    stop(served);
    chain.judge(&chain.expected());
}

/// The story: an image was moved to a third folder and counted as gone, so that the layer that it
/// stood on was changed.
#[test]
fn layer_of_an_image_that_was_moved_is_not_changed_wherever_that_is() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    for folder in ["far", "third"] {
        fs::create_dir(chain.path(folder)).expect("made");
    }
    let layer = chain.path("three.qcow2").display().to_string();
    chain.mica(&["clone", "three.qcow2", "far/new.qcow2"]).ok();
    fs::rename(chain.path("far/new.qcow2"), chain.path("third/new.qcow2")).expect("moved");
    for _ in 0..2 {
        let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
        assert!(refused.contains("far/new.qcow2, which is not there any more"), "{refused}");
        assert!(refused.contains(&format!("`mica rebase -u -b {layer} -F qcow2 ")), "{refused}");
    }
    chain.mica(&["rebase", "-u", "-b", &layer, "-F", "qcow2", "third/new.qcow2"]).ok();
    let refused = chain.mica(&["commit", "top.qcow2"]).refusal();
    assert!(refused.contains("third/new.qcow2 stands on"), "{refused}");
    assert!(refused.contains("far/new.qcow2"), "it may be another one: {refused}");
    let refused = chain.mica(&["commit", "--ignore-gone", "top.qcow2"]).refusal();
    assert!(refused.contains("third/new.qcow2 stands on"), "{refused}");
    assert!(!refused.contains("far/new.qcow2"), "{refused}");
    // What stands on something else is of no interest, and nor is what becomes of it.
    let here = chain.dir().to_str().expect("UTF-8");
    chain.mica(&["rebase", "-b", "", "--allow-path", here, "third/new.qcow2"]).ok();
    fs::remove_file(chain.path("third/new.qcow2")).expect("removed");
    chain.mica(&["commit", "top.qcow2"]).ok();
    chain.judge(&chain.expected());
}

/// The story: a clone was moved out of the folder of a disk that was committed, or had the name of
/// another one, whose line went; what it showed changed.
#[test]
fn image_that_was_moved_is_protected_whatever_is_in_its_folder_and_has_its_name() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    for folder in ["a", "b", "third"] {
        fs::create_dir(chain.path(folder)).expect("made");
    }
    let layer = chain.path("three.qcow2").display().to_string();
    for clone in ["a/own.qcow2", "a/disk.qcow2", "b/disk.qcow2"] {
        chain.mica(&["clone", "three.qcow2", clone]).ok();
    }
    fs::rename(chain.path("a/disk.qcow2"), chain.path("third/disk.qcow2")).expect("moved");
    let rebase = ["rebase", "-u", "-b", &layer, "-F", "qcow2"];
    chain.mica(&[&rebase[..], &["b/disk.qcow2"]].concat()).ok();
    for removed in ["b/disk.qcow2", "top.qcow2"] {
        fs::remove_file(chain.path(removed)).expect("removed");
    }
    let refused = chain.mica(&["commit", "--allow-path", "..", "a/own.qcow2"]).refusal();
    assert!(refused.contains("a/disk.qcow2, which is not there any more"), "{refused}");
}

/// Clones of a layer that is never merged come and go, and its note does not grow by them.
#[test]
fn lines_of_clones_that_were_removed_go_when_the_next_one_is_made_and_the_user_says_so() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    fs::create_dir(chain.path("far")).expect("made");
    let clone = |more: &[&str], name: &str| {
        let name = format!("far/{name}.qcow2");
        chain.mica(&[&["clone", "-q"], more, &["three.qcow2", &name]].concat()).ok();
        name
    };
    let noted = || {
        let note = fs::read_to_string(chain.path("three.qcow2.mica-overlays")).expect("noted");
        let names = note.lines().map(|line| line.rsplit('/').next().expect("a path").to_owned());
        names.collect::<Vec<_>>()
    };
    clone(&[], "stays");
    fs::remove_file(chain.path(&clone(&[], "gone"))).expect("removed");
    let renamed = clone(&[], "renamed");
    fs::rename(chain.path(&renamed), chain.path("far/again.qcow2")).expect("renamed");
    clone(&[], "next");
    assert_eq!(noted(), ["stays.qcow2", "gone.qcow2", "renamed.qcow2", "next.qcow2"]);
    clone(&["--ignore-gone"], "last");
    // One of the two is the image that has another name now, and nobody knows which.
    let left = noted();
    assert_eq!(left.len(), 4, "{left:?}");
    fs::remove_file(chain.path("far/again.qcow2")).expect("removed");
    clone(&["--ignore-gone"], "more");
    assert_eq!(noted(), ["stays.qcow2", "next.qcow2", "last.qcow2", "more.qcow2"]);
}

/// A merge may have an image stand on a layer in another folder, too.
#[test]
fn image_that_a_merge_puts_on_a_layer_in_another_folder_is_found() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    let far = chain.path("far");
    fs::create_dir(&far).expect("made");
    let three = chain.path("three.qcow2").display().to_string();
    // A chain of its own on the same layers, which QEMU made.
    qemu::create(&far, "upper.qcow2", &["-b", &three, "-F", "qcow2"], "24M");
    qemu::io(&far, &[], "upper.qcow2", &["write -P 9 0 1M"]);
    let served = serve_image(&chain, &far.join("upper.qcow2"));
    let two = chain.path("two.qcow2").display().to_string();
    ctl(&chain, &["stream", "upper", "--base", &two]).ok();
    stop(served);
    let refused = chain.mica(&["commit", "-b", "two.qcow2", "top.qcow2"]).refusal();
    assert!(refused.contains("far/upper.qcow2"), "{refused}");
    // The same without a server.
    fs::remove_file(far.join("upper.qcow2")).expect("removed");
    qemu::create(&far, "upper.qcow2", &["-b", &three, "-F", "qcow2"], "24M");
    chain.mica(&["rebase", "-u", "-b", &two, "-F", "qcow2", "far/upper.qcow2"]).ok();
    let refused = chain.mica(&["commit", "-b", "two.qcow2", "top.qcow2"]).refusal();
    assert!(refused.contains("far/upper.qcow2"), "{refused}");
}

/// The story: what could not be noted beside a base was told twice by a verb that looks before and
/// after it names that.
#[test]
fn rebase_that_cannot_note_its_image_beside_the_base_says_so_once() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    fs::create_dir(chain.path("far")).expect("made");
    // Nobody can write a note there, root neither.
    fs::create_dir(chain.path("three.qcow2.mica-overlays")).expect("made");
    chain.mica(&["create", "-q", "far/new.qcow2", "24M"]).ok();
    let base = ["--allow-path", ".", "-F", "qcow2", "-b", "../three.qcow2", "far/new.qcow2"];
    for verb in [&["rebase", "-u"][..], &["rebase"]] {
        let said = chain.mica(&[verb, &base[..]].concat());
        assert!(said.status.success(), "{said}");
        assert_eq!(said.stderr.matches("could not be noted").count(), 1, "{said}");
    }
}
