//! One file that stores read, open or not.

use super::slot::{Facts, Slot, Verdict, accept_unproven, is_other_file, judge, refused, replaced};
use crate::direct::Alignment;
use crate::kind::{FileKind, not_an_image};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use crate::stamp::now_ns;
use mica_block::{Error, Identity, ProofSlot, Result, StoreIdentity};
use mica_rt::{Access, File};
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// How a file is read.
#[derive(Clone, Copy)]
pub(crate) struct Mode {
    pub(crate) access: Access,
    /// Whether QEMU's locks are taken.
    pub(crate) locking: Locking,
}

/// One file, open or not. Among thousands of files a read finds nothing of its file in the
/// processor's cache: so what it looks at stands first, in one line.
#[repr(C, align(64))]
pub(crate) struct Handle {
    pub(super) slot: Mutex<Slot>,
    align: Alignment,
    /// Whether it was used since the clock's hand last passed.
    pub(super) used: AtomicBool,
    /// Where it is in the ring; read and written under the ring's lock.
    pub(super) position: AtomicUsize,
    pub(super) kind: FileKind,
    /// The same each time it is opened; known without the slot, which may be held while a file
    /// system hangs.
    store_identity: StoreIdentity,
    access: Access,
    /// Whether QEMU's locks are taken each time it is opened.
    locking: Locking,
    /// How its content is proved, once its format says so.
    pub(super) proof: ProofSlot,
}

impl Handle {
    pub(super) fn new(located: &Located, mode: Mode, align: Alignment) -> Self {
        let identity = located.identity(located.regular_len());
        let known = Box::new(Facts {
            identity,
            closed_ns: now_ns(),
            refused: None,
            is_being_proved: false,
        });
        Self {
            slot: Mutex::new(Slot { file: None, known }),
            used: AtomicBool::new(false),
            position: AtomicUsize::new(0),
            kind: located.kind(),
            store_identity: StoreIdentity::from(&identity),
            access: mode.access,
            locking: mode.locking,
            align,
            proof: ProofSlot::default(),
        }
    }

    pub(crate) fn proof(&self) -> &ProofSlot {
        &self.proof
    }

    pub(crate) fn align(&self) -> Alignment {
        self.align
    }

    pub(crate) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(crate) fn store_identity(&self) -> StoreIdentity {
        self.store_identity
    }

    /// The file, if it is open, and its identity then.
    pub(super) fn opened(&self) -> Option<(Arc<File>, Identity)> {
        let slot = self.lock();
        slot.file.as_ref().map(|file| (Arc::clone(file), slot.known.identity))
    }

    /// Whether a file that has this identity `now` is certain to be the one that this handle knows,
    /// unchanged.
    pub(super) fn is_still(&self, now: &Identity) -> bool {
        let slot = self.lock();
        let is_watched = slot.file.is_some() || self.locking != Locking::On;
        slot.known.identity == *now
            && !slot.known.is_being_proved
            && (is_watched || now.proves_unchanged_since(slot.known.closed_ns))
    }

    /// Opens the file at `path`, takes its locks again and compares it with what it was (I3);
    /// returns its new identity if that does not prove it to be the same.
    pub(super) fn open_file(
        &self,
        slot: &mut Slot,
        path: &Path,
    ) -> std::result::Result<(File, Option<Identity>), OpenFailure> {
        let failed = |error: Errno| match error {
            Errno::MFILE | Errno::NFILE => OpenFailure::NoDescriptor(error),
            Errno::STALE => OpenFailure::Other(replaced(path, "was replaced")),
            error => {
                let what = format!("reopening {}", path.display());
                OpenFailure::Other(Error::from_io(what, error.into()))
            }
        };
        let mut located = Located::find_raw(path, OFlags::empty())
            .map_err(failed)?
            .map_err(|what| OpenFailure::Other(not_an_image(path, what)))?;
        let found = located.identity(located.regular_len());
        if located.kind() != self.kind || is_other_file(&slot.known.identity, &found) {
            return Err(OpenFailure::Other(replaced(path, "was replaced")));
        }
        let file = located.open_reader(self.access).map_err(failed)?;
        lock::take(&file, path, Role::Reader, self.locking).map_err(OpenFailure::Other)?;
        if self.locking == Locking::On {
            // The locks kept writers out except while there was no descriptor.
            located.refresh(&file).map_err(OpenFailure::Other)?;
        }
        let now = located.identity(located.regular_len());
        match judge(slot, &now, self.locking) {
            Verdict::Same => Ok((file, None)),
            Verdict::Unproven if self.proof.get().is_some() => Ok((file, Some(now))),
            Verdict::Unproven => {
                accept_unproven(slot, now, path);
                Ok((file, None))
            }
            Verdict::Other(how) => Err(OpenFailure::Other(replaced(path, how))),
            Verdict::Refused => Err(OpenFailure::Other(refused(path))),
        }
    }

    /// Opens the file outside the cache, for one call that reads none of its content.
    pub(crate) fn open_beside(&self, path: &Path) -> Result<File> {
        let opened = self.open_file(&mut self.lock(), path);
        opened.map(|(file, _)| file).map_err(|failure| match failure {
            OpenFailure::Other(error) => error,
            OpenFailure::NoDescriptor(error) => {
                Error::from_io(format!("reopening {}", path.display()), error.into())
            }
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock()
    }

    #[inline]
    pub(super) fn mark_used(&self) {
        // Read first, so that queues that share a layer do not bounce its cache line.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }
}

pub(super) enum OpenFailure {
    /// The process or the system has no descriptor left.
    NoDescriptor(Errno),
    Other(Error),
}
