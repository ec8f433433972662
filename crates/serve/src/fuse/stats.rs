//! What a FUSE file did, counted per thread and summed on request.

use crate::counters::counters;

counters! {
    /// Reads that were received.
    reads,
    /// Bytes that were read.
    read_bytes,
    /// Writes that were received.
    writes,
    /// Bytes that were written.
    written_bytes,
    /// Flushes that were received: `fsync`, `close`, and writes that ask for it.
    flushes,
    /// Holes that were punched.
    discards,
    /// Ranges that were zeroed by other means.
    zeroes,
    /// Requests that failed.
    failed,
    /// Requests that were refused because of what they ask for.
    refused,
    /// Failures in the server that ended a request.
    panics,
}
