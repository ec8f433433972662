//! What of a disk is allocated, and what has changed between two states of it, without reading any
//! of it.
//!
//! While layers are merged, too, as far as the merge leaves as it is what is looked at:
//!
//! | what is asked for | during a merge |
//! |---|---|
//! | what is allocated now | told: it changes nothing that the disk shows |
//! | what a state has, or has changed in it | told, if the layers up to its own stay as they are |
//! | what has changed until now | refused: what one layer has goes into another |
//!
//! A stream, and a commit above a state, leave the layers of the state as they are.
//!
//! Invariants
//! - I1 No answer is made of layers of which one was changed, or left, while it was made. A merge
//!   that begins meanwhile, whatever it is about, or ends and takes a layer out up to that of the
//!   state, makes the answer void: it is asked for again.

use super::Served;
use crate::contexts::Layered;
use crate::jobs::Job;
use mica_block::{Error, ErrorKind, Extent, Manage, ManageChain, Result, Survey};
use mica_units::{GuestOffset, GuestRange};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Most extents in an answer.
pub(crate) const EXTENTS_MAX: usize = 10_000;
/// Parts of a survey after which an answer ends, even if it has little to say.
const PARTS_MAX: usize = 4096;
/// When it is worth asking again if a merge is in the way: if nobody knows how long it takes, and
/// at the latest, as it may be cancelled.
const AGAIN: Duration = Duration::from_secs(10);
const AGAIN_MAX: Duration = Duration::from_secs(600);
/// The same if something has changed just now.
const AGAIN_SOON: Duration = Duration::from_secs(1);

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

/// Why nothing is told.
pub(crate) struct Refused {
    pub(crate) why: Error,
    /// After which time it may be asked again, if that is all.
    pub(crate) again: Option<Duration>,
}

impl From<Error> for Refused {
    fn from(why: Error) -> Self {
        Self { why, again: None }
    }
}

impl Served {
    /// What of the disk is allocated, or has changed.
    ///
    /// # Errors
    /// `Denied` if the disk is closed, or if a merge is in the way; `NotFound` if there is no such
    /// state; `Invalid` for a start beyond the end, or a state that is not older; `Unsupported` if
    /// states are asked for and the disk has none; else why its map cannot be read.
    pub(crate) fn extents(&self, asked: &Asked) -> std::result::Result<Extents, Refused> {
        // Before the layers: one that begins later is noticed at the end (I1).
        let job = self.job();
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
            let what = "the state to compare with is not older";
            return Err(Error::new(ErrorKind::Invalid, what).into());
        }
        if let Some(job) = job.as_deref().filter(|job| !job.has_ended()) {
            self.check_beside(job, &layers, (state, since))?;
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
        let now = (disk.layer_paths(), self.job());
        let moved = |position: usize| {
            let have_moved = now.0.get(..=position) != layers.get(..=position);
            have_moved || now.1.as_ref().map(Arc::as_ptr) != job.as_ref().map(Arc::as_ptr)
        };
        if state.max(since).is_some_and(moved) {
            let why = self.denied("was merged meanwhile, or a merge has begun: ask again");
            return Err(Refused { why, again: Some(AGAIN_SOON) });
        }
        Ok(extents??)
    }

    /// Makes sure that the `job` leaves everything of these `layers` as it is that is looked at for
    /// what the `state` has, or what has changed in it, `since` another one.
    fn check_beside(
        &self,
        job: &Job,
        layers: &[PathBuf],
        (state, since): (Option<usize>, Option<usize>),
    ) -> std::result::Result<(), Refused> {
        let why = match (state, since) {
            (None, None) => return Ok(()),
            (Some(state), _) if job.leaves_as_it_is(layers, state) => return Ok(()),
            (Some(_), _) => "which changes a layer that the state has",
            (None, Some(_)) => {
                "during which nobody can tell what has changed until now, but what has changed in \
                 a state can be told (state=)"
            }
        };
        let again = job.time_left().map_or(AGAIN, |left| left.min(AGAIN_MAX));
        Err(Refused { why: self.refused_by(job, why), again: Some(again) })
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
