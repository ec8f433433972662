//! The machine that a bench runs on: without it figures mean nothing.

use anyhow::{Context as _, Result};
use mica_tests::shell;
use std::fs;
use std::process::Command;

/// The machine that it was measured on.
pub(super) struct Machine {
    /// The date, as in the names of results.
    pub(super) date: String,
    /// Facts about it: name and value.
    pub(super) facts: Vec<(String, String)>,
}

impl Machine {
    /// Queries the machine and the programs on it.
    ///
    /// # Errors
    /// If it does not even know the date.
    pub(super) fn query() -> Result<Self> {
        let says = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).current_dir(shell::root()).output();
            let said = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
            said.ok().and_then(|said| said.lines().next().map(str::to_owned))
        };
        let date = says("date", &["-u", "+%Y-%m-%d"]).context("no date")?;
        let processors = std::thread::available_parallelism()?.get();
        let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = model.lines().find_map(|line| line.strip_prefix("model name"));
        let model = model.map_or("unknown", |model| model.trim_start_matches([' ', '\t', ':']));
        let mut facts = vec![("processors".to_owned(), format!("{processors} of {model}"))];
        let questions: [(&str, &str, &[&str]); 5] = [
            ("kernel", "uname", &["-sr"]),
            ("mica", "git", &["describe", "--always", "--dirty", "--abbrev=12"]),
            ("QEMU", "qemu-nbd", &["--version"]),
            ("nbdkit", "nbdkit", &["--version"]),
            ("fio", "fio", &["--version"]),
        ];
        for (what, program, args) in questions {
            let said = says(program, args).unwrap_or_else(|| "not installed".to_owned());
            facts.push((what.to_owned(), said));
        }
        Ok(Self { date, facts })
    }
}
