//! Who needs how much of a store: volumes, and snapshots of one.
//!
//! What is found as a collector finds it ([`Mark`]), with who names each block and each node. So a
//! node is read once, however many share it. Memory is that of a collection, and four bytes for
//! each block that is wanted of an older extent: 100 MB for 100 GiB that were written at random,
//! and next to nothing for what was written in sequence.

use crate::collect::client::Client;
use crate::collect::extents::list_extents;
use crate::collect::mark::Mark;
use crate::collect::names::Named;
use crate::collect::owners::{RootOf, Who};
use crate::collect::{AllMarked, Bytes, Collected, Progress, Speed, Step};
use crate::names::VolumeName;
use crate::volumes::Volumes;
use mica_block::{Error, ErrorKind, Result, SnapshotInfo};
use std::collections::HashMap;
use std::sync::Arc;

/// What a store has.
#[derive(Clone, Default, Debug)]
pub struct Usage {
    /// What a collection would say now, but for what compaction can take.
    pub collected: Collected,
    /// What is named, once, whoever shares it.
    pub needed: Bytes,
    /// What several volumes need, once.
    pub shared: Bytes,
    /// All volumes by name, or the one that was asked for.
    pub volumes: Vec<VolumeUsage>,
}

/// What one volume needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct VolumeUsage {
    /// Its name.
    pub name: VolumeName,
    /// Length of the disk.
    pub len: u64,
    /// The host that has it open.
    pub open_on: Option<String>,
    /// How many snapshots it has.
    pub snapshot_count: u64,
    /// What it and its snapshots need, and how many extents have some of that. Of a store with more
    /// than 64 volumes this is only known of one that was asked for.
    pub held: Option<Held>,
    /// What no other volume needs.
    pub only: Bytes,
    /// Of this, what none of its snapshots needs.
    pub only_now: Bytes,
    /// What its writer has put since its last checkpoint, which counts as needed as a whole.
    pub recent_bytes: u64,
    /// Its snapshots by number, if it was asked for.
    pub snapshots: Vec<SnapshotUsage>,
}

/// What a volume needs, whoever else does.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Held {
    /// How much.
    pub bytes: Bytes,
    /// Extents with some of it.
    pub extents: u64,
    /// The length of these.
    pub extent_bytes: u64,
}

/// What one snapshot needs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SnapshotUsage {
    /// Which.
    pub info: SnapshotInfo,
    /// What nothing else needs: it is free when the snapshot is dropped.
    pub only: Bytes,
}

impl Volumes {
    /// Finds out who needs how much: each volume, or `of` with each of its snapshots. Changes
    /// nothing.
    ///
    /// # Errors
    /// `NotFound` if there is no volume `of`; as [`Self::collect`].
    pub async fn usage(
        &self,
        of: Option<&VolumeName>,
        speed: Speed,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Usage> {
        if let Some(name) = of {
            self.info(name).await?;
        }
        let client = Client::new(Arc::clone(&self.objects), speed);
        let listed = list_extents(&client, |extents| {
            progress(Progress { extents, ..Progress::default() });
        });
        let listed = listed.await?;
        let of_extents = listed.len() as u64;
        let mut at = Progress { step: Step::Mark, of_extents, ..Progress::default() };
        let begin = |names: &[Arc<Named>]| {
            let number = |name: &VolumeName| {
                let number = names.iter().position(|named| named.name == *name);
                number.filter(|number| names[*number].is_alive()).ok_or_else(|| {
                    let what = format!("volume {} was deleted just now", name.as_str());
                    Error::new(ErrorKind::NotFound, what)
                })
            };
            let of = of.map(number).transpose()?;
            let of = of.map(|number| u32::try_from(number).expect("fewer names than blocks"));
            Ok(Mark::counting(&client, names, of))
        };
        let marked = self.mark_all(&client, &listed, false, begin, &mut at, progress).await?;
        let recent = |named: &Named| {
            let Some((writer, first)) = named.above() else { return 0 };
            let its = listed.iter().filter(|l| l.id.writer == writer && l.id.sequence >= first);
            its.map(|listed| listed.len).sum()
        };
        Ok(counted(marked, of, recent))
    }
}

/// What was counted, by volume.
fn counted(
    marked: AllMarked<'_>,
    of: Option<&VolumeName>,
    recent: impl Fn(&Named) -> u64,
) -> Usage {
    let AllMarked { plan, names, mark } = marked;
    let tally = mark.tally.as_ref().expect("it was counted");
    let mut usage = Usage::default();
    let (mut only, mut now, mut of_snapshots) = (HashMap::new(), HashMap::new(), HashMap::new());
    for (owner, bytes) in &tally.bytes {
        usage.needed += *bytes;
        let volume = match mark.owners.of(*owner).who {
            Who::Root(RootOf { name, snapshot: None }) => {
                *now.entry(name).or_insert_with(Bytes::default) += *bytes;
                name
            }
            Who::Root(RootOf { name, snapshot: Some(number) }) => {
                *of_snapshots.entry(number).or_insert_with(Bytes::default) += *bytes;
                name
            }
            Who::Volume(name) => name,
            Who::Many | Who::Nobody => {
                usage.shared += *bytes;
                continue;
            }
        };
        *only.entry(volume).or_insert_with(Bytes::default) += *bytes;
    }
    for (number, named) in (0..).zip(&names) {
        if !named.is_alive() || of.is_some_and(|of| *of != named.name) {
            continue;
        }
        let held = (mark.tracked(number) != 0).then(|| {
            let is_its = |owner| mark.owners.of(owner).tracked & mark.tracked(number) != 0;
            let mut held = Held::default();
            for (_, bytes) in tally.bytes.iter().filter(|(owner, _)| is_its(**owner)) {
                held.bytes += *bytes;
            }
            for kept in plan.kept.iter().filter(|kept| is_its(kept.owner)) {
                held.extents += 1;
                held.extent_bytes += plan.len_of(kept.id);
            }
            held
        });
        let mut infos = if of.is_some() { tally.infos.clone() } else { Vec::new() };
        infos.sort_by_key(|info| info.number);
        let alone = |info: SnapshotInfo| SnapshotUsage {
            only: of_snapshots.get(&info.number).copied().unwrap_or_default(),
            info,
        };
        usage.volumes.push(VolumeUsage {
            name: named.name.clone(),
            len: named.head.state.len,
            open_on: named.above().map(|_| named.head.host.clone()),
            snapshot_count: tally.snapshots[number as usize],
            held,
            only: only.get(&number).copied().unwrap_or_default(),
            only_now: now.get(&number).copied().unwrap_or_default(),
            recent_bytes: recent(named),
            snapshots: infos.into_iter().map(alone).collect(),
        });
    }
    usage.collected = plan.finish(&names, &mark).collected;
    usage
}

#[cfg(test)]
mod tests;
