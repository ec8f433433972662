//! Concurrent requests, and the expected disk afterwards. Those of a burst do not overlap, but they
//! share clusters and tables.

use anyhow::{Context, Result, bail, ensure};
use mica_gen::Rng;
use mica_tests::guest::{Answer, Guest, Request};
use std::collections::HashMap;
use std::ops::Range;

/// Maximum number of requests of a burst.
const REQUESTS_MAX: u64 = 12;
/// Maximum number of bytes that the reads of a burst ask for: they wait in the socket while we
/// still send.
const READ_BYTES_MAX: u64 = 64 << 10;

/// The bytes that the disk has to have.
pub(super) struct Shadow {
    pub(super) bytes: Vec<u8>,
    cluster_bytes: u64,
}

/// Bytes to write: all different, or one sector repeated, or almost all zeros.
pub(super) fn content(rng: &mut Rng, len: usize) -> Vec<u8> {
    let pattern_len = match rng.below(10) {
        0..5 => len,
        5..9 => len.min(512),
        _ => {
            let mut bytes = vec![0; len];
            bytes[0] = 1;
            return bytes;
        }
    };
    let words = std::iter::repeat_with(|| rng.next_u64().to_le_bytes());
    let pattern: Vec<u8> = words.take(pattern_len / 8 + 1).flatten().collect();
    pattern[..pattern_len].iter().copied().cycle().take(len).collect()
}

impl Shadow {
    pub(super) fn new(bytes: Vec<u8>, cluster_bytes: u64) -> Self {
        Self { bytes, cluster_bytes }
    }

    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Sends a burst over `guests` and judges the answers. Returns how many requests it had.
    pub(super) fn burst(&mut self, guests: &mut [Guest; 2], rng: &mut Rng) -> Result<u64> {
        let wanted = if rng.percent(50) { 1 } else { 1 + rng.below(REQUESTS_MAX) };
        let center = rng.below(self.len());
        let (mut taken, mut read_bytes): (Vec<Range<u64>>, _) = (Vec::new(), 0);
        let mut sent: [HashMap<u64, Request>; 2] = Default::default();
        for _ in 0..wanted {
            let range = self.range(center, rng);
            if taken.iter().any(|other| other.start < range.end && range.start < other.end) {
                continue;
            }
            let mut request = self.request(&range, rng);
            if let Request::Read { len, .. } = request {
                read_bytes += u64::from(len);
                if read_bytes > READ_BYTES_MAX && !taken.is_empty() {
                    request = Request::Flush;
                }
            }
            taken.push(range);
            let over = usize::from(rng.percent(50));
            let cookie = guests[over].send(&request)?;
            sent[over].insert(cookie, request);
        }
        let mut trimmed = Vec::new();
        for (guest, mut sent) in guests.iter_mut().zip(sent) {
            while !sent.is_empty() {
                let (cookie, answer) = guest.receive()?;
                let request = sent.remove(&cookie).context("an answer to nothing")?;
                if let Request::Trim { offset, len, .. } = request {
                    trimmed.push((offset, len));
                }
                self.judge(request, &answer)?;
            }
        }
        for (offset, len) in trimmed {
            self.adopt(&mut guests[0], offset, len)?;
        }
        Ok(taken.len() as u64)
    }

    /// A range near `center` or anywhere, often along clusters, seldom across sectors.
    fn range(&self, center: u64, rng: &mut Rng) -> Range<u64> {
        let near = rng.percent(70);
        let offset = match near {
            true => (center + rng.below(2 << 20)) % self.len(),
            false => rng.below(self.len()),
        };
        let sectors = 512 * (1 + rng.below(400));
        let (unit, len) = match rng.below(10) {
            0..2 => (self.cluster_bytes, self.cluster_bytes * (1 + rng.below(2))),
            2 => (1, 1 + rng.below(70_000)),
            3..6 => (4096, 4096 * (1 + rng.below(4))),
            _ => (512, rng.choose(&[512, 1024, 8192, 65_536, 131_072, sectors])),
        };
        let offset = offset / unit * unit;
        // Limits writes of whole clusters of 2 MiB, which would take too much time.
        offset..(offset + len.min(2 << 20)).min(self.len())
    }

    fn request(&self, range: &Range<u64>, rng: &mut Rng) -> Request {
        let offset = range.start;
        let len = u32::try_from(range.end - range.start).expect("short");
        match rng.below(100) {
            0..50 => {
                let bytes = content(rng, len as usize);
                Request::Write { offset, bytes, fua: rng.percent(10) }
            }
            50..62 => Request::Zero { offset, len, no_hole: rng.percent(50), fua: false },
            62..70 => Request::Trim { offset, len, fua: false },
            70..76 => Request::Flush,
            _ => Request::Read { offset, len: len.min(64 << 10) },
        }
    }

    fn slice(&mut self, offset: u64, len: usize) -> &mut [u8] {
        let start = usize::try_from(offset).expect("small");
        &mut self.bytes[start..start + len]
    }

    fn judge(&mut self, request: Request, answer: &Answer) -> Result<()> {
        let Answer::Done(read) = answer else { bail!("{request:?} ends with {answer:?}") };
        match request {
            Request::Read { offset, .. } => same(offset, read, self.slice(offset, read.len())),
            Request::Write { offset, bytes, .. } => {
                self.slice(offset, bytes.len()).copy_from_slice(&bytes);
                Ok(())
            }
            Request::Zero { offset, len, .. } => {
                self.slice(offset, len as usize).fill(0);
                Ok(())
            }
            Request::Trim { .. } | Request::Flush => Ok(()),
        }
    }

    /// What a trim left is the old content or zeros; from now on it must not change.
    fn adopt(&mut self, guest: &mut Guest, offset: u64, len: u32) -> Result<()> {
        let Answer::Done(read) = guest.read(offset, len)? else { bail!("a read is refused") };
        let old = self.slice(offset, read.len());
        for (at, (read, old)) in (offset..).zip(read.iter().zip(&mut *old)) {
            ensure!(*read == 0 || read == old, "a trim left {read:#04x} at {at:#x}");
            *old = *read;
        }
        Ok(())
    }
}

/// The bytes at `offset` are those that were wanted.
pub(super) fn same(offset: u64, read: &[u8], wanted: &[u8]) -> Result<()> {
    // All at once: comparing byte by byte is slow in a debug build.
    if read == wanted {
        return Ok(());
    }
    ensure!(read.len() == wanted.len(), "{} bytes instead of {}", read.len(), wanted.len());
    let Some(at) = read.iter().zip(wanted).position(|(read, wanted)| read != wanted) else {
        return Ok(());
    };
    let wrong = read.iter().zip(wanted).filter(|(read, wanted)| read != wanted).count();
    let place = offset + at as u64;
    bail!(
        "byte {place:#x} is {:#04x} instead of {:#04x}; {wrong} are wrong of {:#x} at {offset:#x}",
        read[at],
        wanted[at],
        read.len()
    )
}
