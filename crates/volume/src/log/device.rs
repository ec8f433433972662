//! A device: the file, its segments, its writes and syncs.

use super::background::Background;
use super::create::{self, Beginning};
use super::format::{BLOCK, DeviceHeader, Kind, Remains, SegmentHeader, WRITERS_MAX};
use super::group::Bytes;
use super::slots::{LogKey, Phase, Purpose, Slots};
use crate::format::Id;
use crate::format::frame::Malformed;
use crate::place::Writer;
use crate::turn::Turn;
use mica_block::{Error, ErrorKind, GroupSync, Result, Store, read_exact, write_all};
use mica_rt::sync::Waiters;
use mica_rt::{Buf, Parts, join_all, spawn};
use mica_units::HostOffset;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Headers that are read at once.
const READS_AT_ONCE: usize = 64;
/// Bytes that are read of a segment to know its header.
const HEADER_READ: usize = 512;
/// Headers that are erased before one sync.
const ERASED_AT_ONCE: usize = 16;

/// A file or a device that has the logs of volumes.
pub struct LogDevice {
    pub(super) file: Arc<dyn Store>,
    pub(super) header: DeviceHeader,
    /// Part of the sums of everything that is written while it is open.
    pub(super) session: Id,
    opened: Turn,
    slots: Mutex<Slots>,
    syncs: GroupSync,
    /// Bytes that were written since the last sync.
    unsynced: AtomicU64,
    /// What waits for room.
    pub(super) room: Waiters,
    /// What has to be woken when nothing is acknowledged any more.
    waiting: Mutex<Vec<Weak<Waiters>>>,
}

impl LogDevice {
    /// The shortest log.
    pub const LEN_MIN: u64 = DeviceHeader::LEN_MIN;

    /// Makes a log of `len` bytes in `file`, which has no length yet, or that many zeros. A block
    /// device has its own length, and zeros at its ends. `random` is a new random number.
    ///
    /// # Errors
    /// `Invalid` if there is something in it, or it is too short; `NoSpace` if there is no space.
    pub async fn create(file: Arc<dyn Store>, len: u64, random: Id) -> Result<Arc<Self>> {
        if file.len()? == 0 {
            // Before it has a length: what is not a log in the end stays empty.
            create::check_len(&*file, len)?;
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
        Self::with_header(file, header, random).await
    }

    /// As [`Self::open`], but nothing becomes a log that is none yet.
    ///
    /// # Errors
    /// `Invalid` if the file is something else, or empty; as [`Self::open`].
    pub async fn open_existing(file: Arc<dyn Store>, random: Id) -> Result<Arc<Self>> {
        match create::beginning(&*file).await? {
            Beginning::Log(header) => Self::with_header(file, header, random).await,
            Beginning::Zeros => {
                let what = format!("{} is not a log yet: it is empty", file.name());
                Err(Error::new(ErrorKind::Invalid, what))
            }
        }
    }

    async fn with_header(
        file: Arc<dyn Store>,
        header: DeviceHeader,
        random: Id,
    ) -> Result<Arc<Self>> {
        if file.len()? < header.len() {
            let (file, len) = (file.name(), header.len());
            tracing::warn!(file, "the log was truncated: it had {len} bytes");
        }
        create::allocate(&*file, &header).await?;
        let (headers, damaged) = read_headers(&*file, &header).await?;
        if !damaged.is_empty() {
            let (file, at) = (file.name(), damaged.iter().map(|(slot, _)| header.at(*slot)));
            let at = at.collect::<Vec<_>>();
            tracing::warn!(file, ?at, "headers of segments of the log are damaged");
        }
        let slots = Slots::new(headers, damaged);
        // A process that died may have left what is written and not durable. What is found now must
        // not be lost later, when others rely on it.
        file.sync().await.map_err(|error| error.wrap(file.name()))?;
        Ok(Arc::new(Self {
            file,
            header,
            session: random,
            opened: Turn::next(),
            slots: Mutex::new(slots),
            syncs: GroupSync::new(),
            unsynced: AtomicU64::new(0),
            room: Waiters::default(),
            waiting: Mutex::default(),
        }))
    }

    /// When this process had it, and no other any more.
    pub(crate) fn opened(&self) -> Turn {
        self.opened
    }

    pub(super) fn slots(&self) -> MutexGuard<'_, Slots> {
        // No code that may panic runs while it is half changed.
        self.slots.lock()
    }

