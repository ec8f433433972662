//! Runs programs visibly: both the command and its output are shown.

use anyhow::{Context, Result, ensure};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(1).unwrap_or(Path::new(".")).to_owned()
}

/// A cargo command in the workspace.
pub fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root());
    command
}

/// Cargo's target directory.
///
/// # Errors
/// If cargo does not report it.
pub fn target() -> Result<PathBuf> {
    let metadata = cargo(["metadata", "--no-deps", "--format-version", "1"]).output()?;
    ensure!(metadata.status.success(), "cargo metadata: {}", metadata.status);
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout)?;
    Ok(metadata["target_directory"].as_str().context("no target folder")?.into())
}

/// Shows `command` and runs it.
///
/// # Errors
/// If it cannot be started, or fails.
pub fn run(command: &mut Command) -> Result<()> {
    show(command);
    let status = command.status().with_context(|| format!("starting {command:?}"))?;
    ensure!(status.success(), "{command:?}: {status}");
    Ok(())
}

/// Shows what is about to run.
pub fn show(command: &Command) {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(OsStr::to_string_lossy).collect();
    println!("\n$ {}", words.join(" "));
}
