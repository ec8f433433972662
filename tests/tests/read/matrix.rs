//! Every image that `qemu-img` makes reads as QEMU reads it: cluster size by compression by
//! extended L2 by external data file by version by refcount width, alone and as the middle of a
//! chain.

use mica_tests::{judge, qemu, tools};
use std::path::Path;

/// Length of the disks: not a multiple of any cluster size but the smallest.
const DISK: &str = "12291K";

/// How an image is made.
#[derive(Clone, Copy, Debug)]
struct Form {
    cluster: u64,
    version: &'static str,
    refcount_bits: u32,
    compression: Option<&'static str>,
    extended_l2: bool,
    data_file: bool,
}

impl Form {
    /// The argument of `qemu-img create -o`.
    fn options(self) -> String {
        let mut options = format!("cluster_size={},compat={}", self.cluster, self.version);
        if self.version == "1.1" {
            options += &format!(",refcount_bits={}", self.refcount_bits);
            options += &format!(",extended_l2={}", if self.extended_l2 { "on" } else { "off" });
            options += &format!(",compression_type={}", self.compression.unwrap_or("zlib"));
        }
        if self.data_file {
            options += ",data_file=middle.data";
        }
        options
    }

    /// Whether it can have internal snapshots: they need refcounts above one.
    fn has_snapshots(self) -> bool {
        !self.data_file && self.refcount_bits > 1
    }
}

/// All forms of one cluster size; the refcount widths take turns.
fn forms(cluster: u64) -> Vec<Form> {
    let mut forms = Vec::new();
    let plain = Form {
        cluster,
        version: "1.1",
        refcount_bits: 16,
        compression: None,
        extended_l2: false,
        data_file: false,
    };
    for compression in [None, Some("zlib")] {
        forms.push(Form { version: "0.10", compression, ..plain });
    }
    for extended_l2 in [false, true] {
        if extended_l2 && cluster < 16 << 10 {
            continue;
        }
        for compression in [None, Some("zlib"), Some("zstd")] {
            forms.push(Form { compression, extended_l2, ..plain });
        }
        forms.push(Form { extended_l2, data_file: true, ..plain });
    }
    let widths = [16, 1, 64, 2, 32, 4, 8];
    let v3 = forms.iter_mut().filter(|form| form.version == "1.1");
    for (form, width) in v3.zip(widths.into_iter().cycle()) {
        form.refcount_bits = width;
    }
    forms
}

/// A base with data and zeros, the same below every form.
fn base(dir: &Path) {
    qemu::create(dir, "base.qcow2", &["-o", "cluster_size=64k"], DISK);
    let writes = ["write -P 0x11 0 3M", "write -P 0x12 5M 2000k", "write -z 1M 200k"];
    qemu::io(dir, &["-f", "qcow2"], "base.qcow2", &writes);
}

/// Changes the image as guests do: whole clusters and parts of them, zeros, discards, compressed
/// clusters if the form has them; a snapshot and a bitmap in between.
fn live(dir: &Path, image: &str, form: Form) {
    let whole = form.cluster.max(4096);
    let mut writes = vec![
        "write -P 0x21 100k 300k".to_owned(),
        "write -P 0x22 777k 3k".to_owned(),
        format!("write -P 0x23 {} {}", (4 * whole).min(4 << 20), (2 * whole).min(2 << 20)),
        "write -z 2M 130k".to_owned(),
        "write -z -u 5120k 256k".to_owned(),
        "discard 2600k 512k".to_owned(),
        // The last sectors: a part of the last cluster.
        "write -P 0x24 12290k 1k".to_owned(),
    ];
    let io = |writes: &[String]| {
        let writes: Vec<&str> = writes.iter().map(String::as_str).collect();
        qemu::io(dir, &["-f", "qcow2"], image, &writes);
    };
    io(&writes);
    if form.compression.is_some() {
        // Compressed writes go to clusters that are not allocated: the last MiB, except for its
        // end.
        let at = 8 << 20;
        writes = (0..4.min((4 << 20) / whole))
            .map(|n| format!("write -c -P {} {} {whole}", 0x31 + n, at + n * whole))
            .collect();
        io(&writes);
    }
    if form.has_snapshots() {
        qemu::img(dir, ["snapshot", "-c", "before", image]).ok();
        io(&["write -P 0x41 150k 100k".to_owned(), "write -P 0x42 9M 70k".to_owned()]);
    }
    if form.version == "1.1" && form.cluster >= 4096 {
        qemu::img(dir, ["bitmap", "--add", "-f", "qcow2", image, "changed"]).ok();
        io(&["write -P 0x43 7M 10k".to_owned()]);
    }
}

#[track_caller]
fn judge_all(cluster: u64) {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for form in forms(cluster) {
        println!("{form:?}");
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path();
        qemu::create(dir, "alone.qcow2", &["-o", &form.options()], DISK);
        live(dir, "alone.qcow2", form);
        judge::same_as_qemu(dir, "alone.qcow2");
        if form.has_snapshots() {
            let convert = ["convert", "-f", "qcow2", "-l", "before", "-O", "raw", "alone.qcow2"];
            qemu::img(dir, convert.iter().chain(&["before.raw"])).ok();
            judge::same_as_raw(dir, "alone.qcow2", "before.raw", &["-l", "before"]);
        }

        base(dir);
        qemu::overlay(dir, "middle.qcow2", "base.qcow2", &["-o", &form.options()]);
        live(dir, "middle.qcow2", form);
        judge::same_as_qemu(dir, "middle.qcow2");
        qemu::overlay(dir, "top.qcow2", "middle.qcow2", &["-o", "cluster_size=32k"]);
        let writes = ["write -P 0x51 90k 20k", "write -z 8M 40k", "write -P 0x52 12M 3k"];
        qemu::io(dir, &["-f", "qcow2"], "top.qcow2", &writes);
        judge::same_as_qemu(dir, "top.qcow2");
    }
}

macro_rules! sizes {
    ($($name:ident = $bytes:expr;)+) => {
        $(
            #[test]
            fn $name() {
                judge_all($bytes);
            }
        )+
    };
}

sizes! {
    clusters_of_512_bytes_read_as_qemu_reads_them = 512;
    clusters_of_1_kib_read_as_qemu_reads_them = 1 << 10;
    clusters_of_2_kib_read_as_qemu_reads_them = 2 << 10;
    clusters_of_4_kib_read_as_qemu_reads_them = 4 << 10;
    clusters_of_8_kib_read_as_qemu_reads_them = 8 << 10;
    clusters_of_16_kib_read_as_qemu_reads_them = 16 << 10;
    clusters_of_32_kib_read_as_qemu_reads_them = 32 << 10;
    clusters_of_64_kib_read_as_qemu_reads_them = 64 << 10;
    clusters_of_128_kib_read_as_qemu_reads_them = 128 << 10;
    clusters_of_256_kib_read_as_qemu_reads_them = 256 << 10;
    clusters_of_512_kib_read_as_qemu_reads_them = 512 << 10;
    clusters_of_1_mib_read_as_qemu_reads_them = 1 << 20;
    clusters_of_2_mib_read_as_qemu_reads_them = 2 << 20;
}
