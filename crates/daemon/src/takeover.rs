//! A new process takes over the listening sockets of the one that serves, opens its images and
//! carries on. Guests only wait.
//!
//! ```text
//! new: reads its configuration     ─ POST /v1/takeover, with a socket's path ─▶ old
//! old: keeps serving               ─ its listening sockets, and the disks
//!                                    that were added, drained or removed ────▶ new
//! new: enters its sandbox          ─ ready ──────────────────────────────────▶ old
//! old: stops, closes its images    ─ closed ─────────────────────────────────▶ new
//! new: opens them                  ─ serving ────────────────────────────────▶ old
//! new: serves; old: ends
//! ```
//!
//! Invariants
//! - I1 At most one of the two has the images open; their locks ensure it as well.
//! - I2 The listening sockets are always open in at least one of the two, and their files stay:
//!   clients that connect meanwhile wait.
//! - I3 Until the old one learns that the new one serves, it reopens the images and keeps
//!   serving if the new one fails, ends, or takes longer than `SERVE_LIMIT`.
//! - I4 Both agree on the outcome: after that limit the old one reads nothing more from the new
//!   one, which notices because it can no longer send.
//! - I5 A process that is told to stop ends soon. The old one closes its images, which ends the
//!   takeover; if it has closed them already, it leaves everything to the new one. The new one
//!   leaves everything to the old one.
//! - I6 The new one answers no client before it has told the old one: until then the old one may
//!   come back, and would not know what the new one had acknowledged and not flushed. This holds
//!   for images without a log of acknowledged writes as well.
//! - I7 The old one may die at any time: the new one, which has its sockets, carries on as after
//!   any death of a server.
//!
//! - I8 What was done by command stays done: disks that were added are served by the new one, too,
//!   and those that were drained or removed are not, as somebody else may have their images by now.
//!   The new one's configuration alone says which images may be opened: its sandbox is not widened
//!   for what the old one tells.
//!
//! Sockets that the new process no longer serves are closed, and their files removed.

mod channel;
mod new_process;
mod old_process;
mod rendezvous;

pub(crate) use new_process::{Begun, Old, Takeover};
pub(crate) use rendezvous::{FOLDER as RENDEZVOUS_FOLDER, SOCKET as RENDEZVOUS_SOCKET};

use channel::Message;
use mica_block::{Error, ErrorKind};
use std::time::Duration;

/// Limit for an answer from the old process, which still serves.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

fn unexpected(message: &Message) -> Error {
    let context = format!("unexpected message in a takeover: {message:?}");
    Error::new(ErrorKind::Invalid, context)
}
