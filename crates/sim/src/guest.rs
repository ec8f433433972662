//! A guest that writes, reads and judges what it reads: several requests concurrently, often for
//! the same sectors.

use crate::{ModelDisk, Request, Ticket, World};
use mica_block::{Disk, Error, Extent, Manage, Result, Zeroes, read_extents};
use mica_rt::{Buf, join_all};
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// What a guest does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Concurrent requests.
    pub tasks: u64,
    /// Requests of each task.
    pub requests: u64,
    /// Maximum number of sectors of a request.
    pub sectors_max: u64,
    /// One request in this many is a flush.
    pub flush_one_in: u64,
    /// One write in this many is abandoned halfway; 0 for none.
    pub give_up_one_in: u64,
}

/// Whether requests may fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Errors {
    /// None may: no fault was injected.
    Unexpected,
    /// They may, and what was acknowledged counts all the same.
    Expected,
    /// They may for lack of space, which may become available again: then the disk continues.
    ForLackOfSpace,
}

/// A guest on one opening of a disk.
pub struct Guest {
    world: World,
    disk: Arc<dyn Manage>,
    model: Rc<RefCell<ModelDisk>>,
    errors: Errors,
    failed: Cell<u64>,
    /// A flush has failed, permanently: none may succeed, and no write either.
    latched: Cell<bool>,
    cuts: u64,
    /// Requests that were abandoned: they may still take effect.
    given_up: RefCell<Vec<Ticket>>,
}

/// After this long, nothing of an abandoned request is still running.
const AFTERMATH: Duration = Duration::from_secs(10);
/// Sectors that requests concentrate on.
const CROWD_SECTORS: u64 = 96;
/// One request in this many is a log of many.
const LOGS_ONE_IN: u64 = 40;
/// Writes of a log.
const LOG_WRITES_MAX: usize = 48;
/// How much is read at a time to see all of a disk.
const STEP_SECTORS: u64 = 512;

impl Guest {
    /// A guest on `disk`, which shows what `model` allows.
    pub fn new(
        world: &World,
        disk: Arc<dyn Manage>,
        model: &Rc<RefCell<ModelDisk>>,
        errors: Errors,
    ) -> Self {
        assert_eq!(disk.geometry().len, model.borrow().sectors() * SECTOR_BYTES, "another disk");
        Self {
            world: world.clone(),
            disk,
            model: Rc::clone(model),
            errors,
            failed: Cell::new(0),
            latched: Cell::new(false),
            cuts: world.cuts(),
            given_up: RefCell::default(),
        }
    }

    /// How many requests failed.
    pub fn failed(&self) -> u64 {
        self.failed.get()
    }

    /// Writes, zeroes, discards, flushes and reads at random.
    pub async fn run(&self, load: &Load) {
        let crowd = self.below(self.sectors());
        let task = async |_| {
            for _ in 0..load.requests {
                self.request_at_random(load, crowd).await;
            }
        };
        join_all((0..load.tasks).map(task)).await;
    }

    async fn request_at_random(&self, load: &Load, crowd: u64) {
        if self.below(8) == 0 {
            mica_rt::sleep(Duration::from_micros(self.below(400))).await;
        }
        if self.below(load.flush_one_in.max(1)) == 0 {
            return drop(self.flush().await);
        }
        if self.below(LOGS_ONE_IN) == 0 {
            return self.write_log().await;
        }
        let (first, count) = self.place_at_random(load, crowd);
        if load.give_up_one_in > 0 && self.below(load.give_up_one_in) == 0 {
            return self.give_up(first, count).await;
        }
        match self.below(20) {
            0..=9 => drop(self.write(first, count).await),
            10 | 11 => drop(self.write_zeroes(first, count, self.zeroes_at_random()).await),
            12 | 13 => drop(self.discard(first, count).await),
            _ => self.read(first, count).await,
        }
    }

    /// Writes in sequence, and waits for a flush after nearly every write, as databases do.
    async fn write_log(&self) {
        let sectors = self.sectors();
        let step: usize = [1, 1, 2, 8][usize::try_from(self.below(4)).expect("one of four")];
        let step_sectors = step as u64;
        let first = self.below(sectors) / step_sectors * step_sectors;
        for first in (first..sectors).step_by(step).take(LOG_WRITES_MAX) {
            let count = step_sectors.min(sectors - first);
            if self.write(first, count).await.is_err() {
                return;
            }
            if self.below(8) > 0 && self.flush().await.is_err() || self.below(64) == 0 {
                return;
            }
        }
    }

