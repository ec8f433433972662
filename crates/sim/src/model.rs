//! A disk in a few lines, which defines what another one may show.
//!
//! Words: a **version** of a sector is what one request made of it. A request is **sure** when it
//! was acknowledged and determines the sector from then on: writes and zeroes do, a discard never
//! does, nor does a request that failed. A version is **gone** from the moment after which no read
//! may show it any more.
//!
//! Rules
//! - R1 A version is gone when a sure request is acknowledged that started after the version's own
//!   request had ended. So of requests that overlap in time, any may win.
//! - R2 A read shows a version that started before the read ended, and was not gone when the read
//!   started.
//! - R3 What a read shows while no request touches the sector stays: everything else is gone.
//! - R4 When a flush is acknowledged, versions that were gone when it started never reappear. Any
//!   other may be there after a crash, and nothing else.

use mica_units::{GuestRange, SECTOR_BYTES};
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// Bytes of a sector.
const SECTOR: usize = 512;
const _: () = assert!(SECTOR as u64 == SECTOR_BYTES);
/// Marks what the model writes; its low bits carry the number of the write.
const MAGIC: u64 = 0x4d49_4341_0000_0000;
const STAMP_BYTES: usize = 16;
/// A moment that never arrives.
const NEVER: u64 = u64::MAX;

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Request {
    /// Sectors get the bytes of [`ModelDisk::content`].
    Write,
    /// Sectors get zeros.
    Zeroes,
    /// Sectors get zeros, or stay as they are.
    Discard,
    /// Sectors are read.
    Read,
    /// What was acknowledged is made durable.
    Flush,
}

/// A request in progress.
#[must_use = "a request that is not ended stays under way"]
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ticket {
    request: Request,
    number: u64,
    sectors: Range<u64>,
    start: u64,
}

impl Ticket {
    /// What it is.
    pub fn request(&self) -> Request {
        self.request
    }
}

/// The model.
#[derive(Clone)]
pub struct ModelDisk {
    initial: Vec<u8>,
    /// Sectors that may differ from their initial contents.
    touched: BTreeMap<u64, Vec<Version>>,
    /// When the reads in progress started, by their numbers.
    reads: BTreeMap<u64, u64>,
    /// Moments so far: each start and each end of a request is one.
    now: u64,
    requests: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Value {
    Initial,
    Zero,
    Written(u64),
}

#[derive(Clone, Copy, Debug)]
struct Version {
    value: Value,
    number: u64,
    end: u64,
    gone: u64,
    /// Whether not even a crash can bring it back.
    over: bool,
}

const FIRST: Version =
    Version { value: Value::Initial, number: 0, end: 0, gone: NEVER, over: false };

/// A sector with contents that it must not show.
#[derive(Clone, PartialEq, Eq)]
pub struct Wrong {
    what: String,
}

impl fmt::Debug for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl ModelDisk {
    /// A disk that holds `initial`.
    ///
    /// # Panics
    /// If that is not a whole number of sectors.
    pub fn new(initial: Vec<u8>) -> Self {
        assert_eq!(initial.len() % SECTOR, 0, "a disk has whole sectors");
        Self { initial, touched: BTreeMap::new(), reads: BTreeMap::new(), now: 0, requests: 0 }
    }

    /// Sectors of the disk.
    pub fn sectors(&self) -> u64 {
        (self.initial.len() / SECTOR) as u64
    }

    /// A request for `range` starts. For a flush the range is ignored.
    pub fn begin(&mut self, request: Request, range: GuestRange) -> Ticket {
        self.now += 1;
        self.requests += 1;
        let sectors = range.start().bytes() / SECTOR_BYTES..range.end().bytes() / SECTOR_BYTES;
        let ticket = Ticket { request, number: self.requests, sectors, start: self.now };
        let value = match request {
            Request::Write => Value::Written(ticket.number),
            Request::Zeroes | Request::Discard => Value::Zero,
            Request::Flush => return ticket,
            Request::Read => {
                self.reads.insert(ticket.number, ticket.start);
                return ticket;
            }
        };
        let number = ticket.number;
        for sector in ticket.sectors.clone() {
            let version = Version { value, number, end: NEVER, gone: NEVER, over: false };
            self.touched.entry(sector).or_insert_with(|| vec![FIRST]).push(version);
        }
        ticket
    }

