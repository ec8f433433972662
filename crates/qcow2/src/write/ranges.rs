//! Where an image's metadata is, so that no data is ever written over it, whatever an image's
//! refcounts and tables claim.

use mica_block::{Error, ErrorKind, Result};
use mica_units::HostOffset;
use std::collections::{BTreeMap, HashSet};
use std::sync::{PoisonError, RwLock};

/// Ranges of the image file that hold metadata, by their start.
#[derive(Default)]
pub(crate) struct MetadataRanges {
    ranges: RwLock<BTreeMap<u64, (u64, &'static str)>>,
    /// Starts of tables and blocks that lie over other metadata, or beyond the file: nothing is
    /// written to these.
    contested: RwLock<HashSet<u64>>,
}

impl MetadataRanges {
    /// From now on `what` is at `at`. If other metadata is there, it is contested.
    pub(crate) fn add(&self, at: HostOffset, len: u64, what: &'static str) {
        if len == 0 {
            return;
        }
        if self.check(at, len).is_err() {
            self.contest(at);
            return;
        }
        let mut ranges = self.ranges.write().unwrap_or_else(PoisonError::into_inner);
        ranges.insert(at.bytes(), (at.bytes().saturating_add(len), what));
    }

    /// Nothing is written to what is at `at`.
    pub(crate) fn contest(&self, at: HostOffset) {
        self.contested.write().unwrap_or_else(PoisonError::into_inner).insert(at.bytes());
    }

    /// Whether the table or block at `at` is there alone, so that it may be written.
    ///
    /// # Errors
    /// `Corrupt` if it is not.
    pub(crate) fn check_table(&self, at: HostOffset) -> Result<()> {
        let contested = self.contested.read().unwrap_or_else(PoisonError::into_inner);
        if !contested.contains(&at.bytes()) {
            return Ok(());
        }
        let context = format!(
            "the image is corrupt: the table at {at} lies over other metadata or beyond the end \
             of the file; run `mica check -r all`"
        );
        Err(Error::new(ErrorKind::Corrupt, context))
    }

    /// What was at `at` is there no more.
    pub(crate) fn remove(&self, at: HostOffset) {
        self.ranges.write().unwrap_or_else(PoisonError::into_inner).remove(&at.bytes());
    }

    /// Whether a range holds no metadata.
    ///
    /// # Errors
    /// `Corrupt` if it does; the image contradicts itself.
    pub(crate) fn check(&self, at: HostOffset, len: u64) -> Result<()> {
        let ranges = self.ranges.read().unwrap_or_else(PoisonError::into_inner);
        let end = at.bytes().saturating_add(len);
        match ranges.range(..end).next_back() {
            Some((start, (stop, what))) if *stop > at.bytes() => {
                let context = format!(
                    "the image is corrupt: data at {at} would overwrite {what} at {start:#x}; \
                     run `mica check -r all`"
                );
                Err(Error::new(ErrorKind::Corrupt, context))
            }
            _ => Ok(()),
        }
    }
}
