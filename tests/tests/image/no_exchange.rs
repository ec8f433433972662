//! Files that are replaced where two cannot change places, as on some file systems beneath FUSE:
//! the system calls that would do it fail, and later ones, too.

use mica_tests::command::{self, Finished};
use mica_tests::{mica, tools};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Runs mica where no names can be exchanged, and where what `fails` says fails with an I/O error.
fn mica_without(dir: &Path, fails: &str, args: &[&str]) -> Finished {
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "inject=renameat2:error=EINVAL"]);
    strace.args(["-e", &format!("inject={fails}")]).arg(mica::binary());
    command::finish(strace.current_dir(dir).args(args))
}

fn mica_in(dir: &Path, args: &[&str]) -> Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// A folder with two disks to copy.
fn room() -> Option<tempfile::TempDir> {
    if !tools::present(&[tools::STRACE]) {
        return None;
    }
    let dir = tempfile::tempdir().expect("a folder");
    for (name, byte) in [("one.raw", 1), ("two.raw", 2)] {
        fs::write(dir.path().join(name), vec![byte; 256 << 10]).expect("written");
    }
    Some(dir)
}

/// The story: a verb failed, and what it was to replace was gone all the same.
#[test]
fn failure_after_the_old_file_is_gone_says_that_the_new_one_stays() {
    let Some(dir) = room() else { return };
    let dir = dir.path();
    for to in ["raw", "qcow2"] {
        let convert = |source| ["convert", "--force", "-f", "raw", "-O", to, source, "disk"];
        mica_in(dir, &convert("one.raw")).ok();
        // That of the folder.
        let said = mica_without(dir, "fsync:error=EIO", &convert("two.raw")).refusal();
        assert!(said.contains("disk is the new file all the same"), "{said}");
        mica_in(dir, &["compare", "-s", "-f", to, "-F", "raw", "disk", "two.raw"]).ok();
    }
}

/// The story: the new image was left without its data file, and the old image without a name.
#[test]
fn new_image_that_stays_names_its_data_file_by_its_second_name() {
    let Some(dir) = room() else { return };
    let dir = dir.path();
    let convert = |source| {
        ["convert", "--force", "-f", "raw", "-o", "data_file=data", source, "disk"].to_vec()
    };
    let shows = |source| {
        mica_in(dir, &["compare", "-s", "-F", "raw", "disk", source]).ok();
    };
    mica_in(dir, &convert("one.raw")).ok();
    // The data file keeps the old place.
    let second = "rename,renameat:error=EIO:when=2";
    let said = mica_without(dir, second, &convert("two.raw")).refusal();
    assert!(said.contains("disk is the new file all the same"), "{said}");
    assert!(said.contains("its data file is") && said.contains(".data.mica-data"), "{said}");
    shows("two.raw");
    mica_in(dir, &convert("one.raw")).ok();
    shows("one.raw");
    assert!(!dir.join(".data.mica-data").exists());
}

/// The story: the old image could be opened again, and showed what the new data file has at the old
/// places.
#[test]
fn old_image_that_has_lost_its_data_file_stays_none() {
    let Some(dir) = room() else { return };
    let dir = dir.path();
    let convert = |source| {
        ["convert", "--force", "-f", "raw", "-o", "data_file=data", source, "disk"].to_vec()
    };
    mica_in(dir, &convert("one.raw")).ok();
    // Nor can a file have a second name.
    let mut strace = Command::new("strace");
    strace.args(["-f", "-qq", "-o", "/dev/null", "-e", "inject=renameat2:error=EINVAL"]);
    strace.args(["-e", "inject=link,linkat:error=EPERM"]);
    strace.args(["-e", "inject=rename,renameat:error=EIO:when=2"]).arg(mica::binary());
    let said = command::finish(strace.current_dir(dir).args(convert("two.raw"))).refusal();
    assert!(said.contains("data is the new file all the same"), "{said}");
    assert!(said.contains("disk has lost its data file"), "{said}");
    let said = mica_in(dir, &["info", "disk"]).refusal();
    assert!(said.contains("version"), "{said}");
    mica_in(dir, &convert("two.raw")).ok();
    mica_in(dir, &["compare", "-s", "-F", "raw", "disk", "two.raw"]).ok();
}
