//! Metadata contexts of NBD besides base:allocation, compared with what qemu-nbd says.

use mica_tests::server::Server;
use mica_tests::{command, mica, qemu, tools};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// A chain of three layers, each longer than the one beneath; the upper ones have bitmaps.
fn chain(folder: &Path) {
    qemu::create(folder, "base.qcow2", &[], "63M");
    qemu::io(folder, &[], "base.qcow2", &["write -P 1 0 1M", "write -P 1 40M 1M"]);
    qemu::overlay(folder, "mid.qcow2", "base.qcow2", &["-o", "cluster_size=4k"]);
    qemu::img(folder, ["resize", "-q", "-f", "qcow2", "mid.qcow2", "64M"]).ok();
    qemu::img(folder, ["bitmap", "--add", "mid.qcow2", "lower"]).ok();
    qemu::io(folder, &[], "mid.qcow2", &["write -P 2 512k 12k", "write -z 41M 1M"]);
    qemu::overlay(folder, "top.qcow2", "mid.qcow2", &["-o", "extended_l2=on"]);
    qemu::img(folder, ["resize", "-q", "-f", "qcow2", "top.qcow2", "66M"]).ok();
    qemu::img(folder, ["bitmap", "--add", "-g", "4k", "top.qcow2", "fine"]).ok();
    qemu::img(folder, ["bitmap", "--add", "-g", "1M", "top.qcow2", "coarse"]).ok();
    let scattered: Vec<_> =
        (0..300).map(|number| format!("write -P 3 {} 2k", number * 94 * 1024 + 2048)).collect();
    let mut writes: Vec<_> = scattered.iter().map(String::as_str).collect();
    writes.extend(["write -P 4 50M 4M", "discard 0 64k", "write -P 5 65M 2k"]);
    qemu::io(folder, &[], "top.qcow2", &writes);
}

pub(crate) fn map(server: &Server, context: &str) -> Value {
    let map = format!("--map={context}");
    let parts = command::run("nbdinfo", ["--json", &map, &server.uri()]).json();
    // The words for the numbers are nbdinfo's.
    let number = |part: &Value| ["offset", "length", "type"].map(|key| part[key].clone());
    parts
        .as_array()
        .expect("a list")
        .iter()
        .map(|part| Value::from(number(part).to_vec()))
        .collect()
}

#[test]
fn depth_and_stored_bitmaps_are_told_as_by_qemu_nbd() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD, tools::NBDINFO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    chain(dir.path());
    let top = dir.path().join("top.qcow2");
    let asked = ["-A", "-B", "fine", "-B", "coarse", "-B", "lower"];
    let contexts = ["fine", "coarse", "lower"].map(|name| format!("qemu:dirty-bitmap:{name}"));
    let contexts: Vec<_> =
        contexts.iter().map(String::as_str).chain(["qemu:allocation-depth"]).collect();
    let ours = Server::mica(&top, "qcow2", &asked).expect("served");
    let mine: Vec<_> = contexts.iter().map(|context| map(&ours, context)).collect();
    let info = command::run("nbdinfo", ["--json", &ours.uri()]).json();
    let listed = info["exports"][0]["contexts"].as_array().expect("a list").len();
    assert_eq!(listed, 1 + contexts.len(), "{info}");
    // What a client selects in one go is told in one go.
    let both = "h.add_meta_context('base:allocation'); h.add_meta_context('qemu:allocation-depth');\
                h.add_meta_context('qemu:dirty-bitmap:fine'); h.connect_uri(URI); told = set();\
                h.block_status(1 << 20, 0, lambda context, *_: told.add(context));\
                assert len(told) == 3, told";
    if tools::NBDSH.is_there() {
        let both = both.replace("URI", &format!("{:?}", ours.uri()));
        let path = std::env::var("PATH").unwrap_or_default();
        let mut nbdsh = Command::new("nbdsh");
        // Its module is the system's.
        nbdsh.env("PATH", format!("/usr/bin:/bin:{path}")).args(["-c", &both]);
        command::finish(&mut nbdsh).ok();
    }
    drop(ours);
    let theirs = Server::start("", |socket| {
        let mut nbd = Command::new("qemu-nbd");
        nbd.args(["-r", "-t", "-f", "qcow2"]).args(asked).arg("-k").arg(socket).arg(&top);
        nbd
    });
    let theirs = theirs.expect("served");
    for (context, mine) in contexts.iter().zip(mine) {
        assert!(mine.as_array().is_some_and(|parts| parts.len() > 1), "{context}: {mine}");
        assert_eq!(mine, map(&theirs, context), "{context}");
    }
}

#[test]
fn bitmaps_that_are_not_true_are_refused() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    chain(dir.path());
    let serve = |more: &[&str]| {
        let socket = dir.path().join("socket").display().to_string();
        let image = dir.path().join("top.qcow2").display().to_string();
        let all = [&["serve", "--nbd", &socket], more, &[&*image]].concat();
        let ended = mica::run(all);
        assert_eq!(ended.code(), Some(1), "{ended}");
        // A warning may stand before it.
        ended.stderr
    };
    let unknown = serve(&["-r", "-B", "other"]);
    assert!(unknown.contains("fine, coarse, lower"), "{unknown}");
    // A disk that went back in time is not what they are about.
    let top = dir.path().join("top.qcow2").display().to_string();
    mica::run(["snapshot", "-c", "one", &top]).ok();
    mica::run(["bitmap", "--disable", &top, "fine"]).ok();
    mica::run(["snapshot", "-a", "one", &top]).ok();
    let inconsistent = serve(&["-r", "-B", "fine"]);
    assert!(inconsistent.contains("inconsistent"), "{inconsistent}");
}
