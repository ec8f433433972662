//! The guest agent of QEMU, which freezes the file systems of a guest: what is in them is whole
//! then, as after a clean unmount.
//!
//! Invariants
//! - I1 Whatever was told to freeze is told to thaw, whatever happens in between: also after an
//!   error, a signal, and an agent that has not answered in time.
//! - I2 No agent is waited for longer than the limit, for a connection and for each of its answers.

use crate::failure::Failure;
use mica_rt::connect_unix;
use serde_json::{Value, json};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Precedes the answer to a synchronization: it is in no text.
const DELIMITER: u8 = 0xff;
/// Longest answer of an agent, in bytes.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// One connection to an agent.
struct Agent<'a> {
    socket: &'a Path,
    stream: UnixStream,
    limit: Duration,
    /// What was read and is no whole answer yet.
    unread: Vec<u8>,
    /// Whether it was told to freeze, and how many file systems it froze.
    told: bool,
    frozen: u64,
}

/// Runs `act` while the guests whose agents listen at `sockets` have their file systems frozen.
/// Each answer of an agent is waited for up to `limit`.
pub(super) fn while_frozen<T>(
    sockets: &[PathBuf],
    limit: Duration,
    act: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    if sockets.is_empty() {
        return act();
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))
            .map_err(|error| Failure::from(error).within("hearing signals"))?;
    }
    // All of them answer before one is frozen.
    let agents = sockets.iter().map(|socket| Agent::connect(socket, limit, &stop));
    let mut agents = agents.collect::<Result<Vec<_>, _>>()?;
    let acted = agents.iter_mut().try_for_each(Agent::freeze).and_then(|()| {
        if stop.load(Ordering::Relaxed) {
            return Err(Failure::new("stopped by a signal before the snapshot was taken"));
        }
        act()
    });
    let told = agents.iter_mut().filter(|agent| agent.told);
    let thawed: Vec<Result<(), Failure>> = told.map(Agent::thaw).collect();
    match (acted, thawed.into_iter().find_map(Result::err)) {
        (acted, None) => acted,
        (Ok(_), Some(failure)) => Err(failure.within("the snapshot was taken, but")),
        (Err(error), Some(failure)) => {
            Err(Failure::new(format!("{}; {}", error.message(), failure.message())))
        }
    }
}

/// What thaws.
const THAW: &str = "guest-fsfreeze-thaw";

/// A request, as it is sent.
fn request(command: &str) -> Vec<u8> {
    format!("{}\n", json!({ "execute": command })).into_bytes()
}

/// The request for a synchronization.
fn synchronization() -> Vec<u8> {
    let id = std::process::id();
    let ask = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
    // The agent forgets half a request of somebody before us.
    [&[DELIMITER], ask.to_string().as_bytes(), b"\n"].concat()
}

/// A connection to `socket`. While it has a client already, this waits for up to `limit`, or until
/// a signal comes.
fn connected(socket: &Path, limit: Duration, stop: &AtomicBool) -> Result<UnixStream, Failure> {
    let connected = connect_unix(socket, limit, || stop.load(Ordering::Relaxed));
    connected.map_err(|error| match error.kind() {
        ErrorKind::Interrupted => Failure::new("stopped by a signal before anything was frozen"),
        _ => Failure::from(error),
    })
}

impl<'a> Agent<'a> {
    fn connect(socket: &'a Path, limit: Duration, stop: &AtomicBool) -> Result<Self, Failure> {
        let stream = connected(socket, limit, stop).map_err(|failure| {
            failure.within(format!("the guest agent at {}", socket.display()))
        })?;
        let (unread, told, frozen) = (Vec::new(), false, 0);
        let mut agent = Self { socket, stream, limit, unread, told, frozen };
        agent.synchronize()?;
        Ok(agent)
    }

    fn freeze(&mut self) -> Result<(), Failure> {
        self.told = true;
        self.frozen = self.count("guest-fsfreeze-freeze")?;
        Ok(())
    }

    fn thaw(&mut self) -> Result<(), Failure> {
        let thawed = self.told_to_thaw().map_err(|failure| {
            failure.within("the file systems of the guest may still be frozen")
        })?;
        if thawed == 0 && self.frozen > 0 {
            return Err(self.failed("the file systems had already been thawed by something else"));
        }
        Ok(())
    }

    /// What it thawed. It is told at once and not only when it has answered what it was asked
    /// before: it may still be freezing, and nobody else tells it (I1).
    fn told_to_thaw(&mut self) -> Result<u64, Failure> {
        self.send(&[synchronization(), request(THAW)].concat())?;
        self.synchronized()?;
        self.answer_to(THAW)
    }

    /// Has everything that was asked before answered or forgotten.
    fn synchronize(&mut self) -> Result<(), Failure> {
        self.send(&synchronization())?;
        self.synchronized()
    }

    /// Waits for the answer to a synchronization.
    fn synchronized(&mut self) -> Result<(), Failure> {
        let id = std::process::id();
        let deadline = self.deadline();
        loop {
            let line = self.line(deadline)?;
            let Some(at) = line.iter().rposition(|byte| *byte == DELIMITER) else { continue };
            let answer: Option<Value> = serde_json::from_slice(&line[at + 1..]).ok();
            if answer.is_some_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
    }

    /// The number that a command returns.
    fn count(&mut self, command: &str) -> Result<u64, Failure> {
        self.send(&request(command))?;
        self.answer_to(command)
    }

    fn answer_to(&mut self, command: &str) -> Result<u64, Failure> {
        let line = self.line(self.deadline())?;
        let answer: Value = serde_json::from_slice(&line)
            .map_err(|_| self.failed(&format!("{command}: the answer is not JSON")))?;
        match answer["return"].as_u64() {
            Some(count) => Ok(count),
            None => {
                let why = answer["error"]["desc"].as_str().unwrap_or("no number in the answer");
                Err(self.failed(&format!("{command}: {}", crate::plain::plain(why))))
            }
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let sent = self.stream.set_write_timeout(Some(self.limit));
        let sent = sent.and_then(|()| self.stream.write_all(bytes));
        sent.map_err(|error| self.failed(&error.to_string()))
    }

    /// The next line of its answers.
    #[expect(clippy::disallowed_methods, reason = "a thread that has no executor")]
    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, Failure> {
        loop {
            if let Some(at) = self.unread.iter().position(|byte| *byte == b'\n') {
                let rest = self.unread.split_off(at + 1);
                let mut line = std::mem::replace(&mut self.unread, rest);
                line.pop();
                return Ok(line);
            }
            if self.unread.len() > ANSWER_BYTES_MAX {
                return Err(self.failed("its answer is too long"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.failed(&self.too_late()));
            }
            let mut some = [0; 4096];
            let read = self.stream.set_read_timeout(Some(left));
            match read.and_then(|()| self.stream.read(&mut some)) {
                Ok(0) => return Err(self.failed("it closed the connection")),
                Ok(count) => self.unread.extend_from_slice(&some[..count]),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Err(self.failed(&self.too_late()));
                }
                Err(error) => return Err(self.failed(&error.to_string())),
            }
        }
    }

    fn too_late(&self) -> String {
        format!("no answer within {} seconds", self.limit.as_secs_f32())
    }

    fn failed(&self, what: &str) -> Failure {
        Failure::new(format!("the guest agent at {}: {what}", self.socket.display()))
    }
}

#[cfg(test)]
mod tests;
