//! The judge's knowledge: for each sector of a disk, what it may hold.
//!
//! A sector has a base, which no loss takes away, and what was written to it since, oldest first.
//! Each write has the number of its acknowledgement, or none.
//!
//! Rules
//! - R1 While a server lives, and after one that was killed and had a log, when nobody else wrote
//!   meanwhile: the newest acknowledged write, or one that was sent after it and has no answer.
//! - R2 Where unflushed writes may be lost: the base, or any write since.
//! - R3 An acknowledged flush makes the newest write that was acknowledged before it was sent the
//!   base; what is older can never be seen again.
//! - R4 What QEMU wrote is the base at once. But where a killed server's log may be applied still,
//!   zeros that QEMU commits to where that server left zeros in the file leave no byte changed,
//!   whatever QEMU committed there in between, so that nobody can tell that they are later than
//!   what is in the log.
//! - R5 What a server shows when it starts is decided: later writes that it does not show are gone
//!   for good.
//! - R6 A trim is zeros or nothing, and a read decides that. If the trim was to be durable when it
//!   was answered (FUA), so are zeros that a read sees and that nothing else can have left.

use super::stamp::SECTOR;
use super::stamp::{self, Seen, Seq, Writer};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which contents are right.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum View {
    /// All that was acknowledged (R1).
    Kept,
    /// Unflushed writes may be lost (R2).
    Lossy,
}

/// A write to a sector since its base.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Version {
    seq: Seq,
    /// The number of its acknowledgement; 0 if it has none.
    acked: u64,
    is_trim: bool,
    /// What is seen of it is durable.
    is_durable: bool,
}

#[derive(Clone, Default, Debug)]
struct Sector {
    base: Seq,
    /// The base is another program's.
    is_foreign: bool,
    later: Vec<Version>,
}

impl Sector {
    /// What it may hold, oldest first.
    fn allowed(&self, view: View) -> impl Iterator<Item = Seq> {
        let acked = self.later.iter().rposition(|version| version.acked > 0);
        let from = if view == View::Kept { acked } else { None };
        let base = from.is_none().then_some(self.base);
        let later = self.later[from.unwrap_or(0)..].iter().map(|version| version.seq);
        base.into_iter().chain(later)
    }

    /// The write at `at` cannot be lost any more.
    fn make_base(&mut self, at: usize) {
        self.base = self.later[at].seq;
        self.is_foreign = false;
        self.later.drain(..=at);
    }
}

/// Sectors in a row that hold what they must not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Bad {
    /// The first of them.
    pub(super) sector: u64,
    /// How many.
    pub(super) count: u64,
    /// What the first one holds.
    pub(super) seen: Seen,
    /// What it may hold, oldest first.
    pub(super) allowed: Vec<Seq>,
    /// What it might hold if unflushed writes could be lost.
    pub(super) lossy: Vec<Seq>,
    /// Who wrote what no loss may take away.
    pub(super) writer: Writer,
}

/// A change that was sent while they were recorded.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) range: Range<u64>,
    pub(super) seq: Seq,
    /// A tick before it was sent, and one after its answer: those of all disks are in order.
    pub(super) sent: u64,
    pub(super) answered: Option<u64>,
}

/// What a disk may hold.
#[derive(Clone, Debug)]
pub(super) struct Model {
    disk: u64,
    sectors: Vec<Sector>,
    /// Sectors that were written since their base.
    dirty: Vec<u32>,
    /// Acknowledgements so far.
    acks: u64,
    /// What is sent, while that is recorded.
    recorded: Option<Vec<Sent>>,
}

impl Model {
    /// A disk of zeros of `sectors` sectors.
    pub(super) fn new(disk: u64, sectors: u64) -> Self {
        let (sectors_of, dirty) = (Vec::new(), Vec::new());
        let mut model = Self { disk, sectors: sectors_of, dirty, acks: 0, recorded: None };
        model.resize(sectors);
        model
    }

