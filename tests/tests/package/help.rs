//! The help of every verb: short on request, and long with examples.

use mica_tests::{command, mica};
use std::process::Command;

/// Widths of terminals.
const WIDTHS: [usize; 2] = [80, 100];
/// The height of a terminal, with the next prompt.
const SCREEN_LINES: usize = 24;
/// What only `--help` has, and under a heading of its own.
const ENGINE: [&str; 7] =
    ["--inject", "--aio", "--cache", "--index-cache", "--index-dir", "--redo-dir", "--coroutines"];

#[track_caller]
pub(super) fn help(words: &[&str], flag: &str, width: usize) -> String {
    let mut mica = Command::new(mica::binary());
    command::finish(mica.args(words).arg(flag).env("COLUMNS", width.to_string())).ok()
}

/// The verbs below `words`.
pub(super) fn verbs(words: &[&str]) -> Vec<String> {
    let help = help(words, "--help", WIDTHS[0]);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.trim().is_empty());
    let names = listed.filter(|line| !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned);
    names.filter(|verb| verb != "help").collect()
}

/// Calls `judge` for every verb, with whether there are verbs below it.
pub(super) fn walk(mut judge: impl FnMut(&[&str], bool)) {
    let mut seen = 0;
    let mut next: Vec<Vec<String>> = verbs(&[]).into_iter().map(|verb| vec![verb]).collect();
    while let Some(words) = next.pop() {
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        let below = verbs(&words);
        judge(&words, !below.is_empty());
        seen += 1;
        let deeper = |word| words.iter().map(|word| (*word).to_owned()).chain([word]).collect();
        next.extend(below.into_iter().map(deeper));
    }
    assert!(seen >= 28, "{seen} verbs");
}

#[test]
fn every_verb_has_a_screen_of_help_and_more_with_examples() {
    judge(&[], WIDTHS[0]);
    walk(|words, _| WIDTHS.iter().for_each(|width| judge(words, *width)));
}

#[test]
fn every_verb_has_json_or_says_why_not() {
    walk(|words, is_group| {
        if is_group || help(words, "--help", WIDTHS[0]).contains("--output <FORMAT>") {
            return;
        }
        let said = mica::run([words, &["--output", "json"]].concat()).refusal();
        assert!(said.starts_with(&format!("mica: mica {} has no --output:", words[0])), "{said}");
    });
}

#[track_caller]
fn judge(words: &[&str], width: usize) {
    let [short, long] = ["-h", "--help"].map(|flag| help(words, flag, width));
    assert!(short.lines().count() < SCREEN_LINES, "{words:?} -h: more than a screen:\n{short}");
    let verb = [&["mica"][..], words].concat().join(" ");
    let foot = short.lines().last().unwrap_or_default();
    assert!(foot.contains(&format!("{verb} --help")), "{words:?} -h does not say where more is");
    for help in [&short, &long] {
        assert!(help.lines().all(|line| line.chars().count() <= width), "{words:?}: wide:\n{help}");
    }
    let mentioned = |help: &str, option: &str| help.find(&format!(" {option} "));
    assert_eq!(mentioned(&short, "--log-level"), None, "{words:?} -h");
    for option in ENGINE {
        assert_eq!(mentioned(&short, option), None, "{words:?} -h: {option}");
        if let Some(at) = mentioned(&long, option) {
            let heading = long.find("\nEngine:").expect("a heading");
            assert!(heading < at, "{words:?} --help: {option} is not an option of the engine");
        }
    }
    let (_, examples) = long.split_once("\nEXAMPLES:\n").expect("examples");
    let begins = |line: &str| line.trim_start().starts_with(&verb);
    assert!(examples.lines().any(begins), "{words:?}: {examples}");
}
