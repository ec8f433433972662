//! Other projects' NBD clients write, and other projects' programs judge the image afterwards.
//!
//! Every test runs for each of [`KINDS`].

use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{clock, command, judge, mica, nbd, qemu, tools};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const MIB: usize = 1 << 20;

/// Kinds of images that are written.
const KINDS: &[Kind] = &[
    Kind { format: "raw", options: "preallocation=off" },
    Kind { format: "qcow2", options: "cluster_size=64k" },
    Kind { format: "qcow2", options: "cluster_size=64k,extended_l2=on" },
    Kind { format: "qcow2", options: "cluster_size=4k,refcount_bits=1" },
];

/// A kind of image.
struct Kind {
    format: &'static str,
    /// For `qemu-img create`.
    options: &'static str,
}

/// An image of zeros, and mica that serves it.
struct Served {
    dir: TempDir,
    format: &'static str,
    server: Server,
}

impl Kind {
    /// Makes an image of `size` and serves it, to be written, with `more` options.
    #[track_caller]
    fn serve(&self, size: &str, more: &[&str]) -> Served {
        println!("{} {}", self.format, self.options);
        let dir = tempfile::tempdir().expect("a folder");
        let image = dir.path().join("image");
        let create = ["create", "-q", "-f", self.format, "-o", self.options, "image", size];
        qemu::img(dir.path(), create).ok();
        let server = Server::mica_writable(&image, self.format, more).expect("served");
        Served { dir, format: self.format, server }
    }
}

impl Served {
    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn uri(&self) -> String {
        self.server.uri()
    }

    fn connect(&self) -> nbd::Connection {
        self.server.connect(&nbd::Wish::default()).expect("served")
    }

    /// Stops the server cleanly, and compares the image with `wanted`. Returns the bytes that it
    /// takes on its file system.
    #[track_caller]
    fn end_with(self, wanted: &[u8]) -> u64 {
        let format = self.format;
        let (flat, allocated) = self.end();
        judge::same_bytes(format, &flat, wanted);
        allocated
    }

    /// Stops the server cleanly, and checks the image. Returns its content, and the bytes that it
    /// takes.
    #[track_caller]
    fn end(self) -> (Vec<u8>, u64) {
        use std::os::unix::fs::MetadataExt;
        let Self { dir, format, server } = self;
        let stopped = server.stop().expect("it stops");
        assert!(stopped.status.success() && !stopped.socket_left, "{stopped:?}");
        if format != "raw" {
            qemu::img(dir.path(), ["check", "-q", "-f", format, "image"]).ok();
        }
        qemu::img(dir.path(), ["convert", "-f", format, "-O", "raw", "image", "flat"]).ok();
        let flat = fs::read(dir.path().join("flat")).expect("flat");
        (flat, dir.path().join("image").metadata().expect("an image").blocks() * 512)
    }
}

/// Bytes that are determined by their place.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at ^ at >> 8 ^ at >> 16).to_le_bytes()[0]).collect()
}

/// nbdsh with the system's Python, to which its library belongs, and `args`.
fn nbdsh(args: &[&str]) -> Command {
    let mut nbdsh = Command::new("nbdsh");
    let path = std::env::var("PATH").unwrap_or_default();
    nbdsh.env("PATH", format!("/usr/bin:/bin:{path}")).args(args);
    nbdsh
}

#[test]
fn nbdsh_finds_every_promise_kept() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDSH]) {
        return;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/write/nbd/promises.py");
    for kind in KINDS {
        let served = kind.serve("16M", &[]);
        let model = served.dir.path().join("model");
        let script = format!("exec(open('{}').read())", script.display());
        let mut nbdsh = nbdsh(&["-c", &script]);
        nbdsh.env("SOCKET", served.server.socket()).env("MODEL", &model);
        let said = command::finish(&mut nbdsh).ok();
        assert!(said.ends_with("all kept\n"), "{said}");
        served.end_with(&fs::read(model).expect("the model"));
    }
}

