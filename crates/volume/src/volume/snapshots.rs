//! The snapshots of a volume that is open.
//!
//! Invariants
//! - I1 A snapshot is a record among those of the guest's writes: it has all that were done before
//!   it, in their order, and none that came later. Nothing waits for it.
//! - I2 A task that needs to know the labels that there are holds `naming` until its record is
//!   made, so that no two snapshots get the same one. So does a task that drops a snapshot, whose
//!   label is free then. Snapshots without a label wait for nobody.
//! - I3 Rules drop no snapshot that has a label: they hold `naming`, too.
//! - I4 A snapshot costs the same however many there are: the labels are read once.

use super::Volume;
use crate::format::snapshot::{Origin, Record};
use crate::keep::Keep;
use crate::known::{Change, RecentCuts};
use crate::labels::{LABELS_MAX, Labels};
use crate::segment::Cut;
use crate::shared::Shared;
use crate::snapshots::{all, find, missing};
use crate::state::Root;
use crate::writing::Step;
use mica_block::{
    Error, ErrorKind, LocalFuture, ManageSnapshots, Result, SnapshotGroup, SnapshotInfo, Which,
    check_label,
};
use mica_rt::sync::Alone;
use std::sync::Arc;

impl Volume {
    /// Drops the automatic snapshots that `rules` do not keep now, and says which those were, the
    /// oldest first. Answered as [`ManageSnapshots::remove`]; requests go on meanwhile.
    ///
    /// # Errors
    /// As [`ManageSnapshots::remove`]: some may be dropped then.
    pub async fn keep_snapshots(&self, rules: &Keep) -> Result<Vec<SnapshotInfo>> {
        let rules = rules.clone();
        self.request(async move |shared| shared.keep_snapshots(&rules).await).await
    }
}

impl ManageSnapshots for Volume {
    fn take<'a>(&'a self, label: &'a str) -> LocalFuture<'a, Result<SnapshotInfo>> {
        Box::pin(async move {
            check_label(label)?;
            let label = label.to_owned();
            self.request(async move |shared| shared.take_snapshot(label).await).await
        })
    }

    fn take_in_group<'a>(
        &'a self,
        label: &'a str,
        group: &'a Arc<SnapshotGroup>,
    ) -> LocalFuture<'a, Result<SnapshotInfo>> {
        let (label, group) = (label.to_owned(), Arc::clone(group));
        Box::pin(self.request(async move |shared| {
            let taken = match check_label(&label) {
                Ok(()) => shared.take_in_group(label, &group).await,
                Err(error) => Err(error),
            };
            let name = || format!("volume {}", shared.heads.name.as_str());
            taken.map_err(|error| group.fail(error.wrap(name())))
        }))
    }

    fn list(&self) -> LocalFuture<'_, Result<Vec<SnapshotInfo>>> {
        Box::pin(self.shared.list_snapshots())
    }

    fn remove<'a>(&'a self, which: &'a Which) -> LocalFuture<'a, Result<()>> {
        let which = which.clone();
        Box::pin(self.request(async move |shared| shared.drop_snapshot(&which).await))
    }

    fn label<'a>(&'a self, which: &'a Which, label: &'a str) -> LocalFuture<'a, Result<()>> {
        Box::pin(async move {
            check_label(label)?;
            let (which, label) = (which.clone(), label.to_owned());
            self.request(async move |shared| shared.label_snapshot(&which, label).await).await
        })
    }
}

/// Writers wait as long as this is there.
struct HeldWriters<'a>(&'a Shared);

impl<'a> HeldWriters<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.now().holds += 1;
        Self(shared)
    }
}

impl Drop for HeldWriters<'_> {
    fn drop(&mut self) {
        self.0.now().holds -= 1;
        self.0.progress.wake_all();
    }
}

impl Shared {
    async fn take_snapshot(self: &Arc<Self>, label: String) -> Result<SnapshotInfo> {
        self.putter()?;
        let named = self.name(&label).await?;
        let info = self.record_snapshot(label, self.heads.environment.now_ns(), None).await?;
        if let Some(named) = named {
            self.note_label(&named, info.number, &info.label);
        }
        self.flush().await?;
        Ok(info)
    }

    /// As [`Self::take_snapshot`], at one instant with the other disks of `group`. A snapshot that
    /// was taken before another disk failed is dropped again.
    async fn take_in_group(
        self: &Arc<Self>,
        label: String,
        group: &SnapshotGroup,
    ) -> Result<SnapshotInfo> {
        self.putter()?;
        let named = self.name(&label).await?;
        let held = HeldWriters::new(self);
        group.all_hold().await?;
        let info = self.record_snapshot(label, self.heads.environment.now_ns(), None).await?;
        let all_taken = group.all_taken().await;
        drop(held);
        if let Err(error) = all_taken {
            let number = info.number;
            self.change_once(Change::Cut(Cut::Drop { number })).await?;
            return Err(error);
        }
        if let Some(named) = named {
            self.note_label(&named, info.number, &info.label);
        }
        self.flush().await?;
        Ok(info)
    }

