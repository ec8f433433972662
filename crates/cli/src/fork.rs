//! Servers that another process of the same program starts and waits for.
//!
//! ```text
//! mica serve --fork
//! first   waits until the last reports that it serves, and exits accordingly
//!   └ middle   exits at once, so that the last is reparented: systemd notices only the end of its
//!     │        own children
//!       └ last     serves
//!
//! mica serve --run COMMAND                                    (`captive`)
//! first   waits until the server reports that it serves, runs the command, and ends the server
//!   └ server   serves, and ends with the first
//! ```
//!
//! All of them run the same program with the same arguments. An environment variable tells a
//! process which one it is; the report goes over standard output, which a server has no other use
//! for.

use crate::failure::Failure;
use mica_daemon::has_inherited_sockets;
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// The environment variable.
const ROLE: &str = "MICA_SERVE_FORKED";
const MIDDLE: &str = "middle";
const LAST: &str = "last";
/// The reports: it serves, or it ends with the exit code that follows.
const SERVED: &str = "served";
const FAILED: &str = "failed";

/// What this process has to do.
pub(crate) enum Fork {
    /// It serves; another process may be waiting for that.
    Server(Option<Waiting>),
    /// It is not the server, and ends with this exit code: the server has said why, if it failed.
    Ended(u8),
}

/// The process that waits for the server.
pub(crate) struct Waiting {
    /// Where the output of a server in the background goes: inside the sandbox it cannot be opened.
    nowhere: Option<File>,
}

impl Waiting {
    /// Reports whether everything is served. Returns where standard error goes from now on, if it
    /// is not the caller's any more.
    pub(crate) fn report<T>(self, started: &Result<T, Failure>) -> Option<File> {
        let report = match started {
            Ok(_) => SERVED.to_owned(),
            Err(failure) => format!("{FAILED} {}", failure.code()),
        };
        // If it is gone, nobody needs the report.
        let _ = writeln!(std::io::stdout(), "{report}");
        self.nowhere
    }
}

impl Fork {
    /// With `--fork`: determines which process this is; the first and the middle one do all their
    /// work here.
    ///
    /// # Errors
    /// Those of the system calls; and if systemd passed sockets, which are for this process alone.
    pub(crate) fn here() -> Result<Self, Failure> {
        refuse_sockets("--fork")?;
        match role().as_deref() {
            Some(LAST) => {
                // A process that may not leave the session ends with its terminal, like any other.
                let _ = rustix::process::setsid();
                let nowhere = File::options().write(true).open("/dev/null").map_err(failed)?;
                Ok(Self::Server(Some(Waiting { nowhere: Some(nowhere) })))
            }
            Some(MIDDLE) => {
                respawn(LAST)?.spawn().map_err(failed)?;
                Ok(Self::Ended(0))
            }
            _ => {
                let middle = respawn(MIDDLE)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
                wait(middle)
            }
        }
    }

    /// The server of a process that waits, in the foreground.
    pub(crate) fn captive() -> Self {
        Self::Server(Some(Waiting { nowhere: None }))
    }
}

/// The part that the process which started this one gave it.
pub(crate) fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// # Errors
/// If systemd passed sockets, which are for this process alone.
pub(crate) fn refuse_sockets(option: &str) -> Result<(), Failure> {
    match has_inherited_sockets() {
        true => {
            let what = format!("{option}: the sockets that systemd passed would be lost");
            Err(Failure::new(what))
        }
        false => Ok(()),
    }
}

/// Asks the system to end this process, as SIGTERM does, when its parent ends.
///
/// # Errors
/// Those of the system calls; and if the parent has ended.
pub(crate) fn end_with_parent() -> Result<(), Failure> {
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::TERM)).map_err(|error| failed(error.into()))?;
    match getppid() == parent {
        true => Ok(()),
        false => Err(Failure::new("the process that started this server has ended")),
    }
}

fn wait(mut middle: Child) -> Result<Fork, Failure> {
    let outcome = outcome(&mut middle)?;
    middle.wait().map_err(failed)?;
    Ok(Fork::Ended(outcome))
}

/// Waits until the server reports; 0 if it serves, otherwise its exit code.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn outcome(server: &mut Child) -> Result<u8, Failure> {
    let mut report = String::new();
    if let Some(stdout) = server.stdout.take() {
        let mut stdout = BufReader::new(stdout);
        stdout.read_line(&mut report).map_err(failed)?;
        if report.trim_end() != SERVED {
            // One that failed says why before it ends, and with it this.
            std::io::copy(&mut stdout, &mut std::io::sink()).map_err(failed)?;
        }
    }
    Ok(code_of(report.trim_end()))
}

fn code_of(report: &str) -> u8 {
    let code = report.strip_prefix(FAILED).and_then(|code| code.trim().parse().ok());
    match report {
        SERVED => 0,
        // Without a report, something ended it.
        _ => code.unwrap_or(1),
    }
}

/// A command for this program with the same arguments, in another role.
///
/// # Errors
/// If the system does not say which program this is.
pub(crate) fn respawn(role: &str) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).env(ROLE, role).stdin(Stdio::null());
    Ok(command)
}

fn failed(error: std::io::Error) -> Failure {
    Failure::new(format!("starting the server: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_that_of_the_server() {
        assert_eq!(code_of("served"), 0);
        assert_eq!(code_of("failed 2"), 2);
        for broken in ["", "failed", "failed x", "failed 256", "serv"] {
            assert_eq!(code_of(broken), 1, "{broken:?}");
        }
    }
}
