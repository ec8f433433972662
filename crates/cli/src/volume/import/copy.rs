//! Copies what the uppermost layer of a disk holds onto a disk that has what is below.

use mica_block::{Disk, Extent, Manage, Result, Survey, Zeroes, read_whole, windows};
use mica_rt::{Buf, join_all};
use mica_stack::is_zero;
use mica_units::{GuestOffset, GuestRange};

/// Bytes that are read and written at a time, and how many such pieces at the same time.
const PIECE_BYTES: u64 = 512 << 10;
const PIECES: usize = 8;
/// Runs of zeros that are not stored.
const UNIT_BYTES: usize = 4096;

/// Copies what the uppermost layer of `source` holds to `target`, where something may be below
/// (`is_over`). Says how far it is, and how much it has written.
pub(super) async fn copy_layer(
    source: &dyn Manage,
    target: &dyn Disk,
    is_over: bool,
    at: impl Fn(u64),
    wrote: impl Fn(u64),
) -> Result<()> {
    let len = source.geometry().len;
    let whole = GuestRange::new(GuestOffset::ZERO, len).expect("a disk");
    let mut survey = Survey::new(source, whole);
    let top = source.layer_count() - 1;
    while let Some(extents) = survey.next().await? {
        let owned = |extent: &&Extent| {
            extent.kind.is_present() && (!is_over || source.layer_position(extent.layer) == top)
        };
        let mut pieces = Vec::new();
        for extent in extents.iter().filter(owned) {
            if extent.kind.reads_as_zero() {
                zero(target, extent.range(), is_over).await?;
                continue;
            }
            pieces.extend(windows(extent.range(), PIECE_BYTES));
        }
        for pieces in pieces.chunks(PIECES) {
            let copied = pieces.iter().map(|piece| copy_piece(source, target, *piece, is_over));
            for bytes in join_all(copied).await {
                wrote(bytes?);
            }
            pieces.last().into_iter().for_each(|piece| at(piece.end().bytes()));
        }
        extents.last().into_iter().for_each(|extent| at(extent.range().end().bytes()));
    }
    Ok(())
}

async fn zero(target: &dyn Disk, range: GuestRange, is_over: bool) -> Result<()> {
    if is_over {
        target.write_zeroes(range, Zeroes { may_unmap: true, fast: false }).await?;
    }
    Ok(())
}

/// Copies one piece; returns how many bytes of it are not zeros.
async fn copy_piece(
    source: &dyn Disk,
    target: &dyn Disk,
    piece: GuestRange,
    is_over: bool,
) -> Result<u64> {
    let plan = source.plan(piece, Vec::new()).finish().await?;
    let mut bytes: Buf = read_whole(source, &plan).await?;
    let (mut start, mut written) = (piece.start().bytes(), 0);
    let units: Vec<_> = bytes.chunks(UNIT_BYTES).map(|unit| (is_zero(unit), unit.len())).collect();
    for run in units.chunk_by(|(a, _), (b, _)| a == b) {
        let len: usize = run.iter().map(|(_, len)| len).sum();
        let part = bytes.split_to(len);
        let range = GuestRange::new(GuestOffset::new(start), len as u64).expect("in the piece");
        if run.first().is_some_and(|(is_zero, _)| *is_zero) {
            zero(target, range, is_over).await?;
        } else {
            target.write(range.start(), part).await.0?;
            written += len as u64;
        }
        start += len as u64;
    }
    Ok(written)
}