    /// What is held until a snapshot has this label, which no other has.
    async fn name(&self, label: &str) -> Result<Option<Alone<'_>>> {
        if label.is_empty() {
            return Ok(None);
        }
        let alone = self.naming.alone().await;
        self.with_labels(&alone, |labels| labels.check_free(label, None)).await??;
        Ok(Some(alone))
    }

    /// Calls `act` with the labels that there are, which are read if nobody has asked yet.
    async fn with_labels<T>(
        &self,
        _named: &Alone<'_>,
        act: impl FnOnce(&Labels) -> T,
    ) -> Result<T> {
        let known = self.labels.lock().take();
        let labels = match known {
            Some(labels) => labels,
            None => Labels::of(self.list_snapshots().await?),
        };
        let outcome = act(&labels);
        if labels.len() < LABELS_MAX {
            *self.labels.lock() = Some(labels);
        }
        Ok(outcome)
    }

    /// Snapshot `number` has `label` from now on; none if it is empty.
    fn note_label(&self, _named: &Alone<'_>, number: u64, label: &str) {
        if let Some(labels) = &mut *self.labels.lock() {
            labels.set(number, label.to_owned());
        }
    }

    /// Takes a snapshot, of this time and origin; it is not durable yet. Nobody else has the label.
    ///
    /// # Errors
    /// `Limit` if the volume can have no more; why nothing is accepted.
    pub(crate) async fn record_snapshot(
        self: &Arc<Self>,
        label: String,
        time_ns: u64,
        origin: Option<Origin>,
    ) -> Result<SnapshotInfo> {
        let taken = self.change(|recorder| {
            let (number, len, records) =
                (recorder.now.next_snapshot(), recorder.now.len, recorder.now.records);
            if number == u64::MAX {
                let what = "the volume has had every snapshot";
                return Step::Done(Err(Error::new(ErrorKind::Limit, what)));
            }
            let cut = Cut::Take { number, label: label.clone(), time_ns, origin };
            match recorder.record(Change::Cut(cut)) {
                true => {
                    let label = label.clone();
                    Step::Done(Ok(SnapshotInfo { number, label, time_ns, len, records }))
                }
                false => Step::Again,
            }
        });
        taken.await?
    }

    async fn list_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        let tree = self.tree_for_verbs();
        let listed = self.reading(async || {
            let (generation, root, recent) = self.snapshots_now();
            let stored = all(&tree, root).await.map(|stored| {
                let infos = stored.iter().map(|record| record.info.clone()).collect();
                recent.apply_to_all(infos)
            });
            (generation, stored)
        });
        listed.await
    }

    /// The snapshots of the state, of this generation, and what was done to them since.
    fn snapshots_now(&self) -> (u64, Root, RecentCuts) {
        let now = self.now();
        (now.generation, now.state.snapshots, now.recent_cuts())
    }

    async fn drop_snapshot(self: &Arc<Self>, which: &Which) -> Result<()> {
        self.putter()?;
        let alone = self.naming.alone().await;
        let number = self.number_of(&alone, which).await?;
        self.change_once(Change::Cut(Cut::Drop { number })).await?;
        self.note_label(&alone, number, "");
        drop(alone);
        self.flush().await
    }

    async fn keep_snapshots(self: &Arc<Self>, rules: &Keep) -> Result<Vec<SnapshotInfo>> {
        self.putter()?;
        // Nobody gives one a label between the look and its end (I3).
        let alone = self.naming.alone().await;
        let all = self.list_snapshots().await?;
        let dropped = rules.dropped(self.heads.environment.now_ns(), all);
        for snapshot in &dropped {
            let number = snapshot.number;
            self.change_once(Change::Cut(Cut::Drop { number })).await?;
        }
        drop(alone);
        if !dropped.is_empty() {
            self.flush().await?;
        }
        Ok(dropped)
    }

    async fn label_snapshot(self: &Arc<Self>, which: &Which, label: String) -> Result<()> {
        self.putter()?;
        let alone = self.naming.alone().await;
        let number = self.number_of(&alone, which).await?;
        let is_free = self.with_labels(&alone, |labels| labels.check_free(&label, Some(number)));
        is_free.await??;
        let given = label.clone();
        self.change_once(Change::Cut(Cut::Label { number, label })).await?;
        self.note_label(&alone, number, &given);
        drop(alone);
        self.flush().await
    }

    async fn number_of(&self, named: &Alone<'_>, which: &Which) -> Result<u64> {
        let found = match which {
            Which::Number(number) => {
                let tree = self.tree_for_verbs();
                let found = self.reading(async || {
                    let (generation, root, recent) = self.snapshots_now();
                    let stored = find(&tree, root, which).await;
                    let info = |record: Arc<Record>| record.info.clone();
                    (generation, stored.map(|stored| recent.apply(*number, stored.map(info))))
                });
                found.await?.map(|found| found.number)
            }
            Which::Label(label) => self.with_labels(named, |labels| labels.number(label)).await?,
        };
        found.ok_or_else(|| missing(self.heads.name.as_str(), which))
    }
}
