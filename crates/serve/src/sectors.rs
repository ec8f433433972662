//! Changes of single bytes on disks that change whole sectors.
//!
//! Disks write whole sectors. A request for a part of one reads the sector, puts its bytes in and
//! writes it back; a write to the sector in between would be lost. Such requests are rare (the end
//! of a file that is copied in), so they simply run alone: no other change of the disk is under way
//! at the same time, whichever server makes it. Changes of whole sectors share the disk
//! ([`SharedLock`]), which costs each an atomic addition. Zeros and discards of any length are
//! divided into pieces that need no memory of their own.

use mica_block::{Disk, Extent, REQUEST_BYTES_MAX, Result, Zeroes, read_whole};
use mica_rt::Buf;
use mica_rt::sync::SharedLock;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};

/// Zeros are written and space is freed in pieces that end at multiples of this.
pub(crate) const PIECE_BYTES: u64 = REQUEST_BYTES_MAX;

/// Whether `range` consists of whole sectors.
#[inline]
pub(crate) fn is_whole(range: GuestRange) -> bool {
    (range.start().bytes() | range.len()).is_multiple_of(SECTOR_BYTES)
}

/// Writes `payload`, which is as long, to `range`, which lies on the disk.
pub(crate) async fn write(
    disk: &dyn Disk,
    edges: &SharedLock,
    range: GuestRange,
    payload: Buf,
) -> Result<()> {
    if is_whole(range) {
        let _sharing = edges.share().await;
        write_whole(disk, range.start(), payload).await
    } else {
        let _alone = edges.alone().await;
        write_parts(disk, range, &payload).await
    }
}

/// Makes `piece`, one of [`pieces`], read as zeros. Parts of sectors are always written.
pub(crate) async fn write_zeroes(
    disk: &dyn Disk,
    edges: &SharedLock,
    piece: GuestRange,
    how: Zeroes,
) -> Result<()> {
    if is_whole(piece) {
        let _sharing = edges.share().await;
        disk.write_zeroes(piece, how).await
    } else {
        let _alone = edges.alone().await;
        let zeros = Buf::zeroed(usize::try_from(piece.len()).expect("less than a sector"));
        write_parts(disk, piece, &zeros).await
    }
}

/// The pieces of `range`, in order: whole sectors, or a part of one.
pub(crate) fn pieces(range: GuestRange) -> impl Iterator<Item = GuestRange> {
    let mut at = range.start();
    std::iter::from_fn(move || {
        let piece = (at < range.end()).then(|| next_piece(at, range.end()))?;
        at = piece.end();
        Some(piece)
    })
}

/// The next piece of what ends at `end`.
fn next_piece(at: GuestOffset, end: GuestOffset) -> GuestRange {
    let unit = if at.bytes().is_multiple_of(SECTOR_BYTES) { PIECE_BYTES } else { SECTOR_BYTES };
    let boundary = (at.bytes() / unit + 1).checked_mul(unit).map_or(end, GuestOffset::new);
    let last = end.bytes() - end.bytes() % SECTOR_BYTES;
    let stop = match boundary.min(end) {
        // The last sector is only begun: it is a piece of its own.
        stop if stop == end && at.bytes() < last => GuestOffset::new(last),
        stop => stop,
    };
    GuestRange::between(at, stop).expect("a piece starts before its end")
}

async fn write_whole(disk: &dyn Disk, at: GuestOffset, buf: Buf) -> Result<()> {
    disk.write(at, buf).await.0
}

/// Writes `bytes` to `range`, which cuts sectors: their other bytes are read and written back.
async fn write_parts(disk: &dyn Disk, range: GuestRange, bytes: &[u8]) -> Result<()> {
    let (start, end) = (range.start().bytes(), range.end().bytes());
    let first = start - start % SECTOR_BYTES;
    // The disk ends with a whole sector.
    let outer_len = end.next_multiple_of(SECTOR_BYTES) - first;
    let last = first + outer_len - SECTOR_BYTES;
    let mut buf = Buf::new(usize::try_from(outer_len).expect("a payload and a bit"));
    let at = |offset: u64| usize::try_from(offset - first).expect("within the buffer");
    if start != first {
        buf.put(0, &read_sector(disk, first).await?);
    }
    if !end.is_multiple_of(SECTOR_BYTES) && (last != first || start == first) {
        buf.put(at(last), &read_sector(disk, last).await?);
    }
    buf.put(at(start), bytes);
    write_whole(disk, GuestOffset::new(first), buf).await
}

async fn read_sector(disk: &dyn Disk, at: u64) -> Result<Buf> {
    let range = GuestRange::new(GuestOffset::new(at), SECTOR_BYTES).expect("on the disk");
    let extents = disk.plan(range, Vec::new()).finish().await?;
    assert!(Extent::covers(&extents, range), "a plan covers what was asked");
    read_whole(disk, &extents).await
}
