//! `mica ctl snapshot`, `snapshots`, `drop`, `label`, `clone` and `diff`: as `mica volume` has
//! them, of a volume that is served. A snapshot of a chain is its next layer.

use super::agent::while_frozen;
use super::text;
use crate::client::{Client, of_disk};
use crate::create::{NewImageOptions, parse_options};
use crate::failure::Failure;
use crate::images::size_of;
use crate::table::table;
use crate::volume::{SnapshotRow, snapshot_json, snapshot_table};
use clap::Args;
use mica_qcow2_format::Compression;
use mica_qcow2_tools::create::ImageWish;
use mica_stack::Format;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::time::Duration;

// What is taken. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct TakeArgs {
    /// The disk.
    #[arg(value_name = "DISK", required_unless_present = "group")]
    disk: Option<String>,
    /// Label of the snapshot, or file of the new active layer.
    ///
    /// For a volume, a label that no other snapshot of it has. For a chain, a qcow2 image to
    /// create: the current content is frozen beneath it.
    #[arg(value_name = "LABEL|FILE", required_unless_present = "group")]
    name: Option<String>,
    /// Also take a snapshot of this volume, at the same instant.
    ///
    /// Can be repeated. If a program writes to several of the disks, one after the other, the
    /// snapshots preserve that order. If one cannot be taken, none is.
    #[arg(long, value_name = "DISK")]
    with: Vec<String>,
    /// Take snapshots of these disks at the same instant.
    ///
    /// Each with its own label or file: all volumes, or all chains. If one cannot be taken, none
    /// is.
    #[arg(long, value_name = "DISK=NAME", num_args = 1..)]
    #[arg(conflicts_with_all = ["disk", "name", "with"])]
    group: Vec<String>,
    /// Use FILE if it exists: it must be an empty overlay of the active layer.
    #[arg(long, hide_short_help = true)]
    reuse: bool,
    /// Size of the new layer's clusters; that of the layer beneath by default.
    #[arg(long, value_name = "SIZE", hide_short_help = true)]
    cluster_size: Option<String>,
    /// Properties of the new layer, same as for mica create.
    ///
    /// cluster_size, extended_l2, compression_type, refcount_bits and lazy_refcounts. Can be
    /// repeated.
    #[arg(short = 'o', value_name = "KEY=VALUE,...", hide_short_help = true)]
    options: Vec<String>,
    /// Have this QEMU guest agent freeze the guest meanwhile.
    ///
    /// SOCKET is that of the agent, which freezes the guest's file systems; they are thawed in any
    /// case. Can be repeated, for disks of several guests.
    #[arg(long, value_name = "SOCKET")]
    quiesce: Vec<PathBuf>,
    /// Timeout in seconds for each answer of an agent, and for the snapshot.
    #[arg(long, value_name = "SECONDS", default_value_t = 10, requires = "quiesce")]
    #[arg(hide_short_help = true)]
    quiesce_limit: u32,
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
    /// The snapshot as `mica volume snapshot` shows it, or the new layer; of several disks all of
    /// them, with their disks.
    pub(super) fn run(&self, client: Client) -> Result<Value, Failure> {
        let (path, body) = self.request()?;
        let limit = Duration::from_secs(self.quiesce_limit.into());
        let client = if self.quiesce.is_empty() { client } else { client.within(limit) };
        let answer = while_frozen(&self.quiesce, limit, || client.post(&path, &body))?;
        if let Some(layers) = answer["layers"].as_array() {
            return Ok(match &**layers {
                [one] if self.group.is_empty() => one.clone(),
                all => all.into(),
            });
        }
        let rows = rows(&answer);
        if self.group.is_empty() && self.with.is_empty() {
            return Ok(rows.first().map(snapshot_json).unwrap_or_default());
        }
        let disks = answer["snapshots"].as_array().into_iter().flatten();
        let all = rows.iter().zip(disks).map(|(row, sent)| {
            let mut shown = snapshot_json(row);
            // One alone is sent without its disk.
            shown["disk"] = if sent["disk"].is_null() { &answer } else { sent }["disk"].clone();
            shown
        });
        Ok(all.collect())
    }

    /// What is asked of the server, and where.
    fn request(&self) -> Result<(String, Value), Failure> {
        let mut body = json!({ "layer": self.layer()? });
        if let (Some(disk), Some(name)) = (&self.disk, &self.name) {
            body["label"] = name.as_str().into();
            body["with"] = self.with.clone().into();
            return Ok((of_disk(disk, "snapshots"), body));
        }
        let one = |text: &String| match text.split_once('=') {
            Some((disk, label)) => Ok(json!({ "disk": disk, "label": label })),
            None => Err(Failure::new(format!("--group {text}: use DISK=LABEL, or DISK=FILE"))),
        };
        body["disks"] = self.group.iter().map(one).collect::<Result<Vec<_>, _>>()?.into();
        Ok(("/v1/snapshots".to_owned(), body))
    }

    /// What a new layer is to be like.
    fn layer(&self) -> Result<Value, Failure> {
        let NewImageOptions { wish, size, encrypt } = parse_options(&self.options, Format::Qcow2)?;
        if encrypt.says_anything() {
            let what = "-o encrypt: a new layer is encrypted as the one beneath is, or not at all";
            return Err(Failure::new(what));
        }
        let ImageWish {
            version,
            mut cluster_bytes,
            extended_l2,
            refcount_bits,
            lazy_refcounts,
            compression,
            preallocation,
            backing_name,
            backing_format,
            data_file,
            data_file_raw,
        } = wish;
        if size.is_some()
            || version.is_some()
            || preallocation.is_some()
            || backing_name.is_some()
            || backing_format.is_some()
            || data_file.is_some()
            || data_file_raw
        {
            let what = "-o: a new layer has cluster_size, extended_l2, compression_type, \
                        refcount_bits and lazy_refcounts";
            return Err(Failure::new(what));
        }
        if let Some(text) = &self.cluster_size {
            cluster_bytes = Some(size_of("--cluster-size", text)?);
        }
        let folder = std::env::current_dir()
            .map_err(|error| Failure::from(error).within("the current folder"))?;
        let compression = compression.map(|compression| match compression {
            Compression::Deflate => "zlib",
            Compression::Zstd => "zstd",
        });
        Ok(json!({
            "folder": folder,
            "reuse": self.reuse,
            "cluster_size": cluster_bytes,
            "extended_l2": extended_l2,
            "refcount_bits": refcount_bits,
            "lazy_refcounts": lazy_refcounts,
            "compression": compression,
        }))
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

// What is cloned. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct CloneArgs {
    /// The disk, or with @LABEL one of its snapshots.
    #[arg(value_name = "DISK[@LABEL]")]
    source: String,
    /// The name of the new volume, in the same store.
    #[arg(value_name = "VOLUME")]
    target: String,
}

