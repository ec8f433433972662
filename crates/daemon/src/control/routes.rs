//! The routes: what can be queried and commanded.
//!
//! | route | |
//! |---|---|
//! | `GET /` | the figures, for people |
//! | `GET /metrics` | the figures, for Prometheus |
//! | `GET /healthz` | whether every disk serves |
//! | `GET /v1/status` | the process and its disks |
//! | `GET /v1/stats`, `/v1/stats/NAME` | the figures, of one disk with its status |
//! | `GET /v1/overview` | what a table of all disks shows |
//! | `GET /v1/tree/NAME` | a volume with its newest snapshots |
//! | `GET /v1/history`, `/v1/history/NAME` | the last hour, of the process or a disk |
//! | `POST /v1/disks` | the table of a disk, as in the configuration: serves it as well |
//! | `DELETE /v1/disks/NAME` | stops serving the disk, closes its image and forgets it |
//! | `POST /v1/disks/NAME/resize` | `{"size": "20G"}`, or `"+5G"` |
//! | `POST /v1/disks/NAME/drain` | stops serving the disk and closes its image |
//! | `POST /v1/disks/NAME/undrain` | serves it again |
//! | `POST /v1/disks/NAME/handover` | `{"host": "host-2"}`: closes a volume for that host |
//! | `POST /v1/disks/NAME/stream` | `{"base": PATH, "drop_states": true}`: layers go up |
//! | `POST /v1/disks/NAME/commit` | `{"top": PATH, "base": PATH}`: layers go down |
//! | | with `"ignore_gone": true`, images on them that are gone were removed |
//! | `POST /v1/disks/NAME/cancel`, `pause`, `resume` | the merge that is under way |
//! | `GET /v1/jobs` | merges under way, and the last ones |
//! | `GET /v1/disks/NAME/snapshots` | the snapshots of a volume |
//! | `POST /v1/disks/NAME/snapshots` | `{"label": "monday", "with": ["db"]}`: takes one or more |
//! | | of a chain `{"label": "/vm/next.qcow2"}`: the next layer |
//! | `POST /v1/snapshots` | `{"disks": [{"disk": "a", "label": "/vm/2.qcow2"}]}`: at one instant |
//! | `POST /v1/disks/NAME/drop` | `{"snapshot": "monday"}`: drops it |
//! | `POST /v1/disks/NAME/clone` | `{"snapshot": "monday", "volume": "web2"}`: in the same store |
//! | `POST /v1/disks/NAME/rollback` | `{"snapshot": "monday"}`: of a volume that is drained |
//! | `POST /v1/disks/NAME/diff` | `{"before": "monday", "after": "tuesday"}`: what may differ |
//! | `POST /v1/disks/NAME/store` | puts what a volume's store lacks, and says where it is |
//! | `GET /v1/disks/NAME/extents?since=…` | what of a disk is allocated, or has changed |
//! | `GET /v1/disks/NAME/backups` | the states of a chain that are kept, and its backup |
//! | `POST /v1/disks/NAME/backup` | `{"as": "tue", "since": "mon", "nbd": SOCKET}`: begins one |
//! | `POST /v1/disks/NAME/end-backup` | ends it |
//! | `POST /v1/disks/NAME/drop-state` | `{"state": "mon", "rate": BYTES}`: keeps it no longer |
//! | | `"ignore_gone": true` as for a commit |
//! | `POST /v1/disks/NAME/label` | `{"snapshot": "monday", "label": "friday"}` |
//! | `POST /v1/reload` | reads the configuration again: disks are added and removed |
//! | `POST /v1/drain` | the same for all disks, and ends the process |
//! | `POST /v1/takeover` | `{"socket": PATH}`: another process of ours takes over |
//! | `GET`, `PUT /v1/log-level` | `{"level": "debug"}` |

use super::log::LogLevel;
use super::perform::{Answer, asked, begin, failed_inside, find, perform, perform_held};
use super::reply::{Refusal, body, json, text};
use super::sources::Sources;
use super::{
    backups, compression, extents, figures, health, merges, metrics, page, snapshots, tree,
};
use crate::config::DiskConfig;
use crate::served::{NewLength, Served, Source};
use crate::settings::Size;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use mica_serve::vhost_user::Notice;
use serde::Deserialize;
use serde_json::{Value, json as value};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Routes that change nothing.
pub(super) fn read_only(sources: &Sources) -> Router {
    let router = Router::new()
        .route("/", get(page))
        .route("/metrics", get(async |State(sources)| text(metrics::KIND, metrics::text(&sources))))
        .route("/v1/status", get(async |State(sources)| json(&figures::status(&sources))))
        .route("/v1/stats", get(async |State(sources)| json(&figures::stats(&sources))))
        .route("/healthz", get(healthz))
        .route("/v1/overview", get(overview))
        .route("/v1/jobs", get(merges::jobs))
        .route("/v1/stats/{name}", get(stats_of))
        .route("/v1/tree/{name}", get(tree::tree))
        .route("/v1/history", get(history))
        .route("/v1/history/{name}", get(history_of))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn(compression::compress));
    router.with_state(sources.clone())
}

