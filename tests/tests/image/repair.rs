//! `mica check -r` repairs what `qemu-img check -r` repairs: copies of one broken image, one for
//! each program; afterwards QEMU judges both, and compares what a guest reads.

use mica_tests::{mica, qemu, tools};
use serde_json::Value;
use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// All widths of refcounts, cluster sizes from end to end, and extended L2.
const SHAPES: &[&str] = &[
    "compat=0.10",
    "cluster_size=512,refcount_bits=64",
    "cluster_size=4k,refcount_bits=8",
    "cluster_size=64k,refcount_bits=1",
    "cluster_size=64k,refcount_bits=2",
    "cluster_size=64k,refcount_bits=4",
    "cluster_size=64k,refcount_bits=32",
    "cluster_size=64k,extended_l2=on,compression_type=zstd",
    "cluster_size=2M,refcount_bits=16",
    "cluster_size=64k,lazy_refcounts=on",
];

/// Makes an image with data, zeros, compressed clusters and, if refcounts allow it, a snapshot.
fn image(dir: &Path, options: &str) {
    qemu::create(dir, "disk.qcow2", &["-o", options], "16M");
    let one_bit = options.contains("refcount_bits=1") && !options.contains("refcount_bits=16");
    qemu::io(dir, &[], "disk.qcow2", &["write -P 1 0 1M", "write -z 4M 128k"]);
    if !one_bit {
        let packed = match options.contains("cluster_size=2M") {
            true => "write -c -P 2 6M 2M",
            false => "write -c -P 2 6M 64k",
        };
        qemu::io(dir, &[], "disk.qcow2", &[packed]);
        qemu::img(dir, ["snapshot", "-c", "one", "disk.qcow2"]).ok();
    }
    qemu::io(dir, &[], "disk.qcow2", &["write -P 4 64k 200k", "write -P 5 10M 700k"]);
}

struct Image {
    file: std::fs::File,
}

impl Image {
    fn open(dir: &Path) -> Self {
        let path = dir.join("disk.qcow2");
        let file = OpenOptions::new().read(true).write(true).open(path).expect("there");
        Self { file }
    }

    fn word(&self, offset: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, offset).expect("in the file");
        u64::from_be_bytes(bytes)
    }

    fn put(&self, offset: u64, word: u64) {
        self.file.write_all_at(&word.to_be_bytes(), offset).expect("written");
    }

    fn cluster_bytes(&self) -> u64 {
        1 << (self.word(20) >> 32)
    }

    fn l1(&self) -> u64 {
        self.word(40)
    }

    fn l2(&self) -> u64 {
        self.word(self.l1()) & 0x00ff_ffff_ffff_fe00
    }

    /// Where the first L2 entries are, extended or not.
    fn l2_entry(&self, index: u64) -> u64 {
        self.l2() + index * if self.is_extended() { 16 } else { 8 }
    }

    fn is_extended(&self) -> bool {
        self.version() == 3 && self.word(72) & 16 != 0
    }

    fn version(&self) -> u64 {
        self.word(0) & 0xffff_ffff
    }

    fn refcount_table(&self) -> u64 {
        self.word(48)
    }

    /// Bytes of the first refcount block for clusters in the file.
    fn refcounts_in_use(&self) -> u64 {
        let len = self.file.metadata().expect("there").len();
        let order = if self.version() == 3 { self.word(96) >> 32 } else { 4 };
        let bytes = ((len / self.cluster_bytes()) << order) / 8;
        bytes.min(self.cluster_bytes())
    }

    fn fill(&self, offset: u64, byte: u8, len: u64) {
        let bytes = vec![byte; usize::try_from(len).expect("short")];
        self.file.write_all_at(&bytes, offset).expect("written");
    }

    fn cut(&self, bytes: u64) {
        let len = self.file.metadata().expect("there").len();
        self.file.set_len(len - bytes.min(len / 2)).expect("shorter");
    }
}

/// What is left afterwards.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Left {
    /// Nothing, by either program.
    Clean,
    /// The same by both.
    Same,
    /// Nothing by mica; QEMU leaves something.
    CleanByMica,
}

