//! The driver's side of a split virtqueue (virtio 1.3, section 2.7), for requests of one size.
//!
//! ```text
//! descriptors | available ring | used ring | slots: header, status | slots: data
//! ```
//!
//! A slot is a request in flight: its three descriptors and its memory are its own, and it is the
//! caller's from [`Ring::take`] until [`Ring::offer`]. Nothing that the server writes is trusted: a
//! head that is not in flight is an error.

use super::{DEPTH_MAX, Memory, QUEUE_SIZE};
use anyhow::{Context, Result, ensure};
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use vm_memory::{Address, Bytes, VolatileMemory};
use vm_memory::{GuestAddress, MemoryRegionAddress};
use vmm_sys_util::eventfd::EventFd;

/// Bytes of a request's data, unless it is a longer read.
pub(crate) const BLOCK_BYTES: usize = 4096;

/// Bytes that a ring for requests of `request_bytes` takes in all.
pub(super) const fn bytes(request_bytes: usize) -> usize {
    DATA_AT + DEPTH_MAX * request_bytes
}

const AVAIL_AT: usize = 0x1000;
const USED_AT: usize = 0x2000;
const META_AT: usize = 0x3000;
const DATA_AT: usize = 0x4000;
const DESCRIPTOR_BYTES: usize = 16;
/// A request's header, followed by its status, on a separate cache line.
const META_BYTES: usize = 64;
const HEADER_BYTES: usize = 16;
const _: () = assert!(META_AT + DEPTH_MAX * META_BYTES <= DATA_AT);
const _: () = assert!(QUEUE_SIZE as usize * DESCRIPTOR_BYTES <= AVAIL_AT);

const NEXT: u16 = 1;
const WRITE: u16 = 2;
/// A status that no server returns.
const NO_STATUS: u8 = 0xff;

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Ask {
    Read,
    Write,
}

/// A ring, and how it notifies the server of requests.
pub(super) struct Ring {
    memory: Arc<Memory>,
    /// Where it begins in the memory.
    base: usize,
    /// Bytes of each request's data.
    request_bytes: usize,
    /// The server's event.
    pub(super) kick: EventFd,
    /// Whether both sides say when they want to be notified.
    pub(super) event_idx: bool,
    next_avail: u16,
    /// The last available index that was published to the server.
    published_avail: u16,
    last_used: u16,
    in_flight: [bool; DEPTH_MAX],
}

impl Ring {
    /// Ring `index` of `memory`.
    pub(super) fn new(
        memory: &Arc<Memory>,
        index: u16,
        request_bytes: usize,
        kick: EventFd,
    ) -> Self {
        Self {
            memory: Arc::clone(memory),
            base: usize::from(index) * bytes(request_bytes),
            request_bytes,
            kick,
            event_idx: false,
            next_avail: 0,
            published_avail: 0,
            last_used: 0,
            in_flight: [false; DEPTH_MAX],
        }
    }

