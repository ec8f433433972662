//! Backups of a chain that is served.

use super::perform::{Answer, asked, find, perform_held};
use super::reply::{body, json};
use super::sources::Sources;
use crate::served::{BackupInfo, Wanted};
use axum::body::Body;
use axum::extract::{Path, State};
use serde::Deserialize;
use serde_json::{Value, json as value};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    r#as: String,
    #[serde(default)]
    since: Option<String>,
    nbd: String,
}

pub(super) async fn list(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let listed = move || Ok((served.kept_states()?, served.backup()));
    let (kept, backup) = asked(&sources, listed).await?;
    let states = kept.iter().map(|kept| {
        let is_exported = backup.as_ref().is_some_and(|backup| backup.state == kept.state);
        value!({
            "state": kept.state,
            "file": kept.file.to_string_lossy(),
            "layer": kept.position,
            "exported": is_exported,
        })
    });
    let states: Vec<_> = states.collect();
    let backup = backup.as_ref().map(described);
    Ok(json(&value!({ "disk": name, "states": states, "backup": backup })))
}

pub(super) async fn begin(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Begin { r#as: state, since, nbd } = body(sent).await?;
    let wanted = Wanted { state, since, place: nbd.parse()? };
    let begun = perform_held(&sources, move |shared| {
        served.begin_backup(&wanted, (&shared.outside, shared.granted.as_ref()))
    })
    .await?;
    Ok(json(&answer(name, &begun)))
}

pub(super) async fn end(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let ended = perform_held(&sources, move |_| served.end_backup()).await?;
    Ok(json(&answer(name, &ended)))
}

fn answer(disk: String, backup: &BackupInfo) -> Value {
    let mut answer = described(backup);
    answer["disk"] = disk.into();
    answer
}

fn described(backup: &BackupInfo) -> Value {
    value!({
        "state": backup.state,
        "since": backup.since,
        "nbd": backup.place,
        "export_name": backup.export,
        "file": backup.file.to_string_lossy(),
        "length": backup.len,
        "resumed": backup.is_resumed,
        "contexts": backup.contexts,
    })
}
