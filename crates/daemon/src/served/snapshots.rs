//! What is done with the snapshots of a volume while it is served.

use super::{End, Served, State};
use mica_block::{
    ClonedFrom, Error, ErrorKind, Manage, ManageSnapshots, ManageVolume, Result, SnapshotGroup,
    SnapshotInfo, Which,
};
use mica_rt::{Backend, Executor};
use mica_units::GuestRange;
use std::sync::Arc;
use std::thread;

impl Served {
    /// Takes a snapshot of everything that was answered before.
    ///
    /// # Errors
    /// As [`ManageSnapshots::take`]; `Denied` if the disk is closed, `Unsupported` if it is no
    /// volume.
    pub(crate) fn take_snapshot(&self, label: String) -> Result<SnapshotInfo> {
        self.on_snapshots(async move |snapshots| snapshots.take(&label).await)
    }

    /// Takes a snapshot of each of `all`, which are different, at one instant, with its label. If
    /// that fails there is none of any.
    ///
    /// # Errors
    /// As [`Self::take_snapshot`], of the first that failed.
    pub(crate) fn take_snapshots(all: &[(Arc<Self>, String)]) -> Result<Vec<SnapshotInfo>> {
        let take = |(served, label): &(Arc<Self>, String), group| {
            served.take_in_group(label.clone(), group)
        };
        let outcomes = in_group(all, take);
        if let Some(error) = outcomes.iter().find_map(|outcome| outcome.as_ref().err().cloned()) {
            for ((served, _), outcome) in all.iter().zip(outcomes) {
                if let Ok(taken) = outcome {
                    // It was not durable, or another was not. The first failure is reported.
                    let _ = served.drop_snapshot(Which::Number(taken.number));
                }
            }
            return Err(error);
        }
        outcomes.into_iter().collect()
    }

    fn take_in_group(&self, label: String, group: Arc<SnapshotGroup>) -> Result<SnapshotInfo> {
        let of_all = Arc::clone(&group);
        let taken = self
            .on_snapshots(async move |snapshots| Ok(snapshots.take_in_group(&label, &group).await));
        // One that is not served makes all others fail.
        let name = || format!("disk {}", self.name);
        taken.unwrap_or_else(|error| Err(of_all.fail(error.wrap(name()))))
    }

