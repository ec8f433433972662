//! What contexts say of parts of an export, put together.

use super::broken;
use mica_block::Result;
use mica_units::SECTOR_BYTES;

/// A part of an export, and the flags that the contexts have there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Part {
    /// Length in bytes.
    pub len: u64,
    /// Flags of the first context, which is [`super::BASE_ALLOCATION`].
    pub allocation: u32,
    /// Those of the second, a bitmap; 0 if there is none.
    pub bitmap: u32,
}

/// The parts for which all contexts say the same, as far as all say something, and at most `len`.
/// There are one or two contexts.
pub(super) fn merged(told: &[Vec<(u64, u32)>], len: u64) -> Result<Vec<Part>> {
    let total = |parts: &Vec<(u64, u32)>| {
        parts.iter().try_fold(0_u64, |sum, (len, _)| sum.checked_add(*len)).unwrap_or(u64::MAX)
    };
    let end = told.iter().map(total).min().unwrap_or(0).min(len);
    if end == 0 {
        return Err(broken("an empty block status"));
    }
    // Empty parts say nothing.
    let mut sides = told.iter().map(|parts| parts.iter().copied().filter(|part| part.0 > 0));
    let (mut first, mut second) = (sides.next().into_iter().flatten(), sides.next());
    let (mut parts, mut at) = (Vec::new(), 0);
    let (mut one, mut other) = ((0, 0), (0, 0));
    while at < end {
        if one.0 == 0 {
            one = first.next().unwrap_or((end - at, 0));
        }
        if other.0 == 0 {
            other = second.as_mut().and_then(Iterator::next).unwrap_or((end - at, 0));
        }
        let len = one.0.min(other.0).min(end - at);
        parts.push(Part { len, allocation: one.1, bitmap: other.1 });
        (one.0, other.0, at) = (one.0 - len, other.0 - len, at + len);
    }
    Ok(parts)
}

/// Leaves the first `len` bytes of the parts.
pub(super) fn cut(parts: &mut Vec<Part>, len: u64) {
    let mut left = len;
    parts.retain_mut(|part| {
        part.len = part.len.min(left);
        left -= part.len;
        part.len > 0
    });
}

/// The parts, which together are whole sectors, with ends at sectors: one that has several is dirty
/// if any of them is, and zeros, or a hole, if all are.
///
/// # Panics
/// If they are not whole sectors together.
pub(super) fn whole_sectors(parts: &[Part]) -> Vec<Part> {
    let mut whole = Vec::with_capacity(parts.len());
    let mut begun: Option<Part> = None;
    for part in parts {
        let mut left = *part;
        if let Some(mut sector) = begun.take() {
            let taken = left.len.min(SECTOR_BYTES - sector.len);
            sector.len += taken;
            sector.allocation &= left.allocation;
            sector.bitmap |= left.bitmap;
            left.len -= taken;
            if sector.len < SECTOR_BYTES {
                begun = Some(sector);
                continue;
            }
            whole.push(sector);
        }
        let rest = left.len % SECTOR_BYTES;
        if left.len > rest {
            whole.push(Part { len: left.len - rest, ..left });
        }
        begun = (rest > 0).then_some(Part { len: rest, ..left });
    }
    assert!(begun.is_none(), "whole sectors");
    whole
}
