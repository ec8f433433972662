//! What is given back of a backup.

use mica_tests::{mica, qemu};
use std::path::Path;

/// The disk of the state called `state` in `folder`, restored as `format`, as QEMU reads it.
pub(crate) fn restored(dir: &Path, folder: &str, state: &str, format: &str) -> Vec<u8> {
    let (source, file) = (dir.join(folder), dir.join("restored"));
    let source = format!("{}@{state}", source.display());
    let file_name = file.display().to_string();
    mica::run(["restore", "--force", "-q", "-O", format, &source, &file_name]).ok();
    qemu::img(dir, ["check", "-f", format, "restored"]);
    qemu::img(dir, ["convert", "-f", format, "-O", "raw", "restored", "judge.raw"]).ok();
    std::fs::read(dir.join("judge.raw")).expect("converted")
}
