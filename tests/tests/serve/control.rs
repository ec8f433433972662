//! A server of two disks, monitored and controlled while it serves: by `mica ctl`, `mica top`, a
//! collector, and by strangers.

use mica_tests::command::Finished;
use mica_tests::server::Server;
use mica_tests::{clock, mica, nbd, qemu, tools};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A server of "first", a chain of two layers, and "second".
struct World {
    dir: TempDir,
    server: Server,
    metrics: SocketAddr,
}

impl World {
    fn new() -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO]) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        let folder = dir.path();
        qemu::create(folder, "base.qcow2", &[], "8M");
        qemu::io(folder, &[], "base.qcow2", &["write -P 1 0 2M"]);
        qemu::overlay(folder, "first.qcow2", "base.qcow2", &[]);
        qemu::create(folder, "second.qcow2", &[], "4M");
        let metrics = free_port();
        let server = Server::start("", |socket| {
            let config = format!(
                "control = \"control\"\nmetrics = \"{metrics}\"\n\
                 [[disk]]\nname = \"first\"\nimage = \"first.qcow2\"\nnbd = [\"{}\"]\n\
                 vhost-user = \"first.vhost\"\n\
                 [[disk]]\nname = \"second\"\nimage = \"second.qcow2\"\nnbd = [\"second.nbd\"]\n",
                socket.display()
            );
            fs::write(folder.join("mica.toml"), config).expect("written");
            let mut serve = Command::new(mica::binary());
            serve.arg("serve").arg("--config").arg(folder.join("mica.toml"));
            serve
        });
        let world = Self { server: server.expect("served"), dir, metrics };
        // It answers when all disks are open.
        world.json(&["ctl", "status"]);
        Some(world)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("control")
    }

    /// `mica VERB… --control …`
    fn mica(&self, verb: &[&str]) -> Finished {
        let control = self.socket().display().to_string();
        mica::run(verb.iter().copied().chain(["--control", &control]))
    }

    fn json(&self, verb: &[&str]) -> Value {
        self.mica(&[verb, &["--output", "json"]].concat()).json()
    }

    fn second(&self) -> nbd::Connection {
        let socket = self.dir.path().join("second.nbd");
        nbd::Connection::open(&socket, "", &nbd::Wish::default()).expect("served")
    }

    fn over_tcp(&self, request: &str) -> (u16, String) {
        let stream = TcpStream::connect(self.metrics).expect("it listens");
        exchange(stream, request)
    }
}

/// A port that was free just now.
fn free_port() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address")
}

fn exchange(mut stream: impl Read + Write, request: &str) -> (u16, String) {
    // A server that refuses may close before everything is written.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).expect("text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    (head[9..12].parse().expect("a status"), body.to_owned())
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n")
}

#[test]
fn figures_move_with_requests() {
    let Some(world) = World::new() else { return };
    let before = world.json(&["ctl", "stats"]);
    assert_eq!(before["disks"][1]["nbd"]["reads"], 0, "{before}");
    let mut client = world.second();
    client.read(0, 3 << 20).expect("read");
    let now = world.json(&["ctl", "stats"]);
    let (first, second) = (&now["disks"][0], &now["disks"][1]);
    assert_eq!(
        (&second["nbd"]["reads"], &second["nbd"]["read_bytes"]),
        (&3.into(), &3145728.into())
    );
    assert_eq!(second["latency"]["nbd"]["read"]["count"], 3, "{second}");
    assert_eq!(first["nbd"]["reads"], 0, "{first}");
    assert_eq!((&second["clients"], &first["layers"]), (&1.into(), &2.into()));
    assert!(first["vhost_user"].is_object() && second["vhost_user"].is_null(), "{now}");
    assert!(now["uptime_ms"].as_u64() >= before["uptime_ms"].as_u64());
    let human = world.mica(&["ctl", "stats", "second"]).ok();
    assert!(human.contains("nbd.read_bytes") && !human.contains("first"), "{human}");
    let status = world.json(&["ctl", "status"]);
    assert_eq!(status["pid"], world.server.pid(), "{status}");
    assert_eq!(status["disks"][0]["length"], 8 << 20, "{status}");
    assert_eq!(status["disks"][1]["writable"], true, "{status}");
    let human = world.mica(&["ctl", "status"]).ok();
    assert!(human.contains("second.qcow2") && human.contains("4 MiB"), "{human}");
}

