//! The heads of a writer, from the one with which it opened the volume to the one with which it
//! ends: checkpoints in between.
//!
//! Invariants
//! - I1 One head is put at a time.
//! - I2 From the moment at which the last head is sent, this writer puts no extent, whatever comes
//!   back; only that same head may be put again.

use crate::destage::MustEnd;
use crate::heads::End;
use crate::known::Now;
use crate::shared::{Shared, lock};
use mica_block::{ErrorKind, Result};
use mica_rt::spawn;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Extents after which there is a checkpoint: whoever takes over reads so many at most, and a
/// collector leaves so many alone.
const CHECKPOINT_EXTENTS: u32 = 64;

fn is_due(now: &Now) -> bool {
    let has_newer = now.sequence > now.heads.sequence;
    let is_far = now.sequence - now.heads.sequence >= CHECKPOINT_EXTENTS;
    has_newer && (is_far || now.heads.lacks_cuts) && now.latch.is_none() && !now.is_closing
}

impl Shared {
    /// Puts a checkpoint, in a task of its own, if there is need of one.
    pub(crate) fn checkpoint_if_due(self: &Arc<Self>) {
        {
            let mut now = self.now();
            if now.heads.is_under_way || !is_due(&now) {
                return;
            }
            now.heads.is_under_way = true;
        }
        let task = MustEnd::new(self);
        drop(spawn(async move {
            let this = Arc::clone(&task.shared);
            if let Err(error) = this.checkpoint().await {
                this.fails(error);
            }
            task.done();
            this.now().heads.is_under_way = false;
            this.checkpoint_if_due();
        }));
    }

    async fn checkpoint(&self) -> Result<()> {
        let putter = self.putter()?;
        let _alone = putter.head_turn.alone().await;
        let (state, sequence) = {
            let mut now = self.now();
            if !is_due(&now) {
                return Ok(());
            }
            now.heads.lacks_cuts = false;
            (now.state, now.sequence)
        };
        let mut owned = lock(&putter.owned).clone();
        self.heads.checkpoint(&mut owned, state, sequence).await?;
        *lock(&putter.owned) = owned;
        self.now().heads.sequence = sequence;
        putter.counts.heads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Puts what was done, and ends the writer's time. Nothing is accepted from now on.
    pub(crate) async fn end(self: &Arc<Self>, end: &End) -> Result<()> {
        let putter = self.putter()?;
        self.now().is_closing = true;
        self.progress.wake_all();
        self.store().await?;
        let _alone = putter.head_turn.alone().await;
        if self.now().is_ended {
            return Ok(());
        }
        let state = self.now().state;
        let owned = lock(&putter.owned).clone();
        let last = lock(&putter.last_head)
            .get_or_insert_with(|| self.heads.last_head(&owned, state, end))
            .clone();
        self.over.raise();
        self.progress.wake_all();
        match self.heads.end(putter.writer, &last).await {
            Ok(()) => {
                self.now().is_ended = true;
                self.progress.wake_all();
            }
            Err(error) if error.kind() == ErrorKind::Denied => return Err(self.fails(error)),
            Err(error) => return Err(error),
        }
        match &putter.log {
            Some(log) => log.end().await,
            None => Ok(()),
        }
    }
}
