//! What of a disk is allocated, and what has changed between two states of it, without reading any
//! of it.

use super::Served;
use crate::contexts::Layered;
use mica_block::{Error, ErrorKind, Extent, Manage, ManageChain, Result, Survey};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// Most extents in an answer.
pub(crate) const EXTENTS_MAX: usize = 10_000;
/// Parts of a survey after which an answer ends, even if it has little to say.
const PARTS_MAX: usize = 4096;

/// What is asked.
pub(crate) struct Asked {
    /// The state that is meant; the present one by default.
    pub(crate) state: Option<String>,
    /// What has changed since this state, instead of what is allocated.
    pub(crate) since: Option<String>,
    /// The first byte.
    pub(crate) start: u64,
    /// Most extents.
    pub(crate) max: usize,
}

/// Some of the extents of a disk.
pub(crate) struct Extents {
    /// Bytes of the disk.
    pub(crate) len: u64,
    /// Offsets and lengths in bytes, in order, none touching the next.
    pub(crate) list: Vec<(u64, u64)>,
    /// From where on nothing was looked at; `None` if that is the end.
    pub(crate) next: Option<u64>,
}

impl Served {
    /// What of the disk is allocated, or has changed.
    ///
    /// # Errors
    /// `Denied` if the disk is closed; `NotFound` if there is no such state; `Invalid` for a start
    /// beyond the end, or a state that is not older; `Unsupported` if states are asked for and the
    /// disk has none; else why its map cannot be read.
    pub(crate) fn extents(&self, asked: &Asked) -> Result<Extents> {
        // Positions of layers hold only while none leaves: that is checked again at the end.
        if self.job_under_way().is_some() {
            return Err(self.denied("is being merged: wait for the end, or cancel it"));
        }
        let disk = self.opened().disk()?;
        let layers = disk.layer_paths();
        let kept = match (&asked.state, &asked.since) {
            (None, None) => Vec::new(),
            _ => self.kept_states()?,
        };
        let position = |state: &Option<String>| {
            let found = state.as_deref().map(|state| self.find(&kept, state)).transpose();
            found.map(|found| found.map(|kept| kept.position))
        };
        let (state, since) = (position(&asked.state)?, position(&asked.since)?);
        if let (Some(state), Some(since)) = (state, since)
            && since >= state
        {
            return Err(Error::new(ErrorKind::Invalid, "the state to compare with is not older"));
        }
        let (start, max) = (asked.start, asked.max.clamp(1, EXTENTS_MAX));
        let surveyed = Arc::clone(&disk);
        let extents = self.resources.workers.run(move || async move {
            let disk = match state {
                None => Layered::Live(surveyed),
                Some(position) => Layered::fixed(chain(&surveyed)?.view(position).await?),
            };
            survey(&disk, since, start, max).await
        });
        let now = disk.layer_paths();
        let moved = |position: usize| now.get(..=position) != layers.get(..=position);
        if state.max(since).is_some_and(moved) {
            return Err(self.denied("was merged meanwhile: ask again"));
        }
        extents?
    }
}

fn chain(disk: &Arc<dyn Manage>) -> Result<&dyn ManageChain> {
    disk.chain().ok_or_else(|| Error::new(ErrorKind::Unsupported, "the disk has no states"))
}

async fn survey(disk: &Layered, since: Option<usize>, start: u64, max: usize) -> Result<Extents> {
    let len = disk.disk().geometry().len;
    let range = GuestRange::between(GuestOffset::new(start), GuestOffset::new(len));
    let range = range.ok_or_else(|| {
        Error::new(ErrorKind::Invalid, format!("the disk ends at {len}, before {start}"))
    })?;
    let is_meant = |extent: &Extent| match since {
        Some(position) => disk.is_above(extent, position),
        None => !extent.kind.reads_as_zero(),
    };
    let mut list: Vec<(u64, u64)> = Vec::new();
    let mut walk = Survey::new(disk.disk(), range);
    let mut at = start;
    for _ in 0..PARTS_MAX {
        let Some(extents) = walk.next().await? else { break };
        for extent in extents {
            if is_meant(&extent) {
                let is_full = list.len() == max;
                match list.last_mut() {
                    Some((offset, len)) if *offset + *len == at => *len += extent.len,
                    _ if is_full => return Ok(Extents { len, list, next: Some(at) }),
                    _ => list.push((at, extent.len)),
                }
            }
            at += extent.len;
        }
    }
    Ok(Extents { len, list, next: (at < len).then_some(at) })
}
