//! No two files of one crate name each other in a circle: a reader can begin at the bottom.
//!
//! The existing circles are in `tidy/circles.txt`, each as the arrow that has to go and the reason
//! why it is still there. An arrow that no longer closes a circle must be removed from the list.

use super::Finding;
use super::names::{self, Arrows};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};

const FILE: &str = "crates/xtask/src/tidy/circles.txt";

type Arrow = (PathBuf, PathBuf);

/// Checks the crates that `files` belong to.
pub(super) fn check(root: &Path, files: &[PathBuf], findings: &mut Vec<Finding>) -> Result<()> {
    let text = fs::read_to_string(root.join(FILE)).with_context(|| format!("reading {FILE}"))?;
    let listed = listed(&text, findings);
    let mut arrows = Arrows::new();
    for (folder, sources) in crates(root, files) {
        let sources = sources.iter().map(|(file, text)| (*file, text.as_str()));
        arrows.append(&mut names::arrows(&folder, sources));
    }
    judge(arrows, &listed, findings);
    Ok(())
}

/// Sources by the folder in which those of a crate lie.
fn crates<'a>(root: &Path, files: &'a [PathBuf]) -> BTreeMap<PathBuf, Vec<(&'a Path, String)>> {
    let mut crates = BTreeMap::<PathBuf, Vec<_>>::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|kind| kind == "rs")) {
        let folder = file.ancestors().filter(|folder| folder.ends_with("src")).last();
        // A file that was deleted but not committed does not exist.
        if let (Some(folder), Ok(text)) = (folder, fs::read_to_string(root.join(file))) {
            crates.entry(folder.to_owned()).or_default().push((file.as_path(), text));
        }
    }
    crates
}

/// The arrows of the list: `from -> to: reason` on each line, `#` before remarks.
fn listed(text: &str, findings: &mut Vec<Finding>) -> BTreeSet<Arrow> {
    let mut listed = BTreeSet::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let parts = line.split_once(": ").and_then(|(arrow, reason)| {
            let (from, to) = arrow.split_once(" -> ")?;
            (!reason.trim().is_empty()).then_some((from.into(), to.into()))
        });
        match parts {
            Some(arrow) => drop(listed.insert(arrow)),
            None => findings.push(Finding::new(FILE, format!("'{line}': from -> to: reason"))),
        }
    }
    listed
}

fn judge(mut arrows: Arrows, listed: &BTreeSet<Arrow>, findings: &mut Vec<Finding>) {
    let mut taken = BTreeSet::new();
    for (from, to) in listed {
        if arrows.get_mut(from).is_some_and(|others| others.remove(to)) {
            taken.insert((from, to));
        }
    }
    for (from, to) in listed {
        if !taken.contains(&(from, to)) || way(&arrows, to, from).is_none() {
            let what = format!("'{} -> {}' is no longer needed", from.display(), to.display());
            findings.push(Finding::new(FILE, what));
        }
    }
    // One circle at a time, each opened once it is reported.
    while let Some(circle) = circle(&arrows) {
        let names: Vec<_> = circle.iter().map(|file| file.display().to_string()).collect();
        let what = format!(
            "a circle: {} -> {}: move what both need below both",
            names.join(" -> "),
            names[0]
        );
        findings.push(Finding::new(&*names[0], what));
        if let Some(others) = arrows.get_mut(&circle[circle.len() - 1]) {
            others.remove(&circle[0]);
        }
    }
}

/// The shortest circle, if there is one.
fn circle(arrows: &Arrows) -> Option<Vec<PathBuf>> {
    let all = arrows.iter().flat_map(|(from, others)| others.iter().map(move |to| (from, to)));
    all.filter_map(|(from, to)| way(arrows, to, from)).min_by_key(Vec::len)
}

/// The shortest way along arrows from one file to another.
fn way(arrows: &Arrows, from: &Path, to: &Path) -> Option<Vec<PathBuf>> {
    let mut came_from = BTreeMap::from([(from, None)]);
    let mut next = VecDeque::from([from]);
    while let Some(file) = next.pop_front() {
        if file == to {
            let mut way: Vec<_> =
                std::iter::successors(Some(file), |file| came_from.get(file).copied().flatten())
                    .map(Path::to_owned)
                    .collect();
            way.reverse();
            return Some(way);
        }
        for other in arrows.get(file).into_iter().flatten() {
            if !came_from.contains_key(other.as_path()) {
                came_from.insert(other, Some(file));
                next.push_back(other);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judged(arrows: &[(&str, &str)], list: &str) -> Vec<String> {
        let mut all = Arrows::new();
        for (from, to) in arrows {
            all.entry(from.into()).or_default().insert(to.into());
        }
        let mut findings = Vec::new();
        let listed = listed(list, &mut findings);
        judge(all, &listed, &mut findings);
        findings.into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn a_circle_is_found_and_a_chain_is_none() {
        assert!(judged(&[("a", "b"), ("b", "c"), ("a", "c")], "").is_empty());
        let found = judged(&[("a", "b"), ("b", "c"), ("c", "a"), ("c", "d")], "");
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("a circle: "), "{found:?}");
    }

    #[test]
    fn a_listed_arrow_is_let_pass_only_while_it_closes_a_circle() {
        let circle = [("a", "b"), ("b", "a")];
        assert!(judged(&circle, "# why\nb -> a: one is about to go\n").is_empty());
        assert!(judged(&circle[..1], "b -> a: gone\n")[0].contains("no longer needed"));
        assert!(judged(&circle[..1], "a -> b: open\n")[0].contains("no longer needed"));
        assert!(judged(&circle, "b -> a\n")[0].contains("from -> to: reason"));
    }
}
