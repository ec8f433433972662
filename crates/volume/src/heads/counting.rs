//! What counts of a volume, for those who only read it: nobody is fenced.

use super::{Heads, ROUNDS_MAX, Seen};
use crate::format::extent::Kind;
use crate::format::head::{Head, Life};
use crate::place::ExtentId;
use crate::state::State;
use mica_block::{ErrorKind, Result};

/// A head that comes so many after one that was the newest has all whose put was answered before
/// anybody looked for that. A head has what was answered when it was begun, and the next one is
/// begun when it was put: so the one after that was begun later than the look.
const SINCE_FIRST: u64 = 2;

impl Heads {
    /// The newest head, and the state that counts: the head's, with the extents that its writer put
    /// since. It has all that its writer knew to be in the store when this was called, also where
    /// heads come faster than they can be looked at twice.
    ///
    /// # Errors
    /// As [`Self::ready`].
    pub(crate) async fn counting(&self) -> Result<(Head, State)> {
        let mut first = None;
        for _ in 0..ROUNDS_MAX {
            let head = self.ready().await?;
            let (volume, number) = *first.get_or_insert((head.volume, head.number));
            if volume != head.volume {
                first = None;
            } else if head.number >= number.saturating_add(SINCE_FIRST) {
                return Ok((head.clone(), head.state));
            }
            let Some(state) = self.last_state(&head).await? else {
                return Ok((head.clone(), head.state));
            };
            // Otherwise extents may have been missing that others collected.
            if self.is_highest(&head).await? {
                return Ok((head, state));
            }
        }
        Err(self.too_busy())
    }

    /// Does `act` with what counts; once more if something was missing that others collected.
    ///
    /// # Errors
    /// As [`Self::counting`] and `act`.
    pub(crate) async fn with_counting<T>(
        &self,
        act: impl AsyncFn(&Head, &State) -> Result<T>,
    ) -> Result<T> {
        for _ in 0..ROUNDS_MAX {
            let (head, state) = self.counting().await?;
            match act(&head, &state).await {
                Err(error)
                    if error.kind() == ErrorKind::Corrupt && !self.is_highest(&head).await? => {}
                outcome => return outcome,
            }
        }
        Err(self.too_busy())
    }

    /// As [`Self::with_counting`], with the head's state.
    ///
    /// # Errors
    /// As [`Self::ready`] and `act`.
    pub(crate) async fn with_head<T>(&self, act: impl AsyncFn(&Head) -> Result<T>) -> Result<T> {
        self.with_seen(async |seen| act(seen.head()).await).await
    }

    /// As [`Self::with_head`], for who may go on from that head.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn with_seen<T>(&self, act: impl AsyncFn(&Seen) -> Result<T>) -> Result<T> {
        for _ in 0..ROUNDS_MAX {
            let seen = self.look().await?;
            self.check_ready(seen.head())?;
            match act(&seen).await {
                Err(error)
                    if error.kind() == ErrorKind::Corrupt
                        && !self.is_highest(seen.head()).await? => {}
                outcome => return outcome,
            }
        }
        Err(self.too_busy())
    }

    /// The state after all extents of the writer of `head`; `None` if it has none.
    async fn last_state(&self, head: &Head) -> Result<Option<State>> {
        let Life::Open { writer, sequence } = head.life else { return Ok(None) };
        let mut state = head.state;
        for sequence in sequence..=u32::MAX {
            match self.extent(ExtentId { writer, sequence }, head.volume).await? {
                Some(extent) if extent.kind == Kind::Extent => state = extent.state,
                Some(_) | None => break,
            }
        }
        Ok(Some(state))
    }
}