#[test]
fn a_disk_becomes_longer_while_it_is_served() {
    let Some(world) = World::new() else { return };
    let answer = world.json(&["ctl", "resize", "second", "+4M"]);
    assert_eq!((&answer["length_before"], &answer["length"]), (&4194304.into(), &8388608.into()));
    assert_eq!(answer["notice"], "none", "no machine can have it: {answer}");
    let answer = world.json(&["ctl", "resize", "first", "16M"]);
    assert_eq!((&answer["length"], &answer["notice"]), (&16777216.into(), &"nobody".into()));
    assert_eq!(world.second().len, 8 << 20, "as the next client sees it");
    let shorter = world.mica(&["ctl", "resize", "second", "1M"]).refusal();
    assert!(shorter.contains("shorter"), "{shorter}");
    world.mica(&["ctl", "resize", "second", "1000"]).refusal();
    world.mica(&["ctl", "resize", "third", "1G"]).refusal();
    assert!(world.server.stop().expect("it stops").status.success());
    let info = qemu::img(world.dir.path(), ["info", "--output=json", "second.qcow2"]).json();
    assert_eq!(info["virtual-size"], 8 << 20);
    qemu::img(world.dir.path(), ["check", "first.qcow2"]).ok();
}

#[test]
fn a_drained_disk_is_free_and_the_other_is_still_served() {
    let Some(world) = World::new() else { return };
    let folder = world.dir.path();
    let mut first = world.server.connect(&nbd::Wish::default()).expect("served");
    let said = world.mica(&["ctl", "drain", "second"]).ok();
    assert!(said.contains("second"), "{said}");
    assert!(!folder.join("second.nbd").exists());
    // QEMU can take its locks: no process has it open.
    qemu::io(folder, &[], "second.qcow2", &["write -P 7 0 64k"]);
    let status = world.json(&["ctl", "status"]);
    assert_eq!(status["disks"][0]["state"], "serving", "{status}");
    assert_eq!(status["disks"][1]["state"], "drained", "{status}");
    assert_eq!(status["disks"][1]["length"], 4 << 20, "{status}");
    first.read(0, 4096).expect("served on");
    world.mica(&["ctl", "drain", "second"]).ok();
    world.mica(&["ctl", "resize", "second", "8M"]).refusal();
    let said = world.mica(&["ctl", "drain"]).ok();
    assert!(said.contains("first"), "{said}");
    let gone = || UnixStream::connect(world.socket()).err();
    clock::poll(Duration::from_secs(60), Duration::from_millis(10), gone).expect("it ends");
    let refusal = world.mica(&["ctl", "status"]).refusal();
    assert!(refusal.contains("no server listens"), "{refusal}");
    qemu::img(folder, ["check", "first.qcow2"]).ok();
}

