//! QEMU's image locks: mica and QEMU keep each other from writing what the other one reads or
//! writes, and let each other read.

use mica_tests::command::Finished;
use mica_tests::server::Server;
use mica_tests::{command, mica, qemu, tools};
use std::path::Path;
use std::process::Command;

const TOOLS: [tools::Tool; 3] = [tools::QEMU_IMG, tools::QEMU_IO, tools::QEMU_NBD];

/// `base.qcow2`, and `top.qcow2` on it, each with some data.
fn chain(dir: &Path) {
    qemu::create(dir, "base.qcow2", &[], "1M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 64k"]);
    qemu::overlay(dir, "top.qcow2", "base.qcow2", &[]);
    qemu::io(dir, &[], "top.qcow2", &["write -P 2 64k 64k"]);
}

fn serve_by_mica(dir: &Path, image: &str, more: &[&str]) -> Server {
    Server::mica_writable(&dir.join(image), "qcow2", more).expect("mica serves")
}

/// QEMU with the image open for writing.
fn serve_by_qemu(dir: &Path, image: &str) -> Server {
    let serve = |socket: &Path| {
        let mut serve = Command::new("qemu-nbd");
        serve.args(["--persistent", "--shared", "9", "--format", "qcow2", "--socket"]);
        serve.arg(socket).arg(dir.join(image));
        serve
    };
    Server::start("", serve).expect("qemu-nbd serves")
}

fn qemu_writes(dir: &Path, image: &str) -> Finished {
    command::finish(Command::new("qemu-io").current_dir(dir).args([
        "-f",
        "qcow2",
        "-c",
        "write 0 512",
        image,
    ]))
}

fn mica_on(dir: &Path, verb: &[&str], images: &[&str]) -> Finished {
    let images = images.iter().map(|image| dir.join(image).display().to_string());
    mica::run(verb.iter().map(|word| (*word).to_owned()).chain(images))
}

#[track_caller]
fn refused_by_qemu(said: &Finished) {
    assert!(said.stderr.contains("lock"), "QEMU wrote beside mica: {said}");
}

#[track_caller]
fn refused_by_mica(said: Finished, image: &str, holder: &str) {
    let line = said.refusal();
    let words = [image, "another process holds the image for writing", holder];
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
    assert_eq!(line.matches(image).count(), 1, "it is named once: {line}");
}

#[test]
fn qemu_does_not_write_what_mica_reads_and_reads_it_too() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let server = serve_by_mica(dir, "top.qcow2", &["--read-only"]);
    for image in ["top.qcow2", "base.qcow2"] {
        refused_by_qemu(&qemu_writes(dir, image));
        qemu::img(dir, ["info", image]).ok();
        qemu::img(dir, ["check", image]).ok();
    }
    refused_by_qemu(&qemu::img(dir, ["commit", "-f", "qcow2", "top.qcow2"]));
    drop(server);
    qemu_writes(dir, "top.qcow2").ok();
}

#[test]
fn qemu_does_not_read_what_mica_writes_but_what_lies_beneath() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let server = serve_by_mica(dir, "top.qcow2", &[]);
    refused_by_qemu(&qemu_writes(dir, "top.qcow2"));
    refused_by_qemu(&qemu::img(dir, ["info", "top.qcow2"]));
    qemu::img(dir, ["info", "-U", "top.qcow2"]).ok();
    refused_by_qemu(&qemu_writes(dir, "base.qcow2"));
    qemu::img(dir, ["info", "base.qcow2"]).ok();
    refused_by_mica(mica_on(dir, &["info"], &["top.qcow2"]), "top.qcow2", "(mica, process");
    drop(server);
    qemu_writes(dir, "top.qcow2").ok();
}

#[test]
fn mica_does_not_read_what_qemu_writes_unless_it_is_told_to() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let server = serve_by_qemu(dir, "top.qcow2");
    let holder = format!("(qemu-nbd, process {})", server.pid());
    for verb in ["info", "map", "check"] {
        refused_by_mica(mica_on(dir, &[verb], &["top.qcow2"]), "top.qcow2", &holder);
        mica_on(dir, &[verb, "--force-share"], &["top.qcow2"]).ok();
        mica_on(dir, &[verb, "-U"], &["top.qcow2"]).ok();
        mica_on(dir, &[verb], &["base.qcow2"]).ok();
    }
    let both = ["base.qcow2", "top.qcow2"];
    refused_by_mica(mica_on(dir, &["compare"], &both), "top.qcow2", &holder);
    assert_eq!(mica_on(dir, &["compare", "-U"], &both).code(), Some(1), "they differ");
    let socket = dir.join("socket").display().to_string();
    for mode in [&[][..], &["--read-only"]] {
        let mut verb = vec!["serve", "--nbd", &socket];
        verb.extend_from_slice(mode);
        refused_by_mica(mica_on(dir, &verb, &["top.qcow2"]), "top.qcow2", &holder);
    }
    drop(server);
    mica_on(dir, &["info"], &["top.qcow2"]).ok();
}

#[test]
fn mica_does_not_serve_over_a_layer_that_qemu_writes() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let server = serve_by_qemu(dir, "base.qcow2");
    let holder = format!("(qemu-nbd, process {})", server.pid());
    let socket = dir.join("socket").display().to_string();
    for mode in [&[][..], &["--read-only"]] {
        let mut verb = vec!["serve", "--nbd", &socket];
        verb.extend_from_slice(mode);
        refused_by_mica(mica_on(dir, &verb, &["top.qcow2"]), "base.qcow2", &holder);
    }
}

#[test]
fn several_readers_share_a_base_with_each_other_and_with_qemu() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    qemu::overlay(dir, "clone.qcow2", "base.qcow2", &[]);
    qemu::overlay(dir, "third.qcow2", "base.qcow2", &[]);
    let _first = serve_by_mica(dir, "top.qcow2", &[]);
    let _second = serve_by_mica(dir, "clone.qcow2", &["--read-only"]);
    let _qemu = serve_by_qemu(dir, "third.qcow2");
    let _again = serve_by_mica(dir, "clone.qcow2", &["--read-only"]);
    mica_on(dir, &["index", "build"], &["clone.qcow2"]).ok();
    refused_by_qemu(&qemu_writes(dir, "base.qcow2"));
}

/// With few descriptors, most layers of the chain are closed again, and their locks released. It
/// still serves, and the active layer's lock stays.
#[test]
fn active_layer_stays_locked_when_descriptors_are_short() {
    if !tools::present(&TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    chain(dir);
    let mut below = "top.qcow2".to_owned();
    for number in 0..60 {
        let name = format!("layer{number}.qcow2");
        qemu::overlay(dir, &name, &below, &[]);
        below = name;
    }
    let image = dir.join(&below);
    let server = Server::start("", |socket| {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -n 120; exec \"$@\"", "sh"]).arg(mica::binary());
        shell.arg("serve").arg("--nbd").arg(socket).arg(&image);
        shell
    });
    let server = server.expect("mica serves");
    refused_by_qemu(&qemu_writes(dir, &below));
    refused_by_qemu(&qemu::img(dir, ["info", &below]));
    assert!(
        qemu::img(dir, ["compare", "-f", "raw", "-F", "qcow2", &server.uri(), "top.qcow2"])
            .status
            .success()
    );
}
