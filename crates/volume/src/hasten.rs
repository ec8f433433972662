//! The end of a process whose store may not answer: it is waited for as long as was said, and no
//! longer.
//!
//! Invariants
//! - I1 A volume is given up only after its log, if it has one, was synced. What the store lacks
//!   stays in the log, for the next process on this machine to go on with.
//! - I2 A volume that was given up is latched: this process puts nothing more, whoever waits, and
//!   acknowledges nothing more.

use crate::known::Now;
use crate::shared::{Durability, Putter, Shared};
use mica_block::{Error, ErrorKind, Haste, Result};
use mica_rt::timeout;
use std::sync::Arc;
use std::time::Duration;

/// How long a store may go without an answer if the log has what was promised.
const WITH_LOG: Duration = Duration::from_secs(3);
/// The same if only the store can keep what was written.
const WITHOUT_LOG: Duration = Duration::from_secs(60);

/// What the store still has to answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Standing {
    /// Nothing more is put.
    Over,
    /// Nothing, as long as the volume is not closed and nobody writes.
    Nothing,
    /// Records from this one on, and whether the volume is being closed.
    Records { from: u64, is_closing: bool },
}

impl Shared {
    /// As [`mica_block::Manage::hasten`].
    pub(crate) async fn hasten(self: &Arc<Self>, haste: Haste) {
        let Some(putter) = &self.writer else { return };
        let limit = match (haste, putter.durability) {
            (Haste::AtOnce, _) => Duration::ZERO,
            (Haste::Soon, Durability::Host) => WITH_LOG,
            (Haste::Soon, Durability::Store) => WITHOUT_LOG,
        };
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
                Standing::Records { .. } => {
                    self.drive();
                    if timeout(limit, self.progress.until(changed)).await.is_err() {
                        return self.give_up(putter, limit).await;
                    }
                }
            }
        }
    }

    async fn give_up(&self, putter: &Putter, limit: Duration) {
        let synced = match &putter.log {
            Some(log) => log.sync().await.is_ok(),
            None => false,
        };
        let (seconds, name) = (limit.as_secs(), self.heads.name.as_str());
        let mut now = self.now();
        if standing(&now) == Standing::Over {
            return;
        }
        let lacking = now.records - now.state.records;
        let is_kept = synced && putter.durability == Durability::Host;
        let where_else = if synced { "the log has them" } else { "they are lost" };
        let what = format!(
            "the store did not answer for {seconds} s while volume {name} was to be closed: it \
             lacks {lacking} writes; {where_else}"
        );
        match is_kept {
            true => tracing::warn!("{what}: serve it with the same log again"),
            false => tracing::error!("{what}"),
        }
        now.is_left_to_log = is_kept;
        now.latch.get_or_insert(Error::new(ErrorKind::Io, what));
        drop(now);
        self.given_up.raise();
        self.over.raise();
        self.progress.wake_all();
    }

    /// What comes of `ending`, unless the volume is given up meanwhile, or was.
    ///
    /// # Errors
    /// Those of `ending`; why the volume was given up, unless the log has what was promised.
    pub(crate) async fn unless_given_up(
        &self,
        ending: impl Future<Output = Result<()>>,
    ) -> Result<()> {
        let ended = self.given_up.unless_raised(ending).await;
        let ended = ended.unwrap_or_else(|| self.latch().map_or(Ok(()), Err));
        if self.now().is_left_to_log { Ok(()) } else { ended }
    }
}

fn standing(now: &Now) -> Standing {
    let from = now.state.records;
    match now.is_closing {
        _ if now.is_ended || now.latch.is_some() => Standing::Over,
        false if from >= now.records => Standing::Nothing,
        is_closing => Standing::Records { from, is_closing },
    }
}

#[cfg(test)]
mod tests;
