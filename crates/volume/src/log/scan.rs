//! Reads the records of a segment.

use super::chain::Part;
use super::format::{BLOCK, BLOCK_LEN, DeviceHeader, GROUP_BYTES_MAX, GroupHead};
use super::record::Record;
use mica_block::{Error, ErrorKind, Result, Store, read_exact};
use mica_rt::Buf;
use mica_units::HostOffset;

/// Calls `each` with the records of `part` that count, and their numbers, in order. Returns the
/// number after the last: what follows it is torn, missing, or of another time.
///
/// # Errors
/// What the file reports, or `each`; `Corrupt` if a group with the right sum has records that this
/// version does not know.
pub(super) async fn scan(
    file: &dyn Store,
    device: &DeviceHeader,
    part: &Part,
    each: &mut dyn FnMut(u64, Record<'_>) -> Result<()>,
) -> Result<u64> {
    let mut window = Window::new(file, device, part.slot);
    let (mut at, mut next) = (BLOCK_LEN, part.first);
    while next < part.limit && at < device.segment_bytes {
        let Some(head) = GroupHead::decode(window.bytes(at, BLOCK).await?) else { break };
        let len = head.padded_len();
        let is_next = (head.segment, head.first) == (part.number, next);
        if !is_next || !fits(&head, at, device) {
            break;
        }
        let bytes = window.bytes(at, len).await?;
        let Some(records) = head.records(&device.id, &part.session, bytes) else { break };
        if !are_records(records, head.count) {
            let at = device.at(part.slot) + at;
            let what = format!("{}: unknown records in the group at {at}", file.name());
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let mut rest = records;
        while let Some((record, tail)) = Record::decode(rest)
            && next < part.limit
        {
            each(next, record)?;
            (next, rest) = (next + 1, tail);
        }
        at += len as u64;
    }
    Ok(next)
}

/// What the groups say that are behind the end of a log.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Behind {
    /// Records below were durable when one of them was written.
    pub(super) durable: u64,
    /// Whether one does not say what was: an older version wrote it.
    pub(super) is_silent: bool,
}

impl Behind {
    /// Looks for groups of `part` from record `end` on, which is not there. A power cut leaves some
    /// that were under way together with the missing one, wherever they are; what they say was
    /// durable before it.
    ///
    /// # Errors
    /// What the file reports.
    pub(super) async fn look(
        &mut self,
        file: &dyn Store,
        device: &DeviceHeader,
        part: &Part,
        end: u64,
    ) -> Result<()> {
        let mut window = Window::new(file, device, part.slot);
        let mut at = BLOCK_LEN;
        while at < device.segment_bytes {
            let head = GroupHead::decode(window.bytes(at, BLOCK).await?);
            at += match head {
                Some(head) if is_of(&head, part) && fits(&head, at, device) => {
                    let len = head.padded_len();
                    let bytes = window.bytes(at, len).await?;
                    if head.records(&device.id, &part.session, bytes).is_some() {
                        self.durable = self.durable.max(head.durable.unwrap_or(0));
                        self.is_silent |= head.durable.is_none() && head.first >= end;
                        len as u64
                    } else {
                        BLOCK_LEN
                    }
                }
                _ => BLOCK_LEN,
            };
        }
        Ok(())
    }
}

fn is_of(head: &GroupHead, part: &Part) -> bool {
    head.segment == part.number && (part.first..part.limit).contains(&head.first)
}

fn fits(head: &GroupHead, at: u64, device: &DeviceHeader) -> bool {
    at + head.padded_len() as u64 <= device.segment_bytes
}

/// Whether `bytes` are `count` records and nothing else.
fn are_records(mut bytes: &[u8], count: u32) -> bool {
    for _ in 0..count {
        let Some((_, rest)) = Record::decode(bytes) else { return false };
        bytes = rest;
    }
    bytes.is_empty()
}

/// A part of a segment in memory.
struct Window<'a> {
    file: &'a dyn Store,
    /// Where the segment begins in the file, and how long it is.
    start: u64,
    segment_bytes: u64,
    /// The offset of what is in memory.
    at: u64,
    buf: Buf,
}

impl<'a> Window<'a> {
    fn new(file: &'a dyn Store, device: &DeviceHeader, slot: usize) -> Self {
        let (start, segment_bytes) = (device.at(slot), device.segment_bytes);
        Self { file, start, segment_bytes, at: 0, buf: Buf::new(0) }
    }

    /// `len` bytes of the segment at `at`: within the segment, and no more than a group has.
    async fn bytes(&mut self, at: u64, len: usize) -> Result<&[u8]> {
        let is_here = self.at <= at && at + len as u64 <= self.at + self.buf.len() as u64;
        if !is_here {
            let left = self.segment_bytes - at;
            let window = usize::try_from(left).unwrap_or(usize::MAX).min(GROUP_BYTES_MAX);
            let from = HostOffset::new(self.start + at);
            self.buf = read_exact(self.file, from, window).await?;
            self.at = at;
        }
        let start = usize::try_from(at - self.at).expect("within the window");
        Ok(&self.buf[start..start + len])
    }
}
