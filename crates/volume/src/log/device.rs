//! A device: the file, what is on it, and which volume has what of it.

use super::chain::{self, Part};
use super::create::{self, Beginning};
use super::format::{DeviceHeader, Kind, SegmentHeader, WRITERS_MAX};
use super::record::Record;
use super::scan::scan;
use super::slots::{LogKey, Phase, Purpose, Slots};
use super::tail::Log;
use crate::format::Id;
use crate::format::frame::Malformed;
use crate::place::Writer;
use mica_block::{Error, ErrorKind, GroupSync, IoFuture, Result, Store, read_exact, write_all};
use mica_rt::sync::Waiters;
use mica_rt::{Buf, join_all, spawn};
use mica_units::HostOffset;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Headers that are read at once.
const READS_AT_ONCE: usize = 64;
/// Bytes that are read of a segment to know its header.
const HEADER_READ: usize = 512;

/// A file or a device that has the logs of volumes.
pub struct LogDevice {
    pub(super) file: Arc<dyn Store>,
    pub(super) header: DeviceHeader,
    /// Part of the sums of everything that is written while it is open.
    pub(super) session: Id,
    slots: Mutex<Slots>,
    syncs: GroupSync,
    /// What waits for room.
    pub(super) room: Waiters,
    /// What has to be woken when nothing is acknowledged any more.
    waiting: Mutex<Vec<Weak<Waiters>>>,
}

/// A log that is on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// The store of its volume.
    pub store: Id,
    /// Its volume.
    pub volume: Id,
    /// Under whom it may go on.
    pub writers: Vec<Writer>,
    /// Whether nobody may go on with it: it is kept until its space is needed.
    pub is_set_aside: bool,
    key: LogKey,
}

