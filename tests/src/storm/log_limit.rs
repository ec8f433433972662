//! Logs whose memory is tiny, so that they are compacted, and wrap, all the time: an option of
//! `--inject` that all programs get that open a chain's images.

use mica_units::Rng;

/// How many bytes a log has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LogLimit(u64);

impl LogLimit {
    /// One of those that logs get.
    pub(super) fn random(rng: &mut Rng) -> Self {
        Self(rng.choose(&[16, 32, 64, 64, 128, 256]) << 10)
    }

    /// What a server is told.
    pub(super) fn option(self) -> String {
        format!("redo-memory={}K", self.0 >> 10)
    }

    /// What the name of such a log ends in.
    pub(super) fn name_end(self) -> String {
        format!("-{}", self.0)
    }
}
