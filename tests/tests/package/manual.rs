//! Man pages and completions.

use super::help::verbs;
use mica_tests::tools::{self, MAN, MANDOC};
use mica_tests::{command, mica};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Sections that a user looks for.
const SECTIONS: [&str; 6] =
    ["NAME", "SYNOPSIS", "DESCRIPTION", "EXAMPLES", "EXIT STATUS", "SEE ALSO"];

/// The names of the pages in `folder`.
fn pages(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).expect("pages");
    entries.map(|entry| entry.expect("a page").file_name().into_string().expect("text")).collect()
}

fn shown(page: &Path) -> String {
    let mut man = Command::new("man");
    man.args(["--warnings", "--no-hyphenation", "--no-justification", "-l"])
        .arg(page)
        .env("MANWIDTH", "80")
        .env("LC_ALL", "C.UTF-8");
    let shown = command::finish(&mut man);
    assert!(shown.stderr.is_empty(), "{}: {}", page.display(), shown.stderr);
    shown.ok()
}

#[test]
fn every_verb_has_a_page_that_man_shows_without_a_warning() {
    if !tools::present(&[MAN, MANDOC]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    mica::run(["manual".as_ref(), dir.path().as_os_str()]).ok();
    let folder = dir.path().join("man/man1");
    let mut expected = BTreeSet::from(["mica.1".to_owned()]);
    for verb in verbs(&[]) {
        for word in verbs(&[&verb]) {
            let below = verbs(&[&verb, &word]);
            expected.extend(below.iter().map(|last| format!("mica-{verb}-{word}-{last}.1")));
            expected.insert(format!("mica-{verb}-{word}.1"));
        }
        expected.insert(format!("mica-{verb}.1"));
    }
    assert_eq!(pages(&folder), expected);

    for name in pages(&folder) {
        let page = folder.join(&name);
        let judged = command::finish(
            Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(&page),
        );
        assert!(judged.status.success() && judged.stdout.is_empty(), "{judged}");
        let text = shown(&page);
        for section in SECTIONS {
            assert!(text.lines().any(|line| line == section), "{name} lacks {section}:\n{text}");
        }
        assert!(!text.contains("sandbox-helper"), "{name}:\n{text}");
    }
}

#[test]
fn page_of_serve_has_all_options_with_their_help_and_what_influences_it() {
    if !tools::present(&[MAN]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    mica::run(["manual".as_ref(), dir.path().as_os_str()]).ok();
    let text = shown(&dir.path().join("man/man1/mica-serve.1"));
    // --tls-verify-peer has one line of help, which -h does not show.
    for part in [
        "--takeover",
        "--inject",
        "Inject faults into image I/O",
        "must present a certificate",
        "\nENGINE\n",
        "\nENVIRONMENT\n",
        "MICA_ALLOW_PATH",
        "\nFILES\n",
        "/etc/mica.toml",
        "mica serve --config /etc/mica.toml",
        "qemu-nbd(8)",
    ] {
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(part) || words.contains(part), "no {part:?}:\n{text}");
    }
    assert!(!text.contains("MICA_CONTROL"), "it is for those who ask a server:\n{text}");
}

#[test]
fn pages_are_the_same_at_any_time_if_the_time_of_the_sources_is_told() {
    let dirs = [tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder")];
    for dir in &dirs {
        let mut mica = Command::new(mica::binary());
        mica.arg("manual").arg(dir.path()).env("SOURCE_DATE_EPOCH", "951827696");
        command::finish(&mut mica).ok();
    }
    let [first, second] =
        dirs.map(|dir| fs::read_to_string(dir.path().join("man/man1/mica.1")).expect("a page"));
    assert_eq!(first, second);
    assert!(first.contains("2000-02-29"), "{first}");
}

#[test]
fn completions_offer_every_verb_that_help_shows_and_no_other() {
    let dir = tempfile::tempdir().expect("a folder");
    mica::run(["manual".as_ref(), dir.path().as_os_str()]).ok();
    let script = dir.path().join("bash-completion/completions/mica");
    let offered = |typed: &str| {
        let ask = "source \"$1\"; COMP_WORDS=($2 ''); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); \
                   _mica mica '' \"${COMP_WORDS[-2]}\"; printf '%s\\n' \"${COMPREPLY[@]}\"";
        let mut bash = Command::new("bash");
        let said = command::finish(bash.args(["-c", ask, "bash"]).arg(&script).arg(typed)).ok();
        let words = said.lines().filter(|word| !word.starts_with('-') && *word != "help");
        words.map(str::to_owned).collect::<BTreeSet<_>>()
    };
    assert_eq!(offered("mica"), verbs(&[]).into_iter().collect());
    assert_eq!(offered("mica ctl"), verbs(&["ctl"]).into_iter().collect());
    assert_eq!(offered("mica serve --sandbox"), ["on", "require", "off"].map(str::to_owned).into());
    for file in ["zsh/site-functions/_mica", "fish/vendor_completions.d/mica.fish"] {
        let script = fs::read_to_string(dir.path().join(file)).expect("a script");
        assert!(script.contains("load-snapshot") && !script.contains("sandbox-helper"), "{file}");
    }
}
