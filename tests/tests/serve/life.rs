//! The server as a program: how it starts, stops, refuses, and shares files with QEMU.

use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{clock, command, judge, mica, nbd, qemu, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// How long anything here may take. The machine may be busy.
const LIMIT: Duration = Duration::from_secs(60);

fn disk(dir: &Path) {
    qemu::create(dir, "base.qcow2", &[], "8M");
    qemu::io(dir, &[], "base.qcow2", &["write -P 1 0 2M", "write -c -P 2 4M 64k"]);
    qemu::overlay(dir, "disk.qcow2", "base.qcow2", &[]);
    qemu::io(dir, &[], "disk.qcow2", &["write -P 3 1M 100k"]);
}

#[test]
fn both_signals_end_it_cleanly_with_clients_connected() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    disk(dir.path());
    for signal in [Signal::TERM, Signal::INT] {
        let server = Server::mica(&dir.path().join("disk.qcow2"), "qcow2", &[]).expect("served");
        let mut client = server.connect(&nbd::Wish::default()).expect("served");
        client.read(0, 4096).expect("read");
        let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
        kill_process(pid, signal).expect("signalled");
        // A second signal does no harm; `stop` sends SIGTERM.
        let stopped = server.stop().expect("it stops");
        assert_eq!(stopped.status.code(), Some(0), "{signal:?}: {stopped:?}");
        assert!(!stopped.socket_left, "{signal:?}");
    }
}

#[test]
fn signals_that_ask_for_nothing_do_nothing_and_the_one_that_ends_it_is_named() {
    let server = Server::mica(Path::new("1M"), "null", &["--log-level", "info"]).expect("served");
    let pid = i32::try_from(server.pid()).ok().and_then(Pid::from_raw).expect("a process");
    for signal in [Signal::USR1, Signal::USR2, Signal::PIPE] {
        kill_process(pid, signal).expect("signalled");
        let mut client = server.connect(&nbd::Wish::default()).expect("it serves on");
        client.read(0, 4096).expect("read");
    }
    let stopped = server.stop().expect("it stops");
    assert_eq!(stopped.status.code(), Some(0), "{stopped:?}");
    assert!(stopped.log.contains("stopping on SIGTERM"), "{stopped:?}");
}

/// The story: whoever read the log went away, and the server with the next line.
#[test]
fn log_that_nobody_reads_ends_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let socket = dir.path().join("socket");
    let mut serve = Command::new(mica::binary());
    serve.args(["serve", "--log-level", "debug", "--format", "null", "--nbd"]).arg(&socket);
    serve.arg("1M").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = serve.spawn().expect("started");
    let log = child.stderr.take().expect("a pipe");
    clock::poll(LIMIT, Duration::from_millis(1), || socket.exists().then_some(()));
    drop(log);
    for _ in 0..3 {
        let mut client = nbd::Connection::open(&socket, "", &nbd::Wish::default()).expect("served");
        client.read(0, 4096).expect("read");
        client.disconnect().expect("left");
    }
    let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a process");
    kill_process(pid, Signal::TERM).expect("signalled");
    let status = command::wait(&mut child, LIMIT).expect("it stops");
    assert_eq!(status.code(), Some(0));
}

/// The story: an incremental backup went on from a bitmap that said nothing any more.
#[test]
fn writer_names_the_bitmaps_that_nobody_saved() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "disk.qcow2", &[], "8M");
    for name in ["monday", "tuesday"] {
        qemu::img(dir, ["bitmap", "--add", "disk.qcow2", name]).ok();
    }
    let image = dir.join("disk.qcow2");
    let bitmaps = "dirty bitmaps";
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("served");
    let kept = server.stop().expect("it stops");
    assert!(!kept.log.contains(bitmaps), "they are kept true: {kept:?}");

    let path = image.display().to_string();
    mica::run(["snapshot", "-c", "one", &path]).ok();
    for name in ["monday", "tuesday"] {
        mica::run(["bitmap", "--disable", &path, name]).ok();
    }
    // Of what is disabled nothing is recorded.
    mica::run(["snapshot", "-a", "one", &path]).ok();
    qemu::img(dir, ["bitmap", "--add", "disk.qcow2", "wednesday"]).ok();
    let reader = Server::mica(&image, "qcow2", &[]).expect("served").stop().expect("it stops");
    assert!(!reader.log.contains(bitmaps), "a reader has no use for them: {reader:?}");
    let server = Server::mica_writable(&image, "qcow2", &[]).expect("served");
    let warned = server.log();
    for part in ["disk.qcow2", bitmaps, "\"monday\", \"tuesday\" are", "must be a full one"] {
        assert!(warned.contains(part), "{part}: {warned}");
    }
    let mut guest = Guest::connect(&server).expect("served");
    assert_eq!(guest.write(0, &[1; 512]).expect("answered"), 0);
    drop(guest);
    server.stop().expect("it stops");
    let info = qemu::img(dir, ["info", "--output", "json", "disk.qcow2"]).json();
    let flags = info["format-specific"]["data"]["bitmaps"].as_array().expect("bitmaps").iter();
    let in_use: Vec<_> =
        flags.map(|bitmap| bitmap["flags"].to_string().contains("in-use")).collect();
    assert_eq!(in_use, [true, true, false], "{info}");
}

