//! What a server did, counted per queue and summed on request.

use crate::counters::counters;

counters! {
    /// Connections that were accepted.
    connections,
    /// Connections that were closed at once because there were too many.
    connections_refused,
    /// Connections that completed the handshake.
    sessions,
    /// Connections that ended because the client broke the protocol.
    protocol_errors,
    /// Connections that ended because the client missed a deadline.
    deadlines_passed,
    /// Connections that ended because the server's own code failed.
    panics,
    /// Requests that were received, whatever their outcome.
    requests,
    /// Reads among them that were done.
    reads,
    /// Bytes of those reads.
    read_bytes,
    /// Writes that were done.
    writes,
    /// Bytes of those writes.
    written_bytes,
    /// Requests to write zeros that were done.
    zeroes,
    /// Requests to discard that were done.
    discards,
    /// Flushes that were done, not counting those of single requests (FUA).
    flushes,
    /// Requests that were answered with an error.
    errors,
}