#[test]
fn qemu_io_writes_what_it_reads_back() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for kind in KINDS {
        let served = kind.serve("16M", &[]);
        let commands = [
            "write -P 1 0 1M",
            "write -P 2 -f 1M 64k",
            "write -P 3 100 300",
            "write -z 512k 64k",
            "write -z -u 640k 64k",
            "writev -P 4 2M 64k 4k 512 3k",
            "aio_write -P 5 4M 2M",
            "aio_write -P 6 6M 2M",
            "aio_flush",
            "flush",
            "discard 7M 1M",
            "read -P 1 0 100",
            "read -P 3 100 300",
            "read -P 1 400 4k",
            "read -P 0 512k 64k",
            "read -P 0 640k 64k",
            "read -P 6 6M 1M",
        ];
        qemu::io(served.dir.path(), &["-f", "raw"], &served.uri(), &commands);
        let mut wanted = vec![0; 16 * MIB];
        wanted[..MIB].fill(1);
        wanted[MIB..MIB + 65536].fill(2);
        wanted[100..400].fill(3);
        wanted[512 << 10..576 << 10].fill(0);
        wanted[640 << 10..704 << 10].fill(0);
        wanted[2 * MIB..2 * MIB + 73_216].fill(4);
        wanted[4 * MIB..6 * MIB].fill(5);
        wanted[6 * MIB..8 * MIB].fill(6);
        // What was discarded reads as it did, or as zeros; mica frees its space where it can.
        let now = served.connect().read(7 << 20, 1 << 20).expect("read");
        assert!(now.iter().all(|byte| *byte == 0) || now.iter().all(|byte| *byte == 6));
        wanted[7 * MIB..8 * MIB].copy_from_slice(&now);
        served.end_with(&wanted);
    }
}

#[test]
fn nbdcopy_copies_files_of_any_length_in() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDCOPY]) {
        return;
    }
    for kind in KINDS {
        for len in [700, 9 * MIB + 12_345, 16 * MIB] {
            let served = kind.serve("16M", &[]);
            let file = served.dir.path().join("file");
            let mut bytes = pattern(len);
            if len > 6 * MIB {
                bytes[2 * MIB..5 * MIB].fill(0);
            }
            fs::write(&file, &bytes).expect("written");
            let file = file.display().to_string();
            let copy = ["--flush", "--connections=4", &file, &served.uri()];
            command::run("nbdcopy", copy).ok();
            bytes.resize(16 * MIB, 0);
            served.end_with(&bytes);
        }
    }
}

/// The story: what was written between the end of the file and that of its last sector was
/// acknowledged, and was not there afterwards.
#[test]
fn raw_file_that_ends_within_a_sector_takes_the_rest_of_it() {
    let dir = tempfile::tempdir().expect("a folder");
    let image = dir.path().join("disk.raw");
    let begin = || fs::write(&image, [7; 1000]).expect("written");
    let mut wanted = vec![7; 1000];
    wanted.extend([5; 24]);
    let input = dir.path().join("input");
    fs::write(&input, [5; 24]).expect("written");

    begin();
    let mica = |words: &[&str]| {
        let mut command = Command::new(mica::binary());
        command.current_dir(dir.path()).args(words);
        command
    };
    let file = fs::File::open(&input).expect("there");
    command::finish_with(&mut mica(&["write", "-f", "raw", "disk.raw", "1000"]), file).ok();
    judge::same_bytes("the file", &fs::read(&image).expect("there"), &wanted);
    let said = command::finish(&mut mica(&["read", "-f", "raw", "disk.raw", "1000", "24"]));
    assert_eq!(said.ok().as_bytes(), [5; 24]);
    let file = fs::File::open(&input).expect("there");
    let beyond = command::finish_with(&mut mica(&["write", "disk.raw", "1001"]), file);
    assert_eq!(beyond.code(), Some(1), "{beyond}");

    begin();
    let server = Server::mica_writable(&image, "raw", &[]).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("connected");
    assert_eq!(client.read(512, 512).expect("read")[488..], [0; 24]);
    let mut guest = Guest::connect(&server).expect("connected");
    assert_eq!(guest.write(512, &wanted[512..]).expect("answered"), 0);
    assert_eq!(guest.flush().expect("answered"), 0);
    assert_eq!(client.read(512, 512).expect("read"), wanted[512..]);
    drop((client, guest));
    assert!(server.stop().expect("it stops").status.success());
    judge::same_bytes("the file", &fs::read(&image).expect("there"), &wanted);
    command::finish(&mut mica(&["resize", "-f", "raw", "disk.raw", "2048"])).ok();
    wanted.resize(2048, 0);
    judge::same_bytes("the file", &fs::read(&image).expect("there"), &wanted);
}

