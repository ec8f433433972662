//! What the owner of a volume does with it that no other disk knows: its store, and other hosts.
//!
//! Invariants
//! - I1 A hand-over ends nothing before all that was done is in the store. If the store does not
//!   take that in time, the volume is open as before.

use super::Volume;
use crate::heads::{End, check_host};
use crate::known::Now;
use crate::shared::{Counts, Putter, Shared};
use crate::writing;
use mica_block::{
    ClonedFrom, Error, ErrorKind, LocalFuture, LogStats, ManageVolume, Result, VolumeStats,
};
use mica_rt::timeout;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How long the store may take for the last of what was done before a hand-over: guests wait.
const LAST_WRITES_MAX: Duration = Duration::from_secs(10);

impl Volume {
    /// Closes the volume, as [`mica_block::Manage::close`] does, for `host`: no other opens it
    /// then, except by force.
    ///
    /// # Errors
    /// `Invalid` if no host can have this name; otherwise as [`mica_block::Manage::close`]. If the
    /// store does not take the last writes in time, the volume is open as before.
    pub async fn hand_over(&self, host: &str) -> Result<()> {
        check_host(host)?;
        match timeout(LAST_WRITES_MAX, self.shared.destage_all()).await {
            Ok(stored) => stored?,
            Err(_) => {
                let (seconds, name) = (LAST_WRITES_MAX.as_secs(), self.shared.heads.name.as_str());
                let what = format!(
                    "volume {name} is not handed over: the store has not taken its last writes \
                     within {seconds} s"
                );
                return Err(Error::new(ErrorKind::Io, what));
            }
        }
        self.shared.end_unless_given_up(&End::HandedTo(host.to_owned())).await
    }
}

impl ManageVolume for Volume {
    fn destage_all(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.shared.destage_all())
    }

    fn checkpoint(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.shared.destage_all().await?;
            Self::checkpoint(self).await
        })
    }

    fn prepare_handover(&self) {
        self.shared.set_handover_expected(true);
    }

    fn abandon_handover(&self) {
        self.shared.set_handover_expected(false);
    }

    fn check_handover_target(&self, host: &str) -> Result<()> {
        check_host(host)
    }

    fn hand_over<'a>(&'a self, host: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(Self::hand_over(self, host))
    }

    fn abort_import(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.shared.end(&End::Deleted))
    }

    fn is_ending(&self) -> bool {
        self.shared.now().stage.is_ending()
    }

    fn cloned_from(&self) -> LocalFuture<'_, Option<ClonedFrom>> {
        Box::pin(async {
            let writer = self.shared.writer.as_ref()?;
            let origin = writer.owned.lock().head.origin.clone()?;
            let heads = self.shared.heads.of(&origin.name);
            Some(origin.looked_up(&heads, &self.shared.tree_for_verbs()).await)
        })
    }

    fn figures(&self) -> VolumeStats {
        self.shared.writer.as_ref().map_or_else(VolumeStats::default, |it| self.shared.figures(it))
    }
}

impl Shared {
    fn figures(&self, putter: &Putter) -> VolumeStats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let ms_since = |since_ns: Option<u64>| {
            let now_ns = self.heads.environment.now_ns();
            since_ns.map_or(0, |since_ns| now_ns.saturating_sub(since_ns) / 1_000_000)
        };
        let silent_since = putter.trouble.lock().as_ref().map(|trouble| trouble.since_ns);
        let counts = &putter.counts;
        let now = self.now();
        VolumeStats {
            log: putter.log.as_ref().map(|log| {
                let room = log.room();
                let syncs = counts.syncs.times();
                LogStats { used_bytes: room.used, bytes: room.len, syncs }
            }),
            records: counts.records(&now),
            pending_records: now.records - now.state.records,
            pending_bytes: now.pending_bytes(),
            pending_ms: ms_since(now.pending_since_ns),
            extents_in_flight: now.in_flight() as u64,
            extents: count(&counts.extents),
            heads: count(&counts.heads),
            extent_bytes: count(&counts.extent_bytes),
            put_failures: count(&counts.put_failures),
            puts: counts.puts.times(),
            store_silent_ms: ms_since(silent_since),
            throttled_writes: count(&counts.throttled),
            is_throttled: writing::is_throttled(self, &now),
            snapshots: now.snapshots(),
            boot: self.boot.as_ref().map(|boot| boot.figures()),
            is_fenced: now.stage.fence().is_some(),
        }
    }

    /// Finds out how many snapshots there were when the volume was opened, for its figures.
    pub(crate) async fn count_snapshots(self: Arc<Self>) {
        let (tree, root) = (self.tree_for_verbs(), self.now().snapshots_at_open);
        let counted = crate::snapshots::count(&tree, root);
        // What was dropped since may be collected: then nobody knows.
        if let Some(Ok(count)) = self.over.unless_raised(counted).await {
            self.now().snapshot_count_at_open = Some(count);
        }
    }
}

