//! Compares a state in a folder with a disk: whether that has it, to the last byte.
//!
//! Pieces that no later step cuts are compared by their sums, so that little of the folder is read.

use crate::folder::Stored;
use crate::merge::Steps;
use mica_block::{Disk, Result, Survey, read_whole, windows};
use mica_map::crc32c;
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};

/// Bytes that are read at once where nothing but zeros should be.
const WINDOW_BYTES: u64 = 1 << 20;

/// Whether the `disk` has what the last state of `line` has, which are all that this goes on from,
/// from the whole one.
///
/// # Errors
/// `Corrupt` naming what of a state is damaged; what the system reports.
///
/// # Panics
/// If a state goes on from one that is not before it.
pub async fn has_state(disk: &dyn Disk, line: &[Stored]) -> Result<bool> {
    let Some(len) = line.last().map(Stored::len).filter(|len| *len == disk.geometry().len) else {
        return Ok(false);
    };
    let (mut steps, mut position) = (Steps::of(line)?, 0);
    while let Some((owner, part)) = steps.next_part(position) {
        if !is_zero(disk, position, part.start).await? {
            return Ok(false);
        }
        position = part.end;
        let entry = steps.entry(owner);
        let is_same = if entry.piece.is_zeros() {
            is_zero(disk, part.start, part.end).await?
        } else {
            let found = read(disk, range(part.start, part.end)).await?;
            match part == (entry.start()..entry.piece.end()) {
                true => crc32c(&found) == entry.piece.sum,
                false => &*found == steps.cut(owner, &part)?,
            }
        };
        if !is_same {
            return Ok(false);
        }
    }
    is_zero(disk, position, len).await
}

async fn is_zero(disk: &dyn Disk, start: u64, end: u64) -> Result<bool> {
    let mut survey = Survey::new(disk, range(start, end));
    while let Some(extents) = survey.next().await? {
        for extent in extents.iter().filter(|extent| !extent.kind.reads_as_zero()) {
            for window in windows(extent.range(), WINDOW_BYTES) {
                if read(disk, window).await?.iter().any(|byte| *byte != 0) {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}

fn range(start: u64, end: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(start), end - start).expect("on the disk")
}

async fn read(disk: &dyn Disk, range: GuestRange) -> Result<Buf> {
    let plan = disk.plan(range, Vec::new()).finish().await?;
    read_whole(disk, &plan).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::folder::Folder;
    use crate::folder::tests::back_up;
    use crate::packing::Packing;
    use crate::testing::{MemoryDisk, MemorySource, block_on, change};
    use mica_units::Rng;

    /// The story: 16 pieces of a state's own step were compared, so that an incremental backup went
    /// on from a disk that had something else in between, or anywhere, if the step had no data.
    #[test]
    fn no_sector_of_a_state_may_be_another() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::make(&dir.path().join("web")).unwrap();
        let mut rng = Rng::new(11);
        let mut states = vec![vec![0; 3 << 20]];
        for number in 0..5_usize {
            let before = states[number].clone();
            let mut disk = before.clone();
            // The last step has no data.
            match number {
                4 => disk[1 << 20..2 << 20].fill(0),
                _ => change(&mut disk, &mut rng),
            }
            let mut source = match number {
                0 => MemorySource::whole(&disk),
                _ => MemorySource::since(&disk, &before),
            };
            let base = number.checked_sub(1).map(|base| format!("s{base}"));
            let packing = rng.choose(&[Packing::Plain, Packing::Zstd]);
            let named = format!("s{number}");
            back_up(&folder, (&named, base.as_deref()), &mut source, packing).unwrap();
            states.push(disk);
        }
        for (number, state) in states[1..].iter().enumerate() {
            let line = folder.line(&format!("s{number}")).unwrap();
            let has = |bytes: &[u8]| {
                let disk = MemoryDisk::new(bytes.len());
                disk.bytes().copy_from_slice(bytes);
                block_on(has_state(&disk, &line)).unwrap()
            };
            assert!(has(state), "state {number}");
            let mut other = state.clone();
            for at in (0..other.len()).step_by(64 << 10) {
                other[at + 77] ^= 1;
                assert!(!has(&other), "state {number}, byte {at}");
                other[at + 77] ^= 1;
            }
            other.extend([0; 512]);
            assert!(!has(&other), "a longer one");
        }
    }
}
