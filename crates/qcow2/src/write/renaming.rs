//! Another name for a redo log that goes on for long without a flush.
//!
//! The name identifies a state of the image, so that a copy of it that is put back in its place
//! has no log ([`redo`](crate::redo)). Each group of the guest's flushes changes it; a guest
//! that does not flush would keep it for as long as it likes, and a copy that is made meanwhile
//! would get links to data that it does not have. So the image gets another name right after a
//! change that the log has under the present one, but only a few times a second. That is one
//! small write, for which no write of the guest waits; a power cut ends the log, so nothing is
//! synced.
//!
//! ```text
//! log: old, new ─▶ image: new ─▶ log: new, with all that it has
//! ```
//!
//! Invariants
//! - I1 The log answers to the image's name at any moment.
//! - I2 A copy of the image that was begun before a change which the log has had for
//!   [`RENAME_PAUSE`] does not have the name of the log. If the file cannot be written, or a group
//!   takes longer, or the request that made the change is held up before it notes that, it is
//!   later by that.
//! - I3 Nothing gives the image a name while a group does, while its header is replaced, or while
//!   the writing ends: all of them have the claim to write pages, and this waits for no claim.
//! - I4 The task that waits keeps neither the writer nor its file open.
//! - I5 If the task is dropped, with the executor of a merge for one, the next change begins
//!   another. If that is while it writes the name, the log answers to both, and one more follows
//!   the one that may be there already.

use super::Writer;
use super::pages::PageState;
use mica_block::ErrorKind;
use mica_qcow2_format::field;
use mica_units::HostOffset;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long the log keeps a name at least.
const RENAME_PAUSE: Duration = Duration::from_millis(200);

/// What is known of the need for another name.
#[derive(Default)]
pub(super) struct LogRenaming {
    /// Whether the log had changes under its name at the last link.
    is_due: AtomicBool,
    /// Whether a task waits to give it another one.
    is_under_way: AtomicBool,
}

impl LogRenaming {
    /// Takes note of the `pages` after a change.
    pub(super) fn note(&self, pages: &PageState) {
        if pages.logging.wants_name() {
            self.is_due.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the caller is to begin [`rename_while_it_changes`].
    #[inline]
    pub(super) fn begin(&self) -> bool {
        self.is_due.load(Ordering::Relaxed) && !self.is_under_way.swap(true, Ordering::Relaxed)
    }
}

/// Gives the log of `writer` another name, and again for as long as it goes on.
pub(super) async fn rename_while_it_changes(writer: Weak<Writer>) {
    let mut under_way = UnderWay(Weak::clone(&writer));
    loop {
        let Some(writing) = writer.upgrade() else { return };
        writing.rename_log().await;
        drop(writing);
        mica_rt::sleep(RENAME_PAUSE).await;
        let Some(writer) = writer.upgrade() else { return };
        let pages = writer.metadata.lock();
        if !pages.logging.wants_name() || writer.metadata.failure().is_some() {
            // What is changed from here on is noted under the same lock.
            writer.renaming.is_due.store(false, Ordering::Relaxed);
            writer.renaming.is_under_way.store(false, Ordering::Relaxed);
            under_way.0 = Weak::new();
            return;
        }
    }
}

/// The task of a writer, which may be dropped (I5).
struct UnderWay(Weak<Writer>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(writer) = self.0.upgrade() {
            writer.renaming.is_under_way.store(false, Ordering::Relaxed);
        }
    }
}

impl Writer {
    /// Gives the log another name, unless somebody is about to do so, or to take it away.
    async fn rename_log(&self) {
        let metadata = &self.metadata;
        let Some(_group) = metadata.page_writes.try_claim(0) else { return };
        let Some(_claim) = metadata.header_changes.try_claim(0) else { return };
        let begun = {
            let mut pages = metadata.lock();
            let wants = pages.logging.wants_name() && metadata.failure().is_none();
            wants.then(|| (pages.logging.begin_rename(), pages.page_bytes()))
        };
        let Some((Some((bits, logged)), page_bytes)) = begun else { return };
        self.counters.metadata_bytes.fetch_add(page_bytes, Ordering::Relaxed);
        let at = HostOffset::new(field::AUTOCLEAR as u64);
        match metadata.write_header(logged, &bits.to_be_bytes(), at).await {
            Ok(()) => {
                let mut pages = metadata.lock();
                pages.logging.note_bits(bits);
                pages.logging.end_rename();
            }
            // The log answers to both names.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                metadata.lock().logging.not_renamed();
            }
            Err(error) => self.fail(&error),
        }
    }
}
