//! What the storm knows of a volume: what its sectors and those of its snapshots may hold.
//!
//! Rules, beside those of [`Model`](crate::storm::model)
//! - V1 What a flush with durability=store promised, a clean close, and what a verb did is the base
//!   of a sector: nothing takes it away, not even another host by force.
//! - V2 What was acknowledged is there as long as the log of its server is, or its process.
//! - V3 A volume holds a prefix of what was done: if a write is there, so is each that was answered
//!   before it was sent.
//! - V4 A snapshot has what was acknowledged before it was asked for, and nothing that was sent
//!   after it was answered. What it once showed, it always shows.

use crate::storm::model::{Model, View};
use crate::storm::stamp::{self, SECTOR, Seen, Seq};
use crate::storm::story::{Fault, Outcome, Wrong};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::ops::Range;

/// A write, from its client's point of view: two ticks of the disk's clock.
#[derive(Clone, Debug)]
struct Write {
    range: Range<u64>,
    seq: Seq,
    sent: u64,
    /// 0 if it has no answer.
    acked: u64,
}

/// What each sector of a snapshot, or of something that was read meanwhile, may hold.
#[derive(Clone, Debug)]
pub(super) struct Allowed(Vec<Vec<Seq>>);

/// A snapshot.
#[derive(Clone, Debug)]
pub(super) struct Snapshot {
    pub(super) label: String,
    /// Whether it has to be there; and whether it has to be in the store.
    pub(super) is_certain: bool,
    is_stored: bool,
    /// Whether it has to be gone; and whether it has to be gone in the store, too.
    is_dropped: bool,
    is_dropped_in_store: bool,
    pub(super) content: Content,
}

/// What is known of a snapshot's sectors.
#[derive(Clone, Debug)]
pub(super) enum Content {
    /// It was not looked at yet.
    Open(Allowed),
    /// It was (V4).
    Seen(Vec<Seq>),
}

/// See the module.
#[derive(Clone, Debug)]
pub(super) struct Known {
    pub(super) model: Model,
    writes: Vec<Write>,
    clock: u64,
    /// Where a verb was killed: what the volume may hold instead, as a whole.
    pub(super) or_else: Vec<Vec<Seq>>,
    pub(super) snapshots: Vec<Snapshot>,
    /// Whether flushes promise the store.
    pub(super) flushes_to_store: bool,
    /// What it has to hold if whoever opened it last did nothing before it was killed; `None` if
    /// that is known.
    pub(super) uncertain: Option<View>,
    /// The disk's name in stamps.
    stamp: u64,
}

impl Known {
    pub(super) fn new(stamp: u64, sectors: u64) -> Self {
        Self {
            model: Model::new(stamp, sectors),
            writes: Vec::new(),
            clock: 0,
            or_else: Vec::new(),
            snapshots: Vec::new(),
            flushes_to_store: true,
            uncertain: None,
            stamp,
        }
    }

    /// That of a volume that begins with this content.
    pub(super) fn with_content(stamp: u64, content: &[Seq]) -> Self {
        let mut known = Self::new(stamp, content.len() as u64);
        known.model.set_content(content);
        known
    }

