//! How much of the machine's processors nobody uses.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// A clock of the time that processors were idle.
#[derive(Debug)]
pub(crate) struct IdleTime {
    /// Opened once: a server in a sandbox can no longer do so.
    uptime: Option<File>,
}

impl IdleTime {
    /// A clock, which is silent where the system has none.
    pub(crate) fn open() -> Self {
        Self { uptime: File::open("/proc/uptime").ok() }
    }

    /// The time that all processors together have been idle, since the machine started.
    pub(crate) fn read(&self) -> Option<Duration> {
        // Two numbers of seconds, the second of which is this one (proc_uptime(5)).
        let mut text = [0; 64];
        let len = self.uptime.as_ref()?.read_at(&mut text, 0).ok()?;
        parse(std::str::from_utf8(text.get(..len)?).ok()?)
    }
}

fn parse(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.split_whitespace().nth(1)?.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_the_second_number() {
        assert_eq!(parse("5.00 7.25\n"), Some(Duration::from_millis(7250)));
        for text in ["", "5.00", "5.00 x", "5.00 -1", "5.00 1e99"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn idle_time_of_this_machine_does_not_run_backwards() {
        let clock = IdleTime::open();
        let first = clock.read().expect("the system tells");
        assert!(clock.read().expect("the system tells") >= first);
    }
}
