//! Runs the tests, with cargo-nextest if it is installed: each in its own process, the heavy ones
//! not in parallel (`.config/nextest.toml`). All output is read from its report, so that skipped
//! tests are counted and listed.
//!
//! If it is not installed, `cargo test` runs all of them, which takes longer.

use super::clock::Clock;
use anyhow::{Context, Result, bail};
use mica_tests::shell;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

/// How many tests run at a time.
const THREADS_PER_PROCESSOR: usize = 2;
/// How many of the slowest tests are listed.
const SLOWEST: usize = 12;

/// Which tests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum What {
    All,
    Quick,
}

/// Tests of all test programs together.
#[derive(Default, PartialEq, Eq, Debug)]
pub(super) struct Counts {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) skipped: u64,
    /// Whether every test program succeeded.
    pub(super) clean: bool,
}

/// Builds and runs them, and shows their output.
pub(super) fn run(what: What, clock: &mut Clock) -> Result<Counts> {
    if what == What::All {
        // The program and its tests in one go, so that both share everything they are built from.
        // The tests of the other programs have their code, which the lints see as a whole.
        let build = ["build", "--workspace", "--bin", "mica", "--tests", "--locked"];
        shell::run(&mut shell::cargo(build))?;
        clock.lap("building");
    }
    let program = shell::target()?.join("debug/mica");
    let nextest = shell::cargo(["nextest", "--version"]).stderr(Stdio::null()).output();
    let has_nextest = nextest.is_ok_and(|output| output.status.success());
    let counts = match (has_nextest, what) {
        (true, _) => by_nextest(what, &program)?,
        (false, What::All) => {
            println!(
                "\ncargo-nextest is NOT INSTALLED: cargo test runs the tests, and takes longer"
            );
            by_cargo(&["--workspace"], &program)?
        }
        (false, What::Quick) => {
            println!("\ncargo-nextest is NOT INSTALLED: cargo test runs the tests beside the code");
            by_cargo(&["--workspace", "--lib", "--bins"], &program)?
        }
    };
    clock.lap("tests");
    Ok(counts)
}

fn by_nextest(what: What, program: &Path) -> Result<Counts> {
    let profile = match what {
        What::All => "ci",
        What::Quick => "quick",
    };
    let report = shell::target()?.join("nextest").join(profile).join("junit.xml");
    if report.exists() {
        std::fs::remove_file(&report).context("removing the last report")?;
    }
    let options = ["nextest", "run", "--workspace", "--locked", "--profile", profile];
    let mut command = shell::cargo(options);
    if what == What::Quick {
        command.args(["--lib", "--bins"]);
    }
    // Most of the time many wait for other programs, and for disks.
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    command.arg("--test-threads").arg((processors * THREADS_PER_PROCESSOR).to_string());
    // Under CI a test whose tools are missing fails instead of being skipped.
    if what == What::All {
        command.env("CI", "1");
    }
    command.env("MICA_BIN", program);
    shell::show(&command);
    let clean = command.status().context("starting cargo nextest")?.success();
    let text = std::fs::read_to_string(&report).context("cargo nextest left no report")?;
    let tests = reported(&text)?;
    let mut counts = Counts { clean, ..Counts::default() };
    for test in &tests {
        match &test.end {
            End::Passed => counts.passed += 1,
            End::Failed => counts.failed += 1,
            End::Skipped(why) => {
                counts.skipped += 1;
                println!("{why}");
            }
        }
    }
    let mut slowest: Vec<_> = tests.iter().collect();
    slowest.sort_by(|one, other| other.seconds.total_cmp(&one.seconds));
    println!("\nthe slowest:");
    for test in slowest.iter().take(SLOWEST) {
        println!("{:>7.1} s  {}", test.seconds, test.name);
    }
    Ok(counts)
}

/// A test that was run.
#[derive(PartialEq, Debug)]
struct Test {
    name: String,
    seconds: f64,
    end: End,
}

#[derive(PartialEq, Eq, Debug)]
enum End {
    Passed,
    Failed,
    /// With its output.
    Skipped(String),
}

/// The tests of nextest's report, which is JUnit's.
fn reported(text: &str) -> Result<Vec<Test>> {
    let document = roxmltree::Document::parse(text).context("the report of cargo nextest")?;
    let cases = document.descendants().filter(|node| node.has_tag_name("testcase"));
    let test = |case: roxmltree::Node<'_, '_>| {
        let suite = case.attribute("classname").unwrap_or_default();
        let name = case.attribute("name").context("a test without a name")?;
        let has = |tag| case.children().any(|child| child.has_tag_name(tag));
        let said = case.descendants().filter_map(|node| node.text());
        // libtest's own words may stand before it on the line.
        let mut skipped = said.flat_map(str::lines).filter_map(|line| {
            line.find("SKIPPED").map(|at| &line[at..]).filter(|line| {
                line.strip_prefix("SKIPPED").is_some_and(|rest| rest.starts_with([' ', ':']))
            })
        });
        let end = match (has("failure") || has("error"), skipped.next()) {
            (true, _) => End::Failed,
            (false, Some(why)) => End::Skipped(format!("{name}: {why}")),
            (false, None) => End::Passed,
        };
        let seconds = case.attribute("time").and_then(|time| time.parse().ok()).unwrap_or(0.0);
        Ok(Test { name: format!("{suite} {name}"), seconds, end })
    };
    cases.map(test).collect()
}

fn by_cargo(which: &[&str], program: &Path) -> Result<Counts> {
    let mut command = shell::cargo(["test", "--no-fail-fast", "--locked"]);
    command.args(which).env("CI", "1").env("MICA_BIN", program);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
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
    fn report_shows_what_passed_failed_and_was_skipped() {
        let report = r#"<?xml version="1.0" encoding="UTF-8"?>
<testsuites name="nextest-run" tests="4" failures="1" errors="0">
  <testsuite name="a::b" tests="3" disabled="0" errors="0" failures="1">
    <testcase name="good" classname="a::b" time="0.250">
      <system-out>test good ... ok\nnothing is SKIPPEDhere</system-out>
    </testcase>
    <testcase name="bad" classname="a::b" time="1.000">
      <failure type="test failure">SKIPPED is what it does not say</failure>
    </testcase>
    <testcase name="cannot" classname="a::b" time="0.001">
      <system-err>
SKIPPED cannot: needs fio
</system-err>
    </testcase>
    <testcase name="may_not" classname="a::b" time="0.001">
      <system-out>test may_not ... SKIPPED: not ext4
ok</system-out>
    </testcase>
  </testsuite>
</testsuites>"#;
        let tests = reported(report).expect("a report");
        let ends: Vec<_> = tests.iter().map(|test| &test.end).collect();
        let skipped = |why: &str| End::Skipped(why.to_owned());
        let no_fio = skipped("cannot: SKIPPED cannot: needs fio");
        let no_ext4 = skipped("may_not: SKIPPED: not ext4");
        assert_eq!(ends, [&End::Passed, &End::Failed, &no_fio, &no_ext4]);
        assert_eq!((tests[1].name.as_str(), tests[1].seconds), ("a::b bad", 1.0));
    }
}
