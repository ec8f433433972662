//! The signals that a server hears.

mod early;

pub(crate) use early::open_unless_ended;

use mica_block::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::sync::Arc;

/// Those to wait for: what ends it, and what makes it read its configuration again. A process that
/// ignores SIGHUP, as nohup(1) makes it, goes on doing so.
///
/// # Errors
/// Those of the system calls.
pub(crate) fn heard() -> Result<Signals> {
    let failed = |error| Error::from_io("waiting for signals", error);
    ignore().map_err(failed)?;
    let mut all = vec![SIGTERM, SIGINT];
    if !is_ignored(SIGHUP) {
        all.push(SIGHUP);
    }
    Signals::new(all).map_err(failed)
}

/// Whether this process was started from a terminal, with which it ends.
pub(crate) fn has_terminal() -> bool {
    File::open("/dev/tty").is_ok()
}

/// Signals that other servers take for a request, and which would end this one, have no effect. (A
/// handler that does nothing is not inherited by other programs, as an ignored signal would be.)
fn ignore() -> std::io::Result<()> {
    for signal in [SIGUSR1, SIGUSR2] {
        signal_hook::flag::register(signal, Arc::default())?;
    }
    Ok(())
}

/// Whether this process ignores a signal, by `/proc/self/status` (proc(5)).
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
