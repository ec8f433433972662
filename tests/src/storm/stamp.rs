//! What the storm writes: sectors that say what they are, so that a sector that is found where it
//! does not belong, or again where it was overwritten, is known for what it is.
//!
//! A sector of 512 bytes is the same 16 bytes again and again: the disk and the sector's number in
//! it, then a number that no other write of this disk has. A number identifies its writer, and
//! later writes have greater ones. A sector of zeros has the number 0.

/// Bytes of a sector.
pub(super) const SECTOR: usize = 512;
/// The number of a write; 0 is zeros.
pub(super) type Seq = u64;

/// Who wrote something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Writer {
    /// A client of mica.
    Guest,
    /// QEMU, durably.
    Foreign,
}

const WORD_BYTES: usize = 16;
const NUMBER_BITS: u32 = 40;
const FOREIGN: u64 = 1;
/// No disk has so many writes.
const SIBLING_SHIFT: u32 = 32;

/// What a sector turned out to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    /// Zeros, or what a write put here.
    Write(Seq),
    /// What a write put into another sector.
    Misplaced { sector: u64, seq: Seq },
    /// Bytes that nobody wrote to this disk.
    Foreign,
}

/// Gives out numbers for one disk.
#[derive(Clone, Debug)]
pub(super) struct Stamper {
    disk: u64,
    last: u64,
}

impl Stamper {
    /// For the disk that is called `disk`.
    pub(super) fn new(disk: u64) -> Self {
        Self { disk: disk & 0xff_ffff, last: 0 }
    }

    /// For another disk that began with what this one wrote, and is called the same in stamps. Each
    /// of them has `number`s of its own, later than all of this one's.
    pub(super) fn of_sibling(&self, number: u64) -> Self {
        Self { disk: self.disk, last: number << SIBLING_SHIFT }
    }

    /// The next number.
    pub(super) fn next(&mut self, writer: Writer) -> Seq {
        self.last += 1;
        let who = if writer == Writer::Foreign { FOREIGN } else { 0 };
        self.last | who << NUMBER_BITS
    }

    /// The disk's name in its stamps.
    pub(super) fn disk(&self) -> u64 {
        self.disk
    }
}

/// Who wrote what has this number.
pub(super) fn writer(seq: Seq) -> Writer {
    if seq >> NUMBER_BITS == FOREIGN { Writer::Foreign } else { Writer::Guest }
}

/// The place of a write among all of its disk.
pub(super) fn order(seq: Seq) -> u64 {
    seq & ((1 << NUMBER_BITS) - 1)
}

/// The bytes of `count` sectors from `first` on, as write `seq` puts them.
pub(super) fn bytes(disk: u64, first: u64, count: u64, seq: Seq) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(usize::try_from(count).unwrap_or(0) * SECTOR);
    for sector in first..first + count {
        let at = bytes.len();
        bytes.extend_from_slice(&tag(disk, sector).to_le_bytes());
        bytes.extend_from_slice(&seq.to_le_bytes());
        let mut done = WORD_BYTES;
        while done < SECTOR {
            bytes.extend_from_within(at..at + done);
            done *= 2;
        }
    }
    bytes
}

/// What `bytes`, which are sector `sector` of the disk, are.
pub(super) fn read(disk: u64, sector: u64, bytes: &[u8]) -> Seen {
    let (words, _) = bytes.as_chunks::<8>();
    let is_even = bytes.len() == SECTOR && bytes[WORD_BYTES..] == bytes[..SECTOR - WORD_BYTES];
    if !is_even {
        return Seen::Foreign;
    }
    let [found, seq] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
    if found == 0 && seq == 0 {
        return Seen::Write(0);
    }
    if found == tag(disk, sector) && seq != 0 {
        return Seen::Write(seq);
    }
    // Sector 0 of disk 0 would be no stamp: tags are never 0.
    match found >> 40 == tag(disk, 0) >> 40 {
        true => Seen::Misplaced { sector: found & 0xff_ffff_ffff, seq },
        false => Seen::Foreign,
    }
}

fn tag(disk: u64, sector: u64) -> u64 {
    (disk | 1) << 40 | sector
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamp_is_read_where_it_was_put_and_nowhere_else() {
        let bytes = bytes(7, 3, 2, 9);
        assert_eq!(bytes.len(), 2 * SECTOR);
        assert_eq!(read(7, 3, &bytes[..SECTOR]), Seen::Write(9));
        assert_eq!(read(7, 4, &bytes[SECTOR..]), Seen::Write(9));
        assert_eq!(read(7, 4, &bytes[..SECTOR]), Seen::Misplaced { sector: 3, seq: 9 });
        assert_eq!(read(9, 3, &bytes[..SECTOR]), Seen::Foreign);
    }

    #[test]
    fn zeros_are_a_write_and_torn_sectors_are_foreign() {
        assert_eq!(read(7, 3, &[0; SECTOR]), Seen::Write(0));
        let mut torn = bytes(7, 3, 1, 9);
        torn[300] ^= 1;
        assert_eq!(read(7, 3, &torn), Seen::Foreign);
        torn[256..].fill(0);
        assert_eq!(read(7, 3, &torn), Seen::Foreign);
    }

    #[test]
    fn numbers_show_writer_and_order() {
        let mut stamper = Stamper::new(1);
        let (guest, foreign) = (stamper.next(Writer::Guest), stamper.next(Writer::Foreign));
        assert_eq!([guest, foreign].map(writer), [Writer::Guest, Writer::Foreign]);
        assert!(order(foreign) > order(guest));
    }
}