    /// Where descriptors, available ring and used ring are in this process.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [0, AVAIL_AT, USED_AT].map(|at| self.memory.as_ptr() as u64 + (self.base + at) as u64)
    }

    /// Prepares `slot` as a request for the block at `offset`, not yet published to the server.
    pub(super) fn offer(&mut self, slot: usize, ask: Ask, offset: u64) -> Result<()> {
        let meta = META_AT + slot * META_BYTES;
        let data = DATA_AT + slot * self.request_bytes;
        let (kind, data_flags) = match ask {
            Ask::Read => (0_u32, NEXT | WRITE),
            Ask::Write => (1, NEXT),
        };
        let mut header = [0; HEADER_BYTES + 1];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&(offset / 512).to_le_bytes());
        header[HEADER_BYTES] = NO_STATUS;
        self.put(meta, &header)?;
        let head = u16::try_from(slot * 3)?;
        self.describe(head, meta, HEADER_BYTES, NEXT)?;
        self.describe(head + 1, data, self.request_bytes, data_flags)?;
        self.describe(head + 2, meta + HEADER_BYTES, 1, WRITE)?;
        let place = usize::from(self.next_avail % QUEUE_SIZE) * 2;
        self.number(AVAIL_AT + 4 + place)?.store(head, Ordering::Relaxed);
        self.next_avail = self.next_avail.wrapping_add(1);
        self.in_flight[slot] = true;
        Ok(())
    }

    /// Publishes all offered requests to the server, and wakes it if it wants that.
    pub(super) fn publish(&mut self) -> Result<()> {
        if self.published_avail == self.next_avail {
            return Ok(());
        }
        self.number(AVAIL_AT + 2)?.store(self.next_avail, Ordering::Release);
        fence(Ordering::SeqCst);
        let is_wanted = if self.event_idx {
            let event = self.number(USED_AT + 4 + usize::from(QUEUE_SIZE) * 8)?;
            let event = event.load(Ordering::Relaxed);
            let behind = self.next_avail.wrapping_sub(event).wrapping_sub(1);
            behind < self.next_avail.wrapping_sub(self.published_avail)
        } else {
            self.number(USED_AT)?.load(Ordering::Relaxed) & 1 == 0
        };
        self.published_avail = self.next_avail;
        if is_wanted { self.kick() } else { Ok(()) }
    }

    /// Wakes the server.
    pub(super) fn kick(&self) -> Result<()> {
        self.kick.write(1).context("kicking")
    }

    /// The next slot that the server gave back, and its status.
    pub(super) fn take(&mut self) -> Result<Option<(usize, u8)>> {
        if !self.has_answers() {
            return Ok(None);
        }
        let place = USED_AT + 4 + usize::from(self.last_used % QUEUE_SIZE) * 8;
        let mut id = [0; 4];
        self.get(place, &mut id)?;
        let head = usize::try_from(u32::from_le_bytes(id))?;
        let slot = head / 3;
        let is_ours = head % 3 == 0 && self.in_flight.get(slot) == Some(&true);
        ensure!(is_ours, "the server gives back head {head}, which it does not have");
        self.in_flight[slot] = false;
        self.last_used = self.last_used.wrapping_add(1);
        let mut status = [0];
        self.get(META_AT + slot * META_BYTES + HEADER_BYTES, &mut status)?;
        Ok(Some((slot, status[0])))
    }

    /// Whether there is something to take.
    pub(super) fn has_answers(&self) -> bool {
        self.last_used != self.used_idx()
    }

    /// Asks the server to call when it gives back the next.
    pub(super) fn ask_for_call(&self) -> Result<()> {
        let event = self.number(AVAIL_AT + 4 + usize::from(QUEUE_SIZE) * 2)?;
        event.store(self.last_used, Ordering::Release);
        fence(Ordering::SeqCst);
        Ok(())
    }

    /// How many the server has given back so far.
    pub(super) fn used_idx(&self) -> u16 {
        // The place is one of this ring's own.
        self.number(USED_AT + 2).map_or(0, |idx| idx.load(Ordering::Acquire))
    }

    /// Puts what is to be written into `slot`.
    pub(super) fn fill(&self, slot: usize, bytes: &[u8; BLOCK_BYTES]) -> Result<()> {
        self.put(DATA_AT + slot * self.request_bytes, bytes)
    }

    /// Copies the first block that was read out of `slot`.
    pub(super) fn data(&self, slot: usize, bytes: &mut [u8; BLOCK_BYTES]) -> Result<()> {
        self.get(DATA_AT + slot * self.request_bytes, bytes)
    }

    fn describe(&self, number: u16, at: usize, len: usize, flags: u16) -> Result<()> {
        let address = GuestAddress((self.base + at) as u64).raw_value();
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&u32::try_from(len)?.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        let next = if flags & NEXT == 0 { 0 } else { number + 1 };
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.put(usize::from(number) * DESCRIPTOR_BYTES, &bytes)
    }

    fn number(&self, at: usize) -> Result<&AtomicU16> {
        Ok(self.memory.get_atomic_ref(self.base + at)?)
    }

    fn put(&self, at: usize, bytes: &[u8]) -> Result<()> {
        Ok(self.memory.write_slice(bytes, MemoryRegionAddress((self.base + at) as u64))?)
    }

    fn get(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        Ok(self.memory.read_slice(bytes, MemoryRegionAddress((self.base + at) as u64))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring() -> Ring {
        let memory = Arc::new(super::super::share(bytes(BLOCK_BYTES)).expect("memory"));
        Ring::new(
            &memory,
            0,
            BLOCK_BYTES,
            EventFd::new(super::super::nonblocking()).expect("an event"),
        )
    }

    /// The server gives back `head`, as its answer number `count`, with status 0.
    fn give_back(ring: &Ring, head: u32, count: u16) {
        let place = USED_AT + 4 + usize::from((count - 1) % QUEUE_SIZE) * 8;
        ring.put(place, &head.to_le_bytes()).expect("memory");
        ring.put(META_AT + head as usize / 3 * META_BYTES + HEADER_BYTES, &[0]).expect("memory");
        ring.number(USED_AT + 2).expect("memory").store(count, Ordering::Release);
    }

    #[test]
    fn request_is_laid_out_as_specified() {
        let mut ring = ring();
        ring.offer(2, Ask::Write, 8192).expect("offered");
        ring.publish().expect("published");
        assert_eq!(ring.kick.read().ok(), Some(1), "without EVENT_IDX the server is woken");
        let mut head = [0; 4];
        ring.get(AVAIL_AT + 2, &mut head).expect("memory");
        assert_eq!(head, [1, 0, 6, 0], "one is available: descriptor 6");
        let mut header = [0; HEADER_BYTES + 1];
        ring.get(META_AT + 2 * META_BYTES, &mut header).expect("memory");
        assert_eq!(header, [1, 0, 0, 0, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, NO_STATUS]);
        assert_eq!(ring.take().ok(), Some(None));
        give_back(&ring, 6, 1);
        assert_eq!(ring.take().ok(), Some(Some((2, 0))));
        assert_eq!(ring.take().ok(), Some(None));
    }

    #[test]
    fn a_server_that_wants_no_kick_gets_none() {
        let mut ring = ring();
        ring.event_idx = true;
        let event = USED_AT + 4 + usize::from(QUEUE_SIZE) * 8;
        ring.number(event).expect("memory").store(1, Ordering::Release);
        ring.offer(0, Ask::Read, 0).expect("offered");
        ring.publish().expect("published");
        assert!(ring.kick.read().is_err(), "it wants to hear of the second");
        ring.offer(1, Ask::Read, 0).expect("offered");
        ring.publish().expect("published");
        assert_eq!(ring.kick.read().ok(), Some(1));
    }

    #[test]
    fn completion_never_requested_is_refused() {
        let mut ring = ring();
        ring.offer(0, Ask::Read, 0).expect("offered");
        for head in [1, 3, 3 * 128, u32::MAX / 3 * 3] {
            let place = USED_AT + 4;
            ring.put(place, &head.to_le_bytes()).expect("memory");
            ring.number(USED_AT + 2).expect("memory").store(1, Ordering::Release);
            assert!(ring.take().is_err(), "head {head}");
        }
        give_back(&ring, 0, 1);
        assert_eq!(ring.take().ok(), Some(Some((0, 0))));
    }
}