    /// A header of a log that needs nothing before `first`, without its number.
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
            oldest: 0,
            first,
            freed: first,
            durable: first,
            writers,
        }
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
                if !slots.may_sync() {
                    return Err(self.no_room());
                }
            }
            self.sync_here().await?;
        }
    }

    /// Writes that a log is over, as `header` has it, durably when this returns. Of a log that was
    /// ended the header alone: its records are in the store, and to write them out, or what other
    /// logs have here, would only keep whoever waits for the end of a volume. What is set aside is
    /// for people, with all that it has.
    pub(super) async fn end_log(&self, kind: Kind, header: SegmentHeader) -> Result<()> {
        let key = header.key();
        let header = |number| SegmentHeader { kind, number, oldest: number, ..header.clone() };
        let (at, header) = self.take_name(header).await?;
        self.write_header(at, &header).await?;
        match kind {
            Kind::Ended => self.sync_header(at, &header).await?,
            Kind::Records | Kind::SetAside => self.sync_here().await?,
        }
        self.slots().set_phase(key, Phase::Over(kind));
        self.room.wake_all();
        Ok(())
    }

    pub(super) async fn write_header(&self, at: usize, header: &SegmentHeader) -> Result<()> {
        let offset = HostOffset::new(self.header.at(at));
        let written = write_all(&*self.file, Buf::from_slice(&header.encode()), offset).await;
        self.after_write(written, Some(at)).map(drop)
    }

    /// Erases headers of segments that are free, so that this is known after a power cut, too.
    /// Returns whether there were any.
    pub(super) async fn erase(self: &Arc<Self>) -> Result<bool> {
        Ok(self.erase_headers(ERASED_AT_ONCE, Slots::take_unclean).await? > 0)
    }

    /// Erases the headers of segments that `take` takes, at most so many, and releases them.
    /// Durable when this returns how many those were.
    pub(super) async fn erase_headers(
        self: &Arc<Self>,
        count_max: usize,
        take: fn(&mut Slots) -> Option<usize>,
    ) -> Result<usize> {
        let this = Arc::clone(self);
        let erased = async move {
            let mut count = 0;
            while count < count_max {
                let Some(at) = take(&mut this.slots()) else { break };
                let offset = HostOffset::new(this.header.at(at));
                let written = write_all(&*this.file, Buf::zeroed(BLOCK), offset).await;
                this.after_write(written, Some(at))?;
                this.slots().release(at);
                count += 1;
            }
            if count > 0 {
                this.sync_here().await?;
            }
            Ok(count)
        };
        spawn(erased).await
    }

    /// A write is done: of the header of `begun`, if it began a segment. Returns its number.
    pub(super) fn after_write(&self, written: Result<()>, begun: Option<usize>) -> Result<u64> {
        match written {
            Ok(()) => Ok(self.slots().wrote(begun)),
            Err(error) => Err(self.latch(error)),
        }
    }

    /// Writes a part of a log.
    pub(super) async fn write(&self, bytes: Bytes, slot: usize, at: u64) -> Result<()> {
        let offset = HostOffset::new(self.header.at(slot) + at);
        let buf = match bytes {
            Bytes::Whole(buf) => buf,
            Bytes::Parts(parts) => {
                self.unsynced.fetch_add(parts.len() as u64, Ordering::Relaxed);
                return write_parts(&*self.file, parts, offset).await;
            }
        };
        self.unsynced.fetch_add(buf.len() as u64, Ordering::Relaxed);
        self.file.write_at(buf, offset).await.0
    }

    /// Makes durable what is written, together with all who want that; goes on if its caller does
    /// not.
    pub(super) async fn sync(self: &Arc<Self>) -> Result<()> {
        let this = Arc::clone(self);
        let run = async || spawn(async move { this.sync_alone().await }).await;
        self.syncs.run(run).await
    }

    /// As [`Self::sync`], in the caller's task.
    pub(super) async fn sync_here(&self) -> Result<()> {
        self.syncs.run(async || self.sync_alone().await).await
    }

    /// Bytes that a sync would have to write, at most: the system may have written some by itself.
    pub(super) fn unsynced(&self) -> u64 {
        self.unsynced.load(Ordering::Relaxed)
    }

    /// Makes the headers of the log `key` durable that are older than segment `below`, and nothing
    /// else, unless somebody does that already; in the background, as nobody waits for it before
    /// the log is full. A segment is held until that is done: for good if it fails. Nothing is
    /// acknowledged any more then.
    pub(super) fn sync_headers(
        self: &Arc<Self>,
        key: LogKey,
        below: u64,
        background: &Arc<Background>,
    ) {
        let Some(held) = self.slots().hold_unsynced(key, below) else { return };
        let guard = Headers { device: Arc::clone(self), is_done: false };
        background.spawn(async move { guard.sync(key, below, held).await });
    }

    /// Makes a header durable that was written, and nothing else.
    async fn sync_header(&self, at: usize, header: &SegmentHeader) -> Result<()> {
        let (bytes, offset) = (Buf::from_slice(&header.encode()), self.header.at(at));
        match self.file.sync_written(bytes, HostOffset::new(offset)).await {
            Ok(()) => self.slots().header_synced(at),
            Err(error) => return Err(self.latch(error)),
        }
        Ok(())
    }

    async fn sync_alone(&self) -> Result<()> {
        let unsynced = self.unsynced();
        let written = {
            let slots = self.slots();
            slots.check()?;
            slots.written()
        };
        match self.file.sync().await {
            Ok(()) => {
                self.unsynced.fetch_sub(unsynced, Ordering::Relaxed);
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

    /// A write was dropped before it ended: nobody knows what the file has of it. What is pushed
    /// later must not be acknowledged, for that would say that this was written, too.
    pub(super) fn give_up(&self) {
        let what = "a write was given up before it ended: the executor that had begun it is gone";
        self.latch(Error::new(ErrorKind::Io, what));
    }

    /// `waiters` are woken when nothing is acknowledged any more.
    pub(super) fn wake_on_latch(&self, waiters: &Arc<Waiters>) {
        let mut waiting = self.waiting();
        waiting.retain(|waiters| waiters.strong_count() > 0);
        waiting.push(Arc::downgrade(waiters));
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Weak<Waiters>>> {
        self.waiting.lock()
    }

    pub(super) fn name(&self) -> String {
        self.file.name()
    }

    /// # Errors
    /// `Limit` if no writer can be added.
    pub(super) fn check_names(&self, writers: &[Writer]) -> Result<()> {
        if writers.len() < WRITERS_MAX {
            return Ok(());
        }
        let what = format!(
            "the log in {} names {WRITERS_MAX} writers, and none but the first of them got its \
             volume: is its store writable? By force, the volume is opened without what only \
             this log has",
            self.name()
        );
        Err(Error::new(ErrorKind::Limit, what))
    }

    pub(super) fn has_one(&self) -> Error {
        let what = format!("{} has a log of this volume already", self.file.name());
        Error::new(ErrorKind::Denied, what)
    }

    pub(super) fn no_room(&self) -> Error {
        let what = format!(
            "the log {} has no room for another log: use a longer one, or give up what nobody needs \
             (mica volume log list)",
            self.name()
        );
        Error::new(ErrorKind::NoSpace, what)
    }
}

/// Headers that are becoming durable. If nobody sees to that any more, nothing is acknowledged:
/// whether they are being written is not known, and so nobody may take their segments.
struct Headers {
    device: Arc<LogDevice>,
    is_done: bool,
}

impl Headers {
    async fn sync(mut self, key: LogKey, below: u64, first: (usize, SegmentHeader)) {
        let mut held = Some(first);
        while let Some((at, header)) = held {
            if self.device.sync_header(at, &header).await.is_err() {
                break;
            }
            self.device.room.wake_all();
            held = self.device.slots().hold_unsynced(key, below);
        }
        self.is_done = true;
    }
}

impl Drop for Headers {
    fn drop(&mut self) {
        if !self.is_done {
            self.device.give_up();
        }
    }
}

/// Writes all of `parts`: as they are, if the file can do that.
async fn write_parts(file: &dyn Store, parts: Parts, offset: HostOffset) -> Result<()> {
    match file.write_parts(parts, offset) {
        Ok(written) => written.await,
        Err(parts) => file.write_at(parts.to_buf(0..parts.len()), offset).await.0,
    }
}

/// The headers of all segments, and what is left of those that are damaged.
async fn read_headers(
    file: &dyn Store,
    device: &DeviceHeader,
) -> Result<(Vec<Option<SegmentHeader>>, Vec<(usize, Remains)>)> {
    let count = usize::try_from(device.segments).expect("few segments");
    let (mut headers, mut damaged) = (Vec::with_capacity(count), Vec::new());
    while headers.len() < count {
        let end = count.min(headers.len() + READS_AT_ONCE);
        let reads = (headers.len()..end)
            .map(|slot| read_exact(file, HostOffset::new(device.at(slot)), HEADER_READ));
        for read in join_all(reads).await {
            let bytes = read?;
            headers.push(match SegmentHeader::decode(&bytes) {
                Ok(header) => Some(header).filter(|header| header.device == device.id),
                Err(Malformed::Version(version)) if SegmentHeader::is_of(&bytes, &device.id) => {
                    return Err(create::explain(file, Malformed::Version(version)));
                }
                Err(_) => {
                    let remains = SegmentHeader::remains(&bytes, &device.id);
                    damaged.extend(remains.map(|remains| (headers.len(), remains)));
                    None
                }
            });
        }
    }
    Ok((headers, damaged))
}
