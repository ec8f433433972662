//! The snapshots of a disk that is served: of a volume by their labels, and of a chain as its next
//! layer.

use super::perform::{Answer, asked, find, perform_held};
use super::reply::{Refusal, body, json};
use super::sources::Sources;
use crate::served::{Layered, Served, Stored};
use crate::shared::Shared;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use mica_block::{SnapshotInfo, Which};
use mica_qcow2_format::Compression;
use mica_qcow2_tools::create::ImageWish;
use mica_stack::NewLayerWish;
use mica_units::GuestRange;
use serde::Deserialize;
use serde_json::{Value, json as value};
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Take {
    /// What the snapshot of a volume is called; of a chain, the file of the new active layer.
    label: String,
    /// Other volumes, at the same instant.
    #[serde(default)]
    with: Vec<String>,
    #[serde(default)]
    layer: NewLayer,
}

/// Snapshots of several disks at one instant.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TakeAll {
    disks: Vec<OfDisk>,
    #[serde(default)]
    layer: NewLayer,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OfDisk {
    disk: String,
    label: String,
}

/// What new layers are to be like.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct NewLayer {
    /// Where relative names of files start.
    folder: Option<PathBuf>,
    reuse: bool,
    cluster_size: Option<u64>,
    extended_l2: Option<bool>,
    refcount_bits: Option<u64>,
    lazy_refcounts: Option<bool>,
    /// zlib or zstd.
    compression: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OneSnapshot {
    snapshot: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Label {
    snapshot: String,
    label: String,
}

/// A new volume, in the store of the disk's.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewClone {
    /// What it begins as; what there is now if nothing is named.
    snapshot: Option<String>,
    volume: String,
}

/// Two instants of a disk.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Compared {
    before: String,
    /// What there is now if nothing is named.
    after: Option<String>,
}

pub(super) async fn list(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let all = asked(&sources, move || served.list_snapshots()).await?;
    let all: Vec<_> = all.iter().map(described).collect();
    Ok(json(&value!({ "disk": name, "snapshots": all })))
}

pub(super) async fn take(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let Take { label, with, layer } = body(sent).await?;
    let names = [name].into_iter().chain(with);
    let all = names.map(|disk| OfDisk { disk, label: label.clone() }).collect();
    take_of(&sources, all, &layer).await
}

pub(super) async fn take_all(State(sources): State<Sources>, sent: Body) -> Answer {
    let TakeAll { disks, layer } = body(sent).await?;
    if disks.is_empty() {
        return Err(bad("no disk is named"));
    }
    take_of(&sources, disks, &layer).await
}

async fn take_of(sources: &Sources, all: Vec<OfDisk>, layer: &NewLayer) -> Answer {
    let twice =
        (1..all.len()).find_map(|at| all[..at].iter().find(|before| before.disk == all[at].disk));
    if let Some(OfDisk { disk, .. }) = twice {
        return Err(bad(format!("disk {disk:?} is named twice")));
    }
    let mut of = Vec::new();
    for OfDisk { disk, label } in all {
        of.push((find(&sources.shared, &disk)?, label));
    }
    let volumes = of.iter().filter(|(served, _)| served.is_volume()).count();
    let name = of[0].0.name.clone();
    if volumes == of.len() {
        return take_of_volumes(sources, name, of).await;
    }
    if volumes > 0 {
        let what = "volumes and chains cannot share an instant: take their snapshots in two groups";
        return Err(bad(what));
    }
    let mut wanted = Vec::new();
    for (served, file) in of {
        wanted.push((served, layer.wish(&file)?));
    }
    let names: Vec<_> = wanted.iter().map(|(served, _)| served.name.clone()).collect();
    let put = move |shared: &Shared| {
        let taken = wanted.iter().filter(|(_, wish)| wish.reuse);
        shared.check_are_no_layers(taken.map(|(_, wish)| &*wish.path))?;
        Served::put_layers(wanted, shared.granted.as_ref())
    };
    let layered = perform_held(sources, put).await?;
    let layers: Vec<_> =
        names.iter().zip(&layered).map(|(name, layered)| put_on(name, layered)).collect();
    Ok(json(&value!({ "disk": name, "layers": layers })))
}

