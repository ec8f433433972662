//! What a device did, counted per queue and summed when someone asks.

use crate::counters::counters;

counters! {
    /// Reads that were taken.
    reads,
    /// Bytes of those reads.
    read_bytes,
    /// Writes that were taken.
    writes,
    /// Bytes of those writes.
    written_bytes,
    /// Flushes that were taken.
    flushes,
    /// Discards that were taken.
    discards,
    /// Requests to write zeros that were taken.
    zeroes,
    /// Requests that failed.
    failed,
    /// Requests that were refused for what they ask.
    refused,
    /// Requests that could not be understood.
    malformed,
    /// Times that a request waited because of the device's rates.
    delayed,
    /// Queues that contradicted themselves.
    broken_queues,
    /// Times that a front end's memory went away while it was served.
    memory_losses,
    /// Failures in the server that ended a queue.
    panics,
}