#[test]
fn what_is_written_is_in_the_image_that_was_drained() {
    let Some(world) = World::new() else { return };
    let uri = format!("nbd+unix:///?socket={}", world.dir.path().join("second.nbd").display());
    let written = ["-f", "raw", "-c", "write -P 5 1M 128k", &uri];
    mica_tests::command::run("qemu-io", written).ok();
    world.mica(&["ctl", "drain", "second"]).ok();
    let read = ["-c", "read -P 5 1M 128k", "second.qcow2"];
    let mut check = Command::new("qemu-io");
    let said = mica_tests::command::finish(check.args(read).current_dir(world.dir.path())).ok();
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn the_log_is_turned_up_and_down() {
    let Some(world) = World::new() else { return };
    assert_eq!(world.json(&["ctl", "log-level"])["level"], "warn");
    // A client that sends nonsense is logged for developers.
    let quarrel = || {
        let mut stream = UnixStream::connect(world.socket()).expect("it listens");
        stream.write_all(b"nonsense\r\n\r\n").expect("sent");
        let _ = stream.read_to_end(&mut Vec::new());
    };
    let served = || world.server.log().contains(" INFO serving ").then_some(());
    clock::poll(Duration::from_secs(60), Duration::from_millis(10), served).expect("it serves");
    let before = world.server.log();
    quarrel();
    assert_eq!(world.server.log(), before);
    assert_eq!(world.mica(&["ctl", "log-level", "debug"]).ok(), "debug\n");
    quarrel();
    let log = || Some(world.server.log()).filter(|log| *log != before);
    clock::poll(Duration::from_secs(60), Duration::from_millis(10), log).expect("it is logged");
    assert_eq!(world.json(&["ctl", "log-level", "error"])["level"], "error");
    world.mica(&["ctl", "log-level", "loud"]).refusal_with(1);
}

trait RefusalWith {
    fn refusal_with(self, code: i32);
}

impl RefusalWith for Finished {
    #[track_caller]
    fn refusal_with(self, code: i32) {
        assert_eq!(self.code(), Some(code), "{self}");
    }
}

#[test]
fn misbehaving_clients_affect_no_other() {
    let Some(world) = World::new() else { return };
    let mut disk = world.second();
    let mut stalled = UnixStream::connect(world.socket()).expect("it listens");
    stalled.write_all(b"POST /v1/drain HTTP/1.1\r\nhost: x\r\n").expect("sent");
    let mut collector = TcpStream::connect(world.metrics).expect("it listens");
    collector.write_all(b"GET /metrics HTTP/1.1\r\n").expect("sent");
    for _ in 0..200 {
        drop(UnixStream::connect(world.socket()).expect("it listens"));
    }
    let send = |request: String| exchange(UnixStream::connect(world.socket()).unwrap(), &request);
    let (status, body) = send(get("/v2/status"));
    assert_eq!(status, 404, "{body}");
    let resize = "POST /v1/disks/second/resize HTTP/1.1\r\nhost: x\r\ncontent-length";
    let (status, _) = send(format!("{resize}: 1000000\r\n\r\n{}", "x".repeat(1_000_000)));
    assert_eq!(status, 413);
    let (status, body) = send(format!("{resize}: 4\r\n\r\n{{\"a\""));
    assert_eq!(status, 400, "{body}");
    let (status, _) = send(get(&format!("/{}", "x".repeat(100_000))));
    assert!([414, 431].contains(&status), "{status}");
    disk.read(0, 4096).expect("served on");
    let (status, body) = world.over_tcp("POST /v1/drain HTTP/1.1\r\nhost: localhost\r\n\r\n");
    assert_eq!(status, 404, "nothing is revealed over TCP: {body}");
    assert_eq!(world.json(&["ctl", "status"])["disks"][1]["state"], "serving");
    // Its request was never complete; shutting down does not wait for it for long either.
    assert!(world.server.stop().expect("it stops").status.success());
    drop((stalled, collector));
}

#[test]
fn another_user_is_refused() {
    let Some(world) = World::new() else { return };
    if !rustix::process::geteuid().is_root() {
        return tools::skip("only root can be somebody else");
    }
    let socket = world.socket();
    // As if its directory had been opened to all.
    fs::set_permissions(world.dir.path(), Permissions::from_mode(0o755)).expect("root may");
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).expect("root may");
    let stranger = std::thread::spawn(move || {
        let nobody = rustix::process::Uid::from_raw(65534);
        // Only for this thread.
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).expect("root may");
        let ask =
            |request: &str| exchange(UnixStream::connect(&socket).expect("it listens"), request);
        let drain = "POST /v1/drain HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
        [ask(&get("/v1/status")), ask(&get("/metrics")), ask(drain)]
    });
    for (status, body) in stranger.join().expect("it asked") {
        assert_eq!(status, 403, "{body}");
        assert!(!body.contains("qcow2"), "{body}");
    }
    assert!(world.server.log().contains("unauthorized"), "{}", world.server.log());
    assert_eq!(world.json(&["ctl", "status"])["disks"][0]["state"], "serving");
}

