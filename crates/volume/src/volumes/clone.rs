//! Clones: volumes that begin with what another has.
//!
//! Invariants
//! - I1 Nothing is copied: a clone costs some requests, whatever its size.
//! - I2 A clone is ready only if its source still had what it is made of after the clone's first
//!   head was there, which keeps it from collectors: so nothing of it was collected.

use super::Volumes;
use crate::format::Id;
use crate::format::head::{Head, Life};
use crate::heads::Heads;
use crate::names::VolumeName;
use crate::properties::Properties;
use crate::snapshots::{find, missing};
use crate::state::State;
use mica_block::{Error, ErrorKind, Result, Which};

/// What a clone is made of.
struct Origin {
    /// The source.
    volume: Id,
    /// Its snapshot; `None` if it is what the source itself has.
    number: Option<u64>,
    /// The first state of the clone.
    state: State,
    /// Those of the source, whose extents the clone shares.
    properties: Properties,
    /// The volume that the source comes from, or itself.
    image: Id,
}

impl Volumes {
    /// Makes `target`, a volume that begins with what a snapshot of `source` has, or `source`
    /// itself, which nobody must have open then.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume or snapshot; `Denied` if the source is open and no
    /// snapshot is named, or was changed meanwhile; `Invalid` if there is a volume `target`;
    /// otherwise what the store reports.
    pub async fn clone_volume(
        &self,
        source: &VolumeName,
        which: Option<&Which>,
        target: &VolumeName,
    ) -> Result<()> {
        let (heads, clone) = (self.heads(source), self.heads(target));
        let origin = self.origin(&heads, which).await?;
        let pinned = clone.pin(origin.state, origin.properties, origin.image).await?;
        let is_there = self.still_has(&heads, &origin).await;
        clone.unpin(&pinned, matches!(is_there, Ok(true))).await?;
        if is_there? {
            return Ok(());
        }
        let what = format!(
            "volume {} changed while it was cloned, and no longer has what was to be cloned",
            source.as_str()
        );
        Err(Error::new(ErrorKind::Denied, what))
    }

    async fn origin(&self, heads: &Heads, which: Option<&Which>) -> Result<Origin> {
        let origin = self.with_recent(heads, async |head, state| match which {
            Some(which) => self.snapshot(heads, head, state, which).await,
            None => whole(heads, head),
        });
        origin.await
    }

    /// The snapshot `which` of a volume that has `state`, if `head` has it, too.
    async fn snapshot(
        &self,
        heads: &Heads,
        head: &Head,
        state: &State,
        which: &Which,
    ) -> Result<Origin> {
        let record = find(&self.tree, state.snapshots, which).await?;
        let record = record.ok_or_else(|| missing(heads.name.as_str(), which))?;
        let number = record.info.number;
        let in_head = find(&self.tree, head.state.snapshots, &Which::Number(number)).await?;
        let Some(record) = in_head else {
            let name = heads.name.as_str();
            let what = format!("snapshot {which} is in no head of volume {name} yet: try again");
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        let (volume, properties, image) = (head.volume, head.properties, head.boot_image());
        Ok(Origin { volume, number: Some(number), state: record.first_state(), properties, image })
    }

    /// Whether the source still has `origin`.
    async fn still_has(&self, heads: &Heads, origin: &Origin) -> Result<bool> {
        let there = heads.with_head(async |head| {
            if head.volume != origin.volume {
                return Ok(false);
            }
            let Some(number) = origin.number else {
                let (now, then) = (head.state, origin.state);
                return Ok((now.map, now.len) == (then.map, then.len));
            };
            let found = find(&self.tree, head.state.snapshots, &Which::Number(number)).await?;
            Ok(found.is_some_and(|record| record.map == origin.state.map))
        });
        match there.await {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound) => Ok(false),
            outcome => outcome,
        }
    }
}

/// What a volume itself has.
fn whole(heads: &Heads, head: &Head) -> Result<Origin> {
    if let Life::Open { .. } = head.life {
        let (name, host) = (heads.name.as_str(), &head.host);
        let what = format!("volume {name} is open on {host}: take a snapshot, and clone that");
        return Err(Error::new(ErrorKind::Denied, what));
    }
    let state = State { map: head.state.map, ..State::empty(head.state.len) };
    let (volume, properties, image) = (head.volume, head.properties, head.boot_image());
    Ok(Origin { volume, number: None, state, properties, image })
}
