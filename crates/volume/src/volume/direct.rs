//! Reads of what is simple: whole blocks beside each other in one extent, stored as they are, of
//! which the plan knew where they are. They take one request and no more of the map.
//!
//! Invariants
//! - I1 Nothing is returned whose sums were not compared.
//! - I2 Whatever is not simple, or does not succeed at once, is read by [`Volume::read_by_view`],
//!   which tries again and says what is wrong.

use super::Volume;
use crate::place::BLOCK_BYTES;
use crate::plans::Run;
use crate::reader::blocks_of;
use mica_block::IoFuture;
use mica_rt::Buf;
use mica_units::GuestRange;
use std::sync::Arc;

impl Volume {
    /// Begins to read `range`; gives `buf` back if that is not simple.
    pub(super) fn read_directly(
        &self,
        range: GuestRange,
        buf: Buf,
    ) -> std::result::Result<IoFuture, Buf> {
        // Reads of a volume with a boot record are noted, and counted as a guest's.
        let run = if self.shared.boot.is_none() { self.planned_run(range) } else { None };
        let Some(run) = run else { return Err(buf) };
        let reading = self.shared.tree.begin_plain(run.first, buf)?;
        let shared = Arc::clone(&self.shared);
        Ok(IoFuture::boxed(async move {
            let (result, buf) = reading.await;
            if result.is_ok() && run.is_in(&buf) {
                return (Ok(()), buf);
            }
            Self::of(shared).read_by_view(range, buf).await
        }))
    }

    /// The run that `range` is, if nothing was written there since it was planned.
    fn planned_run(&self, range: GuestRange) -> Option<Run> {
        let size = BLOCK_BYTES as u64;
        if !range.start().bytes().is_multiple_of(size) || !range.len().is_multiple_of(size) {
            return None;
        }
        let blocks = blocks_of(range);
        let generation = {
            let now = self.shared.now();
            (!now.has_recent(&blocks)).then_some(now.generation)
        };
        self.shared.plans.run(generation?, &blocks)
    }
}