#[test]
fn metrics_are_what_a_collector_takes() {
    let Some(world) = World::new() else { return };
    let mut client = world.second();
    client.read(0, 2 << 20).expect("read");
    let (status, text) = world.over_tcp(&get("/metrics"));
    assert_eq!(status, 200);
    let samples = parse(&text);
    let second = |name: &str| samples[&format!("{name}{{disk=\"second\"}}")];
    assert_eq!(second("mica_nbd_reads_total"), 2.0);
    assert_eq!(second("mica_nbd_read_bytes_total"), 2097152.0);
    assert_eq!(second("mica_disk_length_bytes"), 4194304.0);
    assert_eq!(second("mica_disk_clients"), 1.0);
    let reads = "{disk=\"second\",server=\"nbd\",request=\"read\"}";
    assert_eq!(samples[&format!("mica_request_duration_seconds_count{reads}")], 2.0);
    // The names are those of the figures; of what was not used there are none.
    let stats = world.json(&["ctl", "stats"]);
    for (section, is_used) in [("map", true), ("write", false), ("nbd", true)] {
        for name in stats["disks"][1][section].as_object().expect("figures").keys() {
            let names = ["_total", ""].map(|end| format!("mica_{section}_{name}{end}"));
            let is_there =
                |name: &String| samples.contains_key(&format!("{name}{{disk=\"second\"}}"));
            assert_eq!(names.iter().any(is_there), is_used, "{section}.{name}");
        }
    }
    if tools::present(&[tools::PROMTOOL]) {
        judge(&text);
    }
}

/// Every sample by its name and labels; panics if the text format does not allow it.
fn parse(text: &str) -> BTreeMap<String, f64> {
    let (mut samples, mut kinds) = (BTreeMap::new(), BTreeMap::new());
    let mut family = "";
    assert!(text.ends_with('\n'));
    for line in text.lines() {
        if let Some(meta) = line.strip_prefix("# ") {
            let mut words = meta.splitn(3, ' ');
            let mut next = || words.next().filter(|word| !word.is_empty()).expect(line);
            let (what, name, rest) = (next(), next(), next());
            match what {
                "HELP" => family = name,
                "TYPE" => {
                    assert_eq!(family, name, "help comes first");
                    assert!(["counter", "gauge", "histogram"].contains(&rest), "{line}");
                    assert!(kinds.insert(name, rest).is_none(), "{name} comes twice");
                }
                _ => panic!("{line}"),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').expect(line);
        let name = series.split('{').next().expect(line);
        let endings = if kinds.get(family) == Some(&"histogram") {
            &["_bucket", "_sum", "_count"][..]
        } else {
            &[""]
        };
        assert!(endings.iter().any(|end| name == format!("{family}{end}")), "{line}");
        assert!(series == name || series.ends_with("\"}"), "{line}");
        let value = value.parse().expect(line);
        assert!(samples.insert(series.to_owned(), value).is_none(), "twice: {line}");
    }
    samples
}

fn judge(text: &str) {
    let mut promtool = Command::new(tools::PROMTOOL.find().expect("it is there"));
    promtool.args(["check", "metrics"]).stdin(Stdio::piped());
    promtool.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = promtool.spawn().expect("started");
    child.stdin.take().expect("a pipe").write_all(text.as_bytes()).expect("taken");
    let ended = child.wait_with_output().expect("it ends");
    let said = [ended.stdout, ended.stderr].concat();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&said));
}

