//! Disks that share an address of NBD, judged by libnbd's and QEMU's tools.

use mica_tests::command::{self, Finished};
use mica_tests::takeover::{LIMIT, Process};
use mica_tests::{clock, mica, nbd, qemu, tools};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

const STEP: Duration = Duration::from_millis(10);
const SIZES: [(&str, u64); 3] = [("a", 1 << 20), ("b", 2 << 20), ("c", 3 << 20)];
const SLOT_BYTES: usize = 4096;

/// A folder with images a.qcow2, b.qcow2 and c.qcow2 of 1, 2 and 3 MiB.
struct World(TempDir);

impl World {
    fn new() -> Option<Self> {
        if !tools::present(&[tools::QEMU_IMG, tools::QEMU_IO, tools::NBDINFO]) {
            return None;
        }
        let world = Self(tempfile::tempdir().expect("a folder"));
        for (name, size) in SIZES {
            qemu::create(world.path(), &format!("{name}.qcow2"), &[], &size.to_string());
        }
        Some(world)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    /// Writes a configuration in which each of `names` is at the sockets "s" and `more`, with the
    /// lines `rest`.
    fn configure(&self, names: &[&str], more: &[&str], rest: &str) {
        let mut text = "control = \"control\"\n".to_owned();
        for name in names {
            let places = ["s"].iter().chain(more).collect::<Vec<_>>();
            writeln!(
                text,
                "[[disk]]\nname = \"{name}\"\nimage = \"{name}.qcow2\"\nnbd = {places:?}\n{rest}"
            )
            .expect("a string");
        }
        fs::write(self.at("mica.toml"), text).expect("written");
    }

    fn start(&self, log: &str, options: &[&str]) -> Process {
        let config = self.at("mica.toml").display().to_string();
        Process::start(self.path(), log, &[&["--config", &config], options].concat())
    }

    fn serve(&self, options: &[&str]) -> Process {
        let process = self.start("log", options);
        let answers = || (self.ctl(&["status"]).code() == Some(0)).then_some(());
        let answered = clock::poll(LIMIT, STEP, answers);
        assert!(answered.is_some(), "not served: {}", process.log());
        process
    }

    /// `mica ctl VERB…`
    fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.at("control").display().to_string();
        mica::run(["ctl"].iter().chain(verb).copied().chain(["--control", &control]))
    }

    /// The state of a disk, as the server tells it.
    fn state(&self, name: &str) -> Value {
        let status = self.ctl(&["status", "--output", "json"]).json();
        let disks = status["disks"].as_array().expect("disks");
        let disk = disks.iter().find(|disk| disk["name"] == name);
        disk.map_or(Value::Null, |disk| disk["state"].clone())
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.at("s").display())
    }

    /// The exports of the socket, with their sizes.
    fn listed(&self) -> Vec<(String, u64)> {
        listed(&self.uri(""))
    }

    fn connect(&self, export: &str) -> anyhow::Result<nbd::Connection> {
        nbd::Connection::open(&self.at("s"), export, &nbd::Wish::default())
    }
}

/// The exports at an address, as nbdinfo lists them.
fn listed(uri: &str) -> Vec<(String, u64)> {
    let list = command::run("nbdinfo", ["--list", "--json", uri]).json();
    let export = |export: &Value| {
        let name = export["export-name"].as_str().expect("a name").to_owned();
        (name, export["export-size"].as_u64().expect("a size"))
    };
    list["exports"].as_array().expect("exports").iter().map(export).collect()
}

fn exports(names: &[&str]) -> Vec<(String, u64)> {
    let known = SIZES.iter().filter(|(name, _)| names.contains(name));
    known.map(|(name, size)| ((*name).to_owned(), *size)).collect()
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port()
}

