//! `mica serve --run COMMAND`: serves for as long as a command runs, at a socket for it alone.
//!
//! The server is another process: its sandbox starts no programs. It is in a process group of its
//! own, so that a key that interrupts the command does not take its disk away, and it ends with the
//! process that started it.

use crate::failure::Failure;
use crate::fork::{Fork, end_with_parent, outcome, refuse_sockets, respawn, role};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::Signals;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

const SERVER: &str = "captive";
/// The environment variable with the socket of such a server.
const SOCKET: &str = "MICA_SERVE_SOCKET";
const SHELL: &str = "/bin/sh";

/// Determines which process this is. That which is not the server runs `command` and does all its
/// work here.
///
/// # Errors
/// If the server or the command cannot be started.
pub(crate) fn here(command: &OsStr) -> Result<Fork, Failure> {
    refuse_sockets("--run")?;
    if role().as_deref() == Some(SERVER) {
        end_with_parent()?;
        return Ok(Fork::captive());
    }
    Ok(Fork::Ended(run(command)?))
}

/// The socket of this server, if it serves for a command.
pub(crate) fn socket() -> Option<PathBuf> {
    let is_captive = role().as_deref() == Some(SERVER);
    std::env::var_os(SOCKET).filter(|_| is_captive).map(PathBuf::from)
}

/// Serves, and runs `command` meanwhile. Returns its exit code, or the server's if only that
/// failed.
fn run(command: &OsStr) -> Result<u8, Failure> {
    let folder = private_folder()?;
    let socket = folder.path().join("socket");
    let target = Target::default();
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT]).map_err(failed)?;
    let (handle, forwarding) = (signals.handle(), target.clone());
    // It ends with the process, or when the handle is closed.
    std::thread::spawn(move || signals.forever().for_each(|signal| forwarding.forward(signal)));
    let mut server = respawn(SERVER)?;
    server.env(SOCKET, &socket).stdout(Stdio::piped()).process_group(0);
    let mut server = server.spawn().map_err(failed)?;
    target.set(Addressee::Server, &server);
    let begun = match (outcome(&mut server)?, target.interruption()) {
        // There is nothing to run it for any more.
        (_, Some(signal)) => {
            server.wait().map_err(failed)?;
            return Ok(code_of_signal(signal));
        }
        (0, None) => shell(command, &socket)
            .spawn()
            .map_err(|error| Failure::new(format!("--run: {SHELL}: {error}"))),
        (code, None) => {
            server.wait().map_err(failed)?;
            return Ok(code);
        }
    };
    let ended = begun.and_then(|mut command| {
        target.set(Addressee::Command, &command);
        command.wait().map_err(failed)
    });
    target.set(Addressee::Server, &server);
    target.forward(SIGTERM);
    let served = server.wait().map_err(failed)?;
    handle.close();
    Ok(match code_of(ended?) {
        0 => code_of(served),
        code => code,
    })
}

fn private_folder() -> Result<TempDir, Failure> {
    let folder = tempfile::Builder::new().prefix("mica-run-").tempdir();
    folder.map_err(|error| Failure::new(format!("--run: making a folder for its socket: {error}")))
}

/// The command, with what NBD clients need to know.
fn shell(command: &OsStr, socket: &Path) -> Command {
    let mut shell = Command::new(SHELL);
    shell.arg("-c").arg(command);
    let mut nbd = std::ffi::OsString::from("nbd:unix:");
    nbd.push(socket);
    shell.env("unixsocket", socket).env("uri", uri(socket)).env("nbd", nbd);
    shell
}

fn uri(socket: &Path) -> String {
    let mut uri = "nbd+unix:///?socket=".to_owned();
    for byte in socket.as_os_str().as_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'~' => uri.push(char::from(*byte)),
            byte if byte.is_ascii_alphanumeric() => uri.push(char::from(*byte)),
            // Writing to a string does not fail.
            byte => drop(write!(uri, "%{byte:02X}")),
        }
    }
    uri
}

/// As a shell reports it.
fn code_of(status: ExitStatus) -> u8 {
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    code.or_else(|| status.signal().map(code_of_signal)).unwrap_or(1)
}

fn code_of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(1)
}

fn failed(error: std::io::Error) -> Failure {
    Failure::from(error).within("--run")
}

/// The process that signals are for.
#[derive(Clone, Default)]
struct Target(Arc<Mutex<Aim>>);

#[derive(Default)]
struct Aim {
    process: Option<(Addressee, OwnedFd)>,
    /// The first signal that came while there was no command.
    interruption: Option<i32>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Addressee {
    Server,
    Command,
}

impl Target {
    fn set(&self, addressee: Addressee, child: &Child) {
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        let mut aim = self.lock();
        aim.process = process.map(|process| (addressee, process));
        if aim.interruption.is_some() {
            aim.send(Signal::TERM);
        }
    }

    /// A terminal's own signals reach the command by themselves, and a server that has none never:
    /// it is in another group.
    fn forward(&self, signal: i32) {
        let mut aim = self.lock();
        match (&aim.process, signal) {
            (Some((Addressee::Command, _)), SIGTERM) => aim.send(Signal::TERM),
            (Some((Addressee::Command, _)), SIGHUP) => aim.send(Signal::HUP),
            (Some((Addressee::Command, _)), _) => {}
            (Some((Addressee::Server, _)) | None, _) => {
                aim.interruption.get_or_insert(signal);
                aim.send(Signal::TERM);
            }
        }
    }

    /// The signal that ended it all before there was a command.
    fn interruption(&self) -> Option<i32> {
        self.lock().interruption
    }

    fn lock(&self) -> MutexGuard<'_, Aim> {
        self.0.lock()
    }
}

impl Aim {
    fn send(&self, signal: Signal) {
        if let Some((_, process)) = &self.process {
            // An error means that it has ended.
            let _ = pidfd_send_signal(process, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uri_of_any_socket_is_one_word() {
        assert_eq!(uri(Path::new("/tmp/a-1/s")), "nbd+unix:///?socket=/tmp/a-1/s");
        assert_eq!(uri(Path::new("/a b&c")), "nbd+unix:///?socket=/a%20b%26c");
    }
}
