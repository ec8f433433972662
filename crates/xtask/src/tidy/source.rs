//! Rules about single files.

use super::allowed::Allowed;
use super::{Finding, scan};
use std::ffi::OsStr;
use std::path::Path;

/// Columns of a line.
const COLUMNS_MAX: usize = 100;
/// Lines of code in a file.
const FILE_LINES_MAX: usize = 500;
/// Lines of a function.
const FUNCTION_LINES_MAX: usize = 70;

/// Words that no committed file has. Put together here, so that this file has none of them either.
const BANNED: &[(&str, &str)] = &[
    (concat!("todo", "!("), "finish it, or say in an issue what is missing"),
    (concat!("unimpl", "emented!("), "finish it, or return an error that says what is missing"),
    (concat!("dbg", "!("), "use tracing"),
    (concat!("FIX", "ME"), "fix it, or open an issue"),
    (concat!("XX", "X"), "fix it, or open an issue"),
    (concat!("..", "/shared"), "users have no such folder"),
    (concat!("/work", "/"), "a path of one machine helps nobody else"),
    (concat!("use super::", "*;"), "name what is used, so that dependencies can be seen"),
];

/// Where `unsafe` may stand: rings, aligned buffers, lone system calls, guest memory, and librados.
const UNSAFE_PLACES: &[&str] = &[
    "crates/rt/src/backend/uring.rs",
    "crates/rt/src/buf.rs",
    "crates/rt/src/doorbell.rs",
    "crates/rt/src/restrict.rs",
    "crates/rt/src/system.rs",
    "crates/serve/src/vhost_user",
    "crates/rados/src/ffi",
    "crates/rados/src/ffi.rs",
];

/// Checks one file.
pub(super) fn check(file: &Path, text: &str, allowed: &mut Allowed, findings: &mut Vec<Finding>) {
    let name = file.display().to_string();
    let kind = file.extension().and_then(OsStr::to_str).unwrap_or_default();
    if kind != "rs" {
        if matches!(kind, "md" | "toml" | "sh" | "yml") {
            banned(&name, text, |_| false, findings);
        }
        return;
    }
    if is_generated_or_test_module(file) {
        banned(&name, text, |word| word.starts_with("use super"), findings);
        return columns(&name, text, findings);
    }
    columns(&name, text, findings);
    let (production, _) = split_tests(text);
    banned(&name, production, |_| false, findings);
    let (_, tests) = split_tests(text);
    banned(&name, tests, |word| word.starts_with("use super"), findings);
    if !text.starts_with("//!") && !text.starts_with("#!") {
        findings.push(Finding::new(&*name, "begin with //! and say what the file is for"));
    }
    let code = scan::code_only(production);
    unsafe_code(file, &code, findings);
    let lines = code.lines().filter(|line| !line.trim().is_empty()).count();
    if lines > FILE_LINES_MAX && !allowed.allows(&name, lines) {
        let what = format!("{lines} lines of code, more than {FILE_LINES_MAX}: find a better cut");
        findings.push(Finding::new(&*name, what));
    }
    for function in scan::functions(&code) {
        let place = format!("{name}:{}", function.name);
        if function.lines > FUNCTION_LINES_MAX && !allowed.allows(&place, function.lines) {
            let what = format!(
                "{} has {} lines, more than {FUNCTION_LINES_MAX}: find a better cut",
                function.name, function.lines
            );
            findings.push(Finding::new(format!("{name}:{}", function.line), what));
        }
    }
}

fn unsafe_code(file: &Path, code: &str, findings: &mut Vec<Finding>) {
    if !file.starts_with("crates") || UNSAFE_PLACES.iter().any(|place| file.starts_with(place)) {
        return;
    }
    let begins = ["{", "fn ", "impl ", "extern ", "trait "];
    let is_unsafe = |line: &str| {
        line.split("unsafe ").skip(1).any(|rest| begins.iter().any(|word| rest.starts_with(word)))
    };
    for (number, _) in (1..).zip(code.lines()).filter(|(_, line)| is_unsafe(line)) {
        let what = "unsafe: use a safe crate, or put the call behind a function of rt/system.rs";
        findings.push(Finding::new(format!("{}:{number}", file.display()), what));
    }
}

/// `foo/tests.rs` and its like: named by a `mod tests;` that stands under `cfg(test)`.
fn is_generated_or_test_module(file: &Path) -> bool {
    file.file_name() == Some(OsStr::new("tests.rs"))
        || file.ancestors().skip(1).any(|folder| folder.file_name() == Some(OsStr::new("tests")))
            && file.starts_with("crates")
}

/// What ships, and the tests in the same file.
fn split_tests(text: &str) -> (&str, &str) {
    match text.find("#[cfg(test)]\nmod ") {
        Some(at) => text.split_at(at),
        None => (text, ""),
    }
}

fn columns(name: &str, text: &str, findings: &mut Vec<Finding>) {
    for (number, line) in (1..).zip(text.lines()) {
        // Code is rustfmt's; a comment without a space cannot be broken: a URL, a digest.
        let comment = line.trim_start().strip_prefix("//").unwrap_or_default();
        let breakable = comment.trim_start_matches(['/', '!']).trim().contains(' ');
        if line.chars().count() > COLUMNS_MAX && breakable {
            let what = format!("more than {COLUMNS_MAX} columns");
            findings.push(Finding::new(format!("{name}:{number}"), what));
        }
    }
}

fn banned(name: &str, text: &str, exempt: impl Fn(&str) -> bool, findings: &mut Vec<Finding>) {
    for (word, instead) in BANNED.iter().filter(|(word, _)| !exempt(word)) {
        for (number, line) in (1..).zip(text.lines()) {
            if line.contains(word) {
                let what = format!("'{word}': {instead}");
                findings.push(Finding::new(format!("{name}:{number}"), what));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(file: &str, text: &str) -> Vec<String> {
        let mut findings = Vec::new();
        check(Path::new(file), text, &mut Allowed::default(), &mut findings);
        findings.into_iter().map(|finding| format!("{}: {}", finding.place, finding.what)).collect()
    }

    #[test]
    fn a_file_in_style_is_let_pass() {
        let text =
            "//! What it is.\n\nfn f() {}\n\n#[cfg(test)]\nmod tests {\n    use super::*;\n}\n";
        assert!(findings("crates/a/src/lib.rs", text).is_empty());
    }

    #[test]
    fn each_rule_finds_what_it_is_for() {
        let glob = concat!("//! x\nuse super::", "*;\n");
        assert!(findings("a.rs", glob)[0].contains("name what is used"));
        assert!(findings("a.rs", "fn f() {}\n")[0].contains("begin with //!"));
        let wide = format!("//! x\n// {} y\n", "x".repeat(100));
        assert!(findings("a.rs", &wide)[0].contains("columns"));
        let long = format!("//! x\nfn long() {{\n{}}}\n", "    a();\n".repeat(70));
        assert!(findings("a.rs", &long)[0].contains("long has 72 lines"));
        let big = format!("//! x\n{}", "const A: u8 = 1;\n".repeat(501));
        assert!(findings("a.rs", &big)[0].contains("501 lines of code"));
        let call = "//! x\nfn f() {\n    let _ = unsafe { g() };\n}\n";
        assert!(findings("crates/rt/src/lock.rs", call)[0].contains("rt/system.rs"));
        assert!(findings("crates/rt/src/system.rs", call).is_empty());
        let path = concat!("see ..", "/shared/x\n");
        assert!(findings("README.md", path)[0].contains("no such folder"));
    }
}