    /// Sectors of the disk.
    pub(super) fn len(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The disk gets another length; what is new is zeros.
    pub(super) fn resize(&mut self, sectors: u64) {
        let len = index(sectors);
        self.sectors.resize_with(len, Sector::default);
        self.dirty.retain(|sector| (*sector as usize) < len);
    }

    fn range(&mut self, range: &Range<u64>) -> &mut [Sector] {
        &mut self.sectors[index(range.start)..index(range.end)]
    }

    /// Records what is sent from now on; what was known before that.
    pub(super) fn record(&mut self) -> Self {
        let before = self.clone();
        self.recorded = Some(Vec::new());
        before
    }

    /// What was recorded; no more is.
    pub(super) fn recorded(&mut self) -> Vec<Sent> {
        self.recorded.take().unwrap_or_default()
    }

    fn push(&mut self, range: &Range<u64>, version: Version) {
        if let Some(recorded) = &mut self.recorded {
            let (range, seq) = (range.clone(), version.seq);
            recorded.push(Sent { range, seq, sent: tick(), answered: None });
        }
        for sector in range.clone() {
            let one = &mut self.sectors[index(sector)];
            if one.later.is_empty() {
                self.dirty.push(u32::try_from(sector).expect("disks are small"));
            }
            one.later.push(version);
        }
    }

    /// A write is sent.
    pub(super) fn send(&mut self, range: &Range<u64>, seq: Seq) {
        self.push(range, Version { seq, acked: 0, is_trim: false, is_durable: false });
    }

    /// A trim is sent, by whomever: there may be zeros now.
    pub(super) fn trim(&mut self, range: &Range<u64>) {
        self.push(range, Version { seq: 0, acked: 0, is_trim: true, is_durable: false });
    }

    /// The write that was sent to `range` last is acknowledged; `durable` if that says so.
    pub(super) fn acknowledge(&mut self, range: &Range<u64>, seq: Seq, durable: bool) {
        self.acks += 1;
        let acks = self.acks;
        let mut recorded = self.recorded.iter_mut().flatten().rev();
        if let Some(sent) = recorded.find(|sent| sent.seq == seq && sent.range == *range) {
            sent.answered = Some(tick());
        }
        for sector in self.range(range) {
            let Some(at) = sector.later.iter().rposition(|version| version.seq == seq) else {
                continue;
            };
            sector.later[at].acked = acks;
            if durable {
                sector.make_base(at);
            }
        }
    }

    /// The trim that was sent to `range` last is answered, and durable (R6).
    pub(super) fn trimmed_durably(&mut self, range: &Range<u64>) {
        for sector in self.range(range) {
            if let Some((last, before)) = sector.later.split_last_mut()
                && last.is_trim
            {
                last.is_durable = before.iter().all(|version| version.seq != 0);
            }
        }
    }

    /// What a sector may hold, oldest first.
    pub(super) fn allowed(&self, sector: u64, view: View) -> Vec<Seq> {
        self.sectors[index(sector)].allowed(view).collect()
    }

    /// What a flush that is sent now promises.
    pub(super) fn mark(&self) -> u64 {
        self.acks
    }

    /// A flush that was sent at `mark` is acknowledged (R3).
    pub(super) fn flushed(&mut self, mark: u64) {
        let sectors = &mut self.sectors;
        self.dirty.retain(|sector| {
            let sector = &mut sectors[*sector as usize];
            let is_flushed = |version: &Version| (1..=mark).contains(&version.acked);
            if let Some(at) = sector.later.iter().rposition(is_flushed) {
                sector.make_base(at);
            }
            !sector.later.is_empty()
        });
    }

    /// A server has closed the image well: all that was acknowledged is durable.
    pub(super) fn closed(&mut self) {
        self.flushed(self.acks);
    }

    /// Another program wrote this, and it is durable (R4).
    pub(super) fn foreign(&mut self, range: &Range<u64>, seq: Seq) {
        for sector in self.range(range) {
            *sector = Sector { base: seq, is_foreign: true, later: Vec::new() };
        }
    }

    /// Since a server was killed, other programs committed what this has and the model `before` has
    /// not into a file that read as `content` (R4).
    pub(super) fn zeros_left_no_trace(&mut self, before: &Self, content: &[Seq]) {
        let sectors = self.sectors.iter_mut().zip(&before.sectors).zip(content);
        for ((sector, before), there) in sectors {
            let may_be_zeros = match sector.later.last() {
                Some(last) => last.is_trim,
                None => sector.base == 0,
            };
            if sector.is_foreign && may_be_zeros && *there == 0 {
                // They may be seen, and are not lost if they are not.
                let possible = before.later.iter().map(|version| Version { acked: 0, ..*version });
                sector.later.splice(..0, possible);
            }
        }
    }

    /// The disk is what `content` says.
    pub(super) fn set_content(&mut self, content: &[Seq]) {
        self.resize(content.len() as u64);
        self.dirty.clear();
        for (sector, seq) in self.sectors.iter_mut().zip(content) {
            let is_foreign = stamp::writer(*seq) == Writer::Foreign;
            *sector = Sector { base: *seq, is_foreign, later: Vec::new() };
        }
    }

    /// Holds `bytes`, which were read from sector `first` on, against what may be there. What is
    /// there, for each sector.
    pub(super) fn judge(&self, first: u64, bytes: &[u8], view: View) -> Result<Vec<Seq>, Vec<Bad>> {
        let mut content = Vec::with_capacity(bytes.len() / SECTOR);
        let mut bad: Vec<Bad> = Vec::new();
        for (number, bytes) in (first..).zip(bytes.chunks(SECTOR)) {
            let sector = &self.sectors[index(number)];
            let seen = stamp::read(self.disk, number, bytes);
            if let Seen::Write(seq) = seen
                && (seq == sector.base && sector.later.is_empty()
                    || sector.allowed(view).any(|allowed| allowed == seq))
            {
                content.push(seq);
                continue;
            }
            let allowed: Vec<_> = sector.allowed(view).collect();
            match bad.last_mut() {
                Some(last)
                    if last.sector + last.count == number
                        && last.allowed == allowed
                        && is_alike(last.seen, seen) =>
                {
                    last.count += 1;
                }
                _ => {
                    let lossy = sector.allowed(View::Lossy).collect();
                    let writer = if sector.is_foreign { Writer::Foreign } else { Writer::Guest };
                    bad.push(Bad { sector: number, count: 1, seen, allowed, lossy, writer });
                }
            }
        }
        if bad.is_empty() { Ok(content) } else { Err(bad) }
    }

    /// A client that reads saw this: trims are decided (R6).
    pub(super) fn read(&mut self, first: u64, content: &[Seq]) {
        let acks = self.acks + 1;
        let mut is_decided = false;
        let sectors = self.sectors[index(first)..].iter_mut();
        for (sector, seq) in sectors.zip(content) {
            if let Some(last) = sector.later.last_mut()
                && last.is_trim
                && last.acked == 0
                && *seq == 0
            {
                last.acked = acks;
                is_decided = true;
                if last.is_durable {
                    sector.make_base(sector.later.len() - 1);
                }
            }
        }
        self.acks += u64::from(is_decided);
    }

    /// A server that just started shows this: it is decided (R5). Whether anything acknowledged is
    /// lost.
    pub(super) fn settle(&mut self, content: &[Seq]) -> bool {
        self.acks += 1;
        let acks = self.acks;
        let mut is_lost = false;
        for (sector, seq) in self.sectors.iter_mut().zip(content) {
            let at = sector.later.iter().rposition(|version| version.seq == *seq);
            let gone = at.map_or(0, |at| at + 1);
            is_lost |= sector.later[gone..].iter().any(|version| version.acked > 0);
            sector.later.truncate(gone);
            if let Some(last) = sector.later.last_mut() {
                last.acked = acks;
            }
        }
        is_lost
    }
}

/// A number that is greater than those that were given out before.
fn tick() -> u64 {
    static TICKS: AtomicU64 = AtomicU64::new(1);
    TICKS.fetch_add(1, Ordering::SeqCst)
}

fn index(sector: u64) -> usize {
    usize::try_from(sector).expect("disks are small")
}

/// Whether two sectors that follow each other are wrong in the same way.
fn is_alike(one: Seen, other: Seen) -> bool {
    match (one, other) {
        (Seen::Misplaced { seq: one, .. }, Seen::Misplaced { seq: other, .. }) => one == other,
        _ => one == other,
    }
}

#[cfg(test)]
mod tests;
