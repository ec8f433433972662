//! The commands of the guide to volumes do what it says, in a bucket.

use mica_tests::bucket::BucketServer;
use mica_tests::{command, mica, tools};
use std::process::Command;

const GUIDE: &str = include_str!("../../../docs/volumes.md");

/// Whatever happens, no server stays.
const CLEANUP: &str =
    "trap 'for pid in *.pid; do kill -9 \"$(cat \"$pid\")\" || true; done' EXIT\n";

#[test]
fn commands_of_the_guide_succeed_one_after_the_other() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let Some(moto) = BucketServer::start() else { return };
    moto.make_bucket("bucket");
    let mut commands = CLEANUP.to_owned();
    for block in GUIDE.split("```sh\n").skip(1) {
        commands.push_str(block.split_once("```").expect("its end").0);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let programs = mica::binary().parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("bash");
    shell.args(["-euo", "pipefail", "-c", &commands]).current_dir(folder.path());
    shell.env("PATH", format!("{programs}:{path}")).envs(moto.environment());
    let said = command::finish(&mut shell).ok();
    let received = "@monday: received";
    assert!(said.contains(received) && said.contains("nothing is damaged"), "{said}");
}
