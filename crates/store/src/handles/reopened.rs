//! A reopened file that only its content proves to be what it was ([`super::slot`]).

use super::Handle;
use super::slot::{Slot, refused};
use crate::facts::{Facts, check_run_len};
use crate::kind::{FileKind, end_of};
use mica_block::{Identity, IoFuture, Result, Run, Store, StoreIdentity, Witness};
use mica_rt::{Buf, File};
use mica_units::HostOffset;
use std::path::Path;
use std::sync::Arc;

/// Marks that a handle's file is being proved, for as long as this lives.
pub(crate) struct Proving {
    handle: Arc<Handle>,
    path: Arc<Path>,
}

impl Proving {
    /// The caller holds the lock of `handle`, which is that of `slot`.
    pub(super) fn begin(handle: &Arc<Handle>, slot: &mut Slot, path: &Arc<Path>) -> Self {
        slot.known.is_being_proved = true;
        Self { handle: Arc::clone(handle), path: Arc::clone(path) }
    }
}

impl Drop for Proving {
    fn drop(&mut self) {
        self.handle.lock().known.is_being_proved = false;
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
                proving.handle.lock().known.refused = Some(Box::new(now));
                return Err(refused(path));
            }
        }
        handle.lock().known.identity = now;
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
