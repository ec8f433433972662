//! Walks one or two disks from start to end and yields the pieces that have to be read.
//!
//! What is known of the disks ahead takes a bounded amount of memory: a survey ends early.

use mica_block::{Disk, Extent, Result, Survey};
use mica_units::{GuestOffset, GuestRange};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes surveyed at a time: the minimum where there is data, growing where there is none.
const WINDOW_BYTES_MIN: u64 = 16 << 20;
const WINDOW_BYTES_MAX: u64 = 1 << 52;

/// A part of the disks to visit.
pub(crate) struct Piece {
    /// Where it starts.
    pub(crate) start: u64,
    /// Its length, at most up to the end of the first disk.
    pub(crate) len: u64,
    /// Extents of the first disk.
    pub(crate) first: Vec<Extent>,
    /// Extents of the second disk for the same range, as far as it reaches.
    pub(crate) second: Vec<Extent>,
}

/// A walk over a disk, and over a second one as far as the first reaches. Nobody writes to them.
pub(crate) struct Cursor {
    first: Ahead,
    second: Option<Ahead>,
    piece_bytes: u64,
    /// Whether pieces of zeros are visited too.
    with_zeros: bool,
    at: u64,
}

impl Cursor {
    /// A walk from the start of the disks in pieces of `piece_bytes`.
    pub(crate) fn new(
        first: Arc<dyn Disk>,
        second: Option<Arc<dyn Disk>>,
        piece_bytes: u64,
        with_zeros: bool,
    ) -> Self {
        let len = first.geometry().len;
        let second = second.map(|disk| Ahead::new(disk, len));
        Self { first: Ahead::new(first, len), second, piece_bytes, with_zeros, at: 0 }
    }

    /// The current position.
    pub(crate) fn position(&self) -> u64 {
        self.at
    }

    /// The next piece to visit; `None` at the end of the first disk.
    ///
    /// # Errors
    /// Any failure to read a disk's map.
    pub(crate) async fn next(&mut self) -> Result<Option<Piece>> {
        while self.at < self.first.len {
            let end = (self.at + self.piece_bytes).min(self.first.len);
            self.first.know_until(end).await?;
            let mut zeros_end = self.first.zeros_end(self.at);
            if let Some(second) = &mut self.second {
                second.know_until(end).await?;
                zeros_end = zeros_end.min(second.zeros_end(self.at));
            }
            let is_zero = zeros_end >= end;
            if is_zero && !self.with_zeros {
                // To the piece that has something else, or is not known yet.
                let whole = (zeros_end - self.at) / self.piece_bytes * self.piece_bytes;
                self.at = (self.at + whole).max(end).min(self.first.len);
                self.first.drop_until(self.at);
                self.second.iter_mut().for_each(|second| second.drop_until(self.at));
                continue;
            }
            let (start, len) = (self.at, end - self.at);
            self.at = end;
            let first = self.first.take_until(end);
            let second = self.second.as_mut().map(|second| second.take_until(end));
            return Ok(Some(Piece { start, len, first, second: second.unwrap_or_default() }));
        }
        Ok(None)
    }
}

/// What is known of a disk from the position of the walk on.
struct Ahead {
    disk: Arc<dyn Disk>,
    /// Where the walk over this disk ends.
    len: u64,
    /// Extents up to `known_to`.
    extents: VecDeque<Extent>,
    known_to: u64,
    window: u64,
}

impl Ahead {
    fn new(disk: Arc<dyn Disk>, len_max: u64) -> Self {
        let len = disk.geometry().len.min(len_max);
        Self { disk, len, extents: VecDeque::new(), known_to: 0, window: WINDOW_BYTES_MIN }
    }

    /// Surveys until everything before `end` is known, or the disk ends.
    async fn know_until(&mut self, end: u64) -> Result<()> {
        while self.known_to < end.min(self.len) {
            let len = self.window.min(self.len - self.known_to);
            let range = GuestRange::new(GuestOffset::new(self.known_to), len);
            let range = range.expect("within the disk");
            let extents = Survey::new(&*self.disk, range).next().await?.expect("not empty");
            self.window = match is_zero(&extents) {
                true => (self.window * 2).min(WINDOW_BYTES_MAX),
                false => WINDOW_BYTES_MIN,
            };
            self.known_to += Extent::total_len(&extents);
            self.extents.extend(extents);
        }
        Ok(())
    }

    /// How far from `at` on nothing but zeros is known. Beyond the disk there is nothing else.
    fn zeros_end(&self, at: u64) -> u64 {
        let data = self.extents.iter().find(|extent| !extent.kind.reads_as_zero());
        match data {
            Some(data) => data.start.bytes().max(at),
            None if self.known_to == self.len => u64::MAX,
            None => self.known_to,
        }
    }

    fn drop_until(&mut self, end: u64) {
        drop(self.take_until(end));
        debug_assert!(self.known_to >= end.min(self.len), "only what is known is skipped");
    }

    /// Splits off the part before `end`.
    fn take_until(&mut self, end: u64) -> Vec<Extent> {
        let mut taken = Vec::new();
        while let Some(extent) = self.extents.pop_front() {
            let range = extent.range();
            if range.end().bytes() <= end {
                taken.push(extent);
                continue;
            }
            let cut = GuestOffset::new(end.max(range.start().bytes()));
            let part = |from, to| GuestRange::between(from, to).and_then(|it| extent.within(it));
            taken.extend(part(range.start(), cut));
            part(cut, range.end()).into_iter().for_each(|rest| self.extents.push_front(rest));
            break;
        }
        taken
    }
}

