//! Checks that the tree drawn in ARCHITECTURE.md is the real one.

use super::Finding;
use anyhow::{Context, Result};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const PAGE: &str = "ARCHITECTURE.md";
const HEADING: &str = "## The tree";

/// Compares the drawing with the folders that `files` are in: those at the top, and the crates.
pub(super) fn check(root: &Path, files: &[PathBuf], findings: &mut Vec<Finding>) -> Result<()> {
    let page = fs::read_to_string(root.join(PAGE)).with_context(|| format!("reading {PAGE}"))?;
    let drawn = drawn(&page);
    let real: BTreeSet<String> = files.iter().flat_map(|file| folders(file)).collect();
    for missing in real.difference(&drawn) {
        findings.push(Finding::new(PAGE, format!("the tree lacks {missing}")));
    }
    for gone in drawn.difference(&real) {
        findings.push(Finding::new(PAGE, format!("the tree draws {gone}, which is not there")));
    }
    Ok(())
}

/// Folders of `file` that the drawing has to show.
fn folders(file: &Path) -> Vec<String> {
    let mut names = file.parent().into_iter().flat_map(Path::components);
    let mut name = || names.next().and_then(|part| part.as_os_str().to_str());
    match (name(), name()) {
        (Some(top), _) if top.starts_with('.') => Vec::new(),
        (Some("crates"), Some(crate_name)) => {
            vec!["crates/".to_owned(), format!("crates/{crate_name}/")]
        }
        (Some(top), _) => vec![format!("{top}/")],
        _ => Vec::new(),
    }
}

/// Folders in the first block of the page's section about the tree: indented names with a slash.
fn drawn(page: &str) -> BTreeSet<String> {
    let section = page.split_once(HEADING).map_or("", |(_, section)| section);
    let block = section.split("```").nth(1).unwrap_or_default();
    let mut parent = String::new();
    let mut drawn = BTreeSet::new();
    for line in block.lines().skip(1) {
        let Some(name) = line.split_whitespace().next().filter(|name| name.ends_with('/')) else {
            continue;
        };
        if line.starts_with(' ') {
            drawn.insert(format!("{parent}{name}"));
        } else {
            name.clone_into(&mut parent);
            drawn.insert(name.to_owned());
        }
    }
    drawn
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drawing_is_read_by_its_indentation() {
        let page = "# x\n## The tree\n\n```text\ncrates/\n  units/   words\ntests/   more\n```\n";
        let drawn: Vec<_> = drawn(page).into_iter().collect();
        assert_eq!(drawn, ["crates/", "crates/units/", "tests/"]);
        assert_eq!(folders(Path::new("crates/units/src/lib.rs")), ["crates/", "crates/units/"]);
        assert_eq!(folders(Path::new("README.md")), Vec::<String>::new());
        assert_eq!(folders(Path::new(".ci/run")), Vec::<String>::new());
    }
}
