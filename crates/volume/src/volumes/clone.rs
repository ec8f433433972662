//! Clones: volumes that begin with what another has.
//!
//! Invariants
//! - I1 Nothing is copied: a clone costs some requests, whatever its size.
//! - I2 A clone is ready only if its source still had what it is made of after the clone's first
//!   head was there, which keeps it from collectors: so nothing of it was collected.

use super::Volumes;
use crate::format::Id;
use crate::format::head::{Head, Life};
use crate::format::origin::Origin;
use crate::heads::Heads;
use crate::names::VolumeName;
use crate::properties::Properties;
use crate::snapshots::{find, missing};
use crate::state::State;
use mica_block::{Error, ErrorKind, Result, Which};

/// What a clone is made of.
struct Source {
    /// The head that has it.
    head: Head,
    origin: Origin,
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
        let heads = self.heads(source);
        let found = self.source(&heads, which).await?;
        self.clone_found(&heads, &found, found.origin.clone(), target).await
    }

    /// As [`Self::clone_volume`], of what an open `source` has now: `taken`, a snapshot that was
    /// taken for this, and of which nobody else knows.
    ///
    /// # Errors
    /// As [`Self::clone_volume`].
    pub async fn clone_present(
        &self,
        source: &VolumeName,
        taken: &Which,
        target: &VolumeName,
    ) -> Result<()> {
        let heads = self.heads(source);
        let found = self.source(&heads, Some(taken)).await?;
        let origin = Origin { snapshot: None, ..found.origin.clone() };
        self.clone_found(&heads, &found, origin, target).await
    }

    /// Makes `target`, which says that it is made of `origin`, of what was found.
    async fn clone_found(
        &self,
        heads: &Heads,
        found: &Source,
        origin: Origin,
        target: &VolumeName,
    ) -> Result<()> {
        let clone = self.heads(target);
        let is_there = async || self.still_has(heads, found).await;
        let made_of = (origin, found.image);
        let pinned = clone.pin(found.state, found.properties, made_of, is_there).await;
        let (pinned, is_there) = pinned?;
        clone.unpin(&pinned, matches!(is_there, Ok(true))).await?;
        if is_there? {
            return Ok(());
        }
        let what = format!(
            "volume {} changed while it was cloned, and no longer has what was to be cloned",
            heads.name.as_str()
        );
        Err(Error::new(ErrorKind::Denied, what))
    }

    async fn source(&self, heads: &Heads, which: Option<&Which>) -> Result<Source> {
        let source = self.with_recent(heads, async |head, state| match which {
            Some(which) => self.snapshot(heads, head, state, which).await,
            None => whole(heads, head),
        });
        source.await
    }

    /// The snapshot `which` of a volume that has `state`, if `head` has it, too.
    async fn snapshot(
        &self,
        heads: &Heads,
        head: &Head,
        state: &State,
        which: &Which,
    ) -> Result<Source> {
        let record = find(&self.tree, state.snapshots, which).await?;
        let record = record.ok_or_else(|| missing(heads.name.as_str(), which))?;
        let number = record.info.number;
        let in_head = find(&self.tree, head.state.snapshots, &Which::Number(number)).await?;
        let Some(record) = in_head else {
            let name = heads.name.as_str();
            let what = format!("snapshot {which} is in no head of volume {name} yet: try again");
            return Err(Error::new(ErrorKind::NotFound, what));
        };
        Ok(Source::of(heads, head, Some(number), record.first_state()))
    }

    /// Whether the volume still has what was found in it.
    async fn still_has(&self, heads: &Heads, found: &Source) -> Result<bool> {
        // What has the same head has the same state.
        if heads.is_highest(&found.head).await? {
            return Ok(true);
        }
        let there = heads.with_head(async |head| {
            if head.volume != found.origin.volume {
                return Ok(false);
            }
            let Some(number) = found.origin.snapshot else {
                let (now, then) = (head.state, found.state);
                return Ok((now.map, now.len) == (then.map, then.len));
            };
            let there = find(&self.tree, head.state.snapshots, &Which::Number(number)).await?;
            Ok(there.is_some_and(|record| record.map == found.state.map))
        });
        match there.await {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound) => Ok(false),
            outcome => outcome,
        }
    }
}

impl Source {
    fn of(heads: &Heads, head: &Head, snapshot: Option<u64>, state: State) -> Self {
        let (properties, image) = (head.properties, head.boot_image());
        let origin = Origin { volume: head.volume, name: heads.name.clone(), snapshot };
        Self { head: head.clone(), origin, state, properties, image }
    }
}

/// What a volume itself has.
fn whole(heads: &Heads, head: &Head) -> Result<Source> {
    if let Life::Open { .. } = head.life {
        let (name, host) = (heads.name.as_str(), &head.host);
        let what = format!("volume {name} is open on {host}: take a snapshot, and clone that");
        return Err(Error::new(ErrorKind::Denied, what));
    }
    let state = State { map: head.state.map, ..State::empty(head.state.len) };
    Ok(Source::of(heads, head, None, state))
}
