//! Opening disks, and closing those of a start that failed, which takes as long as the slowest of
//! their stores, while somebody looks at what else happens: signals, and the other process of a
//! takeover.
//!
//! Invariants
//! - I1 What hangs while it is opened keeps nobody from seeing that, or from ending the process: it
//!   is opened on a thread of its own, which is left behind. What it opens after that is closed
//!   again, and not served.
//! - I2 A server that was told to end keeps opening its disks for at most [`LIMIT`] longer, and
//!   then closing them for as long.

use super::Heard;
use crate::retry::stopwatch;
use mica_block::{Error, ErrorKind, Result};
use signal_hook::low_level::signal_name;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::Builder;
use std::time::Duration;

/// How long disks may still be opened, or closed, once the server was told to end.
const LIMIT: Duration = Duration::from_secs(5);
/// How often to look.
const PAUSE: Duration = Duration::from_millis(50);

/// What is done with the disks.
#[derive(Clone, Copy)]
pub(crate) enum Doing {
    Opening,
    Closing,
}

impl Doing {
    /// What happens to them, and how they are then.
    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Opening => ("opened", "open"),
            Self::Closing => ("closed", "closed"),
        }
    }
}

/// A thread that opens, or closes.
pub(crate) struct Opener(Sender<Box<dyn FnOnce() + Send>>);

impl Opener {
    /// # Errors
    /// If the system has no thread to spare.
    pub(crate) fn start() -> Result<Self> {
        let (sender, work) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let body = move || {
            if let Ok(open) = work.recv() {
                open();
            }
        };
        let started = Builder::new().name("mica-open".to_owned()).spawn(body);
        started.map_err(|error| Error::from_io("opening the disks", error))?;
        Ok(Self(sender))
    }

    /// What `open` returns; calls `look` again and again meanwhile.
    ///
    /// # Errors
    /// Those of `open`, and the first one of `look`: then `open` may still run.
    pub(crate) fn open<T: Send + 'static>(
        self,
        open: impl FnOnce() -> Result<T> + Send + 'static,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<T> {
        let panicked = || Error::new(ErrorKind::Io, "opening the disks failed");
        let (sender, opened) = mpsc::channel();
        let work = move || {
            // If nobody waits any more, this process ends.
            let _ = sender.send(open());
        };
        self.0.send(Box::new(work)).map_err(|_| panicked())?;
        loop {
            match opened.recv_timeout(PAUSE) {
                Ok(opened) => return opened,
                Err(RecvTimeoutError::Disconnected) => return Err(panicked()),
                Err(RecvTimeoutError::Timeout) => look()?,
            }
        }
    }
}

/// Looks whether the server was told to end more than [`LIMIT`] ago.
pub(crate) fn until_late(heard: &mut Heard, doing: Doing) -> impl FnMut() -> Result<()> {
    let mut lateness = Lateness { doing, told: None };
    let elapsed = stopwatch();
    move || lateness.check(heard.end(), elapsed())
}

struct Lateness {
    doing: Doing,
    /// When the server was told to end.
    told: Option<Duration>,
}

impl Lateness {
    /// Learns of the signal that ends the server, if there was one by `now`.
    fn check(&mut self, end: Option<i32>, now: Duration) -> Result<()> {
        let Some(signal) = end else { return Ok(()) };
        let name = signal_name(signal).unwrap_or("a signal");
        let (being, are) = self.doing.words();
        let told = *self.told.get_or_insert_with(|| {
            tracing::info!("stopping on {name}, once what is being {being} has answered");
            now
        });
        if now.saturating_sub(told) < LIMIT {
            return Ok(());
        }
        let seconds = LIMIT.as_secs();
        let what = format!("stopped on {name}: not all disks were {are} {seconds} s later");
        Err(Error::new(ErrorKind::Denied, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use signal_hook::consts::SIGTERM;

    #[test]
    fn what_is_opened_is_returned_and_looked_beside() {
        let (go, gone) = mpsc::channel();
        let open = move || gone.recv().map_err(|_| Error::new(ErrorKind::Io, "nobody looked"));
        let mut looks = 0;
        let mut look = || {
            looks += 1;
            // Later ones find that it has been opened.
            let _ = go.send(7);
            Ok(())
        };
        let opened = Opener::start().expect("a thread").open(open, &mut look);
        assert_eq!(opened.expect("opened"), 7);
        assert!(looks > 0, "it cannot have been opened before");
    }

    #[test]
    fn what_hangs_is_left_behind_by_whoever_sees_a_reason() {
        let (go, gone) = mpsc::channel::<()>();
        let open = move || Ok(gone.recv().is_ok());
        let mut look = || Err(Error::new(ErrorKind::Denied, "told to stop"));
        let refused = Opener::start().expect("a thread").open(open, &mut look).expect_err("left");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        go.send(()).expect("it still hangs");
    }

    #[test]
    fn opening_that_panics_is_an_error() {
        let open = || -> Result<()> { panic!("a test") };
        let refused = Opener::start().expect("a thread").open(open, &mut || Ok(()));
        assert!(refused.expect_err("failed").to_string().contains("opening the disks"));
    }

    #[test]
    fn server_that_was_told_to_end_opens_for_a_while_from_then_on() {
        let mut lateness = Lateness { doing: Doing::Opening, told: None };
        let second = Duration::from_secs;
        assert!(lateness.check(None, second(100)).is_ok(), "nobody said anything");
        assert!(lateness.check(Some(SIGTERM), second(101)).is_ok());
        assert!(lateness.check(Some(SIGTERM), second(105)).is_ok());
        let late = lateness.check(Some(SIGTERM), second(106)).expect_err("late").to_string();
        assert_eq!(late, "stopped on SIGTERM: not all disks were open 5 s later");
    }
}
