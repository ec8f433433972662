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
/// The report.
const SERVED: &str = "served";

/// What this process has to do.
pub(crate) enum Fork {
    /// It serves; another process may be waiting for that.
    Server(Option<Waiting>),
    /// It is not the server, which now serves.
    Served,
    /// It is not the server, which has reported why it failed.
    Failed,
}

/// The process that waits for the server.
pub(crate) struct Waiting;

impl Waiting {
    /// Reports that everything is served.
    pub(crate) fn report(self) {
        // If it is gone, nobody needs the report.
        let _ = writeln!(std::io::stdout(), "{SERVED}");
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
            Self::Failed => ExitCode::FAILURE,
        }
    }
}

fn wait() -> Result<Fork, Failure> {
    let mut middle = respawn(MIDDLE)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut report = String::new();
    if let Some(stdout) = middle.stdout.take() {
        // Without a report, end of file comes when the last process ends.
        BufReader::new(stdout).read_line(&mut report).map_err(failed)?;
    }
    middle.wait().map_err(failed)?;
    Ok(if report.trim_end() == SERVED { Fork::Served } else { Fork::Failed })
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
