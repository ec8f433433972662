//! Records that are written together, in one buffer.

use super::format::{BLOCK, GROUP_BYTES_MAX, GROUP_HEAD_BYTES, GroupHead, SegmentHeader};
use super::record::{Record, encrypt_blocks};
use crate::crypt::LogCipher;
use crate::format::Id;
use mica_rt::Buf;

/// A group that fills, or waits to be written.
pub(super) struct Group {
    buf: Buf,
    /// Where its head is in the buffer: behind the header of the segment, if it begins one.
    head_at: usize,
    /// Bytes of the buffer in use.
    end: usize,
    count: u32,
    /// Most bytes of the buffer.
    end_max: usize,
    pub(super) place: Place,
    /// The number of its first record.
    pub(super) first: u64,
}

/// Where a group goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) slot: usize,
    /// The number of the segment.
    pub(super) segment: u64,
    /// The offset in the segment.
    pub(super) at: u64,
}

impl Group {
    /// A group at `place` of a segment with `room` bytes from there on. It is preceded by `header`
    /// if it begins the segment. `buf` is as long as a group may become.
    pub(super) fn new(
        buf: Buf,
        place: Place,
        room: u64,
        header: Option<&SegmentHeader>,
        first: u64,
    ) -> Self {
        let end_max = usize::try_from(room).unwrap_or(usize::MAX).min(buf.len());
        let mut group = Self { buf, head_at: 0, end: 0, count: 0, end_max, place, first };
        if let Some(header) = header {
            group.buf.put(0, &header.encode());
            group.head_at = BLOCK;
        }
        group.end = group.head_at + GROUP_HEAD_BYTES;
        group
    }

    /// A buffer for a group.
    pub(super) fn buffer() -> Buf {
        Buf::new(GROUP_BYTES_MAX)
    }

    /// Whether `len` more bytes fit.
    pub(super) fn has_room(&self, len: usize) -> bool {
        self.end + len <= self.end_max
    }

    /// # Panics
    /// If it does not fit.
    pub(super) fn push(&mut self, record: &Record<'_>) {
        let len = record.encoded_len();
        assert!(self.has_room(len), "the group is full");
        record.encode(&mut self.buf.own_bytes()[self.end..self.end + len]);
        self.end += len;
        self.count += 1;
    }

    /// Whether the group begins its segment.
    pub(super) fn begins_segment(&self) -> bool {
        self.head_at > 0
    }

    /// The number after its last record.
    pub(super) fn next(&self) -> u64 {
        self.first + u64::from(self.count)
    }

    /// Bytes that it takes in the file.
    pub(super) fn padded_len(&self) -> usize {
        match self.count {
            0 => self.head_at,
            _ => self.end.next_multiple_of(BLOCK),
        }
    }

    /// What is to be written at its place: a multiple of blocks, which say that records below
    /// `durable` are. The blocks in it are encrypted if there is a cipher.
    pub(super) fn finish(
        mut self,
        (device, session): (&Id, &Id),
        durable: u64,
        cipher: Option<&LogCipher>,
    ) -> Buf {
        let len = self.padded_len();
        if self.count > 0 {
            let (head_at, records_at) = (self.head_at, self.head_at + GROUP_HEAD_BYTES);
            if let Some(cipher) = cipher {
                let segment = self.place.segment;
                let records = &mut self.buf.own_bytes()[records_at..self.end];
                encrypt_blocks(records, self.first, |number, block| {
                    cipher.encrypt(segment, number, block);
                });
            }
            let records = &self.buf[records_at..self.end];
            let head = GroupHead {
                len: records.len(),
                count: self.count,
                segment: self.place.segment,
                first: self.first,
                durable: Some(durable),
            };
            let head = head.encode(device, session, records);
            self.buf.put(head_at, &head);
            // What was in the buffer is nobody's business.
            self.buf.fill_part(self.end..len, 0);
        }
        self.buf.truncate(len);
        self.buf
    }
}