impl Counts {
    fn records(&self, now: &Now) -> u64 {
        now.records.saturating_sub(self.first_record.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heads::Claimed;
    use crate::testing::{memory, name, range, read, run, volumes, write};
    use mica_block::{Disk as _, Manage as _, Objects};
    use mica_store::object::{FaultyObjects, FaultyOptions, ObjectOperation};

    const SECOND: Duration = Duration::from_secs(1);

    /// The story: the store went away while a volume was handed over, and neither host had it.
    #[test]
    fn hand_over_that_the_store_does_not_take_leaves_the_volume_open() {
        run(31, async {
            let memory = memory();
            // A put takes longer than guests are to wait.
            let options = FaultyOptions {
                only: Some(ObjectOperation::Put),
                slow: 1.0,
                slow_by: 2 * LAST_WRITES_MAX,
                ..FaultyOptions::default()
            };
            let slow = FaultyObjects::new(Arc::new(memory.clone()), options);
            let objects: Arc<dyn Objects> = Arc::new(slow);
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), 1 << 20).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[1; 4096]).await;
            let refused = volume.hand_over("host-2").await.expect_err("it takes too long");
            assert!(refused.in_one_line().contains("not handed over"), "{refused:?}");
            assert!(!volume.is_ending() && volume.latch().is_none());
            volume.prepare_handover();
            write(&volume, 4096, &[2; 4096]).await;
            ManageVolume::destage_all(&volume).await.expect("stored");
            assert_eq!(volume.figures().pending_records, 0);
            volume.hand_over("host-2").await.expect("handed over");
            assert!(volume.is_ending());
            let refused = volumes.open_volume(&name("web"), Claimed::Refuse).await.map(drop);
            assert!(refused.expect_err("not ours").in_one_line().contains("host-2"));
            let elsewhere = crate::testing::volumes(&objects, "host-2").await;
            let heir = elsewhere.open_volume(&name("web"), Claimed::Refuse).await.expect("ours");
            assert_eq!(read(&heir, 4096, 4096).await, [2; 4096]);
            heir.close().await.expect("closed");
        });
    }

    #[test]
    fn figures_say_what_the_store_lacks_and_for_how_long() {
        run(32, async {
            let objects: Arc<dyn Objects> = Arc::new(memory());
            let start = mica_rt::now();
            let environment = crate::testing::environment_at("host-1", move || {
                let passed = mica_rt::now().saturating_since(start).as_nanos();
                1_700_000_000_000_000_000 + u64::try_from(passed).expect("hours")
            });
            let volumes = crate::volumes::Volumes::open_or_make(objects, environment, 1 << 20);
            let volumes = volumes.await.expect("a store");
            volumes.create(&name("web"), 1 << 20).await.expect("made");
            for label in ["one", "two"] {
                volumes.take_snapshot(&name("web"), label).await.expect("taken");
            }
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            assert_eq!(volume.figures().snapshots, None, "they were not counted yet");
            Arc::clone(volume.shared()).count_snapshots().await;
            write(&volume, 0, &[1; 8192]).await;
            mica_rt::sleep(3 * SECOND).await;
            write(&volume, 8192, &[1; 4096]).await;
            let figures = volume.figures();
            assert_eq!((figures.records, figures.pending_records), (3, 3));
            assert_eq!((figures.pending_bytes, figures.pending_ms), (3 * 4096, 3000));
            assert_eq!((figures.extents, figures.log), (0, None));
            volume.snapshots().expect("has them").take("three").await.expect("taken");
            let figures = volume.figures();
            assert_eq!((figures.pending_records, figures.pending_ms), (0, 0));
            assert_eq!((figures.extents, figures.puts.count), (1, 1));
            assert!(figures.extent_bytes > 3 * 4096 && !figures.is_throttled);
            assert_eq!(figures.snapshots, Some(3));
            // Another host takes it over.
            let elsewhere = crate::testing::volumes(&volumes.objects, "host-2").await;
            let heir = elsewhere.open_volume(&name("web"), Claimed::TakeOver).await.expect("ours");
            write(&volume, 0, &[4; 4096]).await;
            ManageVolume::destage_all(&volume).await.expect_err("fenced");
            assert!(volume.figures().is_fenced);
            // What it has is not what the volume is.
            let planned = volume.plan(range(0, 4096), Vec::new()).finish().await;
            assert_eq!(planned.map(drop).expect_err("it is old").kind(), ErrorKind::Denied);
            heir.close().await.expect("closed");
        });
    }
}
