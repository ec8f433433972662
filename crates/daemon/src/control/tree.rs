//! A volume with its snapshots, for the page: what `mica volume tree` draws of it.
//!
//! Whoever may only look asks for it, and its store may be slow: one is looked at at a time, of a
//! few actions that there may be, and the answer is bounded.

use super::perform::{Answer, find, perform};
use super::reply::{Refusal, json};
use super::snapshots::described;
use super::sources::Sources;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use mica_block::Error;
use serde_json::json as value;
use std::sync::Arc;

/// Snapshots in an answer, the newest ones.
const SNAPSHOTS_MAX: usize = 100;

pub(super) async fn tree(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    let turn = Arc::clone(&sources.looks).try_acquire_owned().map_err(|_| {
        let what = "another volume is looked at: try again later";
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, what)
    })?;
    let listed = move || {
        // Until this is done, whoever waits for it.
        let _turn = turn;
        let all = served.list_snapshots()?;
        // One that is only read does not know.
        Ok::<_, Error>((all, served.cloned_from().ok().flatten()))
    };
    let (all, from) = perform(&sources.actions, listed).await??;
    let newest: Vec<_> =
        all[all.len().saturating_sub(SNAPSHOTS_MAX)..].iter().map(described).collect();
    Ok(json(&value!({
        "disk": name,
        "cloned_from": from.map(|from| from.to_string()),
        "snapshot_count": all.len(),
        "snapshots": newest,
    })))
}