impl LogDevice {
    /// Makes a log of `len` bytes in `file`, which has no length yet, or that many zeros. A block
    /// device has its own length, and zeros at its ends. `random` is a new random number.
    ///
    /// # Errors
    /// `Invalid` if there is something in it, or it is too short; `NoSpace` if there is no space.
    pub async fn create(file: Arc<dyn Store>, len: u64, random: Id) -> Result<Arc<Self>> {
        if file.len()? == 0 {
            file.set_len(len).await.map_err(|error| error.wrap(file.name()))?;
        }
        if matches!(create::beginning(&*file).await?, Beginning::Log(_)) {
            let what = format!("{} is a log already: open it", file.name());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        create::make(&*file, random).await?;
        Self::open(file, random).await
    }

    /// Opens the log in `file`, which nobody else has open. A file that has its length and nothing
    /// but zeros becomes one, for so it looks if its making was cut short. `random` is a new random
    /// number.
    ///
    /// # Errors
    /// `Invalid` if the file is something else; `Unsupported` if a newer version of mica made it.
    pub async fn open(file: Arc<dyn Store>, random: Id) -> Result<Arc<Self>> {
        let header = match create::beginning(&*file).await? {
            Beginning::Log(header) => header,
            Beginning::Zeros if create::is_device(&*file) => {
                let what = format!("{} has no log: make one on it first", file.name());
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            Beginning::Zeros => create::make(&*file, random).await?,
        };
        if file.len()? < header.len() {
            let (file, len) = (file.name(), header.len());
            tracing::warn!(file, "the log was cut: it had {len} bytes");
        }
        create::allocate(&*file, &header).await?;
        let slots = Slots::new(read_headers(&*file, &header).await?);
        // A process that died may have left what is written and not durable. What is found now must
        // not be lost later, when others rely on it.
        file.sync().await.map_err(|error| error.wrap(file.name()))?;
        Ok(Arc::new(Self {
            file,
            header,
            session: random,
            slots: Mutex::new(slots),
            syncs: GroupSync::new(),
            room: Waiters::default(),
            waiting: Mutex::default(),
        }))
    }

    /// The log of `volume`, unless there is none, or it is over.
    pub fn found(&self, volume: Id) -> Option<Found> {
        let slots = self.slots();
        let (key, phase) = slots.log_of(volume)?;
        (phase == Phase::Found).then(|| found_as(&slots, key, phase)).flatten()
    }

    /// All logs that nobody has open and that were not ended.
    pub fn volumes(&self) -> Vec<Found> {
        let slots = self.slots();
        let is_listed = |phase: &Phase| {
            matches!(phase, Phase::Found | Phase::Over(Kind::SetAside | Kind::Records))
        };
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
        let segment = {
            let mut slots = self.slots();
            slots.check()?;
            if slots.log_of(volume).is_some() {
                let what = format!("{} has a log of this volume already", self.file.name());
                return Err(Error::new(ErrorKind::Denied, what));
            }
            let root = slots.next_number();
            let key = LogKey { volume, root };
            let taken = slots.take(Purpose::Start, |number| SegmentHeader {
                number,
                ..self.segment(store, key, first, vec![writer])
            });
            let taken = taken.ok_or_else(|| self.no_room())?;
            slots.set_phase(key, Phase::Open { has_records: false });
            taken
        };
        let (key, this) = (segment.1.key(), Arc::clone(self));
        spawn(async move { this.begin_log(key, Vec::new(), segment, first..first).await }).await
    }

    /// Goes on with the log of `volume` that was found, for the process that claimed `writer`: the
    /// log names it durably when this returns. Records below `from` are in the state that was
    /// found, and are not needed.
    ///
    /// # Errors
    /// `NotFound` if there is none, `Denied` if it is open; `Corrupt` if it lacks records from
    /// `from` on; `Limit` if it names too many writers.
    pub async fn go_on(self: &Arc<Self>, volume: Id, writer: Writer, from: u64) -> Result<Log> {
        let this = Arc::clone(self);
        spawn(async move { this.go_on_here(volume, writer, from).await }).await
    }

    async fn go_on_here(self: &Arc<Self>, volume: Id, writer: Writer, from: u64) -> Result<Log> {
        let (key, mut writers, store) = self.claim(volume)?;
        let gone_on = async {
            if !writers.contains(&writer) {
                self.check_names(&writers)?;
                writers.push(writer);
            }
            let (parts, end) = self.recover(key, from).await?;
            let segment = self
                .take_name(|number| SegmentHeader {
                    number,
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
        let this = Arc::clone(self);
        spawn(async move {
            let (key, writers, store) = this.claim(volume)?;
            let ended = this.end_log(Kind::SetAside, this.segment(store, key, 0, writers)).await;
            if ended.is_err() {
                this.slots().abandon(key);
            }
            ended
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

    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        // No code that may panic runs while it is half changed.
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A header of a log, without its number.
    pub(super) fn segment(
        &self,
        store: Id,
        key: LogKey,
        first: u64,
        writers: Vec<Writer>,
    ) -> SegmentHeader {
        SegmentHeader {
            kind: Kind::Records,
            device: self.header.id,
            session: self.session,
            store,
            volume: key.volume,
            number: 0,
            root: key.root,
            first,
            writers,
        }
    }

    /// The log of `volume`, which is this caller's from now on; whom it names; its store.
    fn claim(&self, volume: Id) -> Result<(LogKey, Vec<Writer>, Id)> {
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
        Ok((found.key, found.writers, found.store))
    }

    /// The parts of the log that have its records from `from` on, and the number after the last.
    async fn recover(&self, key: LogKey, from: u64) -> Result<(Vec<Part>, u64)> {
        let parts = {
            let slots = self.slots();
            chain::parts(slots.segments_of(key).into_iter(), from)
        };
        if parts.is_empty() {
            let what = format!(
                "the log in {} does not have record {from}, which the volume lacks: set it aside",
                self.name()
            );
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        let mut used = Vec::new();
        let mut end = from;
        for part in parts {
            end = scan(&*self.file, &self.header, &part, &mut |_, _| Ok(())).await?;
            used.push(part);
            if end < part.limit {
                break;
            }
        }
        Ok((used, end.max(from)))
    }

    /// Takes a segment for a header alone.
    pub(super) async fn take_name(
        &self,
        header: impl Fn(u64) -> SegmentHeader,
    ) -> Result<(usize, SegmentHeader)> {
        loop {
            {
                let mut slots = self.slots();
                slots.check()?;
                if let Some(taken) = slots.take(Purpose::Name, &header) {
                    return Ok(taken);
                }
                if !slots.waits_for_sync() {
                    return Err(self.no_room());
                }
            }
            self.sync_here().await?;
        }
    }

    /// Writes that a log is over, as `header` has it.
    pub(super) async fn end_log(&self, kind: Kind, header: SegmentHeader) -> Result<()> {
        let key = header.key();
        let header = |number| SegmentHeader { kind, number, ..header.clone() };
        let (at, header) = self.take_name(header).await?;
        self.write_header(at, &header).await?;
        self.sync_here().await?;
        self.slots().set_phase(key, Phase::Over(kind));
        self.room.wake_all();
        Ok(())
    }

    async fn write_header(&self, at: usize, header: &SegmentHeader) -> Result<()> {
        let offset = HostOffset::new(self.header.at(at));
        let written = write_all(&*self.file, Buf::from_slice(&header.encode()), offset).await;
        self.after_write(written, Some(at)).map(drop)
    }

    async fn begin_log(
        self: &Arc<Self>,
        key: LogKey,
        parts: Vec<Part>,
        (at, header): (usize, SegmentHeader),
        recovered: std::ops::Range<u64>,
    ) -> Result<Log> {
        // From here on, dropping the log gives up what it has.
        let log = Log::new(Arc::clone(self), key, parts, (at, &header), recovered);
        self.write_header(at, &header).await?;
        self.sync_here().await?;
        log.is_named();
        Ok(log)
    }

    /// A write is done: of the header of `begun`, if it began a segment. Returns its number.
    pub(super) fn after_write(&self, written: Result<()>, begun: Option<usize>) -> Result<u64> {
        match written {
            Ok(()) => Ok(self.slots().wrote(begun)),
            Err(error) => Err(self.latch(error)),
        }
    }

    /// Begins a write of a log.
    pub(super) fn write(&self, buf: Buf, slot: usize, at: u64) -> IoFuture {
        self.file.write_at(buf, HostOffset::new(self.header.at(slot) + at))
    }

    /// Makes durable what is written, together with all who want that; goes on if its caller does
    /// not.
    pub(super) async fn sync(self: &Arc<Self>) -> Result<()> {
        let this = Arc::clone(self);
        let run = async || spawn(async move { this.sync_alone().await }).await;
        self.syncs.run(run).await
    }

    /// As [`Self::sync`], in the caller's task.
    async fn sync_here(&self) -> Result<()> {
        self.syncs.run(async || self.sync_alone().await).await
    }

    async fn sync_alone(&self) -> Result<()> {
        let written = {
            let slots = self.slots();
            slots.check()?;
            slots.written()
        };
        match self.file.sync().await {
            Ok(()) => {
                let mut slots = self.slots();
                // Of a write that failed meanwhile nobody knows what it did to what was synced.
                slots.check()?;
                slots.synced(written);
            }
            Err(error) => return Err(self.latch(error)),
        }
        self.room.wake_all();
        Ok(())
    }

    /// Nothing is acknowledged any more. Returns why.
    fn latch(&self, error: Error) -> Error {
        let latched = {
            let mut slots = self.slots();
            let what = || error.wrap(format!("the log {} takes no more writes", self.name()));
            slots.latch.get_or_insert_with(what).clone()
        };
        tracing::error!(error = latched.in_one_line(), "a log failed");
        let waiting = std::mem::take(&mut *self.waiting());
        waiting.iter().filter_map(Weak::upgrade).for_each(|waiters| waiters.wake_all());
        self.room.wake_all();
        latched
    }

    /// `waiters` are woken when nothing is acknowledged any more.
    pub(super) fn wake_on_latch(&self, waiters: &Arc<Waiters>) {
        let mut waiting = self.waiting();
        waiting.retain(|waiters| waiters.strong_count() > 0);
        waiting.push(Arc::downgrade(waiters));
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Weak<Waiters>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name(&self) -> String {
        self.file.name()
    }

    /// # Errors
    /// `Limit` if no writer can be added.
    pub(super) fn check_names(&self, writers: &[Writer]) -> Result<()> {
        if writers.len() < WRITERS_MAX {
            return Ok(());
        }
        let what = format!(
            "the log in {} names {WRITERS_MAX} writers, and none of them got its volume: is its \
             store writable?",
            self.name()
        );
        Err(Error::new(ErrorKind::Limit, what))
    }

    pub(super) fn no_room(&self) -> Error {
        let what = format!(
            "the log {} has no room for another log: set one aside, or use a longer one",
            self.name()
        );
        Error::new(ErrorKind::NoSpace, what)
    }
}

fn found_as(slots: &Slots, key: LogKey, phase: Phase) -> Option<Found> {
    let segments = slots.segments_of(key);
    let (_, newest) = segments.last()?;
    Some(Found {
        store: newest.store,
        volume: key.volume,
        writers: newest.writers.clone(),
        is_set_aside: matches!(phase, Phase::Over(_)),
        key,
    })
}

/// The headers of all segments.
async fn read_headers(
    file: &dyn Store,
    device: &DeviceHeader,
) -> Result<Vec<Option<SegmentHeader>>> {
    let count = usize::try_from(device.segments).expect("few segments");
    let mut headers = Vec::with_capacity(count);
    while headers.len() < count {
        let end = count.min(headers.len() + READS_AT_ONCE);
        let reads = (headers.len()..end)
            .map(|slot| read_exact(file, HostOffset::new(device.at(slot)), HEADER_READ));
        for read in join_all(reads).await {
            headers.push(match SegmentHeader::decode(&read?) {
                Ok(header) => Some(header).filter(|header| header.device == device.id),
                Err(Malformed::Version(version)) => {
                    return Err(create::explain(file, Malformed::Version(version)));
                }
                Err(_) => None,
            });
        }
    }
    Ok(headers)
}
