//! The socket at which the two processes of a takeover connect: the new one creates it and asks the
//! old one to connect to it.

use super::ANSWER_LIMIT;
use super::channel::Channel;
use crate::messages;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::connect_unix;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};
use rustix::process::{Pid, geteuid, test_kill_process};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Prefix of the folder's name, followed by the process id.
pub(crate) const FOLDER: &str = "mica-takeover-";
/// The name of the socket in the folder.
pub(crate) const SOCKET: &str = "socket";
/// Maximum size of an HTTP answer, in bytes.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// A listening socket in a folder that other users cannot enter.
pub(super) struct Rendezvous {
    folder: PathBuf,
    socket: OwnedFd,
}

impl Rendezvous {
    /// Creates it beside the `control` socket, which both processes see whatever their temporary
    /// directories are.
    pub(super) fn create(control: &Path) -> Result<Self> {
        /// How many names to try.
        const ATTEMPTS: u32 = 64;
        let failed = |error| Error::from_io("creating a socket for the takeover", error);
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o700);
        remove_leftovers(control.parent().filter(|folder| *folder != Path::new("")));
        let mut attempt = 0;
        let folder = loop {
            let name = format!("{FOLDER}{}-{attempt}", std::process::id());
            let folder = control.parent().unwrap_or(Path::new("")).join(name);
            let folder = std::path::absolute(folder).map_err(failed)?;
            // Paths of unix sockets are short.
            let is_short = SocketAddrUnix::new(folder.join(SOCKET)).is_ok();
            let folder = match folder.file_name() {
                Some(name) if !is_short => std::env::temp_dir().join(name),
                _ => folder,
            };
            match builder.create(&folder) {
                Ok(()) => break folder,
                Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                    return Err(failed(error));
                }
                Err(error) if attempt == ATTEMPTS => return Err(failed(error)),
                Err(_) => attempt += 1,
            }
        };
        let socket = messages::socket().map_err(|error| failed(error.into()))?;
        let rendezvous = Self { folder, socket };
        let bound = || -> std::io::Result<()> {
            rustix::net::bind(&rendezvous.socket, &SocketAddrUnix::new(rendezvous.path())?)?;
            std::fs::set_permissions(rendezvous.path(), std::fs::Permissions::from_mode(0o600))?;
            Ok(rustix::net::listen(&rendezvous.socket, 1)?)
        };
        bound().map_err(failed)?;
        Ok(rendezvous)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    /// Asks the process behind the `control` socket to connect, and waits for it.
    ///
    /// # Errors
    /// If there is none, or it refuses.
    pub(super) fn invite(&self, control: &Path) -> Result<Channel> {
        self.wait(ask(control, &self.path())?)
    }

    /// Waits for the old process to connect, or to refuse over `http`.
    fn wait(&self, mut http: UnixStream) -> Result<Channel> {
        let failed = |error| Error::from_io("waiting for the process to take over", error);
        let limit = Timespec::try_from(ANSWER_LIMIT).ok();
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&http, PollFlags::IN)];
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) => {
                let what = "the process to take over does not answer";
                return Err(Error::new(ErrorKind::Io, what));
            }
            Ok(_) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let has_connected = !fds[0].revents().is_empty();
        if !has_connected {
            // A process that agrees connects before it answers.
            check_answer(&mut http)?;
        }
        let accepted = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC);
        Channel::new(accepted.map_err(|error| failed(error.into()))?)
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // At worst an empty folder of ours stays behind.
        let _ = std::fs::remove_file(self.path());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Removes from `parent` what processes left behind that were killed while they waited. After an
/// error the next takeover tries again.
fn remove_leftovers(parent: Option<&Path>) {
    let Ok(found) = std::fs::read_dir(parent.unwrap_or(Path::new("."))) else { return };
    for entry in found.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split('-').next());
        let process = process.and_then(|process| process.parse().ok()).and_then(Pid::from_raw);
        let is_gone = |process| test_kill_process(process) == Err(Errno::SRCH);
        // In a folder that others may write, one of this name may be theirs, or lead elsewhere.
        let is_ours = || {
            let found = entry.path().symlink_metadata();
            found.is_ok_and(|found| found.is_dir() && found.uid() == geteuid().as_raw())
        };
        if process.is_some_and(is_gone) && is_ours() {
            let _ = std::fs::remove_file(entry.path().join(SOCKET));
            // This removes empty folders only.
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

fn ask(control: &Path, connect_to: &Path) -> Result<UnixStream> {
    let context = || format!("--takeover: the server at {}", control.display());
    let mut http = connect_unix(control, ANSWER_LIMIT, || false).map_err(|error| {
        let what = format!("{} (if no server is running, leave --takeover out)", context());
        Error::from_io(what, error)
    })?;
    let body = json!({ "socket": connect_to.display().to_string() }).to_string();
    let request = format!(
        "POST /v1/takeover HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    let sent = http.set_read_timeout(Some(ANSWER_LIMIT));
    let sent = sent.and_then(|()| http.write_all(request.as_bytes()));
    sent.map_err(|error| Error::from_io(context(), error))?;
    Ok(http)
}

/// Reads the answer of the old process, which is an error unless it is about to connect.
fn check_answer(http: &mut UnixStream) -> Result<()> {
    let mut answer = Vec::new();
    http.take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .map_err(|error| Error::from_io("--takeover: reading the answer", error))?;
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if status.starts_with('2') {
        return Ok(());
    }
    let Some((_, body)) = answer.split_once("\r\n\r\n") else {
        let context = "--takeover: the server closed the connection without an answer: it may have \
                       ended; start this one again, without --takeover if no server is running";
        return Err(Error::new(ErrorKind::Io, context));
    };
    let answer = serde_json::from_str::<Value>(body).ok();
    let reason = answer.as_ref().and_then(|answer| answer["error"].as_str()).unwrap_or(body);
    let context = format!("--takeover: the server refused ({status}): {}", reason.trim());
    Err(Error::new(ErrorKind::Denied, context))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// The number of a process that has ended.
    fn gone() -> u32 {
        let mut process = std::process::Command::new("true").spawn().expect("started");
        process.wait().expect("a child");
        process.id()
    }

    #[test]
    fn server_that_ends_before_it_answers_has_refused_nothing() {
        for part in ["", "HTTP/1.1 409 Conf"] {
            let (mut ours, mut theirs) = UnixStream::pair().expect("a pair");
            theirs.write_all(part.as_bytes()).expect("there is room");
            drop(theirs);
            let error = check_answer(&mut ours).expect_err("there is no answer").to_string();
            assert!(error.contains("without an answer") && !error.contains("refused"), "{error}");
        }
    }

    #[test]
    fn leftovers_of_processes_that_are_gone_are_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let left = folder.path().join(format!("{FOLDER}{}-0", gone()));
        let used = folder.path().join(format!("{FOLDER}{}-0", std::process::id()));
        for place in [&left, &used] {
            fs::create_dir(place).expect("a folder");
            fs::write(place.join(SOCKET), "").expect("written");
        }
        remove_leftovers(Some(folder.path()));
        assert!(!left.exists() && used.join(SOCKET).exists());
    }

    #[test]
    fn symbolic_link_of_such_a_name_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        let elsewhere = tempfile::tempdir().expect("a folder");
        let precious = elsewhere.path().join(SOCKET);
        fs::write(&precious, "").expect("written");
        let planted = folder.path().join(format!("{FOLDER}{}-0", gone()));
        std::os::unix::fs::symlink(elsewhere.path(), planted).expect("linked");
        remove_leftovers(Some(folder.path()));
        assert!(precious.exists());
    }
}
