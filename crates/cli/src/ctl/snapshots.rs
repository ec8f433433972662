//! `mica ctl snapshot`, `snapshots`, `drop` and `label`: as `mica volume` has them, of a volume
//! that is served.

use super::text;
use crate::client::{Client, of_disk};
use crate::failure::Failure;
use crate::volume::{SnapshotRow, snapshot_json, snapshot_table};
use clap::Args;
use serde_json::{Value, json};

// What is taken. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct TakeArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// What it is called; no other snapshot of the volume is.
    #[arg(value_name = "LABEL")]
    label: String,
    /// Take one of this disk, too, at the same instant.
    ///
    /// Can be repeated. What a program writes to several of the disks, one after the other, is in
    /// the snapshots in that order. If one cannot be taken, none is.
    #[arg(long, value_name = "DISK")]
    with: Vec<String>,
}

// What is listed. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct ListArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
}

// What is dropped. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct DropArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The label of the snapshot, or its number.
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
}

// What is labelled. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct LabelArgs {
    /// The disk.
    #[arg(value_name = "DISK")]
    disk: String,
    /// The label of the snapshot, or its number.
    #[arg(value_name = "SNAPSHOT")]
    snapshot: String,
    /// The new label.
    #[arg(value_name = "LABEL")]
    label: String,
}

impl TakeArgs {
    /// The snapshot as `mica volume snapshot` shows it; of several disks all of them, with their
    /// disks.
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let mut body = json!({ "label": self.label });
        if self.with.is_empty() {
            let answer = client.post(&of_disk(&self.disk, "snapshots"), &body)?;
            return Ok(rows(&answer).first().map(snapshot_json).unwrap_or_default());
        }
        body["with"] = self.with.clone().into();
        let answer = client.post(&of_disk(&self.disk, "snapshots"), &body)?;
        let rows = rows(&answer);
        let disks = answer["snapshots"].as_array().into_iter().flatten();
        let all = rows.iter().zip(disks).map(|(row, sent)| {
            let mut shown = snapshot_json(row);
            shown["disk"] = sent["disk"].clone();
            shown
        });
        Ok(all.collect())
    }
}

impl ListArgs {
    /// The snapshots as `mica volume snapshots` shows them.
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let answer = client.get(&of_disk(&self.disk, "snapshots"))?;
        Ok(rows(&answer).iter().map(snapshot_json).collect())
    }
}

impl DropArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let body = json!({ "snapshot": self.snapshot });
        client.post(&of_disk(&self.disk, "drop"), &body)
    }
}

impl LabelArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let body = json!({ "snapshot": self.snapshot, "label": self.label });
        client.post(&of_disk(&self.disk, "label"), &body)
    }
}

/// The snapshots in an answer of a server.
fn rows(answer: &Value) -> Vec<SnapshotRow> {
    rows_of(&answer["snapshots"], ["time_ns", "length"])
}

/// A list of snapshots, with the names that two of their values have in it.
fn rows_of(all: &Value, [time_ns, len]: [&str; 2]) -> Vec<SnapshotRow> {
    let one = |snapshot: &Value| SnapshotRow {
        number: snapshot["sequence"].as_u64().unwrap_or(0),
        label: snapshot["label"].as_str().unwrap_or_default().to_owned(),
        time_ns: snapshot[time_ns].as_u64().unwrap_or(0),
        len: snapshot[len].as_u64().unwrap_or(0),
    };
    all.as_array().into_iter().flatten().map(one).collect()
}

pub(super) fn taken(answer: &Value) -> String {
    if let Some(all) = answer.as_array() {
        let line = |one: &Value| format!("{}: {}", text(&one["disk"]), taken(one));
        return all.iter().map(line).collect();
    }
    format!("snapshot {} ({}): taken\n", text(&answer["sequence"]), text(&answer["label"]))
}

pub(super) fn listed(answer: &Value) -> String {
    // As `snapshot_json` has them.
    let all = rows_of(answer, ["time-ns", "virtual-size"]);
    snapshot_table(&all)
}

pub(super) fn dropped(answer: &Value) -> String {
    format!("{}: {} is dropped\n", text(&answer["disk"]), text(&answer["dropped"]))
}

pub(super) fn labelled(answer: &Value) -> String {
    let [before, now] = ["before", "now"].map(|key| text(&answer[key]));
    format!("{}: {before} is {now} now\n", text(&answer["disk"]))
}
