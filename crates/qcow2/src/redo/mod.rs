//! The redo log: what acknowledged writes changed in the metadata since the last group, written
//! down where it outlives the process. A server that is killed under a running guest has lost
//! nothing that the guest was told is written, though nothing of it was flushed.
//!
//! ```text
//! written  logging (when a writer has a log) ─▶ log ─▶ format
//! read     recover (the next process to open the image) ─▶ found ─▶ replay, over
//!                                                       └▶ evidence: may it be applied?
//! ```
//!
//! `docs/formats/redo-log.md` has the bytes. A log is groups of records. What one write changed,
//! with all that it needs, is one group, which is there wholly or not at all. Nothing of this is
//! ever made durable: after a power cut the log is of another boot, and unflushed writes are lost
//! as they may be.
//!
//! The image names the log in its autoclear bits 32 to 63. Whoever else opens the image for writing
//! clears bits that it does not know, and a log that is not named is not believed. QEMU leaves them
//! where it opens an image for reading and reopens it for writing, as a commit into it does. With
//! every group that a flush makes durable the name changes, so that it names a state, not only a
//! writer: an older copy that is put back into the file names a log that is no more. The image gets
//! the new name when the group's pages are in the file, and the log goes by both names from before
//! that until the group is durable: a writer may die at any moment between.
//!
//! ```text
//! log: old, new ─▶ pages of the group ─▶ image: new ─▶ all durable ─▶ log: new, without the group
//! ```
//!
//! Invariants of who writes
//! - W1 A change is in the log before it is in the file, and before the write that made it is
//!   acknowledged: to apply the log leads to a state that is not older than the file.
//! - W2 A change leaves the log only when it is durable: with the group that took it, once the
//!   image has the name that goes with that.
//! - W3 A log in which something is missing is no log: where it cannot be written it is removed,
//!   and a warning says what that means.
//! - W4 The image has a name only while the file has all that the log under this name goes on from.
//! - W5 A page that the log changes has in the file, while this log is named, what it had when it
//!   was changed first, or what a group that was taken made of it, or in some sectors this and in
//!   others that. The log has a sum of each before the page may be written ([`expected`]).
//! - W6 What the log calls unused is linked by nothing, and its counts are in the log or durable.
//! - W7 The header is written only with a [`HeaderLogged`], which this room alone makes: its fields
//!   that can move are in one record, as they are and as they are about to be ([`baseline`]).
//! - W8 What a change takes away from the guest is zeros in the file before the log says so
//!   ([`dropped`]).
//!
//! Invariants of who reads
//! - R1 No evidence, no write. A log is applied only if it is of this start of the machine, the
//!   image names it, it says what it goes on from, the file is that, and nothing contradicts it:
//!   the header, the length, the pages (W5), what is dropped (W8) and what is linked, which must be
//!   counted ([`evidence`]), and the file system, which must not have lost anything
//!   ([`mica_block::Witness`]). A log that says nothing changes nothing.
//! - R2 Otherwise it is set aside as a whole: what another program made durable outranks what this
//!   one did not. Where something that was acknowledged is lost with it, one warning says so.
//! - R3 A power cut meanwhile leaves an image as a power cut under the writer does: data, then
//!   counts and tables that nothing names yet, then tables that got links, then links; each durable
//!   before the next begins.
//! - R4 What is unused is freed only when the image names no log any more: a process that dies
//!   before would have it freed again, after somebody else was given it.
//! - R5 Who only reads puts nothing into the image and leaves the log as it is.
//!
//! What is not noticed: a program that leaves the name, allocates and frees again until the tables
//! are as they were, and has meanwhile written over clusters that the log links; and a copy that
//! was made while the writer ran, since its last flush, and is put back in place of the image: it
//! gets what the log has of the metadata, which is sound, but where clusters were new after the
//! copy their data is missing. The image stays sound in both cases.

mod baseline;
mod dropped;
mod evidence;
mod expected;
mod format;
mod found;
mod log;
mod logging;
mod over;
#[cfg(test)]
mod page;
mod recover;
mod replay;

pub(crate) use baseline::{HeaderFields, HeaderState, LogBaseline, SpaceState};
pub(crate) use dropped::{DroppedUnits, dropped_units, ranges_of};
pub(crate) use format::LOG_NAME_SHIFT;
pub(crate) use log::Mark;
pub(crate) use logging::{HeaderLogged, Logging};
pub(crate) use recover::warn_of_log;
pub use recover::{read_over, replay_redo_log};

/// When a dirty page is written, within its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Before any link: refcounts, and tables that nothing durable names yet.
    Early,
    /// After the data and refcounts of the group are durable: links.
    Late,
}
