//! A cluster of Ceph that ends with the test: one monitor, and storage daemons with a file each.

use mica_block::ObjectName;
use mica_rados::{Pool, PoolOptions};
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

/// A cluster.
pub(crate) struct Ceph {
    monitor: Child,
    daemons: Vec<Child>,
    folder: TempDir,
}

const COMPLAINTS: &str = "complaints";

/// How long a request of the tests may take, unless they say otherwise.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

impl Ceph {
    /// Starts a monitor.
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let at = folder.path();
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let id = uuid();
        let address = format!("[v2:127.0.0.1:{port}]");
        std::fs::write(at.join("ceph.conf"), configuration(at, &id, &address)).expect("written");
        for (entity, capabilities) in
            [("mon.", &["mon"][..]), ("client.admin", &["mon", "osd"]), ("client.reader", &["mon"])]
        {
            let mut command = tool(at, "ceph-authtool");
            command.arg(at.join("keyring")).args(["--gen-key", "--name", entity]);
            if entity == "mon." {
                command.arg("--create-keyring");
            }
            for of in capabilities {
                let allowed = if entity == "client.reader" { "allow r" } else { "allow *" };
                command.args(["--cap", of, allowed]);
            }
            run(&mut command);
        }
        let map = at.join("monmap");
        let mut command = Command::new("monmaptool");
        command.args(["--create", "--addv", "a", &address, "--fsid", &id]).arg(&map);
        run(&mut command);
        let mut command = tool(at, "ceph-mon");
        command.args(["--mkfs", "--id", "a", "--monmap"]).arg(&map);
        run(command.arg("--keyring").arg(at.join("keyring")));
        let monitor = begin(at, tool(at, "ceph-mon").args(["-f", "--id", "a"]));
        Self { monitor, daemons: Vec::new(), folder }
    }

    /// Starts one more storage daemon for each of `count`, and waits until they serve.
    pub(crate) fn add_daemons(&mut self, count: usize) {
        let at = self.folder.path();
        let first = self.daemons.len();
        let mut makers = Vec::new();
        for number in first..first + count {
            let own = at.join(format!("osd{number}"));
            std::fs::create_dir(&own).expect("made");
            let key = output(tool(at, "ceph-authtool").arg("--gen-print-key"));
            let (id, key) = (uuid(), key.trim());
            let keyring = format!("[osd.{number}]\n\tkey = {key}\n");
            std::fs::write(own.join("keyring"), keyring).expect("written");
            let secret = own.join("secret");
            std::fs::write(&secret, format!("{{\"cephx_secret\": \"{key}\"}}")).expect("written");
            let given = self.ceph(&["osd", "new", &id, "-i", &secret.display().to_string()]);
            assert_eq!(given.trim(), number.to_string());
            let mut command = tool(at, "ceph-osd");
            command.args(["--mkfs", "--id", &number.to_string(), "--osd-uuid", &id]);
            makers.push(begin(at, &mut command));
        }
        for (mut maker, number) in makers.into_iter().zip(first..) {
            assert!(maker.wait().expect("it ends").success(), "{}", said(at));
            let mut command = tool(at, "ceph-osd");
            self.daemons.push(begin(at, command.args(["-f", "--id", &number.to_string()])));
        }
        let all = format!("{} up", self.daemons.len());
        const CHECKS_MAX: usize = 200;
        let are_up = (0..CHECKS_MAX).any(|_| self.ceph(&["osd", "stat"]).contains(&all));
        assert!(are_up, "the storage daemons do not start: {}", said(at));
    }

    pub(crate) fn make_pool(&self, name: &str) {
        self.ceph(&["osd", "pool", "create", name, "8", "8"]);
    }

    /// What `ceph` says.
    pub(crate) fn ceph(&self, arguments: &[&str]) -> String {
        let at = self.folder.path();
        let mut command = tool(at, "ceph");
        let answer = command.args(["--connect-timeout", "60"]).args(arguments).output();
        let answer = answer.expect("started");
        let complaint = String::from_utf8_lossy(&answer.stderr);
        // Without the daemons' own words, all that is known is that nobody answered.
        assert!(answer.status.success(), "{command:?}: {complaint}\n{}", said(at));
        String::from_utf8_lossy(&answer.stdout).into_owned()
    }

    /// What `rados` says, of a namespace of a pool.
    pub(crate) fn rados(&self, pool: &str, namespace: &str, arguments: &[&str]) -> String {
        let mut command = tool(self.folder.path(), "rados");
        command.args(["--pool", pool, "--namespace", namespace]);
        output(command.args(arguments))
    }

    /// The path of a new file with these bytes.
    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).expect("written");
        path.display().to_string()
    }

    /// Ends a storage daemon as a power cut would.
    pub(crate) fn kill_daemon(&mut self, number: usize) {
        self.daemons[number].kill().expect("it runs");
        self.daemons[number].wait().expect("it ended");
    }

    /// Stops a storage daemon, which then neither answers nor refuses, or lets it go on.
    pub(crate) fn signal_daemon(&self, number: usize, signal: &str) {
        let id = self.daemons[number].id().to_string();
        run(Command::new("kill").args(["-s", signal, &id]));
        if signal == "STOP" {
            wait_until_stopped(&id);
        }
    }

    pub(crate) fn configuration(&self) -> PathBuf {
        self.folder.path().join("ceph.conf")
    }

    pub(crate) fn options(&self, pool: &str, namespace: Option<&str>) -> PoolOptions {
        PoolOptions {
            namespace: namespace.map(|namespace| ObjectName::new(namespace).expect("a name")),
            config: Some(self.configuration()),
            timeout: TIMEOUT,
            ..PoolOptions::new(pool)
        }
    }

    pub(crate) fn open(&self, pool: &str, namespace: Option<&str>) -> Pool {
        Pool::open(self.options(pool, namespace)).expect("opened")
    }
}

