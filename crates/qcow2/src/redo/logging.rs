//! The lifetime of a writer's log: it exists from the first write on, as long as it can be written.
//! A log that is lost because the memory for it is full is restarted with a later group: everything
//! that the image lacked before is in the file by the time the image names the new log.
//!
//! Invariants
//! - I1 A log begins only when nothing is dirty: while a group is being taken, or before the first
//!   write.
//! - I2 No two logs of a writer share a name.
//! - I3 While the image names a log that is gone, neither pages nor the header are written: should
//!   that log come back, the image would be taken for what it was. The name goes first.

use super::Stage;
use super::baseline::LogBaseline;
use super::format::{LOG_NAME_SHIFT, name_after, names_log};
use super::log::{Log, Mark};
use mica_block::{RedoMemory, Result, Store};
use mica_units::HostOffset;
use std::sync::Arc;

/// Groups that pass at most until a lost log is restarted.
const WAIT_MAX: u32 = 1024;

/// The proof that the log allows the pending write to the header. Only this file creates one, and
/// no write of the header compiles without it.
#[must_use = "the header may be written now"]
pub(crate) struct HeaderLogged {
    _made_here: (),
}

/// The log that the header of the image names.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Named {
    #[default]
    Nothing,
    /// The one that is being written.
    Present,
    /// One that was lost.
    Gone,
}

/// The log of a writer, if it has one.
#[derive(Default)]
pub(crate) struct Logging {
    /// The place for it; `None` before the first write.
    out: Option<Arc<dyn RedoMemory>>,
    /// The image file, and the data file if there is one.
    stores: Vec<Arc<dyn Store>>,
    log: Option<Log>,
    /// Size of the pages of metadata.
    page_bytes: u64,
    named: Named,
    /// The last name that was used.
    name: u32,
    /// The image's autoclear bits that are not part of a name.
    low_bits: u64,
    /// Groups until a lost log is restarted, now and after the next loss.
    wait: u32,
    next_wait: u32,
}

impl Logging {
    /// Begins the log of a writer that has not yet written to the image in `stores`; its name comes
    /// after `name`. Returns the autoclear bits of the image: `low_bits`, and the name if there is
    /// a log.
    pub(crate) fn begin(
        &mut self,
        out: Arc<dyn RedoMemory>,
        stores: Vec<Arc<dyn Store>>,
        (name, low_bits): (u32, u64),
        page_bytes: u64,
    ) -> u64 {
        (self.out, self.stores, self.page_bytes) = (Some(out), stores, page_bytes);
        (self.name, self.low_bits) = (name, low_bits);
        self.begin_log();
        let name = self.log.as_ref().map_or(0, Log::name);
        low_bits | u64::from(name) << LOG_NAME_SHIFT
    }

    fn begin_log(&mut self) {
        let Some(out) = &self.out else { return };
        self.name = name_after(self.name);
        match Log::begin(Arc::clone(out), self.stores.clone(), self.name, self.page_bytes) {
            Ok(log) => self.log = Some(log),
            Err(error) => self.lost(&error),
        }
    }

    /// There is no log for a while.
    fn lost(&mut self, error: &mica_block::Error) {
        tracing::warn!(?error, "if this process is killed, writes since the last flush are lost");
        self.forsake_name();
        self.wait = self.next_wait;
        self.next_wait = (self.next_wait * 2).clamp(1, WAIT_MAX);
    }

    /// The log that the image may name is gone.
    fn forsake_name(&mut self) {
        if self.named == Named::Present {
            self.named = Named::Gone;
        }
    }

    /// The autoclear bits without a name, if the image names a log that is gone (I3).
    pub(crate) fn bits_without_name(&self) -> Option<u64> {
        (self.named == Named::Gone).then_some(self.low_bits)
    }

    /// Takes note that the header has these autoclear `bits`.
    pub(crate) fn note_bits(&mut self, bits: u64) {
        self.named = match (names_log(bits), &self.log) {
            (None, _) => Named::Nothing,
            (Some(_), Some(_)) => Named::Present,
            (Some(_), None) => Named::Gone,
        };
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

    /// The page that was last expected is about to be written outside of a group.
    pub(crate) fn begin_page_write(&mut self) {
        if let Some(log) = &mut self.log {
            log.begin_page_write();
        }
    }

    /// Notes that a page was written.
    pub(crate) fn end_page_write(&mut self) {
        if let Some(log) = &mut self.log {
            log.end_page_write();
        }
    }

    /// Whether it is time to flush, before the log becomes full.
    pub(crate) fn is_long(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_long)
    }

