//! The snapshots of volumes that nobody has open, and what there is to read of any.
//!
//! What changes a volume is done as a writer does it: claim, head, extent, head. So nothing is new
//! to the other hosts, or to the protocol.

use super::Volumes;
use crate::format::head::Head;
use crate::freeing::needs_room;
use crate::heads::Claimed;
use crate::heads::Heads;
use crate::known::Change;
use crate::names::VolumeName;
use crate::opening::Opening;
use crate::segment::Cut;
use crate::snapshots::{all, check_new_label, find, missing};
use crate::state::State;
use crate::tree::Tree;
use crate::volume::Volume;
use mica_block::{ErrorKind, Manage, Result, SnapshotInfo, Which, check_label};
use mica_rt::sleep;
use std::time::Duration;

/// How often it is looked whether the store has a snapshot of an open volume, and the pause in
/// between: its writer puts what was just taken soon.
const LOOKS_MAX: usize = 20;
const LOOK_PAUSE: Duration = Duration::from_millis(100);

impl Volumes {
    /// The snapshots of a volume, by number. Of one that a writer has open these are all that are
    /// in the store.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume; otherwise what the store reports.
    pub async fn snapshots(&self, name: &VolumeName) -> Result<Vec<SnapshotInfo>> {
        let heads = self.heads(name);
        let infos = heads.with_counting(async |_head, state| {
            let all = all(&self.tree, state.snapshots).await?;
            Ok(all.iter().map(|record| record.info.clone()).collect())
        });
        infos.await
    }

    /// Takes a snapshot of a volume that nobody has open.
    ///
    /// # Errors
    /// `Denied` if it is open, or was handed over; `Invalid` if the label is not allowed, or
    /// another snapshot has it; otherwise as [`Self::snapshots`].
    pub async fn take_snapshot(&self, name: &VolumeName, label: &str) -> Result<SnapshotInfo> {
        check_label(label)?;
        let time_ns = self.environment.now_ns();
        let taken = self.edit(name, async |tree, state| {
            let others =
                if label.is_empty() { Vec::new() } else { all(tree, state.snapshots).await? };
            check_new_label(label, others.iter().map(|record| &*record.info.label))?;
            let (number, label) = (state.next_number(), label.to_owned());
            Ok(Cut::Take { number, label, time_ns, origin: None })
        });
        let (number, state) = taken.await?;
        let label = label.to_owned();
        Ok(SnapshotInfo { number, label, time_ns, len: state.len, records: state.records })
    }

    /// Drops a snapshot of a volume that nobody has open. The space comes back with the next
    /// collection.
    ///
    /// # Errors
    /// `Denied` if the volume is open, or was handed over, `NotFound` if there is no such snapshot;
    /// `NoSpace` if there is no room to say that it is dropped; otherwise as [`Self::snapshots`].
    pub async fn drop_snapshot(&self, name: &VolumeName, which: &Which) -> Result<()> {
        let volumes = self.freeing();
        let dropped = volumes.edit(name, async |tree, state| {
            let number = number_of(tree, state, name, which).await?;
            Ok(Cut::Drop { number })
        });
        dropped.await.map(drop).map_err(needs_room)
    }

    /// Gives a snapshot of a volume that nobody has open another label; an empty one is none.
    ///
    /// # Errors
    /// As [`Self::drop_snapshot`] and [`Self::take_snapshot`].
    pub async fn label_snapshot(
        &self,
        name: &VolumeName,
        which: &Which,
        label: &str,
    ) -> Result<()> {
        check_label(label)?;
        let labelled = self.edit(name, async |tree, state| {
            let number = number_of(tree, state, name, which).await?;
            let others = all(tree, state.snapshots).await?;
            let others = others.iter().filter(|record| record.info.number != number);
            check_new_label(label, others.map(|record| &*record.info.label))?;
            Ok(Cut::Label { number, label: label.to_owned() })
        });
        labelled.await.map(drop)
    }

    /// Makes a volume that nobody has open again what a snapshot of it has. All snapshots stay;
    /// what was written since the last of them is lost.
    ///
    /// # Errors
    /// As [`Self::drop_snapshot`].
    pub async fn rollback(&self, name: &VolumeName, which: &Which) -> Result<()> {
        let rolled_back = self.edit(name, async |tree, state| {
            let number = number_of(tree, state, name, which).await?;
            Ok(Cut::Rollback { number })
        });
        rolled_back.await.map(drop)
    }

    /// Opens a snapshot, for reading.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume or snapshot; otherwise what the store reports.
    pub async fn open_snapshot(&self, name: &VolumeName, which: &Which) -> Result<Volume> {
        let head = self.heads(name).ready().await?;
        let tree = self.disk_tree().with_access(self.access(name, &head.properties)?);
        let state = self.content(name, Some(which)).await?;
        Ok(Volume::readable(tree, self.heads(name), state).reading_snapshot(which))
    }

    /// What a volume has now, or a snapshot of it: a map and a length.
    pub(super) async fn content(&self, name: &VolumeName, which: Option<&Which>) -> Result<State> {
        let heads = self.heads(name);
        let content = self.with_recent(&heads, async |_head, state| {
            let Some(which) = which else { return Ok(*state) };
            match find(&self.tree, state.snapshots, which).await? {
                Some(record) => Ok(record.first_state()),
                None => Err(missing(name.as_str(), which)),
            }
        });
        content.await
    }

    /// As [`Heads::with_counting`]; if `act` does not find what it looks for, and the volume is
    /// open, again for a while.
    pub(crate) async fn with_recent<T>(
        &self,
        heads: &Heads,
        act: impl AsyncFn(&Head, &State) -> Result<T>,
    ) -> Result<T> {
        for _ in 1..LOOKS_MAX {
            match heads.with_counting(&act).await {
                Err(error)
                    if error.kind() == ErrorKind::NotFound
                        && heads.newest().await?.writer().is_some() => {}
                outcome => return outcome,
            }
            sleep(LOOK_PAUSE).await;
        }
        heads.with_counting(&act).await
    }

    /// Opens a volume that nobody has open, does what `decide` says, and closes it. Returns the
    /// number of the snapshot that it is about, and the state before.
    async fn edit(
        &self,
        name: &VolumeName,
        decide: impl AsyncFn(&Tree, &State) -> Result<Cut>,
    ) -> Result<(u64, State)> {
        let heads = self.heads(name);
        // What is refused costs no head.
        let first_look = heads.with_seen(async |seen| {
            heads.check_closed(seen.head())?;
            decide(&self.tree, &seen.head().state).await?;
            Ok(seen.clone())
        });
        let opening = Opening { seen: Some(first_look.await?), ..Claimed::OnlyIfClosed.into() };
        let volume = self.open_without_blocks(name, opening).await?;
        let state = volume.shared().now().state;
        let done = match decide(&self.tree, &state).await {
            Ok(cut) => {
                let number = cut.number();
                volume.shared().change_once(Change::Cut(cut)).await.map(|()| number)
            }
            Err(error) => Err(error),
        };
        // Whatever came of it, the volume is nobody's again.
        let closed = volume.close().await;
        let number = done?;
        closed?;
        Ok((number, state))
    }
}

async fn number_of(tree: &Tree, state: &State, name: &VolumeName, which: &Which) -> Result<u64> {
    let found = find(tree, state.snapshots, which).await?;
    found.map(|record| record.info.number).ok_or_else(|| missing(name.as_str(), which))
}
