//! Descriptor chains: what a driver puts on a ring, read without believing it.
//!
//! Split virtqueues, with indirect tables (virtio 1.3, sections 2.7.5 to 2.7.8). A chain is read
//! from guest memory once, so that a driver that changes it concurrently gets an odd request and
//! nothing else.

use std::fmt;
use vm_memory::{Address, ByteValued, Bytes, GuestAddress, GuestMemoryMmap};

/// Maximum number of descriptors of one chain, with its indirect table: a request of 4 MiB in
/// pages, and more.
pub(super) const DESCRIPTORS_MAX: u32 = 2048;
/// Maximum size of a chain ("Drivers MUST NOT add a descriptor chain longer than 2^32 bytes").
const BYTES_MAX: u64 = 1 << 32;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A descriptor as it stands in memory, little-endian.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Descriptor {
    addr: u64,
    len: u32,
    flags: u16,
    next: u16,
}

// SAFETY: plain numbers without padding.
unsafe impl ByteValued for Descriptor {}

const DESCRIPTOR_BYTES: u64 = size_of::<Descriptor>() as u64;

/// A run of guest memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Piece {
    pub(super) at: GuestAddress,
    pub(super) len: u32,
}

/// What a chain names: what the device may read, then what it may write.
#[derive(Default, Debug)]
pub(super) struct Chain {
    pub(super) readable: Vec<Piece>,
    pub(super) writable: Vec<Piece>,
}

/// Why a chain is invalid.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Malformed {
    /// A number beyond the table.
    BeyondTable,
    /// More descriptors than a chain may have: perhaps a loop.
    TooLong,
    /// An indirect descriptor in an indirect table, or one that has a successor.
    Indirect,
    /// Memory that the guest does not have.
    NotMapped,
    /// A readable piece after a writable one.
    Order,
    /// No room for the request's header or for its status.
    TooShort,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::BeyondTable => "a descriptor beyond the table",
            Self::TooLong => "a chain that is too long, or a loop",
            Self::Indirect => "an indirect table where none may be",
            Self::NotMapped => "memory that the guest does not have",
            Self::Order => "a readable descriptor after a writable one",
            Self::TooShort => "no room for a header or a status",
        })
    }
}

/// Where a table of descriptors is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    pub(super) at: GuestAddress,
    pub(super) entries: u32,
}

impl Chain {
    /// Reads the chain that starts at descriptor `head` of `table`.
    pub(super) fn read(
        &mut self,
        guest: &GuestMemoryMmap,
        table: Table,
        head: u16,
    ) -> Result<(), Malformed> {
        self.readable.clear();
        self.writable.clear();
        let mut table = table;
        let mut is_indirect = false;
        let mut index = head;
        let mut bytes = 0;
        for _ in 0..DESCRIPTORS_MAX {
            if u32::from(index) >= table.entries {
                return Err(Malformed::BeyondTable);
            }
            let at = table.at.checked_add(u64::from(index) * DESCRIPTOR_BYTES);
            let at = at.ok_or(Malformed::NotMapped)?;
            let found: Descriptor = guest.read_obj(at).map_err(|_| Malformed::NotMapped)?;
            let (flags, len) = (u16::from_le(found.flags), u32::from_le(found.len));
            let addr = GuestAddress(u64::from_le(found.addr));
            if flags & INDIRECT != 0 {
                let fits = u64::from(len).is_multiple_of(DESCRIPTOR_BYTES) && len > 0;
                if is_indirect || flags & NEXT != 0 || !fits {
                    return Err(Malformed::Indirect);
                }
                let entries = len / u32::try_from(DESCRIPTOR_BYTES).expect("16");
                table = Table { at: addr, entries };
                (is_indirect, index) = (true, 0);
                continue;
            }
            bytes += u64::from(len);
            if bytes > BYTES_MAX {
                return Err(Malformed::TooLong);
            }
            self.push(Piece { at: addr, len }, flags & WRITE != 0)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = u16::from_le(found.next);
        }
        Err(Malformed::TooLong)
    }

    fn push(&mut self, piece: Piece, is_writable: bool) -> Result<(), Malformed> {
        if !is_writable && !self.writable.is_empty() {
            return Err(Malformed::Order);
        }
        if piece.len == 0 {
            return Ok(());
        }
        let pieces = if is_writable { &mut self.writable } else { &mut self.readable };
        if let Some(last) = pieces.last_mut()
            && last.at.checked_add(u64::from(last.len)) == Some(piece.at)
            && let Some(len) = last.len.checked_add(piece.len)
        {
            last.len = len;
        } else {
            pieces.push(piece);
        }
        Ok(())
    }
}

/// Takes the first `out.len()` bytes that `pieces` name, and those bytes away from them.
pub(super) fn take_bytes(
    guest: &GuestMemoryMmap,
    pieces: &mut Vec<Piece>,
    out: &mut [u8],
) -> Result<(), Malformed> {
    let mut done = 0;
    while done < out.len() {
        let Some(first) = pieces.first_mut() else { return Err(Malformed::TooShort) };
        let count = (first.len as usize).min(out.len() - done);
        let read = guest.read_slice(&mut out[done..done + count], first.at);
        read.map_err(|_| Malformed::NotMapped)?;
        let count_taken = u32::try_from(count).expect("at most the piece");
        first.at = first.at.checked_add(u64::from(count_taken)).ok_or(Malformed::NotMapped)?;
        first.len -= count_taken;
        if first.len == 0 {
            pieces.remove(0);
        }
        done += count;
    }
    Ok(())
}

/// Takes the last byte that `pieces` name, and says where it is.
pub(super) fn take_last(pieces: &mut Vec<Piece>) -> Result<GuestAddress, Malformed> {
    let last = pieces.last_mut().ok_or(Malformed::TooShort)?;
    last.len -= 1;
    let at = last.at.checked_add(u64::from(last.len)).ok_or(Malformed::NotMapped)?;
    if last.len == 0 {
        pieces.pop();
    }
    Ok(at)
}

#[cfg(test)]
mod tests;