    /// What the write of `ticket` writes.
    pub fn content(&self, ticket: &Ticket) -> Vec<u8> {
        ticket.sectors.clone().flat_map(|sector| stamped(sector, ticket.number)).collect()
    }

    /// The request ends: it was acknowledged, or it failed.
    pub fn end(&mut self, ticket: &Ticket, acknowledged: bool) {
        self.now += 1;
        match ticket.request {
            Request::Read => drop(self.reads.remove(&ticket.number)),
            Request::Flush if acknowledged => self.forget_gone(ticket.start),
            Request::Flush => {}
            Request::Write | Request::Zeroes | Request::Discard => {
                let sure = acknowledged && ticket.request != Request::Discard;
                self.end_change(ticket, sure);
            }
        }
    }

    /// R1.
    fn end_change(&mut self, ticket: &Ticket, sure: bool) {
        let now = self.now;
        for sector in ticket.sectors.clone() {
            for version in self.touched.get_mut(&sector).into_iter().flatten() {
                if version.number == ticket.number {
                    version.end = now;
                } else if sure && version.end < ticket.start {
                    version.gone = version.gone.min(now);
                }
            }
        }
    }

    /// R4: versions that were gone at `start` never reappear.
    fn forget_gone(&mut self, start: u64) {
        // Reads in progress may still show them.
        let oldest = self.reads.values().copied().min().unwrap_or(NEVER);
        for versions in self.touched.values_mut() {
            for version in &mut *versions {
                version.over |= version.gone < start;
            }
            versions.retain(|version| !version.over || version.gone >= oldest);
        }
    }

    /// The read of `ticket` ends with `bytes`.
    ///
    /// # Errors
    /// The first sector with contents that it must not show.
    ///
    /// # Panics
    /// If the length differs from what was requested.
    pub fn end_read(&mut self, ticket: &Ticket, bytes: &[u8]) -> Result<(), Wrong> {
        self.end(ticket, true);
        let (now, start) = (self.now, ticket.start);
        let (sectors, rest) = bytes.as_chunks::<SECTOR>();
        assert!(
            rest.is_empty() && ticket.sectors.end - ticket.sectors.start == sectors.len() as u64
        );
        for (sector, bytes) in ticket.sectors.clone().zip(sectors) {
            let may_show = |version: &Version| version.gone >= start;
            self.judge(sector, bytes, may_show)?;
            let Some(versions) = self.touched.get_mut(&sector) else { continue };
            // R3.
            if versions.iter().all(|version| version.end < start) {
                for version in versions {
                    if !shows(&self.initial, sector, version.value, bytes) {
                        version.gone = version.gone.min(now);
                    }
                }
            }
        }
        Ok(())
    }

    /// The power went, or the process died: requests in progress never end, and [`Self::settle`]
    /// decides what is there.
    pub fn crash(&mut self) {
        self.now += 1;
        self.reads.clear();
        for versions in self.touched.values_mut() {
            versions.retain(|version| !version.over);
            for version in versions {
                version.end = version.end.min(self.now);
                version.gone = NEVER;
            }
        }
    }

    /// The process died, and everything acknowledged must be there: as [`Self::crash`] after a
    /// flush of everything that had ended.
    pub fn die(&mut self) {
        self.reads.clear();
        self.now += 1;
        self.forget_gone(self.now);
        self.crash();
    }

    /// After a crash the disk shows `bytes` from sector `first` on; from now on that is its
    /// contents.
    ///
    /// # Errors
    /// The first sector with contents that it must not show.
    pub fn settle(&mut self, first: u64, bytes: &[u8]) -> Result<(), Wrong> {
        for (sector, bytes) in (first..).zip(bytes.as_chunks::<SECTOR>().0) {
            self.judge(sector, bytes, |_| true)?;
            if let Some(versions) = self.touched.get_mut(&sector) {
                versions.retain(|version| shows(&self.initial, sector, version.value, bytes));
            }
        }
        Ok(())
    }

