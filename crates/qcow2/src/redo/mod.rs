//! The redo log: the changes of metadata by acknowledged writes since the last group, recorded
//! where they outlive the process. If a server is killed under a running guest, no write that was
//! acknowledged to the guest is lost, even if none of it was flushed.
//!
//! ```text
//! written  logging (when a writer has a log) ─▶ log ─▶ format
//! read     recover (the next process to open the image) ─▶ found ─▶ replay, over
//!                                                       └▶ evidence: may it be applied?
//! ```
//!
//! `docs/formats/redo-log.md` specifies the bytes. A log is a sequence of groups of records. The
//! changes of one write, or of several that link at the same time, with everything that they need,
//! form one group, which is present as a whole or not at all. None of this is ever made durable:
//! after a power cut the log belongs to another boot, and unflushed writes are lost, as they may
//! be.
//!
//! A log that becomes long is compacted: what it has of the changes since the last group is written
//! once more, as the pages are now, into the half of its memory that is free, as one group. No sync
//! is needed for that, and no other name, and the next process applies it like any log.
//!
//! The image names the log in its autoclear bits 32 to 63. Any other program that opens the image
//! for writing clears bits that it does not know, and a log that is not named is not trusted. QEMU
//! keeps them if it opens an image for reading and reopens it for writing, as a commit into it
//! does. The name changes with every group that a flush makes durable, so that it identifies a
//! state and not only a writer: an older copy that is put back into the file names a log that no
//! longer exists. The image gets the new name when the group's pages are in the file, and the log
//! answers to both names from before that until the group is durable: a writer may die at any
//! moment in between. If the guest does not flush, the name changes without a group, soon after a
//! change ([`write`](crate::write), `renaming.rs`), so that a copy that is made meanwhile
//! has no log either.
//!
//! ```text
//! log: old, new ─▶ pages of the group ─▶ image: new ─▶ all durable ─▶ log: new, without the group
//! log: old, new ───────────────────────▶ image: new ───────────────▶ log: new, with all it has
//! ```
//!
//! Invariants for the writer
//! - W1 A change is in the log before it is in the file, and before the write that made it is
//!   acknowledged: applying the log leads to a state that is not older than the file.
//! - W2 A change leaves the log only when it is durable: with the group that took it, once the
//!   image has the matching name.
//! - W3 A log with a gap is worthless: if it cannot be written it is removed, and a warning states
//!   the consequence.
//! - W4 The image has a name only while the file holds the whole baseline of the log of that name.
//!   If the log is lost, the name leaves the image before anything else is written ([`logging`]).
//! - W5 While the log is named, each page that it changes has in the file the contents from before
//!   the first change, or those that a group that was taken gave it, or some sectors of one and
//!   some of the other. The log has a sum of each before the page may be written ([`expected`]).
//! - W6 Clusters that the log calls unused are linked by nothing, and their counts are in the log
//!   or durable.
//! - W7 The header is written only with a [`HeaderLogged`], which only this module creates: the
//!   fields that can move are in one record, as they are and as they are about to be
//!   ([`baseline`]).
//! - W8 Bytes that a change takes away from the guest are zeros in the file before the log records
//!   the change ([`dropped`]).
//! - W9 A log is compacted only while no group is being made durable, no page is being written
//!   outside of a group, and while its pages have no change that is not to be in it: one that is
//!   acknowledged only after a flush.
//!
//! Invariants for recovery
//! - R1 No evidence, no write. A log is applied only if it is of this boot of the machine, the
//!   image names it, it records its baseline, the file matches that, and nothing contradicts it:
//!   the header, the length, the pages (W5), the dropped bytes (W8), the linked clusters, which
//!   must be counted ([`evidence`]), and the file system, which must not have lost anything
//!   ([`mica_block::Witness`]). An empty log changes nothing.
//! - R2 Otherwise it is set aside as a whole: what another program made durable outranks what this
//!   one did not. If acknowledged writes are lost with it, one warning says so; also where the
//!   image names no log any more, and the file lacks what the log there has.
//! - R3 A power cut during recovery leaves an image as a power cut under the writer does: data,
//!   then counts and tables that nothing names yet, then tables that got links, then links; each
//!   durable before the next begins.
//! - R4 Unused clusters are freed only when the image no longer names a log: if the process died
//!   earlier, they would be freed a second time, after they were given to somebody else.
//! - R5 A process that only reads writes nothing to the image and leaves the log as it is.
//! - R6 A log that may lack its last groups changes nothing, as the file may have pages of them:
//!   one that is a copy, that was changed after its last write (by its own record of the time), or
//!   that has fewer groups than its header tells.
//! - R7 Until a process begins to replay the log, which it records first, a page has nothing that
//!   the log makes of it but what the writer recorded that it would write (W5). Anything else is
//!   another program's work, which gave the same cluster the same place and its own content: an
//!   allocator that takes the first free cluster does that, and in a data file the place of a
//!   cluster is always the same. A replay that was interrupted wrote the first of its pages, in
//!   their order, and no others.
//!
//! Not detected: a program that keeps the name, allocates and frees until the tables are as
//! they were, and in the meantime has overwritten clusters that the log links; and a copy that
//! was begun in the last moment of the writer's life, when the image had its last name already,
//! and is put back in place of the image: it gets the log's metadata, which is sound, but the
//! data of clusters that were new after the copy is missing; and zeros that a program which
//! keeps the name writes where the file has zeros already, or writes over with something and
//! makes zeros again, so that no table changes: what the log has there is applied, though it is
//! older (the time of the file's last change tells nothing: writes that the kernel still
//! carries out for a dead process change it, too); and a program that makes the links of a
//! group that was being written, or replayed, when its process died. The image stays sound in
//! these cases. It does not if a program undoes such a link and gives the cluster to another
//! place, whose table the log does not have: both places then have it. (An image with lazy
//! refcounts is searched for that: see [`evidence`], I3.) Nor is an older copy of
//! the log detected that is written into the log's own file within a second of its last write.

mod baseline;
mod changed;
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
pub(crate) use format::{LOG_NAME_SHIFT, names_log};
pub(crate) use log::Mark;
pub(crate) use logging::{HeaderLogged, Logging};
pub(crate) use recover::{end_log_of_frozen, warn_of_log};
pub use recover::{read_over, replay_redo_log};

/// When a dirty page is written, within its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Before any link: refcounts, and tables that nothing durable names yet.
    Early,
    /// After the data and refcounts of the group are durable: links.
    Late,
}