/// A client that writes all the time to one export, on one connection.
struct Writer {
    stop: Arc<AtomicBool>,
    done: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Writer {
    /// Any failure, also a lost connection, is one of the test.
    fn start(mut client: nbd::Connection) -> Self {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&done));
        let thread = std::thread::spawn(move || {
            for number in 0_u64.. {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let at = number % 64 * SLOT_BYTES as u64;
                let len = u32::try_from(SLOT_BYTES).expect("small");
                client
                    .stream
                    .write_all(&nbd::request(nbd::CMD_WRITE, 0, 7, at, len))
                    .expect("sent");
                client.stream.write_all(&[number.to_le_bytes()[0]; SLOT_BYTES]).expect("sent");
                let mut reply = [0; nbd::SIMPLE_REPLY_BYTES];
                client.stream.read_exact(&mut reply).expect("answered");
                assert_eq!(reply[4..8], [0; 4], "the write fails");
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { stop, done, thread }
    }

    /// Waits until it has made progress.
    fn goes_on(&self) {
        let before = self.done.load(Ordering::Relaxed);
        let more = || (self.done.load(Ordering::Relaxed) > before + 20).then_some(());
        assert!(clock::poll(LIMIT, STEP, more).is_some(), "the client of another disk is stuck");
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("no write failed");
    }
}

#[test]
fn three_disks_share_a_unix_socket_and_a_tcp_address() {
    let Some(world) = World::new() else { return };
    let port = free_port();
    world.configure(&["c", "a", "b"], &[&format!("tcp:127.0.0.1:{port}")], "");
    let process = world.serve(&[]);
    let tcp = |export: &str| format!("nbd://127.0.0.1:{port}/{export}");
    assert_eq!(world.listed(), exports(&["a", "b", "c"]));
    assert_eq!(listed(&tcp("")), exports(&["a", "b", "c"]));
    for (number, (name, size)) in SIZES.iter().enumerate() {
        let said = command::run("nbdinfo", ["--size", &world.uri(name)]).ok();
        assert_eq!(said.trim(), size.to_string());
        let write = format!("write -P {} 64k 64k", number + 1);
        command::run("qemu-io", ["-f", "raw", "-c", &write, &tcp(name)]).ok();
    }
    for (number, (name, _)) in SIZES.iter().enumerate() {
        let read = format!("read -P {} 64k 64k", number + 1);
        let said = command::run("qemu-io", ["-f", "raw", "-c", &read, &world.uri(name)]).ok();
        assert!(!said.contains("fail"), "{name}: {said}");
        let map = command::run("nbdinfo", ["--map", "--json", &world.uri(name)]).json();
        assert_eq!(map[1]["offset"], 64 << 10, "the map is that of {name}: {map}");
    }
    for (export, text) in [("", "no default among several exports"), ("x", "no export with that")] {
        let refusal = command::run("nbdinfo", [&world.uri(export)]);
        assert_ne!(refusal.code(), Some(0));
        let error = world.connect(export).expect_err("no such export").to_string();
        assert!(error.contains(text) && error.contains("\"a\", \"b\", \"c\""), "{error}");
    }
    process.stop();
    assert!(!world.at("s").exists());
}

#[test]
fn disks_come_and_go_at_a_shared_address_while_another_is_written() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &[], "");
    let process = world.serve(&["--disks-in", &world.path().display().to_string()]);
    let writer = Writer::start(world.connect("a").expect("served"));
    let add = |name: &str| {
        let image = world.at(&format!("{name}.qcow2")).display().to_string();
        let socket = world.at("s").display().to_string();
        world.ctl(&["add", &image, "--nbd", &socket, "--read-only"])
    };
    add("c").ok();
    assert_eq!(world.listed(), exports(&["a", "b", "c"]));
    let info = command::run("nbdinfo", ["--json", &world.uri("c")]).json();
    assert_eq!(info["exports"][0]["is_read_only"], true, "{info}");
    let info = command::run("nbdinfo", ["--json", &world.uri("b")]).json();
    assert_eq!(info["exports"][0]["is_read_only"], false, "{info}");
    let twice = add("c").refusal();
    assert!(twice.contains("\"c\""), "{twice}");

