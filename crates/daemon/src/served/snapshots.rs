//! What is done with the snapshots of a volume while it is served.

use super::Served;
use mica_block::{Error, ErrorKind, ManageSnapshots, Result, SnapshotInfo, Which};

impl Served {
    /// Takes a snapshot of everything that was answered before.
    ///
    /// # Errors
    /// As [`ManageSnapshots::take`]; `Denied` if the disk is closed, `Unsupported` if it is no
    /// volume.
    pub(crate) fn take_snapshot(&self, label: String) -> Result<SnapshotInfo> {
        self.on_snapshots(async move |snapshots| snapshots.take(&label).await)
    }

    /// All snapshots, by number.
    ///
    /// # Errors
    /// As [`Self::take_snapshot`].
    pub(crate) fn list_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        self.on_snapshots(async |snapshots| snapshots.list().await)
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

    fn on_snapshots<T: Send + 'static>(
        &self,
        act: impl AsyncFnOnce(&dyn ManageSnapshots) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let disk = self.opened().disk()?;
        let none = self.name.clone();
        self.resources.workers.run(move || async move {
            let snapshots = disk.snapshots().ok_or_else(|| {
                let what = format!("the disk {none:?} is no volume: it has no snapshots here");
                Error::new(ErrorKind::Unsupported, what)
            })?;
            act(snapshots).await
        })?
    }
}
