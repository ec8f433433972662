//! Merges and other verbs over bitmaps that a killed writer has not saved: the disk is right, and
//! nothing makes them look as if they were true.

use crate::chain::{Chain, KINDS};
use crate::live::{ctl, serve, stop};
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{judge, qemu, tools};
use std::fs;
use std::process::Command;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD];
const BITMAP: &str = "mon";

/// A chain in which QEMU was killed over `layer`, which has a bitmap.
fn chain(layer: &str) -> Chain {
    let chain = Chain::new(KINDS[1]);
    qemu::img(chain.dir(), ["bitmap", "--add", layer, BITMAP]).ok();
    let server = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-t", "-f", "qcow2", "-k"]).arg(socket).arg(chain.path(layer));
        nbd
    });
    let server = server.expect("served");
    // The same bytes: the disk shows what it did.
    let there = server.connect(&Default::default()).expect("served").read(0, 4096).expect("read");
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &there).expect("answered"), 0);
    assert_eq!(guest.flush().expect("answered"), 0);
    drop(server);
    assert_eq!(flags(&chain, layer), Some("in-use".to_owned()));
    chain
}

/// The first flag of the bitmap in `layer`, if it has it.
fn flags(chain: &Chain, layer: &str) -> Option<String> {
    let told = qemu::img(chain.dir(), ["info", "-U", "--output", "json", layer]).json();
    let bitmaps = told["format-specific"]["data"]["bitmaps"].as_array()?.clone();
    let bitmap = bitmaps.iter().find(|bitmap| bitmap["name"] == BITMAP)?;
    Some(bitmap["flags"][0].as_str().unwrap_or_default().to_owned())
}

#[test]
fn bitmaps_that_were_not_saved_stay_so_in_every_merge_and_verb() {
    if !tools::present(TOOLS) {
        return;
    }
    let verbs: [&[&str]; 7] = [
        &["commit", "top.qcow2"],
        &["commit", "-b", "one.qcow2", "top.qcow2"],
        &["rebase", "-b", "", "top.qcow2"],
        &["rebase", "-u", "-b", "three.qcow2", "-F", "qcow2", "top.qcow2"],
        &["snapshot", "-c", "now", "top.qcow2"],
        &["clone", "top.qcow2", "new.qcow2"],
        &["backup", "-q", "top.qcow2", "states", "--as", "one"],
    ];
    let merges: [&[&str]; 3] = [
        &["stream", "top"],
        &["commit", "top"],
        &["commit", "top", "--top", "three.qcow2", "--base", "two.qcow2"],
    ];
    for layer in ["top.qcow2", "three.qcow2"] {
        for verb in verbs {
            let chain = chain(layer);
            chain.mica(verb).ok();
            chain.judge(&chain.expected());
            assert_eq!(flags(&chain, layer).as_deref(), Some("in-use"), "{verb:?}");
        }
        for merge in merges {
            let chain = chain(layer);
            let server = serve(&chain);
            ctl(&chain, merge).ok();
            stop(server);
            chain.judge(&chain.expected());
            assert_eq!(flags(&chain, layer).as_deref(), Some("in-use"), "{merge:?}");
        }
    }
    // What is copied is true, or is not there.
    let chain = chain("top.qcow2");
    fs::write(chain.path("new.qcow2"), "old").expect("written");
    let convert = ["convert", "--force", "--bitmaps", "top.qcow2", "new.qcow2"];
    let said = chain.mica(&convert).refusal();
    assert!(said.contains("--skip-broken-bitmaps"), "{said}");
    assert_eq!(fs::read(chain.path("new.qcow2")).expect("there"), b"old");
    chain.mica(&[&convert[..], &["--skip-broken-bitmaps"]].concat()).ok();
    assert_eq!(flags(&chain, "new.qcow2"), None);
    qemu::flatten(chain.dir(), "new.qcow2", "now.raw");
    let now = fs::read(chain.path("now.raw")).expect("flat");
    judge::same_bytes("the copy", &now, &chain.expected());
}

/// The story: only the layers were named, and neither their bitmaps nor why they ended.
#[test]
fn each_bitmap_that_ends_with_a_merged_layer_is_named_with_the_reason() {
    if !tools::present(TOOLS) {
        return;
    }
    let new = || {
        let chain = Chain::new(KINDS[1]);
        let bitmap = |words: &[&str]| qemu::img(chain.dir(), [&["bitmap"], words].concat()).ok();
        for name in ["kept", "idle", "lost"] {
            bitmap(&["--add", "three.qcow2", name]);
        }
        bitmap(&["--add", "top.qcow2", "kept"]);
        bitmap(&["--add", "--disable", "top.qcow2", "idle"]);
        chain
    };
    let expect = |said: &str| {
        let lines: Vec<_> = said.lines().filter(|line| line.contains("end with it")).collect();
        assert_eq!(lines.len(), 2, "{said}");
        for (name, why) in [("lost", "has none of that name"), ("idle", "has them disabled")] {
            let name = format!("bitmaps \"{name}\" end");
            let is_said = |line: &&str| {
                let words = [&name, why, "top.qcow2", "three.qcow2"];
                words.iter().all(|word| line.contains(word))
            };
            assert!(lines.iter().any(is_said), "{said}");
        }
    };
    let chain = new();
    let said = chain.mica(&["rebase", "-b", "", "top.qcow2"]);
    expect(&said.stderr);
    said.ok();
    chain.judge(&chain.expected());
    let chain = new();
    let server = serve(&chain);
    ctl(&chain, &["stream", "top"]).ok();
    expect(&server.log());
    stop(server);
    chain.judge(&chain.expected());
}
