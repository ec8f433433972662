//! What all verbs have in common: exit codes, and output that nobody reads.

use mica_tests::{command, mica};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

#[track_caller]
fn mica_in(dir: &Path, args: &[&str]) -> command::Finished {
    command::finish(Command::new(mica::binary()).current_dir(dir).args(args))
}

/// A chain of three layers in `dir/chain`, an overlay that nothing refers to, and a raw image.
fn images(dir: &Path) {
    let words = ["gen", "chain", "--layers", "3", "--size", "8M", "--cluster-size", "4k", "chain"];
    mica_in(dir, &words).ok();
    mica_in(dir, &["create", "-q", "disk.qcow2", "8M"]).ok();
    fs::write(dir.join("disk.raw"), vec![7; 1 << 20]).expect("there is room");
}

/// Every verb that prints on stdout, as words.
const PRINTING: &[&str] = &[
    "--help",
    "--version",
    "info --help",
    "info --backing-chain chain/top.qcow2",
    "info --backing-chain --output json chain/top.qcow2",
    "map chain/top.qcow2",
    "map --output json chain/top.qcow2",
    "check disk.qcow2",
    "check --output json disk.qcow2",
    "compare disk.qcow2 disk.qcow2",
    "compare -p --output json disk.qcow2 chain/top.qcow2",
    "create new.qcow2 1M",
    "create --output json -f raw new.raw 1M",
    "resize disk.qcow2 +1M",
    "measure chain/top.qcow2",
    "measure --output json --size 1G",
    "read chain/top.qcow2 0 8M",
    "index build chain/top.qcow2",
    "index status chain/top.qcow2",
    "index status --output json chain/top.qcow2",
    "index drop chain/top.qcow2",
    "tree chain",
    "tree --output json chain",
    "tree --dot chain",
    "tree --svg chain",
    "survey chain",
    "survey --output json chain",
    "gen fleet --chains 3 fleet",
    "diff chain/layer-0000.qcow2 chain/top.qcow2",
    "diff --output json chain/layer-0000.qcow2 chain/top.qcow2",
    "diff --summary chain/layer-0000.qcow2 chain/top.qcow2",
    "gen chain --layers 2 --size 1M other",
    "gen chain --layers 2 --size 1M --output json another",
];

#[test]
fn a_reader_that_leaves_gets_no_message() {
    let dir = tempfile::tempdir().expect("a folder");
    images(dir.path());
    for words in PRINTING {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut mica = Command::new(mica::binary());
        let mica = mica.current_dir(dir.path()).args(words.split(' ')).stdout(writer);
        let said = mica.stdin(Stdio::null()).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&said.stderr);
        assert_eq!(stderr, "", "{words}");
        let is_help = words.contains("--help") || words.contains("--version");
        assert_eq!(said.status.code(), Some(if is_help { 0 } else { 128 + 13 }), "{words}");
    }
}

/// The story: help for a file on a disk that was full was nowhere, and all was well.
#[test]
fn output_that_does_not_fit_is_a_failure() {
    let dir = tempfile::tempdir().expect("a folder");
    images(dir.path());
    for words in PRINTING {
        let full = fs::File::options().write(true).open("/dev/full").expect("there");
        let mut mica = Command::new(mica::binary());
        let mica = mica.current_dir(dir.path()).args(words.split(' ')).stdout(full);
        let said = mica.stdin(Stdio::null()).output().expect("it runs");
        let stderr = String::from_utf8_lossy(&said.stderr);
        assert!(stderr.contains("mica: standard output: No space left"), "{words}: {stderr}");
        let code = if words.starts_with("compare") { 3 } else { 1 };
        assert_eq!(said.status.code(), Some(code), "{words}");
    }
}

/// A shell can close what a program begins with.
#[test]
fn closed_standard_streams_are_no_panic_and_cost_no_data() {
    let dir = tempfile::tempdir().expect("a folder");
    images(dir.path());
    for (number, closed) in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"].into_iter().enumerate() {
        let copy = format!("copy-{number}.qcow2");
        let in_order = [
            (format!("convert -p chain/top.qcow2 {copy}"), 0),
            (format!("check {copy}"), 0),
            (format!("info --output json {copy}"), 0),
            (format!("compare {copy} chain/top.qcow2"), 0),
            (format!("compare {copy} disk.qcow2"), 1),
            ("info none.qcow2".to_owned(), 1),
            (format!("create {copy}.raw -f raw 1M"), 0),
            (format!("write -f raw {copy}.raw 0 < /dev/null"), 0),
            ("index build chain/top.qcow2".to_owned(), 0),
            ("frobnicate".to_owned(), 1),
        ];
        for (words, code) in in_order {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("\"$0\" {words} {closed}")]).arg(mica::binary());
            let finished = command::finish(shell.current_dir(dir.path()));
            assert_eq!(finished.code(), Some(code), "{closed}: {finished}");
        }
        mica_in(dir.path(), &["compare", "chain/top.qcow2", &copy]).ok();
    }
}

