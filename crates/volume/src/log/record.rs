//! A record: one thing that was done to a volume.

use crate::place::BLOCK_BYTES;
use crate::state::State;

/// Bytes of a record before its content.
pub(super) const RECORD_HEAD_BYTES: usize = 16;
/// Longest label of a snapshot, in bytes.
pub(super) const LABEL_LEN_MAX: usize = 255;
const KIND_DATA: u32 = 1;
const KIND_ENCRYPTED: u32 = 7;
/// Longest record.
pub(super) const RECORD_BYTES_MAX: usize = RECORD_HEAD_BYTES + BLOCK_BYTES;

/// What was done. Numbers of records are theirs by their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Record<'a> {
    /// The block has these bytes now.
    Data {
        /// Its number.
        block: u64,
        /// All of it.
        bytes: &'a [u8; BLOCK_BYTES],
    },
    /// The block has what these bytes are encrypted from.
    Encrypted {
        /// Its number.
        block: u64,
        /// All of it.
        bytes: &'a [u8; BLOCK_BYTES],
    },
    /// These blocks have nothing now: they read as zeros.
    Nothing {
        /// The first.
        first: u64,
        /// How many; never zero.
        count: u64,
    },
    /// The disk has this many bytes now.
    Length {
        /// A multiple of 512.
        bytes: u64,
    },
    /// A snapshot was taken.
    Take {
        /// Its number.
        number: u64,
        /// When, in nanoseconds since 1970.
        time_ns: u64,
        /// Its name; at most 255 bytes.
        label: &'a str,
    },
    /// A snapshot was dropped.
    Drop {
        /// Its number.
        number: u64,
    },
    /// A snapshot has another name now.
    Label {
        /// Its number.
        number: u64,
        /// Its name; at most 255 bytes.
        label: &'a str,
    },
}

impl<'a> Record<'a> {
    /// Bytes that it takes in a group.
    pub(super) fn encoded_len(&self) -> usize {
        RECORD_HEAD_BYTES
            + match self {
                Self::Data { .. } | Self::Encrypted { .. } => BLOCK_BYTES,
                Self::Nothing { .. } => 8,
                Self::Length { .. } | Self::Drop { .. } => 0,
                Self::Take { label, .. } => 8 + label.len(),
                Self::Label { label, .. } => label.len(),
            }
    }

    /// Whether it is one that can be read again.
    pub(super) fn is_valid(&self) -> bool {
        let is_label = |label: &str| label.len() <= LABEL_LEN_MAX;
        match *self {
            Self::Data { block, .. } | Self::Encrypted { block, .. } => is_on_a_disk(block, 1),
            Self::Nothing { first, count } => is_on_a_disk(first, count),
            Self::Length { bytes } => State::is_len(bytes),
            Self::Take { label, .. } | Self::Label { label, .. } => is_label(label),
            Self::Drop { .. } => true,
        }
    }

    /// What it has before its content.
    pub(super) fn head(&self) -> [u8; RECORD_HEAD_BYTES] {
        let (kind, value) = match *self {
            Self::Data { block, .. } => (KIND_DATA, block),
            Self::Nothing { first, .. } => (2, first),
            Self::Length { bytes } => (3, bytes),
            Self::Take { number, .. } => (4, number),
            Self::Drop { number } => (5, number),
            Self::Label { number, .. } => (6, number),
            Self::Encrypted { block, .. } => (KIND_ENCRYPTED, block),
        };
        let len = u32::try_from(self.encoded_len() - RECORD_HEAD_BYTES).expect("at most a block");
        let mut head = [0; RECORD_HEAD_BYTES];
        head[..4].copy_from_slice(&u32::to_le_bytes(kind));
        head[4..8].copy_from_slice(&len.to_le_bytes());
        head[8..].copy_from_slice(&u64::to_le_bytes(value));
        head
    }

    /// Puts it at the start of `out`.
    pub(super) fn encode(&self, out: &mut [u8]) {
        let (head, rest) = out.split_at_mut(RECORD_HEAD_BYTES);
        head.copy_from_slice(&self.head());
        match *self {
            Self::Data { bytes, .. } | Self::Encrypted { bytes, .. } => {
                rest[..BLOCK_BYTES].copy_from_slice(bytes)
            }
            Self::Nothing { count, .. } => rest[..8].copy_from_slice(&count.to_le_bytes()),
            Self::Length { .. } | Self::Drop { .. } => {}
            Self::Take { time_ns, label, .. } => {
                rest[..8].copy_from_slice(&time_ns.to_le_bytes());
                rest[8..8 + label.len()].copy_from_slice(label.as_bytes());
            }
            Self::Label { label, .. } => rest[..label.len()].copy_from_slice(label.as_bytes()),
        }
    }

    /// The record that `bytes` begin with, and what follows it; `None` if there is none.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (head, rest) = bytes.split_first_chunk::<RECORD_HEAD_BYTES>()?;
        let (words, _) = head.as_chunks::<4>();
        let [kind, len] = [words[0], words[1]].map(u32::from_le_bytes);
        let value = u64::from_le_bytes(*head.last_chunk()?);
        let (content, rest) = rest.split_at_checked(usize::try_from(len).ok()?)?;
        let label = |bytes| std::str::from_utf8(bytes).ok();
        let record = match (kind, content.len()) {
            (KIND_DATA, _) => Self::Data { block: value, bytes: content.try_into().ok()? },
            (2, 8) => {
                Self::Nothing { first: value, count: u64::from_le_bytes(content.try_into().ok()?) }
            }
            (3, 0) => Self::Length { bytes: value },
            (4, _) => {
                let (time, name) = content.split_first_chunk::<8>()?;
                let time_ns = u64::from_le_bytes(*time);
                Self::Take { number: value, time_ns, label: label(name)? }
            }
            (5, 0) => Self::Drop { number: value },
            (6, _) => Self::Label { number: value, label: label(content)? },
            (KIND_ENCRYPTED, _) => {
                Self::Encrypted { block: value, bytes: content.try_into().ok()? }
            }
            _ => return None,
        };
        record.is_valid().then_some((record, rest))
    }
}

/// Calls `each` with the bytes of all blocks among `records`, which are encoded, and not encrypted,
/// and with the number of each record; they are encrypted then.
pub(super) fn encrypt_blocks(records: &mut [u8], first: u64, each: impl Fn(u64, &mut [u8])) {
    let (mut rest, mut number) = (records, first);
    while let Some((head, behind)) = rest.split_first_chunk_mut::<RECORD_HEAD_BYTES>() {
        let (words, _) = head.as_chunks_mut::<4>();
        let len = usize::try_from(u32::from_le_bytes(words[1])).expect("at most a block");
        let (content, next) = behind.split_at_mut(len);
        if words[0] == u32::to_le_bytes(KIND_DATA) {
            words[0] = u32::to_le_bytes(KIND_ENCRYPTED);
            each(number, content);
        }
        (rest, number) = (next, number + 1);
    }
}

fn is_on_a_disk(first: u64, count: u64) -> bool {
    let end = first.checked_add(count);
    count > 0 && end.is_some_and(|end| end <= State::LEN_MAX / BLOCK_BYTES as u64)
}

#[cfg(test)]
mod tests;
