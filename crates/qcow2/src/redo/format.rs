//! The bytes of a log: header, groups, records.

use mica_block::{RedoMemory, RedoOrigin, Result, Store, Witness};
use mica_map::{crc32c, crc32c_of};
use std::sync::Arc;

/// The autoclear bits that name the log of a writer: any other program that opens the image for
/// writing clears them, as it must with bits that it does not know.
pub(crate) const LOG_NAME_SHIFT: u32 = 32;

pub(super) const MAGIC: [u8; 8] = *b"micalog\x07";
pub(super) const HEADER_BYTES: usize = 100;
/// A log has two headers, written in turn: a process killed while writing one leaves the other.
pub(super) const HEADERS_AT: [u64; 2] = [0, 512];
pub(super) const RECORDS_AT: u64 = 4096;
pub(super) const GROUP_HEAD_BYTES: usize = 24;
pub(super) const RECORD_HEAD_BYTES: usize = 16;
const _: () = assert!(HEADER_BYTES as u64 <= RECORDS_AT);

/// Kinds of records: a range that is written with the early pages, or with the late ones.
pub(super) const EARLY: u32 = 0;
pub(super) const LATE: u32 = 1;
/// What is known of the clusters of the file: see [`SpaceState`](super::baseline::SpaceState).
pub(super) const SPACE: u32 = 2;
/// Evidence that the data linked by the groups up to this one is still there: for the image file,
/// and for the data file if there is one. Content: for each, kind u64, value i128.
pub(super) const WITNESSES: u32 = 3;
const WITNESS_BYTES: usize = 24;
/// A range that becomes zeros, as [`EARLY`] and [`LATE`]; it has no content, so a new table of 2
/// MiB is one record.
pub(super) const EARLY_ZEROS: u32 = 4;
pub(super) const LATE_ZEROS: u32 = 5;
/// The fields of the header: see [`HeaderState`](super::baseline::HeaderState).
pub(super) const HEADER: u32 = 7;
/// Ranges shorter than this have content even if it is zeros.
pub(super) const ZEROS_LEN_MIN: usize = 64;
/// Pages of zeros in a log at most. A reader holds everything that it changes in memory at once.
pub(super) const ZERO_PAGES_MAX: u64 = 1 << 15;

/// Appends the start of every record: it is of `len` bytes at `at`.
pub(super) fn append_head(bytes: &mut Vec<u8>, at: u64, len: usize, kind: u32) {
    let len = u32::try_from(len).expect("a page, or few numbers");
    bytes.extend_from_slice(&at.to_le_bytes());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
}

/// The present witnesses of `stores`.
pub(super) fn witnesses_of(stores: &[Arc<dyn Store>]) -> Vec<Witness> {
    stores.iter().map(|store| store.witness()).collect()
}

/// Appends `witnesses` as a record.
pub(super) fn append_witnesses(witnesses: &[Witness], bytes: &mut Vec<u8>) {
    append_head(bytes, 0, witnesses.len() * WITNESS_BYTES, WITNESSES);
    for witness in witnesses {
        let (kind, value) = match *witness {
            Witness::None => (0, 0),
            Witness::MountGeneration(number) => (1, i128::from(number)),
            Witness::Changed(time_ns) => (2, time_ns),
        };
        bytes.extend_from_slice(&u64::to_le_bytes(kind));
        bytes.extend_from_slice(&value.to_le_bytes());
    }
}

/// Decodes a record of witnesses; `None` if it is malformed.
pub(super) fn decode_witnesses(content: &[u8]) -> Option<Vec<Witness>> {
    let (witnesses, []) = content.as_chunks::<WITNESS_BYTES>() else { return None };
    let decode = |bytes: &[u8; WITNESS_BYTES]| {
        let value = i128::from_le_bytes(*bytes[8..].first_chunk()?);
        match u64::from_le_bytes(*bytes.first_chunk()?) {
            0 => Some(Witness::None),
            1 => u64::try_from(value).ok().map(Witness::MountGeneration),
            2 => Some(Witness::Changed(value)),
            _ => None,
        }
    };
    witnesses.iter().map(decode).collect()
}

