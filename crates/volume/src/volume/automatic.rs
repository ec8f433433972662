//! Snapshots that a volume takes of itself while it is open.
//!
//! Invariants
//! - I1 As long as nobody writes, there is no new one, and next to nothing is done.
//! - I2 Guests wait for nothing here: snapshots are records among theirs.

use super::Volume;
use crate::keep::Keep;
use mica_block::{ManageSnapshots, Result};
use mica_rt::{Instant, now, sleep, timeout};
use std::time::Duration;

/// How often it is looked which are to be dropped, at most; and while nobody writes, and none was.
const DROP_EVERY: Duration = Duration::from_secs(1);
const DROP_AT_REST: Duration = Duration::from_secs(10);

impl Volume {
    /// Takes a snapshot without a label in each of the shortest intervals of `rules` in which the
    /// volume is written, and drops those that the rules do not keep, until the volume is closed.
    pub async fn take_by(&self, rules: &Keep) {
        if self.shared.writer.is_some() {
            // The end of the volume's life ends this.
            let _ = self.shared.over.unless_raised(self.take_until_refused(rules)).await;
        }
    }

    async fn take_until_refused(&self, rules: &Keep) {
        let (every, start) = (rules.shortest(), now());
        // Up to which record there is a snapshot.
        let (mut seen, mut dropped_at) = (self.shared.now().records, start);
        let mut rest = DROP_AT_REST.max(every);
        loop {
            if timeout(rest, self.shared.record_after(seen)).await.is_ok() {
                sleep(rest_of_interval(start, every)).await;
            }
            let is_due = now().saturating_since(dropped_at) >= DROP_EVERY;
            if is_due {
                dropped_at = now();
            }
            let before = seen;
            match self.take_and_drop(rules, is_due, &mut seen).await {
                // Others become too old soon.
                Ok(()) if seen != before => rest = DROP_EVERY.max(every),
                Ok(()) if is_due => rest = DROP_AT_REST.max(every),
                Ok(()) => {}
                Err(_) if self.shared.refusal(&self.shared.now()).is_some() => return,
                Err(error) => {
                    let (volume, error) = (self.shared.heads.name.as_str(), error.in_one_line());
                    tracing::warn!(volume, error, "no automatic snapshot was taken");
                }
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

/// Until when the interval lasts that it is now, of those of length `every` since `start`.
fn rest_of_interval(start: Instant, every: Duration) -> Duration {
    let passed = now().saturating_since(start).as_nanos() % every.as_nanos();
    every - Duration::from_nanos(u64::try_from(passed).expect("less than an interval"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::Environment;
    use crate::heads::Claimed;
    use crate::testing::{environment_at, memory, name, run, write};
    use crate::volumes::Volumes;
    use mica_block::{Manage as _, Objects};
    use mica_rt::spawn;
    use std::sync::Arc;

    /// The clock of the simulator, as that of the host.
    fn environment() -> Environment {
        let start = now();
        environment_at("host", move || {
            let passed = now().saturating_since(start).as_nanos();
            1_700_000_000_000_000_000 + u64::try_from(passed).expect("hours")
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
