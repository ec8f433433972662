//! What those see who watch a server: health, metrics and history, from inside the sandbox, and
//! the screen of `mica top`.

use mica_tests::guest::Guest;
use mica_tests::server::Server;
use mica_tests::{clock, command, mica, shell, tools};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(60);

/// A server of one raw disk, whose storage fails to sync from the second time on.
struct World {
    dir: TempDir,
    server: Server,
}

/// Names may hold what a page or a terminal could take for something else.
const IMAGE: &str = "<img src=x onerror=alert(1)>\u{1b}[31m.raw";

impl World {
    fn new(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let image = dir.path().join(IMAGE);
        fs::File::create(&image).and_then(|file| file.set_len(1 << 20)).expect("made");
        let control = dir.path().join("control").display().to_string();
        let options = [&["--control", &control, "--sandbox", "on"], more].concat();
        let server = Server::mica_writable(&image, "raw", &options).expect("served");
        let listens = || UnixStream::connect(&control).ok();
        clock::poll(LIMIT, Duration::from_millis(5), listens).expect("it listens");
        Self { dir, server }
    }

    fn socket(&self) -> std::path::PathBuf {
        self.dir.path().join("control")
    }

    fn get(&self, path: &str) -> (u16, String) {
        get(&self.socket(), path).expect("it answers")
    }

    fn json(&self, path: &str) -> Value {
        let (status, body) = self.get(path);
        assert_eq!(status, 200, "{path}: {body}");
        serde_json::from_str(&body).expect("JSON")
    }
}

fn get(socket: &Path, path: &str) -> Option<(u16, String)> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.get(9..12)?.parse().ok()?, body.to_owned()))
}

#[test]
fn latched_disk_is_reported_wherever_one_looks() {
    let world = World::new(&["--inject", "error=from:2,op=sync,errno=EIO"]);
    assert_eq!(world.get("/healthz"), (200, "ok\n".to_owned()));
    let mut guest = Guest::connect(&world.server).expect("served");
    let failed = clock::poll(LIMIT, Duration::from_millis(1), || {
        assert_eq!(guest.write(0, &[1; 4096]).expect("an answer"), 0);
        (guest.flush().expect("an answer") != 0).then_some(())
    });
    failed.expect("a sync fails");
    let (status, why) = world.get("/healthz");
    assert_eq!((status, why.lines().count()), (503, 1), "{why}");
    assert!(why.contains("accepts no more writes") && why.contains("sync"), "{why}");
    assert!(!why.contains('\u{1b}'), "{why:?}");
    let metrics = world.get("/metrics").1;
    let name = world.json("/v1/status")["disks"][0]["name"].as_str().expect("a name").to_owned();
    assert!(metrics.contains(&format!("mica_disk_latched{{disk=\"{name}\"}} 1\n")), "{metrics}");
    assert!(
        metrics.contains(&format!("mica_disk_errors_total{{disk=\"{name}\"}} 1\n")),
        "{metrics}"
    );
    let overview = world.json("/v1/overview");
    let disk = &overview["disks"][0];
    assert!(disk["latch"].is_string() && disk["errors_lately"] == 1, "{disk}");
    let control = world.socket().display().to_string();
    let human = mica::run(["ctl", "status", "--control", &control]).ok();
    assert!(human.contains("latched: ") && !human.contains('\u{1b}'), "{human:?}");
    let lines = mica::run(["top", "--count", "1", "-i", "0.1", "--control", &control]).ok();
    assert!(lines.contains("reads 0/s"), "{lines}");
}

#[test]
fn process_is_measured_from_inside_its_sandbox() {
    let world = World::new(&[]);
    let metrics = world.get("/metrics").1;
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name}: {metrics}")).parse().expect("a number")
    };
    let proc = |file: &str| format!("/proc/{}/{file}", world.server.pid());
    let open = fs::read_dir(proc("fd")).expect("it runs").count();
    assert!(value("process_resident_memory_bytes") > 1e6, "{metrics}");
    assert!(value("process_virtual_memory_bytes") > 1e6, "{metrics}");
    assert!(value("process_cpu_seconds_total") > 0.0, "{metrics}");
    assert!(value("process_threads") >= 3.0, "{metrics}");
    #[expect(clippy::cast_precision_loss, reason = "a few")]
    let difference = (value("process_open_fds") - open as f64).abs();
    assert!(difference <= 8.0, "{open}: {metrics}");
    assert!(value("process_max_fds") >= value("process_open_fds"), "{metrics}");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
    let since = now - value("process_start_time_seconds");
    assert!((-1.0..3600.0).contains(&since), "{since}");
}

#[test]
fn history_is_kept_by_the_server() {
    let world = World::new(&[]);
    let mut guest = Guest::connect(&world.server).expect("served");
    guest.read(0, 4096).expect("an answer");
    let name = world.json("/v1/status")["disks"][0]["name"].as_str().expect("a name").to_owned();
    let none = world.json(&format!("/v1/history/{name}"));
    assert_eq!(none["points"].as_array().map(Vec::len), Some(0), "{none}");
    let history = clock::poll(LIMIT, Duration::from_millis(100), || {
        let history = world.json("/v1/history");
        (!history["points"].as_array()?.is_empty()).then_some(history)
    });
    let history = history.expect("it is sampled");
    let columns: Vec<_> =
        history["columns"].as_array().expect("columns").iter().filter_map(Value::as_str).collect();
    let column = |name| columns.iter().position(|column| *column == name).expect(name);
    let value = |name| history["points"][0][column(name)].as_f64().expect("a number");
    assert!(value("reads") > 0.0 && value("read_bytes") > 0.0, "{history}");
    assert!(value("resident_bytes") > 1e6 && value("open_descriptors") > 3.0, "{history}");
}