    /// That of a clone of the volume itself.
    pub(super) fn without_snapshots(&self) -> Self {
        Self { snapshots: Vec::new(), ..self.clone() }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A write, or zeros (0), are sent.
    pub(super) fn send(&mut self, range: &Range<u64>, seq: Seq) {
        let sent = self.tick();
        self.model.send(range, seq);
        self.writes.push(Write { range: range.clone(), seq, sent, acked: 0 });
    }

    /// The last of that client's there was acknowledged.
    pub(super) fn acknowledge(&mut self, range: &Range<u64>, seq: Seq, is_durable: bool) {
        let acked = self.tick();
        self.model.acknowledge(range, seq, is_durable && self.flushes_to_store);
        let is_it = |write: &&mut Write| write.seq == seq && write.range == *range;
        if let Some(write) = self.writes.iter_mut().rev().find(is_it) {
            write.acked = acked;
        }
    }

    /// A flush that was sent at `mark` is acknowledged.
    pub(super) fn flushed(&mut self, mark: u64) {
        if self.flushes_to_store {
            self.model.flushed(mark);
        }
    }

    /// It was closed well, or a verb that nobody stopped changed it.
    pub(super) fn closed(&mut self) {
        self.model.closed();
        for snapshot in &mut self.snapshots {
            snapshot.is_stored |= snapshot.is_certain;
            snapshot.is_dropped_in_store |= snapshot.is_dropped;
        }
    }

    /// Whether there is nothing to find out about its content.
    pub(super) fn is_known(&self) -> bool {
        self.or_else.is_empty() && self.uncertain.is_none()
    }

    /// A moment, for [`Self::allowed_since`].
    pub(super) fn moment(&self) -> (Model, usize) {
        (self.model.clone(), self.writes.len())
    }

    /// What something may hold that was made of the volume between that moment and now.
    pub(super) fn allowed_since(&self, (model, writes): &(Model, usize), view: View) -> Allowed {
        let mut allowed: Vec<_> = (0..model.len()).map(|at| model.allowed(at, view)).collect();
        for write in self.writes.iter().skip(*writes) {
            for sector in write.range.clone() {
                if let Some(seqs) = allowed.get_mut(index(sector)) {
                    seqs.push(write.seq);
                }
            }
        }
        Allowed(allowed)
    }

    /// A snapshot was asked for at that moment, and answered now.
    pub(super) fn took(&mut self, label: &str, since: &(Model, usize), is_certain: bool) {
        let content = Content::Open(self.allowed_since(since, View::Kept));
        self.add_snapshot(label, is_certain, content);
    }

    pub(super) fn add_snapshot(&mut self, label: &str, is_certain: bool, content: Content) {
        self.snapshots.push(Snapshot {
            label: label.to_owned(),
            is_certain,
            is_stored: is_certain && self.flushes_to_store,
            is_dropped: false,
            is_dropped_in_store: false,
            content,
        });
    }

    /// A snapshot is dropped; `false` if whoever did that was killed.
    pub(super) fn dropped(&mut self, label: &str, is_certain: bool) {
        let to_store = self.flushes_to_store;
        if let Some(snapshot) = self.snapshot(label) {
            (snapshot.is_certain, snapshot.is_stored) = (false, false);
            snapshot.is_dropped = is_certain;
            snapshot.is_dropped_in_store = is_certain && to_store;
        }
    }

    pub(super) fn snapshot(&mut self, label: &str) -> Option<&mut Snapshot> {
        self.snapshots.iter_mut().find(|snapshot| snapshot.label == label)
    }

    /// The process is gone, and its log with it: what only they had need not be there.
    pub(super) fn lost(&mut self) {
        for snapshot in &mut self.snapshots {
            snapshot.is_certain = snapshot.is_stored;
            snapshot.is_dropped = snapshot.is_dropped_in_store;
        }
    }

    /// Holds `bytes`, all of the disk, against what may be there after it was opened, and goes on
    /// from what is.
    pub(super) fn settle(&mut self, bytes: &[u8], view: View, what: &str) -> Outcome {
        let content = match self.judge(bytes, view, what) {
            Ok(content) => content,
            Err(fault) => {
                let seen = self.seen(bytes, what)?;
                if !self.or_else.contains(&seen) {
                    return Err(fault);
                }
                self.model.set_content(&seen);
                seen
            }
        };
        self.model.settle(&content);
        self.or_else.clear();
        self.writes.clear();
        self.uncertain = None;
        Ok(())
    }

    /// Holds `bytes`, all of the disk, against what may be there.
    fn judge(&self, bytes: &[u8], view: View, what: &str) -> Outcome<Vec<Seq>> {
        if bytes.len() as u64 != self.model.len() * SECTOR as u64 {
            let what = format!("{what}: {} bytes, not {} sectors", bytes.len(), self.model.len());
            return Err(Fault::new(Wrong::Length, what));
        }
        let content = self.model.judge(0, bytes, view).map_err(|bad| {
            let first = &bad[0];
            let is_old = matches!(first.seen, Seen::Write(_));
            let wrong = match (is_old, view) {
                (false, _) => Wrong::Foreign,
                (true, View::Kept) => Wrong::LostAcknowledged,
                (true, View::Lossy) => Wrong::LostFlushed,
            };
            let total: u64 = bad.iter().map(|bad| bad.count).sum();
            Fault::new(wrong, format!("{what}: {view:?}: {total} sectors, first {first:?}"))
        })?;
        self.check_order(&content, what)?;
        Ok(content)
    }

    /// That `content` is a prefix (V3).
    fn check_order(&self, content: &[Seq], what: &str) -> Outcome {
        let shows = |write: &Write| {
            write.seq != 0 && write.range.clone().any(|at| content[index(at)] == write.seq)
        };
        let Some(last) = self.writes.iter().filter(|write| shows(write)).max_by_key(|w| w.sent)
        else {
            return Ok(());
        };
        // What each sector may hold at the latest, if it is as new as it can be.
        let mut newest: Vec<Option<u64>> = vec![None; content.len()];
        for write in &self.writes {
            for sector in write.range.clone() {
                if content[index(sector)] == write.seq {
                    newest[index(sector)] = Some(write.sent);
                }
            }
        }
        let before = self.writes.iter().filter(|write| write.acked != 0 && write.acked < last.sent);
        for write in before {
            for sector in write.range.clone() {
                if newest[index(sector)].is_none_or(|sent| sent < write.sent) {
                    let shown = content[index(sector)];
                    let what = format!(
                        "{what}: sector {sector} shows {shown}, and not {write:?}, which was \
                         answered before {last:?} was sent, which is there"
                    );
                    return Err(Fault::new(Wrong::Mixed, what));
                }
            }
        }
        Ok(())
    }

    /// What is in the sectors of something, as far as anybody wrote it.
    pub(super) fn seen(&self, bytes: &[u8], what: &str) -> Outcome<Vec<Seq>> {
        let sectors = (0..).zip(bytes.chunks(SECTOR));
        let seqs = sectors.map(|(at, bytes)| match stamp::read(self.stamp, at, bytes) {
            Seen::Write(seq) => Ok(seq),
            seen => Err(Fault::new(Wrong::Foreign, format!("{what}: sector {at} holds {seen:?}"))),
        });
        seqs.collect()
    }

    /// Holds `bytes`, all of what was read of the volume while it was written, against that.
    pub(super) fn judge_reading(&self, bytes: &[u8], allowed: &Allowed, what: &str) -> Outcome {
        let seen = self.seen(bytes, what)?;
        allowed.check(&seen, what)?;
        self.check_order(&seen, what)
    }

    /// Holds `bytes`, all of a snapshot, against what it may have, and remembers what it has.
    pub(super) fn settle_snapshot(&mut self, label: &str, bytes: &[u8], what: &str) -> Outcome {
        let seen = self.seen(bytes, what)?;
        let Some(snapshot) = self.snapshot(label) else { return Ok(()) };
        match &snapshot.content {
            Content::Seen(content) if *content == seen => return Ok(()),
            Content::Seen(content) => {
                let at = content.iter().zip(&seen).position(|(one, other)| one != other);
                let what = format!("{what} has changed, first in sector {at:?}");
                return Err(Fault::new(Wrong::Snapshot, what));
            }
            Content::Open(allowed) => allowed.check(&seen, what)?,
        }
        snapshot.content = Content::Seen(seen);
        Ok(())
    }

    /// Holds the labels that there are against those that must be, and may be.
    pub(super) fn settle_labels(&mut self, labels: &[String], what: &str) -> Outcome {
        let there: BTreeSet<_> = labels.iter().filter(|label| !label.is_empty()).collect();
        for snapshot in &self.snapshots {
            let is_there = there.contains(&snapshot.label);
            if is_there && snapshot.is_dropped || !is_there && snapshot.is_certain {
                let state = if is_there { "there" } else { "gone" };
                let what = format!("{what}: {} is {state}, of {there:?}", snapshot.label);
                return Err(Fault::new(Wrong::Snapshot, what));
            }
        }
        let is_known = |label: &&String| self.snapshots.iter().any(|known| known.label == **label);
        if let Some(unknown) = there.iter().find(|label| !is_known(label)) {
            let what = format!("{what}: nobody took snapshot {unknown}");
            return Err(Fault::new(Wrong::Snapshot, what));
        }
        self.snapshots.retain(|snapshot| there.contains(&snapshot.label));
        self.snapshots.iter_mut().for_each(|snapshot| snapshot.is_certain = true);
        Ok(())
    }
}

impl Allowed {
    fn check(&self, seen: &[Seq], what: &str) -> Outcome {
        if seen.len() != self.0.len() {
            let what = format!("{what}: {} sectors, not {}", seen.len(), self.0.len());
            return Err(Fault::new(Wrong::Length, what));
        }
        match seen.iter().zip(&self.0).position(|(seq, allowed)| !allowed.contains(seq)) {
            None => Ok(()),
            Some(at) => {
                let (seq, allowed) = (seen[at], &self.0[at]);
                let what = format!("{what}: sector {at} holds {seq}, not one of {allowed:?}");
                Err(Fault::new(Wrong::Snapshot, what))
            }
        }
    }
}

/// A volume.
#[derive(Debug)]
pub(super) struct Disk {
    pub(super) name: String,
    known: Mutex<Known>,
}

impl Disk {
    pub(super) fn new(name: String, known: Known) -> Self {
        Self { name, known: Mutex::new(known) }
    }

