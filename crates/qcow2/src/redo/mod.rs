//! What acknowledged writes changed in the metadata since the last group, written down where it
//! outlives the process: a server that is killed under a running guest has lost nothing that the
//! guest was told is written, though nothing of it was flushed. [`crate::takeover`] reads it;
//! [`super::logging`] says when a writer has one.
//!
//! ```text
//! 0      header: magic | salt | name | boot | start | first number | next name | runs | crc
//! 4096   two halves, each: group of records | group | …
//!        number u64 | bytes u32 | crc u32 | records: at u64 | bytes u32 | kind u32 | content
//! ```
//!
//! Groups are read from `start` on until a number or a crc is wrong, and then from the beginning of
//! the other half. Each group of the guest's flushes begins in the other half if nothing there
//! counts any more, so that the log does not grow while it is never empty.
//!
//! A record is a range of the image file as it is to be; groups are applied in their order. What
//! one write changed, with all that it needs, is one group, which is there wholly or not at all.
//! Nothing of this is ever made durable: after a power cut the log is of another boot, and
//! unflushed writes are lost as they may be. Each group says what tells whether the data that it
//! links was lost without one ([`mica_block::Witness`]).
//!
//! The image names the log in its autoclear bits 32 to 63. Whoever else opens the image for writing
//! clears bits that it does not know, and a log that is not named is not believed. Who reopens it
//! for writing may leave them: I5 is for that. With every group that a
//! flush makes durable the name changes, so that it names a state, not only a writer: an older copy
//! that is put back into the file names a log that is no more. The image gets the new name when the
//! group's pages are in the file, and the log goes by both names from before that until the group
//! is durable: a writer may die at any moment between.
//!
//! ```text
//! log: old, new ─▶ pages of the group ─▶ image: new ─▶ all durable ─▶ log: new, without the group
//! ```
//!
//! Invariants
//! - I1 A change is in the log before it is in the file, and before the write that made it is
//!   acknowledged: to apply the log leads to a state that is not older than the file.
//! - I2 A change leaves the log only when it is durable: with the group that took it.
//! - I3 A log in which something is missing is no log: where it cannot be written it is removed,
//!   and a warning says what that means.
//! - I4 The image has a name only while the file has all that the log under this name goes on from.
//! - I5 A page that the log changes has in the file, while this log is named, what it had when it
//!   was changed first, or what a group that was taken made of it, or in some sectors this and in
//!   others that. The log has a sum of each ([`Expected`]) before the page may be written: who
//!   takes over knows by that whether somebody else wrote meanwhile who left the name as it is. A
//!   page that is written through comes into the log as it is then.
//! - I6 What the log calls unused is linked by nothing: neither in the file nor in the log. So what
//!   is linked past the log, by the header, is told before ([`PageState::log_footing`]).
//!
//! What a name does not tell is a copy that was made while the writer ran, since its last flush:
//! put back in place of the image, it gets what the log has of the metadata, which is sound, but
//! where clusters were new after the copy their data is missing.

mod baseline;
mod dropped;
mod evidence;
mod expected;
mod format;
mod found;
mod log;
mod logging;
mod over;
mod recover;
mod replay;

pub(crate) use baseline::{HeaderFields, HeaderState, LogBaseline, SpaceState};
pub(crate) use dropped::{DroppedUnits, dropped_units, ranges_of};
pub(crate) use format::LOG_NAME_SHIFT;
pub(crate) use log::Mark;
pub(crate) use logging::{HeaderLogged, Logging};
pub(crate) use recover::{read_over, take_over, warn_of_log};

/// When a dirty page is written, within its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Before any link: refcounts, and tables that nothing durable names yet.
    Early,
    /// After the data and refcounts of the group are durable: links.
    Late,
}