    /// Whether nobody may change anything before a flush, lest the log becomes full.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_nearly_full)
    }

    /// The image's autoclear bits under the name that a group gives it.
    pub(crate) fn bits_of(&self, mark: &Mark) -> Option<u64> {
        self.log.as_ref()?;
        Some(self.low_bits | u64::from(mark.name) << LOG_NAME_SHIFT)
    }

    /// Keeps `log`, unless it failed; returns the value of the outcome.
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

    /// A group is being taken, which writes or frees something or not; all of it is in the log, if
    /// there is one.
    pub(crate) fn take_group(&mut self, does_anything: bool) -> Option<Mark> {
        match self.log.take() {
            Some(log) if !does_anything && log.is_empty() => {
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
                self.log.as_mut().map(Log::first_mark)
            }
        }
    }

    /// Whether the image had the name of the log already before the last changes in it.
    pub(crate) fn wants_name(&self) -> bool {
        self.is_named() && self.log.as_ref().is_some_and(Log::has_news)
    }

    /// Gives the log one more name, if the image names it. Returns the image's autoclear bits with
    /// that name; [`Self::end_rename`] follows when it has them.
    pub(crate) fn begin_rename(&mut self) -> Option<(u64, HeaderLogged)> {
        if !self.is_named() {
            return None;
        }
        let mut log = self.log.take()?;
        let taken = log.take_name();
        self.name = log.name();
        self.keep(log, taken)?;
        let bits = self.low_bits | u64::from(self.name) << LOG_NAME_SHIFT;
        Some((bits, self.allow_name(bits)))
    }

    /// The image has the name of [`Self::begin_rename`].
    pub(crate) fn end_rename(&mut self) {
        if let Some(mut log) = self.log.take() {
            let dropped = log.drop_old_name();
            self.keep(log, dropped);
        }
    }

    /// The image could not be given the name of [`Self::begin_rename`].
    pub(crate) fn not_renamed(&mut self) {
        self.log.iter_mut().for_each(Log::keep_old_name);
    }

    /// The image could not be given the name of a group. A log that it already names continues
    /// under that name; one that began with the group is dropped.
    pub(crate) fn not_named(&mut self, mark: &Mark, error: &mica_block::Error) {
        if let Some(log) = self.log.take_if(|_| mark.is_first) {
            log.remove();
            self.lost(error);
        }
        self.not_renamed();
    }

    /// A group is merged into the next one: a log that builds on it has lost its baseline.
    pub(crate) fn put_back(&mut self, mark: Option<Mark>) {
        if let Some(mark) = mark
            && let Some(log) = self.log.take_if(|_| mark.is_first)
        {
            log.remove();
            self.forsake_name();
        }
        self.not_renamed();
    }

    /// Whether there is a log to record what is touched.
    pub(crate) fn is_on(&self) -> bool {
        self.log.is_some()
    }

    /// Whether there is such a log, and the image names it, so that it counts.
    pub(crate) fn is_named(&self) -> bool {
        self.log.is_some() && self.named == Named::Present
    }

    /// Whether something was touched that is not recorded yet.
    pub(crate) fn is_behind(&self) -> bool {
        self.log.as_ref().is_some_and(Log::is_behind)
    }

    /// Records what was touched, as in `content`, and what is new in `baseline`.
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

    /// Compacts a log in which everything is recorded. Returns whether that left room.
    pub(crate) fn compact<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) -> bool {
        let Some(mut log) = self.log.take() else { return false };
        let compacted = log.compact(content, baseline);
        self.keep(log, compacted) == Some(true)
    }

    /// Whether there is a log that could be compacted without the page at `at`, which is dirty.
    pub(crate) fn misses(&self, at: u64) -> bool {
        self.log.as_ref().is_some_and(|log| log.misses(at))
    }

    /// Records what the header is about to hold, as in `baseline`.
    pub(crate) fn append_header<'a>(
        &mut self,
        content: impl Fn(HostOffset, usize) -> Option<&'a [u8]>,
        baseline: &LogBaseline,
    ) -> HeaderLogged {
        debug_assert!(baseline.header.next.is_some());
        self.append(content, baseline);
        HeaderLogged { _made_here: () }
    }

    /// The header is about to get these autoclear `bits`: the log already answers to the name in
    /// them, or they hold none.
    pub(crate) fn allow_name(&self, bits: u64) -> HeaderLogged {
        let name = names_log(bits);
        let own = self.log.as_ref().map(Log::name);
        assert!(name.is_none() || name == own, "the header names this log or none");
        HeaderLogged { _made_here: () }
    }

    /// The header is about to get or lose a mark that no log covers: dirty or corrupt.
    pub(crate) fn allow_marks(&self) -> HeaderLogged {
        HeaderLogged { _made_here: () }
    }

    /// Everything in the log up to `mark` is durable.
    pub(crate) fn forget(&mut self, mark: &Mark) {
        if let Some(mut log) = self.log.take() {
            let forgotten = log.forget(mark);
            if self.keep(log, forgotten).is_some() {
                // Memory is available again.
                self.next_wait = 0;
            }
        }
    }

    /// There is no log any more, and there will be none.
    pub(crate) fn end(&mut self) {
        self.out = None;
        if let Some(log) = self.log.take() {
            log.remove();
        }
    }
}
