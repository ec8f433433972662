//! Words that came back although something better was agreed on: names in code that do not say what
//! they are, and phrases in comments, messages and pages that are no idiomatic English.
//!
//! A name counts where it is a part of an identifier between underscores; comments and texts in
//! quotes may have it. A phrase counts anywhere, as whole words, but on one line only. What was
//! written once and stays (the history, results of measurements) is left alone.

use super::{Finding, scan};
use std::path::Path;

/// Parts of identifiers, and what to use instead.
const NAMES: &[(&str, &str)] = &[
    ("if_much", "say what is measured, as in flush_if_slow_to_write_out"),
    ("Told", "say what it is: a report, a reply, a notice"),
    ("told_len", "published_len"),
    ("tell_len", "publish_len"),
    ("tells_life", "reports_remounts"),
    ("unmake", "delete, abort or undo"),
    ("write_slowly", "write_allocating"),
    ("waits_untold", "lacks_nowait_writes"),
    ("sockets_come_along", "has_inherited_sockets"),
    ("idle_option", "ineffective_option"),
    ("handovers_of_the_dead", "orphaned_redo_logs"),
    ("are_awaited", "a setter is a verb: mark_opening"),
    ("MustEnd", "CompletionGuard"),
    ("Footing", "LogBaseline"),
];

/// Phrases, and what to write instead. Put together here, so that this file has none of them.
const PHRASES: &[(&str, &str)] = &[
    (concat!("an", "ew"), "again, from scratch, rebuilt or remounted"),
    (concat!("opens it", " next"), "the next process to open it"),
    (concat!("so many bytes", " a second"), "limit ... to this many bytes per second"),
    (concat!("as of", " qemu-img"), "same as qemu-img"),
    (concat!("is a lie", " of"), "is corrupt"),
];

/// Finds these words in a file.
pub(super) fn check(file: &Path, text: &str, findings: &mut Vec<Finding>) {
    let kind = file.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
    let is_history = file == Path::new("CHANGELOG.md") || file.starts_with("bench/results");
    if is_history || !matches!(kind, "rs" | "md") {
        return;
    }
    let mut report = |number: usize, word: &str, instead: &str| {
        let what = format!("'{word}': better: {instead}");
        findings.push(Finding::new(format!("{}:{number}", file.display()), what));
    };
    for (number, line) in (1..).zip(text.lines()) {
        for (phrase, instead) in PHRASES.iter().filter(|(phrase, _)| has_phrase(line, phrase)) {
            report(number, phrase, instead);
        }
    }
    if kind != "rs" {
        return;
    }
    for (number, line) in (1..).zip(scan::code_only(text).lines()) {
        for (name, instead) in NAMES.iter().filter(|(name, _)| has_name(line, name)) {
            report(number, name, instead);
        }
    }
}

/// Whether `line` has `phrase` as whole words, in letters of any case.
fn has_phrase(line: &str, phrase: &str) -> bool {
    let line = line.to_lowercase();
    let is_edge = |next: Option<char>| !next.is_some_and(|next| next.is_alphanumeric());
    line.match_indices(phrase).any(|(at, found)| {
        is_edge(line[..at].chars().next_back()) && is_edge(line[at + found.len()..].chars().next())
    })
}

/// Whether an identifier in `line` has `name` as a part.
fn has_name(line: &str, name: &str) -> bool {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_';
    let part = format!("_{name}_");
    line.contains(name)
        && line.split(|letter| !is_part(letter)).any(|word| format!("_{word}_").contains(&part))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(file: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(Path::new(file), text, &mut findings);
        findings.into_iter().map(|found| format!("{}: {}", found.place, found.what)).collect()
    }

    #[test]
    fn words_that_came_back_are_found_with_what_to_write_instead() {
        let code = "fn flush_if_much() {}\nstruct Told;\nfn unmake_part() {}\n";
        let all = found("crates/a/src/lib.rs", code);
        assert_eq!(all.len(), 3, "{all:?}");
        assert!(all[0].starts_with("crates/a/src/lib.rs:1: 'if_much': better: "), "{all:?}");
        let page = concat!("It is built an", "ew.\n\nWho opens it", " next reads it.\n");
        let all = found("docs/a.md", page);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[1].starts_with("docs/a.md:3: "), "{all:?}");
    }

    #[test]
    fn words_that_only_look_like_them_are_let_pass() {
        let code = "/// Told of disks, it says if_much.\nfn a() { b(\"Told\") }\nstruct ToldBy;\n\
                    fn if_muchness() {}\nlet remade = 1;\n// From an ewe; a new one.\n";
        assert_eq!(found("crates/a/src/lib.rs", code), Vec::<String>::new());
        let history = concat!("It is built an", "ew.\n");
        assert_eq!(found("CHANGELOG.md", history), Vec::<String>::new());
        assert_eq!(found("bench/results/a.md", history), Vec::<String>::new());
        assert_eq!(found("a.toml", history), Vec::<String>::new());
    }
}
