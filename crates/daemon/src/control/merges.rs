//! Merges of the layers of a disk that is served.

use super::perform::{Answer, find, perform, perform_held};
use super::reply::{body, json};
use super::sources::Sources;
use crate::jobs::Job;
use crate::served::{LayersCalled, Served, StatesInTheWay};
use crate::shared::Shared;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use mica_stack::GoneImages;
use serde::Deserialize;
use serde_json::json as value;
use std::path::PathBuf;
use std::sync::Arc;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stream {
    base: Option<PathBuf>,
    #[serde(default)]
    drop_states: bool,
    #[serde(default)]
    rate: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Commit {
    top: Option<PathBuf>,
    base: Option<PathBuf>,
    #[serde(default)]
    ignore_gone: bool,
    #[serde(default)]
    rate: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DropState {
    state: String,
    #[serde(default)]
    ignore_gone: bool,
    #[serde(default)]
    rate: u64,
}

/// What is asked whether layers may change, as by [`mica_stack::merge::Merge::prepare`].
type Check<'a> = &'a mut dyn FnMut(&[PathBuf]) -> mica_block::Result<()>;

pub(super) async fn jobs(State(sources): State<Sources>) -> Response {
    let all = sources.shared.disks.all();
    let jobs = all.iter().filter_map(|served| served.job()).map(|job| value!(job.report()));
    let past = all.iter().flat_map(|served| served.past_jobs());
    json(&value!({ "jobs": jobs.collect::<Vec<_>>(), "past": past.collect::<Vec<_>>() }))
}

pub(super) async fn stream(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Stream { base, drop_states, rate } = body(sent).await?;
    let states = if drop_states { StatesInTheWay::Leave } else { StatesInTheWay::Stay };
    let begin = move |_: &_| served.start_stream(base.as_deref(), states, rate);
    Ok(answer_with(&*perform_held(&sources, begin).await?))
}

pub(super) async fn commit(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Commit { top, base, ignore_gone, rate } = body(sent).await?;
    let gone = GoneImages::new(ignore_gone);
    let begun = perform_held(&sources, move |shared| {
        let layers = LayersCalled { top: top.as_deref(), base: base.as_deref() };
        naming_disks(shared, &served, |check| served.start_commit(layers, gone, rate, check))
    });
    Ok(answer_with(&*begun.await?))
}

pub(super) async fn drop_state(
    State(sources): State<Sources>,
    Path(name): Path<String>,
    sent: Body,
) -> Answer {
    let served = find(&sources.shared, &name)?;
    let DropState { state, ignore_gone, rate } = body(sent).await?;
    let gone = GoneImages::new(ignore_gone);
    let begun = perform_held(&sources, move |shared| {
        naming_disks(shared, &served, |check| served.start_drop(&state, gone, rate, check))
    });
    Ok(answer_with(&*begun.await?))
}

/// Begins by `start` to merge layers of `served`, unless another disk of this process needs them: a
/// refusal says which.
fn naming_disks(
    shared: &Shared,
    served: &Arc<Served>,
    start: impl FnOnce(Check<'_>) -> mica_block::Result<Arc<Job>>,
) -> mica_block::Result<Arc<Job>> {
    let mut needed = Vec::new();
    let mut check = |layers: &[PathBuf]| {
        needed = layers.to_vec();
        shared.check_no_disk_needs(served, layers)
    };
    start(&mut check).map_err(|refused| shared.with_closed_disks(refused, served, &needed))
}

pub(super) async fn cancel(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let job = find(&sources.shared, &name)?.present_job()?;
    let job = perform(&sources.actions, move || {
        job.stop();
        job
    });
    Ok(answer_with(&*job.await?))
}

pub(super) async fn pause(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let job = find(&sources.shared, &name)?.present_job()?;
    job.pause();
    Ok(answer_with(&job))
}

pub(super) async fn resume(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let job = find(&sources.shared, &name)?.present_job()?;
    job.resume();
    Ok(answer_with(&job))
}

fn answer_with(job: &Job) -> Response {
    json(&value!({ "job": job.report() }))
}
