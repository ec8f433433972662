//! The bytes of backups: encode and decode, no I/O.
//!
//! docs/formats/backup.md specifies them. Nothing that is decoded here is trusted: lengths are
//! bounded before anything is done with them.

use crate::names::{check_disk, check_state};
use mica_block::{Error, ErrorKind};
use mica_map::{crc32c, crc32c_of};
use mica_units::SECTOR_BYTES;
use std::fmt;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub(crate) const BEGIN_MAGIC: [u8; 8] = *b"MICABAK\n";
pub(crate) const MANIFEST_MAGIC: [u8; 8] = *b"MICAMAN\n";
pub(crate) const VERSION: u32 = 1;
/// Bytes of what a step begins with.
pub(crate) const BEGIN_BYTES: usize = size_of::<RawBegin>();
/// Bytes of a part before its data.
pub(crate) const PART_BYTES: usize = size_of::<RawPart>();
/// Bytes of what a manifest begins with.
pub(crate) const HEAD_BYTES: usize = size_of::<RawHead>();
/// Bytes of an entry of a manifest.
pub(crate) const ENTRY_BYTES: usize = size_of::<RawEntry>();
/// Bytes of the sum that a manifest ends with.
pub(crate) const SUM_BYTES: usize = 4;
/// Bytes of the disk in a part with data, at most.
pub(crate) const DATA_BYTES_MAX: u64 = 1 << 20;
/// Bytes of a disk, at most: 2^62.
pub(crate) const LEN_MAX: u64 = 1 << 62;
/// Entries of a manifest, at most: 32 TiB of data in whole parts.
pub(crate) const ENTRIES_MAX: u64 = 1 << 25;

const DATA: u32 = 1;
const PACKED: u32 = 2;
const ZEROS: u32 = 3;
const END: u32 = 4;

/// What a step makes of what.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Begin {
    /// The disk.
    pub disk: String,
    /// The state that there is after it.
    pub state: String,
    /// The state that it goes on from; `None` if it is whole: it goes on from zeros.
    pub base: Option<String>,
    /// Bytes of the disk.
    pub len: u64,
    /// When the state was, in nanoseconds since 1970.
    pub time_ns: u64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawBegin {
    pub(crate) magic: [u8; 8],
    pub(crate) version: U32,
    pub(crate) disk_len: U16,
    pub(crate) state_len: U16,
    pub(crate) base_len: U16,
    pub(crate) reserved: [u8; 6],
    pub(crate) len: U64,
    pub(crate) time_ns: U64,
    pub(crate) disk: [u8; 256],
    pub(crate) state: [u8; 256],
    pub(crate) base: [u8; 256],
    pub(crate) padding: [u8; 212],
    /// CRC-32C of all bytes before this field.
    pub(crate) checksum: U32,
}

const _: () = assert!(BEGIN_BYTES == 1024 && PART_BYTES == 40);
const _: () = assert!(HEAD_BYTES == 64 && ENTRY_BYTES == 32);

impl Begin {
    /// Checks what a reader refuses: nothing else is ever written.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let invalid = |what| Err(Error::new(ErrorKind::Invalid, what));
        check_disk(&self.disk)?;
        check_state(&self.state)?;
        if let Some(base) = &self.base {
            check_state(base)?;
            if *base == self.state {
                let what = format!("the state {base:?} cannot be based on itself: choose another");
                return invalid(what);
            }
        }
        if !is_len(self.len) {
            let what = format!("no disk of a backup can have {} bytes: it has sectors", self.len);
            return invalid(what);
        }
        Ok(())
    }

    /// Its bytes, once it was checked.
    pub(crate) fn encode(&self) -> [u8; BEGIN_BYTES] {
        let base = self.base.as_deref().unwrap_or_default();
        let [(disk, disk_len), (state, state_len), (base, base_len)] =
            [&self.disk, &self.state, base].map(padded);
        let mut raw = RawBegin {
            magic: BEGIN_MAGIC,
            version: VERSION.into(),
            disk_len,
            state_len,
            base_len,
            reserved: [0; 6],
            len: self.len.into(),
            time_ns: self.time_ns.into(),
            disk,
            state,
            base,
            padding: [0; 212],
            checksum: 0.into(),
        };
        raw.checksum = crc32c(&raw.as_bytes()[..BEGIN_BYTES - SUM_BYTES]).into();
        zerocopy::transmute!(raw)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let raw = RawBegin::read_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
        check_frame(bytes, BEGIN_MAGIC, raw.version, raw.checksum)?;
        let begin = Self::of_raw(&raw).ok_or(Malformed::Content)?;
        // There is one form: what is not used is zero.
        if begin.encode() == bytes { Ok(begin) } else { Err(Malformed::Content) }
    }

    fn of_raw(raw: &RawBegin) -> Option<Self> {
        let disk = text(&raw.disk, raw.disk_len)?;
        let state = text(&raw.state, raw.state_len)?;
        let base = text(&raw.base, raw.base_len)?;
        let base = (!base.is_empty()).then_some(base);
        let (len, time_ns) = (raw.len.get(), raw.time_ns.get());
        let begin = Self { disk, state, base, len, time_ns };
        begin.check().is_ok().then_some(begin)
    }
}

