//! Snapshots that a volume takes of itself while it is open.
//!
//! Invariants
//! - I1 As long as nobody writes, there is no new one.
//! - I2 Guests wait for nothing here: snapshots are records among theirs.

use super::Volume;
use crate::keep::Keep;
use mica_block::{ManageSnapshots, Result};
use mica_rt::{now, sleep};
use std::time::Duration;

/// How often it is looked which are to be dropped, at most.
const DROP_EVERY: Duration = Duration::from_secs(1);

impl Volume {
    /// Takes a snapshot without a label in each of the shortest intervals of `rules` in which the
    /// volume is written, and drops those that the rules do not keep, until the volume is closed.
    pub async fn take_by(&self, rules: &Keep) {
        if self.shared.writer.is_none() {
            return;
        }
        let every = rules.shortest();
        // Up to which record there is a snapshot.
        let (mut seen, mut dropped_at) = (self.shared.now().records, now());
        while self.shared.over.unless_raised(sleep(every)).await.is_some() {
            let is_due = now().saturating_since(dropped_at) >= DROP_EVERY;
            if is_due {
                dropped_at = now();
            }
            if let Err(error) = self.take_and_drop(rules, is_due, &mut seen).await {
                if self.shared.refusal(&self.shared.now()).is_some() {
                    return;
                }
                let (volume, error) = (self.shared.heads.name.as_str(), error.in_one_line());
                tracing::warn!(volume, error, "no automatic snapshot was taken");
            }
        }
    }

    async fn take_and_drop(&self, rules: &Keep, is_due: bool, seen: &mut u64) -> Result<()> {
        if self.shared.now().records != *seen {
            // The snapshot is a record, too.
            *seen = self.take("").await?.records + 1;
        }
        if is_due {
            *seen += self.keep_snapshots(rules).await?.len() as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;
    use crate::heads::Claimed;
    use crate::testing::{memory, name, run, write};
    use crate::volumes::Volumes;
    use mica_block::{Manage as _, Objects};
    use mica_rt::spawn;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// The clock of the simulator, as that of the host.
    fn environment() -> Environment {
        let (start, ids) = (now(), AtomicU64::new(1));
        let clock = move || {
            let passed = now().saturating_since(start).as_nanos();
            1_700_000_000_000_000_000 + u64::try_from(passed).expect("hours")
        };
        Environment::new("host", clock, move || {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&ids.fetch_add(1, Ordering::Relaxed).to_le_bytes());
            id
        })
    }

    #[test]
    fn what_is_written_gets_snapshots_that_thin_out_and_rest_makes_none() {
        run(1, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let volumes = Volumes::open_or_make(objects, environment(), 1 << 20).await;
            let volumes = volumes.expect("a store");
            volumes.create(&name("web"), 1 << 20).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            let volume = Arc::new(volume);
            let rules: Keep = "2s/100ms,1m/1s".parse().expect("rules");
            let (taking, tending) = (Arc::clone(&volume), Arc::clone(&volume));
            let taking = spawn(async move { taking.take_by(&rules).await });
            let tending = spawn(async move { tending.tend().await });
            for step in 0..200 {
                write(&volume, step % 250 * 4096, &[7; 4096]).await;
                sleep(Duration::from_millis(50)).await;
            }
            sleep(Duration::from_secs(5)).await;
            let listed = volume.list().await.expect("listed");
            let last = listed.last().expect("many").number;
            assert!((70..=100).contains(&last), "{last} were taken in 10 s, one each 100 ms");
            assert!(
                (10..=14).contains(&listed.len()),
                "one of each second, and the last: {listed:?}"
            );
            volume.take("mine").await.expect("taken");
            sleep(Duration::from_secs(60)).await;
            let rest = volume.list().await.expect("listed");
            // The one with a label is a change as well.
            assert!(rest.len() <= 3, "an hour of rest makes none: {rest:?}");
            assert!(rest.iter().any(|snapshot| snapshot.label == "mine"));
            volume.close().await.expect("closed");
            taking.await;
            tending.await;
        });
    }
}
