//! Against a device of headers alone, of which a power cut loses any that are not durable.

use super::*;
use crate::place::Writer;
use mica_units::Rng;

/// What the device has of a segment: durable, and written since.
#[derive(Clone, Default)]
struct OnDisk {
    durable: Option<SegmentHeader>,
    written: Option<Option<SegmentHeader>>,
}

/// A log as its volume knows it.
struct Known {
    key: LogKey,
    /// Its segments that are needed, with their numbers and firsts; the last is the tail.
    segments: Vec<(usize, u64, u64)>,
    has_records: bool,
    /// The number of the newest segment of which the volume knows that it is durable.
    durable: u64,
}

struct Machine {
    rng: Rng,
    slots: Slots,
    disk: Vec<OnDisk>,
    logs: Vec<Known>,
    /// Logs that are over, durably.
    over: Vec<LogKey>,
    /// Counts volumes, and firsts.
    made: u64,
    /// Volumes that have room for a log, and have not begun it; with the one that they have, and
    /// which nobody goes on with.
    promised: Vec<(Id, Option<Known>)>,
}

fn header(number: u64, key: LogKey, kind: Kind, oldest: Option<u64>, first: u64) -> SegmentHeader {
    let [device, session, store] = [[0; 16]; 3];
    let (LogKey { volume, root }, writers) = (key, vec![Writer::FIRST]);
    let oldest = oldest.unwrap_or(number);
    SegmentHeader {
        kind,
        device,
        session,
        store,
        volume,
        number,
        root,
        oldest,
        first,
        freed: first,
        durable: first,
        writers,
    }
}

