//! What may be longer than the rules say, and how long.

use super::Finding;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const FILE: &str = "crates/xtask/src/tidy/allowed.txt";

/// Places that may be longer than the rules say.
#[derive(Default)]
pub(super) struct Allowed {
    entries: BTreeMap<String, Entry>,
}

struct Entry {
    lines_max: usize,
    lines: Option<usize>,
}

impl Allowed {
    /// Reads the list: `place lines` on each line, `#` before remarks.
    pub(super) fn load(root: &Path) -> Result<Self> {
        let text =
            fs::read_to_string(root.join(FILE)).with_context(|| format!("reading {FILE}"))?;
        let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let entries = lines.map(|line| {
            let (place, lines) = line.split_once(' ').with_context(|| format!("{FILE}: {line}"))?;
            let lines_max = lines.trim().parse().with_context(|| format!("{FILE}: {line}"))?;
            Ok((place.to_owned(), Entry { lines_max, lines: None }))
        });
        Ok(Self { entries: entries.collect::<Result<_>>()? })
    }

    /// Whether `place` may have `lines` lines.
    pub(super) fn allows(&mut self, place: &str, lines: usize) -> bool {
        let Some(entry) = self.entries.get_mut(place) else { return false };
        entry.lines = Some(lines);
        lines <= entry.lines_max
    }

    /// Entries that nothing needs any more.
    pub(super) fn unused(&self) -> Vec<Finding> {
        let unused = self.entries.iter().filter(|(_, entry)| entry.lines.is_none());
        unused
            .map(|(place, _)| Finding::new(FILE, format!("'{place}' is no longer needed")))
            .collect()
    }

    /// Says what is longer than the rules say.
    pub(super) fn report(&self) {
        for (place, entry) in &self.entries {
            if let Some(lines) = entry.lines {
                println!("tidy: allowed: {place} has {lines} lines (at most {})", entry.lines_max);
            }
        }
    }
}
