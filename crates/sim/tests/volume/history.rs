//! What a guest did, one after the other, and what of it must be there.

use mica_block::{Disk, Zeroes, read_whole};
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use mica_volume::Volume;
use std::cell::RefCell;
use std::ops::Range;

const SECTOR: usize = 512;
const _: () = assert!(SECTOR as u64 == SECTOR_BYTES);
const BLOCK_SECTORS: usize = 8;
/// Sectors of the disk: the last block is cut.
pub(crate) const SECTORS: usize = 11 * BLOCK_SECTORS + 3;
pub(crate) const LEN: u64 = SECTORS as u64 * SECTOR_BYTES;

/// What was done since the volume was opened. A sector has the number that was written there.
pub(crate) struct History {
    base: Vec<u64>,
    changes: Vec<(Range<usize>, u64)>,
    next: u64,
    /// How many of the changes were answered, flushed, and are known to be in the store.
    pub(crate) answered: usize,
    pub(crate) flushed: usize,
    pub(crate) stored: usize,
    /// Whether what is flushed is in the store.
    pub(crate) flushes_to_store: bool,
}

impl History {
    pub(crate) fn new() -> Self {
        let (answered, flushed, stored) = (0, 0, 0);
        let (base, flushes_to_store) = (vec![0; SECTORS], false);
        let (changes, next) = (Vec::new(), 1);
        Self { base, changes, next, answered, flushed, stored, flushes_to_store }
    }

    /// What the disk has when `found` is on it: a prefix of the changes, with at least `owed` of
    /// them. That is where the next history begins.
    pub(crate) fn expect(&mut self, found: &[u64], owed: usize) {
        let mut state = self.base.clone();
        let mut fits = None;
        for count in 0..=self.changes.len() {
            if state == found && (count >= owed || fits.is_none()) {
                fits = Some(count);
            }
            if let Some((sectors, number)) = self.changes.get(count) {
                state[sectors.clone()].fill(*number);
            }
        }
        let all = self.changes.len();
        let fits = fits.unwrap_or_else(|| {
            panic!("{found:?} is no prefix of {:?} after {:?}", self.changes, self.base)
        });
        assert!(fits >= owed, "only {fits} of {all} changes are there, and {owed} were promised");
        self.base = found.to_vec();
        self.changes.clear();
        (self.answered, self.flushed, self.stored) = (0, 0, 0);
    }

    /// What the disk shows to its guest now.
    fn shown(&self) -> Vec<u64> {
        let mut state = self.base.clone();
        for (sectors, number) in &self.changes {
            state[sectors.clone()].fill(*number);
        }
        state
    }

    /// Notes a write, as the disk does it: block by block. Returns its number.
    fn write(&mut self, sectors: &Range<usize>) -> u64 {
        let number = self.next;
        self.next += 1;
        self.note(sectors, number);
        number
    }

    fn note(&mut self, sectors: &Range<usize>, number: u64) {
        let mut at = sectors.start;
        while at < sectors.end {
            let end = (at + 1).next_multiple_of(BLOCK_SECTORS).min(sectors.end);
            self.changes.push((at..end, number));
            at = end;
        }
    }

    /// Notes zeros: first those in parts of blocks, then all whole blocks at once.
    fn zero(&mut self, sectors: &Range<usize>) {
        let first = sectors.start.next_multiple_of(BLOCK_SECTORS);
        let end = match sectors.end {
            SECTORS => SECTORS,
            end => end / BLOCK_SECTORS * BLOCK_SECTORS,
        };
        if first >= end {
            return self.note(sectors, 0);
        }
        self.note(&(sectors.start..first), 0);
        self.note(&(end..sectors.end), 0);
        self.changes.push((first..end, 0));
    }
}

fn range(sectors: &Range<usize>) -> GuestRange {
    let (start, end) = (sectors.start as u64, sectors.end as u64);
    GuestRange::new(GuestOffset::new(start * SECTOR_BYTES), (end - start) * SECTOR_BYTES).unwrap()
}

/// The numbers in the sectors of `volume`; each sector is as one write left it.
pub(crate) async fn read(volume: &Volume, sectors: Range<usize>) -> mica_block::Result<Vec<u64>> {
    let plan = volume.plan(range(&sectors), Vec::new()).finish().await?;
    let bytes = read_whole(volume, &plan).await?;
    let number = |sector: &[u8]| {
        let (words, _) = sector.as_chunks::<8>();
        assert!(words.iter().all(|word| *word == words[0]), "a sector is torn");
        u64::from_le_bytes(words[0])
    };
    Ok(bytes.chunks(SECTOR).map(number).collect())
}

/// A guest that does `steps` things, one after the other, as `below` decides. Ends early with the
/// disk's error.
pub(crate) async fn work(
    volume: &Volume,
    history: &RefCell<History>,
    below: &dyn Fn(u64) -> u64,
    steps: u64,
) -> mica_block::Result<()> {
    let count = |bound: usize| usize::try_from(below(bound as u64)).unwrap();
    for _ in 0..steps {
        let start = count(SECTORS);
        let sectors = start..start + 1 + count((SECTORS - start).min(30));
        match below(10) {
            0..=4 => {
                let number = history.borrow_mut().write(&sectors);
                let bytes = number.to_le_bytes().repeat(sectors.len() * SECTOR / 8);
                let at = range(&sectors).start();
                volume.write(at, Buf::from_slice(&bytes)).await.0?;
            }
            5 => {
                history.borrow_mut().zero(&sectors);
                let zeroes = Zeroes { may_unmap: true, fast: false };
                volume.write_zeroes(range(&sectors), zeroes).await?;
            }
            6 => flush(volume, history).await?,
            7 => mica_rt::sleep(std::time::Duration::from_millis(below(700))).await,
            _ => {
                let shown = history.borrow().shown()[sectors.clone()].to_vec();
                assert_eq!(read(volume, sectors).await?, shown);
            }
        }
        let mut history = history.borrow_mut();
        history.answered = history.changes.len();
    }
    Ok(())
}

pub(crate) async fn flush(volume: &Volume, history: &RefCell<History>) -> mica_block::Result<()> {
    let answered = history.borrow().answered;
    volume.flush().await?;
    let mut history = history.borrow_mut();
    history.flushed = history.flushed.max(answered);
    if history.flushes_to_store {
        history.stored = history.flushed;
    }
    Ok(())
}