/// Named kinds of damage to an image, and what `-r all` leaves of each.
type Harm = (&'static str, fn(&Image), Left);

const HARMS: &[Harm] = &[
    ("nothing", |_| {}, Left::Clean),
    (
        "a refcount block of zeros",
        |image| image.fill(image.word(image.refcount_table()), 0, image.cluster_bytes()),
        Left::Clean,
    ),
    (
        "a refcount block of ones",
        |image| image.fill(image.word(image.refcount_table()), 0xff, image.refcounts_in_use()),
        Left::Clean,
    ),
    ("no refcount block", |image| image.put(image.refcount_table(), 0), Left::Clean),
    (
        "a refcount block off its cluster",
        |image| image.put(image.refcount_table(), 0x7fff_ff00),
        Left::Clean,
    ),
    (
        "a refcount block with reserved bits",
        |image| image.put(image.refcount_table(), image.word(image.refcount_table()) | 8),
        Left::CleanByMica,
    ),
    (
        "a refcount block on the L2 table",
        |image| image.put(image.refcount_table(), image.l2()),
        Left::Clean,
    ),
    ("no refcount table", |image| image.put(56, image.word(56) & 0xffff_ffff), Left::Clean),
    (
        "flags turned",
        |image| {
            image.put(image.l1(), image.word(image.l1()) ^ 1 << 63);
            for index in 0..4 {
                let at = image.l2_entry(index);
                let is_compressed = image.word(at) >> 62 & 1 == 1;
                if !is_compressed {
                    image.put(at, image.word(at) ^ 1 << 63);
                }
            }
        },
        Left::Clean,
    ),
    (
        "an entry that is lost",
        |image| {
            let len = image.l2_entry(1) - image.l2_entry(0);
            image.fill(image.l2_entry(0), 0, len);
        },
        Left::Clean,
    ),
    (
        "an entry with reserved bits",
        |image| image.put(image.l2_entry(0), image.word(image.l2_entry(0)) | 1 << 58),
        Left::Same,
    ),
    (
        "an entry off its cluster",
        |image| image.put(image.l2_entry(0), image.word(image.l2_entry(0)) + 256 + 512),
        Left::Same,
    ),
    (
        "an entry far beyond the file",
        |image| image.put(image.l2_entry(0), 1 << 63 | 1 << 50),
        Left::Same,
    ),
    ("a lost tail", |image| image.cut(700 << 10), Left::CleanByMica),
    (
        "a lost tail, no refcounts, the dirty bit",
        |image| {
            if image.version() == 3 {
                image.put(72, image.word(72) | 1);
            }
            image.fill(image.word(image.refcount_table()), 0, image.cluster_bytes());
            image.cut(700 << 10);
        },
        Left::CleanByMica,
    ),
    (
        "the marks dirty and corrupt",
        |image| {
            if image.version() == 3 {
                image.put(72, image.word(72) | 3);
            }
        },
        Left::Clean,
    ),
];

/// What `check --output=json` says of `image` in `dir`, and its exit status.
fn judged(dir: &Path, image: &str) -> (Value, Option<i32>) {
    let said = qemu::img(dir, ["check", "--output=json", "-f", "qcow2", image]);
    let json = serde_json::from_str(&said.stdout).unwrap_or_else(|_| panic!("{said}"));
    (json, said.code())
}

fn count(json: &Value, field: &str) -> u64 {
    json.get(field).and_then(Value::as_u64).unwrap_or(0)
}

#[track_caller]
fn repair_both(dir: &Path, what: &str, left: Left) {
    std::fs::copy(dir.join("disk.qcow2"), dir.join("theirs.qcow2")).expect("copied");
    std::fs::copy(dir.join("disk.qcow2"), dir.join("before.qcow2")).expect("copied");
    let path = dir.join("disk.qcow2").display().to_string();
    let ours = mica::run(["check", "-r", "all", "--output", "json", "-f", "qcow2", &path]);
    let theirs =
        qemu::img(dir, ["check", "-r", "all", "--output=json", "-f", "qcow2", "theirs.qcow2"]);
    let (our_judgement, our_code) = judged(dir, "disk.qcow2");
    let (their_judgement, their_code) = judged(dir, "theirs.qcow2");
    let context = format!("{what}\nours: {ours}\ntheirs: {theirs}");
    assert_eq!(ours.code(), our_code, "mica's exit status is what QEMU sees: {context}");
    match left {
        Left::Clean => {
            assert_eq!(our_code, Some(0), "{our_judgement}\n{context}");
            // QEMU may leak the clusters into which it wrote the old refcounts.
            assert!(matches!(their_code, Some(0 | 3)), "{their_judgement}\n{context}");
        }
        Left::Same => {
            assert_eq!(our_code, their_code, "{our_judgement}\n{context}");
            for field in ["corruptions", "leaks", "check-errors"] {
                let [ours, theirs] =
                    [&our_judgement, &their_judgement].map(|json| count(json, field));
                assert_eq!(ours, theirs, "{field}: {context}");
            }
        }
        Left::CleanByMica => assert_eq!(our_code, Some(0), "{our_judgement}\n{context}"),
    }
    if left == Left::Same {
        return;
    }
    let compare = |one: &str, other: &str| {
        let said = qemu::img(dir, ["compare", "-U", "-f", "qcow2", "-F", "qcow2", one, other]);
        // 2: QEMU does not open it, broken as it is.
        let unopened = said.code() == Some(2) && other == "before.qcow2";
        assert!(said.code() == Some(0) || unopened, "{one} {other}: {said}\n{context}");
    };
    compare("disk.qcow2", "before.qcow2");
    if matches!(their_code, Some(0 | 3)) {
        compare("disk.qcow2", "theirs.qcow2");
    }
    // QEMU continues writing it, and finds nothing afterwards.
    qemu::io(dir, &[], "disk.qcow2", &["write -P 9 1M 4M", "discard 2M 1M"]);
    assert_eq!(judged(dir, "disk.qcow2").1, Some(0), "{context}");
}

#[test]
fn broken_images_are_repaired_as_by_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for options in SHAPES {
        let made = tempfile::tempdir().expect("a folder");
        image(made.path(), options);
        for (what, harm, left) in HARMS {
            let dir = tempfile::tempdir().expect("a folder");
            std::fs::copy(made.path().join("disk.qcow2"), dir.path().join("disk.qcow2"))
                .expect("copied");
            harm(&Image::open(dir.path()));
            repair_both(dir.path(), &format!("{what}, {options}"), *left);
        }
    }
}