    fn place_at_random(&self, load: &Load, crowd: u64) -> (u64, u64) {
        let sectors = self.sectors();
        let mut count = match self.below(4) {
            0 => 1 + self.below(load.sectors_max),
            1 => 8,
            _ => 1 + self.below(load.sectors_max.min(16)),
        };
        let mut first = match self.below(3) {
            0 => self.below(sectors),
            _ => (crowd + self.below(CROWD_SECTORS)) % sectors,
        };
        // Whole units take different paths than parts do.
        if self.below(3) == 0 {
            let unit = 1 << self.below(9);
            first -= first % unit;
            count = count.next_multiple_of(unit);
        }
        (first, count.min(sectors - first))
    }

    fn zeroes_at_random(&self) -> Zeroes {
        Zeroes { may_unmap: self.below(2) == 0, fast: self.below(4) == 0 }
    }

    /// Writes `count` sectors from `first` on.
    ///
    /// # Errors
    /// Any error of the disk.
    pub async fn write(&self, first: u64, count: u64) -> Result<()> {
        let (ticket, range) = self.begin(Request::Write, first, count);
        let content = self.model.borrow().content(&ticket);
        let (result, buf) = self.disk.write(range.start(), memory(&content)).await;
        // What it took apart does not come back whole.
        let is_whole = buf.len() == content.len();
        assert!(!is_whole || *buf == content, "a write leaves its buffer as it is");
        self.end_change(&ticket, &result);
        result
    }

    /// Starts to write or to discard `count` sectors from `first` on, and drops the request.
    async fn give_up(&self, first: u64, count: u64) {
        let writes = self.below(3) > 0;
        let request = if writes { Request::Write } else { Request::Discard };
        let (ticket, range) = self.begin(request, first, count);
        let content = self.model.borrow().content(&ticket);
        let patience = Duration::from_micros(self.below(300));
        let ended = {
            let work = async {
                match writes {
                    true => self.disk.write(range.start(), memory(&content)).await.0,
                    false => self.disk.discard(range).await,
                }
            };
            mica_rt::timeout(patience, work).await
        };
        match ended {
            Ok(result) => self.end_change(&ticket, &result),
            Err(_) => {
                self.world.trace(|| format!("guest: {ticket:?} is abandoned"));
                self.given_up.borrow_mut().push(ticket);
            }
        }
    }

    /// Makes `count` sectors from `first` on read as zeros.
    ///
    /// # Errors
    /// Any error of the disk.
    pub async fn write_zeroes(&self, first: u64, count: u64, how: Zeroes) -> Result<()> {
        let (ticket, range) = self.begin(Request::Zeroes, first, count);
        let mut result = self.disk.write_zeroes(range, how).await;
        if how.fast && matches!(&result, Err(error) if is_unsupported(error)) {
            result = self.disk.write_zeroes(range, Zeroes { fast: false, ..how }).await;
        }
        self.end_change(&ticket, &result);
        result
    }

    /// Discards `count` sectors from `first` on.
    ///
    /// # Errors
    /// Any error of the disk.
    pub async fn discard(&self, first: u64, count: u64) -> Result<()> {
        let (ticket, range) = self.begin(Request::Discard, first, count);
        let result = self.disk.discard(range).await;
        self.end_change(&ticket, &result);
        result
    }

    /// Flushes.
    ///
    /// # Errors
    /// Any error of the disk.
    pub async fn flush(&self) -> Result<()> {
        let (ticket, _) = self.begin(Request::Flush, 0, 0);
        let was_latched = self.latched.get();
        let result = self.disk.flush().await;
        self.end_flush(&ticket, &result, was_latched);
        result
    }

    /// Ends the writing.
    ///
    /// # Errors
    /// Any error of the disk.
    pub async fn close(&self) -> Result<()> {
        if !self.given_up.borrow().is_empty() {
            mica_rt::sleep(AFTERMATH).await;
        }
        for ticket in self.given_up.borrow_mut().drain(..) {
            self.model.borrow_mut().end(&ticket, false);
        }
        let (ticket, _) = self.begin(Request::Flush, 0, 0);
        let was_latched = self.latched.get();
        let result = self.disk.close().await;
        self.end_flush(&ticket, &result, was_latched);
        result
    }

