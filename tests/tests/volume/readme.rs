//! The commands of the README do what it says.

use mica_tests::{command, mica, tools};
use std::process::Command;

const README: &str = include_str!("../../../README.md");
const HEADING: &str = "## Disks that any host can attach";

#[test]
fn commands_of_the_readme_about_volumes_succeed() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let (_, section) = README.split_once(HEADING).expect("the section");
    let (_, block) = section.split_once("```sh\n").expect("commands");
    let (commands, _) = block.split_once("```").expect("their end");
    let folder = tempfile::tempdir().expect("a folder");
    let programs = mica::binary().parent().expect("a folder").display().to_string();
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("bash");
    shell.args(["-euo", "pipefail", "-c", commands]).current_dir(folder.path());
    shell.env("PATH", format!("{programs}:{path}"));
    let said = command::finish(&mut shell).ok();
    assert!(said.contains("nothing is damaged"), "{said}");
}
