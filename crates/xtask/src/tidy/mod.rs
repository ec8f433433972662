//! The project's style, as far as a program can check it and rustfmt and clippy do not.
//!
//! A rule reports where it is broken and what to do. Code that predates a rule, or breaks it for a
//! reason, is listed in `tidy/allowed.txt` with its permitted size; an entry that is no longer
//! needed must be removed, so the list only shrinks.

mod allowed;
mod arrows;
mod circles;
mod formats;
mod names;
mod scan;
mod source;
mod tree;
mod words;

use anyhow::{Context, Result, bail};
use mica_tests::shell;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A broken rule.
struct Finding {
    /// Where: a file, perhaps with a line.
    place: String,
    /// What is wrong, and what to do about it.
    what: String,
}

impl Finding {
    fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self { place: place.into(), what: what.into() }
    }
}

/// Checks all files that git knows; fails if a rule is broken.
pub(crate) fn run() -> Result<()> {
    let root = shell::root();
    let files = tracked(&root)?;
    let mut allowed = allowed::Allowed::load(&root)?;
    let mut findings = Vec::new();
    for file in &files {
        // A file that was deleted but not committed does not exist.
        let Ok(bytes) = std::fs::read(root.join(file)) else { continue };
        let Ok(text) = String::from_utf8(bytes) else { continue };
        source::check(file, &text, &mut allowed, &mut findings);
        words::check(file, &text, &mut findings);
    }
    arrows::check(&mut findings)?;
    circles::check(&root, &files, &mut findings)?;
    tree::check(&root, &files, &mut findings)?;
    formats::check(&root, &files, &mut findings);
    findings.extend(allowed.unused());
    for Finding { place, what } in &findings {
        eprintln!("{place}: {what}");
    }
    allowed.report();
    if findings.is_empty() {
        println!("tidy: {} files are in style", files.len());
        return Ok(());
    }
    bail!("tidy: {} findings", findings.len());
}

/// Files of the project, as git lists them, including those about to be added.
fn tracked(root: &Path) -> Result<Vec<PathBuf>> {
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    let listed = Command::new("git").args(list).current_dir(root).output();
    let listed = listed.context("git, which lists the files, cannot be started")?;
    if !listed.status.success() {
        bail!("git ls-files: {}", String::from_utf8_lossy(&listed.stderr));
    }
    let listed = String::from_utf8_lossy(&listed.stdout);
    let mut files: Vec<_> = listed.lines().map(PathBuf::from).collect();
    files.sort();
    files.dedup();
    Ok(files)
}