#[test]
fn fio_verifies_what_four_connections_write_at_depth_32() {
    if !tools::present(&[tools::QEMU_IMG, tools::FIO]) {
        return;
    }
    for kind in KINDS {
        for more in [&["--queues", "2"][..], &["--queues", "2", "--cache", "none"]] {
            let served = kind.serve("128M", more);
            let uri = format!("--uri={}", served.uri());
            let mut fio = Command::new("fio");
            // fio leaves a state file behind.
            fio.current_dir(served.dir.path());
            fio.args(["--name=w", "--ioengine=nbd", "--rw=randwrite", "--bsrange=4k-64k"]);
            fio.args(["--numjobs=4", "--iodepth=32", "--size=32M", "--offset_increment=32M"]);
            fio.args(["--verify=crc32c", "--verify_fatal=1", "--fsync=64", "--output-format=json"]);
            let finished = command::finish(fio.arg(&uri));
            assert!(
                finished.status.success(),
                "{finished:?}\nthe server said:\n{}",
                served.server.log()
            );
            let said = finished.ok();
            // A remark may precede the document.
            let (_, document) = said.split_at(said.find('{').expect("a document"));
            let said: Value = serde_json::from_str(document).expect("JSON");
            let jobs = said["jobs"].as_array().expect("jobs");
            assert_eq!(jobs.len(), 4);
            for job in jobs {
                assert_eq!(job["error"], 0, "{job}");
                assert_eq!(job["write"]["io_bytes"], 32 << 20);
                assert_eq!(job["read"]["io_bytes"], 32 << 20, "not verified");
            }
            let all = served.connect().read_all().expect("read");
            served.end_with(&all);
        }
    }
}

#[test]
fn space_is_given_back_by_trims_and_zeroes_unless_it_is_to_be_kept() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDSH]) {
        return;
    }
    let script = "
h.pwrite(b'\\x55' * (16 << 20), 0)
h.flush()
h.trim(4 << 20, 0)
h.zero(4 << 20, 4 << 20)
h.zero(4 << 20, 8 << 20, nbd.CMD_FLAG_NO_HOLE)
h.flush()
assert h.pread(8 << 20, 4 << 20) == bytes(8 << 20)
";
    for kind in KINDS {
        for (mode, least, most) in [("unmap", 7, 10), ("ignore", 15, 18)] {
            let served = kind.serve("16M", &["--discard", mode]);
            command::finish(&mut nbdsh(&["-u", &served.uri(), "-c", script])).ok();
            let uri = served.uri();
            let map = qemu::img(served.dir.path(), ["map", "--output=json", "-f", "raw", &uri]);
            let map = map.json();
            let runs = map.as_array().expect("a map").iter();
            let data = runs.filter(|run| run["data"] == Value::Bool(true));
            let data: u64 = data.filter_map(|run| run["length"].as_u64()).sum();
            assert!(data >= 4 << 20 && data <= most << 20, "{mode}: {map}");
            let mut wanted = vec![0x55; 16 * MIB];
            wanted[4 * MIB..12 * MIB].fill(0);
            if mode == "unmap" {
                wanted[..4 * MIB].fill(0);
            }
            let mib = served.end_with(&wanted) >> 20;
            assert!((least..=most).contains(&mib), "{mode}: {mib} MiB are allocated");
        }
    }
}

