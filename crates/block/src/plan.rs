//! Acting on a plan, and dividing long ranges before they are planned.

use crate::{Disk, Extent, IoFuture, Result};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};

/// Reads consecutive `extents` into `buf`, which is as long as they are together: concurrently, and
/// without a copy.
///
/// # Errors
/// The first that a read gives; by then no read is in flight any more.
///
/// # Panics
/// If `buf` has a different length.
pub async fn read_extents(disk: &dyn Disk, extents: &[Extent], buf: Buf) -> Result<Buf> {
    read_extents_by(|extent, part| disk.read(extent, part), extents, buf).await
}

/// As [`read_extents`], into a new buffer.
///
/// # Errors
/// As [`read_extents`].
///
/// # Panics
/// If the extents are longer together than memory can be.
pub async fn read_whole(disk: &dyn Disk, extents: &[Extent]) -> Result<Buf> {
    let total = usize::try_from(Extent::total_len(extents)).expect("a buffer");
    read_extents(disk, extents, Buf::new(total)).await
}

/// As [`read_extents`], for any function that reads extents as [`Disk::read`] does.
///
/// # Errors
/// As [`read_extents`].
///
/// # Panics
/// As [`read_extents`].
pub async fn read_extents_by(
    read: impl Fn(&Extent, Buf) -> IoFuture,
    extents: &[Extent],
    buf: Buf,
) -> Result<Buf> {
    assert_eq!(Extent::total_len(extents), buf.len() as u64, "a buffer as long as the plan");
    if let [extent] = extents {
        let (result, buf) = read(extent, buf).await;
        return result.map(|()| buf);
    }
    let mut rest = buf;
    // The parts are adjacent and become one again without a copy.
    let mut whole = rest.split_to(0);
    let parts = extents.iter().map(|extent| {
        let len = usize::try_from(extent.len).expect("a part of the buffer");
        read(extent, rest.split_to(len))
    });
    let parts: Vec<_> = parts.collect();
    for (result, part) in mica_rt::join_all(parts).await {
        result?;
        whole = joined(whole, part);
    }
    Ok(whole)
}

fn joined(mut front: Buf, back: Buf) -> Buf {
    if front.is_empty() {
        return back;
    }
    front.join(back);
    front
}

/// A walk over a range of a disk, with the allocation of its parts: see [`Disk::survey`].
pub struct Survey<'a> {
    disk: &'a dyn Disk,
    at: GuestOffset,
    end: GuestOffset,
}

impl<'a> Survey<'a> {
    /// A walk over `range` of `disk`.
    pub fn new(disk: &'a dyn Disk, range: GuestRange) -> Self {
        Self { disk, at: range.start(), end: range.end() }
    }

    /// The extents of the next part; `None` at the end of the range.
    ///
    /// # Errors
    /// As [`Disk::plan`].
    ///
    /// # Panics
    /// If the disk breaks its contract: the part has a gap, is empty, or ends beyond the range.
    pub async fn next(&mut self) -> Result<Option<Vec<Extent>>> {
        let left = GuestRange::between(self.at, self.end).filter(|left| !left.is_empty());
        let Some(left) = left else { return Ok(None) };
        let extents = self.disk.survey(left).await?;
        let len = Extent::total_len(&extents);
        let part = GuestRange::new(self.at, len).filter(|part| part.end() <= self.end);
        let part = part.expect("a part of the range");
        assert!(len > 0 && Extent::covers(&extents, part), "a disk broke its contract");
        self.at = part.end();
        Ok(Some(extents))
    }
}

/// The pieces of `range` that end at multiples of `window_bytes` on the disk: a long range is
/// planned and done piece by piece, and the pieces of neighbouring ranges are aligned alike.
///
/// # Panics
/// If `window_bytes` is zero.
pub fn windows(range: GuestRange, window_bytes: u64) -> Windows {
    assert!(window_bytes > 0, "windows have a length");
    Windows { at: range.start(), end: range.end(), window_bytes }
}

/// See [`windows`].
#[derive(Clone, Debug)]
pub struct Windows {
    at: GuestOffset,
    end: GuestOffset,
    window_bytes: u64,
}

impl Iterator for Windows {
    type Item = GuestRange;

    #[inline]
    fn next(&mut self) -> Option<GuestRange> {
        if self.at >= self.end {
            return None;
        }
        let boundary = (self.at.bytes() / self.window_bytes + 1).checked_mul(self.window_bytes);
        let boundary = boundary.map_or(self.end, GuestOffset::new);
        let window = GuestRange::between(self.at, boundary.min(self.end))?;
        self.at = window.end();
        Some(window)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExtentKind, ready};
    use mica_rt::{Backend, Executor, sleep};
    use std::time::Duration;

    const WINDOW_BYTES: u64 = 4096;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len).expect("small")
    }

    fn ends(range: GuestRange) -> Vec<u64> {
        windows(range, WINDOW_BYTES).map(|window| window.end().bytes()).collect()
    }

    #[test]
    fn windows_end_at_multiples_of_their_size() {
        let range = range(1, 3 * WINDOW_BYTES + 4);
        let end = range.end().bytes();
        assert_eq!(ends(range), [WINDOW_BYTES, 2 * WINDOW_BYTES, 3 * WINDOW_BYTES, end]);
        let starts = windows(range, WINDOW_BYTES).map(|window| window.start().bytes());
        assert!(starts.eq([1, WINDOW_BYTES, 2 * WINDOW_BYTES, 3 * WINDOW_BYTES]));
    }

    #[test]
    fn window_at_the_end_of_64_bits_ends() {
        assert_eq!(ends(range(u64::MAX - 511, 511)), [u64::MAX]);
        assert_eq!(windows(range(5, 700), u64::MAX).collect::<Vec<_>>(), [range(5, 700)]);
    }

    #[test]
    fn empty_range_has_no_windows() {
        assert!(ends(range(4096, 0)).is_empty());
    }

    #[test]
    fn parts_are_put_together_in_order_whichever_is_read_first() {
        let extents: Vec<_> = [(0, 512), (512, 1024), (1536, 512)]
            .map(|(start, len)| Extent::unplaced(range(start, len), ExtentKind::Data))
            .into();
        let read = |extent: &Extent, mut buf: Buf| {
            let number = extent.start.bytes() / 512;
            IoFuture::boxed(async move {
                sleep(Duration::from_micros(10 - number)).await;
                buf.fill(u8::try_from(number).expect("small"));
                ready(Ok(()), buf).await
            })
        };
        let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
        for count in 0..=extents.len() {
            let extents = &extents[..count];
            let buf = Buf::new(usize::try_from(Extent::total_len(extents)).expect("small"));
            let whole = executor.block_on(read_extents_by(read, extents, buf)).expect("read");
            let wanted = [vec![0; 512], vec![1; 1024], vec![3; 512]].concat();
            assert_eq!(*whole, wanted[..whole.len()]);
        }
    }
}
