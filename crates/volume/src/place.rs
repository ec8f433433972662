//! Who wrote what: writers, their extents, and places in these.
//!
//! Invariants
//! - I1 A writer's number is claimed once in a store and never used again, so that an extent's name
//!   names the same bytes for ever.
//! - I2 A place has the sum of the bytes it names. A block that is damaged, was swapped, or belongs
//!   to another volume is found when it is read; a root vouches for all that is beneath it.
//! - I3 A block in a frame is named by where the frame begins, about how long it is, and which of
//!   its blocks it is: so one read finds it.

use mica_map::Reference;
use std::num::NonZeroU64;

/// Bytes of a block: the unit of a volume's map.
pub const BLOCK_BYTES: usize = 4096;

/// The number of a writer: of one opening of one volume for writing. Never zero.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Writer(NonZeroU64);

impl Writer {
    /// Bits of a number: a million openings a second for twelve days, a thousand for 34 years.
    pub const BITS: u32 = 40;
    /// The first that is claimed.
    pub const FIRST: Self = Self(NonZeroU64::MIN);

    /// Writer `number`; `None` if it is zero or too large.
    pub fn new(number: u64) -> Option<Self> {
        NonZeroU64::new(number).filter(|_| number >> Self::BITS == 0).map(Self)
    }

    /// Its number.
    pub fn number(self) -> u64 {
        self.0.get()
    }

    /// The next writer; `None` if the store has had all of them.
    pub fn next(self) -> Option<Self> {
        Self::new(self.number() + 1)
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
    /// Offset in the extent, in units of [`Place::UNIT_BYTES`]; of a block in a frame, see
    /// [`FramePart`].
    unit: u32,
    sum: u32,
}

/// A block that is stored in a frame, with others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FramePart {
    /// Where the frame begins in the extent.
    pub(crate) offset: u64,
    /// Which of [`FRAME_LENS`] it is no longer than.
    pub(crate) class: usize,
    /// Which of its blocks it is.
    pub(crate) index: usize,
}

/// Frames begin at a multiple of this behind the header of an extent.
pub(crate) const FRAME_UNIT_BYTES: usize = 128;
/// Most blocks of a frame.
pub(crate) const FRAME_BLOCKS_MAX: usize = 16;
/// Most bytes of frames of each class: all of them are shorter than 7/8 of what they hold.
pub(crate) const FRAME_LENS: [usize; 6] = [1024, 2048, 3584, 8192, 20480, 57344];
/// Where the first frame may begin.
const FRAMES_FROM: u64 = 4096;
const FRAME_START_BITS: u32 = 17;
const FRAME_INDEX_BITS: u32 = 4;

impl FramePart {
    /// First length of all frames of an extent that places cannot name.
    pub(crate) const FRAMES_LEN_END: usize = FRAME_UNIT_BYTES << FRAME_START_BITS;

    /// Most bytes of the frame.
    pub(crate) fn len_max(self) -> usize {
        FRAME_LENS[self.class]
    }

    /// The class of a frame of `len` bytes; `None` if there is none.
    pub(crate) fn class_of(len: usize) -> Option<usize> {
        FRAME_LENS.iter().position(|most| len <= *most)
    }
}

impl Place {
    /// Everything in an extent begins at a multiple of this.
    pub const UNIT_BYTES: usize = 16;
    const UNIT_BITS: u32 = 24;
    /// Of these, those of an offset. What has others of them is in a frame.
    const OFFSET_BITS: u32 = 22;
    /// First offset in an extent that no place can name.
    pub const OFFSET_END: u64 = (Self::UNIT_BYTES as u64) << Self::OFFSET_BITS;

    /// The place of bytes with this CRC32C.
    ///
    /// # Panics
    /// If `offset` is not a multiple of [`Self::UNIT_BYTES`] below [`Self::OFFSET_END`]: extents
    /// are shorter.
    pub fn new(extent: ExtentId, offset: usize, sum: u32) -> Self {
        assert!(offset.is_multiple_of(Self::UNIT_BYTES), "a place begins at a unit");
        let unit = u32::try_from(offset / Self::UNIT_BYTES).ok();
        let unit = unit.filter(|unit| unit >> Self::OFFSET_BITS == 0).expect("within an extent");
        Self { extent, unit, sum }
    }

