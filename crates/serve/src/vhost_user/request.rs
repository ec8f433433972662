//! Requests of a virtio block device (virtio 1.3, section 5.2.6): what a chain asks for.
//!
//! A request is a header that the device reads, data that it reads or writes, and one byte of
//! status, the last that it may write. How that is divided among descriptors is the driver's
//! affair.

use super::chain::{Chain, Malformed, Piece, take_bytes, take_last};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// The status byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Status {
    Ok = 0,
    IoError = 1,
    Unsupported = 2,
}

const READ: u32 = 0;
const WRITE: u32 = 1;
const FLUSH: u32 = 4;
const GET_ID: u32 = 8;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;

const HEADER_BYTES: usize = 16;
/// Length of the answer to GET_ID.
pub(super) const ID_BYTES: u32 = 20;
/// One range of a discard or a write of zeros.
const RANGE_BYTES: usize = 16;
/// Ranges that one request may name.
pub(super) const RANGES_MAX: u32 = 32;
/// Sectors of such a range at most: 2 GiB.
pub(super) const RANGE_SECTORS_MAX: u32 = 1 << 22;
const MAY_UNMAP: u32 = 1;

/// What a disk lets a driver do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) disk_len: u64,
    pub(super) is_writable: bool,
}

/// A range of a discard or a write of zeros.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ZeroRange {
    pub(super) range: GuestRange,
    pub(super) may_unmap: bool,
}

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Action {
    /// Into the writable pieces.
    Read(GuestRange),
    /// From the readable pieces.
    Write(GuestRange),
    Flush,
    /// Into the writable pieces.
    GetId,
    Discard(Vec<ZeroRange>),
    WriteZeroes(Vec<ZeroRange>),
    /// Answered at once.
    Refuse(Status),
}

/// A request. The pieces of its data are left in the chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Request {
    pub(super) action: Action,
    /// Where the status goes.
    pub(super) status_at: GuestAddress,
}

impl Request {
    /// What `chain` asks for.
    pub(super) fn parse(
        guest: &GuestMemoryMmap,
        chain: &mut Chain,
        rules: Rules,
    ) -> Result<Self, Malformed> {
        let status_at = take_last(&mut chain.writable)?;
        let mut header = [0; HEADER_BYTES];
        take_bytes(guest, &mut chain.readable, &mut header)?;
        let number = |at: usize| u32::from_le_bytes(*header[at..].first_chunk().expect("4 bytes"));
        let sector = u64::from_le_bytes(*header[8..].first_chunk().expect("8 bytes"));
        let action = match number(0) {
            READ => rules.transfer(sector, &chain.writable).map(Action::Read),
            WRITE if !rules.is_writable => Err(Status::IoError),
            WRITE => rules.transfer(sector, &chain.readable).map(Action::Write),
            FLUSH => Ok(Action::Flush),
            GET_ID if bytes_of(&chain.writable) < u64::from(ID_BYTES) => Err(Status::IoError),
            GET_ID => Ok(Action::GetId),
            DISCARD => rules.emptied(guest, chain, false)?.map(Action::Discard),
            WRITE_ZEROES => rules.emptied(guest, chain, true)?.map(Action::WriteZeroes),
            _ => Err(Status::Unsupported),
        };
        Ok(Self { action: action.unwrap_or_else(Action::Refuse), status_at })
    }
}

fn bytes_of(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.len)).sum()
}

impl Rules {
    /// The range of a read or write.
    fn transfer(self, sector: u64, pieces: &[Piece]) -> Result<GuestRange, Status> {
        let len = bytes_of(pieces);
        if len == 0 || !len.is_multiple_of(SECTOR_BYTES) {
            return Err(Status::IoError);
        }
        self.range(sector, len)
    }

    fn range(self, sector: u64, len: u64) -> Result<GuestRange, Status> {
        let start = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoError)?;
        let range = GuestRange::new(GuestOffset::new(start), len).ok_or(Status::IoError)?;
        if range.end().bytes() > self.disk_len { Err(Status::IoError) } else { Ok(range) }
    }

    /// The ranges of a discard, or of a write of zeros ("struct virtio_blk_discard_write_zeroes").
    fn emptied(
        self,
        guest: &GuestMemoryMmap,
        chain: &mut Chain,
        are_zeros: bool,
    ) -> Result<Result<Vec<ZeroRange>, Status>, Malformed> {
        let len = bytes_of(&chain.readable);
        let count = len / RANGE_BYTES as u64;
        if !self.is_writable
            || !len.is_multiple_of(RANGE_BYTES as u64)
            || !(1..=u64::from(RANGES_MAX)).contains(&count)
        {
            return Ok(Err(Status::IoError));
        }
        let mut ranges = Vec::new();
        for _ in 0..count {
            let mut bytes = [0; RANGE_BYTES];
            take_bytes(guest, &mut chain.readable, &mut bytes)?;
            match self.emptied_one(bytes, are_zeros) {
                Ok(one) => ranges.extend(one),
                Err(status) => return Ok(Err(status)),
            }
        }
        Ok(Ok(ranges))
    }

    fn emptied_one(
        self,
        bytes: [u8; RANGE_BYTES],
        are_zeros: bool,
    ) -> Result<Option<ZeroRange>, Status> {
        let number = |at: usize| u32::from_le_bytes(*bytes[at..].first_chunk().expect("4 bytes"));
        let sector = u64::from_le_bytes(*bytes.first_chunk().expect("8 bytes"));
        let (sectors, flags) = (number(8), number(12));
        // "the device MUST set the status byte to VIRTIO_BLK_S_UNSUPP for discard and write zeroes
        // commands if any unknown flag is set", and for a discard with the unmap flag.
        if flags & !MAY_UNMAP != 0 || (!are_zeros && flags != 0) {
            return Err(Status::Unsupported);
        }
        if sectors > RANGE_SECTORS_MAX {
            return Err(Status::IoError);
        }
        let range = self.range(sector, u64::from(sectors) * SECTOR_BYTES)?;
        Ok((!range.is_empty()).then_some(ZeroRange { range, may_unmap: flags & MAY_UNMAP != 0 }))
    }
}

#[cfg(test)]
mod tests;