impl Machine {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let count = usize::try_from(3 + rng.below(8)).unwrap();
        let slots = Slots::new(vec![None; count], Vec::new());
        let disk = vec![OnDisk::default(); count];
        Self { rng, slots, disk, logs: Vec::new(), over: Vec::new(), made: 0, promised: Vec::new() }
    }

    fn count(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    fn write(&mut self, (at, header): (usize, SegmentHeader)) -> (usize, u64, u64) {
        let segment = (at, header.number, header.first);
        self.disk[at].written = Some(Some(header));
        self.slots.wrote(Some(at));
        segment
    }

    fn sync(&mut self) {
        for slot in &mut self.disk {
            if let Some(header) = slot.written.take() {
                slot.durable = header;
            }
        }
        let written = self.slots.written();
        self.slots.synced(written);
        for log in &mut self.logs {
            log.durable = log.segments.last().map_or(log.durable, |(_, number, _)| *number);
        }
    }

    /// Makes a header durable, and nothing else.
    fn sync_header(&mut self, which: usize) {
        let Known { key, ref segments, .. } = self.logs[which];
        let newest = segments.last().map_or(0, |(_, number, _)| *number);
        let Some((at, header)) = self.slots.hold_unsynced(key, newest) else { return };
        // Nobody takes what is held, whatever else becomes durable meanwhile.
        if self.rng.percent(30) {
            self.sync();
            self.free(which);
        }
        assert!(!self.slots.reusable().contains(&at), "it is written once more");
        assert!(self.slots.hold_unsynced(key, newest).is_none(), "one at a time, in order");
        self.disk[at] = OnDisk { durable: Some(header.clone()), written: None };
        self.slots.header_synced(at);
        self.logs[which].durable = self.logs[which].durable.max(header.number);
    }

    /// Takes a segment for a header alone: there always is one (I6).
    fn name(
        &mut self,
        key: LogKey,
        kind: Kind,
        oldest: Option<u64>,
        first: u64,
    ) -> (usize, u64, u64) {
        let make = |number| header(number, key, kind, oldest, first);
        let taken = self.slots.take(Purpose::Name, make).or_else(|| {
            self.sync();
            self.slots.take(Purpose::Name, make)
        });
        let Some(taken) = taken else {
            panic!("no segment is left for {key:?}: {}", self.describe());
        };
        self.write(taken)
    }

    /// For a failure: every segment, and every log.
    fn describe(&self) -> String {
        let clean: Vec<_> = self.slots.clean(None).collect();
        let slot = |(at, slot): (usize, &Slot)| {
            let name = |header: &SegmentHeader| {
                let SegmentHeader { number, root, oldest, first, .. } = *header;
                format!("{number} of {root} oldest {oldest} first {first}")
            };
            let (header, before) = (slot.header.as_ref().map(name), slot.before.as_ref().map(name));
            let (is_live, is_clean) = (slot.is_live, clean.contains(&at));
            let is_durable = self.slots.is_durable(slot);
            format!("{header:?} before {before:?} {is_live} {is_clean} {is_durable}\n")
        };
        let slots: String = self.slots.slots.iter().enumerate().map(slot).collect();
        format!("\n{slots}{:?}", self.slots.logs)
    }

    fn start(&mut self) {
        let first = self.count();
        let volume = u8::try_from(first % 251).unwrap();
        let key = LogKey { volume: [volume; 16], root: self.slots.next_number() };
        if self.slots.log_of(key.volume).is_some() {
            return;
        }
        let make = |number| header(number, key, Kind::Records, None, first);
        let Some(taken) = self.slots.take(Purpose::Start, make) else { return };
        self.begun(key, taken);
    }

    fn begun(&mut self, key: LogKey, taken: (usize, SegmentHeader)) {
        self.slots.set_phase(key, Phase::Open { has_records: false });
        let segments = vec![self.write(taken)];
        self.logs.push(Known { key, segments, has_records: false, durable: 0 });
        self.sync();
    }

    /// Room is kept for a log: of a new volume, or of one whose log is to be set aside.
    fn promise(&mut self, which: usize) {
        let of_log = self.rng.percent(50).then(|| self.logs.get(which)).flatten();
        let Some(key) = of_log.map(|log| log.key) else {
            let volume = [u8::try_from(self.count() % 251).unwrap(); 16];
            let is_known = self.promised.iter().any(|(promised, _)| *promised == volume);
            let is_new = !is_known && self.slots.log_of(volume).is_none();
            if is_new && self.slots.promise_start(volume) {
                self.promised.push((volume, None));
            }
            return;
        };
        self.sync();
        self.slots.abandon(key);
        if self.slots.promise_start(key.volume) {
            self.promised.push((key.volume, Some(self.logs.remove(which))));
        } else {
            self.go_on(which);
        }
    }

    /// What was promised is begun, whatever others have taken meanwhile; or it is given back.
    fn fulfil(&mut self) {
        if self.promised.is_empty() {
            return;
        }
        if self.rng.percent(30) {
            return self.withdraw();
        }
        let (volume, found) = self.promised.swap_remove(0);
        if let Some(found) = found {
            self.logs.push(found);
            self.set_aside(self.logs.len() - 1, Kind::SetAside);
        }
        let key = LogKey { volume, root: self.slots.next_number() };
        let first = self.count();
        let make = |number| header(number, key, Kind::Records, None, first);
        let taken = self.slots.take(Purpose::Promised, make).or_else(|| {
            self.sync();
            self.slots.take(Purpose::Promised, make)
        });
        let Some(taken) = taken else {
            panic!("what was promised {key:?} is not there: {}", self.describe());
        };
        self.begun(key, taken);
    }

    fn withdraw(&mut self) {
        let (_, found) = self.promised.swap_remove(0);
        self.slots.withdraw();
        if let Some(found) = found {
            self.logs.push(found);
            self.go_on(self.logs.len() - 1);
        }
    }

    /// A volume puts records into its tail, or begins another one.
    fn grow(&mut self, which: usize, is_spent: bool) {
        let key = self.logs[which].key;
        if !self.logs[which].has_records {
            let may = self.slots.may_begin(key);
            self.logs[which].has_records = may;
            if may {
                self.slots.begin(key);
            }
            return;
        }
        if is_spent {
            self.free(which);
        }
        let (first, oldest) = (self.count(), self.logs[which].segments[0].1);
        let oldest = (!is_spent).then_some(oldest);
        let make = |number| header(number, key, Kind::Records, oldest, first);
        if let Some(taken) = self.slots.take(Purpose::Records { is_spent }, make) {
            let segment = self.write(taken);
            self.logs[which].segments.push(segment);
            if is_spent {
                self.free(which);
            }
        }
    }

    fn free(&mut self, which: usize) {
        let log = &mut self.logs[which];
        let tail = log.segments.len() - 1;
        for (at, ..) in log.segments.drain(..tail) {
            self.slots.release(at);
        }
    }

    fn end(&mut self, which: usize) {
        let kind = if self.rng.percent(50) { Kind::Ended } else { Kind::SetAside };
        self.set_aside(which, kind);
    }

    fn set_aside(&mut self, which: usize, kind: Kind) {
        let key = self.logs[which].key;
        let first = self.count();
        let (at, ..) = self.name(key, kind, None, first);
        self.logs.remove(which);
        if kind == Kind::Ended {
            // The header alone is made durable, whatever else of the log is not.
            let header = self.disk[at].written.take().expect("it was just written");
            self.disk[at].durable = header;
            self.slots.header_synced(at);
        } else {
            self.sync();
        }
        self.slots.set_phase(key, Phase::Over(kind));
        self.over.push(key);
    }

    /// The power goes; then every log goes on, in any order.
    fn crash(&mut self) {
        for slot in &mut self.disk {
            if let Some(header) = slot.written.take()
                && self.rng.percent(50)
            {
                slot.durable = header;
            }
        }
        self.slots =
            Slots::new(self.disk.iter().map(|slot| slot.durable.clone()).collect(), Vec::new());
        self.logs.extend(self.promised.drain(..).filter_map(|(_, found)| found));
        for key in &self.over {
            let phase = self.slots.logs().find(|(known, _)| known == key).map(|(_, phase)| phase);
            assert!(matches!(phase, None | Some(Phase::Over(_))), "{key:?} came back: {phase:?}");
        }
        for log in &mut self.logs {
            // What was not durable may be lost, and nothing behind it counts.
            let all = log.segments.len();
            log.segments.retain(|(_, number, _)| *number <= log.durable);
            log.has_records |= log.segments.len() < all;
        }
        let mut order: Vec<_> = (0..self.logs.len()).collect();
        self.rng.shuffle(&mut order);
        for which in order {
            self.go_on(which);
        }
    }

    fn go_on(&mut self, which: usize) {
        let Known { key, durable, has_records, ref segments } = self.logs[which];
        assert_eq!(self.slots.log_of(key.volume), Some((key, Phase::Found)));
        let found = self.slots.segments_of(key);
        assert!(found.last().map(|(_, header)| header.number) >= Some(durable), "names are lost");
        let numbers: Vec<_> = found.iter().map(|(_, header)| header.number).collect();
        let mut needed = segments.clone();
        for (at, number, _) in &needed {
            assert!(numbers.contains(number) && self.slots.slots[*at].is_live, "it was needed");
        }
        let empty = if has_records { None } else { needed.pop() };
        // The state may have more of it than the volume knew when it freed.
        let drop = usize::try_from(self.rng.below(needed.len() as u64 + 1)).unwrap();
        needed.drain(..drop * usize::from(self.rng.percent(30)));
        let parts: Vec<_> = needed.iter().map(|segment| part(*segment)).collect();
        self.slots.set_phase(key, Phase::Open { has_records: true });
        self.slots.release_all_but(key, &parts);
        // Where an empty tail began, nothing was found either.
        let first = empty.map_or_else(|| self.count(), |(.., first)| first);
        let oldest = needed.first().map(|(_, number, _)| *number);
        let tail = self.name(key, Kind::Records, oldest, first);
        self.sync();
        self.slots.set_phase(key, Phase::Open { has_records: false });
        needed.push(tail);
        self.logs[which] = Known { key, segments: needed, has_records: false, durable: tail.1 };
    }

    /// If volumes free what they have, each can go on filling.
    fn expect_progress(&mut self) {
        while !self.promised.is_empty() {
            self.withdraw();
        }
        for which in 0..self.logs.len() {
            self.free(which);
        }
        self.sync();
        while let Some(at) = self.slots.take_unclean() {
            self.disk[at].written = Some(None);
            self.slots.wrote(Some(at));
            self.slots.release(at);
        }
        self.sync();
        for Known { key, has_records, .. } in &self.logs {
            let may = match has_records {
                true => self.slots.may_take(Purpose::Records { is_spent: true }, *key),
                false => self.slots.may_begin(*key),
            };
            assert!(may, "one of {} logs is stuck", self.logs.len());
        }
    }

    /// What is counted is what there is.
    fn expect_counts(&self) {
        let live = self.slots.slots.iter().filter(|slot| slot.is_live).count();
        assert_eq!(self.slots.live, live);
        let phases = || self.slots.logs.values();
        let there = phases().filter(|phase| !matches!(phase, Phase::Over(_))).count();
        let is_in_need =
            |phase: &&Phase| matches!(phase, Phase::Found | Phase::Open { has_records: true });
        let in_need = phases().filter(is_in_need).count();
        assert_eq!(self.slots.counts, Counts { there, in_need });
        assert_eq!(self.slots.promised, self.promised.len());
    }

    fn step(&mut self) {
        self.expect_counts();
        let which = usize::try_from(self.rng.below(self.logs.len().max(1) as u64)).unwrap();
        match self.rng.below(16) {
            0 => self.start(),
            14 => self.promise(which),
            15 => self.fulfil(),
            _ if self.logs.is_empty() => {}
            1..=4 => self.grow(which, false),
            5 => self.grow(which, true),
            6..=7 => self.free(which),
            8 => self.sync(),
            9 if self.rng.percent(30) => self.end(which),
            10 => self.crash(),
            11 => self.expect_progress(),
            12..=13 => self.sync_header(which),
            _ => {}
        }
    }
}

