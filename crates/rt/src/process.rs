//! Whether another process is alive.

use rustix::event::{Timespec, poll};

/// Whether a process has been killed, has begun to exit, or no longer exists: what it holds will be
/// released soon. Takes two milliseconds if it is alive.
pub fn is_dying(process: u32) -> bool {
    let read = |what: &str| std::fs::read_to_string(format!("/proc/{process}/{what}"));
    let lives = || match (read("stat"), read("status")) {
        (Ok(stat), Ok(status)) => !dies(&stat, &status),
        _ => false,
    };
    // Between taking the signal and beginning to exit a process shows neither.
    let lives = lives() && {
        let _ = poll(&mut [], Some(&Timespec { tv_sec: 0, tv_nsec: 2_000_000 }));
        lives()
    };
    !lives
}

/// As [`is_dying`], from its files in `/proc` (proc(5)).
fn dies(stat: &str, status: &str) -> bool {
    /// PF_EXITING of Linux.
    const EXITING: u64 = 4;
    const KILL: u64 = 1 << 8;
    // From the third field on: the name before it may contain spaces.
    let flags = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(6)?.parse().ok());
    let is_exiting = flags.is_some_and(|flags: u64| flags & EXITING != 0);
    let pending = |line: &str| {
        let mask = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:"))?;
        u64::from_str_radix(mask.trim(), 16).ok()
    };
    is_exiting || status.lines().filter_map(pending).any(|mask| mask & KILL != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_is_dying_from_the_signal_on() {
        let stat = |flags: u64| format!("7 (a ) name) S 1 7 7 0 -1 {flags} 0 0");
        let status = |mask: &str| format!("Name:\tx\nSigPnd:\t{mask}\nShdPnd:\t0000\n");
        assert!(!dies(&stat(0x40_0040), &status("0000000000000000")));
        assert!(dies(&stat(0x40_0044), &status("0000000000000000")));
        assert!(dies(&stat(0x40_0040), &status("0000000000000100")));
        assert!(!dies(&stat(0x40_0040), &status("0000000000004000")), "SIGTERM");
        assert!(!dies("", ""));
    }

    #[test]
    fn own_process_is_alive_and_one_that_does_not_exist_is_not() {
        assert!(!is_dying(std::process::id()));
        assert!(is_dying(u32::MAX));
    }
}
