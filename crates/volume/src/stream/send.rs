//! Sends a snapshot.

use super::format::{Begin, DATA_BYTES_MAX, Part};
use crate::format::Id;
use crate::format::snapshot::{Origin, Record};
use crate::names::VolumeName;
use crate::snapshots::{all, missing};
use crate::state::State;
use crate::tree::Tree;
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{
    Disk as _, Error, ErrorKind, Result, SnapshotInfo, Survey, Which, read_whole, windows,
};
use mica_rt::{Buf, join_all};
use mica_units::GuestRange;
use std::sync::Arc;

/// Pieces that are read at the same time.
const READS_MAX: usize = 8;

/// What one step of a stream had.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sent {
    /// The snapshot that it makes.
    pub snapshot: SnapshotInfo,
    /// The number of the one that it goes on from; `None` if it is whole.
    pub base: Option<u64>,
    /// Bytes of data.
    pub data_bytes: u64,
}

impl Volumes {
    /// Passes to `out`, one after the other, the bytes of a stream that makes snapshot `which` of a
    /// volume elsewhere: whole, or from `since`, an older snapshot of the volume that the receiver
    /// has. With `is_each` the snapshots between are steps of their own; otherwise there is one.
    /// `at` is called with how far the disk is looked through, in bytes.
    ///
    /// # Errors
    /// `NotFound` if there is no such volume or snapshot; `Invalid` if `since` is not older, or its
    /// disk was longer; what `out` returns; otherwise what the store reports.
    pub async fn send(
        &self,
        name: &VolumeName,
        which: &Which,
        (since, is_each): (Option<&Which>, bool),
        mut out: impl FnMut(&[u8]) -> Result<()>,
        at: impl Fn(u64),
    ) -> Result<Vec<Sent>> {
        let heads = self.heads(name);
        let found = self.with_recent(&heads, async |head, state| {
            let records = all(&self.tree, state.snapshots).await?;
            let of = |which: &Which| {
                let found = records.iter().position(|record| which.is_of(&record.info));
                found.ok_or_else(|| missing(name.as_str(), which))
            };
            let (last, base) = (of(which)?, since.map(of).transpose()?);
            Ok(((head.volume, head.properties), last, base, records))
        });
        let ((volume, properties), last, base, records) = found.await?;
        let tree = self.tree.with_access(self.access(name, &properties)?);
        if base.is_some_and(|base| base >= last) {
            let what =
                format!("snapshot {which} is not newer than the one on which it is to be based");
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let first = if is_each { base.map_or(0, |base| base + 1) } else { last };
        let mut base = base.map(|base| &records[base]);
        let mut sent = Vec::new();
        for record in &records[first..=last] {
            let step = Step { volumes: self, tree: &tree, name, volume, base, record };
            sent.push(step.send(&mut out, &at).await?);
            base = Some(record);
        }
        Ok(sent)
    }
}

/// A step that is sent.
struct Step<'a> {
    volumes: &'a Volumes,
    /// What blocks are read with.
    tree: &'a Arc<Tree>,
    name: &'a VolumeName,
    /// Identity of the volume.
    volume: Id,
    base: Option<&'a Arc<Record>>,
    record: &'a Arc<Record>,
}

/// What of it was sent.
struct Parts<'a, F> {
    out: &'a mut F,
    count: u64,
    data_bytes: u64,
}

impl Step<'_> {
    async fn send(
        &self,
        out: &mut impl FnMut(&[u8]) -> Result<()>,
        at: &impl Fn(u64),
    ) -> Result<Sent> {
        let info = &self.record.info;
        if let Some(base) = self.base.filter(|base| base.info.len > info.len) {
            let what = format!(
                "volume {} was longer at snapshot {} than at {}: send that one whole",
                self.name.as_str(),
                base.info.number,
                info.number
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let origin = |record: &Arc<Record>| -> Origin { record.identity(self.volume) };
        let begin = Begin {
            snapshot: origin(self.record),
            base: self.base.map(origin),
            time_ns: info.time_ns,
            len: info.len,
            label: info.label.clone(),
        };
        out(&begin.encode())?;
        let heads = self.volumes.heads(self.name);
        let state = self.record.first_state();
        let view = Volume::readable(Arc::clone(self.tree), heads, state);
        let before = self.base.map_or(State::empty(0), |base| base.first_state());
        let mut changes = self.volumes.changes(before, state);
        let mut parts = Parts { out, count: 0, data_bytes: 0 };
        while let Some(range) = changes.next().await? {
            parts.send_range(&view, range).await?;
            at(range.end().bytes());
        }
        let Parts { count, data_bytes, .. } = parts;
        parts.push(Part::End { data_bytes, parts: count }, &[])?;
        at(info.len);
        let base = self.base.map(|base| base.info.number);
        Ok(Sent { snapshot: info.clone(), base, data_bytes })
    }
}

impl<F: FnMut(&[u8]) -> Result<()>> Parts<'_, F> {
    async fn send_range(&mut self, view: &Volume, range: GuestRange) -> Result<()> {
        let mut survey = Survey::new(view, range);
        while let Some(extents) = survey.next().await? {
            for extent in extents {
                let (range, kind) = (extent.range(), extent.kind);
                let (start, len) = (range.start().bytes(), range.len());
                match kind.reads_as_zero() {
                    true => self.push(Part::Nothing { start, len }, &[])?,
                    false => self.send_data(view, range).await?,
                }
            }
        }
        Ok(())
    }

    async fn send_data(&mut self, view: &Volume, range: GuestRange) -> Result<()> {
        let pieces: Vec<_> = windows(range, DATA_BYTES_MAX).collect();
        for pieces in pieces.chunks(READS_MAX) {
            let reads = pieces.iter().map(|piece| read(view, *piece));
            let read = join_all(reads.collect::<Vec<_>>()).await;
            for (piece, data) in pieces.iter().zip(read) {
                let (start, len) = (piece.start().bytes(), piece.len());
                self.push(Part::Data { start, len }, &data?)?;
                self.data_bytes += len;
            }
        }
        Ok(())
    }

    fn push(&mut self, part: Part, data: &[u8]) -> Result<()> {
        (self.out)(&part.encode(self.count, data))?;
        self.count += 1;
        if data.is_empty() { Ok(()) } else { (self.out)(data) }
    }
}

async fn read(view: &Volume, piece: GuestRange) -> Result<Buf> {
    let plan = view.plan(piece, Vec::new()).finish().await?;
    read_whole(view, &plan).await
}