fn part((slot, number, first): (usize, u64, u64)) -> Part {
    Part { slot, number, session: [0; 16], first, limit: u64::MAX }
}

/// The story: a header that went before another of its log was durable took its names along; the
/// end of a log that went before the rest of it brought the log back; segments that were free, but
/// did not look so after a power cut, left none to go on with.
#[test]
fn logs_keep_what_they_need_can_go_on_and_do_not_come_back() {
    for seed in 0..600 {
        let mut machine = Machine::new(seed);
        let run = || (0..150).for_each(|_| machine.step());
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        assert!(outcome.is_ok(), "failed from seed {seed}");
    }
}

/// A log that nobody syncs goes round its device without a sync of everything.
#[test]
fn segments_are_used_again_when_the_headers_of_newer_ones_are_durable() {
    let mut slots = Slots::new(vec![None; 5], Vec::new());
    let key = LogKey { volume: [1; 16], root: 1 };
    slots.set_phase(key, Phase::Open { has_records: true });
    let mut last: Option<(usize, u64)> = None;
    let mut used = BTreeSet::new();
    for first in 0..40 {
        let make = |number| header(number, key, Kind::Records, None, first);
        let taken = slots.take(Purpose::Records { is_spent: false }, make);
        let (at, SegmentHeader { number, .. }) = taken.expect("room");
        slots.wrote(Some(at));
        used.insert(at);
        while let Some((held, _)) = slots.hold_unsynced(key, number) {
            slots.header_synced(held);
        }
        if let Some((before, _)) = last.replace((at, number)) {
            slots.release(before);
        }
    }
    assert_eq!((used.len(), slots.durable()), (5, 0));
}