/// The header of a log.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LogHeader {
    /// Included in the checksums of its groups.
    pub(super) salt: u32,
    /// The image's name for it: one or, while a group is made durable, either this or the next one.
    pub(super) names: [u32; 2],
    /// Of the memory that it was written to.
    pub(super) origin: RedoOrigin,
    /// The place of the first group that counts.
    pub(super) start: u64,
    /// Its number.
    pub(super) number: u64,
    /// One higher than in the header that was written before.
    pub(super) sequence: u64,
    /// When it was written.
    pub(super) time_ns: i64,
    /// The number of the group after all that were there then.
    pub(super) next: u64,
    /// A process began to replay it.
    pub(super) replay_began: bool,
}

impl LogHeader {
    pub(super) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.salt.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.names[0].to_le_bytes());
        bytes[16..32].copy_from_slice(&self.origin.boot.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.start.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.number.to_le_bytes());
        bytes[48..52].copy_from_slice(&self.names[1].to_le_bytes());
        bytes[52..60].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[60..76].copy_from_slice(&self.origin.memory.to_le_bytes());
        bytes[76..84].copy_from_slice(&self.time_ns.to_le_bytes());
        bytes[84..92].copy_from_slice(&self.next.to_le_bytes());
        bytes[92..96].copy_from_slice(&u32::from(self.replay_began).to_le_bytes());
        let sum = crc32c(&bytes[..HEADER_BYTES - 4]);
        bytes[HEADER_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes the header in `bytes`; `None` if it is malformed.
    pub(super) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Self> {
        let sum = u32::from_le_bytes(*bytes.last_chunk()?);
        if bytes[..8] != MAGIC || sum != crc32c(&bytes[..HEADER_BYTES - 4]) {
            return None;
        }
        let small = |at: usize| bytes[at..].first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
        let number = |at: usize| bytes[at..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
        let large = |at: usize| bytes[at..].first_chunk().map(|bytes| u128::from_le_bytes(*bytes));
        Some(Self {
            salt: small(8)?,
            names: [small(12)?, small(48)?],
            origin: RedoOrigin { boot: large(16)?, memory: large(60)? },
            start: number(32)?,
            number: number(40)?,
            sequence: number(52)?,
            time_ns: number(76)?.cast_signed(),
            next: number(84)?,
            replay_began: small(92)? != 0,
        })
    }

    /// Writes it to the log in `out`, in place of the older one of the two.
    pub(super) fn write(&self, out: &dyn RedoMemory) -> Result<()> {
        let [even, odd] = HEADERS_AT;
        let at = if self.sequence.is_multiple_of(2) { even } else { odd };
        out.write_at(at, &self.encode())
    }
}

/// The header of the log in `out`: the later one. The other one counts only while the later one is
/// not whole; what it says besides is of the past.
pub(super) fn read_header(out: &dyn RedoMemory) -> Result<Option<LogHeader>> {
    let mut last: Option<LogHeader> = None;
    for at in HEADERS_AT {
        let mut bytes = [0; HEADER_BYTES];
        out.read_at(at, &mut bytes)?;
        let header = LogHeader::decode(&bytes);
        let before = last.as_ref().map_or(0, |last| last.sequence);
        if let Some(header) = header.filter(|header| header.sequence > before) {
            last = Some(header);
        }
    }
    Ok(last)
}

/// Where the half begins that `at` is not in, of a log with this `capacity`.
pub(super) fn other_half(at: u64, capacity: u64) -> u64 {
    let middle = capacity / 2;
    if at < middle { middle } else { RECORDS_AT }
}

/// The start of a group: what its records are preceded by.
#[derive(Clone, Copy)]
pub(super) struct GroupHead {
    pub(super) number: u64,
    /// When it was written.
    pub(super) time_ns: i64,
    /// Bytes of its records.
    pub(super) len: u32,
    pub(super) sum: u32,
}

impl GroupHead {
    /// For these `records`. The checksum covers the log's salt and the group's number too, so that
    /// remains of an earlier group or log are not taken for a later one.
    pub(super) fn of(salt: u32, number: u64, time_ns: i64, records: &[u8]) -> Self {
        let (salt, number_bytes) = (salt.to_le_bytes(), number.to_le_bytes());
        let sum = crc32c_of(&[&salt, &number_bytes, &time_ns.to_le_bytes(), records]);
        let len = u32::try_from(records.len()).expect("within the log");
        Self { number, time_ns, len, sum }
    }

    pub(super) fn encode(&self) -> [u8; GROUP_HEAD_BYTES] {
        let mut bytes = [0; GROUP_HEAD_BYTES];
        bytes[..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.time_ns.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.len.to_le_bytes());
        bytes[20..].copy_from_slice(&self.sum.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; GROUP_HEAD_BYTES]) -> Self {
        let (longs, _) = bytes.as_chunks();
        let (words, _) = bytes.as_chunks();
        Self {
            number: u64::from_le_bytes(longs[0]),
            time_ns: i64::from_le_bytes(longs[1]),
            len: u32::from_le_bytes(words[4]),
            sum: u32::from_le_bytes(words[5]),
        }
    }
}

/// A time as headers and groups have it: until the year 2262.
pub(super) fn time_of(now_ns: i128) -> i64 {
    i64::try_from(now_ns).unwrap_or(i64::MAX)
}

/// The log's name in the autoclear `bits` of an image.
pub(crate) fn names_log(bits: u64) -> Option<u32> {
    u32::try_from(bits >> LOG_NAME_SHIFT).ok().filter(|name| *name != 0)
}

/// The name after `name`. Zero is not a name.
pub(super) fn name_after(name: u32) -> u32 {
    name.wrapping_add(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    const ORIGIN: RedoOrigin = RedoOrigin { boot: 2, memory: 9 };

    struct Memory(Mutex<Vec<u8>>);

    impl Memory {
        fn put(&self, names: [u32; 2], sequence: u64) {
            let (salt, origin, start, number) = (1, ORIGIN, RECORDS_AT, 3);
            let header = LogHeader {
                salt,
                names,
                origin,
                start,
                number,
                sequence,
                time_ns: 0,
                next: number,
                replay_began: false,
            };
            header.write(self).expect("it has room");
        }

        fn goes_by(&self, name: u32) -> Option<u64> {
            let header = read_header(self).expect("it is read")?;
            header.names.contains(&name).then_some(header.sequence)
        }
    }

    impl RedoMemory for Memory {
        fn renew(&self) -> Result<RedoOrigin> {
            self.origin()
        }

        fn origin(&self) -> Result<RedoOrigin> {
            Ok(ORIGIN)
        }

        fn now_ns(&self) -> i128 {
            0
        }

        fn changed_ns(&self) -> Result<i128> {
            Ok(0)
        }

        fn capacity(&self) -> u64 {
            RECORDS_AT
        }

        fn read_at(&self, at: u64, buf: &mut [u8]) -> Result<()> {
            let at = usize::try_from(at).expect("small");
            buf.copy_from_slice(&self.0.lock()[at..at + buf.len()]);
            Ok(())
        }

        fn write_at(&self, at: u64, bytes: &[u8]) -> Result<()> {
            let at = usize::try_from(at).expect("small");
            self.0.lock()[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        }

        fn remove(&self) {}
    }

    /// The story: the header before had the old name still, and an older copy of the image was
    /// believed by it.
    #[test]
    fn abandoned_name_is_not_a_name_while_the_header_before_has_it() {
        let memory = Memory(Mutex::new(vec![0; 4096]));
        assert_eq!(memory.goes_by(7), None);
        memory.put([7, 8], 1);
        assert_eq!((memory.goes_by(7), memory.goes_by(8)), (Some(1), Some(1)));
        memory.put([8, 8], 2);
        assert_eq!((memory.goes_by(7), memory.goes_by(8)), (None, Some(2)));
        // The later one is not whole: its writer died while it was written.
        memory.write_at(HEADERS_AT[0] + 20, &[0xff]).expect("it has room");
        assert_eq!((memory.goes_by(7), memory.goes_by(8)), (Some(1), Some(1)));
    }
}
