//! Warnings that a client found no room. Whoever waits at a socket causes one after the other, and
//! must not fill the host's log.

use parking_lot::Mutex;
use rustix::io::Errno;
use std::io;
use std::time::{Duration, Instant};

/// Between two warnings.
const PERIOD: Duration = Duration::from_secs(60);

/// Says that `client` could not be let in, and what helps against that; at most once a minute,
/// whatever the client.
pub fn warn_of_lack(client: &str, error: &io::Error) {
    static WARNINGS: Mutex<Warnings> = Mutex::new(Warnings { last: None, unsaid: 0 });
    #[expect(clippy::disallowed_methods, reason = "some of the callers have no executor")]
    let now = Instant::now();
    let mut warnings = WARNINGS.lock();
    let Some(unsaid) = warnings.admit(now) else { return };
    drop(warnings);
    let cure = match Errno::from_io_error(error) {
        Some(Errno::MFILE) => {
            ": all files that this process may have open are, and none of them is idle: raise \
             LimitNOFILE= in its unit, or `ulimit -n`"
        }
        Some(Errno::NFILE) => ": all files that the system may have open are: raise fs.file-max",
        _ => "",
    };
    let times = if unsaid == 0 {
        String::new()
    } else {
        format!(" ({unsaid} times more since the last warning)")
    };
    tracing::warn!("cannot let {client} in, which waits: {error}{times}{cure}");
}

struct Warnings {
    last: Option<Instant>,
    /// Since then.
    unsaid: u64,
}

impl Warnings {
    /// Whether to say that there is one more, and how many there were since the last that was said.
    fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now.saturating_duration_since(last) < PERIOD) {
            self.unsaid += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_warning_stands_for_all_of_a_minute() {
        #[expect(clippy::disallowed_methods, reason = "any point in time")]
        let start = Instant::now();
        let mut warnings = Warnings { last: None, unsaid: 0 };
        let said: Vec<_> =
            (0..1300).filter_map(|n| warnings.admit(start + n * PERIOD / 600)).collect();
        assert_eq!(said, [0, 599, 599]);
    }
}
