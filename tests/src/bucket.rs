//! A server that speaks S3, for tests: moto, of PyPI, which `cargo xtask setup` installs into a
//! folder of ours.

use crate::clock;
use crate::net_room;
use crate::shell;
use crate::tools::{Tool, none_missing};
use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// What pip installs.
const PACKAGE: &str = "moto[server]==5.2.5";
/// Its program. No package of Debian has one that is new enough.
const PROGRAM: Tool = Tool { program: "moto_server", packages: &[] };
/// How long it may take to answer: it is written in Python.
const START_LIMIT: Duration = Duration::from_secs(60);

/// Runs it. Of two puts of one name that it does at the same time, both may be the first: so it
/// does one request at a time, as services that keep their promises seem to.
const ONE_AT_A_TIME: &str = "
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
moto, one = DomainDispatcherApplication(create_backend_app), threading.Lock()
def app(environ, start_response):
    with one:
        return list(moto(environ, start_response))
run_simple(sys.argv[2], int(sys.argv[1]), app, threaded=True)
";

/// Sends a request from standard input to an address, and prints the answer.
const ASK: &str = "
import sys, socket
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
s.sendall(sys.stdin.buffer.read())
while part := s.recv(65536):
    sys.stdout.buffer.write(part)
";

/// Where it is installed: an environment of Python.
fn folder() -> PathBuf {
    shell::root().join("target/moto")
}

fn program() -> Option<PathBuf> {
    let own = folder().join("bin").join(PROGRAM.program);
    PROGRAM.find().or_else(|| own.is_file().then_some(own))
}

/// Whether it is installed.
pub fn is_there() -> bool {
    program().is_some()
}

/// Installs it. Python has to be able to make environments.
///
/// # Errors
/// If Python cannot, or PyPI does not have it.
pub fn install() -> Result<()> {
    shell::run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder()))?;
    shell::run(Command::new(folder().join("bin/pip")).args(["install", "--quiet", PACKAGE]))
}

/// The server. It ends with the test.
#[derive(Debug)]
pub struct BucketServer {
    child: Child,
    program: PathBuf,
    port: u16,
    /// Its address, and the network namespace that this is in, if it is not everybody's.
    address: String,
    network: Option<String>,
}

impl BucketServer {
    /// Starts one; `None` if it is not installed: then the test says so and ends.
    ///
    /// # Panics
    /// If it does not answer. Under CI, if it is not installed.
    pub fn start() -> Option<Self> {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        Self::start_at("127.0.0.1", port, None)
    }

    /// The same in a network namespace of the test, at one of its addresses.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_in(network: &str, address: &str) -> Option<Self> {
        Self::start_at(address, 9000, Some(network.to_owned()))
    }

    fn start_at(address: &str, port: u16, network: Option<String>) -> Option<Self> {
        let missing = [format!("{} (PyPI: {PACKAGE})", PROGRAM.program)];
        let Some(program) = program() else {
            assert!(!none_missing(&missing), "it is missing");
            return None;
        };
        let program = program.with_file_name("python3");
        let mut command = within(network.as_deref(), &program);
        command.args(["-c", ONE_AT_A_TIME, &port.to_string(), address]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("started");
        let address = address.to_owned();
        let server = Self { child, program, port, address, network };
        let pause = Duration::from_millis(50);
        let ready = "GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n";
        let started = clock::poll(START_LIMIT, pause, || server.ask(ready));
        assert!(started.is_some(), "moto_server does not answer");
        Some(server)
    }

    /// Where clients find it.
    pub fn endpoint(&self) -> String {
        format!("http://{}:{}", self.address, self.port)
    }

    /// Answers nothing until [`Self::go_on`]: connections are made, and nobody hears of them again.
    ///
    /// # Panics
    /// If the system does not let it.
    pub fn pause(&self) {
        self.signal(Signal::STOP);
    }

    /// Answers again.
    ///
    /// # Panics
    /// As [`Self::pause`].
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process"), signal).expect("signalled");
    }

    /// Its answer to a request; `None` if there is none.
    fn ask(&self, request: &str) -> Option<String> {
        if self.network.is_none() {
            let mut stream = TcpStream::connect((&*self.address, self.port)).ok()?;
            stream.write_all(request.as_bytes()).ok()?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).ok()?;
            return Some(answer);
        }
        let mut python = within(self.network.as_deref(), &self.program);
        python.args(["-c", ASK, &self.address, &self.port.to_string()]);
        python.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = python.spawn().ok()?;
        child.stdin.take()?.write_all(request.as_bytes()).ok()?;
        let output = child.wait_with_output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Makes a bucket, by hand: there may be no client.
    ///
    /// # Panics
    /// If it is not made.
    pub fn make_bucket(&self, name: &str) {
        let request = format!(
            "PUT /{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request\r\n\
             Connection: close\r\n\r\n"
        );
        let answer = self.ask(&request).expect("answered");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    /// What a client has in its environment.
    pub fn environment(&self) -> [(&'static str, String); 4] {
        [
            ("AWS_ENDPOINT_URL", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "any".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "any".to_owned()),
        ]
    }
}

/// A program in a network namespace.
fn within(network: Option<&str>, program: &Path) -> Command {
    let Some(network) = network else { return Command::new(program) };
    let mut command = net_room::within(network);
    command.arg(program);
    command
}

impl Drop for BucketServer {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
