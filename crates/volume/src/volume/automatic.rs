//! Snapshots that a volume takes of itself while it is open: by rules, one in each interval, or one
//! after each write or before each flush of its guest, so that none of them is ever lost.
//!
//! Invariants
//! - I1 As long as nobody writes, there is no new one, and next to nothing is done.
//! - I2 Guests wait for nothing here: snapshots are records among theirs.

use super::Volume;
use crate::keep::{Keep, SnapshotPer};
use crate::shared::Shared;
use mica_block::{ManageSnapshots, Result};
use mica_rt::{Instant, now, sleep, timeout};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often it is looked which are to be dropped, at most; and while nobody writes, and none was.
const DROP_EVERY: Duration = Duration::from_secs(1);
const DROP_AT_REST: Duration = Duration::from_secs(10);

impl Shared {
    /// The guest has changed something, which is recorded.
    pub(super) async fn after_change(self: &Arc<Self>) -> Result<()> {
        match self.snapshot_per() {
            SnapshotPer::Write => self.take_automatic().await,
            SnapshotPer::Interval | SnapshotPer::Flush => Ok(()),
        }
    }

    /// The guest wants what it has changed to be durable.
    pub(super) async fn before_flush(self: &Arc<Self>) -> Result<()> {
        match self.snapshot_per() {
            SnapshotPer::Flush if self.has_changes() => self.take_automatic().await,
            _ => Ok(()),
        }
    }

    fn snapshot_per(&self) -> SnapshotPer {
        self.writer.as_ref().map_or(SnapshotPer::Interval, |putter| putter.snapshot_per)
    }

    /// Whether the disk was changed since the last automatic snapshot.
    fn has_changes(&self) -> bool {
        let Some(putter) = &self.writer else { return false };
        self.now().records > putter.counts.snapshot_records.load(Ordering::Relaxed)
    }

    async fn take_automatic(self: &Arc<Self>) -> Result<()> {
        let time_ns = self.heads.environment.now_ns();
        let taken = self.record_snapshot(String::new(), time_ns, None).await?;
        if let Some(putter) = &self.writer {
            // The snapshot is a record, too.
            putter.counts.snapshot_records.fetch_max(taken.records + 1, Ordering::Relaxed);
        }
        Ok(())
    }
}

impl Volume {
    /// Drops those of its own snapshots that `rules` do not keep, until the volume is closed.
    pub async fn drop_by(&self, rules: &Keep) {
        if self.shared.writer.is_some() {
            let _ = self.shared.over.unless_raised(self.drop_until_refused(rules)).await;
        }
    }

    async fn drop_until_refused(&self, rules: &Keep) {
        loop {
            let seen = self.shared.now().records;
            match self.keep_snapshots(rules).await {
                Ok(_) => {}
                Err(_) if !self.shared.now().stage.is_accepting() => return,
                Err(error) => {
                    let (volume, error) = (self.shared.heads.name.as_str(), error.in_one_line());
                    tracing::warn!(volume, error, "no automatic snapshot was dropped");
                }
            }
            // While nobody writes, others become too old all the same.
            let _ = timeout(DROP_AT_REST, self.shared.record_after(seen)).await;
            sleep(DROP_EVERY).await;
        }
    }

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
                Err(_) if !self.shared.now().stage.is_accepting() => return,
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
    use crate::opening::Opening;
    use crate::testing::{environment_at, memory, name, run, write};
    use crate::volumes::Volumes;
    use mica_block::Disk as _;
    use mica_block::{Manage as _, Objects};
    use mica_rt::spawn;

    /// The clock of the simulator, as that of the host.
    fn environment() -> Environment {
        let start = now();
        environment_at("host", move || {
            let passed = now().saturating_since(start).as_nanos();
            1_700_000_000_000_000_000 + u64::try_from(passed).expect("hours")
        })
    }

    /// A store with a volume.
    async fn made() -> Volumes {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = Volumes::open_or_make(objects, environment(), 1 << 20).await;
        let volumes = volumes.expect("a store");
        volumes.create(&name("web"), 1 << 20).await.expect("made");
        volumes
    }

    async fn open(volumes: &Volumes, per: SnapshotPer) -> Volume {
        let opening = Opening { snapshot_per: per, ..Claimed::Refuse.into() };
        volumes.open_volume(&name("web"), opening).await.expect("open")
    }

    /// Snapshot n is what the disk was after write n.
    #[test]
    fn each_write_has_a_snapshot_of_its_own() {
        run(3, async {
            let volumes = made().await;
            let volume = open(&volumes, SnapshotPer::Write).await;
            for byte in 1..=200 {
                write(&volume, u64::from(byte % 3) * 4096, &[byte; 4096]).await;
            }
            volume.flush().await.expect("flushed");
            let listed = volume.list().await.expect("listed");
            assert_eq!(listed.len(), 200, "a flush takes none");
            volume.close().await.expect("closed");
            for number in [1_u8, 2, 3, 100, 199, 200] {
                let which = mica_block::Which::Number(number.into());
                let snapshot = volumes.open_snapshot(&name("web"), &which).await.expect("open");
                for back in 0..3 {
                    let byte = number.saturating_sub(back);
                    let at = u64::from(byte % 3) * 4096;
                    let found = crate::testing::read(&snapshot, at, 4096).await;
                    assert!(byte == 0 || found == [byte; 4096], "{number}, {back}");
                }
            }
        });
    }

    #[test]
    fn each_flush_after_a_change_has_a_snapshot_of_its_own() {
        run(4, async {
            let volumes = made().await;
            let volume = Arc::new(open(&volumes, SnapshotPer::Flush).await);
            for byte in 1..=5 {
                for block in 0..10 {
                    write(&volume, block * 4096, &[byte; 4096]).await;
                }
                volume.flush().await.expect("flushed");
                volume.flush().await.expect("nothing is new");
            }
            let listed = volume.list().await.expect("listed");
            let records: Vec<_> = listed.iter().map(|snapshot| snapshot.records).collect();
            assert_eq!(records, [10, 21, 32, 43, 54], "each is a record, too");
            // Those that the rules do not keep go.
            let (dropping, rules) = (Arc::clone(&volume), "1s/1s".parse().expect("rules"));
            let dropping = spawn(async move { dropping.drop_by(&rules).await });
            sleep(Duration::from_secs(60)).await;
            assert_eq!(volume.list().await.expect("listed").len(), 1, "the newest stays");
            volume.close().await.expect("closed");
            dropping.await;
        });
    }

    #[test]
    fn what_is_written_gets_snapshots_that_thin_out_and_rest_makes_none() {
        run(1, async {
            let volumes = made().await;
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
