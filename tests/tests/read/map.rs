//! `mica map` and `qemu-img map` agree on who owns what, and where it is.

use mica_gen::{ChainSpec, Features, generate};
use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

/// A run of the disk that both programs report.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Run {
    start: u64,
    length: u64,
    depth: u64,
    zero: bool,
    data: bool,
    present: bool,
    compressed: bool,
    /// Where it is in its file; `None` if the program names no place.
    offset: Option<u64>,
}

impl Run {
    fn from_json(extent: &Value) -> Self {
        let number =
            |name: &str| extent[name].as_u64().unwrap_or_else(|| panic!("{name}: {extent}"));
        let flag =
            |name: &str| extent[name].as_bool().unwrap_or_else(|| panic!("{name}: {extent}"));
        Self {
            start: number("start"),
            length: number("length"),
            depth: number("depth"),
            zero: flag("zero"),
            data: flag("data"),
            present: flag("present"),
            // qemu-img before 8.2 does not report that.
            compressed: extent["compressed"].as_bool().unwrap_or(false),
            offset: extent["offset"].as_u64(),
        }
    }

    /// The same without where it starts and ends, for comparing parts.
    fn at(self, start: u64) -> Self {
        let offset = self.offset.map(|offset| offset + (start - self.start));
        Self { start, length: 0, offset, ..self }
    }
}

fn runs(map: &Value) -> Vec<Run> {
    let runs: Vec<_> = map.as_array().expect("a list").iter().map(Run::from_json).collect();
    for pair in runs.windows(2) {
        assert_eq!(pair[0].start + pair[0].length, pair[1].start, "a gap or an overlap");
    }
    runs
}

/// Compares both maps wherever one of them starts a new run.
#[track_caller]
fn same_map(dir: &Path, image: &str) {
    let path = dir.join(image).display().to_string();
    let ours = mica::run(["map", "--output", "json", "--format", "qcow2", &path]).json();
    let theirs = qemu::img(dir, ["map", "--output=json", "-f", "qcow2", image]).json();
    let tells_compressed = theirs[0].get("compressed").is_some();
    let (ours, theirs) = (runs(&ours), runs(&theirs));
    let covering = |runs: &[Run], at: u64| {
        let after = runs.partition_point(|run| run.start <= at);
        let run = runs[after - 1];
        assert!(at < run.start + run.length, "{image}: nothing is said of byte {at}");
        run.at(at)
    };
    let end = |runs: &[Run]| runs.last().map_or(0, |run| run.start + run.length);
    assert_eq!(end(&ours), end(&theirs), "{image}: end of the map");
    for start in ours.iter().chain(&theirs).map(|run| run.start) {
        let (ours, mut theirs) = (covering(&ours, start), covering(&theirs, start));
        if !tells_compressed {
            theirs.compressed = ours.compressed;
        }
        assert_eq!(ours, theirs, "{image}: byte {start:#x}: mica, then qemu-img");
    }
}

#[test]
fn maps_of_qemus_own_chain_agree() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "40M");
    qemu::io(
        dir,
        &[],
        "base.qcow2",
        &["write -P 1 0 8M", "write -c -P 2 16M 64k", "write -z 9M 1M"],
    );
    qemu::overlay(dir, "middle.qcow2", "base.qcow2", &["-o", "extended_l2=on"]);
    qemu::io(dir, &[], "middle.qcow2", &["write -P 3 1M 6k", "write -z 2M 64k", "discard 4M 1M"]);
    qemu::overlay(dir, "top.qcow2", "middle.qcow2", &["-o", "cluster_size=4k"]);
    qemu::io(dir, &[], "top.qcow2", &["write -P 4 3M 20k", "write -z -u 5M 40k"]);
    for image in ["base.qcow2", "middle.qcow2", "top.qcow2"] {
        same_map(dir, image);
    }
}