    let mut drained = world.connect("b").expect("served");
    world.ctl(&["drain", "b"]).ok();
    assert!(drained.read(0, 512).is_err(), "its clients are disconnected");
    assert_eq!(world.listed(), exports(&["a", "c"]));
    let error = world.connect("b").expect_err("drained").to_string();
    assert!(error.contains("\"b\" is not served: it is drained"), "{error}");
    writer.goes_on();
    world.ctl(&["undrain", "b"]).ok();
    assert_eq!(world.connect("b").expect("served").len, 2 << 20);
    world.ctl(&["remove", "c"]).ok();
    assert_eq!(world.listed(), exports(&["a", "b"]));
    writer.goes_on();

    world.configure(&["a", "c"], &[], "");
    world.ctl(&["reload"]).ok();
    assert_eq!(world.listed(), exports(&["a", "c"]));
    writer.goes_on();
    writer.end();
    world.ctl(&["remove", "a"]).ok();
    assert_eq!(world.connect("").expect("c is alone").len, 3 << 20);
    assert!(world.at("s").exists());
    world.ctl(&["drain", "c"]).ok();
    assert!(!world.at("s").exists(), "the last one takes the socket with it");
    world.ctl(&["undrain", "c"]).ok();
    assert_eq!(world.listed(), exports(&["c"]));
    process.stop();
    assert!(!world.at("s").exists());
}

#[test]
fn disk_that_cannot_be_opened_says_so_and_the_others_are_served() {
    let Some(world) = World::new() else { return };
    fs::rename(world.at("b.qcow2"), world.at("gone")).expect("moved");
    world.configure(&["a", "b", "c"], &[], "");
    let mut strict = world.start("strict", &["--strict"]);
    assert_ne!(strict.ended_within(LIMIT), Some(0), "{}", strict.log());
    assert!(!world.at("s").exists());

    let process = world.serve(&[]);
    assert_eq!(world.listed(), exports(&["a", "c"]));
    let error = world.connect("b").expect_err("not there").to_string();
    assert!(error.contains("\"b\" is not served: it could not be opened"), "{error}");
    assert_eq!(world.state("b"), "failed");
    fs::rename(world.at("gone"), world.at("b.qcow2")).expect("moved");
    world.ctl(&["undrain", "b"]).ok();
    assert_eq!(world.listed(), exports(&["a", "b", "c"]));
    process.stop();
}

#[test]
fn one_disk_too_many_clients_do_not_concern_the_others() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &[], "shared = 1");
    let process = world.serve(&[]);
    let first = world.connect("a").expect("served");
    let error = world.connect("a").expect_err("full").to_string();
    assert!(error.contains("as many clients as it may have"), "{error}");
    world.connect("b").expect("it has a slot of its own");
    drop(first);
    assert!(clock::poll(LIMIT, STEP, || world.connect("a").ok()).is_some());
    process.stop();
}

