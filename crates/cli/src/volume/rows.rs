//! How snapshots are shown, wherever they come from.

use super::session::{instant, time_text};
use crate::output::human_size;
use crate::plain::plain;
use crate::table::table;
use mica_block::SnapshotInfo;
use serde_json::{Value, json};

/// What is shown of a snapshot.
pub(crate) struct SnapshotRow {
    pub(crate) number: u64,
    pub(crate) label: String,
    pub(crate) time_ns: u64,
    pub(crate) len: u64,
}

impl From<SnapshotInfo> for SnapshotRow {
    fn from(snapshot: SnapshotInfo) -> Self {
        let SnapshotInfo { number, label, time_ns, len, .. } = snapshot;
        Self { number, label, time_ns, len }
    }
}

/// A snapshot as JSON.
pub(crate) fn snapshot_json(snapshot: &SnapshotRow) -> Value {
    json!({
        "label": snapshot.label,
        "sequence": snapshot.number,
        "time": instant(snapshot.time_ns),
        "time-ns": snapshot.time_ns,
        "virtual-size": snapshot.len,
    })
}

/// Snapshots for people.
pub(crate) fn snapshot_table(all: &[SnapshotRow]) -> String {
    let rows = all.iter().map(|snapshot| {
        let (number, size) = (snapshot.number.to_string(), human_size(snapshot.len));
        vec![number, plain(&snapshot.label), time_text(snapshot.time_ns), size]
    });
    table(&["NUMBER", "LABEL", "TAKEN (UTC)", "SIZE"], &[0, 3], rows.collect())
}
