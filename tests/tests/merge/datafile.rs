//! Layers with their data in an external file, of which not even the header is written while they
//! are frozen.

use mica_tests::server::Server;
use mica_tests::{command, mica, qemu, tools};
use std::path::Path;

const TOOLS: &[tools::Tool] = &[tools::QEMU_IMG, tools::QEMU_IO];

/// Base, mid and top, and between the two the layer `apart`, whose data are in a file of their own.
fn chain(folder: &Path) {
    qemu::create(folder, "base.qcow2", &[], "4M");
    qemu::io(folder, &[], "base.qcow2", &["write -q -P 1 0 4M"]);
    qemu::overlay(folder, "mid.qcow2", "base.qcow2", &[]);
    qemu::io(folder, &[], "mid.qcow2", &["write -q -P 2 1M 1M"]);
    qemu::overlay(folder, "apart.qcow2", "mid.qcow2", &["-o", "data_file=apart.data"]);
    qemu::io(folder, &[], "apart.qcow2", &["write -q -P 3 2M 1M"]);
    qemu::overlay(folder, "top.qcow2", "apart.qcow2", &[]);
    qemu::flatten(folder, "base.qcow2", "base.raw");
    qemu::flatten(folder, "top.qcow2", "top.raw");
}

/// The story: what goes down was copied into the base, and only then the layer above, which had to
/// name the base, turned out not to be written: the base was another one, and could not be cloned.
#[test]
fn commit_beneath_a_layer_with_its_data_elsewhere_is_refused_before_anything_changes() {
    if !tools::present(TOOLS) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    chain(folder);
    let control = folder.join("control").display().to_string();
    let options = ["--control", &control];
    let server = Server::mica_writable(&folder.join("top.qcow2"), "qcow2", &options);
    let server = server.expect("served");
    let (base, mid) = (folder.join("base.qcow2"), folder.join("mid.qcow2"));
    let [base, mid] = [base, mid].map(|path| path.display().to_string());
    let commit = ["ctl", "--control", &control, "commit", "top", "--base", &base, "--top", &mid];
    // Also if nobody waits for what becomes of it.
    for more in [&[][..], &["--background"]] {
        let refused = mica::run(commit.iter().chain(more)).refusal();
        let why = "apart.qcow2: it keeps its data in an external file";
        assert!(refused.contains(why), "{more:?}: {refused}");
    }
    server.stop().expect("it stops");
    qemu::same(folder, ("qcow2", "base.qcow2"), ("raw", "base.raw"));
    qemu::same(folder, ("qcow2", "top.qcow2"), ("raw", "top.raw"));
    let clone = folder.join("clone.qcow2").display().to_string();
    command::run(&mica::binary().display().to_string(), ["clone", &base, &clone]).ok();
}
