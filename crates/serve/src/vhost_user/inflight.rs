//! Requests in flight, recorded where they outlive the server (vhost-user, "Inflight I/O
//! tracking").
//!
//! For each queue a region of shared memory says which heads were taken and not given back, in
//! which order. The front end keeps it; the next server repeats them, in that order.
//!
//! ```text
//! header  features u64 | version u16 | desc_num u16 | last_batch_head u16 | used_idx u16
//! entry   inflight u8 | padding 5 | next u16 | counter u64          one per descriptor
//! ```
//!
//! Invariants
//! - I1 A head that was taken is marked before anything is done for it, and stays so until the used
//!   ring names it: a crash between the two repeats a request, which is harmless, and never
//!   forgets one.
//! - I2 `used_idx` is what the used ring's index was when the marks were last cleared. If a crash
//!   happened between the two, they differ, and the one head that `last_batch_head` names is done.

use super::lost::{FilePart, Lost, Pages, Watched};
use mica_block::{Error, ErrorKind, Result};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering, fence};
use vm_memory::{AtomicInteger, FileOffset, MmapRegion, VolatileMemory};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Queues start at multiples of this.
const QUEUE_ALIGN: usize = 64;

const VERSION_AT: usize = 8;
const DESC_NUM_AT: usize = 10;
const LAST_BATCH_HEAD_AT: usize = 12;
const USED_IDX_AT: usize = 14;
const NEXT_AT: usize = 6;
const COUNTER_AT: usize = 8;

const VERSION: u16 = 1;

/// Bytes of the region of one queue.
fn queue_bytes(queue_size: u16) -> usize {
    (HEADER_BYTES + ENTRY_BYTES * usize::from(queue_size)).next_multiple_of(QUEUE_ALIGN)
}

/// The regions of all queues of a device.
#[derive(Clone)]
pub(super) struct Inflight {
    map: Arc<Watched<MmapRegion>>,
    queues: u16,
    queue_size: u16,
}

impl Inflight {
    /// Makes one, and the file that holds it.
    ///
    /// # Errors
    /// Any error of the system.
    pub(super) fn create(shape: QueuesShape) -> Result<(u64, File)> {
        let QueuesShape { queues, queue_size } = shape;
        let explain = |error: rustix::io::Errno| Error::from_io("in-flight requests", error.into());
        let len = queue_bytes(queue_size) as u64 * u64::from(queues);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("mica-inflight", flags).map_err(explain)?;
        ftruncate(&file, len).map_err(explain)?;
        let seals = SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
        fcntl_add_seals(&file, seals).map_err(explain)?;
        Ok((len, file.into()))
    }

    /// Maps what a front end hands over; `lost` is notified if it disappears.
    ///
    /// # Errors
    /// `Invalid` if it is too short; else any error of the system.
    pub(super) fn map(
        file: File,
        part: FilePart,
        shape: QueuesShape,
        lost: &Arc<Lost>,
    ) -> Result<Self> {
        let FilePart { offset, len } = part;
        let QueuesShape { queues, queue_size } = shape;
        let invalid = |what| Error::new(ErrorKind::Invalid, format!("in-flight requests: {what}"));
        let explain = |error| Error::from_io("in-flight requests", error);
        let needed = queue_bytes(queue_size) as u64 * u64::from(queues);
        let end = offset.checked_add(len).ok_or_else(|| invalid("an offset beyond 64 bits"))?;
        let metadata = file.metadata().map_err(explain)?;
        if len < needed || !metadata.is_file() || metadata.len() < end {
            return Err(invalid("a region that is too short"));
        }
        let size = usize::try_from(needed).expect("some MiB at most");
        let pages = Pages::of(&file, lost);
        let map = MmapRegion::from_file(FileOffset::new(file, offset), size)
            .map_err(|error| Error::new(ErrorKind::Io, format!("in-flight requests: {error}")))?;
        let place = (map.as_ptr().cast_const(), size);
        let map = Watched::new(map, place, &pages);
        Ok(Self { map: Arc::new(map), queues, queue_size })
    }

    /// The region of queue `index`, if it has one for `queue_size` descriptors.
    pub(super) fn queue(&self, index: u16, queue_size: u16) -> Option<InflightQueue> {
        let fits = index < self.queues && queue_size <= self.queue_size;
        let base = usize::from(index) * queue_bytes(self.queue_size);
        fits.then(|| InflightQueue {
            map: Arc::clone(&self.map),
            base,
            size: queue_size,
            counter: 0,
        })
    }
}

/// How many queues a region is for, and of how many descriptors each.
#[derive(Clone, Copy)]
pub(super) struct QueuesShape {
    pub(super) queues: u16,
    pub(super) queue_size: u16,
}

/// The region of one queue.
pub(super) struct InflightQueue {
    map: Arc<Watched<MmapRegion>>,
    base: usize,
    size: u16,
    /// The number of the request that was taken last.
    counter: u64,
}

impl InflightQueue {
    fn field<T: AtomicInteger>(&self, at: usize) -> &T {
        self.map.get_atomic_ref(self.base + at).expect("within the region, aligned")
    }