// What is compared. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct DiffArgs {
    /// The disk, and the earlier snapshot.
    #[arg(value_name = "DISK@LABEL")]
    before: String,
    /// The later snapshot; by default the current content.
    #[arg(value_name = "LABEL")]
    after: Option<String>,
}

// What is gone back to. (A doc comment would become the help of the verb.)
#[derive(Args)]
pub(super) struct RollbackArgs {
    /// The disk, and its snapshot.
    #[arg(value_name = "DISK@LABEL")]
    snapshot: String,
}

impl CloneArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let (disk, snapshot) = match self.source.rsplit_once('@') {
            Some((disk, snapshot)) => (disk, Some(snapshot)),
            None => (&*self.source, None),
        };
        let body = json!({ "snapshot": snapshot, "volume": self.target });
        client.post(&of_disk(disk, "clone"), &body)
    }
}

impl RollbackArgs {
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let (disk, snapshot) = snapshot_of(&self.snapshot)?;
        client.post(&of_disk(disk, "rollback"), &json!({ "snapshot": snapshot }))
    }
}

/// The disk and the label of a snapshot.
fn snapshot_of(named: &str) -> Result<(&str, &str), Failure> {
    named
        .rsplit_once('@')
        .ok_or_else(|| Failure::new(format!("{named}: use DISK@LABEL, a snapshot of a disk")))
}

impl DiffArgs {
    /// The ranges as `mica volume diff` shows them.
    pub(super) fn run(&self, client: &Client) -> Result<Value, Failure> {
        let (disk, before) = snapshot_of(&self.before)?;
        let body = json!({ "before": before, "after": self.after });
        Ok(client.post(&of_disk(disk, "diff"), &body)?["ranges"].take())
    }
}

pub(super) fn rolled_back(answer: &Value) -> String {
    let [disk, snapshot] = ["disk", "rolled_back_to"].map(|key| text(&answer[key]));
    format!("{disk}: rolled back to {snapshot}\n")
}

pub(super) fn cloned(answer: &Value) -> String {
    let [disk, volume] = ["disk", "volume"].map(|key| text(&answer[key]));
    match &answer["snapshot"] {
        Value::Null => format!("{volume}: a clone of {disk}\n"),
        snapshot => format!("{volume}: a clone of {disk}@{}\n", text(snapshot)),
    }
}

pub(super) fn differing(answer: &Value) -> String {
    let row = |range: &Value| vec![text(&range["start"]), text(&range["length"])];
    let rows = answer.as_array().into_iter().flatten().map(row).collect();
    table(&["START", "LENGTH"], &[0, 1], rows)
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
        let line = |one: &Value| match one["active"] {
            Value::Null => format!("{}: {}", text(&one["disk"]), taken(one)),
            _ => layered(one),
        };
        return all.iter().map(line).collect();
    }
    if !answer["active"].is_null() {
        return layered(answer);
    }
    format!("snapshot {} ({}): taken\n", text(&answer["sequence"]), text(&answer["label"]))
}

/// A chain that got a layer.
fn layered(answer: &Value) -> String {
    let [disk, frozen, active] = ["disk", "frozen", "active"].map(|key| text(&answer[key]));
    let pause = answer["pause_us"].as_u64().unwrap_or(0);
    format!(
        "{disk}: now writing to {active}, on top of {frozen}\n{disk}: {} layers; changes waited \
         for {}.{} ms\n",
        text(&answer["layers"]),
        pause / 1000,
        pause % 1000 / 100
    )
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
    format!("{}: {before} is now {now}\n", text(&answer["disk"]))
}
