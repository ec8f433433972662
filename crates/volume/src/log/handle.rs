//! The log of one volume that is open: what is pushed, written, synced and freed.
//!
//! ```text
//! push ─▶ group that fills ─▶ full groups, in order ─▶ one write at a time ─▶ sync of the device
//! ```

use super::appender::{Appender, NotPushed};
use super::chain::Part;
use super::device::LogDevice;
use super::format::{Kind, SegmentHeader};
use super::group::Group;
use super::record::{RECORD_BYTES_MAX, Record};
use super::scan::scan;
use super::slots::{LogKey, Phase, Usage};
use super::tail::Tail;
use crate::crypt::Cipher;
use crate::place::Writer;
use crate::recent::Block;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::spawn;
use std::ops::Range;
use std::sync::Arc;

/// The log of one volume. Dropping it leaves what is in it to the next process, or the next
/// [`LogDevice::go_on`].
pub struct Log {
    inner: Arc<Appender>,
    recovered: Range<u64>,
}

/// Names a record that was pushed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(u64);

impl Ticket {
    /// The record's number.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// How full a log is: its own share of the device, or the whole device if that is less full.
/// Nobody is full because of what others have, nor while there is room that nobody wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Room {
    /// Bytes that cannot be used now.
    pub used: u64,
    /// All that can be used.
    pub len: u64,
}

impl Room {
    /// The less full of two.
    fn or(self, other: Self) -> Self {
        let part = |of: Self, other: Self| u128::from(of.used) * u128::from(other.len);
        if part(other, self) < part(self, other) { other } else { self }
    }
}

impl Log {
    /// A log with `parts` to which `segment` is added, whose header is written next.
    pub(super) fn new(
        device: Arc<LogDevice>,
        key: LogKey,
        parts: Vec<Part>,
        (slot, header): (usize, &SegmentHeader),
        recovered: Range<u64>,
    ) -> Self {
        let tail = Tail::new(parts, slot, header, recovered.start);
        let inner = Appender::new(device, key, header.store, tail);
        Self { inner: Arc::new(inner), recovered }
    }

    /// The header of its tail is durable: other segments of the log are not needed any more.
    pub(super) fn is_named(&self) {
        let Appender { device, key, .. } = &*self.inner;
        let mut tail = self.inner.tail();
        let mut slots = device.slots();
        slots.release_all_but(*key, tail.parts.make_contiguous());
        slots.set_phase(*key, Phase::Open { has_records: false });
        tail.trim(&mut slots);
    }

    /// The blocks that are pushed from now on are encrypted, and those that are read decrypted.
    pub(crate) fn encrypt_with(&self, cipher: Cipher) {
        let device = &self.inner.device;
        let of_records = cipher.of_log(&device.header.id, &device.session);
        // A log has one volume, and that one secret.
        self.inner.cipher.get_or_init(|| (cipher, of_records));
    }

    /// The records that were found when it was opened: those from the one asked for on.
    pub fn recovered(&self) -> Range<u64> {
        self.recovered.clone()
    }

    /// The number that the next record gets.
    pub fn next(&self) -> u64 {
        self.inner.tail().next
    }

    /// Adds a record. Copies it, and never waits; the order of records is that of the calls. It is
    /// written when somebody waits for it, or for one that was pushed later.
    ///
    /// # Errors
    /// Nothing was pushed.
    ///
    /// # Panics
    /// If the record cannot be one of a volume.
    pub fn push(&self, record: Record<'_>) -> std::result::Result<Ticket, NotPushed> {
        self.push_with(&record, |group| group.push(&record))
    }

    /// As [`Self::push`], of `block`, which becomes `data`. That is not copied if it is one of many
    /// that were written at once.
    pub(crate) fn push_block(
        &self,
        block: u64,
        data: &Block,
    ) -> std::result::Result<Ticket, NotPushed> {
        let record = Record::Data { block, bytes: data };
        // What is encrypted is changed, in a copy.
        match data.is_of_many() && self.inner.cipher.get().is_none() {
            true => self.push_with(&record, |group| group.push_block(block, data)),
            false => self.push(record),
        }
    }

    fn push_with(
        &self,
        record: &Record<'_>,
        push: impl FnOnce(&mut Group),
    ) -> std::result::Result<Ticket, NotPushed> {
        assert!(record.is_valid(), "{record:?} is not a record of a volume");
        let mut tail = self.inner.tail();
        let len = record.encoded_len();
        if !tail.filling.as_ref().is_some_and(|group| group.has_room(len)) {
            self.inner.begin_group(&mut tail)?;
        }
        push(tail.filling.as_mut().expect("there is one now"));
        let ticket = Ticket(tail.next);
        tail.next += 1;
        Ok(ticket)
    }

    /// Waits until there may be room for a record.
    ///
    /// # Errors
    /// Why the log takes no more records.
    pub async fn has_room(&self) -> Result<()> {
        let device = &self.inner.device;
        loop {
            let room_made = {
                let slots = device.slots();
                slots.check()?;
                slots.room_made
            };
            let (has_room, next, may_sync, is_coming) = {
                let tail = self.inner.tail();
                let slots = device.slots();
                let has_room = self.inner.room_for_group(&tail, &slots).is_some();
                let fills =
                    tail.filling.as_ref().is_some_and(|group| group.has_room(RECORD_BYTES_MAX));
                let unwritten = (tail.written < tail.next).then_some(tail.next);
                let is_coming = slots.has_held(self.inner.key);
                (has_room || fills, unwritten, slots.may_sync(), is_coming)
            };
            if has_room {
                return Ok(());
            }
            if let Some(next) = next {
                self.inner.wait_until(|tail| tail.written >= next).await?;
                continue;
            }
            // What frees segments may be on its way, with less than a sync of everything.
            if !is_coming && may_sync {
                device.sync().await?;
            } else if is_coming || !device.erase().await? {
                let changed = || {
                    let slots = device.slots();
                    (slots.latch.is_some() || slots.room_made != room_made).then_some(())
                };
                device.room.until(changed).await;
            }
        }
    }

