//! What the builder does where snapshots are taken, dropped, labelled, or rolled back to.
//!
//! What is done to a snapshot that is no more is nothing: it was dropped by somebody who was
//! faster.

use super::{Builder, Content, DIRECTORIES_HELD, feed};
use crate::format::extent::Entry;
use crate::format::snapshot::Record;
use crate::place::Place;
use crate::segment::Cut;
use crate::state::State;
use crate::tree::{Tree, decode_record};
use mica_block::{Result, SnapshotInfo};
use mica_map::Editor;
use std::sync::Arc;

impl Builder {
    /// Does `cut`.
    pub(super) async fn cut(
        &mut self,
        tree: &Tree,
        cut: &Cut,
        content: &mut Content,
    ) -> Result<()> {
        match cut {
            Cut::Take { number, label, time_ns, origin } => {
                self.write_map(tree, content).await;
                let map = self.state.map;
                let State { len, records, .. } = self.state;
                let (number, label, time_ns) = (*number, label.clone(), *time_ns);
                let info = SnapshotInfo { number, label, time_ns, len, records };
                self.snapshots.grow_for(number);
                let record = Record { info, map, origin: *origin };
                let record = self.put_record(tree, record, content).await?;
                content.entries.push(Entry::Take { number, record });
                let next = number.saturating_add(1);
                self.state.next_snapshot = self.state.next_snapshot.max(next);
            }
            Cut::Drop { number } => {
                if self.find(tree, *number, content).await?.is_some() {
                    self.snapshots.set(*number, None);
                    content.entries.push(Entry::Drop { number: *number });
                }
            }
            Cut::Label { number, label } => {
                if let Some(old) = self.record(tree, *number, content).await? {
                    let info = SnapshotInfo { label: label.clone(), ..old.info.clone() };
                    let record = Record { info, ..*old };
                    let record = self.put_record(tree, record, content).await?;
                    content.entries.push(Entry::Label { number: *number, record });
                }
            }
            Cut::Rollback { number } => {
                if let Some(snapshot) = self.record(tree, *number, content).await? {
                    self.map = Editor::new(snapshot.map, DIRECTORIES_HELD);
                    self.state.len = snapshot.info.len;
                    content.entries.push(Entry::Rollback { number: *number });
                }
            }
        }
        Ok(())
    }

    /// Makes `record` that of its snapshot; returns its offset.
    async fn put_record(
        &mut self,
        tree: &Tree,
        record: Record,
        content: &mut Content,
    ) -> Result<u64> {
        let (number, record) = (record.info.number, Arc::new(record));
        feed(&mut self.snapshots, tree, content, number).await?;
        let place = content.push_record(tree, &record);
        self.snapshots.set(number, Some(place));
        Ok(place.offset())
    }

    /// Where the record of snapshot `number` is.
    async fn find(&mut self, tree: &Tree, number: u64, content: &Content) -> Result<Option<Place>> {
        feed(&mut self.snapshots, tree, content, number).await?;
        Ok(self.snapshots.leaf(number))
    }

    async fn record(
        &mut self,
        tree: &Tree,
        number: u64,
        content: &Content,
    ) -> Result<Option<Arc<Record>>> {
        let Some(place) = self.find(tree, number, content).await? else { return Ok(None) };
        match content.framed(place) {
            Some(bytes) => decode_record(bytes, place).map(Arc::new).map(Some),
            None => tree.record(place).await.map(Some),
        }
    }
}
