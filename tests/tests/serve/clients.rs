//! Other projects' NBD clients work with the server.

use mica_tests::server::Server;
use mica_tests::{command, judge, mica, qemu, tools};
use serde_json::Value;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

const DISK_BYTES: u64 = 24 << 20;

/// A chain of three layers with data, zeros and holes, what QEMU reads of it, and mica on it.
struct Served {
    dir: TempDir,
    server: Server,
}

impl Served {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        qemu::create(dir.path(), "base.qcow2", &[], "24M");
        qemu::io(dir.path(), &[], "base.qcow2", &["write -P 1 1M 3M", "write -P 2 16M 1M"]);
        qemu::overlay(dir.path(), "middle.qcow2", "base.qcow2", &[]);
        qemu::io(dir.path(), &[], "middle.qcow2", &["write -P 3 2M 64k", "write -z 3M 128k"]);
        qemu::overlay(dir.path(), "top.qcow2", "middle.qcow2", &[]);
        qemu::io(dir.path(), &[], "top.qcow2", &["write -P 4 20M 12345", "write -z 8M 1M"]);
        qemu::flatten(dir.path(), "top.qcow2", "flat.raw");
        let more = ["--export-name", "disk", "--description", "a test"];
        let server = Server::mica(&dir.path().join("top.qcow2"), "qcow2", &more).expect("served");
        Self { dir, server }
    }

    fn path(&self, name: &str) -> String {
        self.dir.path().join(name).display().to_string()
    }

    fn flat(&self) -> Vec<u8> {
        fs::read(self.dir.path().join("flat.raw")).expect("flat")
    }

    fn uri(&self) -> String {
        self.server.uri()
    }

    /// Every client left cleanly: the server still serves, and stops as it should.
    #[track_caller]
    fn end(self) {
        let stopped = self.server.stop().expect("it stops");
        assert!(stopped.status.success() && !stopped.socket_left, "{stopped:?}");
    }
}

#[test]
fn nbdinfo_describes_the_export() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDINFO]) {
        return;
    }
    let served = Served::start();
    let said = command::run("nbdinfo", ["--json", &served.uri()]).json();
    assert_eq!(said["protocol"], "newstyle-fixed", "{said}");
    assert_eq!(said["structured"], true, "{said}");
    let export = &said["exports"][0];
    assert_eq!(export["export-size"], DISK_BYTES, "{said}");
    assert_eq!(export["is_read_only"], true, "{said}");
    assert_eq!(export["can_multi_conn"], true, "{said}");
    assert_eq!(export["can_df"], true, "{said}");
    assert_eq!(export["block_size_minimum"], 1, "{said}");
    let contexts = export["contexts"].as_array().expect("contexts");
    assert!(contexts.contains(&Value::from("base:allocation")), "{said}");

    let list = command::run("nbdinfo", ["--list", "--json", &served.uri()]).json();
    let names: Vec<_> = list["exports"]
        .as_array()
        .expect("exports")
        .iter()
        .filter_map(|export| export["export-name"].as_str())
        .collect();
    assert!(names.contains(&"disk"), "{list}");
    let size = command::run("nbdinfo", ["--size", &served.uri()]).ok();
    assert_eq!(size.trim(), DISK_BYTES.to_string());
    served.end();
}

#[test]
fn nbdinfo_maps_allocations() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDINFO]) {
        return;
    }
    let served = Served::start();
    let flat = served.flat();
    let map = command::run("nbdinfo", ["--map", "--json", &served.uri()]).json();
    let mut next = 0;
    for extent in map.as_array().expect("a list") {
        let [offset, length, kind] =
            ["offset", "length", "type"].map(|name| extent[name].as_u64().expect("a number"));
        assert_eq!(offset, next, "no gap: {map}");
        next = offset + length;
        let at = |offset| usize::try_from(offset).expect("small");
        let zeros = flat[at(offset)..at(next)].iter().all(|byte| *byte == 0);
        // Bit 0 says hole, bit 1 says that it reads as zeros.
        assert!(kind & 2 == 0 || zeros, "{extent} is said to be zeros");
        assert!(kind & 1 == 0 || zeros, "{extent} is said to be a hole");
    }
    assert_eq!(next, DISK_BYTES);
    let zeros = |at: u64| {
        let extents = map.as_array().expect("a list").iter();
        let mut covering = extents.filter(|extent| {
            let start = extent["offset"].as_u64().expect("a number");
            (start..start + extent["length"].as_u64().expect("a number")).contains(&at)
        });
        covering.next().expect("covered")["type"].as_u64().expect("a number") & 2 != 0
    };
    // A hole of the whole chain, a zero cluster of the middle, one of the top; data.
    assert!(zeros(0) && zeros(3 << 20) && zeros(8 << 20) && !zeros(1 << 20), "{map}");
    served.end();
}

