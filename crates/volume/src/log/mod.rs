//! The log of acknowledged writes on this machine: a file or a device, which the volumes that one
//! process serves share. A record stays in it until the extent that has it, and all before it, are
//! answered.
//!
//! ```text
//! +--------+-----------+-----------+-----------+- - -+
//! | header | segment A | segment B | free      |     |    a segment belongs to one volume
//! +--------+-----------+-----------+-----------+- - -+
//!            └▶ header, group, group, ..        a group: records that were written together
//! ```
//!
//! docs/formats/log.md specifies the bytes, and argues why what is found is a prefix.
//!
//! Words: a **log** is what one volume has on the device, from [`LogDevice::start`] until it is
//! ended or set aside. Its **tail** is the segment that it appends to. A change is **written** when
//! the file has it, and survives the death of the process; it is **durable** after the next sync.
//!
//! Invariants
//! - I1 Bytes that count are never written again: a group begins at a block of its own, and a log
//!   that goes on begins a new segment.
//! - I2 What is found of a log is its records from the one asked for on, without a gap, up to some
//!   record; everything that was durable is in it.
//! - I3 A segment is used again only when a newer segment of its log is durable, or nothing else of
//!   its log is left. So a log never forgets the writers that it names, and one that was ended or
//!   set aside does not come back.
//! - I4 After a write or a sync failed, nothing on the device is acknowledged any more.
//! - I5 No lock is held across I/O. Lock order: a log's tail, then the device's slots.
//! - I6 There is always a segment in which a log that is found can name the process that goes on
//!   with it ([`slots`]).
//! - I7 A log that has lost what was durable is not gone on with: each segment says up to where its
//!   log was durable when it was begun, and what is behind a damaged header belongs to any log that
//!   may have had it.

mod appender;
mod background;
mod begin;
mod chain;
mod create;
mod device;
mod format;
mod group;
mod handle;
#[cfg(test)]
mod page;
mod promised;
mod record;
mod scan;
mod slots;
mod survey;
mod tail;

pub use appender::NotPushed;
pub use begin::Found;
pub(crate) use begin::NewLog;
pub use device::LogDevice;
pub use handle::{Log, Room, Ticket};
pub(crate) use promised::PromisedStart;
pub use record::Record;
pub use survey::{DropLog, LogSummary};
