//! The beginning of a clone: its heads, until it is a volume as any other.
//!
//! ```text
//! pinned: a root for collectors, which nobody opens ─▶ closed: the source still had the snapshot
//!                                                   └▶ deleted: it may have been collected
//! ```
//!
//! Invariants
//! - I1 Collectors see the pinned head before its maker looks back at the source. It need not be
//!   durable by then: a power cut that takes it away takes its maker, too, so that nobody was told
//!   of the clone.
//! - I2 When a clone is answered, all its heads are durable, and the names of their folder: the
//!   second is, and the first with it ([`mica_block::Objects::put_early`]). In a directory that
//!   takes four syncs: of the bytes of each head, of the clone's folder for both names, and of the
//!   folder of volumes for that folder's. That the latter is durable shows in the source.

use super::Heads;
use crate::format::Id;
use crate::format::head::{Head, Life};
use crate::format::origin::Origin;
use crate::properties::Properties;
use crate::state::State;
use mica_block::{Error, ErrorKind, Result};

impl Heads {
    /// Puts the first head of a clone that has `state`, and the properties of its source, `origin`,
    /// which comes from `image`, or is it. Once it is there `looks_back` at the source, while it is
    /// looked whether that head is the highest; then it has to be [`Self::unpin`]ned.
    ///
    /// # Errors
    /// `Invalid` if there is a volume of this name; otherwise what the store reports.
    pub(crate) async fn pin<T>(
        &self,
        state: State,
        properties: Properties,
        (origin, image): (Origin, Id),
        looks_back: impl AsyncFn() -> T,
    ) -> Result<(Head, T)> {
        let volume = self.environment.random();
        let head = self.head(0, volume, Life::Pinned, state);
        let (image, origin) = (Some(image), Some(origin));
        let head = Head { properties, image, origin, ..head };
        self.begin_and(async || Ok(head.clone()), looks_back).await
    }

    /// Makes a volume of a pinned clone, if the source still had what it was made of, or otherwise
    /// deletes it.
    ///
    /// # Errors
    /// `NotFound` if others deleted it meanwhile; otherwise what the store reports.
    pub(crate) async fn unpin(&self, pinned: &Head, is_good: bool) -> Result<()> {
        let life = if is_good { Life::Closed } else { Life::Deleted };
        let head = self.after(pinned, life, pinned.state)?;
        if self.put_highest(&head).await? || !is_good {
            return Ok(());
        }
        // Others may have it open already, or have done the same.
        let newest = self.newest_of_any_life().await?;
        let is_ours = newest.is_some_and(|newest| {
            newest.volume == pinned.volume && !matches!(newest.life, Life::Pinned | Life::Deleted)
        });
        if is_ours {
            return Ok(());
        }
        let what = format!("volume {} was deleted while it was made", self.name.as_str());
        Err(Error::new(ErrorKind::NotFound, what))
    }

    /// The newest head of a volume that is more than a beginning.
    ///
    /// # Errors
    /// As [`Self::newest`]; `Denied` if it is a clone that is not ready, or a part of what it is to
    /// have.
    pub(crate) async fn ready(&self) -> Result<Head> {
        let head = self.newest().await?;
        self.check_ready(&head)?;
        Ok(head)
    }

    pub(super) fn check_ready(&self, head: &Head) -> Result<()> {
        let (name, host) = (self.name.as_str(), &head.host);
        let what = match head.life {
            Life::Pinned => format!(
                "volume {name} is a clone that {host} has not finished: if it makes no progress, \
                 delete it and clone again"
            ),
            Life::Open { .. } if head.is_unfinished => format!(
                "volume {name} is incomplete, as its import on {host} has not finished: wait for \
                 it, or delete the volume by force and import again"
            ),
            _ => return Ok(()),
        };
        Err(Error::new(ErrorKind::Denied, what))
    }
}
