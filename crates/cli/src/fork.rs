//! `mica serve --fork`: a server in the background, and a process that waits until it serves.
//!
//! ```text
//! first   waits for a word from the last, and ends with it
//!   └ middle   ends at once, so that the last is a child of the system's own: systemd tells only
//!     │        of its own children when they end
//!       └ last     serves
//! ```
//!
//! They are the same program with the same arguments. A variable of the environment says which one
//! a process is, and standard output, which a server has no use for, is the way of the word.

use crate::failure::Failure;
use mica_daemon::has_inherited_sockets;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, ExitCode, Stdio};

/// The variable.
const ROLE: &str = "MICA_SERVE_FORKED";
const MIDDLE: &str = "middle";
const LAST: &str = "last";
/// The word.
const SERVED: &str = "served";

/// What this process is to do.
pub(crate) enum Fork {
    /// It serves; somebody may wait for that.
    Server(Option<Waiting>),
    /// It is not the server, which has come to serve.
    Served,
    /// It is not the server, which has said why it does not serve.
    Failed,
}

/// The process that waits.
pub(crate) struct Waiting;

impl Waiting {
    /// Tells it that all is served.
    pub(crate) fn end(self) {
        // Whoever waits no more does not want to know.
        let _ = writeln!(std::io::stdout(), "{SERVED}");
    }
}

impl Fork {
    /// Finds out what this process is; the first and the middle one do all they have to do.
    ///
    /// # Errors
    /// What the system says; and if sockets came along, which are this process's alone.
    pub(crate) fn here() -> Result<Self, Failure> {
        if has_inherited_sockets() {
            return Err(Failure::new("--fork: the sockets that came along would be lost"));
        }
        match std::env::var(ROLE).as_deref() {
            Ok(LAST) => {
                // Who may not leave the session ends with its terminal, as any other program.
                let _ = rustix::process::setsid();
                Ok(Self::Server(Some(Waiting)))
            }
            Ok(MIDDLE) => {
                again(LAST)?.spawn().map_err(failed)?;
                Ok(Self::Served)
            }
            _ => wait(),
        }
    }

    /// How a process ends that is not the server.
    pub(crate) fn outcome(&self) -> ExitCode {
        match self {
            Self::Server(_) | Self::Served => ExitCode::SUCCESS,
            Self::Failed => ExitCode::FAILURE,
        }
    }
}

fn wait() -> Result<Fork, Failure> {
    let mut middle = again(MIDDLE)?.stdout(Stdio::piped()).spawn().map_err(failed)?;
    let mut word = String::new();
    if let Some(said) = middle.stdout.take() {
        // The end of it comes when the last one ends, if not the word.
        BufReader::new(said).read_line(&mut word).map_err(failed)?;
    }
    middle.wait().map_err(failed)?;
    Ok(if word.trim_end() == SERVED { Fork::Served } else { Fork::Failed })
}

/// This program with these arguments, as another of the three.
fn again(role: &str) -> Result<Command, Failure> {
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(std::env::args_os().skip(1)).env(ROLE, role).stdin(Stdio::null());
    Ok(command)
}

fn failed(error: std::io::Error) -> Failure {
    Failure::new(format!("--fork: {error}"))
}
