//! What a server tells systemd, and what it takes from it. The test is systemd.

use mica_tests::{clock, command, mica, nbd, tools};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(30);

/// A server that the test started, and what it is told by.
struct Service {
    child: Child,
    notified: UnixDatagram,
}

/// Disks that need no files.
const CONFIG: &str = "[[disk]]\nname = 'web1'\nimage = '1M'\nformat = 'null'\nnbd = ['web1.nbd']\n\
                      [[disk]]\nname = 'web2'\nimage = '2M'\nformat = 'null'\n";

fn folder(config: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("mica.toml"), config).expect("written");
    dir
}

/// Starts mica in `dir`, with `sockets` of these names and `more` variables.
fn start(dir: &Path, sockets: [Option<(&str, OwnedFd)>; 2], more: &[(&str, &str)]) -> Service {
    let socket = dir.join("notify");
    // A socket of the service before this one.
    let _ = fs::remove_file(&socket);
    let notified = UnixDatagram::bind(&socket).expect("bound");
    notified.set_read_timeout(Some(LIMIT)).expect("set");
    let names: Vec<_> = sockets.iter().flatten().map(|(name, _)| *name).collect();
    // As the first descriptors after the three that every program has. LISTEN_PID is who reads it.
    let script = "exec 3<&0 4>&1 </dev/null >&2; \
                  if [ \"$LISTEN_FDS\" = 1 ]; then exec 4>&-; fi; \
                  if [ \"$LISTEN_FDS\" = 0 ]; then exec 3<&- 4>&-; fi; \
                  LISTEN_PID=$$ exec \"$0\" serve --config mica.toml";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).arg(mica::binary()).current_dir(dir);
    shell.env("NOTIFY_SOCKET", &socket).env("LISTEN_FDS", names.len().to_string());
    shell.env("LISTEN_FDNAMES", names.join(":")).envs(more.iter().copied());
    let said = fs::File::create(dir.join("log")).expect("made");
    let [first, second] =
        sockets.map(|socket| socket.map_or_else(Stdio::null, |(_, fd)| Stdio::from(fd)));
    shell.stdin(first).stdout(second).stderr(said);
    Service { child: shell.spawn().expect("started"), notified }
}

impl Service {
    /// What it says next.
    #[track_caller]
    fn told(&self) -> String {
        let mut bytes = [0; 4096];
        let count = self.notified.recv(&mut bytes).expect("it says something");
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }

    /// All that it says until it has said `what`.
    #[track_caller]
    fn told_until(&self, what: &str) -> Vec<String> {
        let mut all = Vec::new();
        loop {
            all.push(self.told());
            if all.last().is_some_and(|told| told.contains(what)) {
                return all;
            }
        }
    }

