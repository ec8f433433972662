//! Partitions of a disk: where the tables of MBR and GPT say that they are.
//!
//! A guest writes these tables: what they say is checked against the disk, and how many are read is
//! bounded.

use crate::window::WindowPlace;
use mica_block::{Disk, Error, ErrorKind, Result, read_whole};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};

/// Entries of a GPT at most; there are 128 by custom.
const GPT_ENTRIES_MAX: u32 = 1024;
const GPT_ENTRY_BYTES: std::ops::RangeInclusive<u32> = 128..=4096;
const GPT_SIGNATURE: &[u8] = b"EFI PART";
const MBR_SIGNATURE: [u8; 2] = [0x55, 0xaa];
const MBR_ENTRIES_AT: usize = 446;
const MBR_ENTRY_BYTES: usize = 16;
const MBR_ENTRIES: u32 = 4;
/// Types of a primary partition that holds logical ones.
const EXTENDED: [u8; 3] = [0x05, 0x0f, 0x85];
/// Logical partitions at most: each is a link of a chain.
const LOGICAL_MAX: u32 = 256;

/// Where partition `number` of `disk` is, counted as Linux does: from 1, in an MBR logical ones
/// from 5.
///
/// # Errors
/// `NotFound` if there is no such partition; `Corrupt` if the table is damaged; why the disk cannot
/// be read.
pub async fn find_partition(disk: &dyn Disk, number: u32) -> Result<WindowPlace> {
    let found = match number {
        0 => None,
        _ if read(disk, 1).await?.starts_with(GPT_SIGNATURE) => in_gpt(disk, number).await?,
        _ => in_mbr(disk, number).await?,
    };
    let (first, count) = found.ok_or_else(|| {
        Error::new(ErrorKind::NotFound, format!("the disk has no partition {number}"))
    })?;
    let bytes = |sectors: u64| sectors.checked_mul(SECTOR_BYTES);
    let (start, len) = bytes(first).zip(bytes(count)).ok_or_else(damaged)?;
    match start.checked_add(len) {
        Some(end) if end <= disk.geometry().len => Ok(WindowPlace { start, len: Some(len) }),
        _ => Err(damaged()),
    }
}

fn damaged() -> Error {
    Error::new(ErrorKind::Corrupt, "the partition table says what the disk cannot have")
}

/// First sector and number of sectors.
type Sectors = (u64, u64);

async fn in_gpt(disk: &dyn Disk, number: u32) -> Result<Option<Sectors>> {
    let header = read(disk, 1).await?;
    let (entries_at, count, bytes) = (le64(&header, 72), le32(&header, 80), le32(&header, 84));
    if !GPT_ENTRY_BYTES.contains(&bytes) || !bytes.is_power_of_two() || count > GPT_ENTRIES_MAX {
        return Err(damaged());
    }
    if number > count {
        return Ok(None);
    }
    let at = u64::from(number - 1) * u64::from(bytes);
    let sector = entries_at.checked_add(at / SECTOR_BYTES).ok_or_else(damaged)?;
    let sector = read(disk, sector).await?;
    let within = usize::try_from(at % SECTOR_BYTES).expect("less than a sector");
    let entry = &sector[within..];
    if entry[..16].iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let (first, last) = (le64(entry, 32), le64(entry, 40));
    let count = last.checked_sub(first).and_then(|more| more.checked_add(1));
    Ok(Some((first, count.ok_or_else(damaged)?)))
}

async fn in_mbr(disk: &dyn Disk, number: u32) -> Result<Option<Sectors>> {
    let Some(table) = table_in(disk, 0).await? else { return Ok(None) };
    if number <= MBR_ENTRIES {
        let entry = table[number as usize - 1];
        let is_one = entry.kind != 0 && !EXTENDED.contains(&entry.kind);
        return Ok(is_one.then_some((entry.first, entry.count)));
    }
    let Some(extended) = table.iter().find(|entry| EXTENDED.contains(&entry.kind)) else {
        return Ok(None);
    };
    let mut at = extended.first;
    for logical in MBR_ENTRIES + 1..=MBR_ENTRIES + LOGICAL_MAX {
        let Some([entry, next, ..]) = table_in(disk, at).await? else { return Err(damaged()) };
        if logical == number {
            let is_one = entry.kind != 0;
            return Ok(is_one.then_some((at + entry.first, entry.count)));
        }
        if !EXTENDED.contains(&next.kind) {
            break;
        }
        at = extended.first + next.first;
    }
    Ok(None)
}

#[derive(Clone, Copy)]
struct MbrEntry {
    kind: u8,
    first: u64,
    count: u64,
}

/// The table in a sector, if it is one.
async fn table_in(disk: &dyn Disk, at: u64) -> Result<Option<[MbrEntry; 4]>> {
    let sector = read(disk, at).await?;
    if !sector.ends_with(&MBR_SIGNATURE) {
        return Ok(None);
    }
    Ok(Some(std::array::from_fn(|index| {
        let entry = &sector[MBR_ENTRIES_AT + index * MBR_ENTRY_BYTES..];
        let [first, count] = [8, 12].map(|at| u64::from(le32(entry, at)));
        MbrEntry { kind: entry[4], first, count }
    })))
}