#[test]
fn a_live_socket_is_not_taken_from_its_server() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    disk(dir.path());
    let image = dir.path().join("disk.qcow2");
    let server = Server::mica(&image, "qcow2", &[]).expect("served");
    let socket = server.socket();
    let mut second = Command::new(mica::binary());
    second.arg("serve").arg("--read-only").arg("--nbd").arg(&socket).arg(&image);
    command::finish_within(&mut second, LIMIT).refusal();
    let mut client = server.connect(&nbd::Wish::default()).expect("the first serves on");
    client.read(0, 4096).expect("read");
    server.stop().expect("it stops");
}

#[test]
fn every_way_of_doing_io_reads_the_same() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    disk(dir);
    // An end that is not sector-aligned: compressed data is the last thing in the file.
    let convert = ["convert", "-c", "-O", "qcow2", "disk.qcow2", "packed.qcow2"];
    qemu::img(dir, convert).ok();
    for image in ["disk.qcow2", "packed.qcow2"] {
        qemu::flatten(dir, image, "flat.raw");
        for aio in ["io_uring", "threads"] {
            for cache in ["writeback", "none"] {
                let more = ["--aio", aio, "--cache", cache, "--queues", "2"];
                println!("{image} {more:?}");
                judge::same_as_raw(dir, image, "flat.raw", &more);
            }
        }
    }
}

#[test]
fn raw_disks_are_as_long_as_qemu_says_and_never_probed() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_NBD]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    qemu::create(dir, "inner.qcow2", &[], "1M");
    let mut bytes = fs::read(dir.join("inner.qcow2")).expect("read");
    // A guest that writes a qcow2 header into its raw disk still has a raw disk.
    for len in [bytes.len(), bytes.len() + 1, bytes.len() + 511] {
        bytes.resize(len, 0x77);
        fs::write(dir.join("disk.raw"), &bytes).expect("written");
        let server = Server::mica(&dir.join("disk.raw"), "raw", &[]).expect("served");
        let mut client = server.connect(&nbd::Wish::default()).expect("served");
        let qemu = Server::start("", |socket| {
            let mut nbd = Command::new("qemu-nbd");
            nbd.args(["-r", "-t", "-f", "raw", "-k"]).arg(socket).arg(dir.join("disk.raw"));
            nbd
        });
        let qemu = qemu.expect("served");
        let mut qemu = qemu.connect(&nbd::Wish::default()).expect("served");
        assert_eq!(client.len, qemu.len, "{len} bytes");
        let served = client.read_all().expect("read");
        judge::same_bytes("raw", &served, &qemu.read_all().expect("read"));
        assert_eq!(served[..4], *b"QFI\xfb");
    }
}

#[test]
fn figures_of_a_run_are_written_at_its_end() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    disk(dir);
    let file = dir.join("stats.json").display().to_string();
    let more = ["--stats-file", &file];
    let server = Server::mica(&dir.join("disk.qcow2"), "qcow2", &more).expect("served");
    let mut client = server.connect(&nbd::Wish::default()).expect("served");
    client.read_all().expect("read");
    client.disconnect().expect("left");
    server.stop().expect("it stops");
    let stats: Value = serde_json::from_slice(&fs::read(file).expect("written")).expect("JSON");
    for count in ["hits", "misses", "index_loads", "walks", "layers_walked", "cached_bytes"] {
        assert!(stats["map"][count].is_u64(), "{count}: {stats}");
    }
    assert!(stats["map"]["misses"].as_u64() > Some(0), "{stats}");
}

#[test]
fn what_is_not_an_image_is_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    fs::write(dir.join("empty"), b"").expect("written");
    fs::write(dir.join("text"), b"not an image at all\n").expect("written");
    fs::create_dir(dir.join("folder")).expect("made");
    let pipe = dir.join("pipe").display().to_string();
    command::run("mkfifo", [&pipe]).ok();
    for name in ["empty", "text", "folder", "pipe", "none"] {
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--nbd").arg(dir.join("socket")).arg(dir.join(name));
        let said = command::finish_within(&mut serve, LIMIT).refusal();
        assert!(said.contains(name), "{name}: {said}");
        assert!(!dir.join("socket").exists(), "{name}");
    }
    let nowhere = ["serve", "--nbd", "/nonexistent/folder/socket", "--format", "null", "1M"];
    mica::run(nowhere).refusal();
}