    fn entry<T: AtomicInteger>(&self, head: u16, at: usize) -> &T {
        assert!(head < self.size, "a head beyond the queue");
        self.field(HEADER_BYTES + ENTRY_BYTES * usize::from(head) + at)
    }

    /// What was in flight when the last server went, in the order in which it was taken.
    /// `used_idx` is the index in the used ring.
    pub(super) fn recover(&mut self, used_idx: u16) -> Vec<u16> {
        if self.field::<AtomicU16>(VERSION_AT).load(Ordering::Acquire) == 0 {
            self.field::<AtomicU16>(DESC_NUM_AT).store(self.size, Ordering::Relaxed);
            self.field::<AtomicU16>(USED_IDX_AT).store(used_idx, Ordering::Relaxed);
            self.field::<AtomicU16>(VERSION_AT).store(VERSION, Ordering::Release);
        }
        if self.field::<AtomicU16>(USED_IDX_AT).load(Ordering::Acquire) != used_idx {
            // I2: the used ring names it, only the mark was left.
            let last = self.field::<AtomicU16>(LAST_BATCH_HEAD_AT).load(Ordering::Acquire);
            if last < self.size {
                self.entry::<AtomicU8>(last, 0).store(0, Ordering::Release);
            }
            self.field::<AtomicU16>(USED_IDX_AT).store(used_idx, Ordering::Release);
        }
        let counter = |head| self.entry::<AtomicU64>(head, COUNTER_AT).load(Ordering::Acquire);
        let is_in_flight =
            |head: &u16| self.entry::<AtomicU8>(*head, 0).load(Ordering::Acquire) == 1;
        let mut heads: Vec<u16> = (0..self.size).filter(is_in_flight).collect();
        heads.sort_by_key(|head| counter(*head));
        self.counter = heads.last().map_or(0, |head| counter(*head));
        heads
    }

    /// Marks `head` as taken.
    pub(super) fn taken(&mut self, head: u16) {
        self.counter = self.counter.wrapping_add(1);
        self.entry::<AtomicU64>(head, COUNTER_AT).store(self.counter, Ordering::Relaxed);
        self.entry::<AtomicU8>(head, 0).store(1, Ordering::Release);
    }

    /// Before the used ring names `head`.
    pub(super) fn about_to_end(&self, head: u16) {
        let last = self.field::<AtomicU16>(LAST_BATCH_HEAD_AT);
        let before = last.load(Ordering::Relaxed);
        self.entry::<AtomicU16>(head, NEXT_AT).store(before, Ordering::Relaxed);
        last.store(head, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// After the used ring named `head`; its index is `used_idx` now.
    pub(super) fn ended(&self, head: u16, used_idx: u16) {
        fence(Ordering::SeqCst);
        self.entry::<AtomicU8>(head, 0).store(0, Ordering::Release);
        self.field::<AtomicU16>(USED_IDX_AT).store(used_idx, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: QueuesShape = QueuesShape { queues: 2, queue_size: 8 };

    fn queue(file: &File, len: u64) -> InflightQueue {
        let file = file.try_clone().expect("a file");
        let inflight = Inflight::map(file, FilePart { offset: 0, len }, SHAPE, &Arc::default())
            .expect("long enough");
        inflight.queue(1, 8).expect("there are two")
    }

    #[test]
    fn what_was_taken_and_not_ended_is_found_in_order() {
        let (len, file) = Inflight::create(SHAPE).expect("memory");
        let mut first = queue(&file, len);
        assert!(first.recover(0).is_empty());
        for head in [5, 2, 7, 0] {
            first.taken(head);
        }
        first.about_to_end(2);
        first.ended(2, 1);
        let mut second = queue(&file, len);
        assert_eq!(second.recover(1), [5, 7, 0]);
        second.taken(2);
        assert_eq!(queue(&file, len).recover(1), [5, 7, 0, 2]);
    }

    /// The server dies between the used ring and the mark.
    #[test]
    fn what_the_used_ring_names_is_not_done_again() {
        let (len, file) = Inflight::create(SHAPE).expect("memory");
        let mut first = queue(&file, len);
        first.recover(65_535);
        first.taken(3);
        first.taken(4);
        first.about_to_end(4);
        assert_eq!(queue(&file, len).recover(65_535), [3, 4], "it was not named yet");
        assert_eq!(queue(&file, len).recover(0), [3], "it was");
        assert_eq!(queue(&file, len).recover(0), [3]);
    }

    #[test]
    fn region_that_is_too_short_is_refused() {
        let (len, file) = Inflight::create(SHAPE).expect("memory");
        let map = |offset, len| {
            let file = file.try_clone().expect("a file");
            Inflight::map(file, FilePart { offset, len }, SHAPE, &Arc::default()).is_ok()
        };
        assert!(map(0, len));
        assert!(!map(0, len - 1));
        assert!(!map(64, len));
        assert!(!map(u64::MAX, len));
        let file = file.try_clone().expect("a file");
        let inflight = Inflight::map(file, FilePart { offset: 0, len }, SHAPE, &Arc::default());
        let inflight = inflight.expect("long enough");
        assert!(inflight.queue(2, 8).is_none() && inflight.queue(0, 9).is_none());
    }
}
