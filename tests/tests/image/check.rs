//! `mica check` finds what `qemu-img check` finds: on clean, leaking and broken images.

use mica_gen::{ChainSpec, Features, generate};
use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Compares both checks of `image` in `dir`; returns their exit code.
#[track_caller]
fn same_check(dir: &Path, image: &str) -> i32 {
    let path = dir.join(image).display().to_string();
    let ours = mica::run(["check", "--output", "json", "--format", "qcow2", &path]);
    let theirs = qemu::img(dir, ["check", "--output=json", "-f", "qcow2", image]);
    assert_eq!(ours.code(), theirs.code(), "{image}: {ours}\n{theirs}");
    let [our_json, their_json]: [Value; 2] = [&ours, &theirs]
        .map(|said| serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said}")));
    let fields = [
        "check-errors",
        "corruptions",
        "leaks",
        "image-end-offset",
        "total-clusters",
        "allocated-clusters",
        "fragmented-clusters",
        "compressed-clusters",
        "format",
    ];
    for field in fields {
        let count = |json: &Value| json.get(field).cloned().unwrap_or(Value::from(0));
        let (found, wanted) = (count(&our_json), count(&their_json));
        assert_eq!(found, wanted, "{image}: {field}\n{ours}\n{theirs}");
    }
    ours.code().expect("it ended by itself")
}

/// A small image with data, a snapshot and compressed clusters.
fn image(dir: &Path, options: &str) {
    qemu::create(dir, "disk.qcow2", &["-o", options], "8M");
    qemu::io(dir, &[], "disk.qcow2", &["write -P 1 0 1M", "write -z 2M 128k"]);
    // Compressed writes are whole clusters.
    let packed = match options.contains("cluster_size=2M") {
        true => ["write -c -P 2 4M 2M", "write -c -P 3 6M 2M"],
        false => ["write -c -P 2 4M 64k", "write -c -P 3 4160k 64k"],
    };
    qemu::io(dir, &[], "disk.qcow2", &packed);
    qemu::img(dir, ["snapshot", "-c", "one", "disk.qcow2"]).ok();
    qemu::io(dir, &[], "disk.qcow2", &["write -P 4 64k 200k"]);
}

fn read_u64(dir: &Path, offset: u64) -> u64 {
    let file = std::fs::File::open(dir.join("disk.qcow2")).expect("there");
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, offset).expect("in the file");
    u64::from_be_bytes(bytes)
}

fn patch(dir: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(dir.join("disk.qcow2")).expect("there");
    file.write_all_at(bytes, offset).expect("written");
}

/// Where the active L1 table, its first L2 table and the first refcount block are.
struct Places {
    l1: u64,
    l2: u64,
    refcount_block: u64,
}

impl Places {
    fn of(dir: &Path) -> Self {
        let address = |entry: u64| entry & 0x00ff_ffff_ffff_fe00;
        let l1 = read_u64(dir, 40);
        let refcount_table = read_u64(dir, 48);
        let l2 = address(read_u64(dir, l1));
        Self { l1, l2, refcount_block: address(read_u64(dir, refcount_table)) }
    }
}

#[test]
fn clean_images_are_clean_for_both() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in [
        "compat=0.10",
        "refcount_bits=16",
        "refcount_bits=8,cluster_size=512",
        "refcount_bits=64,cluster_size=2M",
        "extended_l2=on,compression_type=zstd",
        "lazy_refcounts=on",
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        image(dir.path(), options);
        assert_eq!(same_check(dir.path(), "disk.qcow2"), 0, "{options}");
    }
}

#[test]
fn every_layer_of_generated_chains_is_clean_for_both() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let spec = ChainSpec {
        layers: 16,
        disk_bytes: 16 << 20,
        features: Features::all(),
        ..ChainSpec::new(dir.path())
    };
    let manifest = generate(&spec, |_| {}).expect("made");
    for layer in manifest.layer.iter().filter(|layer| layer.format == "qcow2") {
        assert_eq!(same_check(dir.path(), &layer.file), 0);
    }
}