impl Drop for Ceph {
    fn drop(&mut self) {
        for child in self.daemons.iter_mut().chain([&mut self.monitor]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Daemons that notice soon what became of others, use little memory, and start on a disk that is
/// almost full (a monitor ends where less than 2 % are free, unless told otherwise).
fn configuration(at: &Path, id: &str, address: &str) -> String {
    let at = at.display();
    format!(
        "[global]
fsid = {id}
mon host = {address}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
keyring = {at}/keyring
admin socket =
run dir = {at}
log file =
log to file = false
mon cluster log to file = false
err to stderr = true
osd pool default size = 2
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon data avail crit = -1
mon allow pool delete = true
osd memory target = 939524096
osd op num shards = 2
bluestore block size = 4294967296
osd objectstore = bluestore
mon osd min down reporters = 1
mon osd reporter subtree level = osd
osd heartbeat grace = 6
osd heartbeat interval = 1
osd mon report interval = 1
mon tick interval = 1
[mon.a]
mon data = {at}/mon
[osd]
osd data = {at}/osd$id
keyring = {at}/osd$id/keyring
"
    )
}

/// A program of Ceph, with the configuration in `at`.
fn tool(at: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    command.arg("--conf").arg(at.join("ceph.conf"));
    if program == "ceph-authtool" {
        // It takes no configuration.
        command = Command::new(program);
    }
    command
}

fn uuid() -> String {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").expect("Linux has it");
    uuid.trim().to_owned()
}

/// Starts a daemon, whose complaints all go to one file of the cluster in `at`.
fn begin(at: &Path, command: &mut Command) -> Child {
    let complaints = File::options().append(true).create(true).open(at.join(COMPLAINTS));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints.expect("opened"));
    command.spawn().expect("started")
}

/// What the daemons complained of.
fn said(at: &Path) -> String {
    std::fs::read_to_string(at.join(COMPLAINTS)).unwrap_or_default()
}

fn run(command: &mut Command) {
    output(command);
}

fn output(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().expect("started");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Waits until every thread of a process stands still. One thread takes the signal and then stops
/// the others: on a busy machine those answer requests for some time after `kill` has returned.
fn wait_until_stopped(id: &str) {
    let is_stopped = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        // The state stands behind the name, which may hold anything.
        stat.rsplit_once(')').is_none_or(|(_, rest)| rest.trim_start().starts_with('T'))
    };
    let deadline = mica_rt::now().after(TIMEOUT);
    while mica_rt::now() < deadline {
        let threads = std::fs::read_dir(format!("/proc/{id}/task")).expect("the daemon lives");
        if threads.flatten().all(is_stopped) {
            return;
        }
        std::thread::yield_now();
    }
    panic!("process {id} does not stop");
}
