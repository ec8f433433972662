//! Everything that CI runs, in the order in which it fails soonest.

use crate::{setup, tidy};
use anyhow::{Context, Result, bail, ensure};
use mica_tests::shell;
use std::io::{BufRead, BufReader};
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

/// Runs it all; the last line of output counts the tests.
pub(crate) fn run() -> Result<()> {
    if !setup::is_done() {
        setup::run()?;
    }
    shell::run(&mut shell::cargo(["fmt", "--all", "--check"]))?;
    tidy::run()?;
    let strict = ["--", "-D", "warnings"];
    let clippy = ["clippy", "--workspace", "--all-targets", "--locked"];
    shell::run(shell::cargo(clippy).args(strict))?;
    let docs = ["doc", "--workspace", "--no-deps", "--document-private-items", "--locked"];
    shell::run(shell::cargo(docs).env("RUSTDOCFLAGS", "-D warnings"))?;
    deny()?;
    let counts = test()?;
    println!("{} passed, {} failed, {} skipped", counts.passed, counts.failed, counts.skipped);
    ensure!(counts.passed > 0, "no test was run");
    ensure!(counts.failed == 0 && counts.clean, "tests failed");
    Ok(())
}

/// cargo-deny where it is installed; else the licence part of it, done here.
fn deny() -> Result<()> {
    let there = Command::new("cargo-deny").arg("--version").stdout(Stdio::null()).status();
    if there.is_ok_and(|status| status.success()) {
        return shell::run(&mut shell::cargo(["deny", "check", "licenses", "bans", "sources"]));
    }
    println!("\ncargo-deny is NOT INSTALLED: only licences are checked, by xtask itself");
    let metadata = shell::cargo(["metadata", "--format-version", "1", "--locked"]).output()?;
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

/// Whether an SPDX expression can be met with what we take: each part of an AND by one of an OR.
fn licence_is_fine(expression: &str) -> bool {
    let expression = expression.replace(['(', ')'], " ").replace('/', " OR ");
    expression
        .split(" AND ")
        .all(|part| part.split(" OR ").any(|licence| LICENCES.contains(&licence.trim())))
}

/// Tests of all test programs together.
#[derive(Default)]
struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
    /// Whether every test program ended well.
    clean: bool,
}

/// Runs all tests, shows what they say, and counts.
fn test() -> Result<Counts> {
    let mut command = shell::cargo(["test", "--workspace", "--no-fail-fast", "--locked"]);
    // Under CI a test whose tools are missing fails instead of being skipped.
    command.env("CI", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
    shell::show(&command);
    let mut child = command.spawn().context("starting cargo test")?;
    let stderr = BufReader::new(child.stderr.take().context("no output")?);
    // What is skipped says so there, past the capture of output.
    let skipped = std::thread::spawn(move || {
        let lines = stderr.lines().map_while(Result::ok).inspect(|line| eprintln!("{line}"));
        lines.filter(|line| line.starts_with("SKIPPED ")).count() as u64
    });
    let mut counts = Counts::default();
    for line in BufReader::new(child.stdout.take().context("no output")?).lines() {
        let line = line?;
        println!("{line}");
        if let Some(result) = line.strip_prefix("test result: ") {
            let [passed, failed, ignored] =
                ["passed", "failed", "ignored"].map(|what| count(result, what));
            counts.passed += passed;
            counts.failed += failed;
            counts.skipped += ignored;
        }
    }
    let Ok(skipped) = skipped.join() else { bail!("counting skipped tests failed") };
    counts.passed = counts.passed.saturating_sub(skipped);
    counts.skipped += skipped;
    counts.clean = child.wait()?.success();
    Ok(counts)
}

/// The number before `what` in libtest's `ok. 3 passed; 0 failed; ...`.
fn count(result: &str, what: &str) -> u64 {
    let words: Vec<_> = result.split([' ', ';']).filter(|word| !word.is_empty()).collect();
    let at = words.iter().position(|word| *word == what);
    at.and_then(|at| words.get(at.checked_sub(1)?)?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_of_libtest_are_counted() {
        let line = "FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out";
        assert_eq!(["passed", "failed", "ignored"].map(|what| count(line, what)), [12, 3, 1]);
    }

    #[test]
    fn licences_are_judged_by_their_parts() {
        assert!(licence_is_fine("MIT OR GPL-2.0"));
        assert!(licence_is_fine("MIT/Apache-2.0"));
        assert!(licence_is_fine("(MIT OR Apache-2.0) AND Unicode-3.0"));
        assert!(!licence_is_fine("MIT AND GPL-2.0"));
        assert!(!licence_is_fine("none"));
    }
}