    /// Reads `count` sectors from `first` on and judges them.
    ///
    /// # Panics
    /// If they show what they must not.
    pub async fn read(&self, first: u64, count: u64) {
        let (ticket, range) = self.begin(Request::Read, first, count);
        let result = read(&*self.disk, range).await;
        if self.power_is_gone() {
            return;
        }
        match result {
            Ok(bytes) => {
                let judged = self.model.borrow_mut().end_read(&ticket, &bytes);
                judged.expect("reads show what was written");
            }
            Err(error) => {
                self.model.borrow_mut().end(&ticket, false);
                self.fail(Request::Read, &error);
            }
        }
    }

    /// Reads all of the disk and judges it.
    ///
    /// # Panics
    /// As [`Self::read`].
    pub async fn read_all(&self) {
        for first in (0..self.sectors()).step_by(512) {
            self.read(first, STEP_SECTORS.min(self.sectors() - first)).await;
        }
    }

    /// After a crash: reads all of the disk, judges whether that may be left, and takes it as the
    /// present contents.
    ///
    /// # Errors
    /// If it cannot be read.
    ///
    /// # Panics
    /// If it must not be left.
    pub async fn settle(&self) -> Result<()> {
        for first in (0..self.sectors()).step_by(512) {
            let range = range_of(first, STEP_SECTORS.min(self.sectors() - first));
            let bytes = read(&*self.disk, range).await?;
            let judged = self.model.borrow_mut().settle(first, &bytes);
            judged.expect("after the crash the disk shows what may be left");
        }
        Ok(())
    }

    fn sectors(&self) -> u64 {
        self.model.borrow().sectors()
    }

    fn below(&self, bound: u64) -> u64 {
        self.world.random_below(bound)
    }

    fn begin(&self, request: Request, first: u64, count: u64) -> (Ticket, GuestRange) {
        let range = range_of(first, count);
        self.world.trace(|| format!("guest: {request:?} of {count} sectors from {first}"));
        (self.model.borrow_mut().begin(request, range), range)
    }

    /// Answers given once the power is gone reach nobody.
    fn power_is_gone(&self) -> bool {
        self.world.cuts() > self.cuts
    }

    fn end_change(&self, ticket: &Ticket, result: &Result<()>) {
        if self.power_is_gone() {
            return;
        }
        if let Err(error) = result {
            self.fail(ticket.request(), error);
        }
        self.world.trace(|| format!("guest: {ticket:?} ends: {result:?}"));
        self.model.borrow_mut().end(ticket, result.is_ok());
    }

    fn end_flush(&self, ticket: &Ticket, result: &Result<()>, was_latched: bool) {
        if self.power_is_gone() {
            return;
        }
        match result {
            Ok(()) => assert!(!was_latched, "a flush succeeds after one failed"),
            Err(error) => {
                self.fail(Request::Flush, error);
                let is_full = error.kind() == mica_block::ErrorKind::NoSpace;
                if !(is_full && self.errors == Errors::ForLackOfSpace) {
                    self.latched.set(true);
                }
            }
        }
        self.world.trace(|| format!("guest: {ticket:?} ends: {result:?}"));
        self.model.borrow_mut().end(ticket, result.is_ok());
    }

    fn fail(&self, request: Request, error: &Error) {
        self.failed.set(self.failed.get() + 1);
        if self.errors == Errors::Unexpected {
            panic!("no fault was injected, but a {request:?} fails: {error:?}");
        }
    }
}

fn is_unsupported(error: &Error) -> bool {
    error.kind() == mica_block::ErrorKind::Unsupported
}

fn range_of(first: u64, count: u64) -> GuestRange {
    let start = GuestOffset::new(first * SECTOR_BYTES);
    GuestRange::new(start, count * SECTOR_BYTES).expect("a range of a small disk")
}

/// `bytes` in memory that a disk has to treat as that of a virtual machine.
fn memory(bytes: &[u8]) -> Buf {
    Buf::from_slice(bytes).into_foreign()
}

/// Reads `range` of `disk`.
///
/// # Errors
/// Any error of the disk.
///
/// # Panics
/// If the plan does not cover `range`.
pub async fn read(disk: &dyn Disk, range: GuestRange) -> Result<Vec<u8>> {
    let extents = disk.plan(range, Vec::new()).finish().await?;
    assert!(Extent::covers(&extents, range), "a plan covers what was asked");
    // Bytes that are not filled must not look right.
    let poisoned = vec![0xdd; usize::try_from(range.len()).expect("a small disk")];
    let bytes = read_extents(disk, &extents, memory(&poisoned)).await?;
    Ok(bytes.to_vec())
}