#[test]
fn read_only_export_refuses_and_leaves_the_image_alone() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDSH]) {
        return;
    }
    let script = "
import errno
assert h.is_read_only()
h.set_strict_mode(0)
for call in [lambda: h.pwrite(b'x' * 512, 0), lambda: h.zero(512, 0), lambda: h.trim(512, 0)]:
    try:
        call()
    except nbd.Error as said:
        assert said.errnum == errno.EPERM, said
    else:
        raise AssertionError('not refused')
h.flush()
print(h.pread(512, 0)[0])
";
    for kind in KINDS {
        let served = kind.serve("1M", &["--read-only"]);
        let before = served.image().metadata().expect("there").modified().expect("a time");
        let said = command::finish(&mut nbdsh(&["-u", &served.uri(), "-c", script])).ok();
        assert_eq!(said, "0\n");
        let write = ["-f", "raw", "-c", "write -P 9 0 4k", &served.uri()];
        assert!(!command::run("qemu-io", write).status.success());
        let after = served.image().metadata().expect("there").modified().expect("a time");
        assert_eq!(after, before, "the image was written");
        served.end_with(&vec![0; MIB]);
    }
}

#[test]
fn client_killed_in_the_middle_of_a_payload_affects_no_other() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDSH]) {
        return;
    }
    // Announces that half of a payload is in flight, and waits to be killed.
    let script = "
import os, socket, struct, sys, time
h.pwrite(b'\\x11' * 65536, 0)
s = socket.socket(fileno=os.dup(h.aio_get_fd()))
s.setblocking(True)
s.sendall(struct.pack('>IHHQQI', 0x25609513, 0, 1, 7, 0, 1 << 20) + b'\\x99' * 500000)
print('half', flush=True)
time.sleep(100)
";
    for kind in KINDS {
        let served = kind.serve("4M", &[]);
        for _ in 0..3 {
            let mut nbdsh = nbdsh(&["-u", &served.uri(), "-c", script]);
            nbdsh.stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = nbdsh.spawn().expect("started");
            let mut said = [0; 5];
            child.stdout.take().expect("piped").read_exact(&mut said).expect("it says so");
            assert_eq!(said, *b"half\n");
            let mut other = served.connect();
            assert_eq!(other.read(0, 512).expect("others are served"), vec![0x11; 512]);
            child.kill().expect("killed");
            child.wait().expect("ended");
        }
        let mut wanted = vec![0; 4 * MIB];
        wanted[..65536].fill(0x11);
        served.end_with(&wanted);
    }
}

#[test]
fn fio_killed_while_it_writes_leaves_whole_sectors() {
    if !tools::present(&[tools::QEMU_IMG, tools::FIO]) {
        return;
    }
    for kind in KINDS {
        let served = kind.serve("32M", &[]);
        for round in 0..3 {
            let mut fio = Command::new("fio");
            fio.current_dir(served.dir.path());
            fio.args(["--name=w", "--ioengine=nbd", "--rw=randwrite", "--bs=64k"]);
            fio.args(["--iodepth=32", "--size=32M", "--time_based", "--runtime=30"]);
            fio.args(["--thread"]);
            fio.arg(format!("--buffer_pattern=0x7{round}"));
            fio.arg(format!("--uri={}", served.uri()));
            let mut child = fio.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("fio");
            let mut reader = served.connect();
            let begun = clock::poll(Duration::from_secs(30), Duration::from_millis(20), || {
                let all = reader.read_all().expect("the server lives");
                all.contains(&(0x70 + round)).then_some(())
            });
            child.kill().expect("killed");
            child.wait().expect("ended");
            begun.expect("fio writes");
        }
        // What the last client had sent may still be in progress when it is gone, and is done at
        // the end.
        served.connect().read_all().expect("the server lives");
        for sector in served.end().0.chunks(512) {
            let is_whole = sector.iter().all(|byte| *byte == sector[0]);
            assert!(is_whole && matches!(sector[0], 0 | 0x70..=0x72), "a torn sector");
        }
    }
}

