//! The snapshots of a volume that is served.

use super::perform::{Answer, find, perform, perform_held};
use super::reply::{Refusal, body, json};
use super::sources::Sources;
use crate::served::Served;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use mica_block::{SnapshotInfo, Which};
use serde::Deserialize;
use serde_json::{Value, json as value};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Take {
    label: String,
    /// Other disks, at the same instant.
    #[serde(default)]
    with: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Drop {
    snapshot: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Label {
    snapshot: String,
    label: String,
}

pub(super) async fn list(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let all = perform(&sources.actions, move || served.list_snapshots()).await??;
    let all: Vec<_> = all.iter().map(described).collect();
    Ok(json(&value!({ "disk": name, "snapshots": all })))
}

pub(super) async fn take(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Take { label, with } = body(sent).await?;
    if with.is_empty() {
        let taken = perform_held(&sources, move |_| served.take_snapshot(label)).await?;
        return Ok(json(&value!({ "disk": name, "snapshots": [described(&taken)] })));
    }
    let names: Vec<String> = [name.clone()].into_iter().chain(with).collect();
    if let Some(name) =
        (1..names.len()).find_map(|at| names[..at].contains(&names[at]).then_some(&names[at]))
    {
        let what = format!("disk {name:?} is named twice");
        return Err(Refusal::new(StatusCode::BAD_REQUEST, what));
    }
    let all = names.iter().map(|name| find(&sources.shared, name));
    let all: Vec<_> = all.collect::<Result<_, _>>()?;
    let taken = perform_held(&sources, move |_| Served::take_snapshots(&all, &label)).await?;
    let of = |(name, taken): (&String, &SnapshotInfo)| {
        let mut described = described(taken);
        described["disk"] = name.as_str().into();
        described
    };
    let taken: Vec<_> = names.iter().zip(&taken).map(of).collect();
    Ok(json(&value!({ "disk": name, "snapshots": taken })))
}

pub(super) async fn drop_one(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Drop { snapshot } = body(sent).await?;
    let which: Which = snapshot.parse()?;
    perform_held(&sources, move |_| served.drop_snapshot(which)).await?;
    Ok(json(&value!({ "disk": name, "dropped": snapshot })))
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

fn described(snapshot: &SnapshotInfo) -> Value {
    value!({
        "label": snapshot.label,
        "sequence": snapshot.number,
        "time_ns": snapshot.time_ns,
        "length": snapshot.len,
    })
}
