//! One file that a store reads, open or not.

use super::reopened::{self, Verdict};
use crate::kind::{FileKind, not_an_image, open_flags};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use crate::stamp::now_ns;
use mica_block::{Error, ErrorKind, Identity, ProofSlot, Result, StoreIdentity};
use mica_rt::{Access, File};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One file, open or not.
pub(crate) struct Handle {
    pub(super) slot: Mutex<Slot>,
    /// Whether it was used since the clock's hand last passed.
    pub(super) used: AtomicBool,
    /// Where it is in the ring; read and written under the ring's lock.
    pub(super) position: AtomicUsize,
    pub(super) path: PathBuf,
    pub(super) kind: FileKind,
    access: Access,
    /// Whether QEMU's locks are taken each time it is opened.
    locking: Locking,
    /// How its content is proved, once its format says so.
    pub(super) proof: ProofSlot,
}

/// What a handle has, and what it last knew of its file.
pub(super) struct Slot {
    pub(super) file: Option<Arc<File>>,
    /// The file's identity when its locks were last held; for a device without its length.
    pub(super) identity: Identity,
    /// When it was last closed, which released its locks.
    pub(super) closed_ns: i128,
    /// The file's identity when its content was found to be different, which is rare.
    pub(super) refused: Option<Box<Identity>>,
    pub(super) is_being_proved: bool,
}

impl Handle {
    pub(crate) fn new(located: &Located, access: Access, locking: Locking) -> Self {
        let slot = Slot {
            file: None,
            identity: located.identity(located.regular_len()),
            closed_ns: now_ns(),
            refused: None,
            is_being_proved: false,
        };
        Self {
            slot: Mutex::new(slot),
            used: AtomicBool::new(false),
            position: AtomicUsize::new(0),
            path: located.path().to_owned(),
            kind: located.kind(),
            access,
            locking,
            proof: ProofSlot::default(),
        }
    }

    pub(crate) fn proof(&self) -> &ProofSlot {
        &self.proof
    }

    pub(crate) fn path(&self) -> &std::path::Path {
        &self.path
    }

    pub(crate) fn kind(&self) -> FileKind {
        self.kind
    }

    pub(crate) fn store_identity(&self) -> StoreIdentity {
        StoreIdentity::from(&self.lock().identity)
    }

    /// Opens the file, takes its locks again and compares it with what it was (I3); returns its new
    /// identity if that does not prove it to be the same.
    pub(super) fn open_file(
        &self,
        slot: &mut Slot,
    ) -> std::result::Result<(File, Option<Identity>), OpenFailure> {
        let failed = |error: Errno| match error {
            Errno::MFILE | Errno::NFILE => OpenFailure::NoDescriptor(error),
            Errno::STALE => OpenFailure::Other(self.replaced("was replaced")),
            error => {
                let what = format!("reopening {}", self.path.display());
                OpenFailure::Other(Error::from_io(what, error.into()))
            }
        };
        let mut located = Located::find_raw(&self.path, OFlags::empty())
            .map_err(failed)?
            .map_err(|what| OpenFailure::Other(not_an_image(&self.path, what)))?;
        let found = located.identity(located.regular_len());
        if located.kind() != self.kind || reopened::is_other_file(&slot.identity, &found) {
            return Err(OpenFailure::Other(self.replaced("was replaced")));
        }
        let fd = located.open(open_flags(self.access)).map_err(failed)?;
        let file = File::new(fd, self.access);
        lock::take(&file, &self.path, Role::Reader, self.locking).map_err(OpenFailure::Other)?;
        if self.locking == Locking::On {
            // The locks kept writers out except while there was no descriptor.
            located.refresh(&file).map_err(OpenFailure::Other)?;
        }
        let now = located.identity(located.regular_len());
        match reopened::judge(slot, &now, self.locking) {
            Verdict::Same => Ok((file, None)),
            Verdict::Unproven if self.proof.get().is_some() => Ok((file, Some(now))),
            Verdict::Unproven => {
                self.accept_unproven(slot, now);
                Ok((file, None))
            }
            Verdict::Other(how) => Err(OpenFailure::Other(self.replaced(how))),
            Verdict::Refused => Err(OpenFailure::Other(self.refused())),
        }
    }

    /// Opens the file outside the cache, for one call that reads none of its content.
    pub(crate) fn open_beside(&self) -> Result<File> {
        let opened = self.open_file(&mut self.lock());
        opened.map(|(file, _)| file).map_err(|failure| match failure {
            OpenFailure::Other(error) => error,
            OpenFailure::NoDescriptor(error) => {
                Error::from_io(format!("reopening {}", self.path.display()), error.into())
            }
        })
    }

    fn replaced(&self, how: &str) -> Error {
        let path = self.path.display();
        Error::new(ErrorKind::Io, format!("{path} {how} while it was in use"))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
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
