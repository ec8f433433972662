//! What of the pages is written down in the log, and when.

use super::pages::{Group, PageState};
use crate::redo::{HeaderLogged, LogBaseline, Mark, SpaceState, Stage};
use mica_units::HostOffset;

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

    /// What the log goes on from, with the clusters as `space` says.
    fn baseline(&self, space: SpaceState) -> LogBaseline {
        LogBaseline { header: self.header, space }
    }

    /// Writes down what changed and is not in the log yet.
    pub(crate) fn log_touched(&mut self, space: impl FnOnce() -> SpaceState) {
        if self.logging.is_behind() {
            self.log_state(space());
        }
    }

    /// The same, and what is unused now even if nothing changed.
    fn log_state(&mut self, space: SpaceState) {
        let baseline = self.baseline(space);
        let mut logging = std::mem::take(&mut self.logging);
        logging.append(|at, len| self.get(at, len), &baseline);
        self.logging = logging;
    }

    /// The log says what the header is about to say: [`PageState::header`] has it.
    pub(super) fn log_header(&mut self, space: SpaceState) -> HeaderLogged {
        let baseline = self.baseline(space);
        let mut logging = std::mem::take(&mut self.logging);
        let logged = logging.append_header(|at, len| self.get(at, len), &baseline);
        self.logging = logging;
        logged
    }

    /// How far the log goes for a group that is taken.
    pub(super) fn mark_log(&mut self, space: SpaceState) -> Option<Mark> {
        let has_pages = self.dirty_count() > 0;
        if self.logging.is_on() && (has_pages || self.logging.is_behind()) {
            self.log_state(space.clone());
            // While they are written the file has either.
            let numbers: Vec<_> = self.early.iter().chain(&self.late).copied().collect();
            numbers.into_iter().for_each(|number| self.expect_page(number));
            self.log_state(space);
        }
        self.logging.take_group(has_pages)
    }

    /// What the log has up to `taken` is durable. What it goes on from is written down at once: a
    /// log that says nothing changes nothing, and what is counted and unused would leak.
    pub(crate) fn forget_logged(&mut self, taken: &Group, space: SpaceState) {
        let Some(mark) = &taken.logged else { return };
        if self.logging.is_on() {
            self.logging.forget(mark);
            self.log_state(space);
        }
    }
}