/// Whether all of `extents` read as zeros.
fn is_zero(extents: &[Extent]) -> bool {
    extents.iter().all(|extent| extent.kind.reads_as_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::{ExtentKind, Geometry, IoFuture, LocalFuture, Planned};
    use mica_rt::{Backend, Buf, Executor};
    use mica_units::Rng;

    const UNIT: u64 = 4096;
    const PIECE: u64 = 4 * UNIT;

    /// A disk of units with data or without, whose surveys end after a few extents.
    struct Sketch {
        has_data: Vec<bool>,
        extents_max: usize,
    }

    impl Sketch {
        fn random(rng: &mut Rng, units: u64) -> Arc<Self> {
            let (mut has_data, mut run, mut is_data) = (Vec::new(), 0, false);
            for _ in 0..units {
                if run == 0 {
                    let most = rng.choose(&[2, 40, 3000]);
                    run = 1 + rng.below(most);
                    is_data = !is_data;
                }
                run -= 1;
                has_data.push(is_data);
            }
            let extents_max = usize::try_from(1 + rng.below(9)).expect("small");
            Arc::new(Self { has_data, extents_max })
        }

        fn is_zero(&self, range: GuestRange) -> bool {
            let units = range.start().bytes() / UNIT..range.end().bytes() / UNIT;
            units.into_iter().all(|unit| {
                let unit = usize::try_from(unit).expect("small");
                !self.has_data.get(unit).is_some_and(|has_data| *has_data)
            })
        }
    }

    impl Disk for Sketch {
        fn geometry(&self) -> Geometry {
            Geometry { len: self.has_data.len() as u64 * UNIT, preferred_bytes: 4096 }
        }

        fn plan(&self, _: GuestRange, _: Vec<Extent>) -> Planned<'_> {
            unreachable!("a walk surveys")
        }

        fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
            let mut extents: Vec<Extent> = Vec::new();
            let mut at = range.start();
            while at < range.end() {
                let unit = GuestRange::new(at, UNIT).expect("small");
                let is_zero = self.is_zero(unit);
                let kind = if is_zero { ExtentKind::Zero } else { ExtentKind::Data };
                let is_full = extents.len() == self.extents_max;
                match extents.last_mut() {
                    Some(last) if last.kind == kind => last.len += UNIT,
                    _ if is_full => break,
                    _ => extents.push(Extent::unplaced(unit, kind)),
                }
                at = unit.end();
            }
            Box::pin(std::future::ready(Ok(extents)))
        }

        fn read(&self, _: &Extent, _: Buf) -> IoFuture {
            unreachable!("a walk reads nothing")
        }
    }

    fn range(start: u64, end: u64) -> GuestRange {
        GuestRange::between(GuestOffset::new(start), GuestOffset::new(end)).expect("a range")
    }

    /// Walks; whatever is not visited must read as zeros on both disks.
    async fn walk(first: &Arc<Sketch>, second: Option<&Arc<Sketch>>, with_zeros: bool) {
        let len = first.geometry().len;
        let of_second = second.map(|disk| Arc::clone(disk) as Arc<dyn Disk>);
        let of_first = Arc::clone(first) as Arc<dyn Disk>;
        let mut cursor = Cursor::new(of_first, of_second, PIECE, with_zeros);
        let is_zero = |range| first.is_zero(range) && second.is_none_or(|it| it.is_zero(range));
        let mut done = 0;
        while let Some(piece) = cursor.next().await.expect("nothing fails") {
            let end = (piece.start + PIECE).min(len);
            let whole = range(piece.start, end);
            assert!(piece.start.is_multiple_of(PIECE) && piece.len == end - piece.start);
            assert!(Extent::covers(&piece.first, whole), "{whole:?}");
            let second_end = second.map_or(0, |disk| disk.geometry().len);
            let of_second = range(piece.start, second_end.clamp(piece.start, end));
            assert!(Extent::covers(&piece.second, of_second), "{of_second:?}");
            assert!(is_zero(range(done, piece.start)), "data is skipped from {done} on");
            assert!(!with_zeros || piece.start == done, "zeros are skipped from {done} on");
            assert!(with_zeros || !is_zero(whole), "nothing is in {whole:?}");
            done = cursor.position();
            assert_eq!(done, end);
        }
        assert!(is_zero(range(done, len)), "data is skipped from {done} to the end");
        assert!(!with_zeros || done == len);
        assert_eq!(cursor.position(), len);
    }

    #[test]
    fn every_piece_with_data_is_visited_once_in_order() {
        let executor = Executor::new(Backend::Sim { seed: 0 }).expect("a simulator");
        for seed in 0..400 {
            let mut rng = Rng::new(seed);
            let units = 1 + rng.below(20_000);
            let first = Sketch::random(&mut rng, units);
            let other_units = rng.below(2 * units);
            let second = Sketch::random(&mut rng, other_units);
            let second = rng.percent(60).then_some(&second);
            println!("seed {seed}");
            executor.block_on(walk(&first, second, rng.percent(30)));
        }
    }
}
