//! The signals that a server hears.
//!
//! Invariants
//! - I1 Until the server serves, no signal is lost because it came while it was busy: what was
//!   heard is kept until [`Heard::wait_for_end`] acts on it.

mod opening;

pub(crate) use opening::{Doing, Opener, until_late};

use mica_block::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};
use std::fs::File;
use std::sync::Arc;

/// What this process has been told by signals: to end, or to read its configuration again.
pub(crate) struct Heard {
    source: Signals,
    kept: Kept,
}

/// Signals that were heard, and not acted on yet.
struct Kept {
    /// Each once, as one that comes again says nothing more.
    signals: Vec<i32>,
    /// Whether the process has a terminal, with which it ends: SIGHUP says that it is gone.
    has_terminal: bool,
}

impl Heard {
    /// Hears from now on what ends the process, and what makes it read its configuration again. A
    /// process that ignores SIGHUP, as nohup(1) makes it, goes on doing so.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(crate) fn start() -> Result<Self> {
        let failed = |error| Error::from_io("waiting for signals", error);
        ignore().map_err(failed)?;
        let mut all = vec![SIGTERM, SIGINT];
        if !is_ignored(SIGHUP) {
            all.push(SIGHUP);
        }
        let source = Signals::new(all).map_err(failed)?;
        let kept = Kept { signals: Vec::new(), has_terminal: has_terminal() };
        Ok(Self { source, kept })
    }

    /// Closing it ends the process as a signal does.
    pub(crate) fn handle(&self) -> Handle {
        self.source.handle()
    }

    /// The signal that told the process to end, if one has come.
    pub(crate) fn end(&mut self) -> Option<i32> {
        self.source.pending().for_each(|signal| self.kept.keep(signal));
        self.kept.end()
    }

    /// Waits until the process is told to end, and calls `hang_up` for every signal that says
    /// something else. Returns the one that ended it, unless that was its [`Handle`].
    pub(crate) fn wait_for_end(&mut self, hang_up: impl FnMut()) -> Option<i32> {
        let Self { source, kept } = self;
        kept.wait_for_end(source.forever(), hang_up)
    }

    /// Waits for a signal of which `is_it` holds. Returns false if none comes any more.
    pub(crate) fn wait_for(&mut self, is_it: impl FnMut(i32) -> bool) -> bool {
        self.source.forever().any(is_it)
    }
}

impl Kept {
    fn keep(&mut self, signal: i32) {
        if !self.signals.contains(&signal) {
            self.signals.push(signal);
        }
    }

    fn end(&self) -> Option<i32> {
        self.signals.iter().copied().find(|signal| self.ends(*signal))
    }

    fn wait_for_end(
        &mut self,
        later: impl Iterator<Item = i32>,
        mut hang_up: impl FnMut(),
    ) -> Option<i32> {
        let early = std::mem::take(&mut self.signals);
        early.into_iter().chain(later).find(|signal| {
            let ends = self.ends(*signal);
            if !ends {
                hang_up();
            }
            ends
        })
    }

    fn ends(&self, signal: i32) -> bool {
        signal != SIGHUP || self.has_terminal
    }
}

/// Whether this process was started from a terminal, with which it ends.
fn has_terminal() -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(has_terminal: bool, heard: &[i32]) -> Kept {
        let mut kept = Kept { signals: Vec::new(), has_terminal };
        heard.iter().for_each(|signal| kept.keep(*signal));
        kept
    }

    /// How often `kept` hangs up, and what ends it, if these signals come `later`.
    fn acted_on(mut kept: Kept, later: &[i32]) -> (usize, Option<i32>) {
        let mut hang_ups = 0;
        let end = kept.wait_for_end(later.iter().copied(), || hang_ups += 1);
        (hang_ups, end)
    }

    /// The story: a server looked whether it was told to end while it took over, and forgot every
    /// SIGHUP that it found.
    #[test]
    fn signals_that_came_early_are_acted_on_before_those_that_come_later() {
        let looked_at = kept(false, &[SIGHUP, SIGTERM]);
        assert_eq!(looked_at.end(), Some(SIGTERM));
        assert_eq!(looked_at.signals, [SIGHUP, SIGTERM], "looking takes nothing away");
        assert_eq!(acted_on(looked_at, &[SIGHUP]), (1, Some(SIGTERM)));
        assert_eq!(acted_on(kept(false, &[SIGHUP]), &[SIGHUP, SIGINT]), (2, Some(SIGINT)));
        assert_eq!(acted_on(kept(false, &[SIGHUP]), &[]), (1, None), "ended by its handle");
        let often = kept(false, &[SIGHUP, SIGHUP, SIGHUP]);
        assert_eq!(acted_on(often, &[]), (1, None), "once is enough");
    }

    #[test]
    fn hang_up_ends_a_process_that_has_a_terminal() {
        assert_eq!(kept(true, &[SIGHUP]).end(), Some(SIGHUP));
        assert_eq!(acted_on(kept(true, &[SIGHUP]), &[]), (0, Some(SIGHUP)));
        assert_eq!(kept(false, &[SIGHUP]).end(), None);
    }
}
