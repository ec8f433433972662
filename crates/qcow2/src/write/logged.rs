//! What the log records of the pages, and when.

use super::pages::{Group, PageState};
use crate::redo::{HeaderLogged, LogBaseline, Mark, SpaceState, Stage};
use mica_rt::Buf;
use mica_units::HostOffset;

impl PageState {
    /// Marks the resident parts of a metadata cluster for the log, if they are in the file and no
    /// group is writing them.
    pub(super) fn log_cluster(&mut self, at: HostOffset, len: u64) {
        let page_bytes = self.page_bytes();
        let page_len = usize::try_from(page_bytes).expect("4 KiB");
        for page in (at.bytes()..at.bytes() + len).step_by(page_len) {
            self.expect_page(page);
            self.logging.touch(HostOffset::new(page), page_len, Stage::Early);
        }
    }

    /// The file has, or is about to get, page `number` as it is here.
    fn expect_page(&mut self, number: u64) {
        if let Some(page) = self.pages.get(&number) {
            self.logging.expect(number, &page.bytes);
        }
    }

    /// The baseline of the log, with the clusters as in `space`.
    fn baseline(&self, space: SpaceState) -> LogBaseline {
        LogBaseline { header: self.header, space }
    }

    /// Logs changes that are not in the log yet.
    pub(crate) fn log_touched(&mut self, space: impl FnOnce() -> SpaceState) {
        if self.logging.is_behind() {
            self.log_state(space());
        }
    }

    /// As [`Self::log_touched`], and the unused clusters even if nothing changed.
    pub(super) fn log_state(&mut self, space: SpaceState) {
        let baseline = self.baseline(space);
        let mut logging = std::mem::take(&mut self.logging);
        logging.append(|at, len| self.get(at, len), &baseline);
        self.logging = logging;
    }

    /// Makes a log that is long shorter, if that can be done without a flush. Returns whether it
    /// was done.
    pub(super) fn compact_log(&mut self, space: SpaceState) -> bool {
        // The pages have changes that the log must not have.
        if self.group.has_unlogged {
            return false;
        }
        self.log_touched(|| space.clone());
        let baseline = self.baseline(space);
        let mut logging = std::mem::take(&mut self.logging);
        let compacted = logging.compact(|at, len| self.get(at, len), &baseline);
        self.logging = logging;
        compacted
    }

    /// Logs what the header is about to hold, as in [`PageState::header`].
    pub(super) fn log_header(&mut self, space: SpaceState) -> HeaderLogged {
        let baseline = self.baseline(space);
        let mut logging = std::mem::take(&mut self.logging);
        let logged = logging.append_header(|at, len| self.get(at, len), &baseline);
        self.logging = logging;
        logged
    }

    /// The extent of the log for the group that is `taken`. What a group frees may be overwritten
    /// after it, and its log must not expect that any more, even if it has no pages.
    pub(super) fn mark_log(&mut self, space: SpaceState, taken: &Group) -> Option<Mark> {
        let does_anything = self.dirty_count() > 0 || !taken.freed.is_empty();
        if self.logging.is_on() && (does_anything || self.logging.is_behind()) {
            // While they are being written the file has either.
            let late = Some(&self.late).filter(|_| !taken.in_two_steps).into_iter().flatten();
            let numbers: Vec<_> = self.early.iter().chain(late).copied().collect();
            numbers.into_iter().for_each(|number| self.expect_page(number));
            self.log_state(space);
        }
        self.logging.take_group(does_anything)
    }

    /// The page at `at` is about to be written as it is now, outside of any group. Returns its
    /// bytes, if it is in memory; [`Self::end_page_write`] follows.
    pub(super) fn begin_page_write(
        &mut self,
        at: HostOffset,
        space: impl FnOnce() -> SpaceState,
    ) -> Option<Buf> {
        let bytes = Buf::from_slice(&self.pages.get(&at.bytes())?.bytes);
        if self.logging.is_on() {
            self.expect_page(at.bytes());
            self.logging.begin_page_write();
            self.log_state(space());
        }
        Some(bytes)
    }

    /// What [`Self::begin_page_write`] gave is in the file.
    pub(super) fn end_page_write(&mut self) {
        self.logging.end_page_write();
    }

    /// The links of a group, which are these `pages`, are about to be written: the file has either.
    pub(super) fn expect_links(&mut self, pages: &[(HostOffset, Buf)], space: SpaceState) {
        if self.logging.is_on() {
            let page_len = usize::try_from(self.page_bytes()).expect("4 KiB");
            for (at, bytes) in pages {
                let places = (at.bytes()..).step_by(page_len);
                for (at, page) in places.zip(bytes.chunks(page_len)) {
                    self.logging.expect(at, page);
                }
            }
            self.log_state(space);
        }
    }

    /// Everything in the log up to `taken` is durable. Its baseline is logged at once: an empty log
    /// changes nothing, and the counted but unused clusters would leak.
    pub(crate) fn forget_logged(&mut self, taken: &Group, space: SpaceState) {
        let Some(mark) = &taken.logged else { return };
        if self.logging.is_on() {
            self.logging.forget(mark);
            self.log_state(space);
        }
    }
}

#[cfg(test)]
mod tests;