    #[track_caller]
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it runs");
        self.told_until("STOPPING=1");
        assert_eq!(command::wait(&mut self.child, LIMIT).and_then(|status| status.code()), Some(0));
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn length(socket: &Path) -> u64 {
    nbd::Connection::open(socket, "", &nbd::Wish::default()).expect("served").len
}

#[test]
fn readiness_sockets_and_the_end_are_told() {
    let dir = folder(&CONFIG.replace("image = '2M'", "image = '2M'\nvhost-user = 'web2.vhost'"));
    let service = start(dir.path(), [None, None], &[]);

    let told = service.told_until("READY=1");
    // Whoever is told may connect.
    assert_eq!(length(&dir.path().join("web1.nbd")), 1 << 20);
    let has = |what: &str| told.iter().any(|told| told.contains(what));
    assert!(has("FDSTORE=1\nFDNAME=stored@web1"), "{told:?}");
    assert!(has("FDSTORE=1\nFDNAME=stored@web2.vhost-user"), "{told:?}");
    assert!(has("STATUS=serving 2 disks"), "{told:?}");
    assert!(has(&format!("MAINPID={}", service.child.id())), "{told:?}");
    service.stop();
    assert!(!dir.path().join("web1.nbd").exists());
}

#[test]
fn watchdog_is_told_again_and_again() {
    let dir = folder(CONFIG.split("[[disk]]\nname = 'web2'").next().expect("a disk"));
    let service = start(dir.path(), [None, None], &[("WATCHDOG_USEC", "300000")]);
    service.told_until("READY=1");
    let start = clock::now();
    for _ in 0..5 {
        service.told_until("WATCHDOG=1");
    }
    // Twice a period at least, where the machine is not busy with something else.
    println!("five times in {:?}", start.elapsed());
    service.stop();
}

#[test]
fn sockets_that_come_along_are_served_by_address_and_by_name() {
    let dir = folder(CONFIG);
    let bind = |name: &str| UnixListener::bind(dir.path().join(name)).expect("bound").into();
    let sockets = [Some(("mica.socket", bind("web1.nbd"))), Some(("web2", bind("other.nbd")))];
    let service = start(dir.path(), sockets, &[]);

    let told = service.told_until("READY=1");
    assert_eq!(length(&dir.path().join("web1.nbd")), 1 << 20);
    assert_eq!(length(&dir.path().join("other.nbd")), 2 << 20);
    assert!(!told.iter().any(|told| told.contains("FDSTORE")), "their unit keeps them: {told:?}");
    service.stop();
    assert!(dir.path().join("web1.nbd").exists(), "the file is its unit's");
}

#[test]
fn socket_that_fits_nothing_is_refused() {
    let dir = folder(CONFIG);
    let socket = UnixListener::bind(dir.path().join("s")).expect("bound");
    let mut service = start(dir.path(), [Some(("web3", socket.into())), None], &[]);
    let status = command::wait(&mut service.child, LIMIT).expect("it ends");
    assert_eq!(status.code(), Some(1));
    let log = fs::read_to_string(dir.path().join("log")).expect("there");
    assert!(log.contains("\"web3\"") && log.lines().count() == 1, "{log}");
}

#[test]
fn who_connects_while_the_server_is_gone_waits_for_the_next() {
    let dir = folder(CONFIG.split("[[disk]]\nname = 'web2'").next().expect("a disk"));
    let path = dir.path().join("web1.nbd");
    // The store keeps the socket open, whatever becomes of the server.
    let stored = UnixListener::bind(&path).expect("bound");
    let socket = || Some(("stored@web1", OwnedFd::from(stored.try_clone().expect("cloned"))));
    let mut first = start(dir.path(), [socket(), None], &[]);
    first.told_until("READY=1");
    first.child.kill().expect("it runs");
    first.child.wait().expect("ended");

    let waiting = UnixStream::connect(&path).expect("not refused");
    let waiting = std::thread::spawn(move || {
        let mut greeting = [0; 8];
        std::io::Read::read_exact(&mut &waiting, &mut greeting).map(|()| greeting)
    });
    let second = start(dir.path(), [socket(), None], &[]);
    second.told_until("READY=1");
    assert_eq!(&waiting.join().expect("ended").expect("greeted"), b"NBDMAGIC");
    second.stop();
    assert!(!path.exists(), "it is the server's own, and it ended well");
}

#[test]
fn example_units_are_sound() {
    let judge = tools::Tool { program: "systemd-analyze", packages: &["systemd"] };
    if !judge.is_there() {
        return tools::skip("there is no systemd-analyze");
    }
    let dir = tempfile::tempdir().expect("a folder");
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs");
    let mica = mica::binary().display().to_string();
    for name in ["mica.service", "mica.socket"] {
        let unit = fs::read_to_string(docs.join(name)).expect("there");
        let unit = unit.replace("/usr/bin/mica", &mica).replace("User=mica\n", "User=root\n");
        fs::write(dir.path().join(name), unit).expect("written");
    }
    let units = ["mica.service", "mica.socket"].map(|name| dir.path().join(name));
    let said =
        command::run("systemd-analyze", [&[Path::new("verify").to_owned()], &units[..]].concat());
    let complaints = said.stderr.lines().filter(|line| line.contains("mica."));
    // It knows no manual page of a program that is not installed.
    let complaints: Vec<_> = complaints.filter(|line| !line.contains("man ")).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}
