//! Benches and the demonstration are a program of their own, `crates/bench`, built for release.

use crate::setup;
use anyhow::{Context, Result, ensure};
use mica_tests::shell;
use std::ffi::OsString;

/// Measures what `words` say.
pub(crate) fn bench(words: &[OsString]) -> Result<()> {
    program("bench", words)
}

/// Demonstrates, with the options in `words`.
pub(crate) fn demo(words: &[OsString]) -> Result<()> {
    if !setup::missing().is_empty() {
        setup::run()?;
    }
    program("demo", words)
}

fn program(verb: &str, words: &[OsString]) -> Result<()> {
    let mut command = shell::cargo(["run", "--quiet", "--release", "--package", "mica-bench"]);
    // Paths among the words are meant from where the caller is.
    command.current_dir(std::env::current_dir().context("the working folder")?);
    let status = command.arg("--").arg(verb).args(words).status().context("starting cargo")?;
    ensure!(status.success(), "{verb}: {status}");
    Ok(())
}
