//! A server with many disks.

use crate::membership;
use mica_tests::command::Finished;
use mica_tests::takeover::LIMIT;
use mica_tests::{clock, command, mica, nbd};
use rustix::fs::inotify;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::iter;
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// Bases, layers of each disk, and disks on each base.
const BASES: usize = 40;
const LAYERS: usize = 300;
const CLONES: usize = 5;
const WRITTEN: std::ops::Range<usize> = 8192..12288;

/// A folder with images and a configuration.
struct World {
    folder: TempDir,
    config: String,
}

/// A server that is killed at the end.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        Self { folder, config: "control = \"control\"\n".to_owned() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn add(&mut self, name: &str, rest: &str) {
        writeln!(self.config, "[[disk]]\nname = \"{name}\"\n{rest}").expect("a string");
    }

    /// `mica serve` under a limit of open files.
    fn command(&self, files: usize) -> Command {
        fs::write(self.at("mica.toml"), &self.config).expect("written");
        let log = File::create(self.at("log")).expect("made");
        let mut serve = Command::new("prlimit");
        serve.arg(format!("--nofile={files}:{files}")).arg(mica::binary());
        serve.args(["serve", "--config", "mica.toml"]).current_dir(self.folder.path());
        serve.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        serve
    }

    fn serve(&self, files: usize, last: &str) -> Running {
        let server = Running(self.command(files).spawn().expect("started"));
        let socket = self.at(last);
        let there = clock::poll(5 * LIMIT, Duration::from_millis(20), || {
            nbd::Connection::open(&socket, "", &nbd::Wish::default()).map(drop).ok()
        });
        assert!(there.is_some(), "not served: {}", self.log());
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(self.at("log")).unwrap_or_default()
    }

    fn connect(&self, socket: &str) -> nbd::Connection {
        nbd::Connection::open(&self.at(socket), "", &nbd::Wish::default()).expect("served")
    }

    fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.at("control").display().to_string();
        mica::run(["ctl"].iter().chain(verb).copied().chain(["--control", &control]))
    }
}

fn copy_folder(from: &Path, to: &Path) {
    fs::create_dir(to).expect("made");
    for entry in fs::read_dir(from).expect("there") {
        let entry = entry.expect("there");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("copied");
    }
}

fn write(client: &mut nbd::Connection, bytes: &[u8], at: usize) {
    const CMD_WRITE: u16 = 1;
    let (at, len) = (at as u64, u32::try_from(bytes.len()).expect("small"));
    client.stream.write_all(&nbd::request(CMD_WRITE, 0, 7, at, len)).expect("sent");
    client.stream.write_all(bytes).expect("sent");
    let mut reply = [0; 16];
    client.stream.read_exact(&mut reply).expect("answered");
    assert_eq!(reply[4..8], [0; 4], "the write fails");
}

fn threads_of(process: u32) -> usize {
    fs::read_dir(format!("/proc/{process}/task")).map_or(0, Iterator::count)
}

fn descriptors_of(process: u32) -> usize {
    fs::read_dir(format!("/proc/{process}/fd")).map_or(0, Iterator::count)
}

/// Makes a chain of so many layers in a folder, and returns the name of the last.
fn chain(folder: &Path, layers: usize) -> String {
    let (layers, text) = (layers.to_string(), folder.display().to_string());
    let chain = ["gen", "chain", "-n", &layers, "-s", "1M", "-c", "4k", "--fill", "0.5", &text];
    mica::run(chain).ok();
    let entries = fs::read_dir(folder).expect("there");
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".qcow2")).max().expect("layers")
}

