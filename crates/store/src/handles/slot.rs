//! Whether a reopened file is still what it was when it was closed.
//!
//! While a descriptor is open its locks keep writers out; without one they do not. The same
//! identity decides here as in the seal of an index ([`Identity`]): a different file, length or
//! time of the last write is an error. If only the change time differs, somebody may have written
//! and set the time of the last write back, or only changed a mode, an owner, a name or a link, as
//! backups do. Then, and if timestamps are too coarse to decide, the content decides: the format's
//! own proof, which reads what the map of the image depends on. An image without a proof (raw, or
//! not indexed yet) is assumed to be unchanged, with a warning.

use crate::lock::Locking;
use mica_block::{Error, ErrorKind, Identity};
use mica_rt::File;
use std::path::Path;
use std::sync::Arc;

/// What a handle has, and what it last knew of its file. Each read looks at the former.
pub(super) struct Slot {
    pub(super) file: Option<Arc<File>>,
    pub(super) known: Box<Facts>,
}

/// What a handle last knew of its file.
pub(super) struct Facts {
    /// The file's identity when its locks were last held; for a device without its length.
    pub(super) identity: Identity,
    /// When it was last closed, which released its locks.
    pub(super) closed_ns: i128,
    /// The file's identity when its content was found to be different, which is rare.
    pub(super) refused: Option<Box<Identity>>,
    pub(super) is_being_proved: bool,
}

/// The result of checking a reopened file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Verdict {
    Same,
    /// The content has to decide.
    Unproven,
    /// It is a different one; what happened to it.
    Other(&'static str),
    /// Its content was found to be different.
    Refused,
}

pub(super) fn is_other_file(before: &Identity, now: &Identity) -> bool {
    (before.device, before.inode) != (now.device, now.inode)
}

pub(super) fn judge(slot: &Slot, now: &Identity, locking: Locking) -> Verdict {
    let before = &slot.known.identity;
    if is_other_file(before, now) {
        return Verdict::Other("was replaced");
    }
    // Without locks, or if the image is shared with writers, changes are not ours to judge.
    if locking == Locking::On {
        if slot.known.refused.as_deref() == Some(now) {
            return Verdict::Refused;
        }
        if before.mtime_ns != now.mtime_ns {
            return Verdict::Other("was written to");
        }
    }
    if before.len != now.len {
        return Verdict::Other("changed its length");
    }
    let is_proved = before == now && now.proves_unchanged_since(slot.known.closed_ns);
    if locking == Locking::On && !is_proved { Verdict::Unproven } else { Verdict::Same }
}

pub(super) fn refused(path: &Path) -> Error {
    let path = path.display();
    let what = format!(
        "{path} was changed while it was in use: its tables differ, although its timestamps do \
         not; stop what writes to it, and restart mica"
    );
    Error::new(ErrorKind::Io, what)
}

/// Assumes that the file at `path` is unchanged, though nothing proves that.
pub(super) fn accept_unproven(slot: &mut Slot, now: Identity, path: &Path) {
    if slot.known.identity != now {
        tracing::warn!(
            path = %path.display(),
            "its inode changed while it was not open, and so may its content: assuming that it did \
             not"
        );
    }
    slot.known.identity = now;
}

pub(super) fn replaced(path: &Path, how: &str) -> Error {
    let path = path.display();
    Error::new(ErrorKind::Io, format!("{path} {how} while it was in use"))
}