    pub(super) fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }
}

fn index(sector: u64) -> usize {
    usize::try_from(sector).expect("disks are small")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: u64 = 9;

    fn bytes(seqs: &[Seq]) -> Vec<u8> {
        let sector = |(at, seq): (u64, &Seq)| match seq {
            0 => vec![0; SECTOR],
            seq => stamp::bytes(STAMP, at, 1, *seq),
        };
        (0..).zip(seqs).flat_map(sector).collect()
    }

    fn with_three_writes() -> Known {
        let mut known = Known::new(STAMP, 3);
        known.flushes_to_store = false;
        for (sector, seq) in [(0, 1), (1, 2), (2, 3)] {
            known.send(&(sector..sector + 1), seq);
            known.acknowledge(&(sector..sector + 1), seq, false);
        }
        known
    }

    #[test]
    fn later_write_without_an_earlier_one_is_no_prefix() {
        let mut known = with_three_writes();
        let settled = known.clone().settle(&bytes(&[1, 2, 0]), View::Lossy, "");
        assert!(settled.is_ok(), "{settled:?}");
        let mixed = known.clone().settle(&bytes(&[0, 2, 3]), View::Lossy, "").unwrap_err();
        assert_eq!(mixed.wrong, Wrong::Mixed);
        let lost = known.clone().settle(&bytes(&[1, 2, 0]), View::Kept, "").unwrap_err();
        assert_eq!(lost.wrong, Wrong::LostAcknowledged);
        known.flushes_to_store = true;
        known.flushed(known.model.mark());
        let lost = known.settle(&bytes(&[1, 2, 0]), View::Lossy, "").unwrap_err();
        assert_eq!(lost.wrong, Wrong::LostFlushed);
    }

    #[test]
    fn killed_rollback_is_done_or_not_as_a_whole() {
        let mut known = with_three_writes();
        known.flushes_to_store = true;
        known.closed();
        known.or_else.push(vec![1, 0, 0]);
        for (content, is_right) in [([1, 2, 3], true), ([1, 0, 0], true), ([1, 2, 0], false)] {
            let mut known = known.clone();
            let settled = known.settle(&bytes(&content), View::Kept, "");
            assert_eq!(settled.is_ok(), is_right, "{content:?}");
            assert_eq!(known.is_known(), is_right, "{content:?}");
        }
        known.settle(&bytes(&[1, 0, 0]), View::Kept, "").expect("it was rolled back");
        known.settle(&bytes(&[1, 2, 3]), View::Lossy, "").expect_err("that is decided");
    }

    #[test]
    fn snapshot_has_what_was_answered_before_it_and_nothing_later() {
        let mut known = with_three_writes();
        let since = known.moment();
        known.send(&(0..1), 4);
        known.took("a", &since, true);
        known.acknowledge(&(0..1), 4, false);
        known.send(&(1..2), 5);
        for (content, is_right) in
            [([1, 2, 3], true), ([4, 2, 3], true), ([1, 2, 0], false), ([4, 5, 3], false)]
        {
            let settled = known.clone().settle_snapshot("a", &bytes(&content), "");
            assert_eq!(settled.is_ok(), is_right, "{content:?}");
        }
        known.settle_snapshot("a", &bytes(&[4, 2, 3]), "").expect("right");
        known.settle_snapshot("a", &bytes(&[1, 2, 3]), "").expect_err("it has changed");
        known.settle_labels(&[], "").expect_err("it is gone");
    }
}
