//! TLS where several disks share an address, and certificates that are renewed while they are
//! served.

use crate::tls::certify;
use mica_tests::command::{self, Finished};
use mica_tests::takeover::{LIMIT, Process};
use mica_tests::{clock, mica, qemu, tools};
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use tempfile::TempDir;

const STEP: Duration = Duration::from_millis(10);
const TOOLS: [tools::Tool; 4] = [tools::NBDINFO, tools::QEMU_IMG, tools::QEMU_IO, tools::OPENSSL];

/// Disks "a" and "b" of 1 and 2 MiB at one TCP port with TLS and one unix socket, in a sandbox.
struct World {
    dir: TempDir,
    port: u16,
}

impl World {
    fn new() -> Option<Self> {
        if !tools::present(&TOOLS) {
            return None;
        }
        let dir = tempfile::tempdir().expect("a folder");
        certify(dir.path());
        let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr());
        let world = Self { dir, port: free.expect("a port").port() };
        let mut config = "control = \"control\"\n".to_owned();
        for (name, size) in [("a", "1M"), ("b", "2M")] {
            config += &format!(
                "[[disk]]\nname = \"{name}\"\nimage = \"{size}\"\nformat = \"null\"\n\
                 nbd = [\"tcp:127.0.0.1:{}\", \"s\"]\ntls-certificates = \"server\"\n",
                world.port
            );
        }
        fs::write(world.at("mica.toml"), config).expect("written");
        Some(world)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn serve(&self, log: &str, options: &[&str]) -> Process {
        let config = self.at("mica.toml").display().to_string();
        let options = [&["--config", &config], options].concat();
        let process = Process::start(self.dir.path(), log, &options);
        let answers = || (self.ctl(&["status"]).code() == Some(0)).then_some(());
        assert!(clock::poll(LIMIT, STEP, answers).is_some(), "not served: {}", process.log());
        process
    }

    fn ctl(&self, verb: &[&str]) -> Finished {
        let control = self.at("control").display().to_string();
        mica::run(["ctl"].iter().chain(verb).copied().chain(["--control", &control]))
    }

    /// As libnbd's programs take it, with the certificates in folder `client`.
    fn uri(&self, export: &str, client: &str) -> String {
        let folder = self.at(client);
        format!("nbds://127.0.0.1:{}/{export}?tls-certificates={}", self.port, folder.display())
    }

    /// Puts another server's certificate where the old one is, signed by another CA, as a program
    /// that renews certificates does: files of the same names take the place of the old ones.
    fn renew(&self) {
        let new = self.at("new");
        fs::create_dir(&new).expect("a folder");
        certify(&new);
        for name in ["server-cert.pem", "server-key.pem", "ca-cert.pem"] {
            fs::rename(new.join("server").join(name), self.at("server").join(name)).expect("moved");
        }
    }

    fn admits(&self, export: &str, client: &str) -> bool {
        is_admitted(&self.uri(export, client))
    }
}

fn is_admitted(uri: &str) -> bool {
    command::run("nbdinfo", ["--size", uri]).code() == Some(0)
}

/// qemu-io with a disk that stays open.
struct Session {
    child: Child,
    input: ChildStdin,
    output: BufReader<std::process::ChildStdout>,
}

