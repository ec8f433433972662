//! Collection in the background, of the stores in which this process writes volumes.
//!
//! ```text
//! so much was put ─▶ heads of own volumes ─▶ collect ─▶ own sparse extents again ─▶ collect
//! ```
//!
//! When: what was put since the last time is 1/32 of what is alive, so that garbage stays below
//! that; or it is long ago and anything was put. What it may cost: reads and rewriting have a rate,
//! a pass is followed by a rest as long, and while guests wait for their log or their store nothing
//! is written again.
//!
//! Invariants
//! - C1 A process collects one store at a time. Of a store in a directory, one process of those
//!   that see its locks does: whoever comes second leaves it. (Two at once are safe, and a waste.)
//! - C2 Only volumes that this process has open are written again, by their own writers.
//! - C3 What fails is said, counted, and tried again later; nothing else stops for it.

use super::collecting::{Collecting, Collection, Passed};
use super::lock::CollectorLock;
use super::stores::{Store, Stores};
use mica_block::{ManageVolume, Result};
use mica_rt::{now, sleep};
use mica_volume::{CollectOptions, Collected, Speed, Volume, VolumeName};
use parking_lot::MutexGuard;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How often it is looked whether there is something to do.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Bytes that were put, at least, and as a part of what is alive, before it is worth a pass.
const PUT_MIN: u64 = 16 << 20;
const PUT_PART: u64 = 32;
/// After so long anything that was put is a reason: automatic snapshots become old without a write.
const LONG_HERE: Duration = Duration::from_secs(10 * 60);
/// The same for a store that asks money for requests.
const LONG_FAR: Duration = Duration::from_secs(60 * 60);
/// Rest after a pass: as long as it took, and at least this; and after a failure.
const REST_MIN: Duration = Duration::from_secs(2);
const REST_FAILED: Duration = Duration::from_secs(60);
/// What is read of maps each second, and written again, at most.
const READ_RATE: u64 = 256 << 20;
const REWRITE_RATE: u64 = 64 << 20;

impl Store {
    /// A volume was opened for writing.
    pub(super) fn is_written(&self, name: &VolumeName, volume: &Arc<Volume>) {
        self.collecting().open.insert(name.clone(), (Arc::downgrade(volume), 0));
    }

    /// What was collected here.
    pub fn collection(&self) -> Collection {
        Collection { store: self.url().to_string(), ..self.collecting().figures.clone() }
    }

    fn collecting(&self) -> MutexGuard<'_, Collecting> {
        self.collecting.lock()
    }

    /// The volumes that are open, after what they have put is counted.
    fn open_volumes(&self) -> Vec<(VolumeName, Weak<Volume>)> {
        let mut collecting = self.collecting();
        let (mut open, mut more) = (Vec::new(), 0_u64);
        collecting.open.retain(|name, (volume, put)| {
            let Some(there) = volume.upgrade() else { return false };
            let now = there.figures().extent_bytes;
            more += now.saturating_sub(*put);
            *put = now;
            open.push((name.clone(), Weak::clone(volume)));
            true
        });
        collecting.put_bytes += more;
        open
    }

    fn is_due(&self) -> bool {
        let long = if self.is_remote() { LONG_FAR } else { LONG_HERE };
        let collecting = self.collecting();
        let is_resting = collecting.rest_until.is_some_and(|until| now() < until);
        let least = PUT_MIN.max(collecting.figures.live_bytes / PUT_PART);
        let since = collecting.last.map(|last| now().saturating_since(last));
        let is_long = since.is_some_and(|since| since >= long) && collecting.put_bytes > 0;
        !is_resting && (collecting.put_bytes >= least || is_long)
    }

    /// Collects, if it is time to.
    async fn collect_if_due(&self) {
        let open = self.open_volumes();
        if open.is_empty() {
            return;
        }
        // The first look begins the time after which anything is a reason.
        self.collecting().last.get_or_insert_with(now);
        if !self.is_due() {
            return;
        }
        let held = self.directory().map(CollectorLock::try_take);
        if matches!(held, Some(None)) {
            self.collecting().rest_until = Some(now().after(REST_FAILED));
            return;
        }
        let start = now();
        let put_before = self.collecting().put_bytes;
        let passed = self.pass(&open).await;
        drop(held);
        let took = now().saturating_since(start);
        // What was written again is no reason for another pass.
        self.open_volumes();
        let mut collecting = self.collecting();
        collecting.last = Some(now());
        let figures = &mut collecting.figures;
        figures.last_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        figures.store = self.url().to_string();
        let rest = match passed {
            Ok(passed) => {
                figures.note(&passed);
                let Passed { collected, rewritten, failed } = passed;
                say(self, &collected, rewritten, took);
                // What the second one left is a reason for another pass.
                let done = failed.is_none().then(|| put_before.saturating_add(rewritten));
                collecting.put_bytes = collecting.put_bytes.saturating_sub(done.unwrap_or(0));
                if done.is_some() { REST_MIN.max(took) } else { REST_FAILED }
            }
            Err(error) => {
                figures.note_failure(&error);
                REST_FAILED
            }
        };
        collecting.rest_until = Some(now().after(rest));
    }

    /// One pass. A volume that is closed meanwhile is not kept by it.
    ///
    /// # Errors
    /// If nothing was collected.
    async fn pass(&self, open: &[(VolumeName, Weak<Volume>)]) -> Result<Passed> {
        let speed = Speed { requests: None, bytes: Some(READ_RATE) };
        let options = CollectOptions { speed, ..CollectOptions::default() };
        for (name, volume) in open {
            if let Some(volume) = volume.upgrade() {
                note(name, volume.checkpoint().await);
            }
        }
        let collected = self.volumes().collect(options, &mut |_| ()).await?;
        let mut rewritten = 0;
        for sparse in &collected.sparse {
            let Some((name, volume)) = open.iter().find(|(name, _)| *name == sparse.name) else {
                continue;
            };
            let Some(volume) = volume.upgrade() else { continue };
            let extents = sparse.extents.iter().copied().collect();
            let tidied = volume.tidy(&extents, Some(REWRITE_RATE)).await;
            let stored = match tidied {
                Ok(0) => continue,
                Ok(blocks) => {
                    rewritten += blocks * mica_volume::BLOCK_BYTES as u64;
                    volume.destage_all().await
                }
                Err(error) => Err(error),
            };
            note(name, stored);
            note(name, volume.checkpoint().await);
        }
        let again = match rewritten {
            0 => None,
            _ => Some(self.volumes().collect(options, &mut |_| ()).await),
        };
        Ok(both(collected, rewritten, again))
    }
}

