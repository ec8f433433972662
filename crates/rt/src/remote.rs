//! Work and wake-ups that other threads send to an executor.

use crate::task_key::{LocalFuture, TaskKey};
use parking_lot::{Mutex, MutexGuard};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

/// Something that another thread sends to an executor.
pub(crate) enum RemoteItem {
    Wake(TaskKey),
    Spawn(Box<dyn FnOnce() -> LocalFuture + Send>),
}

#[derive(Default)]
struct Items {
    list: Vec<RemoteItem>,
    /// Whether the executor has ended.
    closed: bool,
}

/// What other threads sent to an executor, and the bell that wakes it.
pub(crate) struct Remote {
    items: Mutex<Items>,
    /// Whether the bell was rung since the items were last taken.
    rung: AtomicBool,
    bell: rustix::fd::OwnedFd,
    is_writing: AtomicBool,
}

impl Remote {
    pub(crate) fn new() -> io::Result<Self> {
        use rustix::event::{EventfdFlags, eventfd};
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            items: Mutex::default(),
            rung: AtomicBool::new(false),
            bell,
            is_writing: AtomicBool::new(false),
        })
    }

    pub(crate) fn set_is_writing(&self, is_writing: bool) {
        self.is_writing.store(is_writing, Ordering::Relaxed);
    }

    pub(crate) fn is_writing(&self) -> bool {
        self.is_writing.load(Ordering::Relaxed)
    }

    pub(crate) fn bell(&self) -> &rustix::fd::OwnedFd {
        &self.bell
    }

    /// Silences the bell.
    pub(crate) fn clear_bell(&self) {
        // Nothing to read means that nobody rang: the bell does not block.
        let _ = rustix::io::read(&self.bell, &mut [0_u8; 8]);
    }

    /// Rings without an item: a thread has finished a job.
    pub(crate) fn ring(&self) {
        // A full counter still wakes the reader.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Accepts nothing more and drops what is queued: nobody will ever run it.
    pub(crate) fn close(&self) {
        let mut items = self.items();
        let unused = std::mem::take(&mut items.list);
        items.closed = true;
        drop(items);
        drop(unused);
    }

    fn items(&self) -> MutexGuard<'_, Items> {
        self.items.lock()
    }

    pub(crate) fn push(&self, item: RemoteItem) {
        let mut items = self.items();
        if items.closed {
            // The item may own a waker or a socket: dropped outside of the lock.
            drop(items);
            drop(item);
            return;
        }
        items.list.push(item);
        drop(items);
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }

    pub(crate) fn has_items(&self) -> bool {
        self.rung.load(Ordering::Acquire)
    }

    pub(crate) fn take(&self) -> Vec<RemoteItem> {
        if !self.rung.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.items().list)
    }
}
