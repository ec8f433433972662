//! The help of every verb for images at rest: short on request, and long with examples.

use mica_tests::{command, mica};
use std::process::Command;

/// Verbs whose help is judged beside the servers that they start or ask.
const ELSEWHERE: [&str; 4] = ["serve", "ctl", "top", "help"];
/// What only `--help` has, and under a heading of its own.
const ENGINE: [&str; 8] = [
    "--inject",
    "--aio",
    "--cache",
    "--index-cache",
    "--index-dir",
    "--redo-dir",
    "--coroutines",
    "--log-level",
];

#[track_caller]
fn help(words: &[&str], flag: &str) -> String {
    let mut mica = Command::new(mica::binary());
    command::finish(mica.args(words).arg(flag).env("COLUMNS", "80")).ok()
}

/// The verbs below `words`.
fn verbs(words: &[&str]) -> Vec<String> {
    let help = help(words, "-h");
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = listed.take_while(|line| !line.trim().is_empty());
    let names = listed.filter(|line| !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

#[test]
fn every_verb_has_a_screen_of_help_and_more_with_examples() {
    let mut seen = 0;
    for verb in verbs(&[]).iter().filter(|verb| !ELSEWHERE.contains(&verb.as_str())) {
        let below = verbs(&[verb]);
        let below: Vec<_> = below.iter().filter(|verb| *verb != "help").collect();
        let all: Vec<Vec<&str>> = match below.is_empty() {
            true => vec![vec![verb]],
            false => below.iter().map(|word| vec![verb.as_str(), word.as_str()]).collect(),
        };
        for words in all {
            judge(&words);
            seen += 1;
        }
    }
    assert!(seen >= 14, "{seen} verbs");
}

#[track_caller]
fn judge(words: &[&str]) {
    let [short, long] = ["-h", "--help"].map(|flag| help(words, flag));
    assert!(short.lines().count() <= 40, "{words:?} -h: more than a screen:\n{short}");
    for help in [&short, &long] {
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{words:?}: wide:\n{help}");
    }
    let mentioned = |help: &str, option: &str| help.find(&format!(" {option} "));
    for option in ENGINE {
        assert_eq!(mentioned(&short, option), None, "{words:?} -h: {option}");
        if let Some(at) = mentioned(&long, option) {
            let heading = long.find("\nEngine:").expect("a heading");
            assert!(heading < at, "{words:?} --help: {option} is not an option of the engine");
        }
    }
    let (_, examples) = long.split_once("\nEXAMPLES:\n").expect("examples");
    let verb = format!("  mica {} ", words.join(" "));
    assert!(examples.lines().any(|line| line.starts_with(&verb)), "{words:?}: {examples}");
}
