//! The logs of a device: which there are, and how one begins, goes on, and is set aside.

use super::chain::{self, Part};
use super::device::LogDevice;
use super::format::{Kind, NUMBER_MAX, SegmentHeader};
use super::handle::Log;
use super::promised::PromisedStart;
use super::record::Record;
use super::scan::{Behind, scan};
use super::slots::{LogKey, Phase, Purpose, Slots};
use crate::format::Id;
use crate::place::Writer;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::spawn;
use std::ops::Range;
use std::sync::Arc;

/// A log that is on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The store of its volume.
    pub store: Id,
    /// Its volume.
    pub volume: Id,
    /// Under whom it may go on.
    pub writers: Vec<Writer>,
    /// Records below are in the store, as far as the log knows: the volume's state has them.
    pub freed: u64,
    /// Whether nobody may go on with it: it is kept until its space is needed.
    pub is_set_aside: bool,
    pub(super) key: LogKey,
}

/// A log that is to be begun.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewLog {
    /// The store of its volume.
    pub(crate) store: Id,
    /// Its volume.
    pub(crate) volume: Id,
    /// Whom it names.
    pub(crate) writer: Writer,
    /// The number of its first record.
    pub(crate) first: u64,
}

impl LogDevice {
    /// The log of `volume`, unless there is none, or it is over.
    pub fn found(&self, volume: Id) -> Option<Found> {
        let slots = self.slots();
        let (key, phase) = slots.log_of(volume)?;
        (phase == Phase::Found).then(|| found_as(&slots, key, phase)).flatten()
    }

    /// All logs that nobody has open and that were not ended.
    pub fn volumes(&self) -> Vec<Found> {
        let slots = self.slots();
        let is_listed = |phase: &Phase| matches!(phase, Phase::Found | Phase::Over(Kind::SetAside));
        let logs = slots.logs().filter(|(_, phase)| is_listed(phase));
        logs.filter_map(|(key, phase)| found_as(&slots, key, phase)).collect()
    }

    /// Begins a log of `volume`, whose first record has the number `first`. It names `writer`, and
    /// is found after a power cut, when this returns.
    ///
    /// # Errors
    /// `Denied` if there is one that is not over; `NoSpace` if there is no room for another one.
    pub async fn start(
        self: &Arc<Self>,
        store: Id,
        volume: Id,
        writer: Writer,
        first: u64,
    ) -> Result<Log> {
        let (this, new) = (Arc::clone(self), NewLog { store, volume, writer, first });
        spawn(async move {
            let segment = this.take_first(new, Purpose::Start).await?;
            this.begin_first(new, segment).await
        })
        .await
    }

