//! Merges of the layers of a disk that is served.

use super::perform::{Answer, find, perform, perform_held};
use super::reply::{body, json};
use super::sources::Sources;
use crate::jobs::Job;
use crate::served::{LayersCalled, StatesInTheWay};
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use mica_stack::GoneImages;
use serde::Deserialize;
use serde_json::json as value;
use std::path::PathBuf;

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
        let check = |layers: &[PathBuf]| shared.check_no_disk_needs(&served, layers);
        served.start_commit(layers, gone, rate, check)
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
        let check = |layers: &[PathBuf]| shared.check_no_disk_needs(&served, layers);
        served.start_drop(&state, gone, rate, check)
    });
    Ok(answer_with(&*begun.await?))
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
