//! Whether a reopened file is still what it was when it was closed.
//!
//! While a descriptor is open its locks keep writers out; without one they do not. The same
//! identity decides here as in the seal of an index ([`Identity`]): a different file, length or
//! time of the last write is an error. If only the change time differs, somebody may have written
//! and set the time of the last write back, or only changed a mode, an owner, a name or a link, as
//! backups do. Then, and if timestamps are too coarse to decide, the content decides: the format's
//! own proof, which reads what the map of the image depends on. An image without a proof (raw, or
//! not indexed yet) is assumed to be unchanged, with a warning.

use super::Handle;
use super::handle::Slot;
use crate::facts::{Facts, check_run_len};
use crate::kind::{FileKind, end_of};
use crate::lock::Locking;
use mica_block::{
    Error, ErrorKind, Identity, IoFuture, Result, Run, Store, StoreIdentity, Witness,
};
use mica_rt::{Buf, File};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

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
    let before = &slot.identity;
    if is_other_file(before, now) {
        return Verdict::Other("was replaced");
    }
    // Without locks, or if the image is shared with writers, changes are not ours to judge.
    if locking == Locking::On {
        if slot.refused.as_deref() == Some(now) {
            return Verdict::Refused;
        }
        if before.mtime_ns != now.mtime_ns {
            return Verdict::Other("was written to");
        }
    }
    if before.len != now.len {
        return Verdict::Other("changed its length");
    }
    let is_proved = before == now && now.proves_unchanged_since(slot.closed_ns);
    if locking == Locking::On && !is_proved { Verdict::Unproven } else { Verdict::Same }
}

pub(super) fn refused(path: &Path) -> Error {
    let path = path.display();
    let what = format!(
        "{path} was changed while it was in use: its tables are not what they were, though its \
         time says so; end what writes to it, and start mica again"
    );
    Error::new(ErrorKind::Io, what)
}

/// Assumes that the file at `path` is unchanged, though nothing proves that.
pub(super) fn accept_unproven(slot: &mut Slot, now: Identity, path: &Path) {
    if slot.identity != now {
        tracing::warn!(
            path = %path.display(),
            "its inode was changed while it was not open, and nothing shows whether its content \
             was, too: assuming that it was not"
        );
    }
    slot.identity = now;
}

/// Marks that a handle's file is being proved, for as long as this lives.
pub(crate) struct Proving {
    handle: Arc<Handle>,
    path: Arc<Path>,
}

impl Proving {
    /// The caller holds the lock of `handle`, which is that of `slot`.
    pub(super) fn begin(handle: &Arc<Handle>, slot: &mut Slot, path: &Arc<Path>) -> Self {
        slot.is_being_proved = true;
        Self { handle: Arc::clone(handle), path: Arc::clone(path) }
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        self.handle.lock().is_being_proved = false;
    }
}

/// A reopened file that has to be proved by its content. Nobody else opens the handle in the
/// meantime.
pub(crate) struct Unproven {
    pub(super) file: Arc<File>,
    pub(super) now: Identity,
    pub(super) proving: Proving,
}

impl Unproven {
    /// The file, for anything but its content.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// The file, once its content proves that it is unchanged.
    ///
    /// # Errors
    /// `Io` if it is not; else any error of reading it.
    pub(crate) async fn prove(self) -> Result<Arc<File>> {
        let Self { file, now, proving } = self;
        let Proving { handle, path } = &proving;
        if let Some(proof) = handle.proof.get().cloned() {
            let (file, handle) = (Arc::clone(&file), Arc::clone(handle));
            let reopened = Reopened { file, handle, path: Arc::clone(path) };
            if !proof.holds(Arc::new(reopened)).await? {
                proving.handle.lock().refused = Some(Box::new(now));
                return Err(refused(path));
            }
        }
        handle.lock().identity = now;
        Ok(file)
    }
}

/// A file that is being proved.
struct Reopened {
    file: Arc<File>,
    handle: Arc<Handle>,
    path: Arc<Path>,
}

impl Reopened {
    fn facts(&self) -> Facts<'_> {
        Facts { file: &self.file, path: &self.path, kind: self.handle.kind }
    }
}

impl Store for Reopened {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() || end_of(offset, buf.len() as u64).is_none() {
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        self.handle.align().read(&self.file, buf, offset)
    }

    fn len(&self) -> Result<u64> {
        self.facts().len()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        check_run_len(len)?;
        self.facts().run_at(offset.bytes(), len)
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn identity(&self) -> StoreIdentity {
        self.handle.store_identity()
    }

    /// Of a device nothing is known.
    fn reads_unwritten_as_zeros(&self) -> bool {
        self.handle.kind == FileKind::Regular
    }

    fn witness(&self) -> Witness {
        self.facts().witness_now()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.facts().allocated_bytes()
    }
}
