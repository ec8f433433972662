//! What a device did, counted per queue and summed on request.

use crate::counters::counters;

counters! {
    /// Reads that were received.
    reads,
    /// Bytes of those reads.
    read_bytes,
    /// Writes that were received.
    writes,
    /// Bytes of those writes.
    written_bytes,
    /// Flushes that were received.
    flushes,
    /// Discards that were received.
    discards,
    /// Requests to write zeros that were received.
    zeroes,
    /// Requests that failed.
    failed,
    /// Requests that were refused because of what they ask for.
    refused,
    /// Requests that could not be parsed.
    malformed,
    /// Times that a request waited because of the device's rate limits.
    delayed,
    /// Queues that were in an inconsistent state.
    broken_queues,
    /// Times that a front end's memory disappeared while it was served.
    memory_losses,
    /// Failures in the server that ended a queue.
    panics,
}
