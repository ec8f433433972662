//! `mica diff` against the bytes that QEMU reads: whatever differs is named.

use mica_gen::Rng;
use mica_tests::{clock, mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

#[track_caller]
fn diff(dir: &Path, options: &[&str], [first, second]: [&str; 2]) -> Vec<Range<u64>> {
    let [first, second] = [first, second].map(|name| dir.join(name).display().to_string());
    let words = ["diff", "--output", "json"].iter().chain(options).copied();
    let json = mica::run(words.chain([first.as_str(), second.as_str()])).json();
    let number = |value: &Value| value.as_u64().expect("a number");
    let range = |one: &Value| number(&one["start"])..number(&one["start"]) + number(&one["length"]);
    let ranges: Vec<_> = json.as_array().expect("a list").iter().map(range).collect();
    for pair in ranges.windows(2) {
        assert!(pair[0].end < pair[1].start, "in order, disjoint and joined: {ranges:?}");
    }
    ranges
}

/// The sectors in which the raw disks `first` and `second` differ.
fn sectors(first: &[u8], second: &[u8]) -> Vec<u64> {
    let count = first.len().max(second.len()).div_ceil(512);
    let sector = |disk: &[u8], at: usize| {
        let start = (at * 512).min(disk.len());
        let mut sector = disk[start..(start + 512).min(disk.len())].to_vec();
        sector.resize(512, 0);
        sector
    };
    let differ = |at: &usize| sector(first, *at) != sector(second, *at);
    (0..count).filter(differ).map(|at| at as u64).collect()
}

#[track_caller]
fn judge(dir: &Path, [first, second]: [&str; 2], raw: [&[u8]; 2], what: &str) {
    let real = sectors(raw[0], raw[1]);
    let named = diff(dir, &[], [first, second]);
    let covers = |ranges: &[Range<u64>], sector: u64| {
        ranges.iter().any(|range| range.contains(&(sector * 512)))
    };
    for sector in &real {
        assert!(covers(&named, *sector), "{what}: {first} {second}: sector {sector}: {named:?}");
    }
    let exact = diff(dir, &["--content"], [first, second]);
    let counted: u64 = exact.iter().map(|range| (range.end - range.start).div_ceil(512)).sum();
    assert_eq!(counted, real.len() as u64, "{what}: {first} {second}: {exact:?}");
    assert!(real.iter().all(|sector| covers(&exact, *sector)), "{what}: {first} {second}");
    let back = diff(dir, &[], [second, first]);
    assert_eq!(named, back, "{what}: {first} {second}: the other way round");
}

/// A random write, or something else that changes a disk of 24 MiB.
fn change(rng: &mut Rng) -> String {
    let (at, len) = (rng.below(23 << 11) * 512, 512 * (1 + rng.below(200)));
    match rng.below(6) {
        0 => format!("write -z {at} {len}"),
        1 => format!("discard {at} {len}"),
        2 => format!("write -c -P {} {} 64k", 1 + rng.below(200), at / 65536 * 65536),
        _ => format!("write -P {} {at} {len}", 1 + rng.below(200)),
    }
}

/// Two chains with a base in common, of layers of every kind.
struct Forest {
    names: Vec<String>,
    raw: Vec<Vec<u8>>,
}

fn forest(dir: &Path, seed: u64) -> Forest {
    let mut rng = Rng::new(seed);
    let mut names = Vec::new();
    let mut add = |rng: &mut Rng, name: &str, below: Option<&str>| {
        let cluster = ["cluster_size=4k", "cluster_size=64k", "cluster_size=64k,extended_l2=on"];
        // Some are shorter, or longer, than what they stand on.
        let size = ["24M", "24M", "24M", "20M", "26M"];
        let (cluster, size) = (rng.choose(&cluster), rng.choose(&size));
        match below {
            None => qemu::create(dir, name, &["-o", cluster], "24M"),
            Some(below) => {
                qemu::create(dir, name, &["-o", cluster, "-b", below, "-F", "qcow2"], size);
            }
        }
        let changes: Vec<_> = (0..1 + rng.below(8)).map(|_| change(rng)).collect();
        let len: u64 = size.trim_end_matches('M').parse::<u64>().expect("a size") << 20;
        let fits = |change: &&String| {
            let words: Vec<_> = change.split(' ').filter_map(|word| word.parse().ok()).collect();
            let at: u64 = words[words.len().saturating_sub(2)..].iter().sum();
            !change.contains("64k") && at < len.min(24 << 20)
        };
        let changes: Vec<_> = changes.iter().filter(fits).map(String::as_str).collect();
        qemu::io(dir, &[], name, &changes);
        names.push(name.to_owned());
    };
    add(&mut rng, "base.qcow2", None);
    let mut tops = ["base.qcow2".to_owned(), "base.qcow2".to_owned()];
    for number in 0..3 + rng.below(5) {
        let side = usize::try_from(rng.below(2)).expect("two");
        let name = format!("{}-{number}.qcow2", ["left", "right"][side]);
        add(&mut rng, &name, Some(&tops[side]));
        tops[side] = name;
    }
    let raw = names.iter().map(|name| {
        qemu::flatten(dir, name, "flat.raw");
        fs::read(dir.join("flat.raw")).expect("read")
    });
    let raw = raw.collect();
    Forest { names, raw }
}

fn judge_all(dir: &Path, Forest { names, raw }: &Forest, what: &str) {
    for (one, first) in names.iter().zip(raw) {
        for (other, second) in names.iter().zip(raw) {
            if one < other {
                judge(dir, [one, other], [first, second], what);
            }
        }
        assert_eq!(diff(dir, &[], [one, one]), [], "{what}: {one} and itself");
    }
}

#[test]
fn whatever_differs_is_named_with_an_index_and_without() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for seed in 0..4 {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        let made = forest(dir, seed);
        judge_all(dir, &made, &format!("seed {seed}"));
        clock::sleep(Duration::from_millis(1200));
        for name in &made.names {
            mica::run(["index", "build", &dir.join(name).display().to_string()]).ok();
        }
        judge_all(dir, &made, &format!("seed {seed}, with an index"));
        for entry in fs::read_dir(dir).expect("listed") {
            let path = entry.expect("listed").path();
            if path.extension().is_some_and(|end| end == "mica-index") {
                let mut bytes = fs::read(&path).expect("read");
                bytes[256..].iter_mut().step_by(7).for_each(|byte| *byte ^= 1);
                fs::write(&path, bytes).expect("written");
            }
        }
        judge_all(dir, &made, &format!("seed {seed}, with a damaged index"));
    }
}

