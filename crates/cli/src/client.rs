//! A client of a server's control socket: one request, one answer.

use crate::failure::Failure;
use crate::plain::plain;
use clap::Args;
use mica_rt::connect_unix;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The id of the option that names the socket of the server to talk to.
pub(crate) const CONTROL_ARG: &str = "control of a server";
/// The default control socket.
const CONTROL: &str = "/run/mica/control.sock";
/// Maximum size of an answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Time limit for an answer; a drain may flush gigabytes.
const ANSWER_WAIT: Duration = Duration::from_secs(600);

// Options of verbs that talk to a server. (A doc comment would become the help of the verb.)
#[derive(Args, Clone)]
pub(crate) struct ControlArgs {
    /// The control socket of the server.
    ///
    /// By default $MICA_CONTROL, or else /run/mica/control.sock.
    #[arg(id = CONTROL_ARG, long = "control", global = true, value_name = "SOCKET")]
    control: Option<PathBuf>,
}

impl ControlArgs {
    pub(crate) fn client(&self) -> Client {
        let named = self.control.clone();
        let socket = named.or_else(|| std::env::var_os("MICA_CONTROL").map(PathBuf::from));
        let socket = socket.unwrap_or_else(|| PathBuf::from(CONTROL));
        Client { socket, wait: ANSWER_WAIT }
    }
}

/// A client of one server.
#[derive(Clone)]
pub(crate) struct Client {
    socket: PathBuf,
    /// Time limit for a connection, and for an answer.
    wait: Duration,
}

impl Client {
    /// The same client, for questions that are answered at once.
    #[must_use]
    pub(crate) fn within(self, wait: Duration) -> Self {
        Self { wait, ..self }
    }

    /// The same client, for what takes up to `more` beside what every answer may take.
    #[must_use]
    pub(crate) fn waiting_for(self, more: Duration) -> Self {
        Self { wait: self.wait + more, ..self }
    }

    /// Gets what is at `path`.
    ///
    /// # Errors
    /// If no server answers, or the server reports an error.
    pub(crate) fn get(&self, path: &str) -> Result<Value, Failure> {
        self.request("GET", path, "")
    }

    /// Runs the command at `path`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn post(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.request("POST", path, &body.to_string())
    }

    /// Deletes what is at `path`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.request("DELETE", path, "")
    }

    /// The socket of the server.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Replaces what is at `path`.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub(crate) fn put(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.request("PUT", path, &body.to_string())
    }

    fn request(&self, method: &str, path: &str, body: &str) -> Result<Value, Failure> {
        let named = self.socket.display();
        let stream = connect_unix(&self.socket, self.wait, || false);
        let stream = stream.map_err(|error| match error.kind() {
            ErrorKind::NotFound | ErrorKind::ConnectionRefused => Failure::new(format!(
                "no server listens at {named}: start one with --control {named}, or name its \
                 socket with --control or MICA_CONTROL"
            )),
            _ => Failure::from(error).within(named.to_string()),
        })?;
        let failed = |error: std::io::Error| Failure::from(error).within(named.to_string());
        let answer = match exchange(stream, self.wait, method, path, body) {
            Ok(answer) if answer.is_empty() => {
                let what = "the server closed the connection without an answer: it may have \
                            ended, or still be at work (`mica ctl status` says which)";
                return Err(Failure::new(what).within(named));
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                let what = format!(
                    "no answer within {} seconds: the server may still be at work (see `mica ctl \
                     status`)",
                    self.wait.as_secs()
                );
                return Err(Failure::new(what).within(named));
            }
            answer => answer.map_err(failed)?,
        };
        let unexpected =
            || Failure::new(format!("{named}: the process listening there is not mica"));
        let (status, text) = parse(&answer).ok_or_else(unexpected)?;
        let value: Value = serde_json::from_slice(text).map_err(|_| unexpected())?;
        match status {
            200..300 => Ok(value),
            _ => {
                let error = value["error"].as_str().ok_or_else(unexpected)?;
                Err(Failure::new(plain(error)))
            }
        }
    }
}

fn exchange(
    mut stream: UnixStream,
    wait: Duration,
    method: &str,
    path: &str,
    body: &str,
) -> std::io::Result<Vec<u8>> {
    stream.set_read_timeout(Some(wait))?;
    stream.set_write_timeout(Some(wait))?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: mica\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    // A server that refuses need not read all of it.
    let written = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let taken = stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer);
    if answer.is_empty() {
        written?;
    }
    match taken {
        Err(error) if answer.is_empty() => Err(error),
        _ => Ok(answer),
    }
}

/// The status and body of a complete answer.
fn parse(answer: &[u8]) -> Option<(u16, &[u8])> {
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&answer[..end]).ok()?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok()?;
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        if is_length { value.trim().parse::<usize>().ok() } else { None }
    })?;
    answer[end + 4..].get(..length).map(|body| (status, body))
}

/// The path of a disk's command.
pub(crate) fn of_disk(disk: &str, verb: &str) -> String {
    disk_path(disk) + "/" + verb
}

/// The path of a disk.
pub(crate) fn disk_path(disk: &str) -> String {
    // Characters of valid names need no escaping; anything else is not a name, but must stay one
    // path segment.
    let mut path = "/v1/disks/".to_owned();
    for byte in disk.bytes() {
        match byte {
            b'-' | b'_' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => path.push(byte.into()),
            _ => path += &format!("%{byte:02X}"),
        }
    }
    path
}

/// An empty body.
pub(crate) fn nothing() -> Value {
    json!({})
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    /// The story: every verb that asks a server hung for ever at one that was stopped, once as many
    /// clients waited there as may.
    #[test]
    fn server_that_lets_nobody_in_is_given_up_like_one_that_does_not_answer() {
        let folder = tempfile::tempdir().expect("a folder");
        let socket = folder.path().join("control");
        let stopped = UnixListener::bind(&socket).expect("bound");
        rustix::net::listen(&stopped, 0).expect("listens");
        let client = Client { socket: socket.clone(), wait: Duration::from_millis(30) };
        let mut waiting = Vec::new();
        while let Some(stream) = mica_rt::connect_unix_at_once(&socket).expect("it listens") {
            waiting.push(stream);
        }
        let failure = client.get("/v1/status").expect_err("it is full");
        assert!(failure.message().contains("control: it takes no connection"), "{failure:?}");
    }

    #[test]
    fn answers_are_taken_when_they_are_whole() {
        let answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\nx: y\r\n\r\n{\"a\"";
        assert_eq!(parse(answer), Some((404, &b"{\"a\""[..])));
        assert_eq!(parse(&answer[..answer.len() - 1]), None, "truncated");
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\n\r\n"), None, "without a length");
        assert_eq!(parse(b"SSH-2.0-x\r\n\r\n"), None);
        assert_eq!(parse(b"HTTP/1.1 2\xc3\xa40 OK\r\ncontent-length: 0\r\n\r\n"), None);
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999\r\n\r\n"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn names_cannot_leave_their_place_in_a_path() {
        assert_eq!(of_disk("web1", "drain"), "/v1/disks/web1/drain");
        assert_eq!(of_disk("a/../b c", "drain"), "/v1/disks/a%2F..%2Fb%20c/drain");
        assert_eq!(of_disk("\r\n\u{e4}", "resize"), "/v1/disks/%0D%0A%C3%A4/resize");
    }
}