/// What a pass did, which collected once or again: what is there now is what the last collection
/// that came to its end found, less what that freed.
fn both(mut collected: Collected, rewritten: u64, again: Option<Result<Collected>>) -> Passed {
    let (again, failed) = match again.transpose() {
        Ok(again) => (again, None),
        Err(error) => (None, Some(error)),
    };
    let last = again.as_ref().unwrap_or(&collected);
    let (bytes, live_bytes) = (last.bytes.saturating_sub(last.freed_bytes), last.live_bytes);
    if let Some(again) = again {
        collected += again;
    }
    Passed { collected: Collected { bytes, live_bytes, ..collected }, rewritten, failed }
}

/// One volume that fails keeps no other from being collected (C3).
fn note(name: &VolumeName, outcome: Result<()>) {
    if let Err(error) = outcome {
        let (volume, error) = (name.as_str(), error.in_one_line());
        tracing::debug!(volume, error, "skipped by the collection of its store");
    }
}

fn say(store: &Store, collected: &Collected, rewritten: u64, took: Duration) {
    if collected.freed_bytes + collected.punched_bytes + rewritten == 0 {
        return;
    }
    tracing::info!(
        store = %store.url(),
        freed_bytes = collected.freed_bytes,
        punched_bytes = collected.punched_bytes,
        rewritten_bytes = rewritten,
        live_bytes = collected.live_bytes,
        bytes = collected.bytes,
        ms = took.as_millis(),
        "collected what nothing needs"
    );
}

impl Stores {
    /// Collects whatever becomes garbage, for as long as this is awaited.
    pub async fn collect_in_background(&self) {
        loop {
            sleep(LOOK_EVERY).await;
            for store in self.all() {
                store.collect_if_due().await;
            }
        }
    }

    /// What was collected in stores that are open.
    pub fn collections(&self) -> Vec<Collection> {
        let all = self.all().into_iter().map(|store| store.collection());
        all.filter(|collection| collection.passes + collection.failures > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::{Error, ErrorKind};

    /// The story: what could not be deleted after sparse extents were written again was in no
    /// figure, and status said that all was well.
    #[test]
    fn second_collection_of_a_pass_adds_what_it_did_and_says_what_is_there() {
        let failure = |what: &str| Some(Error::new(ErrorKind::Io, what));
        let collected = |bytes, freed_bytes, failed, failure| Collected {
            bytes,
            live_bytes: bytes / 2,
            freed_bytes,
            freed_heads: 1,
            failed,
            failure,
            ..Collected::default()
        };
        let one = both(collected(100, 30, 0, None), 0, None).collected;
        assert_eq!((one.bytes, one.live_bytes, one.freed_bytes, one.failed), (70, 50, 30, 0));
        let two =
            both(collected(100, 30, 0, None), 7, Some(Ok(collected(80, 10, 2, failure("second")))));
        let two = two.collected;
        assert_eq!((two.bytes, two.live_bytes, two.freed_bytes, two.failed), (70, 40, 40, 2));
        assert_eq!(two.freed_heads, 2);
        assert_eq!(two.failure.expect("it is said").to_string(), "second");
        let two = both(
            collected(100, 30, 1, failure("first")),
            7,
            Some(Ok(collected(80, 10, 1, failure("second")))),
        );
        let two = two.collected;
        assert_eq!((two.failed, two.failure.expect("said").to_string()), (2, "first".to_owned()));
    }

    /// The story: what a pass had freed was in no figure if it then failed.
    #[test]
    fn pass_whose_second_collection_fails_counts_what_the_first_did_and_has_failed() {
        let first = Collected { bytes: 100, freed_bytes: 30, ..Collected::default() };
        let error = Error::new(ErrorKind::Io, "gone");
        let passed = both(first, 7, Some(Err(error)));
        let mut figures = Collection::default();
        figures.note(&passed);
        assert_eq!((figures.passes, figures.failures), (0, 1));
        assert_eq!((figures.freed_bytes, figures.rewritten_bytes, figures.bytes), (30, 7, 70));
        assert_eq!(figures.failure.as_deref(), Some("gone"));
    }
}