fn is_len(len: u64) -> bool {
    len <= LEN_MAX && len.is_multiple_of(SECTOR_BYTES)
}

fn padded(name: &str) -> ([u8; 256], U16) {
    let mut bytes = [0; 256];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    (bytes, u16::try_from(name.len()).expect("a name that was checked").into())
}

fn text(bytes: &[u8; 256], len: U16) -> Option<String> {
    let bytes = bytes.get(..usize::from(len.get()))?;
    std::str::from_utf8(bytes).ok().map(str::to_owned)
}

/// Checks the magic, the version, and the sum that the last four bytes are.
fn check_frame(bytes: &[u8], magic: [u8; 8], version: U32, sum: U32) -> Result<(), Malformed> {
    if !bytes.starts_with(&magic) {
        return Err(Malformed::Magic);
    }
    if sum.get() != crc32c(&bytes[..bytes.len() - SUM_BYTES]) {
        return Err(Malformed::Checksum);
    }
    match version.get() {
        VERSION => Ok(()),
        version => Err(Malformed::Version(version)),
    }
}

/// Why bytes are not what they were taken for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Malformed {
    /// They end too early.
    Truncated,
    /// So many others are behind them.
    Longer(u64),
    /// They are something else.
    Magic,
    /// Written by a version of mica that has another format.
    Version(u32),
    /// They were changed.
    Checksum,
    /// They contradict themselves.
    Content,
}

impl Malformed {
    /// As an error of `what`.
    pub(crate) fn of(self, what: impl fmt::Display) -> Error {
        let kind = match self {
            Self::Version(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Corrupt,
        };
        Error::new(kind, format!("{what}: {self}"))
    }
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("it ends too early"),
            Self::Longer(more) => write!(f, "{more} bytes are behind its end"),
            Self::Magic => f.write_str("this is something else"),
            Self::Version(version) => {
                write!(f, "it has version {version} of the format, which a newer mica reads")
            }
            Self::Checksum => f.write_str("its checksum does not match"),
            Self::Content => f.write_str("it contradicts itself"),
        }
    }
}

/// What a part has of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// A piece of the disk.
    Piece(Piece),
    /// There is nothing more.
    End(Total),
}

/// A piece of the disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) len: u64,
    /// Bytes that are stored of it: none of zeros, fewer than it has if they are compressed.
    pub(crate) stored: u32,
    /// CRC-32C of its bytes; 0 of zeros.
    pub(crate) sum: u32,
}

impl Piece {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.len
    }

    pub(crate) fn is_zeros(&self) -> bool {
        self.stored == 0
    }

    /// Bytes of data that it has of the disk.
    pub(crate) fn data_bytes(&self) -> u64 {
        if self.is_zeros() { 0 } else { self.len }
    }

    pub(crate) fn is_packed(&self) -> bool {
        !self.is_zeros() && u64::from(self.stored) < self.len
    }

    /// Whether it lies on a disk of `disk_len` bytes, behind `from`, and has no more bytes than it
    /// may.
    pub(crate) fn is_sound(&self, from: u64, disk_len: u64) -> bool {
        let sectors =
            self.start.is_multiple_of(SECTOR_BYTES) && self.len.is_multiple_of(SECTOR_BYTES);
        let end = self.start.checked_add(self.len);
        let is_within =
            self.len > 0 && self.start >= from && end.is_some_and(|end| end <= disk_len);
        let stored = u64::from(self.stored);
        let data = stored <= self.len && self.len <= DATA_BYTES_MAX;
        sectors && is_within && (data || self.is_zeros()) && (!self.is_zeros() || self.sum == 0)
    }
}

/// What a step had.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Total {
    /// Bytes of data that it has of the disk, before they are compressed.
    pub data_bytes: u64,
    /// Parts before the end.
    pub parts: u64,
    /// Made of the sums of all parts, in order.
    pub sum: u32,
}