/// Routes that change something.
pub(super) fn commands(sources: &Sources) -> Router {
    let router = Router::new()
        .route("/v1/disks", post(add))
        .route("/v1/disks/{name}", delete(remove))
        .route("/v1/disks/{name}/resize", post(resize))
        .route("/v1/disks/{name}/drain", post(drain))
        .route("/v1/disks/{name}/undrain", post(undrain))
        .route("/v1/disks/{name}/handover", post(hand_over))
        .route("/v1/disks/{name}/stream", post(merges::stream))
        .route("/v1/disks/{name}/commit", post(merges::commit))
        .route("/v1/disks/{name}/cancel", post(merges::cancel))
        .route("/v1/disks/{name}/pause", post(merges::pause))
        .route("/v1/disks/{name}/resume", post(merges::resume))
        .route("/v1/disks/{name}/snapshots", get(snapshots::list).post(snapshots::take))
        .route("/v1/snapshots", post(snapshots::take_all))
        .route("/v1/disks/{name}/drop", post(snapshots::drop_one))
        .route("/v1/disks/{name}/label", post(snapshots::label))
        .route("/v1/disks/{name}/clone", post(snapshots::clone))
        .route("/v1/disks/{name}/diff", post(snapshots::diff))
        .route("/v1/disks/{name}/rollback", post(snapshots::roll_back))
        .route("/v1/disks/{name}/store", post(snapshots::store))
        .route("/v1/disks/{name}/extents", get(extents::extents))
        .route("/v1/disks/{name}/backups", get(backups::list))
        .route("/v1/disks/{name}/backup", post(backups::begin))
        .route("/v1/disks/{name}/end-backup", post(backups::end))
        .route("/v1/disks/{name}/drop-state", post(merges::drop_state))
        .route("/v1/reload", post(reload))
        .route("/v1/drain", post(drain_all))
        .route("/v1/takeover", post(take_over))
        .route("/v1/log-level", get(log_level).put(set_log_level))
        .method_not_allowed_fallback(method_not_allowed);
    router.with_state(sources.clone())
}

/// Routes for users who may not even query.
pub(super) fn forbidden() -> Router {
    Router::new().fallback(async || {
        let what = "only root and the user of the server have access";
        Refusal::new(StatusCode::FORBIDDEN, what)
    })
}

/// The same `routes`, for clients that name this machine by a loopback address or localhost: a
/// stranger's web page in a browser on this machine cannot use DNS to pass as the origin of what is
/// shown here.
pub(super) fn local_only(routes: Router) -> Router {
    routes.layer(from_fn(async |request: Request, next: Next| {
        let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
        if host.is_some_and(is_local) {
            return next.run(request).await;
        }
        let what = "this server answers only as localhost or at a loopback address";
        Refusal::new(StatusCode::FORBIDDEN, what).into_response()
    }))
}

