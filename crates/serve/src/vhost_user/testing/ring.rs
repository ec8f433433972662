//! The driver's side of a split virtqueue.

use super::Guest;
use super::front_end::event;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Options of a driver.
#[derive(Clone, Copy, Default, Debug)]
pub(in crate::vhost_user) struct Way {
    pub(in crate::vhost_user) event_idx: bool,
    pub(in crate::vhost_user) indirect: bool,
    pub(in crate::vhost_user) is_logged: bool,
    /// It sends no flushes, and has not negotiated them.
    pub(in crate::vhost_user) is_write_through: bool,
}

/// A descriptor: address, length, whether the device writes there.
pub(in crate::vhost_user) type Seg = (u64, u32, bool);

/// Bytes from one queue's rings to the next one's.
const RING_BYTES: u64 = 0x8000;
/// Where headers and statuses are, by queue and head, and indirect tables.
const META: u64 = 0x4_0000;
const META_BYTES: u64 = 64;
const TABLES: u64 = 0x6_0000;
const TABLE_BYTES: u64 = 0x400;
/// Where data begins that belongs to no test.
const SCRATCH: u64 = 0x10_0000;

pub(in crate::vhost_user) struct Ring {
    guest: Arc<Guest>,
    pub(in crate::vhost_user) index: u16,
    pub(in crate::vhost_user) size: u16,
    pub(in crate::vhost_user) way: Way,
    pub(in crate::vhost_user) kick: OwnedFd,
    pub(in crate::vhost_user) call: OwnedFd,
    free: Vec<u16>,
    chains: HashMap<u16, Vec<u16>>,
    pub(in crate::vhost_user) next_avail: u16,
    last_used: u16,
}

impl Ring {
    pub(in crate::vhost_user) fn new(guest: &Arc<Guest>, index: u16, size: u16, way: Way) -> Self {
        assert!(size <= 128, "room for the rings");
        Self {
            guest: Arc::clone(guest),
            index,
            size,
            way,
            kick: event(),
            call: event(),
            free: (0..size).rev().collect(),
            chains: HashMap::new(),
            next_avail: 0,
            last_used: 0,
        }
    }

    pub(in crate::vhost_user) fn desc(&self) -> u64 {
        u64::from(self.index) * RING_BYTES
    }

    pub(in crate::vhost_user) fn avail(&self) -> u64 {
        self.desc() + 0x2000
    }

    pub(in crate::vhost_user) fn used(&self) -> u64 {
        self.desc() + 0x4000
    }

    pub(in crate::vhost_user) fn guest(&self) -> &Guest {
        &self.guest
    }

    fn number(&self, at: u64) -> u16 {
        u16::from_le_bytes(*self.guest.get(at, 2).first_chunk().expect("2 bytes"))
    }

    pub(in crate::vhost_user) fn used_idx(&self) -> u16 {
        self.number(self.used() + 2)
    }

    /// Where the header of `head` is; its status follows at 16.
    pub(in crate::vhost_user) fn meta(&self, head: u16) -> u64 {
        META + (u64::from(self.index) * 128 + u64::from(head)) * META_BYTES
    }

    pub(in crate::vhost_user) fn status(&self, head: u16) -> u8 {
        self.guest.get(self.meta(head) + 16, 1)[0]
    }

    pub(in crate::vhost_user) fn put_descriptor(&self, at: u64, seg: Seg, flags: u16, next: u16) {
        let (addr, len, is_written) = seg;
        let flags = flags | u16::from(is_written) << 1;
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.guest.put(at, &bytes);
    }

    /// Writes a chain of descriptors at the numbers `at` of the table at `table`.
    fn put_chain(&self, table: u64, numbers: &[u16], segs: &[Seg]) {
        for (place, (number, seg)) in numbers.iter().zip(segs).enumerate() {
            let next = numbers.get(place + 1);
            let at = table + u64::from(*number) * 16;
            self.put_descriptor(at, *seg, u16::from(next.is_some()), next.copied().unwrap_or(0));
        }
    }

    /// Names `head` in the available ring.
    pub(in crate::vhost_user) fn put_avail(&mut self, head: u16) {
        let slot = u64::from(self.next_avail % self.size);
        self.guest.put(self.avail() + 4 + slot * 2, &head.to_le_bytes());
        self.next_avail = self.next_avail.wrapping_add(1);
        self.publish();
    }

    /// Tells the device what is available.
    pub(in crate::vhost_user) fn publish(&self) {
        fence(Ordering::SeqCst);
        self.guest.put(self.avail() + 2, &self.next_avail.to_le_bytes());
        fence(Ordering::SeqCst);
    }

    /// Offers a chain; its head.
    pub(in crate::vhost_user) fn offer(&mut self, segs: &[Seg]) -> u16 {
        let count = if self.way.indirect { 1 } else { segs.len() };
        let numbers = self.free.split_off(self.free.len() - count);
        let head = numbers[0];
        self.put_offer(&numbers, segs);
        self.chains.insert(head, numbers);
        self.put_avail(head);
        head
    }