/// The story: a slice that could not be read was skipped in silence if it was the first that the
/// index had, so that an incremental backup lacked it; and what another chain's index had said of
/// that window was forgotten with it.
#[test]
fn single_nodes_of_an_index_that_are_damaged_hide_nothing() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "64M");
    for (name, byte) in [("a.qcow2", 1), ("b.qcow2", 2)] {
        qemu::overlay(dir, name, "base.qcow2", &[]);
        let writes = [0, 20, 40].map(|mib| format!("write -P {byte} {}M 64k", mib + byte));
        qemu::io(dir, &[], name, &writes.each_ref().map(String::as_str));
    }
    let wanted = diff(dir, &[], ["a.qcow2", "b.qcow2"]);
    assert_eq!(wanted.len(), 6, "{wanted:?}");
    clock::sleep(Duration::from_millis(1200));
    for (name, top) in [("a.qcow2", "on-a.qcow2"), ("b.qcow2", "on-b.qcow2")] {
        qemu::overlay(dir, top, name, &[]);
        mica::run(["index", "build", &dir.join(top).display().to_string()]).ok();
    }
    for name in ["a.qcow2", "b.qcow2"] {
        let sidecar = dir.join(format!("{name}.mica-index"));
        let sound = fs::read(&sidecar).expect("read");
        assert!(sound.len() > 256, "it has nodes");
        for at in (256..sound.len()).step_by(8) {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            fs::write(&sidecar, bytes).expect("written");
            assert_eq!(diff(dir, &[], ["a.qcow2", "b.qcow2"]), wanted, "{name}, byte {at}");
        }
        fs::write(&sidecar, sound).expect("written");
    }
}

/// The story: the index of an image's present was taken for that of its snapshot.
#[test]
fn index_of_the_present_says_nothing_of_a_snapshot() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "64M");
    for name in ["image.qcow2", "other.qcow2"] {
        qemu::overlay(dir, name, "base.qcow2", &[]);
    }
    qemu::img(dir, ["snapshot", "-c", "before", "image.qcow2"]).ok();
    qemu::io(dir, &[], "image.qcow2", &["write -P 1 8M 64k"]);
    qemu::img(dir, ["snapshot", "-c", "after", "image.qcow2"]).ok();
    qemu::img(dir, ["snapshot", "-a", "before", "image.qcow2"]).ok();
    let wanted = diff(dir, &[], ["image.qcow2@after", "other.qcow2"]);
    assert_eq!(wanted.len(), 1, "{wanted:?}");
    assert_eq!(wanted[0], 8 << 20..(8 << 20) + 65536);
    clock::sleep(Duration::from_millis(1200));
    qemu::overlay(dir, "top.qcow2", "image.qcow2", &[]);
    mica::run(["index", "build", &dir.join("top.qcow2").display().to_string()]).ok();
    assert!(dir.join("image.qcow2.mica-index").exists());
    assert_eq!(diff(dir, &[], ["image.qcow2@after", "other.qcow2"]), wanted);
}

