//! Each page of a format is held to the code by a test that reads it.

use super::Finding;
use std::path::{Path, PathBuf};

const FOLDER: &str = "docs/formats";

/// Looks for a test that includes the page, for each page among `files`.
pub(super) fn check(root: &Path, files: &[PathBuf], findings: &mut Vec<Finding>) {
    let pages = files.iter().filter(|file| file.parent() == Some(Path::new(FOLDER)));
    let pages: Vec<_> = pages.filter_map(|page| page.to_str()).collect();
    let code = files.iter().filter(|file| file.extension().is_some_and(|kind| kind == "rs"));
    let texts: Vec<_> =
        code.filter_map(|file| std::fs::read_to_string(root.join(file)).ok()).collect();
    for page in unread(&pages, &texts) {
        let what = "no test includes this page: compare its constants and layout with the code";
        findings.push(Finding::new(page, what));
    }
}

/// The pages that no code includes.
fn unread<'a>(pages: &[&'a str], texts: &[String]) -> Vec<&'a str> {
    let includes = |page: &str| {
        let end = format!("/{page}\")");
        texts.iter().any(|text| {
            text.lines().any(|line| line.contains("include_str!(\"") && line.contains(&end))
        })
    };
    pages.iter().copied().filter(|page| !includes(page)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_that_no_test_includes_is_found() {
        let pages = ["docs/formats/one.md", "docs/formats/two.md"];
        // In pieces, as this file is looked at, too.
        let code = ["const PAGE: &str = include", "_str!(\"../../docs/formats/one.md\");"].concat();
        assert_eq!(unread(&pages, &[code]), ["docs/formats/two.md"]);
    }
}
