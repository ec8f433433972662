//! When a writer has a log ([`super::handover`]): from the first write on, as long as it can be
//! written. One that is lost, because the memory for it is full, begins anew with a later group:
//! what the image lacked before is in the file by the time that the image names the new log.
//!
//! Invariants
//! - I1 A log is begun only where nothing is dirty: while a group is being taken, or before the
//!   first write.
//! - I2 No two logs of a writer have a name in common.

use super::handover::{Footing, Log, Mark, name_after};
use super::header::LOG_NAME_SHIFT;
use super::pages::{Group, PageState, Stage};
use mica_block::{Handover, Result, Store};
use mica_units::HostOffset;
use std::sync::Arc;

/// Groups that pass at most until a log that was lost is begun again.
const WAIT_MAX: u32 = 1024;

/// The log of a writer, if it has one.
#[derive(Default)]
pub(crate) struct Logging {
    /// Where it goes; none before the first write.
    out: Option<Arc<dyn Handover>>,
    /// The image file, and the data file if there is one.
    stores: Vec<Arc<dyn Store>>,
    log: Option<Log>,
    /// The last name that was given.
    name: u32,
    /// The image's autoclear bits that are no name.
    low_bits: u64,
    /// Groups until a lost log is begun again, now and after the next loss.
    wait: u32,
    next_wait: u32,
}

impl Logging {
    /// Begins the log of a writer that has written nothing yet to the image in `stores`; its name
    /// is one after `name`. Gives the autoclear bits of the image: `low_bits`, and the name if
    /// there is a log.
    pub(crate) fn begin(
        &mut self,
        out: Arc<dyn Handover>,
        stores: Vec<Arc<dyn Store>>,
        (name, low_bits): (u32, u64),
    ) -> u64 {
        (self.out, self.stores) = (Some(out), stores);
        (self.name, self.low_bits) = (name, low_bits);
        self.begin_log(&Footing::default());
        let name = self.log.as_ref().map_or(0, Log::name);
        low_bits | u64::from(name) << LOG_NAME_SHIFT
    }

    fn begin_log(&mut self, footing: &Footing) {
        let Some(out) = &self.out else { return };
        self.name = name_after(self.name);
        match Log::begin(Arc::clone(out), self.stores.clone(), self.name, footing) {
            Ok(log) => self.log = Some(log),
            Err(error) => self.lost(&error),
        }
    }

    /// There is no log, for some time.
    fn lost(&mut self, error: &mica_block::Error) {
        tracing::warn!(%error, "if this process is killed, writes since the last flush are lost");
        self.wait = self.next_wait;
        self.next_wait = (self.next_wait * 2).clamp(1, WAIT_MAX);
    }

    /// `len` bytes at `at` are being changed.
    pub(crate) fn touch(&mut self, at: HostOffset, len: usize, stage: Stage) {
        if let Some(log) = &mut self.log {
            log.touch(at, len, stage);
        }
    }

    /// The file has, or is about to get, the page at `at` as it is in `page`.
    pub(crate) fn expect(&mut self, at: u64, page: &[u8]) {
        if let Some(log) = &mut self.log {
            log.expect(at, page);
        }
    }

    /// Whether it is time to flush, so that it does not become full.
    pub(crate) fn is_long(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_long)
    }

    /// The image's autoclear bits under the name that a group gives it.
    pub(crate) fn bits_of(&self, mark: &Mark) -> Option<u64> {
        self.log.as_ref()?;
        Some(self.low_bits | u64::from(mark.name) << LOG_NAME_SHIFT)
    }

    /// Keeps `log`, unless it failed; what the outcome gives.
    fn keep<T>(&mut self, log: Log, outcome: Result<T>) -> Option<T> {
        match outcome {
            Ok(done) => {
                self.log = Some(log);
                Some(done)
            }
            Err(error) => {
                log.remove();
                self.lost(&error);
                None
            }
        }
    }

    /// A group is being taken, all of which is in the log, if there is one.
    fn take_group(&mut self, has_pages: bool, footing: &Footing) -> Option<Mark> {
        match self.log.take() {
            Some(log) if !has_pages && log.is_empty() => {
                self.log = Some(log);
                None
            }
            Some(mut log) => {
                let mark = log.mark(footing);
                self.name = log.name();
                self.keep(log, mark)
            }
            None if self.wait > 0 => {
                self.wait -= 1;
                None
            }
            None => {
                self.begin_log(footing);
                self.log.as_ref().map(Log::first_mark)
            }
        }
    }

    /// The image could not be given the name of a group.
    pub(crate) fn not_named(&mut self, error: &mica_block::Error) {
        if let Some(log) = self.log.take() {
            log.remove();
            self.lost(error);
        }
    }

    /// A group becomes a part of the next one: a log that goes on from it goes on from nothing.
    pub(super) fn put_back(&mut self, taken: &Group) {
        if let Some(mark) = &taken.logged
            && let Some(log) = self.log.take_if(|_| mark.is_first)
        {
            log.remove();
        }
    }

    /// There is no log any more, and none will be.
    pub(crate) fn end(&mut self) {
        self.out = None;
        if let Some(log) = self.log.take() {
            log.remove();
        }
    }
}

impl PageState {
    /// Has all of a metadata cluster written down that is here and in the file, and that no group
    /// writes.
    pub(super) fn log_cluster(&mut self, at: HostOffset, len: u64) {
        let page_bytes = self.page_bytes();
        let page_len = usize::try_from(page_bytes).expect("4 KiB");
        for page in (at.bytes()..at.bytes() + len).step_by(page_len) {
            self.expect_page(page);
            self.logging.touch(HostOffset::new(page), page_len, Stage::Early);
        }
    }

    /// The file has, or is about to get, the page `number` as it is here.
    fn expect_page(&mut self, number: u64) {
        if let Some(page) = self.pages.get(&number) {
            self.logging.expect(number, &page.bytes);
        }
    }

    /// Writes down what changed and is not in the log yet.
    pub(crate) fn log_touched(&mut self, footing: &Footing) {
        if self.logging.log.as_ref().is_some_and(Log::is_behind) {
            self.log_footing(footing);
        }
    }

    /// The same, and what is unused now even if nothing changed.
    pub(crate) fn log_footing(&mut self, footing: &Footing) {
        if let Some(mut log) = self.logging.log.take() {
            let appended = log.append(|at, len| self.get(at, len), footing);
            self.logging.keep(log, appended);
        }
    }

    /// How far the log goes for a group that is taken.
    pub(super) fn mark_log(&mut self, footing: &Footing) -> Option<Mark> {
        self.log_touched(footing);
        let has_pages = self.dirty_count() > 0;
        if has_pages && self.logging.log.is_some() {
            // While they are written the file has either.
            let numbers: Vec<_> = self.early.iter().chain(&self.late).copied().collect();
            numbers.into_iter().for_each(|number| self.expect_page(number));
            self.log_footing(footing);
        }
        self.logging.take_group(has_pages, footing)
    }

    /// What the log has up to `taken` is durable.
    pub(crate) fn forget_logged(&mut self, taken: &Group, footing: &Footing) {
        if let Some(mark) = &taken.logged
            && let Some(mut log) = self.logging.log.take()
        {
            let forgotten = log.forget(mark, footing);
            if self.logging.keep(log, forgotten).is_some() {
                // There is memory again.
                self.logging.next_wait = 0;
            }
        }
    }
}