    /// All snapshots, by number.
    ///
    /// # Errors
    /// As [`Self::take_snapshot`].
    pub(crate) fn list_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.on_snapshots(async |snapshots| snapshots.list().await)
    }

    /// What the volume was cloned from, if it is a clone.
    ///
    /// # Errors
    /// As [`Self::clone_volume`].
    pub(crate) fn cloned_from(&self) -> Result<Option<ClonedFrom>> {
        self.on_volume(async |volume| Ok(volume.cloned_from().await))
    }

    /// Drops a snapshot.
    ///
    /// # Errors
    /// As [`Self::take_snapshot`], and `NotFound`.
    pub(crate) fn drop_snapshot(&self, which: Which) -> Result<()> {
        self.on_snapshots(async move |snapshots| snapshots.remove(&which).await)
    }

    /// Gives a snapshot another label.
    ///
    /// # Errors
    /// As [`Self::drop_snapshot`].
    pub(crate) fn label_snapshot(&self, which: Which, label: String) -> Result<()> {
        self.on_snapshots(async move |snapshots| snapshots.label(&which, &label).await)
    }

    /// Makes a volume in the store of this one, which begins as a snapshot of it, or as everything
    /// that was answered before.
    ///
    /// # Errors
    /// As [`ManageVolume::clone_as`]; `Denied` if the disk is closed, `Unsupported` if it is no
    /// volume.
    pub(crate) fn clone_volume(&self, which: Option<Which>, target: String) -> Result<()> {
        self.on_volume(async move |volume| volume.clone_as(which.as_ref(), &target).await)
    }

    /// What may differ between a snapshot and another, or everything that was answered before.
    ///
    /// # Errors
    /// As [`Self::clone_volume`], and [`ManageVolume::differences`].
    pub(crate) fn differences(
        &self,
        before: Which,
        after: Option<Which>,
    ) -> Result<Vec<GuestRange>> {
        self.on_volume(async move |volume| volume.differences(&before, after.as_ref()).await)
    }

    /// Makes a volume what it was at a snapshot, while it is drained.
    ///
    /// # Errors
    /// `Denied` if it is open: its guest would go on with what it has read; or if it is not served
    /// for writing. `Unsupported` if it is no volume; otherwise what the store reports.
    pub(crate) fn roll_back(&self, which: &Which) -> Result<()> {
        let _changes = self.lock_changes();
        let url = self.volume.url()?.filter(|url| url.snapshot.is_none()).ok_or_else(|| {
            let what = format!("the disk {:?} is not a volume that can be rolled back", self.name);
            Error::new(ErrorKind::Unsupported, what)
        })?;
        if !self.settings.writes() {
            return Err(self.denied("is served read-only: use mica volume rollback"));
        }
        match &*self.lock() {
            State::Ended(_, End::Closed(Ok(())) | End::NotServed(_)) => {}
            State::Ended(_, End::Closed(Err(_)) | End::Removed(_)) => {
                return Err(self.denied("was closed for good: use mica volume rollback"));
            }
            State::Ended(_, End::New | End::Closing) => return Err(self.denied("is not ready")),
            State::Opening | State::Prepared(_) | State::Serving(_) => {
                let name = &self.name;
                return Err(self.denied(&format!(
                    "is served, and a guest would keep using what it has read: stop that guest, \
                     then mica ctl drain {name}, this again, and mica ctl undrain {name}"
                )));
            }
        }
        let executor = Executor::new(Backend::Pool)
            .map_err(|error| Error::from_io("rolling a volume back", error))?;
        executor.block_on(async {
            let store = self.resources.stores.open(&url.store).await?;
            let _held = store.settle(&url.name).await?;
            store.volumes().clone().for_verbs().rollback(&url.name, which).await
        })
    }

    fn on_volume<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(&dyn ManageVolume) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let none = self.name.clone();
        self.on_disk(async move |disk| {
            let volume = disk.volume().ok_or_else(|| {
                let what = format!("the disk {none:?} is not a volume that is open for writing");
                Error::new(ErrorKind::Unsupported, what)
            })?;
            act(volume).await
        })
    }

    fn on_snapshots<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(&dyn ManageSnapshots) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let none = self.name.clone();
        self.on_disk(async move |disk| {
            let snapshots = disk.snapshots().ok_or_else(|| {
                let what = format!(
                    "the disk {none:?} is not a volume: the snapshots of a chain are its layers, \
                     which `mica info --backing-chain` shows"
                );
                Error::new(ErrorKind::Unsupported, what)
            })?;
            act(snapshots).await
        })
    }

    /// What `act` does with the disk, on a worker.
    fn on_disk<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(&dyn Manage) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let disk = self.opened().disk()?;
        self.resources.workers.run(move || async move { act(&*disk).await })?
    }
}

/// What `act` did for each of `all`, at the same time: they wait for each other, on whichever
/// threads their disks are. All have ended when this returns.
pub(super) fn in_group<D: Sync, T: Send>(
    all: &[D],
    act: impl Fn(&D, Arc<SnapshotGroup>) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let group = Arc::new(SnapshotGroup::new(all.len()));
    at_once(all, |one| act(one, Arc::clone(&group)), |error| group.fail(error))
}

/// What `act` did for each of `all`, on a thread each; what `not_started` makes of the error if
/// there is none for it. All have ended when this returns.
pub(super) fn at_once<D: Sync, T: Send>(
    all: &[D],
    act: impl Fn(&D) -> Result<T> + Sync,
    not_started: impl Fn(Error) -> Error,
) -> Vec<Result<T>> {
    let panicked = || Error::new(ErrorKind::Io, "the thread that took a snapshot panicked");
    thread::scope(|scope| {
        let start = |one| {
            let act = &act;
            let thread = thread::Builder::new().name("mica-group".to_owned());
            thread.spawn_scoped(scope, move || act(one))
        };
        let threads: Vec<_> = all.iter().map(start).collect();
        let ended = threads.into_iter().map(|thread| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|_| Err(panicked())),
            Err(error) => Err(not_started(Error::from_io("starting a thread", error))),
        });
        ended.collect()
    })
}
