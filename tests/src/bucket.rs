//! A server that speaks S3, for tests: moto, which is installed with `pip install 'moto[server]'`.

use crate::clock;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long it may take to answer: it is written in Python.
const START_LIMIT: Duration = Duration::from_secs(60);

/// The server. It ends with the test.
#[derive(Debug)]
pub struct BucketServer {
    child: Child,
    port: u16,
}

impl BucketServer {
    /// Starts one; `None`, with a message, if it is not installed.
    ///
    /// # Panics
    /// If it does not answer.
    pub fn start() -> Option<Self> {
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("bound").port();
        drop(free);
        let mut command = Command::new("moto_server");
        command.args(["-H", "127.0.0.1", "-p", &port.to_string()]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                eprintln!("SKIPPED: moto_server cannot be started: {error}");
                return None;
            }
        };
        let server = Self { child, port };
        let pause = Duration::from_millis(50);
        let started = clock::poll(START_LIMIT, pause, || server.connect().ok());
        assert!(started.is_some(), "moto_server does not answer");
        Some(server)
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
            ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{}", self.port)),
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
