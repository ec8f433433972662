//! The heads of a writer, from the one with which it opened the volume to the one with which it
//! ends: checkpoints in between.
//!
//! Invariants
//! - I1 One head is put at a time.
//! - I2 From the moment at which the last head is sent, this writer puts no extent, whatever comes
//!   back; only that same head may be put again.

use crate::destage::CompletionGuard;
use crate::heads::End;
use crate::known::Now;
use crate::shared::{LastHead, Shared};
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
    has_newer && (is_far || now.heads.lacks_cuts) && now.stage.is_accepting()
}

/// The right to put a head (I1), until it is dropped.
#[must_use]
pub(crate) struct HeadTurn(Arc<Shared>);

impl Drop for HeadTurn {
    fn drop(&mut self) {
        self.0.now().heads.is_under_way = false;
        self.0.progress.wake_all();
    }
}

impl Shared {
    /// Takes the turn if no head is under way. What it gives must not be dropped under the lock.
    pub(crate) fn head_turn(self: &Arc<Self>, now: &mut Now) -> Option<HeadTurn> {
        if now.heads.is_under_way {
            return None;
        }
        now.heads.is_under_way = true;
        Some(HeadTurn(Arc::clone(self)))
    }

    /// The turn to put a checkpoint, if there is need of one and nobody else has it.
    pub(crate) fn checkpoint_turn(self: &Arc<Self>, now: &mut Now) -> Option<HeadTurn> {
        if is_due(now) { self.head_turn(now) } else { None }
    }

    /// Puts a checkpoint in a task of its own; and the next, if it is due by then.
    pub(crate) fn put_checkpoint(self: &Arc<Self>, turn: HeadTurn) {
        let task = CompletionGuard::new(self);
        drop(spawn(async move {
            let this = Arc::clone(&task.shared);
            if let Err(error) = this.checkpoint().await {
                this.latch_with(error);
            }
            task.done();
            drop(turn);
            let next = this.checkpoint_turn(&mut this.now());
            if let Some(turn) = next {
                this.put_checkpoint(turn);
            }
        }));
    }

    async fn checkpoint(&self) -> Result<()> {
        let putter = self.putter()?;
        let (state, sequence) = {
            let mut now = self.now();
            now.heads.lacks_cuts = false;
            (now.state, now.sequence)
        };
        let head = self.heads.checkpoint(&putter.owned.lock(), state, sequence)?;
        let (name, content) = self.heads.as_object(&head);
        self.put_until_answered(name, content).await?;
        putter.owned.lock().head = head;
        self.now().heads.sequence = sequence;
        putter.counts.heads.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Waits until no task is at work for what was put, and none will be for it: then the executor
    /// that all of it ran on may end.
    ///
    /// # Errors
    /// Why the volume is latched.
    pub(crate) async fn at_rest(&self) -> Result<()> {
        let is_at_rest = || {
            let now = self.now();
            let is_so = !now.is_driven && !now.heads.is_under_way && !is_due(&now);
            let failure = now.stage.failure().cloned().map(Err);
            failure.or(is_so.then_some(Ok(())))
        };
        self.progress.until(is_at_rest).await?;
        self.rest().await;
        Ok(())
    }

    /// Puts what was done, and ends the writer's time. Nothing is accepted from now on.
    pub(crate) async fn end(self: &Arc<Self>, end: &End) -> Result<()> {
        let putter = self.putter()?;
        self.now().stage.close();
        self.progress.wake_all();
        self.destage_all().await?;
        // A checkpoint that is under way is waited for: nothing is left to do for its task. Whether
        // the volume was given up is asked under the same lock.
        let turn = || {
            let mut now = self.now();
            let ended = now.stage.outcome().map(|ended| ended.map(|()| None));
            ended.or_else(|| self.head_turn(&mut now).map(|turn| Ok(Some(turn))))
        };
        let Some(_turn) = self.progress.until(turn).await? else { return Ok(()) };
        let last = {
            let mut last = putter.last_head.lock();
            match &*last {
                Some(last) => last.clone(),
                None => {
                    let state = self.now().state;
                    let head = self.heads.last_head(&putter.owned.lock(), state, end)?;
                    last.insert(LastHead { head, is_put: false }).clone()
                }
            }
        };
        self.over.raise();
        self.progress.wake_all();
        if !last.is_put {
            match self.heads.end(&last.head).await {
                Ok(false) => return Err(self.fence(putter).await),
                Ok(true) => *putter.last_head.lock() = Some(LastHead { is_put: true, ..last }),
                Err(error) if error.kind() == ErrorKind::Denied => {
                    return Err(self.latch_with(error));
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(log) = &putter.log {
            log.end().await?;
        }
        self.now().stage.end();
        self.progress.wake_all();
        Ok(())
    }
}