#[test]
fn shutdown_ends_requests_in_flight_and_closes_the_image() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    for kind in KINDS {
        let served = kind.serve("4M", &["--inject", "delay=50ms,op=write"]);
        let mut client = served.connect();
        for at in 0..8_u64 {
            let head = nbd::request(1, 0, at, at * 65536, 65536);
            client.stream.write_all(&head).expect("sent");
            client.stream.write_all(&vec![0x20 + at.to_le_bytes()[0]; 65536]).expect("sent");
        }
        // The delay keeps them in flight. What is not accepted by then has no answer and no effect.
        clock::sleep(Duration::from_millis(20));
        let mut wanted = vec![0; 4 * MIB];
        let Served { dir, format, server } = served;
        let stopped = server.stop().expect("it stops");
        assert!(stopped.status.success(), "{stopped:?}");
        let mut replies = Vec::new();
        client.stream.read_to_end(&mut replies).expect("closed");
        for reply in replies.as_chunks::<16>().0 {
            assert_eq!(reply[4..8], [0; 4], "an error");
            let at = usize::from(reply[15]) * 65536;
            wanted[at..at + 65536].fill(0x20 + reply[15]);
        }
        assert!(!replies.is_empty(), "none was taken before the signal");
        qemu::img(dir.path(), ["convert", "-f", format, "-O", "raw", "image", "flat"]).ok();
        let flat = fs::read(dir.path().join("flat")).expect("flat");
        judge::same_bytes("image", &flat, &wanted);
    }
}

#[test]
fn failed_sync_is_reported_to_the_client_and_at_the_end() {
    if !tools::present(&[tools::QEMU_IMG, tools::NBDSH]) {
        return;
    }
    let script = "
import errno
h.pwrite(b'x' * 4096, 0)
for call in [h.flush, h.flush, lambda: h.pwrite(b'y' * 4096, 0)]:
    try:
        call()
    except nbd.Error as said:
        assert said.errnum == errno.EIO, said
    else:
        raise AssertionError('not refused')
assert h.pread(4096, 0) == b'x' * 4096
";
    for kind in KINDS {
        // Without a log, whose name in the image would be the first thing to be synced.
        let options = ["--log-level", "off", "--redo-dir", "off"];
        let fault = ["--inject", "error=nth:1,op=sync"];
        let served = kind.serve("4M", &[options.as_slice(), &fault].concat());
        command::finish(&mut nbdsh(&["-u", &served.uri(), "-c", script])).ok();
        let stopped = served.server.stop().expect("it stops");
        assert_eq!(stopped.status.code(), Some(1), "{stopped:?}");
        let lines: Vec<_> = stopped.log.lines().collect();
        assert_eq!(lines.len(), 1, "one clear line is wanted: {stopped:?}");
        assert!(lines[0].contains("image"), "{stopped:?}");
    }
}

#[test]
fn null_disk_takes_writes_and_drops_them() {
    if !tools::present(&[tools::QEMU_IO]) {
        return;
    }
    let server = Server::start("", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--format", "null", "--nbd"]).arg(socket).arg("1G");
        serve
    });
    let server = server.expect("served");
    let dir = tempfile::tempdir().expect("a folder");
    let commands = ["write -P 1 0 1M", "write -z 1M 1M", "discard 0 1G", "flush", "read -P 0 0 1M"];
    qemu::io(dir.path(), &["-f", "raw"], &server.uri(), &commands);
    assert!(server.stop().expect("it stops").status.success());
}
