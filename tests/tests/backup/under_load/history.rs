//! What each sector of a disk has been, and at which instants a state that shows certain bytes can
//! have been taken.
//!
//! A tick is counted whenever a request is sent and whenever one is answered; a moment is what
//! follows a tick. A state shows a write only if it was taken after the write was sent, and lacks
//! one only if it was taken before that was answered. A state that shows a write of one sector, and
//! lacks an older one of another, is of no instant, and wrong.
//!
//! - I1 Requests for a sector follow each other: one is sent when the one before has its answer, or
//!   when its server is dead.
//! - I2 What a server that was killed had not answered is there from then on, or never: a state
//!   that was begun later decides it.

use mica_tests::power::SECTOR;
use std::ops::Range;

/// How many requests and answers there were before a moment.
pub(super) type Tick = u64;

/// What a request does to its sectors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    /// They get its stamp.
    Stamps,
    /// They are zeros.
    Zeros,
    /// They stay as they are, or are zeros.
    MayZero,
}

/// A request that was sent.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) sectors: Range<u64>,
    pub(super) number: u64,
}

/// One request, as a sector saw it.
#[derive(Clone, Copy, Debug)]
struct Version {
    number: u64,
    effect: Effect,
    sent: Tick,
    end: End,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum End {
    UnderWay,
    Answered(Tick),
    /// The server was gone before the answer came.
    Abandoned(Tick),
}

/// All sectors of a disk, each with its versions from old to new.
#[derive(Debug)]
pub(super) struct History {
    sectors: Vec<Vec<Version>>,
    now: Tick,
    requests: u64,
}

/// When a state can have been taken, and which sectors say so.
#[derive(Clone, Copy, Debug)]
struct Span {
    after: (Tick, u64),
    before: (Tick, u64),
}

impl History {
    /// A disk of `count` sectors, where those of `stamped` have the stamp of write 1.
    pub(super) fn new(count: u64, is_stamped: impl Fn(u64) -> bool) -> Self {
        let first = |sector| {
            let effect = if is_stamped(sector) { Effect::Stamps } else { Effect::Zeros };
            vec![Version { number: 1, effect, sent: 0, end: End::Answered(0) }]
        };
        Self { sectors: (0..count).map(first).collect(), now: 0, requests: 1 }
    }

    /// The present moment.
    pub(super) fn now(&self) -> Tick {
        self.now
    }

    /// Requests so far.
    pub(super) fn requests(&self) -> u64 {
        self.requests
    }

    /// A request is about to be sent.
    pub(super) fn send(&mut self, sectors: Range<u64>, effect: Effect) -> Sent {
        self.now += 1;
        self.requests += 1;
        let number = self.requests;
        let version = Version { number, effect, sent: self.now, end: End::UnderWay };
        self.of(&sectors).for_each(|versions| versions.push(version));
        Sent { sectors, number }
    }

    /// It was answered.
    pub(super) fn answered(&mut self, sent: &Sent) {
        self.now += 1;
        self.end(sent, End::Answered(self.now));
    }

    /// Its server is gone, and with it the answer.
    pub(super) fn abandoned(&mut self, sent: &Sent) {
        self.now += 1;
        self.end(sent, End::Abandoned(self.now));
    }

    fn end(&mut self, sent: &Sent, end: End) {
        for versions in self.of(&sent.sectors) {
            let mut newest_first = versions.iter_mut().rev();
            if let Some(version) = newest_first.find(|version| version.number == sent.number) {
                version.end = end;
            }
        }
    }

    fn of(&mut self, sectors: &Range<u64>) -> impl Iterator<Item = &mut Vec<Version>> {
        let [start, end] =
            [sectors.start, sectors.end].map(|at| usize::try_from(at).expect("small"));
        self.sectors[start..end].iter_mut()
    }

