//! Where two processes of a takeover meet, and how the new one asks the old one to come.

use super::ANSWER_LIMIT;
use super::channel::Channel;
use crate::messages;
use mica_block::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};
use rustix::process::{Pid, test_kill_process};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// What the folder's name begins with; the process follows.
pub(crate) const FOLDER: &str = "mica-takeover-";
/// The socket in it.
pub(crate) const SOCKET: &str = "socket";
/// Bytes of an answer over HTTP.
const ANSWER_BYTES_MAX: u64 = 64 << 10;

/// Where the two processes meet: a socket in a folder that nobody else looks into.
pub(super) struct Meeting {
    folder: PathBuf,
    socket: OwnedFd,
}

impl Meeting {
    /// Beside the `control` socket, which both processes see, wherever their temporary files are.
    pub(super) fn arrange(control: &Path) -> Result<Self> {
        /// Names that others may have taken.
        const ATTEMPTS: u32 = 64;
        let failed = |error| Error::from_io("making a socket to take over by", error);
        let mut builder = std::fs::DirBuilder::new();
        builder.mode(0o700);
        remove_leftovers(control.parent().filter(|folder| *folder != Path::new("")));
        let mut attempt = 0;
        let folder = loop {
            let name = format!("{FOLDER}{}-{attempt}", std::process::id());
            let folder = control.parent().unwrap_or(Path::new("")).join(name);
            let folder = std::path::absolute(folder).map_err(failed)?;
            // Unix sockets have short names.
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
        let meeting = Self { folder, socket };
        let bound = || -> std::io::Result<()> {
            rustix::net::bind(&meeting.socket, &SocketAddrUnix::new(meeting.path())?)?;
            std::fs::set_permissions(meeting.path(), std::fs::Permissions::from_mode(0o600))?;
            Ok(rustix::net::listen(&meeting.socket, 1)?)
        };
        bound().map_err(failed)?;
        Ok(meeting)
    }

    fn path(&self) -> PathBuf {
        self.folder.join(SOCKET)
    }

    /// Asks the process behind the `control` socket to come, and waits for it.
    ///
    /// # Errors
    /// If there is none, or it refuses.
    pub(super) fn invite(&self, control: &Path) -> Result<Channel> {
        self.wait(ask(control, &self.path())?)
    }

    /// Waits for the old process to come, or to say over `http` that it does not.
    fn wait(&self, mut http: UnixStream) -> Result<Channel> {
        let failed = |error| Error::from_io("waiting for the process that is taken over", error);
        let limit = Timespec::try_from(ANSWER_LIMIT).ok();
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&http, PollFlags::IN)];
        match poll(&mut fds, limit.as_ref()) {
            Ok(0) => {
                let what = "the process that is to be taken over does not answer";
                return Err(Error::new(ErrorKind::Io, what));
            }
            Ok(_) => {}
            Err(error) => return Err(failed(error.into())),
        }
        let has_come = !fds[0].revents().is_empty();
        if !has_come {
            // Whoever agrees has come before the answer does.
            check_answer(&mut http)?;
        }
        let accepted = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC);
        Channel::new(accepted.map_err(|error| failed(error.into()))?)
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        // What stays behind is an empty folder of ours.
        let _ = std::fs::remove_file(self.path());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Removes from `parent` what processes left that were killed while they waited. Errors leave it to
/// the next one.
fn remove_leftovers(parent: Option<&Path>) {
    let Ok(found) = std::fs::read_dir(parent.unwrap_or(Path::new("."))) else { return };
    for entry in found.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split('-').next());
        let process = process.and_then(|process| process.parse().ok()).and_then(Pid::from_raw);
        let is_gone = |process| test_kill_process(process) == Err(Errno::SRCH);
        if process.is_some_and(is_gone) {
            let _ = std::fs::remove_file(entry.path().join(SOCKET));
            // Only an empty folder goes.
            let _ = std::fs::remove_dir(entry.path());
        }
    }
}

fn ask(control: &Path, meet_at: &Path) -> Result<UnixStream> {
    let context = || format!("--takeover: the server at {}", control.display());
    let mut http = UnixStream::connect(control).map_err(|error| {
        let what = format!("{} (to start where none runs, leave --takeover out)", context());
        Error::from_io(what, error)
    })?;
    let body = json!({ "socket": meet_at.display().to_string() }).to_string();
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

/// What the old process says if it is not that it comes.
fn check_answer(http: &mut UnixStream) -> Result<()> {
    let mut answer = Vec::new();
    http.take(ANSWER_BYTES_MAX)
        .read_to_end(&mut answer)
        .map_err(|error| Error::from_io("--takeover: its answer", error))?;
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or_default();
    if status.starts_with('2') {
        return Ok(());
    }
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    let told = serde_json::from_str::<Value>(body).ok();
    let told = told.as_ref().and_then(|told| told["error"].as_str()).unwrap_or(body);
    let context = format!("--takeover: the server refused ({status}): {}", told.trim());
    Err(Error::new(ErrorKind::Denied, context))
}
