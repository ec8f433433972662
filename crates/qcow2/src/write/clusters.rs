//! Whole clusters of metadata: new tables, and clusters that nothing names any more.

use super::pages::{PAGE_BITS_MAX, Page, PageState};
use crate::redo::Stage;
use mica_units::HostOffset;
use std::cell::Cell;

/// A page of zeros.
pub(crate) static ZEROS: [u8; 1 << PAGE_BITS_MAX] = [0; 1 << PAGE_BITS_MAX];

/// What the file holds where a metadata cluster is put.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Beneath<'a> {
    /// The same bytes.
    Same,
    /// Zeros.
    Blank,
    /// These bytes.
    Old(&'a [u8]),
}

impl PageState {
    /// Puts a whole metadata cluster in, as `bytes` or as zeros; dirty and early unless the file
    /// already holds exactly that.
    pub(crate) fn put_cluster(
        &mut self,
        at: HostOffset,
        len: u64,
        bytes: Option<&[u8]>,
        beneath: Beneath<'_>,
    ) {
        let dirty = beneath != Beneath::Same;
        let page_bytes = usize::try_from(self.page_bytes()).expect("4 KiB");
        for (number, start) in
            (at.bytes()..at.bytes() + len).step_by(page_bytes).zip((0..).step_by(page_bytes))
        {
            let content: Box<[u8]> = match bytes {
                Some(bytes) => bytes[start..start + page_bytes].into(),
                None => vec![0; page_bytes].into(),
            };
            self.forget_dirty(number);
            if dirty {
                let old = match beneath {
                    Beneath::Old(old) => &old[start..start + page_bytes],
                    _ => &ZEROS[..page_bytes],
                };
                self.logging.expect(number, old);
                self.logging.touch(HostOffset::new(number), page_bytes, Stage::Early);
            }
            let stage = dirty.then_some(Stage::Early);
            let page = Page { bytes: content, dirty: stage, writing: false, used: Cell::new(true) };
            if self.pages.insert(number, page).is_none() {
                self.order.push_back(number);
            }
            if dirty {
                self.early.insert(number);
            }
        }
        self.evict();
    }

    /// Drops the pages of a metadata cluster that nothing names any more, dirty or not.
    pub(crate) fn drop_cluster(&mut self, at: HostOffset, len: u64) {
        let page_bytes = usize::try_from(self.page_bytes()).expect("4 KiB");
        for number in (at.bytes()..at.bytes() + len).step_by(page_bytes) {
            self.forget_dirty(number);
            self.pages.remove(&number);
        }
        self.order.retain(|number| self.pages.contains_key(number));
    }
}
