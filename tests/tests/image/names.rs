//! Images whose names are no plain text: bytes that are no UTF-8, lines, what a terminal obeys.

use mica_tests::{clock, command, mica, tools};
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

const NAMES: [&[u8]; 5] = [
    "bäse-日本.qcow2".as_bytes(),
    b"two\nlines.qcow2",
    b"no\xfftext\xfe.qcow2",
    b"red\x1b[31m.qcow2",
    b"it's \"a\\b\".qcow2",
];

fn run(dir: &Path, locale: &str, words: &[&[u8]]) -> Output {
    let mut mica = Command::new(mica::binary());
    mica.args(words.iter().map(|word| OsStr::from_bytes(word)));
    mica.current_dir(dir).env("LC_ALL", locale).output().expect("it runs")
}

/// Runs it to success, and asserts that a terminal that shows its output obeys nothing in it.
#[track_caller]
fn plain(dir: &Path, locale: &str, words: &[&[u8]]) -> String {
    let said = run(dir, locale, words);
    let stderr = String::from_utf8_lossy(&said.stderr).into_owned();
    let what = String::from_utf8_lossy(&words.join(&b' ')).into_owned();
    assert!(said.status.success(), "{what}: {}: {stderr}", said.status);
    let stdout = String::from_utf8(said.stdout).expect("text");
    for text in [&stdout, &stderr] {
        assert!(!text.contains('\u{1b}'), "{what}: {text:?}");
    }
    stdout
}

#[track_caller]
fn json(dir: &Path, locale: &str, words: &[&[u8]]) -> Value {
    let words: Vec<_> = words.iter().copied().chain([b"--output".as_slice(), b"json"]).collect();
    serde_json::from_str(&plain(dir, locale, &words)).expect("JSON")
}

/// The story: `map`, `create` and `clone` printed names as they are, and `map` prints those that an
/// image has, which may be a stranger's.
#[test]
fn verbs_show_any_name_as_text_and_as_json() {
    for locale in ["C", "C.UTF-8"] {
        for name in NAMES {
            let dir = tempfile::tempdir().expect("a folder");
            let (dir, base) = (dir.path(), [b"base-".as_slice(), name].concat());
            let copy = [b"copy-".as_slice(), name].concat();
            let clone = [b"clone-".as_slice(), name].concat();
            plain(dir, locale, &[b"create", &base, b"4M"]);
            fs::write(dir.join("data"), [7; 4096]).expect("written");
            let mut write = Command::new(mica::binary());
            write.arg("write").arg(OsStr::from_bytes(&base)).arg("0").current_dir(dir);
            write.stdin(fs::File::open(dir.join("data")).expect("there"));
            assert!(write.status().expect("it runs").success());
            plain(dir, locale, &[b"create", b"-b", &base, b"-F", b"qcow2", name]);

            let shown = plain(dir, locale, &[b"map", name]);
            assert_eq!(shown.lines().count(), 2, "{shown}");
            let map = json(dir, locale, &[b"map", name]);
            assert!(map.as_array().is_some_and(|map| !map.is_empty()), "{map}");
            plain(dir, locale, &[b"info", b"--backing-chain", name]);
            let info = json(dir, locale, &[b"info", b"--backing-chain", name]);
            let shown = String::from_utf8_lossy(name);
            let filename = info[0]["filename"].as_str().unwrap_or_default();
            assert!(filename.ends_with(&*shown), "{info}");
            plain(dir, locale, &[b"check", name]);
            json(dir, locale, &[b"check", name]);
            plain(dir, locale, &[b"convert", name, &copy]);
            plain(dir, locale, &[b"compare", name, &copy]);
            plain(dir, locale, &[b"clone", &base, &clone]);
            plain(dir, locale, &[b"tree", b"."]);
            json(dir, locale, &[b"tree", b"."]);
            json(dir, locale, &[b"survey", b"."]);

            let missing = run(dir, locale, &[b"info", &[b"none-".as_slice(), name].concat()]);
            let said = String::from_utf8(missing.stderr).expect("text");
            assert_eq!((missing.status.code(), said.lines().count()), (Some(1), 1), "{said}");
            assert!(!said.contains('\u{1b}'), "{said:?}");
        }
    }
}

#[test]
fn image_of_any_name_is_served_and_shown() {
    if !tools::present(&[tools::NBDINFO]) {
        return;
    }
    for name in NAMES {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        plain(dir, "C", &[b"create", name, b"4M"]);
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--nbd", "s.sock", "--control", "c.sock", "--fork"]);
        let name = OsString::from(OsStr::from_bytes(name));
        let served = command::finish(serve.arg(&name).current_dir(dir).env("LC_ALL", "C"));
        assert!(!served.stderr.contains('\u{1b}'), "{served}");
        served.ok();
        let control =
            |verb: &'static [u8]| -> [&[u8]; 4] { [b"ctl", b"--control", b"c.sock", verb] };
        let shown = plain(dir, "C", &control(b"status"));
        assert_eq!(shown.lines().count(), 4, "{shown}");
        let status = json(dir, "C", &control(b"status"));
        let image = status["disks"][0]["image"].as_str().expect("a path");
        assert!(image.ends_with(&*name.to_string_lossy()), "{image}");
        let uri = "nbd+unix:///?socket=s.sock";
        let mut nbdinfo = Command::new("nbdinfo");
        let len = command::finish(nbdinfo.args(["--size", uri]).current_dir(dir)).ok();
        assert_eq!(len.trim(), "4194304");
        plain(dir, "C", &control(b"drain"));
        let is_gone = || (!dir.join("c.sock").exists()).then_some(());
        clock::poll(Duration::from_secs(60), Duration::from_millis(10), is_gone).expect("it ends");
    }
}
