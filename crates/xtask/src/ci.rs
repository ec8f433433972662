//! Everything that CI runs, in the order in which it fails soonest.

mod clock;
mod suite;

use crate::{setup, tidy};
use anyhow::{Context, Result, ensure};
use mica_tests::shell;
use std::process::{Command, Stdio};

/// Licences that what we link may have, beside our own (the list of deny.toml).
const LICENCES: &[&str] = &[
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
    "0BSD",
    "BSL-1.0",
];

/// What is said, in the middle and at the end, where there are no lints.
const NO_CLIPPY: &str = "clippy is NOT INSTALLED: nothing was linted (rustup component add clippy; Debian 12: \
     rust-web-clippy)";

/// How much of it.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// What finds most for its time: format, style, lints, and tests beside the code.
    #[arg(long)]
    quick: bool,
}

/// Runs it all; the last line of output counts the tests.
pub(crate) fn run(options: &Options) -> Result<()> {
    if !options.quick && !setup::is_done() {
        setup::run()?;
    }
    let mut clock = clock::Clock::start();
    shell::run(&mut shell::cargo(["fmt", "--all", "--check"]))?;
    tidy::run()?;
    clock.lap("format and style");
    let has_lints = clippy()?;
    clock.lap("clippy");
    if !options.quick {
        let docs = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
        shell::run(shell::cargo(docs).env("RUSTDOCFLAGS", "-D warnings"))?;
        deny()?;
        clock.lap("documentation and licences");
    }
    let what = if options.quick { suite::What::Quick } else { suite::What::All };
    let counts = suite::run(what, &mut clock)?;
    clock.tell();
    if !has_lints {
        println!("{NO_CLIPPY}");
    }
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    ensure!(counts.passed > 0, "no test was run");
    ensure!(counts.failed == 0 && counts.clean, "tests failed");
    Ok(())
}

/// The lints. False if clippy is not installed: a toolchain of a distribution may lack it. Under CI
/// that is an error.
fn clippy() -> Result<bool> {
    let version = shell::cargo(["clippy", "--version"]).stderr(Stdio::null()).output();
    if !version.is_ok_and(|output| output.status.success()) && std::env::var_os("CI").is_none() {
        println!("\n{NO_CLIPPY}");
        return Ok(false);
    }
    let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    shell::run(&mut shell::cargo(lints))?;
    Ok(true)
}

/// cargo-deny if it is installed; else the licence part of it, done here.
fn deny() -> Result<()> {
    let there = Command::new("cargo-deny").arg("--version").stdout(Stdio::null()).status();
    if there.is_ok_and(|status| status.success()) {
        return shell::run(&mut shell::cargo(["deny", "check", "licenses", "bans", "sources"]));
    }
    println!("\ncargo-deny is NOT INSTALLED: only licences are checked, by xtask itself");
    // What is linked on the targets of deny.toml.
    let metadata = shell::cargo(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .args(["--filter-platform", "aarch64-unknown-linux-gnu"])
        .output()?;
    ensure!(metadata.status.success(), "cargo metadata: {}", metadata.status);
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let refused: Vec<_> = packages
        .iter()
        .filter(|package| !licence_is_fine(package["license"].as_str().unwrap_or("none")))
        .map(|package| format!("{}: {}", package["name"], package["license"]))
        .collect();
    ensure!(refused.is_empty(), "licences that we do not take:\n{}", refused.join("\n"));
    println!("{} packages, all of them under licences that we take", packages.len());
    Ok(())
}

/// Whether the licences we accept satisfy an SPDX expression: each part of an AND by one of an OR.
fn licence_is_fine(expression: &str) -> bool {
    let expression = expression.replace(['(', ')'], " ").replace('/', " OR ");
    expression
        .split(" AND ")
        .all(|part| part.split(" OR ").any(|licence| LICENCES.contains(&licence.trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn licences_are_judged_by_their_parts() {
        assert!(licence_is_fine("MIT OR GPL-2.0"));
        assert!(licence_is_fine("MIT/Apache-2.0"));
        assert!(licence_is_fine("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!licence_is_fine("MIT AND GPL-2.0"));
        assert!(!licence_is_fine("none"));
    }
}