    /// Judges `disk`, a state that was taken between the two ticks, and forgets what no later state
    /// can show.
    ///
    /// # Errors
    /// If it shows what the disk did at no instant.
    pub(super) fn judge(&mut self, disk: &[u8], taken: Range<Tick>) -> Result<(), String> {
        let size = usize::try_from(SECTOR).expect("small");
        if disk.len() != self.sectors.len() * size {
            return Err(format!("it has {} bytes", disk.len()));
        }
        let nowhere = u64::MAX;
        let mut span = Span { after: (taken.start, nowhere), before: (taken.end, nowhere) };
        let mut shown = Vec::with_capacity(self.sectors.len());
        for ((sector, bytes), versions) in (0..).zip(disk.chunks(size)).zip(&self.sectors) {
            let found = find(sector, bytes, versions)
                .map_err(|wrong| format!("sector {sector} {wrong}: {versions:?}, {taken:?}"))?;
            span.after = span.after.max((versions[found.oldest].sent, sector));
            let replaced = replaced(&versions[found.newest + 1..]);
            span.before = span.before.min((replaced - 1, sector));
            shown.push(found);
        }
        if span.after.0 > span.before.0 {
            let of = |sector: u64| usize::try_from(sector).ok().and_then(|at| self.sectors.get(at));
            let (late, early) = (of(span.after.1), of(span.before.1));
            return Err(format!("of no instant of {taken:?}: {span:?}, {late:?}, {early:?}"));
        }
        for (versions, found) in self.sectors.iter_mut().zip(shown) {
            forget(versions, &found, taken.start);
        }
        Ok(())
    }
}

/// Versions of a sector that bytes may be: one, but of zeros several may be meant.
#[derive(Clone, Copy, Debug)]
struct Found {
    oldest: usize,
    newest: usize,
}

fn find(sector: u64, bytes: &[u8], versions: &[Version]) -> Result<Found, String> {
    const STAMP: usize = 16;
    // Compared at once: a disk has many sectors, and is judged often.
    let (stamp, others) = (&bytes[..STAMP], &bytes[STAMP..]);
    let [place, number] =
        [0, 8].map(|at| u64::from_le_bytes(*bytes[at..].first_chunk().expect("a word")));
    let is_even = others == &bytes[..bytes.len() - STAMP];
    let is_zeros = is_even && place == 0 && number == 0;
    let fits = |version: &Version| match version.effect {
        Effect::Stamps => !is_zeros && version.number == number,
        Effect::Zeros | Effect::MayZero => is_zeros,
    };
    let is_stamp = is_even && place == sector;
    if !is_zeros && !is_stamp {
        return Err(format!("has what nobody wrote there, {stamp:02x?}"));
    }
    let (oldest, newest) = (versions.iter().position(fits), versions.iter().rposition(fits));
    match oldest.zip(newest) {
        Some((oldest, newest)) => Ok(Found { oldest, newest }),
        None if is_zeros => Err("is zeros".to_owned()),
        None => Err(format!("has write {number}")),
    }
}

/// The tick before which a state was taken that shows none of the `later` versions.
fn replaced(later: &[Version]) -> Tick {
    let ends = later.iter().filter(|version| version.effect != Effect::MayZero);
    let answered = ends.filter_map(|version| match version.end {
        End::Answered(tick) => Some(tick),
        End::UnderWay | End::Abandoned(_) => None,
    });
    answered.min().unwrap_or(Tick::MAX)
}

/// Removes what was replaced by what was `found`, and what did not happen before `start`, when a
/// state was taken.
fn forget(versions: &mut Vec<Version>, found: &Found, start: Tick) {
    let mut at = 0;
    versions.retain(|version| {
        let is_later = at > found.newest;
        let is_older = at < found.oldest;
        at += 1;
        let may_still = match version.end {
            End::UnderWay => true,
            // A discard that did nothing.
            End::Answered(tick) => version.effect != Effect::MayZero || tick > start,
            End::Abandoned(tick) => tick > start,
        };
        !is_older && (!is_later || may_still)
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_tests::power::stamped;

    fn disk(writes: [u64; 2]) -> Vec<u8> {
        let sector = |(sector, write)| match write {
            0 => vec![0; usize::try_from(SECTOR).expect("small")],
            write => stamped(sector, write),
        };
        (0..).zip(writes).flat_map(sector).collect()
    }

    /// Whether a disk of two sectors that are zeros at first may be such.
    fn is_right(history: impl Fn(&mut History), writes: [u64; 2]) -> bool {
        let mut all = History::new(2, |_| false);
        history(&mut all);
        let now = all.now();
        all.judge(&disk(writes), 0..now).is_ok()
    }

    #[test]
    fn later_write_without_an_earlier_one_is_of_no_instant() {
        let one_after_the_other = |history: &mut History| {
            for sector in 0..2 {
                let sent = history.send(sector..sector + 1, Effect::Stamps);
                history.answered(&sent);
            }
        };
        let at_once = |history: &mut History| {
            let sent = [0, 1].map(|sector| history.send(sector..sector + 1, Effect::Stamps));
            sent.iter().for_each(|sent| history.answered(sent));
        };
        for writes in [[0, 0], [2, 0], [2, 3]] {
            assert!(is_right(one_after_the_other, writes) && is_right(at_once, writes));
        }
        assert!(!is_right(one_after_the_other, [0, 3]));
        assert!(is_right(at_once, [0, 3]));
        assert!(!is_right(at_once, [3, 2]), "they are elsewhere");
    }

    #[test]
    fn what_was_answered_is_not_missing_from_the_next_moment_on() {
        let mut history = History::new(2, |_| false);
        let sent = history.send(0..1, Effect::Stamps);
        history.answered(&sent);
        let now = history.now();
        history.judge(&disk([0, 0]), now..now).expect_err("it was answered");
        history.judge(&disk([2, 0]), now..now).expect("it was answered");
    }

    #[test]
    fn what_a_kill_lost_does_not_come_back() {
        let mut history = History::new(2, |_| false);
        let sent = history.send(0..2, Effect::Stamps);
        history.abandoned(&sent);
        let now = history.now();
        history.judge(&disk([2, 0]), now..now).expect("half of it was done");
        history.judge(&disk([2, 0]), now..now).expect("as before");
        history.judge(&disk([2, 2]), now..now).expect_err("it was lost");
    }

    #[test]
    fn discarded_sectors_are_zeros_or_what_they_were() {
        let discarded = |history: &mut History| {
            let sent = history.send(0..2, Effect::Stamps);
            history.answered(&sent);
            let sent = history.send(0..2, Effect::MayZero);
            history.answered(&sent);
        };
        for writes in [[2, 2], [0, 2], [2, 0], [0, 0]] {
            assert!(is_right(discarded, writes), "{writes:?}");
        }
    }
}