#[test]
fn what_cannot_share_an_address_is_refused_with_both_disks() {
    let Some(world) = World::new() else { return };
    let config = world.at("mica.toml").display().to_string();
    let check = || mica::run(["serve", "--check-config", "--config", &config]);
    world.configure(&["a", "b"], &[], "");
    check().ok();
    let text = fs::read_to_string(world.at("mica.toml")).expect("there");
    let more = |more: &str| fs::write(world.at("mica.toml"), text.clone() + more).expect("written");
    more("export-name = \"a\"\n");
    let said = check().refusal();
    assert!(said.contains("mica.toml: Invalid: line 7") || said.contains("line 7"), "{said}");
    for part in ["disk \"b\"", "the disk \"a\" (line 2)", "export name \"a\""] {
        assert!(said.contains(part), "{part}: {said}");
    }
    more("tls-certificates = \"pki\"\n");
    let said = check().stderr;
    for part in ["line 7: disk \"b\"", "the disk \"a\" (line 2)", "settings of TLS"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    fs::write(world.at("mica.toml"), &text).expect("written");
    let process = world.serve(&["--disks-in", &world.path().display().to_string()]);
    let image = world.at("c.qcow2").display().to_string();
    let socket = world.at("s").display().to_string();
    for (options, part) in [
        (&["--nbd", &*socket, "--export-name", "a"][..], "export name \"a\""),
        (&["--nbd", &socket, "--tls-certificates", "pki"], "settings of TLS"),
        (&["--vhost-user", &socket], "only NBD sockets are shared"),
    ] {
        let said = world.ctl(&[&["add", &image], options].concat()).refusal();
        assert!(said.contains(part) && said.contains("the disk \"a\""), "{part}: {said}");
    }
    assert_eq!(world.listed(), exports(&["a", "b"]));
    process.stop();
}

#[test]
fn killed_server_leaves_a_socket_that_the_next_one_replaces() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b", "c"], &[], "");
    let mut process = world.serve(&[]);
    process.signal(Signal::KILL);
    process.ended_within(LIMIT);
    assert!(world.at("s").exists());
    let process = world.serve(&[]);
    assert_eq!(world.listed(), exports(&["a", "b", "c"]));
    process.stop();
    assert!(!world.at("s").exists());
}

#[test]
fn takeover_passes_a_shared_address_once_and_all_its_disks() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &[], "");
    let disks_in = world.path().display().to_string();
    let mut old = world.serve(&["--disks-in", &disks_in]);
    let (image, socket) = (world.at("c.qcow2"), world.at("s").display().to_string());
    world.ctl(&["add", &image.display().to_string(), "--nbd", &socket]).ok();
    world.ctl(&["drain", "b"]).ok();
    // A client that reconnects finds its disk whenever it comes.
    let stop = Arc::<AtomicBool>::default();
    let (stopped, path) = (Arc::clone(&stop), world.at("s"));
    let visitor = std::thread::spawn(move || {
        let mut visits = 0_u64;
        while !stopped.load(Ordering::Relaxed) {
            match nbd::Connection::open(&path, "a", &nbd::Wish::default()) {
                Ok(mut client) => visits += u64::from(client.read(0, 512).is_ok()),
                // Only one that has not chosen an export is dismissed, without a word.
                Err(error) => assert!(!error.to_string().contains("export"), "{error}"),
            }
        }
        visits
    });
    let writer = world.connect("c").expect("served");
    let new = world.start("new", &["--takeover", "--disks-in", &disks_in]);
    assert_eq!(old.ended_within(LIMIT), Some(0), "{}", old.log());
    drop(writer);
    let served = || (world.state("a") == "serving").then_some(());
    assert!(clock::poll(LIMIT, STEP, served).is_some(), "{}", new.log());
    assert_eq!(world.listed(), exports(&["a", "c"]));
    world.ctl(&["undrain", "b"]).ok();
    assert_eq!(world.listed(), exports(&["a", "b", "c"]));
    stop.store(true, Ordering::Relaxed);
    assert!(visitor.join().expect("it always finds its disk") > 0);

    new.stop();
    assert!(!world.at("s").exists());
}

#[test]
fn takeover_that_cannot_serve_one_disk_leaves_all_to_the_old_process() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &[], "");
    let old = world.serve(&[]);
    // What the old process serves is still there; the new one is told something else.
    let text = fs::read_to_string(world.at("mica.toml")).expect("there");
    fs::write(world.at("mica.toml"), text.replace("a.qcow2", "gone.qcow2")).expect("written");
    let mut new = world.start("new", &["--takeover"]);
    assert_ne!(new.ended_within(LIMIT), Some(0), "{}", new.log());
    let back = || (world.state("a") == "serving").then_some(());
    assert!(clock::poll(LIMIT, STEP, back).is_some(), "{}", old.log());
    assert_eq!(world.listed(), exports(&["a", "b"]));
    old.stop();
    assert!(!world.at("s").exists());
}