    /// What the disk shows if only one version is possible; `None` if there are several.
    pub fn bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = self.initial.clone();
        for (sector, versions) in &self.touched {
            let mut left = versions.iter().filter(|version| version.gone == NEVER);
            let first = left.next()?;
            let at = place(*sector);
            let content = content(&self.initial, *sector, first.value);
            if !left.all(|version| shows(&self.initial, *sector, version.value, &content)) {
                return None;
            }
            bytes[at].copy_from_slice(&content);
        }
        Some(bytes)
    }

    fn judge(
        &self,
        sector: u64,
        bytes: &[u8; SECTOR],
        may_show: impl Fn(&Version) -> bool,
    ) -> Result<(), Wrong> {
        let versions = self.touched.get(&sector).map_or(&[FIRST][..], |versions| versions);
        let mut allowed = versions.iter().filter(|version| may_show(version));
        if allowed.any(|version| shows(&self.initial, sector, version.value, bytes)) {
            return Ok(());
        }
        let found = self.describe(sector, bytes);
        let allowed: Vec<_> = versions
            .iter()
            .filter(|version| may_show(version))
            .map(|version| version.value)
            .collect();
        let others: Vec<_> = versions.iter().map(|version| version.value).collect();
        let what = format!("sector {sector} shows {found}; allowed are {allowed:?} of {others:?}");
        Err(Wrong { what })
    }

    /// A description of `bytes` for a person.
    fn describe(&self, sector: u64, bytes: &[u8; SECTOR]) -> String {
        let stamps: Vec<_> = bytes.chunks(STAMP_BYTES).map(stamp_in).collect();
        let whole = stamps.iter().all(|stamp| *stamp == stamps[0]);
        match stamps[0] {
            _ if bytes.iter().all(|byte| *byte == 0) => "zeros".to_owned(),
            _ if bytes[..] == self.initial[place(sector)] => "what was there first".to_owned(),
            Some((from, write)) if whole => format!("write {write} of sector {from}"),
            Some((from, write)) => format!("a mix that begins with write {write} of sector {from}"),
            None => {
                match self.initial.as_chunks::<SECTOR>().0.iter().position(|old| old == bytes) {
                    Some(from) => format!("what was in sector {from} first"),
                    None => format!("foreign bytes {:02x?}", &bytes[..STAMP_BYTES]),
                }
            }
        }
    }
}

fn place(sector: u64) -> Range<usize> {
    let start = usize::try_from(sector).expect("a small disk") * SECTOR;
    start..start + SECTOR
}

fn content(initial: &[u8], sector: u64, value: Value) -> [u8; SECTOR] {
    match value {
        Value::Initial => *initial[place(sector)].first_chunk().expect("a sector"),
        Value::Zero => [0; SECTOR],
        Value::Written(number) => stamped(sector, number),
    }
}

fn shows(initial: &[u8], sector: u64, value: Value, bytes: &[u8; SECTOR]) -> bool {
    match value {
        Value::Initial => initial[place(sector)] == *bytes,
        value => content(initial, sector, value) == *bytes,
    }
}

/// What write `number` makes of `sector`.
fn stamped(sector: u64, number: u64) -> [u8; SECTOR] {
    let mut bytes = [0; SECTOR];
    for stamp in bytes.chunks_mut(STAMP_BYTES) {
        stamp[..8].copy_from_slice(&sector.to_le_bytes());
        stamp[8..].copy_from_slice(&(MAGIC ^ number).to_le_bytes());
    }
    bytes
}

/// The sector and the number of the write that `stamp` identifies, if it is one.
fn stamp_in(stamp: &[u8]) -> Option<(u64, u64)> {
    let sector = u64::from_le_bytes(*stamp.first_chunk()?);
    let number = u64::from_le_bytes(*stamp.get(8..)?.first_chunk()?) ^ MAGIC;
    (number < 1 << 32).then_some((sector, number))
}

#[cfg(test)]
mod tests;