    /// The place of a block in a frame that has this CRC32C.
    ///
    /// # Panics
    /// If no frame of an extent begins there, or has such a block.
    pub(crate) fn in_frame(extent: ExtentId, part: FramePart, sum: u32) -> Self {
        let FramePart { offset, class, index } = part;
        let start = offset.checked_sub(FRAMES_FROM).filter(|from_first| {
            from_first.is_multiple_of(FRAME_UNIT_BYTES as u64)
                && *from_first < FramePart::FRAMES_LEN_END as u64
        });
        let start = start.expect("a frame begins there") / FRAME_UNIT_BYTES as u64;
        assert!(class < FRAME_LENS.len() && index < FRAME_BLOCKS_MAX, "a block of a frame");
        let [start, class, index] =
            [start, class as u64, index as u64].map(|n| u32::try_from(n).expect("small"));
        // Classes are counted from the first one whose bits no offset has.
        let class = class + (1 << (Self::OFFSET_BITS - FRAME_START_BITS - FRAME_INDEX_BITS));
        let unit = (class << FRAME_START_BITS | start) << FRAME_INDEX_BITS | index;
        debug_assert!(unit >> Self::UNIT_BITS == 0, "it fits");
        Self { extent, unit, sum }
    }

    /// Which part of which frame it is, if it is in one.
    pub(crate) fn frame(self) -> Option<FramePart> {
        if self.unit >> Self::OFFSET_BITS == 0 {
            return None;
        }
        let low = |value: u32, bits: u32| value & ((1 << bits) - 1);
        let (index, rest) = (low(self.unit, FRAME_INDEX_BITS), self.unit >> FRAME_INDEX_BITS);
        let (start, class) = (low(rest, FRAME_START_BITS), rest >> FRAME_START_BITS);
        let class = class - (1 << (Self::OFFSET_BITS - FRAME_START_BITS - FRAME_INDEX_BITS));
        Some(FramePart {
            offset: FRAMES_FROM + u64::from(start) * FRAME_UNIT_BYTES as u64,
            class: class as usize,
            index: index as usize,
        })
    }

    /// Of a block in a frame, the frame's first block; otherwise itself.
    pub(crate) fn whole(self) -> Self {
        match self.frame() {
            Some(_) => Self { unit: self.unit >> FRAME_INDEX_BITS << FRAME_INDEX_BITS, ..self },
            None => self,
        }
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

    /// The offset in the extent, in bytes; of a block in a frame, that of the frame.
    pub fn offset(self) -> u64 {
        match self.frame() {
            None => u64::from(self.unit) * Self::UNIT_BYTES as u64,
            Some(part) => part.offset,
        }
    }

    /// The CRC32C of what is there: of all bytes of a block or a frame, or of the payload of a
    /// node.
    pub fn sum(self) -> u32 {
        self.sum
    }

    /// When it was written, relative to others: a place names only smaller ones.
    fn age(self) -> (ExtentId, u64) {
        (self.extent, self.offset())
    }
}

/// As it is stored, from the highest bit down: writer 40 bits, sequence 32, unit 24, sum 32.
impl Reference for Place {
    type Bytes = [u8; 16];
    const BYTES: usize = 16;

    fn to_bytes(self) -> [u8; 16] {
        let mut bits = u128::from(self.extent.writer.number());
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
    fn place_in_a_frame_survives_being_stored_at_the_limits_of_its_fields() {
        let extent = place(7, 5, 0, 0).extent();
        let last = FRAMES_FROM + (FramePart::FRAMES_LEN_END - FRAME_UNIT_BYTES) as u64;
        for offset in [FRAMES_FROM, FRAMES_FROM + 128, last] {
            for class in 0..FRAME_LENS.len() {
                for index in 0..FRAME_BLOCKS_MAX {
                    let part = FramePart { offset, class, index };
                    let place = Place::in_frame(extent, part, 9);
                    assert_eq!(Place::from_bytes(&place.to_bytes()), Some(place));
                    assert_eq!((place.frame(), place.offset()), (Some(part), offset));
                    let first = FramePart { index: 0, ..part };
                    assert_eq!(place.whole(), Place::in_frame(extent, first, 9));
                }
            }
        }
        assert_eq!(place(7, 5, 4096, 3).frame(), None);
    }

    #[test]
    fn length_has_the_smallest_class_that_it_fits() {
        for (len, class) in [(1, 0), (1024, 0), (1025, 1), (57344, 5)] {
            assert_eq!(FramePart::class_of(len), Some(class));
        }
        assert_eq!(FramePart::class_of(57345), None);
    }

    #[test]
    #[should_panic(expected = "within an extent")]
    fn place_beyond_what_an_extent_can_have_is_a_bug() {
        place(1, 0, usize::try_from(Place::OFFSET_END).expect("small"), 0);
    }
}