/// Named kinds of damage to an image, and the exit code that both checks then give.
type Harm = (&'static str, fn(&Path, &Places), i32);

const HARMS: &[Harm] = &[
    (
        "a cluster that nothing names",
        |dir, at| {
            // The refcount of a cluster near the end of the block.
            patch(dir, at.refcount_block + 2 * 100, &1_u16.to_be_bytes());
            let file = OpenOptions::new().write(true).open(dir.join("disk.qcow2")).expect("there");
            file.set_len(101 << 16).expect("longer");
        },
        3,
    ),
    (
        "a data cluster counted too often",
        |dir, at| {
            let data = (read_u64(dir, at.l2) & 0x00ff_ffff_ffff_fe00) >> 16;
            patch(dir, at.refcount_block + 2 * data, &7_u16.to_be_bytes());
        },
        3,
    ),
    (
        "a data cluster counted never",
        |dir, at| {
            let data = (read_u64(dir, at.l2) & 0x00ff_ffff_ffff_fe00) >> 16;
            patch(dir, at.refcount_block + 2 * data, &0_u16.to_be_bytes());
        },
        2,
    ),
    (
        "an L2 entry with reserved bits",
        |dir, at| {
            let entry = read_u64(dir, at.l2) | 0x3f00_0000_0000_01fe;
            patch(dir, at.l2, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "an L2 entry off its cluster",
        |dir, at| {
            let entry = read_u64(dir, at.l2) + 512;
            patch(dir, at.l2, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "two guest clusters in one place",
        |dir, at| {
            let entry = read_u64(dir, at.l2);
            patch(dir, at.l2 + 8, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "an L2 entry far beyond the file",
        |dir, at| {
            patch(dir, at.l2, &(1_u64 << 63 | 1 << 40).to_be_bytes());
        },
        2,
    ),
    (
        "an L1 entry that names the header",
        |dir, at| {
            patch(dir, at.l1, &(1_u64 << 63 | 0x1_0000).to_be_bytes());
        },
        2,
    ),
    (
        "an L1 entry with reserved bits",
        |dir, at| {
            let entry = read_u64(dir, at.l1) | 0x7f00_0000_0000_01ff;
            patch(dir, at.l1, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "a COPIED flag where there is a second reference",
        |dir, at| {
            // The clusters of the snapshot that were not written since are shared.
            let at = at.l2 + 8 * 8;
            let entry = read_u64(dir, at) | 1 << 63;
            patch(dir, at, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "no COPIED flag where none belongs",
        |dir, at| {
            let at = at.l2 + 8;
            let entry = read_u64(dir, at) & !(1 << 63);
            patch(dir, at, &entry.to_be_bytes());
        },
        2,
    ),
    (
        "a refcount table entry off its cluster",
        |dir, _| {
            let table = read_u64(dir, 48);
            patch(dir, table + 8, &0x7fff_fe00_u64.to_be_bytes());
        },
        2,
    ),
    (
        "a refcount block beyond the file",
        |dir, _| {
            let table = read_u64(dir, 48);
            patch(dir, table + 8, &(1_u64 << 40).to_be_bytes());
        },
        2,
    ),
];

#[test]
fn damaged_images_are_reported_alike_by_both() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for (what, harm, code) in HARMS {
        let dir = tempfile::tempdir().expect("a folder");
        image(dir.path(), "cluster_size=64k");
        harm(dir.path(), &Places::of(dir.path()));
        println!("{what}");
        assert_eq!(same_check(dir.path(), "disk.qcow2"), *code, "{what}");
    }
}

#[test]
fn the_tail_of_a_file_may_be_missing() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    image(dir.path(), "cluster_size=64k");
    let file = OpenOptions::new().write(true).open(dir.path().join("disk.qcow2")).expect("there");
    let len = file.metadata().expect("there").len();
    file.set_len(len - (300 << 10)).expect("shorter");
    same_check(dir.path(), "disk.qcow2");
}

#[test]
fn what_cannot_be_checked_exits_with_1() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("none.qcow2").display().to_string();
    assert_eq!(mica::run(["check", &path]).code(), Some(1));
    std::fs::write(&path, b"QFI\xfb").expect("written");
    let said = mica::run(["check", &path]);
    assert_eq!(said.code(), Some(1), "{said}");
    said.refusal();
}