    fn put_offer(&self, numbers: &[u16], segs: &[Seg]) {
        if !self.way.indirect {
            return self.put_chain(self.desc(), numbers, segs);
        }
        let table = TABLES + (u64::from(self.index) * 64 + u64::from(numbers[0])) * TABLE_BYTES;
        let inner: Vec<u16> = (0..).take(segs.len()).collect();
        self.put_chain(table, &inner, segs);
        let len = u32::try_from(segs.len() * 16).expect("short");
        let at = self.desc() + u64::from(numbers[0]) * 16;
        self.put_descriptor(at, (table, len, false), 4, 0);
    }

    /// Offers a request with `data` between its header and its status, each in one piece.
    pub(in crate::vhost_user) fn request(&mut self, kind: u32, sector: u64, data: &[Seg]) -> u16 {
        let head = *self.free.last().expect("room");
        // `offer` takes the numbers at the end; the first of them is the head.
        let count = if self.way.indirect { 1 } else { data.len() + 2 };
        let head = self.free.get(self.free.len() - count).copied().unwrap_or(head);
        let meta = self.meta(head);
        let header = [kind.to_le_bytes(), [0; 4]].concat();
        self.guest.put(meta, &[&header[..], &sector.to_le_bytes(), &[0xff]].concat());
        let mut segs = vec![(meta, 16, false)];
        segs.extend(data);
        segs.push((meta + 16, 1, true));
        assert_eq!(self.offer(&segs), head);
        head
    }

    pub(in crate::vhost_user) fn kick(&self) {
        rustix::io::write(&self.kick, &1_u64.to_ne_bytes()).expect("kicks");
    }

    /// Kicks if the device wants that for what was added since `before`.
    pub(in crate::vhost_user) fn kick_if_wanted(&self, before: u16) {
        if self.is_kick_wanted(before) {
            self.kick();
        }
    }

    /// Whether the device wants a kick for what was added since `before` (virtio 1.3, section
    /// 2.7.10).
    pub(in crate::vhost_user) fn is_kick_wanted(&self, before: u16) -> bool {
        fence(Ordering::SeqCst);
        let event = self.number(self.used() + 4 + u64::from(self.size) * 8);
        if self.way.event_idx {
            let behind = self.next_avail.wrapping_sub(event).wrapping_sub(1);
            behind < self.next_avail.wrapping_sub(before)
        } else {
            self.number(self.used()) & 1 == 0
        }
    }

    /// What was given back.
    pub(in crate::vhost_user) fn take_used(&mut self) -> Vec<(u16, u32)> {
        let mut given = Vec::new();
        while self.last_used != self.used_idx() {
            fence(Ordering::SeqCst);
            let at = self.used() + 4 + u64::from(self.last_used % self.size) * 8;
            let bytes = self.guest.get(at, 8);
            let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("4"));
            let head = u16::try_from(number(0)).expect("a head");
            if let Some(numbers) = self.chains.remove(&head) {
                self.free.extend(numbers.into_iter().rev());
            }
            given.push((head, number(4)));
            self.last_used = self.last_used.wrapping_add(1);
        }
        given
    }

    /// Waits for calls, and for nothing else, until `count` chains were given back.
    pub(in crate::vhost_user) fn wait_used(&mut self, count: usize) -> Vec<(u16, u32)> {
        let mut given = Vec::new();
        loop {
            given.extend(self.take_used());
            // Asks for a call with the next one, and looks again.
            let event = self.avail() + 4 + u64::from(self.size) * 2;
            self.guest.put(event, &self.last_used.to_le_bytes());
            fence(Ordering::SeqCst);
            let late = self.take_used();
            let is_asked = late.is_empty();
            given.extend(late);
            if given.len() >= count {
                return given;
            }
            if !is_asked {
                // It asked for a call with one that it has taken by now.
                continue;
            }
            assert!(self.is_called(10), "a call was lost: {} of {count}", given.len());
        }
    }

    /// Waits for a call.
    pub(in crate::vhost_user) fn is_called(&self, seconds: i64) -> bool {
        let mut fds = [PollFd::new(&self.call, PollFlags::IN)];
        let timeout = Timespec { tv_sec: seconds, tv_nsec: 0 };
        let called = poll(&mut fds, Some(&timeout)).expect("polls") > 0;
        called && rustix::io::read(&self.call, &mut [0; 8]).is_ok()
    }

    /// Does a request and waits for its end: the status and the length that is given back.
    pub(in crate::vhost_user) fn run(&mut self, kind: u32, sector: u64, data: &[Seg]) -> (u8, u32) {
        let before = self.next_avail;
        let head = self.request(kind, sector, data);
        self.kick_if_wanted(before);
        let given = self.wait_used(1);
        assert_eq!(given.len(), 1);
        assert_eq!(given[0].0, head);
        (self.status(head), given[0].1)
    }

    pub(in crate::vhost_user) fn write(&mut self, sector: u64, bytes: &[u8]) -> u8 {
        self.guest.put(SCRATCH, bytes);
        let len = u32::try_from(bytes.len()).expect("short");
        self.run(1, sector, &[(SCRATCH, len, false)]).0
    }

    pub(in crate::vhost_user) fn read(&mut self, sector: u64, len: u32) -> (u8, Vec<u8>) {
        let (status, _) = self.run(0, sector, &[(SCRATCH, len, true)]);
        (status, self.guest.get(SCRATCH, len as usize))
    }
}