/// Both programs repair copies of `disk.qcow2` in `dir` with `-r what`; their exit status and
/// counts are the same.
#[track_caller]
fn same_repair(dir: &Path, what: &str) -> Value {
    std::fs::copy(dir.join("disk.qcow2"), dir.join("theirs.qcow2")).expect("copied");
    let path = dir.join("disk.qcow2").display().to_string();
    let ours = mica::run(["check", "-r", what, "--output", "json", "-f", "qcow2", &path]);
    let theirs =
        qemu::img(dir, ["check", "-r", what, "--output=json", "-f", "qcow2", "theirs.qcow2"]);
    let context = format!("{ours}\n{theirs}");
    assert_eq!(ours.code(), theirs.code(), "{context}");
    let [ours, theirs] = [ours, theirs].map(|said| serde_json::from_str(&said.stdout));
    let (Ok::<Value, _>(ours), Ok::<Value, _>(theirs)) = (ours, theirs) else {
        // Neither could report anything.
        return Value::Null;
    };
    let fields = ["leaks-fixed", "corruptions-fixed", "leaks", "corruptions", "check-errors"];
    for field in fields {
        assert_eq!(count(&ours, field), count(&theirs, field), "{field}: {context}");
    }
    ours
}

/// Named kinds of damage to an image.
type LittleHarm = (&'static str, fn(&Image));

#[test]
fn what_was_repaired_is_counted_as_by_qemu() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    fn refcounts(image: &Image) -> u64 {
        image.word(image.refcount_table())
    }
    let harms: &[LittleHarm] = &[
        ("nothing", |_| {}),
        ("leaks", |image| image.fill(refcounts(image) + 1, 9, 1)),
        ("too many by one: flags follow", |image| {
            let data = (image.word(image.l2_entry(2)) & 0x00ff_ffff_ffff_fe00) >> 16;
            image.fill(refcounts(image) + 2 * data + 1, 2, 1);
        }),
        ("too few", |image| {
            let shared = (image.word(image.l2_entry(8)) & 0x00ff_ffff_ffff_fe00) >> 16;
            image.fill(refcounts(image) + 2 * shared + 1, 1, 1);
        }),
        ("a reserved bit", |image| {
            image.put(image.l2_entry(0), image.word(image.l2_entry(0)) | 1 << 58);
        }),
        ("none, which cannot be repaired with the leaks", |image| {
            image.fill(refcounts(image) + 1, 0, 1);
        }),
    ];
    for (what, harm) in harms {
        for mode in ["leaks", "all"] {
            let rebuilt = what.starts_with("none") && mode == "all";
            if rebuilt {
                // QEMU also counts what it wrote in the process.
                continue;
            }
            let dir = tempfile::tempdir().expect("a folder");
            image(dir.path(), "cluster_size=64k");
            harm(&Image::open(dir.path()));
            println!("{what}, -r {mode}");
            same_repair(dir.path(), mode);
        }
    }
}

#[test]
fn bitmaps_and_data_files_are_repaired_too() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    image(dir.path(), "cluster_size=64k");
    qemu::img(dir.path(), ["bitmap", "--add", "disk.qcow2", "dirty"]).ok();
    qemu::io(dir.path(), &[], "disk.qcow2", &["write -P 7 0 1M"]);
    let harmed = Image::open(dir.path());
    harmed.put(harmed.refcount_table(), 0);
    repair_both(dir.path(), "an image with a bitmap", Left::Clean);
    let info = qemu::img(dir.path(), ["info", "--output=json", "disk.qcow2"]);
    assert!(info.stdout.contains("\"dirty\""), "{info}");

    let dir = tempfile::tempdir().expect("a folder");
    let options = ["-o", "data_file=disk.raw,data_file_raw=on"];
    qemu::create(dir.path(), "disk.qcow2", &options, "16M");
    qemu::io(dir.path(), &[], "disk.qcow2", &["write -P 7 0 1M"]);
    let harmed = Image::open(dir.path());
    harmed.put(harmed.l2_entry(3), harmed.word(harmed.l2_entry(3)) ^ 1 << 63);
    harmed.put(harmed.refcount_table(), 0);
    repair_both(dir.path(), "an image with a data file", Left::Clean);
}

#[test]
fn raw_images_have_nothing_to_repair() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("disk.raw");
    std::fs::write(&path, [0; 512]).expect("written");
    let said = mica::run(["check", "-r", "all", "-f", "raw", &path.display().to_string()]);
    assert_eq!(said.code(), Some(63), "{said}");
}