/// The story: an error that could not be reported was a panic.
#[test]
fn errors_that_nobody_reads_keep_their_exit_code() {
    let dir = tempfile::tempdir().expect("a folder");
    images(dir.path());
    fs::write(dir.path().join("bad.qcow2"), vec![1; 4096]).expect("there is room");
    for (words, code) in [
        ("info none.qcow2", 1),
        ("info bad.qcow2", 1),
        ("check bad.qcow2", 1),
        ("compare bad.qcow2 disk.qcow2", 2),
        ("compare --bogus", 3),
        ("map --bogus", 1),
        ("convert -p disk.qcow2 none/copy.qcow2", 1),
        ("--log-level debug convert -p disk.qcow2 copy.qcow2", 0),
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut mica = Command::new(mica::binary());
        let mica = mica.current_dir(dir.path()).args(words.split(' ')).stderr(writer);
        let said = mica.stdin(Stdio::null()).output().expect("it runs");
        assert_eq!(said.status.code(), Some(code), "{words}");
    }
}

#[test]
fn usage_errors_are_1_and_no_verdict_of_a_comparison() {
    let dir = tempfile::tempdir().expect("a folder");
    images(dir.path());
    for (words, code) in [
        ("check", 1),
        ("check --bogus disk.qcow2", 1),
        ("check -r bogus disk.qcow2", 1),
        ("check --format bogus disk.qcow2", 1),
        ("check --output", 1),
        ("check --format raw disk.raw", 63),
        ("compare", 3),
        ("compare --output bogus disk.qcow2 disk.qcow2", 3),
        ("compare --log-level bogus disk.qcow2 disk.qcow2", 3),
        ("info check compare", 1),
        ("bogus", 1),
        ("map", 1),
        ("create", 1),
        ("convert disk.qcow2", 1),
        ("resize disk.qcow2", 1),
        ("measure", 1),
        ("read disk.qcow2", 1),
        ("write disk.qcow2", 1),
        ("index", 1),
        ("index build", 1),
        ("gen chain", 1),
        ("tree", 1),
        ("survey", 1),
        ("gen fleet", 1),
        ("diff disk.qcow2", 1),
        ("check --help", 0),
        ("compare --help", 0),
        ("--version", 0),
    ] {
        let said = mica_in(dir.path(), &words.split(' ').collect::<Vec<_>>());
        assert_eq!(said.code(), Some(code), "{words}: {said}");
    }
}

#[test]
fn options_of_a_format_are_listed_on_request() {
    let dir = tempfile::tempdir().expect("a folder");
    for (words, wanted, unwanted) in [
        ("create -o help", "cluster_size", "Usage"),
        ("create -o cluster_size=4k,help new.qcow2 1M", "refcount_bits", "Usage"),
        ("create -f raw -o help", "preallocation", "cluster_size"),
        ("convert -o ? a b", "extended_l2", "Usage"),
        ("convert -O raw -o help", "preallocation", "cluster_size"),
        ("measure -o help", "compat", "Usage"),
    ] {
        let said = mica_in(dir.path(), &words.split(' ').collect::<Vec<_>>()).ok();
        assert!(said.contains(wanted) && !said.contains(unwanted), "{words}: {said}");
    }
    assert!(!dir.path().join("new.qcow2").exists());
    assert_eq!(mica_in(dir.path(), &["create", "-o"]).code(), Some(1));
}

#[test]
fn a_read_without_a_length_goes_to_the_end() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("disk.raw"), vec![7; 1 << 20]).expect("there is room");
    let read = |args: &[&str]| mica_in(dir, &[&["read", "-f", "raw", "disk.raw"], args].concat());
    assert_eq!(read(&["1048000"]).ok().len(), 576);
    assert_eq!(read(&["0.5 MiB"]).ok().len(), 1 << 19);
    assert_eq!(read(&["1M"]).ok(), "");
    assert_eq!(read(&["0", "1.5KiB"]).ok().len(), 1536);
    for args in [&["2M"][..], &["0", "1MB"], &["1.5", "1"]] {
        read(args).refusal();
    }
}

#[test]
fn options_stand_where_those_of_qemu_img_may() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    images(dir);
    mica_in(dir, &["convert", "disk.qcow2", "-O", "raw", "copy.raw"]).ok();
    assert_eq!(fs::metadata(dir.join("copy.raw")).expect("it is there").len(), 8 << 20);
    mica_in(dir, &["convert", "disk.qcow2", "-q", "disk.qcow2", "-O", "raw", "two.raw"]).ok();
    assert_eq!(fs::metadata(dir.join("two.raw")).expect("it is there").len(), 16 << 20);
    let said = mica_in(dir, &["convert", "-O", "raw", "disk.qcow2"]).stderr;
    assert!(said.contains("TARGET is missing"), "{said}");
    let said = mica_in(dir, &["rebase", "-c", "-b", "", "disk.qcow2"]).refusal();
    assert!(said.contains("mica convert -c"), "{said}");
}

#[test]
fn backing_file_that_will_be_refused_is_warned_of() {
    let dir = tempfile::tempdir().expect("a folder");
    let elsewhere = tempfile::tempdir().expect("a folder");
    mica_in(elsewhere.path(), &["create", "-q", "base.qcow2", "1M"]).ok();
    let dir = dir.path();
    mica_in(dir, &["create", "-q", "a:b.qcow2", "1M"]).ok();
    mica_in(dir, &["create", "-q", "top.qcow2", "1M"]).ok();
    let base = elsewhere.path().join("base.qcow2").display().to_string();
    let done = mica_in(dir, &["rebase", "-u", "-b", &base, "-F", "qcow2", "top.qcow2"]);
    let said = &done.stderr;
    assert!(done.status.success() && said.contains("will be refused"), "{said}");
    mica_in(dir, &["rebase", "-u", "-b", "a:b.qcow2", "-F", "qcow2", "top.qcow2"]).ok();
    mica_in(dir, &["map", "top.qcow2"]).ok();
}