impl Session {
    fn open(world: &World, export: &str) -> Self {
        let client = world.at("client");
        let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", client.display());
        let options = format!(
            "driver=nbd,server.type=inet,server.host=127.0.0.1,server.port={},tls-creds=tls0,\
             export={export}",
            world.port
        );
        let mut command = Command::new("qemu-io");
        command.args(["--object", &object, "--image-opts", &options]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("started");
        let input = child.stdin.take().expect("piped");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut session = Self { child, input, output };
        session.reads();
        session
    }

    /// A read on its connection succeeds.
    #[track_caller]
    fn reads(&mut self) {
        writeln!(self.input, "read 0 4k").expect("it runs");
        let mut line = String::new();
        while !line.contains("read 4096/4096 bytes") {
            line.clear();
            assert!(self.output.read_line(&mut line).expect("readable") > 0, "it has ended");
            assert!(!line.contains("failed"), "{line}");
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn listed(uri: &str) -> Vec<(String, Value)> {
    let list = command::run("nbdinfo", ["--list", "--json", uri]).json();
    let export = |export: &Value| {
        (export["export-name"].as_str().expect("a name").to_owned(), export["TLS"].clone())
    };
    let mut all: Vec<_> = list["exports"].as_array().expect("exports").iter().map(export).collect();
    all.iter_mut().for_each(|(_, tls)| *tls = list["TLS"].clone());
    all
}

#[test]
fn all_disks_at_an_address_are_reached_over_tls_and_none_without() {
    let Some(world) = World::new() else { return };
    let process = world.serve("log", &["--disks-in", &world.at("").display().to_string()]);
    let names = |names: &[&str], tls: bool| {
        names.iter().map(|name| ((*name).to_owned(), Value::Bool(tls))).collect::<Vec<_>>()
    };
    assert_eq!(listed(&world.uri("", "client")), names(&["a", "b"], true));
    let unix = format!("nbd+unix:///?socket={}", world.at("s").display());
    assert_eq!(listed(&unix), names(&["a", "b"], false), "no TLS is needed there");
    let plain = format!("nbd://127.0.0.1:{}/a", world.port);
    assert_ne!(command::run("nbdinfo", ["--size", &plain]).code(), Some(0));
    for (name, size) in [("a", 1 << 20), ("b", 2 << 20)] {
        let said = command::run("nbdinfo", ["--size", &world.uri(name, "client")]).ok();
        assert_eq!(said.trim(), size.to_string());
    }
    let mut session = Session::open(&world, "a");
    world.ctl(&["drain", "b"]).ok();
    assert!(!world.admits("b", "client"));
    session.reads();
    let certificates = world.at("server").display().to_string();
    let at = format!("tcp:127.0.0.1:{}", world.port);
    let add = ["add", "4M", "--format", "null", "--name", "c", "--nbd", &at];
    let said = world.ctl(&add).refusal();
    assert!(said.contains("settings of TLS"), "{said}");
    world.ctl(&[&add[..], &["--tls-certificates", &certificates]].concat()).ok();
    assert_eq!(listed(&world.uri("", "client")), names(&["a", "c"], true));
    session.reads();
    process.stop();
}

#[test]
fn renewed_certificates_are_for_new_clients_and_connections_go_on() {
    let Some(world) = World::new() else { return };
    let process = world.serve("log", &[]);
    let mut session = Session::open(&world, "b");
    world.renew();
    assert!(world.admits("a", "client"), "nobody has said that they are new");
    let said = world.ctl(&["reload"]).ok();
    let folder = world.at("server").display().to_string();
    let (unix, tcp) =
        (world.at("s").display().to_string(), format!("tcp:127.0.0.1:{}", world.port));
    let renewed =
        |at: &str| format!("certificates in {folder}: read again, for {at}\n2 unchanged\n");
    let orders = [format!("{unix}, {tcp}"), format!("{tcp}, {unix}")];
    assert!(orders.iter().any(|at| said == renewed(at)), "{said}");
    process.wait_until_said(&format!("read the certificates in {folder} again, for "));
    process.wait_until_said("no disk was added or removed; 2 are left as they were");
    for export in ["a", "b"] {
        assert!(world.admits(export, "new/client"));
        assert!(!world.admits(export, "client"), "its CA is no longer known");
    }
    session.reads();
    // A disk that comes back has them, too.
    world.ctl(&["drain", "a"]).ok();
    world.ctl(&["undrain", "a"]).ok();
    assert!(world.admits("a", "new/client"));
    session.reads();
    process.stop();
}

/// The story: clients of a backup that was under way got the old certificates, and those that the
/// new CA does not know were let in.
#[test]
fn clients_of_a_backup_get_renewed_certificates_too() {
    let Some(world) = World::new() else { return };
    qemu::create(world.dir.path(), "c.qcow2", &[], "4M");
    // A sandbox has only the ports from the start.
    let mut process = world.serve("log", &["--sandbox", "off"]);
    let (image, certificates) = (world.at("c.qcow2"), world.at("server"));
    let (image, certificates) = (image.display().to_string(), certificates.display().to_string());
    let at = world.at("c.sock").display().to_string();
    let settings = ["--nbd", &at, "--tls-certificates", &certificates];
    world.ctl(&[&["add", &image][..], &settings].concat()).ok();
    let begin = ["backup", "begin", "c", "--as", "mon", "--nbd", "tcp:127.0.0.1:0"];
    let begun = world.ctl(&[&begin[..], &["--output", "json"]].concat()).json();
    let place = begun["nbd"].as_str().expect("a place").strip_prefix("tcp:").expect("TCP");
    let uri = |client: &str| {
        let folder = world.at(client);
        format!("nbds://{place}/c?tls-certificates={}", folder.display())
    };
    assert!(is_admitted(&uri("client")), "{}", process.log());
    world.renew();
    world.ctl(&["reload"]).ok();
    assert!(is_admitted(&uri("new/client")) && !is_admitted(&uri("client")));
    process.signal(Signal::TERM);
    assert_eq!(process.ended_within(LIMIT), Some(0), "{}", process.log());
}

#[test]
fn certificates_that_cannot_be_used_change_nothing_and_are_named() {
    let Some(world) = World::new() else { return };
    let process = world.serve("log", &[]);
    let key = world.at("server/server-key.pem");
    let before = fs::read(&key).expect("there");
    fs::copy(world.at("client/client-key.pem"), &key).expect("copied");
    let refused = world.ctl(&["reload"]);
    assert_eq!(refused.code(), Some(1), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("does not belong to the certificate"), "{said}");
    assert!(world.admits("a", "client"));
    fs::remove_file(&key).expect("there");
    let said = world.ctl(&["reload"]).to_string();
    assert!(said.contains("server-key.pem"), "{said}");
    assert!(world.admits("a", "client"));
    fs::write(&key, before).expect("written");
    world.ctl(&["reload"]).ok();
    assert!(world.admits("b", "client"));
    process.stop();
}

#[test]
fn server_without_a_configuration_reads_certificates_again_on_sighup() {
    let Some(world) = World::new() else { return };
    let (at, certificates) = (format!("tcp:127.0.0.1:{}", world.port), world.at("server"));
    let options = ["1M", "--format", "null", "--nbd", &at];
    let folder = certificates.display().to_string();
    let options = [&options[..], &["--tls-certificates", &folder]].concat();
    let mut process = Process::start(world.dir.path(), "log", &options);
    let served = || world.admits("", "client").then_some(());
    assert!(clock::poll(LIMIT, STEP, served).is_some(), "{}", process.log());
    world.renew();
    process.signal(Signal::HUP);
    process.wait_until_said("read the certificates in");
    assert!(world.admits("", "new/client") && !world.admits("", "client"));
    process.signal(Signal::TERM);
    assert_eq!(process.ended_within(LIMIT), Some(0), "{}", process.log());
}