async fn take_of_volumes(
    sources: &Sources,
    name: String,
    of: Vec<(Arc<Served>, String)>,
) -> Answer {
    if let [(served, label)] = &*of {
        let (served, label) = (Arc::clone(served), label.clone());
        let taken = perform_held(sources, move |_| served.take_snapshot(label)).await?;
        return Ok(json(&value!({ "disk": name, "snapshots": [described(&taken)] })));
    }
    let names: Vec<_> = of.iter().map(|(served, _)| served.name.clone()).collect();
    let taken = perform_held(sources, move |_| Served::take_snapshots(&of)).await?;
    let of = |(name, taken): (&String, &SnapshotInfo)| {
        let mut described = described(taken);
        described["disk"] = name.as_str().into();
        described
    };
    let taken: Vec<_> = names.iter().zip(&taken).map(of).collect();
    Ok(json(&value!({ "disk": name, "snapshots": taken })))
}

fn bad(what: impl Into<String>) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, what)
}

/// How a chain got its layer.
fn put_on(name: &str, layered: &Layered) -> Value {
    let Layered { frozen, active, layers, pause } = layered;
    value!({
        "disk": name,
        "frozen": frozen.to_string_lossy(),
        "active": active.to_string_lossy(),
        "layers": layers,
        "pause_us": u64::try_from(pause.as_micros()).unwrap_or(u64::MAX),
    })
}

impl NewLayer {
    /// The wish for a layer in `file`.
    fn wish(&self, file: &str) -> Result<NewLayerWish, Refusal> {
        let path = match &self.folder {
            Some(folder) => folder.join(file),
            None => PathBuf::from(file),
        };
        if file.is_empty() || !path.is_absolute() {
            let what = format!(
                "{file:?}: the file of the new active layer is needed, as an absolute path or with \
                 the folder that it starts from"
            );
            return Err(bad(what));
        }
        let compression = match self.compression.as_deref() {
            None => None,
            Some("zlib") => Some(Compression::Deflate),
            Some("zstd") => Some(Compression::Zstd),
            Some(other) => return Err(bad(format!("compression {other:?}: use zlib or zstd"))),
        };
        let image = ImageWish {
            cluster_bytes: self.cluster_size,
            extended_l2: self.extended_l2,
            refcount_bits: self.refcount_bits,
            lazy_refcounts: self.lazy_refcounts,
            compression,
            ..ImageWish::default()
        };
        Ok(NewLayerWish { path, image, reuse: self.reuse })
    }
}

pub(super) async fn drop_one(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    with_one(&sources, name, sent, ("dropped", Served::drop_snapshot)).await
}

/// What is done with one snapshot.
type OnSnapshot = fn(&Served, Which) -> mica_block::Result<()>;

/// Does something with one snapshot of the disk `name`, which is told as what it is then.
async fn with_one(
    sources: &Sources,
    name: String,
    sent: Body,
    (told, act): (&str, OnSnapshot),
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let OneSnapshot { snapshot } = body(sent).await?;
    let which: Which = snapshot.parse()?;
    perform_held(sources, move |_| act(&served, which)).await?;
    Ok(json(&value!({ "disk": name, told: snapshot })))
}

pub(super) async fn label(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Label { snapshot, label } = body(sent).await?;
    let (which, given): (Which, _) = (snapshot.parse()?, label.clone());
    perform_held(&sources, move |_| served.label_snapshot(which, given)).await?;
    Ok(json(&value!({ "disk": name, "before": snapshot, "now": label })))
}

pub(super) async fn clone(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let NewClone { snapshot, volume } = body(sent).await?;
    let which = snapshot.as_deref().map(str::parse).transpose()?;
    let target = volume.clone();
    perform_held(&sources, move |_| served.clone_volume(which, target)).await?;
    Ok(json(&value!({ "disk": name, "snapshot": snapshot, "volume": volume })))
}

pub(super) async fn roll_back(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let roll_back = |served: &Served, which| served.roll_back(&which);
    with_one(&sources, name, sent, ("rolled_back_to", roll_back)).await
}

pub(super) async fn diff(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Compared { before, after } = body(sent).await?;
    let before: Which = before.parse()?;
    let after = after.as_deref().map(str::parse).transpose()?;
    let found = perform_held(&sources, move |_| served.differences(before, after)).await?;
    let one =
        |range: &GuestRange| value!({ "start": range.start().bytes(), "length": range.len() });
    Ok(json(&value!({ "disk": name, "ranges": found.iter().map(one).collect::<Vec<_>>() })))
}

pub(super) async fn store(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Stored { url, missing } = perform_held(&sources, move |_| served.stored()).await?;
    Ok(json(&value!({
        "disk": name,
        "url": url.to_string(),
        "store": url.store.to_string(),
        "missing": missing.map(|error| error.in_one_line()),
    })))
}

pub(super) fn described(snapshot: &SnapshotInfo) -> Value {
    value!({
        "label": snapshot.label,
        "sequence": snapshot.number,
        "time_ns": snapshot.time_ns,
        "length": snapshot.len,
    })
}