#[test]
fn option_of_a_server_that_is_not_there_is_refused_in_one_line() {
    let dir = tempfile::tempdir().expect("a folder");
    let place = |name: &str| dir.path().join(name).display().to_string();
    for (at, option) in [
        ("--nbd", &["--serial", "x"][..]),
        ("--nbd", &["--num-queues", "4"]),
        ("--nbd", &["--allow-other", "auto"]),
        ("--nbd", &["--allow-plain-tcp"]),
        ("--nbd", &["--tls-verify-peer=on"]),
        ("--vhost-user", &["--export-name", "x"]),
        ("--vhost-user", &["--shared", "1"]),
    ] {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--format", "null", at, &place("socket")]).args(option).arg("1M");
        let said = command::finish_within(&mut serve, LIMIT).refusal();
        let name = option[0].trim_start_matches("--").split('=').next().expect("a name");
        assert!(said.contains(&format!("leave {name} out")), "{said}");
        assert!(!dir.path().join("socket").exists(), "{name}");
    }
}

/// The story: `--nbd :10809` made a socket of that name, and nobody could connect.
#[test]
fn place_in_the_form_of_another_server_is_refused_with_the_form_to_use() {
    let dir = tempfile::tempdir().expect("a folder");
    for place in [":10809", "127.0.0.1:10809", "nbd://localhost", "tcp:10809"] {
        let mut serve = Command::new(mica::binary());
        serve.current_dir(dir.path()).args(["serve", "--format", "null", "--nbd", place, "1M"]);
        let said = command::finish_within(&mut serve, LIMIT);
        assert_eq!(said.code(), Some(1), "{said}");
        let said = said.refusal();
        assert!(said.contains("write tcp:") && said.contains(":10809"), "{said}");
    }
    assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
}

#[test]
fn export_has_the_name_of_its_disk() {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("web.raw"), [1; 4096]).expect("written");
    let server = Server::start("web", |socket| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--format", "raw", "--nbd"]);
        serve.arg(format!("unix:{}", socket.display())).arg(dir.path().join("web.raw"));
        serve
    });
    let server = server.expect("served");
    let open = |name| nbd::Connection::open(&server.socket(), name, &nbd::Wish::default());
    for name in ["web", ""] {
        assert_eq!(open(name).expect("served").read(0, 512).expect("read"), vec![1; 512]);
    }
    assert!(open("other").is_err());
    server.stop().expect("it stops");
}

#[test]
fn log_says_where_it_serves_and_on_request_who_came_and_went() {
    for (level, says_place, says_clients) in [
        (&[][..], true, false),
        (&["--log-level", "info"], true, true),
        (&["--log-level", "error"], false, false),
    ] {
        let server = Server::mica(Path::new("1M"), "null", level).expect("served");
        let mut client = server.connect(&nbd::Wish::default()).expect("served");
        client.read(0, 4096).expect("read");
        client.disconnect().expect("left");
        let place = format!("serving \"1M\" (1M, read-only) at nbd {}", server.socket().display());
        // A server that is told to stop may be faster than the farewell.
        let left = || (!says_clients || server.log().contains("read_bytes=4096")).then_some(());
        clock::poll(LIMIT, Duration::from_millis(5), left).expect("it has left");
        let stopped = server.stop().expect("it stops");
        let log = &stopped.log;
        assert_eq!(log.contains(&place), says_place, "{level:?}: {log}");
        // Leaving is a request, too.
        let left =
            "left \"1M\": the client disconnected requests=2 read_bytes=4096 written_bytes=0";
        for line in ["client at a unix socket connected to \"1M\"", left] {
            assert_eq!(log.contains(line), says_clients, "{level:?}: {log}");
        }
    }
}

/// The story: whoever connected again and again filled the host's log.
#[test]
fn clients_that_come_and_go_do_not_fill_the_log() {
    const CLIENTS: usize = 300;
    let server = Server::mica(Path::new("1M"), "null", &["--log-level", "info"]).expect("served");
    let begun = clock::now();
    for _ in 0..CLIENTS {
        server.connect(&nbd::Wish::default()).expect("served").disconnect().expect("left");
    }
    let stopped = server.stop().expect("it stops");
    // Each second lets one more line through.
    let seconds = usize::try_from(begun.elapsed().as_secs()).expect("a few");
    let most = 101 + seconds;
    for line in ["connected to \"1M\"", "left \"1M\""] {
        let lines = stopped.log.lines().filter(|said| said.contains(line)).count();
        assert!((100..=most).contains(&lines), "{line}: {lines} of {CLIENTS}, at most {most}");
    }
}

#[test]
fn it_listens_only_once_it_can_serve() {
    if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path();
    disk(dir);
    let socket = dir.join("socket");
    let mut serve = Command::new(mica::binary());
    serve.args(["serve", "--read-only", "--inject", "delay=20ms", "--nbd"]).arg(&socket);
    serve.arg(dir.join("disk.qcow2")).stdin(Stdio::null());
    let mut child = serve.spawn().expect("started");
    let connection = clock::poll(LIMIT, Duration::from_millis(1), || {
        socket.exists().then(|| nbd::Connection::open(&socket, "", &nbd::Wish::default()))
    });
    // The first try after the socket appeared succeeds.
    let mut connection = connection.expect("a socket").expect("a server behind it");
    assert_eq!(connection.read(0, 512).expect("read"), vec![1; 512]);
    child.kill().expect("killed");
    child.wait().expect("ended");
}
