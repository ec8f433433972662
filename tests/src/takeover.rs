//! Servers that take over from each other, and a test that plays one of the two.

use crate::{clock, command, mica, nbd};
use anyhow::{Context, Result, ensure};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// How long anything here may take.
pub const LIMIT: Duration = Duration::from_secs(60);
/// Bytes of a message.
const MESSAGE_BYTES_MAX: usize = 32 << 10;
/// Descriptors of a message.
const FDS_MAX: usize = 32;

/// A server with a control socket, and what it says.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts one in `dir` with `options`; its control socket is `control` there.
    ///
    /// # Panics
    /// If the system does not let it.
    #[track_caller]
    pub fn start(dir: &Path, name: &str, options: &[&str]) -> Self {
        Self::start_binary(mica::binary(), dir, name, options)
    }

    /// The same, of a `binary` of one's own.
    ///
    /// # Panics
    /// If the system does not let it.
    #[track_caller]
    pub fn start_binary(binary: &Path, dir: &Path, name: &str, options: &[&str]) -> Self {
        Self::start_command(Command::new(binary), dir, name, options)
    }

    /// The same, by a `command` that may have an environment of its own.
    ///
    /// # Panics
    /// If the system does not let it.
    #[track_caller]
    pub fn start_command(mut serve: Command, dir: &Path, name: &str, options: &[&str]) -> Self {
        let log = dir.join(format!("{name}.log"));
        let said = File::create(&log).expect("made");
        serve.args(["--log-level", "info", "serve", "--control", "control"]).args(options);
        serve.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(said);
        Self { child: serve.spawn().expect("started"), log }
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has said so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits until it serves NBD at `socket`.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn wait_for(&self, socket: &Path) {
        let connected = || nbd::Connection::open(socket, "", &nbd::Wish::default()).map(drop).ok();
        let served = clock::poll(LIMIT, Duration::from_millis(5), connected);
        assert!(served.is_some(), "not served: {}", self.log());
    }

    /// Waits until it has said something.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn wait_until_said(&self, what: &str) {
        let said = || self.log().contains(what).then_some(());
        let said = clock::poll(LIMIT, Duration::from_millis(5), said);
        assert!(said.is_some(), "{what}: {}", self.log());
    }

    /// Its exit code, when it has ended; `None` if a signal ended it.
    ///
    /// # Panics
    /// If it does not end.
    #[track_caller]
    pub fn ended(&mut self) -> Option<i32> {
        self.ended_within(LIMIT)
    }

    /// The same, with a limit.
    ///
    /// # Panics
    /// If it does not end within `limit`.
    #[track_caller]
    pub fn ended_within(&mut self, limit: Duration) -> Option<i32> {
        let status = command::wait(&mut self.child, limit);
        status.unwrap_or_else(|| panic!("no end after {limit:?}: {}", self.log())).code()
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// If it does not run.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("it runs");
    }

    /// Asks it to end, which it has to do well.
    ///
    /// # Panics
    /// If it does not.
    #[track_caller]
    pub fn stop(mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.ended(), Some(0), "{}", self.log());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The channel of a takeover, of which the test is one end.
#[derive(Debug)]
pub struct Channel(OwnedFd);

impl Channel {
    /// Takes over from the server behind the control socket in `dir`, up to its sockets.
    ///
    /// # Errors
    /// What it says if it refuses.
    pub fn take(dir: &Path) -> Result<(Self, Vec<OwnedFd>)> {
        let folder = dir.join(format!("mica-takeover-{}-test", std::process::id()));
        fs::create_dir(&folder)?;
        let path = folder.join("socket");
        let listener = seqpacket()?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(&path)?)?;
        rustix::net::listen(&listener, 1)?;
        let (status, body) =
            post(&dir.join("control"), "/v1/takeover", &json!({ "socket": path }).to_string())?;
        fs::remove_dir_all(&folder)?;
        ensure!(status == 200, "{status}: {body}");
        let channel = Self(rustix::net::accept_with(&listener, SocketFlags::CLOEXEC)?);
        let mut sockets = Vec::new();
        loop {
            let (said, fds) = channel.receive()?;
            sockets.extend(fds);
            if said["more"] != true {
                return Ok((channel, sockets));
            }
        }
    }

    /// Plays a server whose socket is `control` in `dir`: waits until one comes to take over, and
    /// goes to meet it.
    ///
    /// # Errors
    /// If none comes, or it does not ask.
    pub fn give(listener: &UnixListener) -> Result<Self> {
        let (mut http, _) = listener.accept()?;
        let mut asked = Vec::new();
        let body: Value = loop {
            let mut bytes = [0; 4096];
            let count = http.read(&mut bytes)?;
            ensure!(count > 0, "it asks nothing");
            asked.extend_from_slice(&bytes[..count]);
            let text = String::from_utf8_lossy(&asked);
            let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
            if let Ok(body) = serde_json::from_str(body) {
                break body;
            }
        };
        let socket = seqpacket()?;
        let path = body["socket"].as_str().context("no socket")?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self(socket))
    }

    /// Says something, with descriptors.
    ///
    /// # Errors
    /// If nobody is there to hear it.
    pub fn say(&self, message: &Value, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let text = message.to_string();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = fds.is_empty() || control.push(SendAncillaryMessage::ScmRights(fds));
        ensure!(fits, "too many descriptors");
        let bytes = [IoSlice::new(text.as_bytes())];
        rustix::net::sendmsg(&self.0, &bytes, &mut control, SendFlags::NOSIGNAL)?;
        Ok(())
    }

    /// What the other end says next: the word alone.
    ///
    /// # Errors
    /// If it is gone, or says nothing in time.
    pub fn hear(&self) -> Result<String> {
        let (said, _) = self.receive()?;
        Ok(said["say"].as_str().context("no word")?.to_owned())
    }

    fn receive(&self) -> Result<(Value, Vec<OwnedFd>)> {
        let timeout = rustix::net::sockopt::Timeout::Recv;
        rustix::net::sockopt::set_socket_timeout(&self.0, timeout, Some(LIMIT))?;
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.0, &mut into, &mut control, flags)?;
        ensure!(received.bytes > 0, "the other end is gone");
        let mut fds = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        Ok((serde_json::from_slice(&bytes[..received.bytes])?, fds))
    }
}

/// A word without anything else.
pub fn word(word: &str) -> Value {
    json!({ "say": word })
}

/// Asks the server behind the `control` socket for something; the status of its answer, and its
/// body.
///
/// # Errors
/// If it does not answer.
pub fn post(control: &Path, path: &str, body: &str) -> Result<(u16, String)> {
    let mut http = UnixStream::connect(control)?;
    http.set_read_timeout(Some(LIMIT))?;
    let length = body.len();
    write!(
        http,
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n\
         {body}"
    )?;
    let mut answer = String::new();
    http.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("a cut answer")?;
    let status = head.split(' ').nth(1).context("no status")?.parse()?;
    Ok((status, body.to_owned()))
}

fn seqpacket() -> Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}
