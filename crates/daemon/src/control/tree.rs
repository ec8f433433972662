//! A volume with its snapshots, for the page: what `mica volume tree` draws of it.
//!
//! Whoever may only look asks for it, and its store may be slow, and cost money: one is looked at
//! at a time, of a few actions that there may be, the answer is bounded, and it is given again for
//! some seconds.

use super::perform::{Answer, find, perform};
use super::reply::{Refusal, json};
use super::snapshots::described;
use super::sources::Sources;
use crate::served::Served;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use mica_block::Error;
use parking_lot::Mutex;
use serde_json::{Value, json as value};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::Semaphore;

/// Snapshots in an answer, the newest ones.
const SNAPSHOTS_MAX: usize = 100;
/// For how long an answer is given again, if there are as many snapshots as before.
const KEPT: Duration = Duration::from_secs(5);
/// Answers that are kept.
const SEEN_MAX: usize = 64;

/// The right to look at what is in a store, and what was seen lately.
pub(super) struct Looks<D = Served> {
    turn: Arc<Semaphore>,
    seen: Mutex<Vec<Seen<D>>>,
}

/// What was seen of a disk.
struct Seen<D> {
    disk: Weak<D>,
    /// How many snapshots it had, as far as that is known without asking its store.
    snapshots: Option<u64>,
    /// Since the process was started.
    at: Duration,
    answer: Arc<Value>,
}

impl<D> Default for Looks<D> {
    fn default() -> Self {
        Self { turn: Arc::new(Semaphore::new(1)), seen: Mutex::default() }
    }
}

impl<D> Looks<D> {
    /// What was seen of a disk less than [`KEPT`] before `now`, when it had as many `snapshots`.
    fn seen(&self, disk: &Arc<D>, snapshots: Option<u64>, now: Duration) -> Option<Arc<Value>> {
        let mut seen = self.seen.lock();
        seen.retain(|one| now.saturating_sub(one.at) < KEPT);
        let found = seen.iter().find(|one| one.is_of(disk) && one.snapshots == snapshots);
        found.map(|one| Arc::clone(&one.answer))
    }

    fn keep(&self, disk: &Arc<D>, snapshots: Option<u64>, at: Duration, answer: &Arc<Value>) {
        let mut seen = self.seen.lock();
        seen.retain(|one| !one.is_of(disk));
        if seen.len() >= SEEN_MAX {
            seen.remove(0);
        }
        let (disk, answer) = (Arc::downgrade(disk), Arc::clone(answer));
        seen.push(Seen { disk, snapshots, at, answer });
    }
}

impl<D> Seen<D> {
    fn is_of(&self, disk: &Arc<D>) -> bool {
        self.disk.as_ptr() == Arc::as_ptr(disk)
    }
}

pub(super) async fn tree(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let count = served.image_figures().volume.and_then(|volume| volume.snapshots);
    let looks = &sources.looks;
    if let Some(answer) = looks.seen(&served, count, sources.uptime()) {
        return Ok(json(&answer));
    }
    let turn = Arc::clone(&looks.turn).try_acquire_owned().map_err(|_| {
        let what = "another volume is looked at: try again later";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what)
    })?;
    let looked_at = Arc::clone(&served);
    let listed = move || {
        // Until this is done, whoever waits for it.
        let _turn = turn;
        let all = looked_at.list_snapshots()?;
        // One that is only read does not know.
        Ok::<_, Error>((all, looked_at.cloned_from().ok().flatten()))
    };
    let (all, from) = perform(&sources.actions, listed).await??;
    let newest: Vec<_> =
        all[all.len().saturating_sub(SNAPSHOTS_MAX)..].iter().map(described).collect();
    let answer = Arc::new(value!({
        "disk": name,
        "cloned_from": from.map(|from| from.to_string()),
        "snapshot_count": all.len(),
        "snapshots": newest,
    }));
    looks.keep(&served, count, sources.uptime(), &answer);
    Ok(json(&answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: each request listed all snapshots from the store, as fast as a viewer asked.
    #[test]
    fn answer_is_given_again_for_some_seconds_unless_snapshots_came_or_went() {
        let (looks, web, db) = (Looks::default(), Arc::new(1), Arc::new(2));
        let seconds = Duration::from_secs;
        assert_eq!(looks.seen(&web, Some(3), seconds(10)), None);
        let answer = Arc::new(value!({ "disk": "web" }));
        looks.keep(&web, Some(3), seconds(10), &answer);
        assert_eq!(looks.seen(&web, Some(3), seconds(14)), Some(answer.clone()));
        assert_eq!(looks.seen(&web, Some(4), seconds(14)), None, "it has one more");
        assert_eq!(looks.seen(&db, Some(3), seconds(14)), None, "another disk");
        assert_eq!(looks.seen(&web, Some(3), seconds(15)), None, "it is old");
        let disks: Vec<_> = (0..2 * SEEN_MAX).map(Arc::new).collect();
        let looks = Looks::default();
        disks.iter().for_each(|disk| looks.keep(disk, None, seconds(1), &answer));
        let kept = disks.iter().filter(|disk| looks.seen(disk, None, seconds(1)).is_some());
        assert_eq!(kept.count(), SEEN_MAX);
    }
}
