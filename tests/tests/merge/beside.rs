//! Images beside a chain whose layers are merged: those that are made meanwhile, and those that are
//! left.

use crate::chain::{Chain, KINDS, LAYERS};
use crate::live::{ctl, job, serve, stop};
use mica_tests::{clock, qemu, tools};
use std::time::Duration;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];
const LIMIT: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(20);

/// Verbs that make `new.qcow2` on a layer.
fn makers(layer: &str) -> [Vec<&str>; 3] {
    [
        vec!["clone", layer, "new.qcow2"],
        vec!["create", "-b", layer, "-F", "qcow2", "new.qcow2"],
        vec!["convert", "-B", layer, "-F", "qcow2", "-O", "qcow2", layer, "new.qcow2"],
    ]
}

/// Nothing makes an image on `layer`; `why` is a part of what is said.
#[track_caller]
fn expect_refused(chain: &Chain, layer: &str, why: &str) {
    for verb in makers(layer) {
        let refused = chain.mica(&verb).refusal();
        assert!(refused.contains(why), "{verb:?}: {refused}");
        assert!(!chain.path("new.qcow2").exists(), "{verb:?} leaves nothing");
    }
}

#[test]
fn nothing_is_made_on_layers_that_are_being_merged_nor_on_those_that_were() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    let server = serve(&chain);
    let merge = ["commit", "top", "--top", "two.qcow2", "--base", chain.base()];
    let slowly = ["--background", "--rate", "256k"];
    ctl(&chain, &[&merge[..], &slowly].concat()).ok();
    let copied = || job(&chain)["copied_bytes"].as_u64().filter(|copied| *copied > 0);
    clock::poll(LIMIT, PAUSE, copied).expect("it copies");
    for layer in ["one.qcow2", "two.qcow2"] {
        let refused = chain.mica(&["clone", layer, "new.qcow2"]).refusal();
        assert!(refused.contains("base.qcow2"), "{refused}");
        assert!(!chain.path("new.qcow2").exists());
    }
    // What is above shows the same all the time.
    chain.mica(&["clone", "three.qcow2", "above.qcow2"]).ok();
    // Half of what goes into the base is there.
    ctl(&chain, &["cancel", "top"]).ok();
    expect_refused(&chain, chain.base(), "merge them again");
    expect_refused(&chain, "one.qcow2", "base.qcow2");
    ctl(&chain, &merge).ok();
    stop(server);
    chain.mica(&["clone", chain.base(), "whole.qcow2"]).ok();
    expect_refused(&chain, "two.qcow2", "base.qcow2");
    let said = chain.mica(&["rebase", "-b", "one.qcow2", "-F", "qcow2", "whole.qcow2"]).refusal();
    assert!(said.contains("base.qcow2"), "{said}");
    chain.judge(&chain.expected());
    qemu::flatten(chain.dir(), "above.qcow2", "above.raw");
    qemu::flatten(chain.dir(), "three.qcow2", "three.raw");
    let read = |name| std::fs::read(chain.path(name)).expect("read");
    assert!(read("above.raw") == read("three.raw"), "a clone of what is above is as that is");
}

#[test]
fn images_that_were_merged_hold_up_no_merge_after_a_restart_and_their_clones_do() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[2]);
    let server = serve(&chain);
    ctl(&chain, &["commit", "top", "--top", "three.qcow2"]).ok();
    stop(server);
    // `three.qcow2` still names the layer that is about to leave.
    let server = serve(&chain);
    ctl(&chain, &["commit", "top", "--top", "two.qcow2"]).ok();
    stop(server);
    let server = serve(&chain);
    qemu::overlay(chain.dir(), "late.qcow2", "three.qcow2", &[]);
    let merge = ["commit", "top", "--base", chain.base()];
    let refused = ctl(&chain, &merge).refusal();
    assert!(refused.contains("late.qcow2 stands on"), "{refused}");
    std::fs::remove_file(chain.path("late.qcow2")).expect("removed");
    // An image that is written again is no longer what was merged.
    qemu::io(chain.dir(), &[], "three.qcow2", &["write -P 1 0 512"]);
    let refused = ctl(&chain, &merge).refusal();
    assert!(refused.contains("three.qcow2 stands on"), "{refused}");
    std::fs::remove_file(chain.path("three.qcow2")).expect("removed");
    ctl(&chain, &merge).ok();
    stop(server);
    assert_eq!(chain.names(LAYERS[4]).len(), 2);
    chain.judge(&chain.expected());
    // Nor offline.
    chain.mica(&["commit", LAYERS[4]]).ok();
    chain.judge(&chain.expected());
}

/// The story: what was said named the image of a disk that was drained, and not the disk.
#[test]
fn closed_disk_of_the_same_server_that_needs_a_layer_is_named() {
    if !tools::present(TOOLS) {
        return;
    }
    let chain = Chain::new(KINDS[1]);
    qemu::overlay(chain.dir(), "middle.qcow2", "two.qcow2", &[]);
    qemu::overlay(chain.dir(), "other.qcow2", "middle.qcow2", &[]);
    let server = serve(&chain);
    let other = chain.path("other.qcow2").display().to_string();
    let socket = chain.path("other.sock").display().to_string();
    ctl(&chain, &["add", &other, "--name", "web", "--nbd", &socket]).ok();
    let merge = ["commit", "top", "--top", "two.qcow2", "--base", chain.base()];
    let refused = ctl(&chain, &merge).refusal();
    assert!(refused.contains("the disk \"web\" needs"), "{refused}");
    ctl(&chain, &["drain", "web"]).ok();
    let refused = ctl(&chain, &merge).refusal();
    assert!(refused.contains("disks of this server that are closed (\"web\")"), "{refused}");
    assert!(refused.contains("middle.qcow2 stands on"), "{refused}");
    // One that does not need them is no reason.
    ctl(&chain, &["remove", "web"]).ok();
    let refused = ctl(&chain, &merge).refusal();
    assert!(!refused.contains("closed"), "{refused}");
    std::fs::remove_file(chain.path("middle.qcow2")).expect("removed");
    ctl(&chain, &merge).ok();
    stop(server);
}