/// The story: each clone had a descriptor for each of its layers and sidecars.
#[test]
fn two_hundred_disks_of_300_layers_on_40_bases_are_served_under_4096_open_files() {
    let mut world = World::new();
    let first = world.at("base0");
    let top = chain(&first, LAYERS - 1);
    for base in 1..BASES {
        copy_folder(&first, &world.at(&format!("base{base}")));
    }
    let mut last = String::new();
    for base in 0..BASES {
        for clone in 0..CLONES {
            let (name, folder) = (format!("c{base}-{clone}"), world.at(&format!("base{base}")));
            let image = folder.join(format!("clone{clone}.qcow2")).display().to_string();
            mica::run(["create", "-q", "-b", &top, "-F", "qcow2", &image]).ok();
            last = format!("{name}.sock");
            let rest = format!("image = \"base{base}/clone{clone}.qcow2\"\nnbd = [\"{last}\"]\n");
            world.add(&name, &rest);
        }
    }
    let server = world.serve(4096, &last);

    let expected = world.connect("c0-0.sock").read_all().expect("read");
    assert!(expected.iter().any(|byte| *byte != 0));
    let mut writer = world.connect("c0-1.sock");
    write(&mut writer, &[0xa5; WRITTEN.end - WRITTEN.start], WRITTEN.start);
    let mut clients = Vec::new();
    for base in 0..BASES {
        for clone in 0..CLONES {
            let mut client = world.connect(&format!("c{base}-{clone}.sock"));
            let mut read = client.read_all().expect("read");
            if (base, clone) == (0, 1) {
                assert!(read[WRITTEN].iter().all(|byte| *byte == 0xa5));
                read[WRITTEN].copy_from_slice(&expected[WRITTEN]);
            }
            assert!(read == expected, "c{base}-{clone} has other content");
            clients.push(client);
        }
    }
    assert!(descriptors_of(server.0.id()) <= 4096);
    let log = world.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
    // A layer of one disk is no image that another one writes.
    let (image, socket) = (world.at(&format!("base3/{top}")), world.at("more.sock"));
    let (image, socket) = (image.display().to_string(), socket.display().to_string());
    let refused = world.ctl(&["add", &image, "--nbd", &socket]).refusal();
    assert!(refused.contains("allows nobody to write it"), "{refused}");
    drop(clients);
}

/// The story: the idle layers of one chain took all descriptors, and neither clients nor `mica ctl`
/// were let in.
#[test]
fn idle_layers_make_room_for_clients_and_for_control() {
    let mut world = World::new();
    let top = chain(&world.at("chain"), LAYERS);
    world.add("a", &format!("image = \"chain/{top}\"\nnbd = [\"a.sock\"]\n"));
    let server = world.serve(400, "a.sock");
    world.connect("a.sock").read_all().expect("read");
    let clients: Vec<_> = (0..200).map(|_| world.connect("a.sock")).collect();
    assert!(descriptors_of(server.0.id()) > clients.len());
    world.ctl(&["status"]).ok();
    let log = world.log();
    assert!(!log.contains("WARN") && !log.contains("ERROR"), "{log}");
}

#[test]
fn disks_that_need_more_open_files_than_allowed_are_refused_with_the_number() {
    let mut world = World::new();
    for disk in 0..100 {
        let rest = format!("image = \"1M\"\nformat = \"null\"\nnbd = [\"{disk}.sock\"]\n");
        world.add(&format!("d{disk}"), &rest);
    }
    let mut server = Running(world.command(256).spawn().expect("started"));
    let status = command::wait(&mut server.0, LIMIT).expect("it ends");
    let log = world.log();
    assert!(!status.success(), "{log}");
    for words in ["100 disks need 400 open files", "may have 256", "LimitNOFILE=", "ulimit -n"] {
        assert!(log.contains(words), "{words}: {log}");
    }
    assert!(!world.at("0.sock").exists());
    let server = world.serve(400, "99.sock");
    assert!(world.log().contains("not all clients can connect at once"), "{}", world.log());
    drop(server);
}

#[test]
fn disks_at_rest_have_no_threads_of_their_own() {
    let mut world = World::new();
    let base = world.at("base.qcow2").display().to_string();
    mica::run(["create", "-q", &base, "1M"]).ok();
    const DISKS: usize = 120;
    for disk in 0..DISKS {
        let image = world.at(&format!("{disk}.qcow2")).display().to_string();
        mica::run(["create", "-q", "-b", "base.qcow2", "-F", "qcow2", &image]).ok();
        let rest = format!(
            "image = \"{disk}.qcow2\"\nnbd = [\"{disk}.sock\"]\n\
             vhost-user = \"{disk}.vhost\"\nnum-queues = 1\n"
        );
        world.add(&format!("d{disk}"), &rest);
    }
    let server = world.serve(4096, &format!("{}.sock", DISKS - 1));
    let process = server.0.id();
    // Those that opened disks, and built the index, end.
    let few = || (threads_of(process) < DISKS / 2).then_some(());
    let settled = clock::poll(LIMIT, Duration::from_millis(20), few);
    assert!(settled.is_some(), "{} threads", threads_of(process));
    // Two sockets, the image and the ring of a queue; the base and its sidecar have one descriptor
    // for all, and the process some of its own.
    let descriptors = descriptors_of(process);
    assert!(2 * descriptors < 11 * DISKS, "{descriptors} descriptors");
}

