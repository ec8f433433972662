//! Routes, bounds and authorization, over real sockets.

use super::actions::ACTIONS_MAX;
use super::room::Room;
use super::{
    HEAD_BYTES_MAX, Limit, LogLevel, LogSwitch, is_authorized, reply::BODY_BYTES_MAX, routes,
};
use crate::{Config, Daemon, DiskConfig, NbdPlace, ProcessSettings, SandboxMode};
use mica_block::{Error, ErrorKind};
use mica_stack::Format;
use parking_lot::Mutex;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use tempfile::TempDir;

struct Log(Mutex<LogLevel>);

impl LogSwitch for Log {
    fn level(&self) -> LogLevel {
        *self.0.lock()
    }

    fn set_level(&self, level: LogLevel) {
        *self.0.lock() = level;
    }
}

struct World {
    folder: TempDir,
    daemon: Daemon,
}

/// A server of two disks of zeros, "one" and "two".
fn world() -> World {
    let folder = tempfile::tempdir().unwrap();
    let disk = |name: &str| {
        let mut disk = DiskConfig::new(name.to_owned(), PathBuf::from("64M"));
        disk.settings.nbd = vec![NbdPlace::Unix(folder.path().join(name))];
        disk.images.format = Format::Null;
        disk
    };
    let config = Config {
        disks: vec![disk("one"), disk("two")],
        process: ProcessSettings {
            queues: Some(1),
            control: Some(folder.path().join("control")),
            metrics: Some(SocketAddr::from(([127, 0, 0, 1], 0))),
            // A sandbox would apply to all tests of this process.
            sandbox: Some(SandboxMode::Off),
            ..ProcessSettings::default()
        },
        ..Config::default()
    };
    let log = Arc::new(Log(Mutex::new(LogLevel::Warn)));
    World { daemon: Daemon::start(config, log).unwrap(), folder }
}

struct Reply {
    status: u16,
    head: String,
    body: String,
}

impl Reply {
    fn error(&self) -> String {
        let value: Value = serde_json::from_str(&self.body).expect("JSON");
        let error = value["error"].as_str().expect("an error").to_owned();
        assert!(!error.is_empty() && !error.contains('\n'), "{error:?}");
        error
    }
}

impl World {
    fn control(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("control")).expect("it listens")
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> Reply {
        exchange(self.control(), &request(method, path, "mica", body))
    }

    fn metrics(&self) -> TcpStream {
        let control = self.daemon.control.as_ref().expect("it runs");
        TcpStream::connect(control.metrics_at().expect("it listens")).expect("it listens")
    }

    fn read(&self, path: &str, host: &str) -> Reply {
        exchange(self.metrics(), &request("GET", path, host, ""))
    }
}

fn request(method: &str, path: &str, host: &str, body: &str) -> String {
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {length}\r\n\r\n{body}")
}