#[test]
fn nbdcopy_and_qemu_img_copy_the_whole_disk() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDCOPY]) {
        return;
    }
    let served = Served::start();
    let flat = served.flat();
    for more in [&["--connections=1"][..], &["--connections=4"], &["--synchronous"]] {
        let copy = served.path("copy.raw");
        let uri = served.uri();
        command::run("nbdcopy", more.iter().chain(&[uri.as_str(), copy.as_str()])).ok();
        judge::same_bytes("nbdcopy", &fs::read(&copy).expect("copied"), &flat);
        fs::remove_file(copy).expect("removed");
    }
    let dir = served.dir.path();
    let convert = ["convert", "-f", "raw", "-O", "raw", &served.uri(), "converted.raw"];
    qemu::img(dir, convert).ok();
    judge::same_bytes("convert", &fs::read(dir.join("converted.raw")).expect("copied"), &flat);
    let convert = ["convert", "-f", "raw", "-O", "qcow2", &served.uri(), "converted.qcow2"];
    qemu::img(dir, convert).ok();
    qemu::img(dir, ["compare", "converted.qcow2", "top.qcow2"]).ok();
    served.end();
}

#[test]
fn qemu_io_reads_what_was_written_and_cannot_write() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let served = Served::start();
    let reads = [
        "read -P 1 1M 1M",
        "read -P 3 2M 64k",
        "read -P 0 3M 128k",
        "read -P 4 20M 12345",
        "read -P 0 20983865 7",
        "read -P 2 16M 1M",
        "read -P 0 8M 1M",
        "aio_read -P 1 1M 512k",
        "aio_flush",
    ];
    qemu::io(served.dir.path(), &["-r", "-f", "raw"], &served.uri(), &reads);
    let uri = served.uri();
    let write = ["-f", "raw", "-c", "write -P 9 0 4k", &uri];
    let refused = command::run("qemu-io", write);
    assert_ne!(refused.code(), Some(0), "{refused}");
    qemu::io(served.dir.path(), &["-r", "-f", "raw"], &served.uri(), &["read -P 0 0 4k"]);
    served.end();
}

#[test]
fn nbdsh_finds_every_promise_kept() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDSH]) {
        return;
    }
    let served = Served::start();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/serve/clients/promises.py");
    let (socket, flat) = (served.server.socket(), served.path("flat.raw"));
    let mut nbdsh = std::process::Command::new("nbdsh");
    // Its library belongs to the system's Python, even if another Python comes first in the path.
    let path = std::env::var("PATH").unwrap_or_default();
    nbdsh.env("PATH", format!("/usr/bin:/bin:{path}"));
    nbdsh.arg("-c").arg(format!("exec(open('{}').read())", script.display()));
    nbdsh.env("SOCKET", socket).env("FLAT", flat);
    let said = command::finish(&mut nbdsh).ok();
    assert!(said.ends_with("all kept\n"), "{said}");
    served.end();
}

#[test]
fn fio_reads_over_nbd() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::FIO]) {
        return;
    }
    let served = Served::start();
    let uri = format!("--uri={}", served.uri());
    let job = ["--name=read", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--iodepth=32"];
    let more = ["--size=24m", "--number_ios=20000", "--loops=4", "--output-format=json"];
    let said = command::run("fio", job.iter().chain(&more).chain(&[uri.as_str()])).ok();
    let start = said.find('{').expect("JSON");
    let said: Value = serde_json::from_str(&said[start..]).expect("JSON");
    assert_eq!(said["jobs"][0]["error"], 0, "{said}");
    assert!(said["jobs"][0]["read"]["total_ios"].as_u64().expect("a number") >= 6144, "{said}");
    served.end();
}

#[test]
fn several_clients_read_at_once_and_one_that_dies_affects_none() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDCOPY]) {
        return;
    }
    let served = Served::start();
    let flat = served.flat();
    std::thread::scope(|scope| {
        for number in 0..6 {
            let (served, flat) = (&served, &flat);
            scope.spawn(move || {
                let copy = served.path(&format!("copy-{number}.raw"));
                if number % 3 == 2 {
                    // Connects, asks, and is gone before the answer.
                    let mut client = served.server.connect(&Default::default()).expect("served");
                    let request = mica_tests::nbd::request(0, 0, 1, 0, 1 << 20);
                    std::io::Write::write_all(&mut client.stream, &request).expect("sent");
                } else {
                    command::run("nbdcopy", [&served.uri(), &copy]).ok();
                    judge::same_bytes("nbdcopy", &fs::read(copy).expect("copied"), flat);
                }
            });
        }
    });
    served.end();
}

#[test]
fn tcp_on_the_loopback_serves_too() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDINFO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    qemu::create(dir.path(), "disk.qcow2", &[], "8M");
    let image = dir.path().join("disk.qcow2");
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = free.local_addr().expect("an address").port();
    drop(free);
    let address = format!("tcp:127.0.0.1:{port}");
    let server = Server::mica(&image, "qcow2", &["--nbd", &address]).expect("served");
    let size = command::run("nbdinfo", ["--size", &format!("nbd://127.0.0.1:{port}")]).ok();
    assert_eq!(size.trim(), "8388608");
    assert!(server.stop().expect("it stops").status.success());

    let outside = ["serve", "-r", "--nbd", "tcp:0.0.0.0:0", "--format", "qcow2"];
    let image = image.display().to_string();
    mica::run(outside.iter().chain(&[image.as_str()])).refusal();
}
