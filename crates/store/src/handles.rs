//! A bounded cache of open descriptors.
//!
//! Every [`FileStore`](crate::FileStore) has a [`Handle`]: it knows which file it is and may have
//! that file open. [`Handles`] bounds how many have. The fast path of a read is one lock of the
//! handle that nobody else holds for longer than it takes to clone an `Arc`.
//!
//! ```text
//! get ─▶ handle open ──────────────────────────────▶ clone the Arc
//!     └▶ closed ─▶ room, or an idle handle closed ──▶ open, compare with what it was, keep
//!               │                                    └▶ stamps prove nothing: the caller proves
//!               │                                       the content, then it is kept
//!               └▶ all are busy, or it is being proved ─▶ the caller waits and asks again
//! ```
//!
//! Invariants
//! - I1 No more handles are open than the bound: room is reserved before a file is opened.
//! - I2 Only an idle handle is closed to make room: one whose file no operation holds. So closing
//!   it frees its descriptor at once.
//! - I3 A reopened handle is the same file as before ([`reopened`]). Otherwise the read fails and
//!   says so. It fails as well if the image's locks cannot be taken again ([`crate::lock`]).
//! - I4 A handle is in the ring if and only if it has a file or its opener holds its lock.
//!
//! Locks: a handle's `slot`, then the ring. Under the ring other handles are only tried.

mod reopened;

pub(crate) use reopened::Unproven;

use crate::in_place::InPlace;
use crate::kind::{FileKind, no_direct, not_an_image, open_flags};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use crate::stamp::now_ns;
use mica_block::{Error, ErrorKind, Identity, ProofSlot, Result, StoreIdentity};
use mica_rt::{Access, File};
use reopened::{Proving, Verdict};
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bounded cache of open descriptors, shared by all stores of a process.
pub struct Handles {
    bound: usize,
    /// For the files that are written.
    in_place: InPlace,
    ring: Mutex<Ring>,
}

/// Whether executors may make small writes by themselves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritesInPlace {
    /// They may.
    Allowed,
    /// They leave all writes to the system.
    Forbidden,
}

impl Handles {
    /// Fewest descriptors with which a cache is useful.
    const BOUND_MIN: usize = 4;
    /// Maximum number of descriptors that a cache keeps: as many as a chain may have layers.
    const BOUND_MAX: usize = 1 << 16;

    /// A cache of at most `bound` open descriptors.
    pub fn new(bound: usize) -> Arc<Self> {
        let bound = bound.clamp(Self::BOUND_MIN, Self::BOUND_MAX);
        Arc::new(Self { bound, in_place: InPlace::default(), ring: Mutex::default() })
    }

    /// A cache of all descriptors that the process may open, except `reserve` that are left for
    /// sockets, rings and everything else.
    pub fn for_process(reserve: usize) -> Arc<Self> {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let limit = limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX));
        Self::new(limit.saturating_sub(reserve))
    }

    /// Sets whether executors may make small writes by themselves, where that is faster. If such a
    /// write blocks, perhaps for as long as the file system is frozen, everything on the executor
    /// blocks with it: allow this only while the process serves a single disk. Forbidden at first.
    pub fn set_writes_in_place(&self, writes: WritesInPlace) {
        self.in_place.set(writes == WritesInPlace::Allowed);
    }

    /// See [`Self::set_writes_in_place`].
    pub(crate) fn in_place(&self) -> &InPlace {
        &self.in_place
    }

    /// The most descriptors that it keeps open.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// How many are open now.
    pub fn open_count(&self) -> usize {
        self.ring().entries.len()
    }

    /// The file of `handle`, opened if it is not.
    #[inline]
    pub(crate) fn get(&self, handle: &Arc<Handle>) -> Result<Got> {
        let mut slot = handle.lock();
        if let Some(file) = &slot.file {
            handle.mark_used();
            return Ok(Got::File(Arc::clone(file)));
        }
        self.open(handle, &mut slot)
    }

    /// Keeps `file`, which was opened when the handle was made, if there is room for it.
    pub(crate) fn keep(&self, handle: &Arc<Handle>, file: Arc<File>) {
        let mut slot = handle.lock();
        if slot.file.is_none() && self.reserve(handle) {
            slot.file = Some(file);
        }
    }

    /// Opens what was `located` for reading. An idle descriptor is closed if there is no other.
    pub(crate) fn open_located(&self, located: &Located, access: Access) -> Result<File> {
        loop {
            match located.open(open_flags(access)) {
                Ok(fd) => return Ok(File::new(fd, access)),
                Err(Errno::MFILE | Errno::NFILE) if self.give_way() => {}
                Err(Errno::INVAL) if access == Access::Direct => {
                    return Err(no_direct(located.path()));
                }
                Err(error) => {
                    let what = format!("opening {}", located.path().display());
                    return Err(Error::from_io(what, error.into()));
                }
            }
        }
    }

    /// Closes one descriptor that nobody uses; false if there is none.
    fn give_way(&self) -> bool {
        let mut ring = self.ring();
        let idle = ring.find_idle(None);
        idle.map(|position| ring.remove_at(position)).is_some()
    }

    /// Forgets a handle whose store is gone.
    pub(crate) fn forget(&self, handle: &Arc<Handle>) {
        let mut slot = handle.lock();
        if slot.file.is_some() {
            self.ring().remove(handle);
        }
        drop(slot.file.take());
    }

    /// Opens the file of `handle`, whose lock the caller holds.
    #[cold]
    fn open(&self, handle: &Arc<Handle>, slot: &mut Slot) -> Result<Got> {
        if slot.is_being_proved || !self.reserve(handle) {
            return Ok(Got::Busy);
        }
        loop {
            match handle.open_file(slot) {
                // Not marked as used: what is read once is closed before what is read again.
                Ok((file, None)) => {
                    let file = Arc::new(file);
                    slot.file = Some(Arc::clone(&file));
                    return Ok(Got::File(file));
                }
                // Outside the cache until it is proved.
                Ok((file, Some(now))) => {
                    self.ring().remove(handle);
                    let proving = Proving::begin(handle, slot);
                    let file = Arc::new(file);
                    return Ok(Got::Unproven(Box::new(Unproven { file, now, proving })));
                }
                Err(OpenFailure::NoDescriptor(error)) => {
                    // The rest of the process uses more than its reserve.
                    let mut ring = self.ring();
                    if let Some(position) = ring.find_idle(Some(handle)) {
                        ring.remove_at(position);
                        continue;
                    }
                    ring.remove(handle);
                    if ring.entries.is_empty() {
                        let what = format!("opening {}", handle.path.display());
                        return Err(Error::from_io(what, error.into()));
                    }
                    return Ok(Got::Busy);
                }
                Err(OpenFailure::Other(error)) => {
                    self.ring().remove(handle);
                    return Err(error);
                }
            }
        }
    }

    /// Puts `handle` in the ring, replacing an idle one if there is no room (I1).
    fn reserve(&self, handle: &Arc<Handle>) -> bool {
        let mut ring = self.ring();
        if ring.entries.len() >= self.bound {
            let Some(position) = ring.find_idle(Some(handle)) else { return false };
            ring.remove_at(position);
        }
        ring.insert(Arc::clone(handle));
        true
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Raises the soft limit of open files to the hard one and returns the new value.
///
/// # Errors
/// If the system refuses.
pub fn raise_open_files_limit() -> io::Result<u64> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })?;
    }
    Ok(limit.maximum.unwrap_or(u64::MAX))
}