fn exchange(mut stream: impl Read + Write, request: &str) -> Reply {
    // A server that refuses need not read all of it, and may have closed.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    let status = head[9..12].parse().expect("a status");
    Reply { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

#[test]
fn what_is_not_there_is_said_in_one_line() {
    let world = world();
    for (method, path, status) in [
        ("GET", "/nothing", 404),
        ("GET", "/v1/disks", 405),
        ("POST", "/v1/status", 405),
        ("GET", "/v1/drain", 405),
        ("GET", "/v1/disks/one/drain", 405),
        ("DELETE", "/v1/log-level", 405),
        ("GET", "/../../etc/passwd", 404),
    ] {
        let reply = world.ask(method, path, "");
        assert_eq!(reply.status, status, "{method} {path}");
        assert!(reply.error().contains(path), "{method} {path}: {}", reply.body);
    }
    for path in ["/v1/disks/three/drain", "/v1/disks/three/resize", "/v1/disks/%0a/drain"] {
        let reply = world.ask("POST", path, r#"{"size": "1G"}"#);
        assert_eq!(reply.status, 404, "{path}");
        assert!(reply.error().contains("one, two"), "{path}: {}", reply.body);
    }
}

#[test]
fn bodies_that_make_no_sense_are_refused() {
    let world = world();
    let resize = "/v1/disks/one/resize";
    for body in ["", "{", "[]", r#"{"size": 5}"#, r#"{"size": "1G", "x": 1}"#, r#"{"size": "x"}"#] {
        let reply = world.ask("POST", resize, body);
        assert_eq!(reply.status, 400, "{body}");
        reply.error();
    }
    let far = world.ask("POST", resize, r#"{"size": "+16383P"}"#);
    assert_eq!(far.status, 400, "{}", far.body);
    // Disks of zeros cannot grow.
    let reply = world.ask("POST", resize, r#"{"size": "1G"}"#);
    assert_eq!(reply.status, 501, "{}", reply.body);
    let level = world.ask("PUT", "/v1/log-level", r#"{"level": "loud"}"#);
    assert_eq!(level.status, 400, "{}", level.body);
    assert_eq!(world.ask("GET", "/v1/log-level", "").body, "{\"level\":\"warn\"}\n");
    let level = world.ask("PUT", "/v1/log-level", r#"{"level": "debug"}"#);
    assert_eq!((level.status, &*level.body), (200, "{\"level\":\"debug\"}\n"));
}

#[test]
fn requests_are_bounded() {
    let world = world();
    let body = format!(r#"{{"size": "{}"}}"#, "1".repeat(BODY_BYTES_MAX));
    let reply = world.ask("POST", "/v1/disks/one/resize", &body);
    assert_eq!(reply.status, 413);
    reply.error();
    let long = world.ask("GET", &format!("/{}", "x".repeat(2 * HEAD_BYTES_MAX)), "");
    assert!([414, 431].contains(&long.status), "{}", long.head);
    let many: String = (0..200).map(|index| format!("x-{index}: y\r\n")).collect();
    let many = exchange(world.control(), &format!("GET / HTTP/1.1\r\n{many}\r\n"));
    assert_eq!(many.status, 431);
    let strange = exchange(world.control(), "\x16\x03\x01\x02\x00\x01\r\n\r\n");
    assert_eq!(strange.status, 400);
    assert_eq!(world.ask("GET", "/v1/status", "").status, 200);
}

#[test]
fn silent_clients_do_not_block_others() {
    let world = world();
    let stalled: Vec<_> = (0..8)
        .map(|index| {
            let mut stream = world.control();
            let begun = ["", "GET /v1/status HTTP/1.1\r\n", "POST /v1/drain HTTP/1.1\r\nconte"];
            stream.write_all(begun[index % 3].as_bytes()).unwrap();
            stream
        })
        .collect();
    // One that announces more than it sends.
    let mut short = world.control();
    let begun = "POST /v1/disks/one/resize HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{";
    short.write_all(begun.as_bytes()).unwrap();
    assert_eq!(world.ask("GET", "/v1/stats", "").status, 200);
    let reply = exchange(short, "");
    assert_eq!(reply.status, 408, "{}", reply.body);
    for mut stream in stalled {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the server closes it");
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }
}

/// The story: a handover that was given more than ten minutes was cut off from its client, which
/// never learned how it ended.
#[test]
fn client_waits_for_its_answer_as_long_as_what_it_asked_for_takes() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (short, long) = (Duration::from_millis(1), Duration::from_millis(100));
    let is_served = |limit: Limit, is_heard: bool| {
        runtime.block_on(async {
            let place = Room::new(1).place().await.expect("room");
            let done = AtomicBool::new(false);
            let served = async {
                if is_heard {
                    place.hear();
                }
                tokio::time::sleep(long).await;
                done.store(true, Ordering::Relaxed);
                place.answer();
                std::future::pending::<()>().await;
            };
            limit.hold(&place, served).await;
            done.into_inner()
        })
    };
    assert!(is_served(Limit::AroundAction(short), true));
    assert!(!is_served(Limit::AroundAction(short), false), "it has asked for nothing");
    assert!(!is_served(Limit::Whole(short), true));
}

#[test]
fn over_tcp_there_is_nothing_that_changes_anything() {
    let world = world();
    for path in [
        "/",
        "/metrics",
        "/healthz",
        "/v1/status",
        "/v1/stats",
        "/v1/stats/one",
        "/v1/overview",
        "/v1/history",
        "/v1/history/one",
    ] {
        let (here, there) = (world.ask("GET", path, ""), world.read(path, "localhost:1"));
        assert_eq!((here.status, there.status), (200, 200), "{path}");
        // Names of disks and images may hold HTML: no browser takes an answer for it.
        let is_html = there.head.contains("content-type: text/html");
        assert_eq!(is_html, path == "/", "{path}: {}", there.head);
        assert!(there.head.contains("x-content-type-options: nosniff"), "{}", there.head);
    }
    for path in ["/v1/drain", "/v1/disks/one/drain", "/v1/disks/one/resize", "/v1/log-level"] {
        for method in ["GET", "POST", "PUT"] {
            let sent = request(method, path, "127.0.0.1", r#"{"size": "1G"}"#);
            let reply = exchange(world.metrics(), &sent);
            assert_eq!(reply.status, 404, "{method} {path}");
        }
    }
    // A request that a stranger's web page can make a browser send.
    let reply = world.read("/v1/status", "evil.example");
    assert_eq!(reply.status, 403);
    assert!(!reply.body.contains("one"), "{}", reply.body);
    let page = world.read("/", "127.0.0.1");
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(page.head.contains("x-content-type-options: nosniff"), "{}", page.head);
}

#[test]
fn the_page_brings_all_it_needs() {
    let page = super::page::PAGE;
    assert!(page.len() < 48 << 10, "{} bytes", page.len());
    let names = "http://www.w3.org/2000/svg";
    assert!(!page.replace(names, "").contains("://"), "something from elsewhere");
    let words =
        ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "DOMParser"];
    for word in words {
        assert!(!page.contains(word), "{word} takes text for HTML");
    }
    // Its parts have begun and ended.
    for (begin, end) in [("<style>", "</style>"), ("<script>", "</script>"), ("<body>", "</body>")]
    {
        assert_eq!((page.matches(begin).count(), page.matches(end).count()), (1, 1), "{begin}");
    }
}

#[test]
fn answers_are_compressed_for_those_who_take_it() {
    let world = world();
    let plain = world.ask("GET", "/metrics", "");
    assert!(!plain.head.contains("content-encoding"), "{}", plain.head);
    let request = "GET /metrics HTTP/1.1\r\nhost: x\r\naccept-encoding: deflate, gzip\r\n\r\n";
    let mut stream = world.control();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("an answer");
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    assert!(head.contains("content-encoding: gzip"), "{head}");
    assert!(head.contains(&format!("content-length: {}", answer.len() - end - 4)), "{head}");
    let mut text = String::new();
    flate2::read::GzDecoder::new(&answer[end + 4..]).read_to_string(&mut text).expect("gzip");
    let names = |text: &str| -> Vec<String> {
        text.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect()
    };
    assert_eq!(names(&text), names(&plain.body));
}

#[test]
fn health_is_good_until_a_disk_fails_or_the_server_stops() {
    let world = world();
    let healthy = world.read("/healthz", "localhost");
    assert_eq!((healthy.status, &*healthy.body), (200, "ok\n"));
    assert_eq!(world.ask("POST", "/v1/disks/one/drain", "").status, 200);
    assert_eq!(world.ask("GET", "/healthz", "").status, 200, "somebody wanted that");
    // Its socket is taken, so it cannot be served again: it stays as somebody wanted it.
    std::fs::write(world.folder.path().join("one"), "not a socket").unwrap();
    let undrain = world.ask("POST", "/v1/disks/one/undrain", "");
    assert_ne!(undrain.status, 200);
    assert_eq!(world.ask("GET", "/healthz", "").status, 200);
    // As after a takeover that failed.
    let one = world.daemon.shared.disks.named("one").expect("there");
    one.give_up(Error::new(ErrorKind::Io, "its socket is taken"));
    let ill = world.ask("GET", "/healthz", "");
    assert_eq!(ill.status, 503);
    assert!(ill.body.starts_with("disk one is not served: "), "{}", ill.body);
    assert_eq!(ill.body.lines().count(), 1, "{}", ill.body);
    world.daemon.shared.stop().expect("stopped");
    assert_eq!(world.ask("GET", "/healthz", "").body, "the server is stopping\n");
}

#[test]
fn what_nobody_uses_is_not_among_the_metrics() {
    let world = world();
    let metrics = world.ask("GET", "/metrics", "").body;
    for name in ["mica_nbd_", "mica_vhost_user_", "mica_fuse_", "mica_map_", "duration_seconds"] {
        assert!(!metrics.contains(name), "{name}: {metrics}");
    }
    // Alerts watch these.
    for name in ["errors_total", "failed", "latched", "weakened", "read_bytes_total"] {
        assert!(metrics.contains(&format!("mica_disk_{name}{{disk=\"two\"}} 0\n")), "{metrics}");
    }
}

#[test]
fn strangers_are_known_by_what_the_kernel_says() {
    let own = rustix::process::geteuid().as_raw();
    assert!(is_authorized(0) && is_authorized(own));
    assert!(!is_authorized(65534) || own == 65534);
    let world = world();
    let socket = world.folder.path().join("control");
    let mode = socket.metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_disk_that_is_drained_leaves_the_other_serving() {
    let world = world();
    let states = || {
        let status: Value = serde_json::from_str(&world.ask("GET", "/v1/status", "").body).unwrap();
        [0, 1].map(|disk: usize| status["disks"][disk]["state"].as_str().unwrap().to_owned())
    };
    assert_eq!(states(), ["serving", "serving"]);
    for _ in 0..2 {
        let reply = world.ask("POST", "/v1/disks/one/drain", "");
        assert_eq!((reply.status, &*reply.body), (200, "{\"drained\":[\"one\"]}\n"));
    }
    assert_eq!(states(), ["drained", "serving"]);
    assert!(!world.folder.path().join("one").exists() && world.folder.path().join("two").exists());
    let resize = world.ask("POST", "/v1/disks/one/resize", r#"{"size": "1G"}"#);
    assert_eq!(resize.status, 409, "{}", resize.body);
    let metrics = world.ask("GET", "/metrics", "").body;
    assert!(metrics.contains("mica_disk_serving{disk=\"one\"} 0\n"), "{metrics}");
}

#[test]
fn the_drain_of_all_ends_the_process_after_its_answer() {
    let World { daemon, folder } = world();
    let socket = folder.path().join("control");
    let running = std::thread::spawn(move || daemon.run());
    let control = UnixStream::connect(&socket).unwrap();
    let reply = exchange(control, &request("POST", "/v1/drain", "mica", ""));
    assert_eq!((reply.status, &*reply.body), (200, "{\"drained\":[\"one\",\"two\"]}\n"));
    running.join().unwrap().unwrap();
    assert!(!socket.exists() && !folder.path().join("two").exists());
}

/// The story: the second of two drains was told that another process takes over.
#[test]
fn drains_do_not_exclude_each_other_and_a_takeover_is_told_of_them() {
    let world = world();
    let shared = Arc::clone(&world.daemon.shared);
    let one = shared.disks.named("one").expect("it is served");
    let busy = one.lock_changes();
    let drain = request("POST", "/v1/disks/one/drain", "mica", "");
    let start = || {
        let (control, drain) = (world.control(), drain.clone());
        std::thread::spawn(move || exchange(control, &drain))
    };
    let mut slow = start();
    // It holds it as soon as it has begun, unless it came just while this looked.
    while shared.hold_alone().is_ok() {
        if slow.is_finished() {
            assert_eq!(slow.join().expect("answered").status, 409);
            slow = start();
        }
        std::thread::yield_now();
    }
    let other = world.ask("POST", "/v1/disks/two/drain", "");
    assert_eq!((other.status, &*other.body), (200, "{\"drained\":[\"two\"]}\n"));
    let takeover = shared.hold_alone().expect_err("refused");
    assert!(takeover.to_string().contains("disks are being changed"), "{takeover}");
    drop(busy);
    assert_eq!(slow.join().expect("answered").status, 200);

    let alone = shared.hold_alone().expect("nothing is in progress");
    let drain = world.ask("POST", "/v1/disks/one/drain", "");
    assert_eq!(drain.status, 409);
    assert!(drain.error().contains("is taking over"), "{}", drain.body);
    drop(alone);
    let panicking = Arc::clone(&shared);
    let panicked = std::thread::spawn(move || {
        let _alone = panicking.hold_alone();
        panic!("this panic is part of the test");
    });
    assert!(panicked.join().is_err());
    assert_eq!(world.ask("POST", "/v1/disks/one/drain", "").status, 200, "it is not for ever");
    shared.stop().expect("stopped");
    let takeover = shared.hold_alone().expect_err("refused");
    assert!(takeover.to_string().contains("stopping"), "{takeover}");
}

/// The story: while a server was coming back from a takeover whose new process had been killed, the
/// list of kept states was refused since "the disk is closed".
#[test]
fn what_is_asked_of_a_disk_that_is_closed_for_a_takeover_waits_for_its_end() {
    let world = world();
    let shared = Arc::clone(&world.daemon.shared);
    let one = shared.disks.named("one").expect("it is served");
    let questions = [
        ("GET", "/v1/disks/one/backups", ""),
        ("GET", "/v1/disks/one/snapshots", ""),
        ("GET", "/v1/disks/one/extents?since=mon", ""),
        ("POST", "/v1/disks/one/resize", r#"{"size": "128M"}"#),
    ];
    let alone = shared.hold_alone().expect("nothing is in progress");
    assert!(one.suspend().expect("closed"));
    let asked = questions.map(|(method, path, body)| {
        let mut control = world.control();
        control.write_all(request(method, path, "mica", body).as_bytes()).expect("sent");
        control.set_read_timeout(Some(Duration::from_millis(50))).expect("set");
        let early = control.read(&mut [0]).expect_err("an answer");
        assert_eq!(early.kind(), std::io::ErrorKind::WouldBlock, "{path}");
        control.set_read_timeout(None).expect("set");
        control
    });
    one.resume().expect("served again");
    drop(alone);
    for control in asked {
        let reply = exchange(control, "");
        assert_eq!(reply.status, 501, "it is no chain: {}", reply.body);
    }
    // Once the other process serves it, that one answers.
    assert!(one.suspend().expect("closed"));
    shared.is_handed_over.store(true, Ordering::Release);
    for (method, path, body) in questions {
        let reply = world.ask(method, path, body);
        assert_eq!(reply.status, 409, "{path}");
        assert!(reply.error().contains("another process has taken over: try again"), "{path}");
    }
    shared.is_handed_over.store(false, Ordering::Release);
}

#[test]
fn a_drain_that_hangs_delays_the_end_of_no_other_disk() {
    let world = world();
    let shared = Arc::clone(&world.daemon.shared);
    let one = shared.disks.named("one").expect("it is served");
    let (busy, drain) = (one.lock_changes(), shared.hold().expect("nothing is in progress"));
    let stopping = Arc::clone(&shared);
    let stopped = std::thread::spawn(move || stopping.stop());
    while !world.ask("GET", "/metrics", "").body.contains("mica_disk_serving{disk=\"two\"} 0\n") {
        std::thread::yield_now();
    }
    assert!(!stopped.is_finished());
    drop((busy, drain));
    stopped.join().expect("no panic").expect("stopped");
}

#[test]
fn loopback_names_are_recognised() {
    for host in ["localhost", "LocalHost:80", "127.0.0.1:9", "127.9.9.9", "[::1]:80", "[::1]"] {
        assert!(routes::is_local(host), "{host}");
    }
    for host in ["", ":", "evil.example", "localhost.evil.example", "10.0.0.1", "[::2]:80", "["] {
        assert!(!routes::is_local(host), "{host}");
    }
}

#[test]
fn everything_about_a_disk_is_in_one_answer_and_unknown_disks_in_none() {
    let world = world();
    let json = |path: &str| -> Value {
        let reply = world.ask("GET", path, "");
        assert_eq!(reply.status, 200, "{path}: {}", reply.body);
        serde_json::from_str(&reply.body).expect("JSON")
    };
    let one = json("/v1/stats/one");
    assert_eq!(one["disks"].as_array().map(Vec::len), Some(1));
    assert_eq!(one["status"], json("/v1/status")["disks"][0]);
    let disk = &one["disks"][0];
    assert!(
        disk["delayed"] == 0 && disk["nbd"]["reads"] == 0 && disk["latency"].is_object(),
        "{disk}"
    );
    let overview = json("/v1/overview");
    assert_eq!(overview["disks"][1]["name"], "two", "{overview}");
    for key in ["reads", "written_bytes", "errors", "errors_lately", "delayed", "clients"] {
        assert_eq!(overview["disks"][1][key], 0, "{key}");
    }
    for answer in [&one, &overview, &json("/v1/stats"), &json("/v1/status")] {
        assert!(answer["process"]["resident_bytes"].as_u64() > Some(1 << 20), "{answer}");
        assert!(!answer["host"].as_str().unwrap_or_default().is_empty(), "{answer}");
    }
    let history = json("/v1/history/two");
    assert!(history["points"].is_array() && history["columns"][0] == "reads", "{history}");
    for path in ["/v1/stats/three", "/v1/history/three", "/v1/history/%3Cb%3E"] {
        let reply = world.read(path, "localhost");
        assert_eq!(reply.status, 404, "{path}");
        assert!(reply.error().contains("one, two"), "{}", reply.body);
    }
}

/// The story: actions outlive the client that asked for them, so clients could pile them up without
/// limit.
#[test]
fn what_waits_to_be_done_is_bounded() {
    let world = world();
    let disk = world.daemon.shared.disks.named("one").expect("it is served");
    let busy = disk.lock_changes();
    let (sender, statuses) = mpsc::channel();
    let clients = ACTIONS_MAX + 4;
    for _ in 0..clients {
        let (control, sender) = (world.control(), sender.clone());
        std::thread::spawn(move || {
            let body = r#"{"size": "128M"}"#;
            let reply = exchange(control, &request("POST", "/v1/disks/one/resize", "mica", body));
            let error = reply.error();
            sender.send((reply.status, error)).expect("somebody counts");
        });
    }
    for _ in 0..4 {
        let (status, error) = statuses.recv().expect("an answer");
        assert_eq!(status, 503);
        assert!(error.contains("try again later"), "{error}");
    }
    drop(busy);
    for _ in 0..ACTIONS_MAX {
        assert_eq!(statuses.recv().expect("an answer").0, 501, "it is no disk that grows");
    }
}
