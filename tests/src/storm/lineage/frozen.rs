//! What a file that nobody writes any more holds.
//!
//! A layer is frozen at some instant while a command is carried out, and clients write meanwhile.
//! So at first it is known only between what: each sector has what had to be there when the command
//! was given, or anything that was sent to it since. Who reads it first decides, and checks that
//! there was such an instant: it is after every write that shows was sent, and before any that does
//! not show was answered. The instants of a group have to be one.

use crate::storm::judge;
use crate::storm::model::{Model, Sent, View};
use crate::storm::stamp::{self, SECTOR, Seq};
use crate::storm::story::{Fault, Outcome, Wrong};

/// What a file holds, as far as is known.
#[derive(Clone, Debug)]
pub(super) struct Frozen {
    possible: Model,
    /// How many sectors there are; what is beyond the end of `possible` is not known.
    len: u64,
    /// What was sent while it was frozen; of no interest once that is decided.
    sent: Vec<Sent>,
    is_decided: bool,
    /// Between which ticks it was frozen, once that is decided.
    span: Span,
}

/// The earliest and the latest tick of an instant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    from: u64,
    to: u64,
}

impl Span {
    const ANY: Self = Self { from: 0, to: u64::MAX };

    /// What both allow.
    pub(super) fn and(self, other: Self) -> Self {
        Self { from: self.from.max(other.from), to: self.to.min(other.to) }
    }

    /// Whether there is such an instant.
    pub(super) fn is_possible(self) -> bool {
        self.from <= self.to
    }
}

impl Default for Span {
    fn default() -> Self {
        Self::ANY
    }
}

impl Frozen {
    /// What is in `model` now, and nothing else.
    pub(super) fn as_now(model: &Model) -> Self {
        Self::between(model.clone(), Vec::new())
    }

    /// Frozen after it was as in `before`, while this was `sent`.
    pub(super) fn between(mut before: Model, sent: Vec<Sent>) -> Self {
        for sent in &sent {
            before.send(&sent.range, sent.seq);
        }
        let len = before.len();
        Self { possible: before, len, sent, is_decided: false, span: Span::ANY }
    }

    /// It is `sectors` long at least from now on: what was committed into it was.
    pub(super) fn at_least(mut self, sectors: u64) -> Self {
        let sectors = sectors.max(self.len);
        self.possible.resize(sectors);
        self.len = sectors;
        self
    }

    /// It is `sectors` long, and nothing is known of those at its end.
    pub(super) fn in_a_file_of(mut self, sectors: u64) -> Self {
        self.len = sectors.max(self.len);
        self
    }

    /// What a disk on top of it begins with.
    pub(super) fn model(&self) -> Model {
        self.possible.clone()
    }

    /// Its length.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// When it was frozen, as far as is known.
    pub(super) fn span(&self) -> Span {
        self.span
    }

    /// Holds `bytes`, which were read from all of it, against what it may be, and takes that as
    /// decided.
    pub(super) fn decide(&mut self, bytes: &[u8], what: &str) -> Outcome<Vec<Seq>> {
        let (len, wanted) = ((bytes.len() / SECTOR) as u64, self.len);
        if len != wanted {
            let what = format!("{what}: {len} sectors, not {wanted}");
            return Err(Fault::new(Wrong::Length, what));
        }
        let sectors = bytes.chunks(SECTOR).zip(0..self.possible.len());
        let known = sectors.map(|(sector, _)| sector.len()).sum();
        let judged = self.possible.judge(0, &bytes[..known], View::Kept);
        let content = judged.map_err(|bad| judge::fault(&bad, what))?;
        if !self.is_decided {
            self.span = self.find_span(&content);
            if !self.span.is_possible() {
                let what = format!("{what}: it shows a write that is later than one that it lacks");
                return Err(Fault::new(Wrong::Mixed, what));
            }
            self.possible.set_content(&content);
            self.is_decided = true;
            self.sent = Vec::new();
        }
        Ok(content)
    }

    /// Another program wrote to it.
    pub(super) fn write(&mut self, range: &std::ops::Range<u64>, seq: Seq) {
        let known = self.possible.len();
        self.possible.foreign(&(range.start.min(known)..range.end.min(known)), seq);
    }