/// The result of [`Handles::get`].
pub(crate) enum Got {
    File(Arc<File>),
    /// Reopened, and only its content can prove that it is the same.
    Unproven(Box<Unproven>),
    /// No descriptor is free, or another task is proving the file.
    Busy,
}

/// One file, open or not.
pub(crate) struct Handle {
    slot: Mutex<Slot>,
    /// Whether it was used since the clock's hand last passed.
    used: AtomicBool,
    /// Where it is in the ring; read and written under the ring's lock.
    position: AtomicUsize,
    path: PathBuf,
    kind: FileKind,
    access: Access,
    /// Whether QEMU's locks are taken each time it is opened.
    locking: Locking,
    /// How its content is proved, once its format says so.
    proof: ProofSlot,
}

/// What a handle has, and what it last knew of its file.
struct Slot {
    file: Option<Arc<File>>,
    /// The file's identity when its locks were last held; for a device without its length.
    identity: Identity,
    /// When it was last closed, which released its locks.
    closed_ns: i128,
    /// The file's identity when its content was found to be different, which is rare.
    refused: Option<Box<Identity>>,
    is_being_proved: bool,
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
    fn open_file(
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

    fn lock(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn mark_used(&self) {
        // Read first, so that queues that share a layer do not bounce its cache line.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }
}

enum OpenFailure {
    /// The process or the system has no descriptor left.
    NoDescriptor(Errno),
    Other(Error),
}

/// The open handles, and the hand of the clock that closes them.
#[derive(Default)]
struct Ring {
    entries: Vec<Arc<Handle>>,
    hand: usize,
}

impl Ring {
    /// Rounds of the hand: one may clear all marks, the next finds what is idle.
    const SWEEPS: usize = 2;

    fn insert(&mut self, handle: Arc<Handle>) {
        handle.position.store(self.entries.len(), Ordering::Relaxed);
        self.entries.push(handle);
    }

    fn remove(&mut self, handle: &Arc<Handle>) {
        self.remove_at(handle.position.load(Ordering::Relaxed));
    }

    fn remove_at(&mut self, position: usize) {
        self.entries.swap_remove(position);
        if let Some(moved) = self.entries.get(position) {
            moved.position.store(position, Ordering::Relaxed);
        }
    }

    /// Closes an idle handle other than `opening` and returns its position (I2).
    fn find_idle(&mut self, opening: Option<&Arc<Handle>>) -> Option<usize> {
        for _ in 0..Self::SWEEPS * self.entries.len() {
            if self.hand >= self.entries.len() {
                self.hand = 0;
            }
            let position = self.hand;
            self.hand += 1;
            let handle = &self.entries[position];
            let is_opening = opening.is_some_and(|opening| Arc::ptr_eq(handle, opening));
            if is_opening || handle.used.swap(false, Ordering::Relaxed) {
                continue;
            }
            // One that is being used or opened right now is not idle.
            let Ok(mut slot) = handle.slot.try_lock() else { continue };
            if slot.file.as_ref().is_some_and(|file| Arc::strong_count(file) == 1) {
                slot.closed_ns = now_ns();
                slot.file = None;
                return Some(position);
            }
        }
        None
    }
}