#[test]
fn alert_rules_are_what_prometheus_takes() {
    if !tools::present(&[tools::PROMTOOL]) {
        return;
    }
    let promtool = tools::PROMTOOL.find().expect("it is there");
    let rules = shell::root().join("docs/monitoring/alerts.yml");
    command::finish(Command::new(promtool).args(["check", "rules"]).arg(rules)).ok();
}

/// Runs `mica top` on a terminal of 24 by 80 and types; returns what it showed.
struct Terminal {
    top: std::process::Child,
    typed: std::process::ChildStdin,
    seen: std::sync::mpsc::Receiver<Vec<u8>>,
    shown: String,
}

impl Terminal {
    fn new(control: &Path, more: &[&str]) -> Option<Self> {
        if !tools::present(&[tools::SCRIPT]) {
            return None;
        }
        let binary = mica::binary();
        let words = ["top", "--control", control.to_str()?, "-i", "0.1"];
        let words = words.iter().chain(more).map(|word| format!("'{word}'"));
        let line = format!("stty rows 24 cols 80; exec '{}' ", binary.display());
        let line = words.fold(line, |line, word| line + &word + " ");
        let mut script = Command::new(tools::SCRIPT.program);
        script.args(["-q", "-e", "-c", &line, "/dev/null"]).env("TERM", "xterm");
        script.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut top = script.spawn().expect("started");
        let mut output = top.stdout.take().expect("a pipe");
        let (sender, seen) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut room = [0; 4096];
            while let Ok(count @ 1..) = output.read(&mut room) {
                if sender.send(room[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let typed = top.stdin.take().expect("a pipe");
        Some(Self { top, typed, seen, shown: String::new() })
    }

    fn press(&mut self, keys: &[u8]) {
        self.typed.write_all(keys).and_then(|()| self.typed.flush()).expect("it reads");
    }

    /// Waits until a screen that is drawn from now on has `text`.
    #[track_caller]
    fn sees(&mut self, text: &str) {
        self.shown.clear();
        let end = clock::now() + LIMIT;
        while !self.shown.contains(text) {
            let left = end.saturating_duration_since(clock::now());
            let more = self.seen.recv_timeout(left);
            let more = more.unwrap_or_else(|_| panic!("no {text:?} in {:?}", self.shown));
            self.shown += &String::from_utf8_lossy(&more);
        }
    }
}

/// What a terminal is sent when the screen is as it was before.
const LEFT: &str = "\x1b[?1049l";

#[test]
fn screen_of_top_scrolls_sorts_and_outlives_the_server() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = dir.path().join("mica.toml");
    let disks = (0..40).map(|index| {
        format!("[[disk]]\nname = \"vm-{index}\"\nimage = \"1M\"\nformat = \"null\"\nnbd = [\"n{index}\"]\n")
    });
    let text = disks.fold("control = \"control\"\n".to_owned(), |text, disk| text + &disk);
    fs::write(&config, text).expect("written");
    let serve = || {
        let server = Server::start("", |socket| {
            let text = fs::read_to_string(&config).expect("there");
            let first =
                text.replacen("nbd = [\"n0\"]", &format!("nbd = [\"{}\"]", socket.display()), 1);
            fs::write(dir.path().join("this.toml"), first).expect("written");
            let mut serve = Command::new(mica::binary());
            serve.arg("serve").arg("--config").arg(dir.path().join("this.toml"));
            serve
        });
        server.expect("served")
    };
    let server = serve();
    let control = dir.path().join("control");
    clock::poll(LIMIT, Duration::from_millis(5), || UnixStream::connect(&control).ok())
        .expect("it listens");
    let Some(mut terminal) = Terminal::new(&control, &["--sort", "name"]) else { return };
    terminal.sees("22 more");
    terminal.press(b"\x1b[B");
    terminal.sees("21 more, 1 above");
    terminal.press(b"G");
    terminal.sees("22 more above");
    terminal.press(b"r");
    terminal.sees("by reads");
    terminal.press(b"/VM-1 serving\x7f");
    terminal.sees("/VM-1 servin_  11 of 40 disks");
    terminal.press(b"\r");
    terminal.sees("11 of 40 disks; Esc: all disks");
    terminal.press(b"\x1b");
    terminal.sees("22 more");
    let pid = Pid::from_raw(i32::try_from(server.pid()).expect("a process")).expect("a process");
    kill_process(pid, Signal::KILL).expect("it runs");
    terminal.sees("NO ANSWER FOR");
    drop(server);
    let server = serve();
    terminal.sees("descriptors");
    // Ctrl-Z: the program that runs it on the terminal stops with it.
    terminal.press(b"\x1a");
    let stat = format!("/proc/{}/stat", terminal.top.id());
    let is_stopped = || fs::read_to_string(&stat).ok()?.contains(") T ").then_some(());
    clock::poll(LIMIT, Duration::from_millis(5), is_stopped).expect("it stops");
    let script = i32::try_from(terminal.top.id()).expect("a process");
    kill_process(Pid::from_raw(script).expect("a process"), Signal::CONT).expect("it is there");
    // It may have been stopped before it passed on what it had got.
    terminal.sees("\x1b[?1049h");
    assert!(terminal.shown.contains(LEFT), "{:?}", terminal.shown);
    terminal.sees("descriptors");
    // Ctrl-\.
    terminal.press(b"\x1c");
    terminal.sees(LEFT);
    let ended =
        clock::poll(LIMIT, Duration::from_millis(5), || terminal.top.try_wait().expect("a child"));
    assert!(ended.expect("it ends").success());
    server.stop().expect("it stops");
}