    /// Keeps room for a log of `volume`, once one that was found of it is set aside: asked for
    /// before anything is done that cannot be undone.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub(crate) async fn promise_start(self: &Arc<Self>, volume: Id) -> Result<PromisedStart> {
        let this = Arc::clone(self);
        let promise = async move {
            let promise = |slots: &mut Slots| {
                if let Some((_, Phase::Open { .. })) = slots.log_of(volume) {
                    return Err(this.has_one());
                }
                Ok(slots.promise_start(volume).then(|| PromisedStart::new(&this)))
            };
            this.with_room(promise).await
        };
        spawn(promise).await
    }

    /// Begins a new log in the segment that was taken for it.
    pub(super) async fn begin_first(
        self: &Arc<Self>,
        new: NewLog,
        segment: (usize, SegmentHeader),
    ) -> Result<Log> {
        self.begin_log(segment.1.key(), Vec::new(), segment, new.first..new.first).await
    }

    /// Takes a segment for a new log, whose key is its own from then on.
    pub(super) async fn take_first(
        &self,
        new: NewLog,
        purpose: Purpose,
    ) -> Result<(usize, SegmentHeader)> {
        let NewLog { store, volume, writer, first } = new;
        check_number(first)?;
        let take = |slots: &mut Slots| {
            if slots.log_of(volume).is_some() {
                return Err(self.has_one());
            }
            let key = LogKey { volume, root: slots.next_number() };
            let taken = slots.take(purpose, |number| SegmentHeader {
                number,
                oldest: number,
                ..self.segment(store, key, first, vec![writer])
            });
            if taken.is_some() {
                slots.set_phase(key, Phase::Open { has_records: false });
            }
            Ok(taken)
        };
        self.with_room(take).await
    }

    /// What `find` finds, as soon as there is room for another log.
    async fn with_room<T>(
        &self,
        mut find: impl FnMut(&mut Slots) -> Result<Option<T>>,
    ) -> Result<T> {
        let mut full_at = None;
        loop {
            {
                let mut slots = self.slots();
                slots.check()?;
                if let Some(found) = find(&mut slots)? {
                    return Ok(found);
                }
                // Segments of logs that have ended are of use when their headers are durable. What
                // was written later does not count: neighbours never stop writing.
                let full_at = *full_at.get_or_insert(slots.written());
                if slots.is_synced(full_at) {
                    return Err(self.no_room());
                }
            }
            self.sync_here().await?;
        }
    }

    /// Goes on with the log of `volume` that was found, for the process that claimed `next` after
    /// it had read a head of `last`: the log names it durably when this returns. Records below
    /// `from` are in the state that was found, and are not needed.
    ///
    /// Writers before `last` are forgotten: each of them read a head, and then claimed its number,
    /// before a head of `last` was put, so that no head of theirs can follow that one. Those after
    /// it may have sent one that is still under way.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Denied` if it is open; `Corrupt` if the store had records from
    /// `from` on already, or the log has lost what was durable, or may have; `Limit` if it names
    /// too many writers.
    pub async fn go_on(
        self: &Arc<Self>,
        volume: Id,
        (last, next): (Writer, Writer),
        from: u64,
    ) -> Result<Log> {
        let this = Arc::clone(self);
        spawn(async move { this.go_on_here(volume, (last, next), from).await }).await
    }

    async fn go_on_here(
        self: &Arc<Self>,
        volume: Id,
        (last, next): (Writer, Writer),
        from: u64,
    ) -> Result<Log> {
        check_number(from)?;
        let Found { key, mut writers, store, .. } = self.claim(volume)?;
        let gone_on = async {
            writers.retain(|writer| *writer >= last);
            if !writers.contains(&next) {
                self.check_names(&writers)?;
                writers.push(next);
            }
            let (parts, end) = self.recover(key, from).await?;
            // The new header says that these records are durable. What this process wrote before
            // it gave the log up may not be.
            if self.slots().may_sync() {
                self.sync_here().await?;
            }
            let oldest = parts.first().filter(|_| end > from).map(|part| part.number);
            let segment = self
                .take_name(|number| SegmentHeader {
                    number,
                    oldest: oldest.unwrap_or(number),
                    freed: from,
                    ..self.segment(store, key, end, writers.clone())
                })
                .await?;
            Ok((parts, segment, end))
        };
        match gone_on.await {
            Ok((parts, segment, end)) => self.begin_log(key, parts, segment, from..end).await,
            Err(error) => {
                self.slots().abandon(key);
                Err(error)
            }
        }
    }

    /// Nobody may go on with the log of `volume` any more, durably when this returns. It is kept
    /// for people until its space is needed.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Denied` if it is open.
    pub async fn set_aside(self: &Arc<Self>, volume: Id) -> Result<()> {
        self.set_aside_if(volume, async |_, _| Ok(())).await
    }

    /// Sets the log of `volume` aside if `may_be` says nothing against it.
    pub(super) async fn set_aside_if(
        self: &Arc<Self>,
        volume: Id,
        may_be: impl AsyncFn(&Self, &Found) -> Result<()> + 'static,
    ) -> Result<()> {
        let this = Arc::clone(self);
        spawn(async move {
            let found = this.claim(volume)?;
            let Found { key, store, ref writers, freed, .. } = found;
            let set_aside = async {
                may_be(&this, &found).await?;
                let header = this.segment(store, key, freed, writers.clone());
                this.end_log(Kind::SetAside, header).await
            };
            let set_aside = set_aside.await;
            if set_aside.is_err() {
                this.slots().abandon(key);
            }
            set_aside
        })
        .await
    }

    /// Calls `each` with the records of a log that nobody has open, and their numbers, as far as
    /// they are still there: for people who look for what was lost.
    ///
    /// # Errors
    /// What the file reports, or `each`.
    pub async fn look(
        &self,
        found: &Found,
        mut each: impl FnMut(u64, Record<'_>) -> Result<()>,
    ) -> Result<()> {
        let segments: Vec<_> = {
            let slots = self.slots();
            let segments = slots.segments_of(found.key);
            segments.into_iter().map(|(at, header)| (at, header.clone())).collect()
        };
        let first = segments.iter().filter(|(_, header)| header.kind == Kind::Records);
        let Some(first) = first.map(|(_, header)| header.first).min() else { return Ok(()) };
        for part in chain::parts(segments.iter().map(|(at, header)| (*at, header)), first) {
            scan(&*self.file, &self.header, &part, &mut each).await?;
        }
        Ok(())
    }

    /// The log of `volume`, which is this caller's from now on.
    fn claim(&self, volume: Id) -> Result<Found> {
        let mut slots = self.slots();
        slots.check()?;
        let found = slots.log_of(volume).and_then(|(key, phase)| found_as(&slots, key, phase));
        let found = found.ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("{} has no log of this volume", self.name()))
        })?;
        if slots.log_of(volume).is_some_and(|(_, phase)| phase != Phase::Found) {
            let what = format!("the volume's log in {} is in use", self.name());
            return Err(Error::new(ErrorKind::Denied, what));
        }
        slots.set_phase(found.key, Phase::Open { has_records: true });
        Ok(found)
    }

    /// The parts of the log that have its records from `from` on, and the number after the last.
    async fn recover(&self, key: LogKey, from: u64) -> Result<(Vec<Part>, u64)> {
        let (parts, Promised { freed, durable }) = {
            let slots = self.slots();
            if let Some(at) = slots.damaged_of(key) {
                return Err(self.damaged(at));
            }
            let segments = slots.segments_of(key);
            let newest = segments.last().map(|(_, newest)| *newest);
            let oldest = newest.map_or(0, |newest| newest.oldest);
            let promised = newest.map(Promised::of).unwrap_or_default();
            let needed = segments.into_iter().filter(|(_, header)| header.number >= oldest);
            (chain::parts(needed, from), promised)
        };
        if from < freed {
            let what = format!(
                "the volume has records below {from} only, but its store had those below {freed}, \
                 which left the log {}: set it aside",
                self.name()
            );
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let (mut used, mut end, mut last) = (Vec::new(), from, None);
        let mut parts = parts.into_iter();
        let mut behind = Behind::default();
        while let Some(part) = parts.next() {
            end = scan(&*self.file, &self.header, &part, &mut |_, _| Ok(())).await?;
            last = Some(part.slot);
            // One that has nothing is of a process that died when it had named itself.
            if end > part.first.max(from) {
                used.push(part);
            }
            if end < part.limit {
                for part in std::iter::once(part).chain(parts.by_ref()) {
                    behind.look(&*self.file, &self.header, &part, end).await?;
                }
            }
        }
        let end = end.max(from);
        let durable = durable.max(behind.durable);
        if end < durable {
            return Err(self.lost(last, end..durable));
        }
        if behind.is_silent {
            tracing::warn!(
                log = self.name(),
                record = end,
                "records of the volume are missing before later ones: this is expected after a \
                 power cut; if there was none, the log is damaged"
            );
        }
        // What is not needed may go now: the newest segment of the log stays until there is
        // another.
        self.slots().release_all_but(key, &used);
        Ok((used, end))
    }

    /// The error: records are missing that were durable when the newest segment of their log was
    /// begun.
    fn lost(&self, slot: Option<usize>, records: Range<u64>) -> Error {
        let place = match slot {
            Some(slot) => format!("the segment at {} of the file is damaged", self.header.at(slot)),
            None => "the segment that had the first of them is missing".to_owned(),
        };
        let what = format!(
            "the log {} has lost records {} to {} of the volume, which were durable: {place}; \
             restore the file from a copy, or open the volume by force, without this log",
            self.name(),
            records.start,
            records.end - 1
        );
        Error::new(ErrorKind::Corrupt, what)
    }

    /// The error: a header is damaged, so that it is unknown whose records are behind it.
    fn damaged(&self, slot: usize) -> Error {
        let what = format!(
            "the header of the segment at {} of the log {} is damaged, and records of the volume \
             may be behind it: restore the file from a copy, or give them up: \
             mica volume log drop --force FILE damaged",
            self.header.at(slot),
            self.name()
        );
        Error::new(ErrorKind::Corrupt, what)
    }

    async fn begin_log(
        self: &Arc<Self>,
        key: LogKey,
        parts: Vec<Part>,
        (at, header): (usize, SegmentHeader),
        recovered: Range<u64>,
    ) -> Result<Log> {
        // From here on, dropping the log gives up what it has.
        let log = Log::new(Arc::clone(self), key, parts, (at, &header), recovered);
        self.write_header(at, &header).await?;
        self.sync_here().await?;
        log.is_named();
        Ok(log)
    }
}