#[test]
fn maps_of_chains_of_different_lengths_agree() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "20M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 20M"]);
    qemu::create(dir, "short.qcow2", &["-b", "base.qcow2", "-F", "qcow2"], "10M");
    qemu::io(dir, &[], "short.qcow2", &["write -P 2 9M 100k"]);
    qemu::create(dir, "long.qcow2", &["-b", "short.qcow2", "-F", "qcow2"], "30M");
    qemu::io(dir, &[], "long.qcow2", &["write -P 3 25M 100k"]);
    same_map(dir, "short.qcow2");
    same_map(dir, "long.qcow2");
}

/// After 16,384 runs the rest was called data.
#[test]
fn map_of_a_raw_file_of_very_many_runs_names_them_all() {
    const RUNS: u64 = 20_000;
    const STEP: u64 = 8 << 10;
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("disk.raw");
    let file = File::create(&path).expect("created");
    file.set_len(RUNS * STEP).expect("set");
    for run in 0..RUNS {
        file.write_all_at(&[1; 4096], run * STEP).expect("written");
    }
    let args = ["map", "--output", "json", "--format", "raw"];
    let map = mica::run([&args[..], &[&path.display().to_string()]].concat()).json();
    let runs = runs(&map);
    assert_eq!(runs.len() as u64, 2 * RUNS);
    for (run, start) in runs.iter().step_by(2).zip((0..).step_by(8 << 10)) {
        assert!(run.start == start && run.length == 4096 && run.data, "{run:?}");
    }
    if tools::present(&[tools::QEMU_IMG]) {
        let base = ["-b", "disk.raw", "-F", "raw"];
        qemu::create(dir.path(), "top.qcow2", &base, &(RUNS * STEP).to_string());
        same_map(dir.path(), "top.qcow2");
    }
}

#[test]
fn maps_of_generated_chains_agree() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    for seed in 0..6 {
        let dir = tempfile::tempdir().expect("a folder");
        let spec = ChainSpec {
            layers: 8,
            disk_bytes: 16 << 20,
            seed,
            features: Features::all(),
            ..ChainSpec::new(dir.path())
        };
        let manifest = generate(&spec, |_| {}).expect("made");
        same_map(dir.path(), &manifest.top);
    }
}

#[test]
fn a_part_of_the_disk_is_mapped_alone() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "disk.qcow2", &[], "10M");
    qemu::io(dir.path(), &[], "disk.qcow2", &["write 1M 1M"]);
    let path = dir.path().join("disk.qcow2").display().to_string();
    let part = ["--start-offset", "1M", "--max-length", "64k"];
    let words = ["map", "--output", "json"];
    let map = mica::run(words.iter().chain(&part).chain(&[path.as_str()])).json();
    let runs = runs(&map);
    assert_eq!((runs.len(), runs[0].start, runs[0].length), (1, 1 << 20, 64 << 10));
}

#[test]
fn nothing_is_said_to_a_reader_that_has_gone_away() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("disk.qcow2").display().to_string();
    mica::run(["create", "-q", &path, "10M"]).ok();
    for verb in [&["map"][..], &["info"], &["check"], &["read", "0", "1M"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut args = verb.to_vec();
        args.insert(1, &path);
        let mut command = Command::new(mica::binary());
        let output = command.args(args).stdout(writer).output().expect("started");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{verb:?}");
        // As a shell shows that SIGPIPE ended a program.
        assert_eq!(output.status.code(), Some(141), "{verb:?}");
    }
}

#[test]
fn data_in_an_external_file_is_shown_in_that_file() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "disk.qcow2", &["-o", "data_file=disk.data"], "1M");
    qemu::io(dir, &[], "disk.qcow2", &["write -P 1 64k 64k"]);
    qemu::overlay(dir, "top.qcow2", "disk.qcow2", &[]);
    qemu::io(dir, &[], "top.qcow2", &["write -P 2 256k 64k"]);
    let said = mica::run(["map", &dir.join("top.qcow2").display().to_string()]).ok();
    let lines: Vec<_> = said.lines().skip(1).collect();
    assert_eq!(lines.len(), 2, "{said}");
    assert!(lines[0].ends_with("disk.data") && lines[1].ends_with("top.qcow2"), "{said}");
}
