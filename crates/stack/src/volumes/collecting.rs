//! What is known of a store for collecting it in the background, and what came of that.

use mica_block::Error;
use mica_rt::Instant;
use mica_volume::{Collected, Volume, VolumeName};
use std::collections::BTreeMap;
use std::sync::Weak;

/// What was collected in a store, since the process began to.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Collection {
    /// The store.
    pub store: String,
    /// Passes that came to their end.
    pub passes: u64,
    /// Passes that failed.
    pub failures: u64,
    /// Why the last one did, if it did.
    pub failure: Option<String>,
    /// How long the last one took, in milliseconds.
    pub last_ms: u64,
    /// Bytes of extents that were deleted.
    pub freed_bytes: u64,
    /// Bytes that were given back within others.
    pub punched_bytes: u64,
    /// Bytes that were written again.
    pub rewritten_bytes: u64,
    /// Bytes of extents that were there after the last pass.
    pub bytes: u64,
    /// Of these, what is needed.
    pub live_bytes: u64,
}

/// What is known of one store for collecting it.
#[derive(Default)]
pub(super) struct Collecting {
    /// The volumes that this process has open for writing, and how much each has put.
    pub(super) open: BTreeMap<VolumeName, (Weak<Volume>, u64)>,
    /// Bytes that were put since the last pass.
    pub(super) put_bytes: u64,
    pub(super) last: Option<Instant>,
    pub(super) rest_until: Option<Instant>,
    pub(super) figures: Collection,
}

/// What a pass did.
pub(super) struct Passed {
    /// What its collections did that came to their end.
    pub(super) collected: Collected,
    /// Bytes that were written again between them.
    pub(super) rewritten: u64,
    /// Why the second did not come to its end.
    pub(super) failed: Option<Error>,
}

impl Collection {
    /// A pass did this.
    pub(super) fn note(&mut self, passed: &Passed) {
        let Passed { collected, rewritten, failed } = passed;
        self.failure = collected.failure.as_ref().map(|failure| failure.in_one_line());
        self.freed_bytes += collected.freed_bytes;
        self.punched_bytes += collected.punched_bytes;
        self.rewritten_bytes += rewritten;
        (self.bytes, self.live_bytes) = (collected.bytes, collected.live_bytes);
        match failed {
            None => self.passes += 1,
            Some(error) => self.note_failure(error),
        }
    }

    /// A pass failed.
    pub(super) fn note_failure(&mut self, error: &Error) {
        self.failures += 1;
        let why = error.in_one_line();
        tracing::warn!(store = self.store, "not collected: {why}");
        self.failure = Some(why);
    }
}