    /// Waits until the record, and all before it, are in the file: they survive the death of the
    /// process.
    ///
    /// # Errors
    /// If a write or a sync on the device failed.
    pub async fn written(&self, ticket: Ticket) -> Result<()> {
        self.inner.wait_until(|tail| tail.written > ticket.0).await
    }

    /// Waits until everything that was pushed before this call is durable.
    ///
    /// # Errors
    /// As [`Self::written`].
    pub async fn sync(&self) -> Result<()> {
        let next = self.next();
        self.inner.wait_until(|tail| tail.written >= next).await?;
        let change = self.inner.tail().change;
        let is_durable = {
            let slots = self.inner.device.slots();
            slots.check()?;
            slots.durable() >= change
        };
        if !is_durable {
            self.inner.device.sync().await?;
        }
        // What was written meanwhile hides it from the count of changes.
        let mut tail = self.inner.tail();
        tail.durable = tail.durable.max(next);
        Ok(())
    }

    /// Bytes that a sync would have to write, at most; those of the device's other logs, too.
    pub fn unsynced(&self) -> u64 {
        self.inner.device.unsynced()
    }

    /// Makes durable what is written, as [`Self::sync`], in the background.
    pub fn sync_in_background(&self) {
        let device = Arc::clone(&self.inner.device);
        // If it fails, nothing is acknowledged any more.
        self.inner.background.spawn(async move { drop(device.sync_here().await) });
    }

    /// Waits until nothing is done for the log in the background any more, on whatever executor:
    /// the device is free when its last log was dropped, and an executor that ends leaves nothing
    /// half done.
    pub async fn rest(&self) {
        self.inner.background.over().await;
    }

    /// Records below `below` are not needed any more: all of them are in extents that were
    /// answered, without a gap.
    pub fn free(&self, below: u64) {
        let device = &self.inner.device;
        {
            let mut tail = self.inner.tail();
            tail.freed = tail.freed.max(below.min(tail.next));
            let mut slots = device.slots();
            tail.trim(&mut slots);
            // A tail with nothing that is needed may be room by itself.
            slots.room_made += 1;
        }
        device.room.wake_all();
    }

    /// Calls `each` with every record from `from` on that is written and was not freed, and its
    /// number, in order.
    ///
    /// # Errors
    /// What the file reports, or `each`; `Corrupt` if a record is not as it was written, or is
    /// encrypted and the volume is not.
    pub async fn read(
        &self,
        from: u64,
        mut each: impl FnMut(u64, Record<'_>) -> Result<()>,
    ) -> Result<()> {
        let (parts, written) = {
            let tail = self.inner.tail();
            (tail.parts.clone(), tail.written)
        };
        let device = &self.inner.device;
        for part in parts.into_iter().filter(|part| part.limit > from && part.first < written) {
            let part = Part { limit: part.limit.min(written), ..part };
            let cipher = self.inner.cipher.get().map(|(cipher, _)| cipher);
            let cipher = cipher.map(|cipher| cipher.of_log(&device.header.id, &part.session));
            let mut wanted = |number, record: Record<'_>| match record {
                _ if number < from => Ok(()),
                Record::Encrypted { block, bytes } => {
                    let Some(cipher) = &cipher else {
                        let name = device.file.name();
                        let what = format!("the log {name} is encrypted, and its volume is not");
                        return Err(Error::new(ErrorKind::Corrupt, what));
                    };
                    let mut bytes = *bytes;
                    cipher.decrypt(part.number, number, &mut bytes);
                    each(number, Record::Data { block, bytes: &bytes })
                }
                record => each(number, record),
            };
            let end = scan(&*device.file, &device.header, &part, &mut wanted).await?;
            if end < part.limit {
                let what = format!("the log {} has lost record {end}", device.file.name());
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        Ok(())
    }

    /// How full it is, for back pressure.
    pub fn room(&self) -> Room {
        let tail = self.inner.tail();
        let Usage { used, all, logs } = self.inner.device.slots().usage();
        let segment_bytes = self.inner.device.header.segment_bytes;
        let left = segment_bytes - tail.end().min(segment_bytes);
        let room = |used: usize, len| Room {
            used: (used as u64 * segment_bytes).saturating_sub(left),
            len,
        };
        let len = all as u64 * segment_bytes;
        room(used, len).or(room(tail.parts.len(), len / logs.max(1) as u64))
    }

    /// The volume is `writer`'s for certain: the log names no other from its next segment on.
    pub fn only(&self, writer: Writer) {
        self.inner.tail().writers = vec![writer];
    }

    /// Ends the log: the store has all of it, and nothing is pushed any more. Durable when this
    /// returns.
    ///
    /// # Errors
    /// As [`Self::written`]. The log is found again then.
    pub async fn end(&self) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        spawn(async move {
            let next = inner.tail().next;
            inner.wait_until(|tail| tail.written >= next).await?;
            // Nothing of it is written behind its back.
            let is_still = || {
                let slots = inner.device.slots();
                (slots.latch.is_some() || !slots.has_held(inner.key)).then_some(())
            };
            inner.device.room.until(is_still).await;
            let writers = inner.tail().writers.clone();
            let header = inner.device.segment(inner.store, inner.key, next, writers);
            inner.device.end_log(Kind::Ended, header).await
        })
        .await
    }
}
