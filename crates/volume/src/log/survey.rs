//! What a device has, for people, and what they may give up: logs of volumes that are gone, and
//! segments whose headers are damaged.
//!
//! A log that nobody ends keeps its segments for ever: its volume may come back. The device cannot
//! know that it does not, as it knows no store.

use super::begin::Found;
use super::device::LogDevice;
use super::slots::Slots;
use crate::format::Id;
use mica_block::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;

/// What a log has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LogSummary {
    /// Which log.
    pub found: Found,
    /// The records that the store may lack, as far as the log knows.
    pub records: Range<u64>,
    /// Bytes of the device that only this log uses; nothing if it was set aside.
    pub live_bytes: u64,
}

/// What becomes of records that the store may lack.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropLog {
    /// If there are any, the log stays.
    IfStored,
    /// They are given up.
    Anyway,
}

impl LogDevice {
    /// All logs that nobody has open and that were not ended, with what they have.
    ///
    /// # Errors
    /// What the file reports; `Corrupt` if a log has records that this version does not know.
    pub async fn summaries(&self) -> Result<Vec<LogSummary>> {
        let mut all = Vec::new();
        for found in self.volumes() {
            all.push(self.summary(&found).await?);
        }
        Ok(all)
    }

    async fn summary(&self, found: &Found) -> Result<LogSummary> {
        let mut end = found.freed;
        self.look(found, |number, _| {
            end = end.max(number + 1);
            Ok(())
        })
        .await?;
        let live = self.slots().live_of(found.key) as u64;
        let (records, live_bytes) = (found.freed..end, live * self.header.segment_bytes);
        Ok(LogSummary { found: found.clone(), records, live_bytes })
    }

    /// Sets the log of `volume` aside, which nobody has open: others may use its space then, and
    /// the volume begins another log when it is opened next.
    ///
    /// # Errors
    /// `NotFound` if there is none; `Denied` if it is open, or has records that the store may lack,
    /// and these are to be kept.
    pub async fn drop_log(self: &Arc<Self>, volume: Id, how: DropLog) -> Result<()> {
        let may_be = async move |this: &Self, found: &Found| {
            if how == DropLog::Anyway {
                return Ok(());
            }
            let records = this.summary(found).await?.records;
            if records.is_empty() {
                return Ok(());
            }
            let count = records.end - records.start;
            let what = format!(
                "the log of the volume in {} has {count} records that its store may lack: open the \
                 volume, which puts them there, or give them up by force",
                this.name()
            );
            Err(Error::new(ErrorKind::Denied, what))
        };
        self.set_aside_if(volume, may_be).await
    }

    /// Where the segments begin in the file whose headers are damaged.
    pub fn damaged_segments(&self) -> Vec<u64> {
        self.slots().damaged().map(|slot| self.header.at(slot)).collect()
    }

    /// Gives up what is in segments whose headers are damaged; returns how many those were. What
    /// logs have lost with them, they still miss.
    ///
    /// # Errors
    /// What the file reports.
    pub async fn drop_damaged(self: &Arc<Self>) -> Result<usize> {
        self.erase_headers(usize::MAX, Slots::take_damaged).await
    }
}
