//! What the file may hold in a page that the log changes, as sums. A page in memory equals the
//! file's until it is changed; so its sum is taken before the first change of a group, and the sum
//! of what a group writes when the group is taken. Sums are per sector: a write that failed or was
//! cut short may have left some sectors as they were.

use super::format::append_head;
use mica_map::crc32c;

/// Kind of a record: the page at `at`, and those behind it, may look like this in the file.
/// Content: the number of pages u32, then the sum of each sector of one page u32.
pub(crate) const EXPECTED: u32 = 6;
const SECTOR_BYTES: usize = 512;
const SECTORS: usize = 8;
const CONTENT_BYTES: usize = 4 + SECTORS * 4;

/// Sums of the sectors of a page; zero beyond the end of a shorter one.
pub(crate) type Sums = [u32; SECTORS];

/// The sums of a page of at most 4 KiB.
pub(crate) fn sums_of(page: &[u8]) -> Sums {
    let mut sums = Sums::default();
    for (sum, sector) in sums.iter_mut().zip(page.chunks(SECTOR_BYTES)) {
        *sum = crc32c(sector);
    }
    sums
}

/// Neighbouring pages with the same contents.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Expected {
    pub(crate) at: u64,
    pub(crate) pages: u32,
    pub(crate) sums: Sums,
}

impl Expected {
    /// Adds the page at `at`, with these `sums`, to the others: a new table consists of many
    /// identical ones.
    pub(super) fn push(all: &mut Vec<Self>, at: u64, page_bytes: u64, sums: Sums) {
        if let Some(last) = all.last_mut()
            && last.sums == sums
            && last.at + u64::from(last.pages) * page_bytes == at
        {
            last.pages += 1;
            return;
        }
        all.push(Self { at, pages: 1, sums });
    }

    /// Appends it as a record.
    pub(super) fn append_to(&self, bytes: &mut Vec<u8>) {
        append_head(bytes, self.at, CONTENT_BYTES, EXPECTED);
        for number in [self.pages].into_iter().chain(self.sums) {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
    }
}

/// Decodes a record; `None` if it is malformed.
pub(crate) fn decode_expected(at: u64, content: &[u8]) -> Option<Expected> {
    let content: &[u8; CONTENT_BYTES] = content.try_into().ok()?;
    let (numbers, _) = content.as_chunks::<4>();
    let (pages, sums) = numbers.split_first()?;
    let sums: &[[u8; 4]; SECTORS] = sums.try_into().ok()?;
    Some(Expected { at, pages: u32::from_le_bytes(*pages), sums: sums.map(u32::from_le_bytes) })
}
