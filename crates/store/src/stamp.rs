//! The times with which file systems stamp files, in nanoseconds since 1970.

use rustix::time::{ClockId, clock_gettime};

/// A stamp as the system gives it: seconds, and the nanoseconds after them.
pub fn nanoseconds(seconds: i64, nanos: u64) -> i128 {
    i128::from(seconds) * 1_000_000_000 + i128::from(nanos)
}

/// The current time, by the clock that stamps files: anything that changes after this call is
/// stamped with this time or a later one.
pub fn now_ns() -> i128 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    nanoseconds(now.tv_sec, u64::try_from(now.tv_nsec).unwrap_or(0))
}
