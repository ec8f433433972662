//! A verb that has something to take back, or to finish, when the user or the system ends it.
//!
//! The first signal is noted, and the verb does what it has to; a later one ends it at once, as
//! does the first where nobody watches. But not one that comes with the first: a terminal that is
//! closed sends several, as do timeout(1) and systemd.

use crate::failure::Failure;
use crate::output::monotonic;
use crate::unfinished::ending_signals;
use mica_rt::sync::Signal;
use mica_rt::timeout;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

/// How long what is nearly done may take after a signal.
const FINISH_LIMIT: Duration = Duration::from_secs(5);

/// How long after the first signal another one is that of somebody who does not want to wait.
const PATIENCE: Duration = Duration::from_secs(1);

/// Whether a signal has come.
pub(crate) struct Ending {
    shared: Arc<Shared>,
    /// Readable for ever once one has.
    came: OwnedFd,
}

#[derive(Default)]
struct Shared {
    raised: Signal,
    number: AtomicI32,
}

impl Ending {
    /// Watches from now on. A program watches once.
    ///
    /// # Errors
    /// If the system refuses that.
    pub(crate) fn watch() -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::from(error).within("watching for signals");
        let (came, sender) = rustix::pipe::pipe().map_err(|error| failed(error.into()))?;
        let mut signals = Signals::new(ending_signals()).map_err(failed)?;
        let shared = Arc::new(Shared::default());
        let noted = Arc::clone(&shared);
        let watch = move || {
            let (mut sender, mut first) = (Some(sender), None);
            for signal in signals.forever() {
                let now = monotonic();
                let since = now.saturating_sub(*first.get_or_insert(now));
                // The end of its only sender makes the pipe readable.
                if sender.take().is_some() {
                    noted.number.store(signal, Ordering::Relaxed);
                    noted.raised.raise();
                } else if since >= PATIENCE {
                    end_by(signal);
                }
            }
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed)?;
        Ok(Self { shared, came })
    }

    /// Raised by the first signal.
    pub(crate) fn signal(&self) -> &Signal {
        &self.shared.raised
    }

    /// Does `act`, or drops it when a signal comes.
    ///
    /// # Errors
    /// As `act`; after a signal one that nobody is told, as [`Self::end_if_raised`] comes first.
    pub(crate) async fn unless_raised<T>(
        &self,
        act: impl Future<Output = Result<T, Failure>>,
    ) -> Result<T, Failure> {
        self.signal().unless_raised(act).await.unwrap_or_else(|| Err(Failure::new(ENDED)))
    }

    /// Does `act` to its end, as nothing takes it back; but after a signal not for long, where a
    /// store does not answer.
    pub(crate) async fn finish<T>(&self, act: impl Future<Output = T>) -> T {
        let mut act = pin!(act);
        if let Some(done) = self.signal().unless_raised(act.as_mut()).await {
            return done;
        }
        match timeout(FINISH_LIMIT, act).await {
            Ok(done) => done,
            Err(_) => end_by(self.shared.number.load(Ordering::Relaxed)),
        }
    }

    /// Ends the program as the signal that has come would have, if one has.
    pub(crate) fn end_if_raised(&self) {
        if self.signal().is_raised() {
            end_by(self.shared.number.load(Ordering::Relaxed));
        }
    }

    /// What reads `source`, and fails when a signal comes.
    pub(crate) fn reader<R: Read + AsFd>(&self, source: R) -> impl Read {
        Reader { ending: self, source }
    }
}

/// Why something failed that a signal ended.
const ENDED: &str = "ended by a signal";

struct Reader<'a, R> {
    ending: &'a Ending,
    source: R,
}

impl<R: Read + AsFd> Read for Reader<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut ready = [
            PollFd::new(&self.source, PollFlags::IN),
            PollFd::new(&self.ending.came, PollFlags::IN),
        ];
        poll(&mut ready, None)?;
        match ready[1].revents().is_empty() {
            true => self.source.read(bytes),
            false => Err(io::Error::other(ENDED)),
        }
    }
}

/// Ends the program as `signal` does by default.
fn end_by(signal: i32) -> ! {
    // It returns only if it could not be done; then the exit code says the same.
    let _ = emulate_default_handler(signal);
    std::process::exit(128 + signal)
}