/// What the newest segment of a log says of the records before it.
#[derive(Clone, Copy, Default)]
struct Promised {
    /// Those below were in the store.
    freed: u64,
    /// Those below were durable.
    durable: u64,
}

impl Promised {
    fn of(newest: &SegmentHeader) -> Self {
        Self { freed: newest.freed, durable: newest.durable }
    }
}

fn check_number(record: u64) -> Result<()> {
    if record <= NUMBER_MAX {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Corrupt, format!("no volume has had {record} records")))
}

fn found_as(slots: &Slots, key: LogKey, phase: Phase) -> Option<Found> {
    let segments = slots.segments_of(key);
    let (_, newest) = segments.last()?;
    Some(Found {
        store: newest.store,
        volume: key.volume,
        writers: newest.writers.clone(),
        freed: newest.freed,
        is_set_aside: matches!(phase, Phase::Over(_)),
        key,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::run;
    use mica_block::{Store, read_exact};
    use mica_store::MemoryStore;
    use mica_store::faulty::{
        DelayOptions, DelayStore, ErrorOptions, ErrorStore, Operation, Operations, When,
    };
    use mica_units::HostOffset;
    use std::cell::Cell;
    use std::time::Duration;

    /// The story: a volume could not be closed, and the same process opened it again. The header
    /// that it wrote then said that records were durable which were only written: a power cut that
    /// left the one and not the others would have had the log refused.
    #[test]
    fn what_is_gone_on_with_is_durable_before_a_header_says_so() {
        run(1, async {
            const LEN: usize = 1 << 20;
            let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; LEN]));
            drop(LogDevice::open(Arc::clone(&file), [1; 16]).await.expect("made"));
            // The one of the opening and that of the new log are done.
            let operations = Operations::NONE.with(Operation::Sync);
            let options = ErrorOptions { operations, when: When::From(3), errno: 5 };
            let failing = Arc::new(ErrorStore::new(Arc::clone(&file), options));
            let device = LogDevice::open(failing, [2; 16]).await.expect("a log");
            let volume = [4; 16];
            let log = device.start([3; 16], volume, Writer::FIRST, 0).await.expect("begun");
            let ticket = log.push(Record::Drop { number: 1 }).expect("there is room");
            log.written(ticket).await.expect("it is in the file");
            drop(log);
            let before = read_exact(&*file, HostOffset::ZERO, LEN).await.expect("read");
            device
                .go_on(volume, (Writer::FIRST, Writer::FIRST), 0)
                .await
                .err()
                .expect("it cannot be durable");
            let after = read_exact(&*file, HostOffset::ZERO, LEN).await.expect("read");
            assert!(*before == *after, "a header was written");
        });
    }

    /// The story: a volume was handed over, and its guest waited until all that its log had left to
    /// be written was on the device, though the store had it.
    #[test]
    fn end_of_a_log_is_durable_without_what_it_has() {
        run(3, async {
            let file = Arc::new(MemoryStore::new_writable("log", vec![0; 1 << 20]));
            let device = LogDevice::open(Arc::clone(&file) as _, [1; 16]).await.expect("made");
            let (volume, other) = ([4; 16], [5; 16]);
            let log = device.start([3; 16], volume, Writer::FIRST, 0).await.expect("begun");
            let beside = device.start([3; 16], other, Writer::FIRST, 0).await.expect("begun");
            for log in [&log, &beside] {
                let ticket = log.push(Record::Drop { number: 1 }).expect("there is room");
                log.written(ticket).await.expect("it is in the file");
            }
            let unsynced = log.unsynced();
            assert!(unsynced > 0);
            log.end().await.expect("ended");
            assert_eq!(beside.unsynced(), unsynced, "nothing else was synced");
            assert!(device.found(volume).is_none());
            beside.sync().await.expect("synced");
            assert_eq!(beside.unsynced(), 0);
            drop((log, beside, device));
            let device = LogDevice::open(file, [2; 16]).await.expect("a log");
            assert!(device.found(volume).is_none() && device.found(other).is_some());
        });
    }

    /// The story: the segments of a log that had just ended were not durable, and the next volume
    /// was told that there was no room.
    #[test]
    fn log_that_has_ended_leaves_its_room_to_the_next() {
        run(4, async {
            let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
            let file = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
            let device = LogDevice::open(file, [1; 16]).await.expect("made");
            for volume in 1..20 {
                let volume = [volume; 16];
                let log = device.start([3; 16], volume, Writer::FIRST, 0).await.expect("room");
                while let Ok(ticket) = log.push(Record::Data { block: 1, bytes: &[7; 4096] }) {
                    log.written(ticket).await.expect("written");
                }
                let twice = device.start([3; 16], volume, Writer::FIRST, 0).await.err();
                assert!(twice.is_some_and(|error| error.kind() == ErrorKind::Denied));
                log.free(log.next());
                log.end().await.expect("ended");
            }
        });
    }

    /// The story: a volume was opened beside one that wrote all the time, on a device that had no
    /// room for another log: it was synced again and again, and nobody was told.
    #[test]
    fn full_device_says_so_while_others_write() {
        run(5, async {
            let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
            let file = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
            let operations = Operations::NONE.with(Operation::Sync);
            let slow = DelayOptions { operations, time: Duration::from_millis(1) };
            let file = Arc::new(DelayStore::new(file, slow));
            let device = LogDevice::open(file, [1; 16]).await.expect("made");
            let beside = device.start([3; 16], [5; 16], Writer::FIRST, 0).await.expect("begun");
            let ticket = beside.push(Record::Drop { number: 1 }).expect("there is room");
            beside.written(ticket).await.expect("written");
            let is_over = Cell::new(false);
            let write = async {
                while !is_over.get() {
                    // What a log does when a write is over, which has much more room than this one.
                    device.after_write(Ok(()), None).expect("noted");
                    mica_rt::sleep(Duration::from_micros(100)).await;
                }
            };
            let start = async {
                let started = device.start([3; 16], [4; 16], Writer::FIRST, 0);
                let started = mica_rt::timeout(Duration::from_millis(20), started).await;
                is_over.set(true);
                let refused = started.expect("soon").err().expect("there is no room");
                assert_eq!(refused.kind(), ErrorKind::NoSpace, "{refused}");
            };
            let both: [mica_block::LocalFuture<'_, ()>; 2] = [Box::pin(write), Box::pin(start)];
            mica_rt::join_all(both).await;
        });
    }

    /// The story: a log of three segments waited for the next tick of a clock each time that its
    /// only segment with records was freed as a whole.
    #[test]
    fn smallest_log_has_room_as_soon_as_what_it_has_is_in_extents() {
        run(2, async {
            let len = usize::try_from(LogDevice::LEN_MIN).expect("small");
            let file: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", vec![0; len]));
            let device = LogDevice::open(file, [1; 16]).await.expect("made");
            let log = device.start([3; 16], [4; 16], Writer::FIRST, 0).await.expect("begun");
            for _ in 0..20 {
                while let Ok(ticket) = log.push(Record::Data { block: 1, bytes: &[7; 4096] }) {
                    log.written(ticket).await.expect("written");
                }
                let full = mica_rt::timeout(Duration::from_secs(1), log.has_room()).await;
                assert!(full.is_err(), "everything in it is needed");
                let free = async {
                    mica_rt::sleep(Duration::from_millis(1)).await;
                    log.free(log.next());
                    Ok(())
                };
                let waits: [mica_block::LocalFuture<'_, Result<()>>; 2] =
                    [Box::pin(log.has_room()), Box::pin(free)];
                let both = mica_rt::timeout(Duration::from_millis(500), mica_rt::join_all(waits));
                both.await.expect("soon").into_iter().for_each(|done| done.expect("room"));
            }
        });
    }

    /// The story: a log was opened again in the milliseconds in which headers became durable in the
    /// background, and was open already; and a process that ended its executor then found the
    /// device failed.
    #[test]
    fn log_that_rests_has_no_task_that_has_its_device_open() {
        run(6, async {
            let inner: Arc<dyn Store> =
                Arc::new(MemoryStore::new_writable("log", vec![0; 1 << 20]));
            let operations = Operations::NONE.with(Operation::Sync);
            let slow = DelayOptions { operations, time: Duration::from_millis(5) };
            let file = Arc::new(DelayStore::new(inner, slow));
            let device = LogDevice::open(Arc::clone(&file) as _, [1; 16]).await.expect("made");
            let log = device.start([3; 16], [4; 16], Writer::FIRST, 0).await.expect("begun");
            // More than a segment.
            for block in 0..20 {
                let record = Record::Data { block, bytes: &[7; 4096] };
                let ticket = log.push(record).expect("there is room");
                log.written(ticket).await.expect("written");
            }
            log.sync_in_background();
            assert!(Arc::strong_count(&device) > 2, "it has tasks, and the log");
            log.rest().await;
            drop((log, device));
            assert_eq!(Arc::strong_count(&file), 1);
            let device = LogDevice::open(file, [2; 16]).await.expect("a log");
            device.go_on([4; 16], (Writer::FIRST, Writer::FIRST), 0).await.expect("it goes on");
        });
    }
}
