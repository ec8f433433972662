//! Gives states back: pieces of steps, each of which was verified, are written to a disk in order.

use crate::folder::Stored;
use crate::format::Piece;
use crate::reader::StepReader;
use crate::verify::DataFile;
use mica_block::{Disk, Result, Zeroes, windows};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange};
use std::io::Read;

/// Pieces that are written at the same time.
const WRITES_MAX: usize = 8;
/// Bytes that are zeroed at once: a device may take long over them.
const ZEROED_BYTES_MAX: u64 = 1 << 30;

/// Writes what the state's own step has to `disk`, which has what the step goes on from. `at` is
/// called with how far on the disk that is, and how many bytes of data that were.
///
/// # Errors
/// `Corrupt` naming the state and the extent that is damaged; what the disk reports.
pub async fn restore_state(
    state: &Stored,
    disk: &dyn Disk,
    mut at: impl FnMut(u64, u64),
) -> Result<()> {
    let (manifest, mut data) = (state.manifest()?, DataFile::open(state)?);
    let mut restorer = Restorer::new(disk);
    for (entry, sequence) in manifest.entries.iter().zip(0..) {
        let bytes = data.read(entry, sequence)?;
        restorer.push(entry.piece, bytes).await?;
        at(entry.piece.end(), entry.piece.data_bytes());
    }
    restorer.finish().await
}

/// As [`restore_state`], of the step that was begun in a stream.
///
/// # Errors
/// `Corrupt` if the stream is damaged, or ends too early; what the disk reports.
pub async fn restore_step<R: Read>(
    stream: &mut StepReader<R>,
    disk: &dyn Disk,
    mut at: impl FnMut(u64, u64),
) -> Result<()> {
    let mut restorer = Restorer::new(disk);
    while let Some((piece, bytes)) = stream.next_piece()? {
        at(piece.end(), piece.data_bytes());
        restorer.push(piece, bytes).await?;
    }
    restorer.finish().await
}

/// Writes pieces, which do not overlap.
struct Restorer<'a> {
    disk: &'a dyn Disk,
    batch: Vec<(Piece, Buf)>,
}

impl<'a> Restorer<'a> {
    fn new(disk: &'a dyn Disk) -> Self {
        Self { disk, batch: Vec::new() }
    }

    async fn push(&mut self, piece: Piece, bytes: Buf) -> Result<()> {
        self.batch.push((piece, bytes));
        if self.batch.len() >= WRITES_MAX { self.finish().await } else { Ok(()) }
    }

    async fn finish(&mut self) -> Result<()> {
        let disk = self.disk;
        let writes = self.batch.drain(..).map(|(piece, bytes)| put(disk, piece, bytes));
        for written in join_all(writes.collect::<Vec<_>>()).await {
            written?;
        }
        Ok(())
    }
}

async fn put(disk: &dyn Disk, piece: Piece, bytes: Buf) -> Result<()> {
    let start = GuestOffset::new(piece.start);
    if !piece.is_zeros() {
        return disk.write(start, bytes).await.0;
    }
    let range = GuestRange::new(start, piece.len).expect("on the disk");
    for range in windows(range, ZEROED_BYTES_MAX) {
        disk.write_zeroes(range, Zeroes { may_unmap: true, fast: false }).await?;
    }
    Ok(())
}