/// The story: two chains "met" at a file that one of them reads as its bytes.
#[test]
fn file_that_is_read_in_two_formats_is_not_common() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "1M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 1M"]);
    for (name, format) in [("a.qcow2", "qcow2"), ("b.qcow2", "raw")] {
        let create = ["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", format, name];
        qemu::img(dir, create).ok();
    }
    let found = diff(dir, &[], ["a.qcow2", "b.qcow2"]);
    assert!(found.first().is_some_and(|range| range.start == 0), "{found:?}");
}

#[test]
fn internal_snapshots_differ_where_their_clusters_do() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "disk.qcow2", &[], "64M");
    qemu::io(dir, &[], "disk.qcow2", &["write -P 1 0 8M", "write -P 2 20M 1M"]);
    qemu::img(dir, ["snapshot", "-c", "one", "disk.qcow2"]).ok();
    assert_eq!(diff(dir, &[], ["disk.qcow2@one", "disk.qcow2"]), []);
    qemu::io(dir, &[], "disk.qcow2", &["write -P 3 1M 64k", "write -P 4 40M 64k"]);
    qemu::img(dir, ["snapshot", "-c", "two", "disk.qcow2"]).ok();
    qemu::io(dir, &[], "disk.qcow2", &["write -P 5 2M 64k"]);
    let at = |mib: u64| mib << 20..(mib << 20) + 65536;
    assert_eq!(diff(dir, &[], ["disk.qcow2@one", "disk.qcow2@two"]), [at(1), at(40)]);
    assert_eq!(diff(dir, &[], ["disk.qcow2@two", "disk.qcow2"]), [at(2)]);
    assert_eq!(diff(dir, &[], ["disk.qcow2", "disk.qcow2@one"]), [at(1), at(2), at(40)]);
    qemu::overlay(dir, "over.qcow2", "disk.qcow2", &[]);
    qemu::io(dir, &[], "over.qcow2", &["write -P 6 50M 64k"]);
    assert_eq!(diff(dir, &[], ["disk.qcow2@two", "over.qcow2"]), [at(2), at(50)]);
    let [none, disk] =
        ["disk.qcow2@none", "disk.qcow2"].map(|name| dir.join(name).display().to_string());
    let refused = mica::run(["diff", &none, &disk]).refusal();
    assert!(refused.contains("\"none\""), "{refused}");
}

#[test]
fn states_with_nothing_in_common_show_what_they_have() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    for (name, at) in [("a.qcow2", "0"), ("b.qcow2", "8M")] {
        qemu::create(dir, name, &[], "16M");
        qemu::io(dir, &[], name, &[&format!("write -P 1 {at} 64k"), "write -P 2 4M 64k"]);
    }
    let [a, b] = ["a.qcow2", "b.qcow2"].map(|name| dir.join(name).display().to_string());
    let said = mica::run(["diff", &a, &b]);
    assert!(said.stderr.contains("no layer in common"), "{said}");
    let piece = |at: u64| at..at + 65536;
    let shared = 4 << 20;
    assert_eq!(diff(dir, &[], ["a.qcow2", "b.qcow2"]), [piece(0), piece(shared), piece(8 << 20)]);
    assert_eq!(diff(dir, &["--content"], ["a.qcow2", "b.qcow2"]), [piece(0), piece(8 << 20)]);
    let summary = mica::run(["diff", "--summary", "--output", "json", &a, &b]).json();
    assert_eq!(summary["bytes"], 3 * 65536);
    assert_eq!(summary["common"], Value::Null);
    qemu::flatten(dir, "b.qcow2", "b.raw");
    let exact = diff(dir, &["--content", "-F", "raw"], ["b.qcow2", "b.raw"]);
    assert_eq!(exact, [], "the same bytes in another format");
}

/// The base of the older state is missing, and the newer one needs it no more than the older.
#[test]
fn only_layers_that_are_not_shared_have_to_be_there() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "base.qcow2", &[], "16M");
    qemu::overlay(dir, "one.qcow2", "base.qcow2", &[]);
    qemu::overlay(dir, "two.qcow2", "one.qcow2", &[]);
    qemu::io(dir, &[], "two.qcow2", &["write -P 1 1M 64k"]);
    fs::remove_file(dir.join("base.qcow2")).expect("removed");
    let piece = 1 << 20..(1 << 20) + 65536;
    assert_eq!(diff(dir, &[], ["one.qcow2", "two.qcow2"]), [piece]);
    qemu::create(dir, "other.qcow2", &[], "16M");
    let words = ["two.qcow2", "other.qcow2"].map(|name| dir.join(name).display().to_string());
    let refused = mica::run(["diff", &words[0], &words[1]]).refusal();
    assert!(refused.contains("base.qcow2"), "{refused}");
}
