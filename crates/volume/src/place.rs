//! Who wrote what: writers, their extents, and places in these.
//!
//! Invariants
//! - I1 A writer's number is claimed once in a store and never used again, so that an extent's name
//!   names the same bytes for ever.
//! - I2 A place has the sum of the bytes it names. A block that is damaged, was swapped, or belongs
//!   to another volume is found when it is read; a root vouches for all that is beneath it.

use mica_map::Reference;

/// Bytes of a block: the unit of a volume's map.
pub const BLOCK_BYTES: usize = 4096;

/// The number of a writer: of one opening of one volume for writing. Never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Writer(u64);

impl Writer {
    /// Bits of a number: a million openings a second for twelve days, a thousand for 34 years.
    pub const BITS: u32 = 40;
    /// The first that is claimed.
    pub const FIRST: Self = Self(1);

    /// Writer `number`; `None` if it is zero or too large.
    pub fn new(number: u64) -> Option<Self> {
        (number != 0 && number >> Self::BITS == 0).then_some(Self(number))
    }

    /// Its number.
    pub fn number(self) -> u64 {
        self.0
    }

    /// The next writer; `None` if the store has had all of them.
    pub fn next(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }
}

/// An extent: the writer that put it, and its number among that writer's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ExtentId {
    /// Who put it.
    pub writer: Writer,
    /// Counts the writer's extents, from zero, without a gap.
    pub sequence: u32,
}

/// Where bytes are in a store, and their sum.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Place {
    extent: ExtentId,
    /// Offset in the extent, in units of [`Place::UNIT_BYTES`].
    unit: u32,
    sum: u32,
}

impl Place {
    /// Everything in an extent begins at a multiple of this.
    pub const UNIT_BYTES: usize = 16;
    const UNIT_BITS: u32 = 24;
    /// First offset in an extent that no place can name.
    pub const OFFSET_END: u64 = (Self::UNIT_BYTES as u64) << Self::UNIT_BITS;

    /// The place of bytes with this CRC32C.
    ///
    /// # Panics
    /// If `offset` is not a multiple of [`Self::UNIT_BYTES`] below [`Self::OFFSET_END`]: extents
    /// are shorter.
    pub fn new(extent: ExtentId, offset: usize, sum: u32) -> Self {
        assert!(offset.is_multiple_of(Self::UNIT_BYTES), "a place begins at a unit");
        let unit = u32::try_from(offset / Self::UNIT_BYTES).ok();
        let unit = unit.filter(|unit| unit >> Self::UNIT_BITS == 0).expect("within an extent");
        Self { extent, unit, sum }
    }

    /// A place as headers and records have it that may have none: zeros then.
    pub(crate) fn to_bytes_or_zeros(place: Option<Self>) -> [u8; Self::BYTES] {
        place.map_or([0; Self::BYTES], Self::to_bytes)
    }

    /// The opposite of [`Self::to_bytes_or_zeros`]. `None` if these are the bytes of no place.
    pub(crate) fn from_bytes_or_zeros(bytes: &[u8; Self::BYTES]) -> Option<Option<Self>> {
        if *bytes == [0; Self::BYTES] { Some(None) } else { Self::from_bytes(bytes).map(Some) }
    }

    /// The extent.
    pub fn extent(self) -> ExtentId {
        self.extent
    }

    /// The offset in the extent, in bytes.
    pub fn offset(self) -> u64 {
        u64::from(self.unit) * Self::UNIT_BYTES as u64
    }

    /// The CRC32C of what is there: of all bytes of a block, or of the payload of a node.
    pub fn sum(self) -> u32 {
        self.sum
    }

    /// When it was written, relative to others: a place names only smaller ones.
    fn age(self) -> (ExtentId, u32) {
        (self.extent, self.unit)
    }
}

/// As it is stored, from the highest bit down: writer 40 bits, sequence 32, unit 24, sum 32.
impl Reference for Place {
    type Bytes = [u8; 16];
    const BYTES: usize = 16;

    fn to_bytes(self) -> [u8; 16] {
        let mut bits = u128::from(self.extent.writer.0);
        bits = bits << 32 | u128::from(self.extent.sequence);
        bits = bits << Self::UNIT_BITS | u128::from(self.unit);
        bits = bits << 32 | u128::from(self.sum);
        bits.to_be_bytes()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bits = u128::from_be_bytes(bytes.try_into().ok()?);
        let part = |from: u32, len: u32| (bits >> from) & ((1 << len) - 1);
        let sum = u32::try_from(part(0, 32)).ok()?;
        let unit = u32::try_from(part(32, Self::UNIT_BITS)).ok()?;
        let sequence = u32::try_from(part(32 + Self::UNIT_BITS, 32)).ok()?;
        let writer = u64::try_from(part(64 + Self::UNIT_BITS, Writer::BITS)).ok()?;
        Some(Self { extent: ExtentId { writer: Writer::new(writer)?, sequence }, unit, sum })
    }

    fn may_name(self, child: Self) -> bool {
        child.age() < self.age()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(writer: u64, sequence: u32, offset: usize, sum: u32) -> Place {
        let writer = Writer::new(writer).expect("a writer");
        Place::new(ExtentId { writer, sequence }, offset, sum)
    }

    #[test]
    fn place_survives_being_stored_at_the_limits_of_its_fields() {
        let offset = usize::try_from(Place::OFFSET_END).expect("small") - Place::UNIT_BYTES;
        for (writer, sequence, offset, sum) in
            [(1, 0, 0, 0), ((1 << 40) - 1, u32::MAX, offset, u32::MAX), (7, 5, 4096, 3)]
        {
            let place = place(writer, sequence, offset, sum);
            assert_eq!(Place::from_bytes(&place.to_bytes()), Some(place));
            assert_eq!(place.offset(), offset as u64);
        }
        assert_eq!(Place::from_bytes(&[0; 16]), None, "no writer has the number zero");
        assert_eq!(Place::from_bytes(&[1; 15]), None);
    }

    #[test]
    fn place_names_only_what_was_written_before_it() {
        let here = place(7, 5, 4096, 1);
        for earlier in [place(6, 9, 8192, 2), place(7, 4, 8192, 2), place(7, 5, 4080, 2)] {
            assert!(here.may_name(earlier) && !earlier.may_name(here));
        }
        assert!(!here.may_name(place(7, 5, 4096, 2)));
    }

    #[test]
    #[should_panic(expected = "within an extent")]
    fn place_beyond_what_an_extent_can_have_is_a_bug() {
        place(1, 0, usize::try_from(Place::OFFSET_END).expect("small"), 0);
    }
}