    fn find_span(&self, content: &[Seq]) -> Span {
        let mut span = Span::ANY;
        for sent in self.sent.iter().filter(|sent| sent.seq != 0) {
            for sector in sent.range.clone() {
                let seen = content[usize::try_from(sector).expect("disks are small")];
                if seen == sent.seq {
                    span.from = span.from.max(sent.sent);
                } else if self.is_before(sector, seen, sent) {
                    span.to = span.to.min(sent.answered.unwrap_or(u64::MAX));
                }
            }
        }
        span
    }

    /// Whether what is `seen` in a `sector` was there before `sent`. Writes to a sector follow each
    /// other: clients wait for an answer before they write there again.
    fn is_before(&self, sector: u64, seen: Seq, sent: &Sent) -> bool {
        match seen {
            // Zeros look all alike.
            0 => !self.sent.iter().any(|sent| sent.seq == 0 && sent.range.contains(&sector)),
            seen => stamp::order(seen) < stamp::order(sent.seq),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: u64 = 5;

    fn sent(range: std::ops::Range<u64>, seq: Seq, sent: u64, answered: u64) -> Sent {
        Sent { range, seq, sent, answered: Some(answered) }
    }

    fn bytes(content: &[Seq]) -> Vec<u8> {
        let sectors = (0..).zip(content).map(|(sector, seq)| match seq {
            0 => vec![0; SECTOR],
            _ => stamp::bytes(DISK, sector, 1, *seq),
        });
        sectors.flatten().collect()
    }

    #[test]
    fn later_write_without_an_earlier_one_is_no_instant() {
        // The second was sent when the first had its answer.
        let all = vec![sent(0..1, 1, 1, 2), sent(1..2, 2, 3, 4)];
        let frozen = Frozen::between(Model::new(DISK, 2), all);
        for (content, is_right) in [([0, 0], true), ([1, 0], true), ([1, 2], true), ([0, 2], false)]
        {
            let decided = frozen.clone().decide(&bytes(&content), "a layer");
            assert_eq!(decided.is_ok(), is_right, "{content:?}");
        }
    }

    #[test]
    fn writes_under_way_at_once_may_show_in_any_part() {
        let all = vec![sent(0..1, 1, 1, 4), sent(1..2, 2, 2, 3)];
        let frozen = Frozen::between(Model::new(DISK, 2), all);
        for content in [[0, 0], [1, 0], [0, 2], [1, 2]] {
            let mut frozen = frozen.clone();
            frozen.decide(&bytes(&content), "a layer").expect("it may be");
            // It does not change any more.
            let other = bytes(&[1 - content[0], content[1]]);
            frozen.decide(&other, "a layer").expect_err("it was something else");
        }
    }

    #[test]
    fn what_is_known_of_a_longer_file_is_judged_and_nothing_else() {
        let all = vec![sent(0..1, 1, 1, 2)];
        let mut frozen = Frozen::between(Model::new(DISK, 2), all).in_a_file_of(3);
        assert_eq!(frozen.len(), 3);
        frozen.decide(&bytes(&[1, 0, 7]), "a layer").expect("it may be");
        frozen.decide(&bytes(&[1, 0, 0]), "a layer").expect("it may be, too");
        frozen.decide(&bytes(&[0, 0, 7]), "a layer").expect_err("it was something else");
        frozen.decide(&bytes(&[1, 0]), "a layer").expect_err("it is shorter");
    }

    #[test]
    fn instants_of_a_group_are_one() {
        let of = |sent_at, answered, content: Seq| {
            let all = vec![sent(0..1, 1, sent_at, answered)];
            let mut frozen = Frozen::between(Model::new(DISK, 1), all);
            frozen.decide(&bytes(&[content]), "a layer").expect("it may be");
            frozen.span()
        };
        // One disk lacks what was answered before the other one's write was sent, which shows.
        assert!(!of(1, 2, 0).and(of(3, 4, 1)).is_possible());
        assert!(of(1, 2, 1).and(of(3, 4, 1)).is_possible());
        assert!(of(1, 4, 0).and(of(3, 5, 1)).is_possible());
    }
}
