//! One file of the world.

use super::{Latency, ReadFault};
use crate::power::{Change, Draw, Journal, Loss};
use mica_block::Identity;
use mica_rt::Buf;
use parking_lot::Mutex;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

pub(super) type SharedFile = Arc<Mutex<SimFile>>;

/// A file: what readers see of it, and which part is durable.
pub(super) struct SimFile {
    pub(super) path: PathBuf,
    pub(super) bytes: Vec<u8>,
    pub(super) inode: u64,
    pub(super) mtime_ns: i128,
    pub(super) ctime_ns: i128,
    /// Of the last sync.
    pub(super) durable_ctime_ns: i128,
    pub(super) latency: Latency,
    pub(super) faults: Vec<ReadFault>,
    pub(super) reads: u64,
    /// Exists from the first time the file is opened for writing: until then all is durable.
    pub(super) journal: Option<Journal>,
    /// The writer that has it open.
    pub(super) writer: Weak<()>,
    /// Its machine is gone: anyone who has it open gets errors.
    pub(super) dead: bool,
}

impl SimFile {
    pub(super) fn identity(&self) -> Identity {
        Identity {
            device: 1,
            inode: self.inode,
            len: self.bytes.len() as u64,
            mtime_ns: self.mtime_ns,
            ctime_ns: self.ctime_ns,
        }
    }

    pub(super) fn nominal_latency(&self) -> Duration {
        match self.latency {
            Latency::Cached => Duration::from_micros(2),
            Latency::Flash => Duration::from_micros(80),
            Latency::Remote => Duration::from_millis(1),
        }
    }

    /// Fills `buf` as far as there are bytes, and returns how many.
    pub(super) fn read(&self, buf: &mut Buf, offset: u64) -> usize {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let there = self.bytes.get(start..).unwrap_or_default();
        let count = there.len().min(buf.len());
        buf.put(0, &there[..count]);
        count
    }

    /// Changes the content as an outside program does: at once, and durably.
    pub(super) fn change_durably(&mut self, change: impl FnOnce(&mut Vec<u8>)) {
        change(&mut self.bytes);
        if self.journal.is_some() {
            self.journal = Some(Journal::new(self.bytes.clone()));
        }
    }

    /// The journal of a file that someone writes.
    pub(super) fn journal(&mut self) -> &mut Journal {
        let bytes = &self.bytes;
        self.journal.get_or_insert_with(|| Journal::new(bytes.clone()))
    }

    /// Makes `change`, which readers see from now on.
    pub(super) fn make(&mut self, change: Change, now_ns: i128) {
        let growth = change.growth(self.bytes.len());
        for change in growth.into_iter().chain([change]) {
            change.apply(&mut self.bytes);
            self.journal().push(change);
        }
        (self.mtime_ns, self.ctime_ns) = (now_ns, now_ns);
    }

    /// The file as the machine finds it after a restart; with `None`, as another process of the
    /// same machine finds it when this one is dead. Anyone who had it open gets errors from now on.
    pub(super) fn reborn(&mut self, loss: Option<Loss>, draw: Draw<'_>) -> Self {
        self.dead = true;
        let mut bytes = std::mem::take(&mut self.bytes);
        let mut journal = None;
        match (self.journal.take(), loss) {
            (Some(volatile), Some(loss)) => bytes = volatile.cut(loss, draw),
            (Some(volatile), None) => journal = Some(volatile.die(&mut bytes, draw)),
            (None, _) => {}
        }
        Self {
            path: self.path.clone(),
            bytes,
            inode: self.inode,
            mtime_ns: self.mtime_ns,
            ctime_ns: self.ctime_ns,
            durable_ctime_ns: self.durable_ctime_ns,
            latency: self.latency,
            faults: Vec::new(),
            reads: 0,
            journal,
            writer: Weak::new(),
            dead: false,
        }
    }
}