pub(super) fn is_local(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

async fn not_found(request: Request) -> Refusal {
    let what = format!("{} does not exist", request.uri().path());
    Refusal::new(StatusCode::NOT_FOUND, what)
}

async fn method_not_allowed(request: Request) -> Refusal {
    let what = format!("{} does not support {}", request.uri().path(), request.method());
    Refusal::new(StatusCode::METHOD_NOT_ALLOWED, what)
}

async fn healthz(State(sources): State<Sources>) -> Response {
    health::health(&sources.shared)
}

async fn overview(State(sources): State<Sources>) -> Response {
    text("application/json", figures::overview(&sources))
}

async fn stats_of(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    Ok(json(&figures::of_disk(&sources, &served)))
}

async fn history(State(sources): State<Sources>) -> Response {
    json(&sources.history().of_process())
}

async fn history_of(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    Ok(json(&sources.history().of_disk(&served.name)))
}

async fn page() -> Response {
    const POLICY: &str = "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; \
                          script-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; \
                          base-uri 'none'; form-action 'none'";
    let mut response = text("text/html; charset=utf-8", page::PAGE);
    let policy = HeaderValue::from_static(POLICY);
    response.headers_mut().insert(header::CONTENT_SECURITY_POLICY, policy);
    response
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TakeOver {
    socket: std::path::PathBuf,
}

async fn take_over(State(sources): State<Sources>, sent: Body) -> Answer {
    let TakeOver { socket } = body(sent).await?;
    // Nobody waits for another takeover here.
    drop(sources.shared.hold()?);
    let (sender, started) = oneshot::channel();
    let shared = Arc::clone(&sources.shared);
    // It answers once the takeover has started, and goes on with it.
    begin(&sources.endings, move || {
        shared.hand_over(&socket, |outcome| drop(sender.send(outcome)));
    })?;
    started.await.map_err(failed_inside)??;
    Ok(json(&value!({ "begun": true })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resize {
    size: String,
}

async fn resize(State(sources): State<Sources>, Path(name): Path<String>, sent: Body) -> Answer {
    let served = find(&sources.shared, &name)?;
    let Resize { size } = body(sent).await?;
    let (by, size) = match size.strip_prefix('+') {
        Some(by) => (true, by),
        None => (false, &*size),
    };
    let Size(bytes) = size.parse::<Size>()?;
    let to = if by { NewLength::Longer(bytes) } else { NewLength::Exactly(bytes) };
    let resized = asked(&sources, move || served.resize(to)).await?;
    let notice = match resized.notice {
        None => "none".to_owned(),
        Some(Ok(Notice::Nobody)) => "nobody".to_owned(),
        Some(Ok(Notice::Sent)) => "sent".to_owned(),
        Some(Ok(Notice::Taken)) => "taken".to_owned(),
        Some(Err(error)) => format!("failed: {error}"),
    };
    let (length_before, length) = (resized.old, resized.new);
    Ok(json(&value!({
        "disk": name,
        "length_before": length_before,
        "length": length,
        "notice": notice,
    })))
}

async fn drain(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    perform_held(&sources, move |_| served.stop()).await?;
    Ok(json(&value!({ "drained": [name] })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HandOver {
    host: String,
    #[serde(default = "store_limit_seconds")]
    limit_seconds: u32,
}

/// The default limit for pending writes to get into the store.
fn store_limit_seconds() -> u32 {
    60
}

async fn hand_over(State(sources): State<Sources>, Path(name): Path<String>, sent: Body) -> Answer {
    let served = find(&sources.shared, &name)?;
    let HandOver { host, limit_seconds } = body(sent).await?;
    let (heir, limit) = (host.clone(), Duration::from_secs(limit_seconds.into()));
    let handed = perform_held(&sources, move |_| served.hand_over(&heir, limit)).await?;
    let pause_ms = u64::try_from(handed.pause.as_millis()).unwrap_or(u64::MAX);
    Ok(json(&value!({ "disk": name, "handed_to": host, "pause_ms": pause_ms })))
}

async fn undrain(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    perform_held(&sources, move |shared| shared.undrain(&served)).await?;
    Ok(json(&value!({ "undrained": [name] })))
}

async fn add(State(sources): State<Sources>, sent: Body) -> Answer {
    let disk = DiskConfig::from_table(&body(sent).await?)?;
    let name = disk.name.clone();
    perform_held(&sources, move |shared| shared.add(disk, Source::Command).map(drop)).await?;
    Ok(json(&value!({ "added": [name] })))
}

async fn remove(State(sources): State<Sources>, Path(name): Path<String>) -> Answer {
    let served = find(&sources.shared, &name)?;
    perform_held(&sources, move |shared| shared.remove(&served)).await?;
    Ok(json(&value!({ "removed": [name] })))
}

async fn reload(State(sources): State<Sources>) -> Answer {
    let (shared, actions) = (Arc::clone(&sources.shared), Arc::clone(&sources.actions));
    sources.log.reopen()?;
    let reloaded = perform(&actions, move || shared.reload()).await??;
    reloaded.log();
    Ok(json(&value!(reloaded)))
}

async fn drain_all(State(sources): State<Sources>) -> Answer {
    let (shared, endings) = (Arc::clone(&sources.shared), Arc::clone(&sources.endings));
    // Waiting for a takeover would end the wrong process.
    drop(shared.hold()?);
    let drained = move || -> Result<(), Refusal> {
        drop(shared.hold()?);
        let stopped = shared.stop();
        // Whether or not the client is still there. The end waits for the answer.
        shared.ending.close();
        Ok(stopped?)
    };
    perform(&endings, drained).await??;
    let name = |served: &Arc<Served>| Value::from(&*served.name);
    let names: Vec<_> = sources.shared.disks.all().iter().map(name).collect();
    Ok(json(&value!({ "drained": names })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Log {
    level: LogLevel,
}

async fn log_level(State(sources): State<Sources>) -> Response {
    json(&value!({ "level": sources.log.level() }))
}

async fn set_log_level(State(sources): State<Sources>, sent: Body) -> Answer {
    let Log { level } = body(sent).await?;
    sources.log.set_level(level);
    Ok(log_level(State(sources)).await)
}
