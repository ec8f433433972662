//! What a server reports to systemd, and what it takes from it. The test plays systemd.

use mica_tests::{clock, command, mica, nbd, tools};
use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(30);

/// A server that the test started, and the socket of its notifications.
struct Service {
    child: Child,
    told: Receiver<String>,
    /// What it had stored, with the messages that said so.
    stored: Arc<Mutex<Vec<(String, OwnedFd)>>>,
}

/// Disks that need no files.
const CONFIG: &str = "[[disk]]\nname = 'web1'\nimage = '1M'\nformat = 'null'\nnbd = ['web1.nbd']\n\
                      [[disk]]\nname = 'web2'\nimage = '2M'\nformat = 'null'\n";

fn folder(config: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    fs::write(dir.path().join("mica.toml"), config).expect("written");
    dir
}

/// One disk, and a control socket.
fn controlled() -> TempDir {
    let one = CONFIG.split("[[disk]]\nname = 'web2'").next().expect("a disk");
    folder(&format!("control = 'control'\n{one}"))
}

/// Starts mica in `dir`, with `sockets` of these names and `more` variables.
fn start(dir: &Path, sockets: [Option<(&str, OwnedFd)>; 2], more: &[(&str, &str)]) -> Service {
    let socket = dir.join("notify");
    // A socket of the service before this one.
    let _ = fs::remove_file(&socket);
    let notified = UnixDatagram::bind(&socket).expect("bound");
    let (sender, told) = mpsc::channel();
    let stored = Arc::<Mutex<Vec<_>>>::default();
    let storing = Arc::clone(&stored);
    // Notifying systemd does not wait for it.
    std::thread::spawn(move || {
        while let Ok((text, fds)) = receive(&notified) {
            let fds = fds.into_iter().map(|fd| (text.clone(), fd));
            storing.lock().extend(fds);
            if sender.send(text).is_err() {
                return;
            }
        }
    });
    let names: Vec<_> = sockets.iter().flatten().map(|(name, _)| *name).collect();
    // As the first descriptors after the three standard ones. LISTEN_PID is the process that reads
    // it.
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
    Service { child: shell.spawn().expect("started"), told, stored }
}

/// A notification, and the descriptors that came with it.
fn receive(socket: &UnixDatagram) -> rustix::io::Result<(String, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 4096];
    let mut into = [IoSliceMut::new(&mut bytes)];
    let count = recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let fds = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fds = fds.flatten().collect();
    Ok((String::from_utf8_lossy(&bytes[..count]).into_owned(), fds))
}

impl Service {
    /// Its next notification.
    #[track_caller]
    fn told(&self) -> String {
        self.told.recv_timeout(LIMIT).expect("it says something")
    }