#[test]
fn top_shows_what_happens_between_two_samples() {
    let Some(world) = World::new() else { return };
    let control = world.socket().display().to_string();
    let mut top = Command::new(mica::binary());
    top.args(["top", "--control", &control, "--output", "json", "--interval", "0.2"]);
    top.args(["--count", "5"]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut top = top.spawn().expect("started");
    let mut client = world.second();
    let ended = clock::poll(Duration::from_secs(60), Duration::from_millis(5), || {
        client.read(0, 1 << 20).expect("read");
        top.try_wait().expect("a child")
    });
    assert!(ended.is_some(), "it looks five times and ends");
    let said = String::from_utf8(top.wait_with_output().expect("it ends").stdout).expect("text");
    let looks: Vec<Value> =
        said.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    assert_eq!(looks.len(), 5);
    let second = |look: &Value| look["disks"][1]["reads_per_second"].as_f64().expect("a number");
    assert!(looks.iter().any(|look| second(look) > 0.0), "{said}");
    assert!(looks.iter().all(|look| look["disks"][0]["reads_per_second"] == 0.0), "{said}");
    let lines = world.mica(&["top", "--interval", "0.1", "--count", "2"]).ok();
    assert_eq!(
        lines.lines().filter(|line| line.starts_with("second: reads")).count(),
        2,
        "{lines}"
    );
    world.mica(&["top", "--interval", "0"]).refusal_with(1);
}

#[test]
fn a_socket_without_a_server_is_reported_at_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let nobody = dir.path().join("nobody").display().to_string();
    for verb in [&["ctl", "status"][..], &["ctl", "drain", "x"], &["top"]] {
        let more = ["--control", &nobody];
        let said = mica::run(verb.iter().copied().chain(more)).refusal();
        assert!(said.contains("no server listens") && said.contains(&nobody), "{said}");
    }
    // A socket of another program.
    let listener = std::os::unix::net::UnixListener::bind(&nobody).expect("bound");
    let stranger = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        let _ = stream.write_all(b"SSH-2.0-x\r\n");
        drop(stream);
        // And a server that ends when it has taken a request.
        let (mut stream, _) = listener.accept().expect("a client");
        let mut request = Vec::new();
        while !request.ends_with(b"{}") {
            let mut byte = [0];
            stream.read_exact(&mut byte).expect("a request");
            request.extend(byte);
        }
    });
    let said = mica::run(["ctl", "status", "--control", &nobody]).refusal();
    assert!(said.contains("is not mica") || said.contains("reset"), "{said}");
    let said = mica::run(["ctl", "drain", "--control", &nobody]).refusal();
    assert!(said.contains("without an answer"), "{said}");
    stranger.join().expect("it answered");
}

#[test]
fn figures_do_not_leave_the_machine_unasked() {
    let dir = tempfile::tempdir().expect("a folder");
    let serve = |more: &[&str]| {
        let mut serve = Command::new(mica::binary());
        serve.args(["serve", "--format", "null", "--nbd"]).arg(dir.path().join("nbd"));
        serve.args(more).arg("1M");
        mica_tests::command::finish_within(&mut serve, Duration::from_secs(60)).refusal()
    };
    let said = serve(&["--metrics", "0.0.0.0:0"]);
    assert!(said.contains("loopback"), "{said}");
    assert!(!dir.path().join("nbd").exists());
    fs::write(dir.path().join("precious"), "x").expect("written");
    let said =
        serve(&["--control", Path::new(dir.path()).join("precious").to_str().expect("text")]);
    assert!(said.contains("precious"), "{said}");
    assert_eq!(fs::read(dir.path().join("precious")).expect("still there"), b"x");
}

#[test]
fn control_socket_is_there_before_the_first_disk_and_answers_when_all_are_open() {
    if !tools::present(&[tools::QEMU_IMG]) {
        return;
    }
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path();
    qemu::create(folder, "fast.qcow2", &[], "4M");
    qemu::create(folder, "slow.qcow2", &[], "4M");
    let server = Server::start("", |socket| {
        let config = format!(
            "control = \"control\"\n\
             [[disk]]\nname = \"fast\"\nimage = \"fast.qcow2\"\nnbd = [\"{}\"]\n\
             [[disk]]\nname = \"slow\"\nimage = \"slow.qcow2\"\nnbd = [\"slow.nbd\"]\n\
             inject = [\"delay=200ms\"]\n",
            socket.display()
        );
        fs::write(folder.join("mica.toml"), config).expect("written");
        let mut serve = Command::new(mica::binary());
        serve.arg("serve").arg("--config").arg(folder.join("mica.toml"));
        serve
    });
    let server = server.expect("served");
    let control = folder.join("control").display().to_string();
    let status = mica::run(["ctl", "--control", &control, "--output", "json", "status"]).json();
    let states: Vec<_> = status["disks"].as_array().expect("two").iter().collect();
    assert!(states.len() == 2 && states.iter().all(|disk| disk["state"] == "serving"), "{status}");
    assert!(folder.join("slow.nbd").exists());
    server.stop().expect("stopped");
    assert!(!Path::new(&control).exists());
}
