//! When a writer has a log: from the first write on, as long as it can be
//! written. One that is lost, because the memory for it is full, begins anew with a later group:
//! what the image lacked before is in the file by the time that the image names the new log.
//!
//! Invariants
//! - I1 A log is begun only where nothing is dirty: while a group is being taken, or before the
//!   first write.
//! - I2 No two logs of a writer have a name in common.

use super::Stage;
use super::baseline::LogBaseline;
use super::format::{LOG_NAME_SHIFT, name_after, names_log};
use super::log::{Log, Mark};
use mica_block::{RedoMemory, Result, Store};
use mica_units::HostOffset;
use std::sync::Arc;

/// Groups that pass at most until a log that was lost is begun again.
const WAIT_MAX: u32 = 1024;

/// The proof that the log allows what is about to be written into the header. Only this file makes
/// one, and no write of the header compiles without it.
#[must_use = "the header may be written now"]
pub(crate) struct HeaderLogged {
    _made_here: (),
}

/// The log of a writer, if it has one.
#[derive(Default)]
pub(crate) struct Logging {
    /// Where it goes; none before the first write.
    out: Option<Arc<dyn RedoMemory>>,
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
        out: Arc<dyn RedoMemory>,
        stores: Vec<Arc<dyn Store>>,
        (name, low_bits): (u32, u64),
    ) -> u64 {
        (self.out, self.stores) = (Some(out), stores);
        (self.name, self.low_bits) = (name, low_bits);
        self.begin_log();
        let name = self.log.as_ref().map_or(0, Log::name);
        low_bits | u64::from(name) << LOG_NAME_SHIFT
    }

    fn begin_log(&mut self) {
        let Some(out) = &self.out else { return };
        self.name = name_after(self.name);
        match Log::begin(Arc::clone(out), self.stores.clone(), self.name) {
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
    pub(crate) fn take_group(&mut self, has_pages: bool) -> Option<Mark> {
        match self.log.take() {
            Some(log) if !has_pages && log.is_empty() => {
                self.log = Some(log);
                None
            }
            Some(mut log) => {
                let mark = log.mark();
                self.name = log.name();
                self.keep(log, mark)
            }
            None if self.wait > 0 => {
                self.wait -= 1;
                None
            }
            None => {
                self.begin_log();
                self.log.as_ref().map(Log::first_mark)
            }
        }
    }

    /// The image could not be given the name of a group. A log that it names already goes on under
    /// that name; one that was begun with the group is no log.
    pub(crate) fn not_named(&mut self, mark: &Mark, error: &mica_block::Error) {
        if let Some(log) = self.log.take_if(|_| mark.is_first) {
            log.remove();
            self.lost(error);
        }
    }

    /// A group becomes a part of the next one: a log that goes on from it goes on from nothing.
    pub(crate) fn put_back(&mut self, mark: Option<Mark>) {
        if let Some(mark) = mark
            && let Some(log) = self.log.take_if(|_| mark.is_first)
        {
            log.remove();
        }
    }

    /// Whether there is a log that takes what is touched.
    pub(crate) fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Whether something was touched that is not written down.
    pub(crate) fn is_behind(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_behind)
    }

    /// Writes down what was touched, as `content` has it, and what is new of `baseline`.
    pub(crate) fn append<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) {
        if let Some(mut log) = self.log.take() {
            let appended = log.append(content, baseline);
            self.keep(log, appended);
        }
    }

    /// The log says what the header is about to say: `baseline` has it.
    pub(crate) fn append_header<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) -> HeaderLogged {
        debug_assert!(baseline.header.next.is_some());
        self.append(content, baseline);
        HeaderLogged { _made_here: () }
    }

    /// The header is about to say these autoclear `bits`: the log goes by the name in them already,
    /// or they have none.
    pub(crate) fn allow_name(&self, bits: u64) -> HeaderLogged {
        let name = names_log(bits);
        let own = self.log.as_ref().map(Log::name);
        assert!(name.is_none() || name == own, "the header names this log, or none");
        HeaderLogged { _made_here: () }
    }

    /// The header is about to get or lose a mark that no log speaks of: that it is dirty, or
    /// corrupt.
    pub(crate) fn allow_marks(&self) -> HeaderLogged {
        HeaderLogged { _made_here: () }
    }

    /// What the log has up to `mark` is durable.
    pub(crate) fn forget(&mut self, mark: &Mark) {
        if let Some(mut log) = self.log.take() {
            let forgotten = log.forget(mark);
            if self.keep(log, forgotten).is_some() {
                // There is memory again.
                self.next_wait = 0;
            }
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