#[test]
fn disk_whose_image_is_gone_when_a_takeover_has_failed_does_not_concern_the_others() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &[], "");
    let old = world.serve(&[]);
    fs::rename(world.at("a.qcow2"), world.at("gone")).expect("moved");
    let mut new = world.start("new", &["--takeover"]);
    assert_ne!(new.ended_within(LIMIT), Some(0), "{}", new.log());
    let settled = || (world.state("a") == "failed" && world.state("b") == "serving").then_some(());
    assert!(clock::poll(LIMIT, STEP, settled).is_some(), "{}", old.log());
    assert_eq!(world.listed(), exports(&["b"]));
    let error = world.connect("a").expect_err("not there").to_string();
    assert!(error.contains("\"a\" is not served: it could not be opened"), "{error}");
    fs::rename(world.at("gone"), world.at("a.qcow2")).expect("moved");
    world.ctl(&["undrain", "a"]).ok();
    assert_eq!(world.listed(), exports(&["a", "b"]));
    old.stop();
}

#[test]
fn status_tells_export_names_and_where_disks_listen() {
    let Some(world) = World::new() else { return };
    world.configure(&["a", "b"], &["tcp:127.0.0.1:0"], "");
    let text = fs::read_to_string(world.at("mica.toml")).expect("there") + "export-name = \"x\"\n";
    fs::write(world.at("mica.toml"), text).expect("written");
    let process = world.serve(&[]);
    let status = world.ctl(&["status", "--output", "json"]).json();
    let disk = |index: usize| &status["disks"][index];
    assert_eq!((&disk(0)["export_name"], &disk(1)["export_name"]), (&json!("a"), &json!("x")));
    let socket = world.at("s").display().to_string();
    for index in 0..2 {
        let places: Vec<_> = disk(index)["nbd"].as_array().expect("places").iter().collect();
        assert_eq!(*places[0], *socket);
        // The port is the one that the system chose.
        let port = places[1].as_str().and_then(|place| place.strip_prefix("tcp:127.0.0.1:"));
        let uri = format!("nbd://127.0.0.1:{}", port.expect("a TCP address"));
        assert_eq!(listed(&uri).len(), 1, "{status}");
    }
    let shown = world.ctl(&["status"]).ok();
    let line = shown.lines().find(|line| line.starts_with("b ")).expect("a line");
    assert!(line.contains(&format!(" x       {socket} ")), "{shown}");
    process.stop();
}

#[test]
fn list_of_many_disks_at_one_address_is_whole() {
    const DISKS: usize = 200;
    let Some(world) = World::new() else { return };
    let mut text = "control = \"control\"\n".to_owned();
    for number in 0..DISKS {
        writeln!(
            text,
            "[[disk]]\nname = \"d{number:03}\"\nimage = \"1M\"\nformat = \"null\"\nnbd = \"s\""
        )
        .expect("a string");
    }
    fs::write(world.at("mica.toml"), text).expect("written");
    let process = world.serve(&[]);
    let name = |number: usize| (format!("d{number:03}"), 1 << 20);
    assert_eq!(world.listed(), (0..DISKS).map(name).collect::<Vec<_>>());
    world.ctl(&["remove", "d100"]).ok();
    let rest = (0..DISKS).filter(|number| *number != 100).map(name);
    assert_eq!(world.listed(), rest.collect::<Vec<_>>());
    let status = world.ctl(&["status", "--output", "json"]).json();
    assert_eq!(status["disks"].as_array().map(Vec::len), Some(DISKS - 1));
    assert_eq!(json!(world.state("d101")), "serving");
    let sockets = fs::read_dir(format!("/proc/{}/fd", process.pid())).expect("there").count();
    assert!(sockets < DISKS, "{sockets} descriptors: the address is shared");
    process.stop();
}
