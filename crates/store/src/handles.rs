//! A bounded cache of open descriptors.
//!
//! Every [`FileStore`](crate::FileStore) has a [`Handle`]: it knows which file it is and may have
//! that file open. Stores that read one file in one way share it ([`known`]), so that any number of
//! chains above one base need one descriptor of it. [`Handles`] bounds how many are open. The
//! fast path of a read is one lock of the handle that nobody else holds for longer than it takes
//! to clone an `Arc`.
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
//! - I3 A reopened handle is the same file as before ([`slot`]). Otherwise the read fails and
//!   says so. It fails as well if the image's locks cannot be taken again ([`crate::lock`]).
//! - I4 A handle is in the ring if and only if it has a file or its opener holds its lock.
//! - I5 A handle has no name: each store opens it again by its own, so that a chain that is closed,
//!   and its directory with it, takes nothing away from the others.
//!
//! Locks: a handle's `slot`, then the ring. Under the ring other handles are only tried. The lock
//! of the known handles is taken alone.

mod handle;
mod known;
mod reopened;
mod ring;
mod slot;

pub(crate) use handle::{Handle, Mode};
pub(crate) use known::SharedHandle;
pub(crate) use reopened::Unproven;

use crate::in_place::InPlace;
use crate::kind::no_direct;
use crate::located::Located;
use handle::OpenFailure;
use known::Known;
use mica_block::{Error, Result};
use mica_rt::descriptors::{Holder, add_holder, is_lack};
use mica_rt::{Access, File};
use parking_lot::{Mutex, MutexGuard};
use reopened::Proving;
use ring::Ring;
use rustix::fd::RawFd;
use rustix::fs::{Mode as FileMode, OFlags, open};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use slot::Slot;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// A bounded cache of open descriptors, shared by all stores of a process.
pub struct Handles {
    /// Descriptors for these handles and for what is set aside.
    capacity: usize,
    set_aside: AtomicUsize,
    /// For the files that are written.
    in_place: InPlace,
    known: Known,
    ring: Mutex<Ring>,
}

/// Descriptors that a cache leaves to others, for as long as this lives.
pub struct SetAside {
    handles: Arc<Handles>,
    count: usize,
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
    pub const BOUND_MIN: usize = 4;
    /// Maximum number of descriptors that a cache keeps: as many as a chain may have layers.
    const BOUND_MAX: usize = 1 << 16;

    /// A cache of at most `bound` open descriptors.
    pub fn new(bound: usize) -> Arc<Self> {
        Arc::new(Self {
            capacity: bound.max(Self::BOUND_MIN),
            set_aside: AtomicUsize::new(0),
            in_place: InPlace::default(),
            known: Known::default(),
            ring: Mutex::default(),
        })
    }

    /// A cache of all descriptors that the process may open, except those that are left for
    /// sockets, rings and everything else: at least `reserve`, and a quarter of all. Connections
    /// that find no room all the same take some of it.
    pub fn for_process(reserve: usize) -> Arc<Self> {
        let limit = open_files_limit();
        let handles = Self::new(limit.saturating_sub(reserve.max(limit / 4)));
        let holder: Weak<dyn Holder> = Arc::<Self>::downgrade(&handles);
        add_holder(holder, limit);
        handles
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
        let left = self.capacity.saturating_sub(self.set_aside.load(Ordering::Relaxed));
        left.clamp(Self::BOUND_MIN, Self::BOUND_MAX)
    }

    /// Leaves `count` descriptors to others: files that are written, sockets. Closes idle ones if
    /// there are more than that allows; a few it keeps in any case.
    pub fn set_aside(self: &Arc<Self>, count: usize) -> SetAside {
        self.set_aside.fetch_add(count, Ordering::Relaxed);
        let mut ring = self.ring();
        while ring.entries.len() > self.bound()
            && let Some(position) = ring.find_idle(None)
        {
            ring.remove_at(position);
        }
        drop(ring);
        SetAside { handles: Arc::clone(self), count }
    }

    /// How many are open now.
    pub fn open_count(&self) -> usize {
        self.ring().entries.len()
    }

    /// The file of `handle`, opened by the name `path` if it is not open.
    #[inline]
    pub(crate) fn get(&self, handle: &Arc<Handle>, path: &Arc<Path>) -> Result<Got> {
        let mut slot = handle.lock();
        if let Some(file) = &slot.file {
            handle.mark_used();
            return Ok(Got::File(Arc::clone(file)));
        }
        self.open(handle, &mut slot, path)
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
            match located.open_reader(access) {
                Ok(file) => return Ok(file),
                Err(Errno::MFILE | Errno::NFILE) if self.close_idle() => {}
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

    /// Opens what was `located` for writing, likewise.
    pub(crate) fn open_located_writable(&self, located: &Located, access: Access) -> Result<File> {
        loop {
            match located.open_writable(access) {
                Err(error) if is_lack(error.raw_os_error()) && self.close_idle() => {}
                opened => return opened,
            }
        }
    }

    /// Closes one descriptor that nobody uses; false if there is none.
    fn close_idle(&self) -> bool {
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
    fn open(&self, handle: &Arc<Handle>, slot: &mut Slot, path: &Arc<Path>) -> Result<Got> {
        if slot.known.is_being_proved || !self.reserve(handle) {
            return Ok(Got::Busy);
        }
        loop {
            match handle.open_file(slot, path) {
                // Not marked as used: what is read once is closed before what is read again.
                Ok((file, None)) => {
                    let file = Arc::new(file);
                    slot.file = Some(Arc::clone(&file));
                    return Ok(Got::File(file));
                }
                // Outside the cache until it is proved.
                Ok((file, Some(now))) => {
                    self.ring().remove(handle);
                    let proving = Proving::begin(handle, slot, path);
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
                        let what = format!("opening {}", path.display());
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
        while ring.entries.len() >= self.bound() {
            let Some(position) = ring.find_idle(Some(handle)) else { return false };
            ring.remove_at(position);
        }
        ring.insert(Arc::clone(handle));
        true
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }
}

impl Holder for Handles {
    fn give_way(&self, count: usize) -> usize {
        (0..count).take_while(|_| self.close_idle()).count()
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        self.handles.set_aside.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// How many files the process may have open.
pub fn open_files_limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
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

/// Descriptors for which [`enlarge_descriptor_table`] makes room at most: 128 KiB of the system's
/// memory.
const TABLE_MAX: usize = 16 << 10;

/// Makes room in the process's table of descriptors, as far as the limit of open files goes. The
/// system doubles the table as it fills; if the process has several threads by then, whoever opens
/// a file waits for all processors each time, for 10 to 20 ms. So this is called before there
/// are others.
pub fn enlarge_descriptor_table() {
    let last = open_files_limit().clamp(1, TABLE_MAX) - 1;
    let Ok(root) = open("/", OFlags::PATH | OFlags::CLOEXEC, FileMode::empty()) else { return };
    // The table never shrinks. If that is refused, everything is only slower.
    let _ = fcntl_dupfd_cloexec(root, RawFd::try_from(last).unwrap_or(0));
}

/// The result of [`Handles::get`].
pub(crate) enum Got {
    File(Arc<File>),
    /// Reopened, and only its content can prove that it is the same.
    Unproven(Box<Unproven>),
    /// No descriptor is free, or another task is proving the file.
    Busy,
}