impl Total {
    /// With one part more, whose bytes before its data are `head`.
    pub(crate) fn add(&mut self, piece: &Piece, head: &[u8; PART_BYTES]) {
        self.data_bytes += piece.data_bytes();
        self.parts += 1;
        let raw: &RawPart = zerocopy::transmute_ref!(head);
        self.sum = crc32c_of(&[&self.sum.to_le_bytes(), raw.checksum.as_bytes()]);
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawPart {
    pub(crate) kind: U32,
    /// CRC-32C of the other fields and of the data as it is stored.
    pub(crate) checksum: U32,
    pub(crate) sequence: U64,
    pub(crate) start: U64,
    pub(crate) len: U64,
    pub(crate) stored: U32,
    pub(crate) sum: U32,
}

impl Part {
    /// Its bytes before the `data` that is stored, as part number `sequence` of its step.
    pub(crate) fn encode(self, sequence: u64, data: &[u8]) -> [u8; PART_BYTES] {
        let (kind, start, len, stored, sum) = match self {
            Self::Piece(piece) => {
                let kind = match piece {
                    _ if piece.is_zeros() => ZEROS,
                    _ if piece.is_packed() => PACKED,
                    _ => DATA,
                };
                (kind, piece.start, piece.len, piece.stored, piece.sum)
            }
            Self::End(total) => (END, total.data_bytes, total.parts, 0, total.sum),
        };
        let mut raw = RawPart {
            kind: kind.into(),
            checksum: 0.into(),
            sequence: sequence.into(),
            start: start.into(),
            len: len.into(),
            stored: stored.into(),
            sum: sum.into(),
        };
        raw.checksum = sum_of(&raw, data).into();
        zerocopy::transmute!(raw)
    }

    /// What `bytes` announce as part number `sequence`, of a disk of `disk_len` bytes of which
    /// everything up to `from` was there: only then is anything read that follows.
    pub(crate) fn announced(
        bytes: &[u8; PART_BYTES],
        sequence: u64,
        from: u64,
        disk_len: u64,
    ) -> Result<Self, Malformed> {
        let raw: &RawPart = zerocopy::transmute_ref!(bytes);
        let (start, len) = (raw.start.get(), raw.len.get());
        let (stored, sum) = (raw.stored.get(), raw.sum.get());
        let piece = Piece { start, len, stored, sum };
        let is_as_it_says = match raw.kind.get() {
            DATA => u64::from(stored) == len,
            PACKED => piece.is_packed(),
            ZEROS => piece.is_zeros(),
            END => stored == 0,
            _ => false,
        };
        if raw.sequence.get() != sequence || !is_as_it_says {
            return Err(Malformed::Content);
        }
        if raw.kind.get() == END {
            return Ok(Self::End(Total { data_bytes: start, parts: len, sum }));
        }
        if piece.is_sound(from, disk_len) {
            Ok(Self::Piece(piece))
        } else {
            Err(Malformed::Content)
        }
    }

    /// Checks that `bytes` and the `data` that follows are as they were written.
    pub(crate) fn check(bytes: &[u8; PART_BYTES], data: &[u8]) -> Result<(), Malformed> {
        let raw: &RawPart = zerocopy::transmute_ref!(bytes);
        if raw.checksum.get() == sum_of(raw, data) { Ok(()) } else { Err(Malformed::Checksum) }
    }
}

fn sum_of(raw: &RawPart, data: &[u8]) -> u32 {
    let RawPart { kind, sequence, start, len, stored, sum, .. } = raw;
    crc32c_of(&[
        kind.as_bytes(),
        sequence.as_bytes(),
        start.as_bytes(),
        len.as_bytes(),
        stored.as_bytes(),
        sum.as_bytes(),
        data,
    ])
}

/// Where a piece of a state is in its data file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub(crate) piece: Piece,
    /// Where its part begins.
    pub(crate) at: u64,
}

impl Entry {
    /// Where it begins on the disk, in bytes.
    pub fn start(&self) -> u64 {
        self.piece.start
    }

    /// Bytes that it has of the disk.
    pub fn len(&self) -> u64 {
        self.piece.len
    }