/// A sector of the disk.
async fn read(disk: &dyn Disk, sector: u64) -> Result<Buf> {
    let start = sector.checked_mul(SECTOR_BYTES).ok_or_else(damaged)?;
    let range = GuestRange::new(GuestOffset::new(start), SECTOR_BYTES);
    let range = range.filter(|range| range.end().bytes() <= disk.geometry().len);
    let plan = disk.plan(range.ok_or_else(damaged)?, Vec::new()).finish().await?;
    read_whole(disk, &plan).await
}

fn le32(bytes: &[u8], at: usize) -> u32 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn le64(bytes: &[u8], at: usize) -> u64 {
    let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
    bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RawDisk;
    use mica_rt::{Backend, Executor};
    use mica_store::MemoryStore;
    use std::sync::Arc;

    const SECTOR: usize = 512;

    /// Where partitions with these numbers are, in sectors.
    fn found(bytes: &[u8], numbers: &[u32]) -> Vec<Option<(u64, u64)>> {
        let executor = Executor::new(Backend::Sim { seed: 1 }).expect("simulated");
        executor.block_on(async {
            let store = MemoryStore::new("disk", bytes.to_vec());
            let disk = RawDisk::new(Arc::new(store)).expect("a disk");
            let mut found = Vec::new();
            for number in numbers {
                let place = find_partition(&disk, *number).await.ok();
                found.push(place.map(|place| (place.start / 512, place.len.unwrap_or(0) / 512)));
            }
            found
        })
    }

    fn mbr_entry(disk: &mut [u8], (sector, index): (usize, usize), kind: u8, place: (u32, u32)) {
        let at = sector * SECTOR + MBR_ENTRIES_AT + index * MBR_ENTRY_BYTES;
        disk[at + 4] = kind;
        disk[at + 8..at + 12].copy_from_slice(&place.0.to_le_bytes());
        disk[at + 12..at + 16].copy_from_slice(&place.1.to_le_bytes());
        disk[sector * SECTOR + 510..][..2].copy_from_slice(&MBR_SIGNATURE);
    }

    #[test]
    fn primary_and_logical_partitions_are_found_and_loops_end() {
        let mut disk = vec![0; 200 * SECTOR];
        mbr_entry(&mut disk, (0, 0), 0x83, (10, 20));
        mbr_entry(&mut disk, (0, 1), 0x05, (50, 100));
        mbr_entry(&mut disk, (0, 2), 0x83, (190, 20));
        mbr_entry(&mut disk, (50, 0), 0x83, (1, 10));
        mbr_entry(&mut disk, (50, 1), 0x05, (30, 20));
        mbr_entry(&mut disk, (80, 0), 0x83, (2, 5));
        let all = found(&disk, &[0, 1, 2, 3, 4, 5, 6, 7]);
        // The extended one is no disk, and the third ends beyond the disk.
        let expected =
            [None, Some((10, 20)), None, None, None, Some((51, 10)), Some((82, 5)), None];
        assert_eq!(all, expected);
        mbr_entry(&mut disk, (80, 1), 0x05, (0, 20));
        assert_eq!(found(&disk, &[7, 8, 100_000]), [Some((51, 10)), Some((82, 5)), None]);
        assert_eq!(found(&vec![0; 4 * SECTOR], &[1, 5]), [None, None]);
        assert_eq!(found(&[0; SECTOR], &[1]), [None], "too short for a table");
    }

    #[test]
    fn partitions_of_a_gpt_are_found_and_nonsense_is_refused() {
        let mut disk = vec![0; 200 * SECTOR];
        disk[SECTOR..SECTOR + 8].copy_from_slice(GPT_SIGNATURE);
        disk[SECTOR + 72..SECTOR + 80].copy_from_slice(&2_u64.to_le_bytes());
        disk[SECTOR + 80..SECTOR + 84].copy_from_slice(&128_u32.to_le_bytes());
        disk[SECTOR + 84..SECTOR + 88].copy_from_slice(&128_u32.to_le_bytes());
        let mut entry = |index: usize, first: u64, last: u64| {
            let at = 2 * SECTOR + index * 128;
            disk[at] = 1;
            disk[at + 32..at + 40].copy_from_slice(&first.to_le_bytes());
            disk[at + 40..at + 48].copy_from_slice(&last.to_le_bytes());
        };
        entry(0, 40, 49);
        entry(4, 60, 60);
        entry(5, 70, 69);
        entry(6, 70, 60);
        entry(7, 0, u64::MAX);
        entry(8, 190, 250);
        let all = found(&disk, &[1, 2, 5, 6, 7, 8, 9, 129]);
        let expected = [Some((40, 10)), None, Some((60, 1)), None, None, None, None, None];
        assert_eq!(all, expected);
        for (at, wrong) in [(84, 0_u32), (84, 100), (80, u32::MAX)] {
            let mut damaged = disk.clone();
            damaged[SECTOR + at..SECTOR + at + 4].copy_from_slice(&wrong.to_le_bytes());
            assert_eq!(found(&damaged, &[1]), [None], "{at} {wrong}");
        }
    }
}