/// Both may see the other's locks if they are opened at the same time.
#[test]
fn of_two_disks_of_one_image_that_is_written_one_is_served() {
    let mut world = World::new();
    let base = world.at("base.qcow2").display().to_string();
    mica::run(["create", "-q", &base, "1M"]).ok();
    const PAIRS: usize = 12;
    for pair in 0..PAIRS {
        let image = world.at(&format!("{pair}.qcow2")).display().to_string();
        mica::run(["create", "-q", "-b", "base.qcow2", "-F", "qcow2", &image]).ok();
        for twin in ["a", "b"] {
            let rest = format!("image = \"{pair}.qcow2\"\nnbd = [\"{pair}{twin}.sock\"]\n");
            world.add(&format!("d{pair}{twin}"), &rest);
        }
    }
    world.add("last", "image = \"1M\"\nformat = \"null\"\nnbd = [\"last.sock\"]\n");
    let _server = world.serve(4096, "last.sock");
    let answers = || {
        let status = world.ctl(&["status", "--output", "json"]);
        (status.code() == Some(0)).then(|| status.json())
    };
    let status = clock::poll(LIMIT, Duration::from_millis(20), answers).expect("an answer");
    let disks = status["disks"].as_array().expect("a list");
    for twins in disks[..2 * PAIRS].chunks(2) {
        let mut states = [&twins[0]["state"], &twins[1]["state"]].map(|state| state.as_str());
        states.sort_unstable();
        assert_eq!(states, [Some("failed"), Some("serving")], "{}", world.log());
    }
}

/// Memory of a process that is no file's, in KiB.
fn anonymous_memory_of(process: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn memory_of_disks_that_a_reload_removes_goes_back_to_the_system() {
    const DISKS: usize = 600;
    let mut world = World::new();
    let disk = |number: usize| {
        let rest = format!("image = \"1M\"\nformat = \"null\"\nnbd = [\"{number}.sock\"]\n");
        (format!("d{number}"), rest)
    };
    let (name, rest) = disk(0);
    world.add(&name, &rest);
    let one = world.config.clone();
    let server = world.serve(8192, "0.sock");
    let process = server.0.id();
    let before = anonymous_memory_of(process);

    for number in 1..DISKS {
        let (name, rest) = disk(number);
        world.add(&name, &rest);
    }
    fs::write(world.at("mica.toml"), &world.config).expect("written");
    world.ctl(&["reload"]).ok();
    let many = anonymous_memory_of(process);
    fs::write(world.at("mica.toml"), one).expect("written");
    world.ctl(&["reload"]).ok();

    let is_given_back = || {
        let kept = anonymous_memory_of(process).saturating_sub(before);
        (2 * kept < many - before).then_some(())
    };
    let given_back = clock::poll(LIMIT, Duration::from_millis(50), is_given_back);
    let after = anonymous_memory_of(process);
    assert!(given_back.is_some(), "{before} KiB, then {many} KiB, and at last {after} KiB");
}

/// The story: adding some hundred disks and saving them read and wrote the whole configuration for
/// each, which got slower and slower.
#[test]
fn many_disks_are_saved_together_up_to_one_that_is_refused() {
    const MANY: usize = 150;
    let Some(world) = membership::World::new() else { return };
    let server = world.serve(&[]);
    let name = |number: usize| format!("m{number:03}");
    let tables: String = (0..MANY)
        .map(|number| {
            let image = "image = \"1M\"\nformat = \"null\"";
            let table = membership::table(&name(number));
            table.replace(&format!("image = \"{}.qcow2\"", name(number)), image)
        })
        .collect();
    let more = world.at("more.toml").display().to_string();
    fs::write(&more, tables + &membership::table("gone")).expect("written");
    // Each time it is written, a new file is moved to its place.
    let moves = inotify::init(inotify::CreateFlags::NONBLOCK).expect("the kernel has it");
    inotify::add_watch(&moves, world.path(), inotify::WatchFlags::MOVED_TO).expect("watched");
    let refused = world.ctl(&["add", "--save", "--config", &more]).refusal();
    assert!(refused.contains("after 150 disks, m000 to m149 (added): "), "{refused}");
    assert!(refused.contains("disk \"gone\": "), "{refused}");
    let mut buffer = [const { MaybeUninit::uninit() }; 1 << 16];
    let mut moves = inotify::Reader::new(&moves, &mut buffer);
    let is_file = |moved: inotify::Event<'_>| moved.file_name() == Some(c"mica.toml");
    let moved = iter::from_fn(|| moves.next().ok().map(is_file));
    let times = moved.filter(|is_file| *is_file).count();
    assert!((1..=3).contains(&times), "written {times} times");
    server.stop();
    let server = world.serve(&[]);
    let states = world.states();
    assert_eq!(states.len(), 2 + MANY, "{states:?}");
    assert!(states.iter().all(|(name, state)| state == "serving" && name != "gone"), "{states:?}");
    server.stop();
}
