//! What a FUSE file did, counted per thread and summed when someone asks.

use crate::counters::counters;

counters! {
    /// Reads that were taken.
    reads,
    /// Bytes that were read.
    read_bytes,
    /// Writes that were taken.
    writes,
    /// Bytes that were written.
    written_bytes,
    /// Flushes that were taken: `fsync`, `close`, and writes that ask for it.
    flushes,
    /// Holes that were punched.
    discards,
    /// Ranges that were zeroed otherwise.
    zeroes,
    /// Requests that failed.
    failed,
    /// Requests that were refused for what they ask.
    refused,
    /// Failures in the server that ended a request.
    panics,
}
