//! QEMU's tools: they create images, change them, and judge them.

use crate::command::{self, Finished};
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

/// Runs `qemu-img` with `args` in `dir`.
///
/// QEMU takes the name of an external data file relative to its own working directory, so images
/// are named from their folder.
///
/// # Panics
/// If it does not end in time.
#[track_caller]
pub fn img<S: AsRef<OsStr>>(dir: &Path, args: impl IntoIterator<Item = S>) -> Finished {
    command::finish(Command::new("qemu-img").current_dir(dir).args(args))
}

/// Runs `qemu-io` commands on an image in `dir`, opened with `options` before it.
///
/// # Panics
/// If it fails, or a command that it was given does.
#[track_caller]
pub fn io(dir: &Path, options: &[&str], image: &str, commands: &[&str]) {
    let mut qemu_io = Command::new("qemu-io");
    qemu_io.current_dir(dir).args(options);
    for command in commands {
        qemu_io.args(["-c", command]);
    }
    let said = command::finish(qemu_io.arg(image)).ok();
    let failed = ["error", "failed", "Pattern verification"];
    assert!(!failed.iter().any(|word| said.contains(word)), "qemu-io {commands:?}: {said}");
}

/// Creates image `name` in `dir` with `qemu-img create`.
///
/// # Panics
/// If it cannot be created.
#[track_caller]
pub fn create(dir: &Path, name: &str, options: &[&str], size: &str) {
    let mut args = vec!["create", "-q", "-f", "qcow2"];
    args.extend_from_slice(options);
    args.push(name);
    if !size.is_empty() {
        args.push(size);
    }
    img(dir, args).ok();
}

/// Creates overlay `name` on qcow2 image `backing`, both in `dir`.
///
/// # Panics
/// If it cannot be created.
#[track_caller]
pub fn overlay(dir: &Path, name: &str, backing: &str, options: &[&str]) {
    let mut all = vec!["-b", backing, "-F", "qcow2"];
    all.extend_from_slice(options);
    create(dir, name, &all, "");
}

/// Writes the whole disk of `image` in `dir`, as QEMU reads it, to raw file `raw` there.
///
/// # Panics
/// If QEMU cannot read it.
#[track_caller]
pub fn flatten(dir: &Path, image: &str, raw: &str) {
    img(dir, ["convert", "-f", "qcow2", "-O", "raw", image, raw]).ok();
}

/// Checks that two images, each with its format, have the same length and content.
///
/// # Panics
/// If they have not.
#[track_caller]
pub fn same(dir: &Path, (format, one): (&str, &str), (other_format, other): (&str, &str)) {
    let said = img(dir, ["compare", "-f", format, "-F", other_format, one, other]);
    assert_eq!(said.code(), Some(0), "{said}");
    assert!(!said.stdout.contains("mismatch"), "{said}");
}
