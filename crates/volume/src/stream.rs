//! A snapshot as a stream of bytes: whole, or what changed since another one, from one store into
//! another.
//!
//! ```text
//! send     maps of two snapshots ─▶ what differs ─▶ parts, one after the other
//! receive  parts ─▶ writes to a volume that has the older snapshot ─▶ the newer snapshot
//! ```
//!
//! docs/formats/stream.md specifies the bytes.
//!
//! Invariants
//! - I1 A step is applied to a volume that is exactly what the step goes on from, or to a new one.
//! - I2 The snapshot is taken only after the whole step was read and every sum was right. Until
//!   then the volume has no snapshot of it; what fails is taken back.
//! - I3 A snapshot is called the same wherever it is received ([`Origin`]), so that a step finds
//!   what it goes on from whatever the labels are, and in copies of copies.
//! - I4 What fails is taken back by the writer that did it, in its own time: what others made of
//!   the volume since is theirs.
//!
//! [`Origin`]: crate::format::snapshot::Origin

mod format;
#[cfg(test)]
mod page;
mod receive;
mod send;
#[cfg(test)]
mod tests;

pub(crate) use format::mend;
pub use receive::{ReceiveOptions, Received};
pub use send::Sent;
