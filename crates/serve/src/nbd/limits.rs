//! Every maximum of the NBD server. What a client can make it hold, wait or do is bounded here.
//!
//! What one connection holds at most: one receive buffer ([`RECEIVE_BYTES_MAX`]), [`SLOTS_MAX`]
//! requests, and [`BUDGET_BYTES`] of data that arrives to be written, is being written or read, or
//! waits to be sent. Of these, [`RESERVE_BYTES`] are its own; the rest is what it may have of the
//! budget of the process ([`crate::budget`]). Larger requests are handled piece by piece: a read is
//! sent as it is read, a write is done as its payload arrives. A connection over TLS
//! holds at most a mebibyte more: what it received and decrypted, and what it encrypted and sends
//! (the head of `tls/stream.rs`).
//!
//! All connections of a process together hold at most the pool of that budget and, each, its
//! reserve, a receive buffer, and what TLS takes.

use crate::limit::Rates;
use std::time::Duration;

/// Longest name of an export, description or query, as the protocol sets it ("Conventions").
pub(super) const NAME_BYTES_MAX: usize = 4096;
/// Options with more data than this are refused unread, if they are known at all. Room for the
/// longest name and hundreds of queries.
pub(super) const OPTION_BYTES_MAX: usize = 64 << 10;
/// More data than this in one option ends the connection.
pub(super) const OPTION_BYTES_SKIPPED_MAX: u32 = 4 << 20;
/// Options that one client may send.
pub(super) const OPTIONS_MAX: usize = 1024;
/// Further ones for each export of the address: who lists them asks for the details of each.
pub(super) const OPTIONS_PER_EXPORT: usize = 4;
/// Bytes of options that one client may send, all together.
pub(super) const OPTION_BYTES_TOTAL_MAX: u64 = 16 << 20;
/// Exports of one address.
pub(super) const EXPORTS_MAX: usize = 65536;
/// Exports that are looked at, and listed, at a time: of a long list no more is in memory.
pub(super) const LISTED_AT_ONCE: usize = 64;
/// Clients of one address that have not chosen an export. A further one takes the place of one that
/// has not said anything yet, and is closed at once if there is none.
pub(super) const HANDSHAKES_MAX: usize = 256;
/// How long a client waits for exports that are about to be served, all together: well within the
/// handshake.
pub(super) const AWAITED_MAX: Duration = Duration::from_secs(10);

/// Largest payload that is announced, and the largest read that is served ("Size constraints").
pub(super) const PAYLOAD_BYTES_MAX: u32 = 32 << 20;
/// A write with a larger payload than this ends the connection, where a smaller one is refused and
/// skipped.
pub(super) const PAYLOAD_BYTES_SKIPPED_MAX: u32 = 64 << 20;
/// Requests of one connection in flight.
pub(super) const SLOTS_MAX: usize = 256;
/// Data of one connection that arrives to be written, is being written or read, or waits to be
/// sent.
pub(super) const BUDGET_BYTES: usize = 8 << 20;
/// The part of it that a connection has for itself, no matter what others do: two windows of a
/// read.
pub(super) const RESERVE_BYTES: usize = 512 << 10;
const _: () = assert!(RESERVE_BYTES as u64 >= 2 * WINDOW_BYTES, "one is sent, one is read");
/// A write is done in pieces of at most this size, as they arrive.
pub(super) const PIECE_BYTES: usize = 4 << 20;
/// Pieces end at multiples of this on the disk.
pub(super) const PIECE_ALIGN: u64 = 64 << 10;
/// Replies of one connection that wait to be sent before no further request is taken.
pub(super) const REPLIES_QUEUED_MAX: usize = 1024;
/// Bytes handed to one send; what the send deadline is about.
pub(super) const BATCH_BYTES_MAX: usize = 1 << 20;
/// A read is planned and read in pieces of at most this size.
pub(super) const WINDOW_BYTES: u64 = 256 << 10;
/// Pieces after which other tasks run, if none of the pieces waits for anything.
pub(super) const WINDOWS_PER_TURN: u64 = 16;
/// Operations of one piece that run at once.
pub(super) const WINDOW_OPS_MAX: usize = 32;
/// Receive buffer of a connection: it starts small and grows for short payloads, of which one
/// receive then brings many.
pub(super) const RECEIVE_BYTES_MIN: usize = 4 << 10;
/// See [`RECEIVE_BYTES_MIN`].
pub(super) const RECEIVE_BYTES_MAX: usize = 64 << 10;
/// What is left of a payload is received straight into its own buffer if it is at least this long.
pub(super) const PAYLOAD_DIRECT_BYTES_MIN: usize = 16 << 10;
/// Maximum charge to the budget for writing zeros: a disk that has to write them out does so in
/// pieces of about this size.
pub(super) const ZEROES_CHARGE_BYTES: usize = 512 << 10;
/// Descriptors of one context in a reply to a block status request: as many as QEMU sends. Some
/// clients, virtnbdbackup for one, take one reply for all of a disk below 4 GiB.
pub(super) const STATUS_EXTENTS_MAX: usize = 128 << 10;
/// Descriptors of all contexts in a reply that are within [`STATUS_CHARGE_BYTES`].
pub(super) const STATUS_EXTENTS_CHARGED: usize = 8192;
/// What as many descriptors again are charged to the budget: in a list that may grow to twice what
/// it needs, encoded, and waiting to be sent. Without that much, a reply ends early.
pub(super) const STATUS_STEP_BYTES: usize = STATUS_EXTENTS_CHARGED * 32;
/// A block status request is surveyed in windows of this size, so that a list is short also where
/// every sector is an extent of its own.
pub(super) const STATUS_WINDOW_BYTES: u64 = 4 << 20;
/// The first piece of such a survey. Each next one is twice as long: a client that takes one
/// descriptor at a time, as QEMU does, asks for all of the disk each time.
pub(super) const STATUS_FIRST_BYTES: u64 = 64 << 10;
/// What a block status request is charged to the budget: the survey of a window, and its answer.
pub(super) const STATUS_CHARGE_BYTES: usize = 512 << 10;
/// Payload bytes within which a client that sends a payload must make progress.
pub(super) const PAYLOAD_STEP_BYTES: u64 = 64 << 10;
/// TLS handshakes of all clients in a second: each takes about a millisecond of a queue that has
/// disks to serve. Further clients wait, within the handshake's deadline.
pub(super) const TLS_HANDSHAKES: Rates = Rates { iops: 200, iops_burst: 50, bps: 0, bps_burst: 0 };

/// The limits that a caller may change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Maximum number of concurrent clients of an export, over all its addresses. Further ones are
    /// refused when they choose it.
    pub connections_max: usize,
    /// From the connection to the end of the handshake.
    pub handshake_deadline: Duration,
    /// From the first byte of a request to its last. Between requests a client may be idle forever.
    pub request_deadline: Duration,
    /// Time for a client to take a batch of replies (at most 1 MiB).
    pub send_deadline: Duration,
    /// Time for the requests in flight to end at shutdown.
    pub drain_deadline: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections_max: 256,
            handshake_deadline: Duration::from_secs(30),
            request_deadline: Duration::from_secs(30),
            send_deadline: Duration::from_secs(60),
            drain_deadline: Duration::from_secs(10),
        }
    }
}
