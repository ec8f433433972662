//! `mica serve --fork`: a server in the background, and a process that waits until it serves.
//!
//! ```text
//! first   waits until the last reports that it serves, and exits accordingly
//!   └ middle   exits at once, so that the last is reparented: systemd notices only the end of its
//!     │        own children
//!       └ last     serves
//! ```
//!
//! All three run the same program with the same arguments. An environment variable tells a process
//! which one it is; the report goes over standard output, which a server has no other use for.

use crate::failure::Failure;
use mica_daemon::has_inherited_sockets;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

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
    /// It is not the server, which now serves.
    Served,
    /// It is not the server, which has said why it failed, and ended with this exit code.
    Failed(u8),
}

/// The process that waits for the server.
pub(crate) struct Waiting;

impl Waiting {
    /// Reports whether everything is served.
    pub(crate) fn report<T>(self, started: &Result<T, Failure>) {
        let report = match started {
            Ok(_) => SERVED.to_owned(),
            Err(failure) => format!("{FAILED} {}", failure.code()),
        };
        // If it is gone, nobody needs the report.
        let _ = writeln!(std::io::stdout(), "{report}");
    }
}

impl Fork {
    /// Determines which process this is; the first and the middle one do all their work here.
    ///
    /// # Errors
    /// Those of the system calls; and if systemd passed sockets, which are for this process alone.
    pub(crate) fn here() -> Result<Self, Failure> {
        if has_inherited_sockets() {
            return Err(Failure::new("--fork: the sockets that systemd passed would be lost"));
        }
        match std::env::var(ROLE).as_deref() {
            Ok(LAST) => {
                // A process that may not leave the session ends with its terminal, like any other.
                let _ = rustix::process::setsid();
                Ok(Self::Server(Some(Waiting)))
            }
            Ok(MIDDLE) => {
                respawn(LAST)?.spawn().map_err(failed)?;
                Ok(Self::Served)
            }
            _ => wait(),
        }
    }

    /// The exit code of a process that is not the server.
    pub(crate) fn outcome(&self) -> ExitCode {
        match self {
            Self::Server(_) | Self::Served => ExitCode::SUCCESS,
            Self::Failed(code) => ExitCode::from(*code),
        }
    }
}

fn wait() -> Result<Fork, Failure> {
    let mut middle = respawn(MIDDLE)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut report = String::new();
    if let Some(stdout) = middle.stdout.take() {
        let mut stdout = BufReader::new(stdout);
        stdout.read_line(&mut report).map_err(failed)?;
        if report.trim_end() != SERVED {
            // One that failed says why before it ends, and with it this.
            std::io::copy(&mut stdout, &mut std::io::sink()).map_err(failed)?;
        }
    }
    middle.wait().map_err(failed)?;
    Ok(outcome_of(report.trim_end()))
}

fn outcome_of(report: &str) -> Fork {
    let code = report.strip_prefix(FAILED).and_then(|code| code.trim().parse().ok());
    match report {
        SERVED => Fork::Served,
        // Without a report, something ended it.
        _ => Fork::Failed(code.unwrap_or(1)),
    }
}

/// A command for this program with the same arguments, in another role.
fn respawn(role: &str) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).env(ROLE, role).stdin(Stdio::null());
    Ok(command)
}

fn failed(error: std::io::Error) -> Failure {
    Failure::new(format!("--fork: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_code_is_that_of_the_server() {
        assert!(matches!(outcome_of("served"), Fork::Served));
        assert!(matches!(outcome_of("failed 2"), Fork::Failed(2)));
        for broken in ["", "failed", "failed x", "failed 256", "serv"] {
            assert!(matches!(outcome_of(broken), Fork::Failed(1)), "{broken:?}");
        }
    }
}