#[test]
fn log_that_was_set_aside_is_overwritten_last() {
    let mut slots = Slots::new(vec![None; 6], Vec::new());
    let take = |slots: &mut Slots, volume: u8, kind, purpose, root: Option<u64>| {
        let root = root.unwrap_or(slots.next_number());
        let key = LogKey { volume: [volume; 16], root };
        let make = |number| header(number, key, kind, Some(root), number);
        let (at, _) = slots.take(purpose, make).expect("room");
        slots.wrote(Some(at));
        slots.synced(slots.written());
        (at, key)
    };
    let (_, aside) = take(&mut slots, 1, Kind::Records, Purpose::Start, None);
    take(&mut slots, 1, Kind::SetAside, Purpose::Name, Some(aside.root));
    slots.set_phase(aside, Phase::Over(Kind::SetAside));
    let (_, ended) = take(&mut slots, 2, Kind::Records, Purpose::Start, None);
    take(&mut slots, 2, Kind::Ended, Purpose::Name, Some(ended.root));
    slots.set_phase(ended, Phase::Over(Kind::Ended));
    let key = LogKey { volume: [3; 16], root: slots.next_number() };
    slots.set_phase(key, Phase::Open { has_records: true });
    let mut taken = |_| take(&mut slots, 3, Kind::Records, Purpose::Name, Some(key.root)).0;
    // What was never used, what was ended, and only then what is kept for people.
    assert_eq!((0..6).map(&mut taken).collect::<Vec<_>>(), [4, 5, 2, 3, 0, 1]);
}

/// What a damaged header had is unknown: its segment may be the one that a log needs.
#[test]
fn segment_with_a_damaged_header_is_given_away_only_when_somebody_says_so() {
    let key = |root| LogKey { volume: [1; 16], root };
    let remains = |volume, number| Remains { volume: [volume; 16], root: 1, number };
    let damaged = vec![(0, remains(1, 4)), (3, remains(2, 5))];
    let mut slots = Slots::new(vec![None; 5], damaged);
    // The second may be of this volume, too: nobody has the one that it names.
    let of = |slots: &Slots, root| slots.damaged_of(key(root));
    assert_eq!([of(&slots, 1), of(&slots, 5), of(&slots, 6)], [Some(0), Some(3), None]);
    let take = |slots: &mut Slots| {
        let make = |number| header(number, key(1), Kind::Records, Some(1), number);
        let taken = slots.take(Purpose::Name, make).map(|(at, _)| at);
        if let Some(at) = taken {
            slots.wrote(Some(at));
            slots.synced(slots.written());
        }
        taken
    };
    assert_eq!(slots.usage().used, 2);
    let taken: Vec<_> = std::iter::from_fn(|| take(&mut slots)).collect();
    assert_eq!(taken, [1, 2, 4]);
    assert_eq!(slots.damaged().collect::<Vec<_>>(), [0, 3]);
    let at = slots.take_damaged().expect("it is known");
    slots.wrote(Some(at));
    slots.synced(slots.written());
    slots.release(at);
    assert_eq!((take(&mut slots), take(&mut slots)), (Some(0), None));
}