    /// Whether it has nothing; never true of one that was decoded.
    pub fn is_empty(&self) -> bool {
        self.piece.len == 0
    }
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawEntry {
    pub(crate) start: U64,
    pub(crate) len: U64,
    pub(crate) at: U64,
    pub(crate) stored: U32,
    pub(crate) sum: U32,
}

/// What a folder knows of a state.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Manifest {
    pub(crate) begin: Begin,
    /// In which order the states of the folder were completed.
    pub(crate) number: u64,
    /// Names its data file.
    pub(crate) key: u64,
    /// Of which content the state is: a hash of what is known of it, or 0 if an older mica wrote
    /// it.
    pub(crate) content: u32,
    pub(crate) total: Total,
    /// Bytes of the data file.
    pub(crate) file_bytes: u64,
    pub(crate) entries: Vec<Entry>,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(crate) struct RawHead {
    pub(crate) magic: [u8; 8],
    pub(crate) version: U32,
    pub(crate) total: U32,
    pub(crate) number: U64,
    pub(crate) key: U64,
    pub(crate) entries: U64,
    pub(crate) data_bytes: U64,
    pub(crate) file_bytes: U64,
    pub(crate) content: U32,
    /// CRC-32C of the fields before it.
    pub(crate) checksum: U32,
}

impl Manifest {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut head = RawHead {
            magic: MANIFEST_MAGIC,
            version: VERSION.into(),
            total: self.total.sum.into(),
            number: self.number.into(),
            key: self.key.into(),
            entries: (self.entries.len() as u64).into(),
            data_bytes: self.total.data_bytes.into(),
            file_bytes: self.file_bytes.into(),
            content: self.content.into(),
            checksum: 0.into(),
        };
        head.checksum = crc32c(&head.as_bytes()[..HEAD_BYTES - SUM_BYTES]).into();
        let mut bytes = head.as_bytes().to_vec();
        bytes.extend_from_slice(&self.begin.encode());
        let first = bytes.len();
        for Entry { piece, at } in &self.entries {
            let raw = RawEntry {
                start: piece.start.into(),
                len: piece.len.into(),
                at: (*at).into(),
                stored: piece.stored.into(),
                sum: piece.sum.into(),
            };
            bytes.extend_from_slice(raw.as_bytes());
        }
        let sum = crc32c(&bytes[first..]);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Only what a manifest begins with, of which the first [`HEAD_BYTES`] and [`BEGIN_BYTES`] are
    /// given: the entries are left out. Returns how many there are, too.
    pub(crate) fn decode_head(bytes: &[u8]) -> Result<(Self, u64), Malformed> {
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(Malformed::Truncated)?;
        let raw = RawHead::read_from_bytes(head).map_err(|_| Malformed::Truncated)?;
        check_frame(head, MANIFEST_MAGIC, raw.version, raw.checksum)?;
        let begin = Begin::decode(rest.get(..BEGIN_BYTES).ok_or(Malformed::Truncated)?)?;
        let parts = raw.entries.get();
        let shortest = parts.checked_mul(PART_BYTES as u64);
        let is_long = shortest.is_some_and(|parts| parts <= raw.file_bytes.get());
        if parts > ENTRIES_MAX || !is_long {
            return Err(Malformed::Content);
        }
        let total = Total { data_bytes: raw.data_bytes.get(), parts, sum: raw.total.get() };
        let manifest = Self {
            begin,
            number: raw.number.get(),
            key: raw.key.get(),
            content: raw.content.get(),
            total,
            file_bytes: raw.file_bytes.get(),
            entries: Vec::new(),
        };
        Ok((manifest, parts))
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let (mut manifest, count) = Self::decode_head(bytes)?;
        let entries = &bytes[HEAD_BYTES + BEGIN_BYTES..];
        let (entries, sum) = entries.split_last_chunk::<SUM_BYTES>().ok_or(Malformed::Truncated)?;
        if entries.len() as u64 != count * ENTRY_BYTES as u64 {
            return Err(Malformed::Truncated);
        }
        if *sum != crc32c(entries).to_le_bytes() {
            return Err(Malformed::Checksum);
        }
        let (mut from, mut at, mut data_bytes) = (0, BEGIN_BYTES as u64, 0);
        for bytes in entries.chunks_exact(ENTRY_BYTES) {
            let raw = RawEntry::read_from_bytes(bytes).map_err(|_| Malformed::Truncated)?;
            let (stored, sum) = (raw.stored.get(), raw.sum.get());
            let piece = Piece { start: raw.start.get(), len: raw.len.get(), stored, sum };
            if raw.at.get() != at || !piece.is_sound(from, manifest.begin.len) {
                return Err(Malformed::Content);
            }
            from = piece.end();
            data_bytes += piece.data_bytes();
            manifest.entries.push(Entry { piece, at });
            at += PART_BYTES as u64 + u64::from(stored);
        }
        // The last part is the end.
        let is_whole = at + PART_BYTES as u64 == manifest.file_bytes;
        if !is_whole || data_bytes != manifest.total.data_bytes {
            return Err(Malformed::Content);
        }
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests;
