//! The end of a process whose store may not answer: it is waited for as long as was said, and no
//! longer.
//!
//! Invariants
//! - I1 A volume is given up only after its log, if it has one, was synced. What the store lacks
//!   stays in the log, for the next process on this machine to go on with.
//! - I2 A volume that was given up is latched: this process sends no put of it any more, whoever
//!   waits, and acknowledges nothing more.
//! - I3 Reads of a volume are given up for themselves, also of one that is only read: no volume
//!   fails because of another one.

use crate::heads::End;
use crate::known::Now;
use crate::shared::{Durability, Shared};
use crate::stage::Failed;
use mica_block::{Error, ErrorKind, Haste, Result};
use mica_rt::timeout;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

/// How long a store may go without an answer if the log has what was promised.
const WITH_LOG: Duration = Duration::from_secs(3);
/// The same if only the store can keep what was written.
const WITHOUT_LOG: Duration = Duration::from_secs(60);

/// What the store still has to answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// Nothing more is put, or read.
    Over,
    /// Nothing, as long as the volume is not closed and nobody writes.
    Nothing,
    /// Records from this one on.
    Records { from: u64, heads: HeadsInStore },
    /// Nothing but the last head.
    LastHead { heads: HeadsInStore },
}

/// Extents that are in the newest head that was answered.
type HeadsInStore = u32;

impl Shared {
    /// As [`mica_block::Manage::hasten`].
    pub(crate) async fn hasten(self: &Arc<Self>, haste: Haste) {
        let limit = match (haste, self.writer.as_ref().map(|putter| putter.durability)) {
            (Haste::AtOnce, _) => Duration::ZERO,
            (Haste::Soon, Some(Durability::Store)) => WITHOUT_LOG,
            (Haste::Soon, Some(Durability::Host) | None) => WITH_LOG,
        };
        let mut over = pin!(self.over_within(limit));
        // Guests that wait for what they read would hold up the end, too (I3).
        if timeout(limit, over.as_mut()).await.is_err() {
            self.tree.give_up();
            over.await;
        }
        self.tree.give_up();
    }

    /// Waits until the volume is over, and gives it up when the store has not answered for `limit`.
    async fn over_within(self: &Arc<Self>, limit: Duration) {
        loop {
            let seen = {
                let mut now = self.now();
                now.want();
                standing(&now)
            };
            let changed = || (standing(&self.now()) != seen).then_some(());
            match seen {
                Standing::Over => return,
                Standing::Nothing => self.progress.until(changed).await,
                Standing::Records { .. } | Standing::LastHead { .. } => {
                    self.drive();
                    if timeout(limit, self.progress.until(changed)).await.is_err() {
                        return self.give_up(limit).await;
                    }
                }
            }
        }
    }

    async fn give_up(&self, limit: Duration) {
        let Some(putter) = &self.writer else { return };
        let synced = match &putter.log {
            Some(log) => log.sync().await.is_ok(),
            None => false,
        };
        let (seconds, name) = (limit.as_secs(), self.heads.name.as_str());
        let mut now = self.now();
        if standing(&now) == Standing::Over {
            return;
        }
        let is_kept = synced && putter.durability == Durability::Host;
        let lacking = match (now.records - now.state.records, synced) {
            (0, _) => "only that it is closed".to_owned(),
            (writes, true) => format!("{writes} writes; the log has them"),
            (writes, false) => format!("{writes} writes; they are lost"),
        };
        let what = format!(
            "the store did not answer for {seconds} s while volume {name} was to be closed: it \
             lacks {lacking}"
        );
        match is_kept {
            true => tracing::warn!("{what}: serve it with the same log again"),
            false => tracing::error!("{what}"),
        }
        let how = if is_kept { Failed::LeftToLog } else { Failed::Latched };
        now.stage.fail(Error::new(ErrorKind::Io, what), how);
        drop(now);
        self.given_up.raise();
        putter.tree().give_up();
        self.over.raise();
        self.progress.wake_all();
    }

    /// As [`Self::end`], unless the volume is given up meanwhile, or was.
    ///
    /// # Errors
    /// As there; why the volume was given up.
    pub(crate) async fn end_unless_given_up(self: &Arc<Self>, end: &End) -> Result<()> {
        match self.given_up.unless_raised(self.end(end)).await {
            Some(ended) => {
                self.rest().await;
                ended
            }
            // Nor is the log waited for, whose device may be what hangs.
            None => self.latch().map_or(Ok(()), Err),
        }
    }

    /// As [`Self::end_unless_given_up`]; if the log has what was promised, all is well.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        let ended = self.end_unless_given_up(&End::Closed).await;
        if self.now().stage.has_failed(Failed::LeftToLog) { Ok(()) } else { ended }
    }

    /// Nothing is done in the background for its log when this returns: the process may open that
    /// again.
    pub(crate) async fn rest(&self) {
        if let Some(log) = self.writer.as_ref().and_then(|putter| putter.log.as_ref()) {
            log.rest().await;
        }
    }

    /// A volume that is only read is closed.
    pub(crate) fn end_reading(&self) {
        self.now().stage.end();
        self.progress.wake_all();
    }
}

fn standing(now: &Now) -> Standing {
    let (from, heads) = (now.state.records, now.heads.sequence);
    match now.stage.is_ending() {
        _ if now.stage.is_over() => Standing::Over,
        _ if from < now.records => Standing::Records { from, heads },
        false => Standing::Nothing,
        true => Standing::LastHead { heads },
    }
}

#[cfg(test)]
mod tests;
