//! A server that speaks S3, for tests: moto, of PyPI, which `cargo xtask setup` installs into a
//! folder of ours.

use crate::clock;
use crate::shell;
use crate::tools::{Tool, none_missing};
use anyhow::Result;
use rustix::process::{Pid, Signal, kill_process};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
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
run_simple('127.0.0.1', int(sys.argv[1]), app, threaded=True)
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
    port: u16,
}

impl BucketServer {
    /// Starts one; `None` if it is not installed: then the test says so and ends.
    ///
    /// # Panics
    /// If it does not answer. Under CI, if it is not installed.
    pub fn start() -> Option<Self> {
        let missing = [format!("{} (PyPI: {PACKAGE})", PROGRAM.program)];
        let Some(program) = program() else {
            assert!(!none_missing(&missing), "it is missing");
            return None;
        };
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let mut command = Command::new(program.with_file_name("python3"));
        command.args(["-c", ONE_AT_A_TIME, &port.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().expect("started");
        let server = Self { child, port };
        let pause = Duration::from_millis(50);
        let started = clock::poll(START_LIMIT, pause, || server.connect().ok());
        assert!(started.is_some(), "moto_server does not answer");
        Some(server)
    }

    /// Where clients find it.
    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
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

    fn connect(&self) -> std::io::Result<TcpStream> {
        TcpStream::connect(("127.0.0.1", self.port))
    }

    /// Makes a bucket, by hand: there may be no client.
    ///
    /// # Panics
    /// If it is not made.
    pub fn make_bucket(&self, name: &str) {
        let mut stream = self.connect().expect("connected");
        let request = format!(
            "PUT /{name} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\
             Authorization: AWS4-HMAC-SHA256 Credential=any/20260101/us-east-1/s3/aws4_request\r\n\
             Connection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
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

impl Drop for BucketServer {
    fn drop(&mut self) {
        // Errors mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
