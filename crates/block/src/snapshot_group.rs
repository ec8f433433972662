//! Snapshots of several disks at one instant.
//!
//! ```text
//! each disk:  hold writers ─▶ all hold ─▶ take ─▶ all have taken ─▶ let them go on ─▶ durable
//! ```
//!
//! Invariants
//! - I1 No snapshot of a group is taken before all its disks hold their writers, and none of these
//!   goes on before all snapshots are taken: so what was answered before something else was begun,
//!   on whichever disks, is in the snapshots if that is.
//! - I2 If one fails, all do; and nobody waits for longer than the group's limit.
//! - I3 Once all have taken theirs, [`SnapshotGroup::all_taken`] says so to each, whatever happens
//!   to any of them afterwards.

use crate::{Error, ErrorKind, Result};
use mica_rt::sync::Waiters;
use mica_rt::timeout;
use parking_lot::{Mutex, MutexGuard};
use std::time::Duration;

/// For how long writers are held, at most.
const LIMIT: Duration = Duration::from_secs(2);

/// Where the disks of a group wait for each other, on whichever threads they are.
pub struct SnapshotGroup {
    disks: usize,
    state: Mutex<GroupState>,
    changed: Waiters,
}

#[derive(Default)]
struct GroupState {
    holding: usize,
    taken: usize,
    /// Whether all were taken before any failed (I3).
    is_decided: bool,
    failed: Option<Error>,
}

impl SnapshotGroup {
    /// A group of so many disks.
    pub fn new(disks: usize) -> Self {
        Self { disks, state: Mutex::default(), changed: Waiters::default() }
    }

    /// Says that a disk holds its writers, and waits until all do.
    ///
    /// # Errors
    /// Why the group has failed.
    pub async fn all_hold(&self) -> Result<()> {
        self.state().holding += 1;
        self.wait(|state| state.holding >= self.disks).await
    }

    /// Says that a disk has taken its snapshot, and waits until all have.
    ///
    /// # Errors
    /// Why the group has failed.
    pub async fn all_taken(&self) -> Result<()> {
        {
            let mut state = self.state();
            state.taken += 1;
            state.is_decided |= state.taken >= self.disks && state.failed.is_none();
        }
        self.wait(|state| state.is_decided).await
    }

    /// Says that a disk cannot take its snapshot. Returns why the group has failed: the first
    /// reason stays.
    pub fn fail(&self, error: Error) -> Error {
        let first = self.state().failed.get_or_insert(error).clone();
        self.changed.wake_all();
        first
    }

    async fn wait(&self, is_reached: impl Fn(&GroupState) -> bool) -> Result<()> {
        self.changed.wake_all();
        let is_over = || {
            let state = self.state();
            match &state.failed {
                _ if state.is_decided => Some(Ok(())),
                Some(error) => Some(Err(error.clone())),
                None => is_reached(&state).then_some(Ok(())),
            }
        };
        if let Ok(outcome) = timeout(LIMIT, self.changed.until(is_over)).await {
            return outcome;
        }
        let mut state = self.state();
        // The last one may have come just now.
        if state.is_decided {
            return Ok(());
        }
        let seconds = LIMIT.as_secs();
        let what = format!("not all disks could take a snapshot within {seconds} s");
        let first = state.failed.get_or_insert(Error::new(ErrorKind::Io, what)).clone();
        drop(state);
        self.changed.wake_all();
        Err(first)
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        self.state.lock()
    }
}