    /// All its notifications up to `what`.
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

impl Service {
    /// Kills it, as a crash would; gives what systemd has of it in its store, by the messages with
    /// which it came.
    fn crash(mut self) -> Vec<(String, OwnedFd)> {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
        std::mem::take(&mut self.stored.lock())
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
fn readiness_sockets_and_the_end_are_reported() {
    let dir = folder(&CONFIG.replace("image = '2M'", "image = '2M'\nvhost-user = 'web2.vhost'"));
    let service = start(dir.path(), [None, None], &[]);

    let told = service.told_until("READY=1");
    // A client that sees it may connect.
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
fn watchdog_is_notified_repeatedly() {
    let dir = folder(CONFIG.split("[[disk]]\nname = 'web2'").next().expect("a disk"));
    let service = start(dir.path(), [None, None], &[("WATCHDOG_USEC", "300000")]);
    service.told_until("READY=1");
    let start = clock::now();
    for _ in 0..5 {
        service.told_until("WATCHDOG=1");
    }
    // At least twice a period, if the machine is not busy with something else.
    println!("five times in {:?}", start.elapsed());
    service.stop();
}

/// Does what `ExecReload=` of the example unit does; returns its exit code and output.
fn reload(dir: &Path) -> (Option<i32>, String) {
    // The server keeps writing there.
    let said = fs::File::create(dir.join("reload.log")).expect("made");
    let mut reload = Command::new(mica::binary());
    reload.args(["serve", "--config", "mica.toml", "--takeover", "--fork"]).current_dir(dir);
    reload.env("NOTIFY_SOCKET", dir.join("notify")).stdin(Stdio::null()).stderr(said);
    let mut reload = reload.stdout(Stdio::null()).spawn().expect("started");
    let code = command::wait(&mut reload, LIMIT).expect("it ends").code();
    (code, fs::read_to_string(dir.join("reload.log")).expect("there"))
}

#[test]
fn reload_names_the_new_main_process_which_is_watched_and_ends_when_it_serves() {
    const WATCHED: (&str, &str) = ("WATCHDOG_USEC", "300000");
    let dir = controlled();
    let mut service = start(dir.path(), [None, None], &[WATCHED]);
    service.told_until("READY=1");
    let old = Pid::from_child(&service.child);

    let (code, said) = reload(dir.path());
    assert_eq!(code, Some(0), "{said}");
    // Everything is served when the command has ended.
    assert_eq!(length(&dir.path().join("web1.nbd")), 1 << 20);
    assert_eq!(command::wait(&mut service.child, LIMIT).and_then(|status| status.code()), Some(0));
    // Both processes name the main process. The thread that receives them may be a little late.
    let mut told = String::new();
    while told.matches("MAINPID=").count() < 2 {
        told += &(service.told() + "\n");
    }
    // The old process has ended: whatever it said is there before this.
    let mark = UnixDatagram::unbound().expect("made");
    mark.send_to(b"TEST=ended", dir.path().join("notify")).expect("sent");
    told += &service.told_until("TEST=ended").join("\n");
    assert!(!told.contains("STOPPING=1"), "the service goes on: {told}");
    let named: Vec<_> = told.lines().filter_map(|line| line.strip_prefix("MAINPID=")).collect();
    assert!(named.len() == 2 && named[0] == named[1], "{told}");
    let pid = named[0].parse().ok().and_then(Pid::from_raw).expect(&told);
    assert_ne!(pid, old);
    // The new one got no watchdog, but still reports that it is alive.
    for _ in 0..5 {
        service.told_until("WATCHDOG=1");
    }
    kill_process(pid, Signal::TERM).expect("it runs");
    let told = service.told_until("FDSTOREREMOVE=1\nFDNAME=stored@mica.control");
    let has = |what: &str| told.iter().any(|told| told.contains(what));
    assert!(has("FDSTOREREMOVE=1\nFDNAME=stored@web1"), "{told:?}");
    assert!(!has("FDSTORE=1"), "{told:?}");
    let gone = || (!dir.path().join("control").exists()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(5), gone).expect("it ends");
}

/// The story: the process that `systemctl reload` starts gets no sockets from systemd, and demanded
/// an address for a disk that has none but the socket of its unit.
#[test]
fn disk_at_a_unit_s_socket_alone_is_served_there_after_a_reload() {
    let dir = folder(&format!("control = 'control'\n{CONFIG}"));
    let bind = |name: &str| UnixListener::bind(dir.path().join(name)).expect("bound").into();
    let mut service = start(dir.path(), [Some(("web2", bind("unit.nbd"))), None], &[]);
    service.told_until("READY=1");
    // It is said before the old process stops serving.
    let config = fs::read_to_string(dir.path().join("mica.toml")).expect("there");
    let more = format!("{config}[[disk]]\nname = 'web3'\nimage = '3M'\nformat = 'null'\n");
    fs::write(dir.path().join("mica.toml"), more).expect("written");
    let (code, said) = reload(dir.path());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("\"web3\": nowhere to serve it"), "{said}");

    fs::write(dir.path().join("mica.toml"), config).expect("written");
    let (code, said) = reload(dir.path());
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(command::wait(&mut service.child, LIMIT).and_then(|status| status.code()), Some(0));
    assert_eq!(length(&dir.path().join("unit.nbd")), 2 << 20);
    let told = service.told_until("READY=1").join("\n");
    let pid = told.lines().find_map(|line| line.strip_prefix("MAINPID=")).expect("named");
    let pid = pid.parse().ok().and_then(Pid::from_raw).expect(&told);
    kill_process(pid, Signal::TERM).expect("it runs");
    let gone = || (!dir.path().join("control").exists()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(5), gone).expect("it ends");
    assert!(dir.path().join("unit.nbd").exists(), "the file is its unit's");
}

#[test]
fn reload_that_fails_says_why_and_the_old_process_still_serves() {
    let dir = controlled();
    let service = start(dir.path(), [None, None], &[]);
    service.told_until("READY=1");
    let config = fs::read_to_string(dir.path().join("mica.toml")).expect("there");
    fs::write(dir.path().join("mica.toml"), config.replace("'null'", "'cow'")).expect("written");
    let (code, said) = reload(dir.path());
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("cow"), "{said}");
    assert_eq!(length(&dir.path().join("web1.nbd")), 1 << 20);
    service.stop();
}

#[test]
fn sockets_that_are_not_served_any_more_are_not_stored_any_more() {
    let dir = controlled();
    // One of an earlier configuration, and one whose file is gone.
    let old = UnixListener::bind(dir.path().join("old.nbd")).expect("bound");
    let gone = UnixListener::bind(dir.path().join("gone")).expect("bound");
    fs::remove_file(dir.path().join("gone")).expect("there");
    let stored = [Some(("stored@web9", old.into())), Some(("stored@web1", gone.into()))];
    let service = start(dir.path(), stored, &[]);
    let told = service.told_until("READY=1").concat();
    let at = |what: &str| told.find(what).unwrap_or_else(|| panic!("{what}: {told}"));
    at("FDSTOREREMOVE=1\nFDNAME=stored@web9");
    // Of the same name, the one that is served is stored after that.
    assert!(at("FDSTOREREMOVE=1\nFDNAME=stored@web1") < at("FDSTORE=1\nFDNAME=stored@web1"));
    assert!(!dir.path().join("old.nbd").exists());

    let drain = ["ctl", "--control", "control", "drain", "web1"];
    let drain = command::finish(Command::new(mica::binary()).args(drain).current_dir(dir.path()));
    assert_eq!(drain.code(), Some(0), "{drain}");
    assert!(service.told().contains("FDSTOREREMOVE=1\nFDNAME=stored@web1"));
    service.stop();
}

#[test]
fn inherited_sockets_are_served_by_address_and_by_name() {
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
fn client_that_connects_while_the_server_is_gone_waits_for_the_next() {
    let dir = folder(CONFIG.split("[[disk]]\nname = 'web2'").next().expect("a disk"));
    let path = dir.path().join("web1.nbd");
    // The store keeps the socket open, whatever happens to the server.
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

/// Two disks at one address, "both.nbd", and a control socket.
fn sharing() -> TempDir {
    let disk = |name: &str, size: &str| {
        format!("[[disk]]\nname = '{name}'\nimage = '{size}'\nformat = 'null'\nnbd = 'both.nbd'\n")
    };
    folder(&format!("control = 'control'\n{}{}", disk("web1", "1M"), disk("web2", "2M")))
}

/// `mica ctl VERB…` in `dir`.
#[track_caller]
fn ctl(dir: &Path, verb: &[&str]) {
    let mut command = Command::new(mica::binary());
    command.args(["ctl", "--control", "control"]).args(verb).current_dir(dir);
    command::finish(&mut command).ok();
}

fn length_of(socket: &Path, export: &str) -> Option<u64> {
    nbd::Connection::open(socket, export, &nbd::Wish::default()).ok().map(|client| client.len)
}

#[test]
fn unit_s_socket_serves_all_disks_with_its_address_and_outlives_the_last() {
    let dir = sharing();
    let at = dir.path().join("both.nbd");
    let unit = UnixListener::bind(&at).expect("bound");
    // The unit starts the server for this client.
    let waiting = {
        let at = at.clone();
        std::thread::spawn(move || length_of(&at, "web2"))
    };
    let socket = || OwnedFd::from(unit.try_clone().expect("cloned"));
    let mut service = start(dir.path(), [Some(("mica.socket", socket())), None], &[]);
    let told = service.told_until("READY=1").concat();
    assert_eq!(waiting.join().expect("ended"), Some(2 << 20));
    assert!(!told.contains("stored@web"), "systemd has it anyway: {told}");
    for name in ["web1", "web2"] {
        ctl(dir.path(), &["drain", name]);
    }
    assert!(at.exists(), "its unit's, which cannot make it again");
    ctl(dir.path(), &["undrain", "web2"]);
    assert_eq!((length_of(&at, "web2"), length_of(&at, "web1")), (Some(2 << 20), None));
    ctl(dir.path(), &["undrain", "web1"]);
    assert_eq!(length_of(&at, "web1"), Some(1 << 20));

    let (code, said) = reload(dir.path());
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(command::wait(&mut service.child, LIMIT).and_then(|status| status.code()), Some(0));
    assert_eq!((length_of(&at, "web1"), length_of(&at, "web2")), (Some(1 << 20), Some(2 << 20)));
    ctl(dir.path(), &["drain"]);
    let gone = || (!dir.path().join("control").exists()).then_some(());
    clock::poll(LIMIT, Duration::from_millis(5), gone).expect("it ends");
    assert!(at.exists(), "its unit's");
}

#[test]
fn shared_socket_is_stored_once_and_used_again_after_a_crash() {
    let dir = sharing();
    let at = dir.path().join("both.nbd");
    let first = start(dir.path(), [None, None], &[]);
    let told = first.told_until("READY=1").concat();
    // By the name of the disk that was there first.
    let has = |name: &str| told.contains(&format!("FDSTORE=1\nFDNAME=stored@{name}"));
    let (name, other) = if has("web1") { ("web1", "web2") } else { ("web2", "web1") };
    let stored_as = format!("stored@{name}");
    assert_eq!(told.matches("FDNAME=stored@web").count(), 1, "{told}");
    let stored = first.crash();
    let names: Vec<_> = stored.iter().map(|(text, _)| text.as_str()).collect();
    let named = ["mica.control", name].map(|name| format!("FDSTORE=1\nFDNAME=stored@{name}"));
    assert_eq!(names, named);
    let before = fs::metadata(&at).expect("there").ino();

    let waiting = {
        let at = at.clone();
        std::thread::spawn(move || length_of(&at, "web2"))
    };
    let mut stored = stored.into_iter().map(|(_, socket)| socket);
    let sockets = ["stored@mica.control", &stored_as].map(|name| Some((name, stored.next()?)));
    let second = start(dir.path(), sockets, &[]);
    second.told_until("READY=1");
    assert_eq!(waiting.join().expect("ended"), Some(2 << 20));
    assert_eq!(fs::metadata(&at).expect("there").ino(), before, "the same socket");
    // Whoever stored it may go; it is removed from the store with the last.
    ctl(dir.path(), &["drain", name]);
    assert!(length_of(&at, other).is_some());
    ctl(dir.path(), &["drain", other]);
    let told = second.told_until(&format!("FDSTOREREMOVE=1\nFDNAME={stored_as}"));
    assert!(!told.concat().contains(&format!("FDSTORE=1\nFDNAME=stored@{other}")), "{told:?}");
    assert!(!at.exists());
    second.stop();
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
    let names = ["mica.service", "mica@.socket"];
    for name in names {
        let unit = fs::read_to_string(docs.join(name)).expect("there");
        let unit = unit.replace("/usr/bin/mica", &mica).replace("User=mica\n", "User=root\n");
        fs::write(dir.path().join(name), unit).expect("written");
    }
    let units = names.map(|name| dir.path().join(name));
    // Pages of this very version are not installed here.
    let verify = ["verify", "--man=no"].map(PathBuf::from);
    let said = command::run("systemd-analyze", [&verify[..], &units[..]].concat());
    let complaints: Vec<_> = said.stderr.lines().filter(|line| line.contains("mica")).collect();
    assert!(complaints.is_empty(), "{complaints:#?}");
}

/// libnbd starts a server with a socket that has no name, as it starts qemu-nbd and nbdkit.
#[test]
fn socket_that_libnbd_passes_without_a_name_is_the_disk_s() {
    if !tools::present(&[tools::NBDINFO]) {
        return;
    }
    let mica = mica::binary().display().to_string();
    let said =
        command::run("nbdinfo", ["--size", "--", "[", &mica, "serve", "-f", "null", "1M", "]"]);
    assert_eq!(said.ok().trim(), (1 << 20).to_string());
}
