//! The process and its disks as JSON.

use super::history::History;
use super::sources::Sources;
use crate::jobs::JobReport;
use crate::own_process::ProcessFigures;
use crate::served::Served;
use crate::stats::Totals;
use mica_stack::Collection;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

/// `/v1/status`
pub(super) fn status(sources: &Sources) -> Value {
    all(sources, status_of)
}

/// `/v1/stats`
pub(super) fn stats(sources: &Sources) -> Value {
    let history = sources.history();
    all(sources, |served| stats_of(&history, served))
}

/// `/v1/overview`: what a table of all disks shows. Short, because it is asked for every second.
pub(super) fn overview(sources: &Sources) -> String {
    let history = sources.history();
    let all = sources.shared.disks.all();
    let disks = all.iter().map(|served| {
        let totals = served.counts().totals();
        let errors_lately = history.errors_lately(&served.name, &totals);
        Row { brief: Brief::of(served), totals, errors_lately }
    });
    let overview = Overview { process: About::of(sources), disks: disks.collect() };
    // Nothing in it can fail.
    serde_json::to_string(&overview).unwrap_or_default() + "\n"
}

/// `/v1/stats/NAME`: the figures of one disk, in the shape of `/v1/stats`, and its status.
pub(super) fn of_disk(sources: &Sources, served: &Served) -> Value {
    let mut answer = map(&About::of(sources));
    answer.insert("status".to_owned(), Value::Object(status_of(served)));
    answer.insert("disks".to_owned(), json!([stats_of(&sources.history(), served)]));
    Value::Object(answer)
}

fn stats_of(history: &History, served: &Served) -> Map<String, Value> {
    let mut document = map(&Brief::of(served));
    let totals = served.counts().totals();
    let errors = history.errors_lately(&served.name, &totals);
    document.insert("errors_lately".to_owned(), json!(errors));
    document.insert("delayed".to_owned(), json!(totals.delayed));
    document.extend(served.figures());
    document
}

fn all(sources: &Sources, each: impl Fn(&Served) -> Map<String, Value>) -> Value {
    let all = sources.shared.disks.all();
    let disks = all.iter().map(|served| Value::Object(each(served)));
    let mut answer = map(&About::of(sources));
    answer.insert("disks".to_owned(), disks.collect());
    let stores = sources.shared.resources.stores.collections();
    answer.insert("stores".to_owned(), stores.iter().map(collection).collect());
    Value::Object(answer)
}

/// What was collected in a store.
fn collection(it: &Collection) -> Value {
    json!({
        "store": it.store,
        "gc_passes": it.passes,
        "gc_failures": it.failures,
        "gc_failure": it.failure,
        "gc_last_ms": it.last_ms,
        "gc_freed_bytes": it.freed_bytes,
        "gc_punched_bytes": it.punched_bytes,
        "gc_rewritten_bytes": it.rewritten_bytes,
        "bytes": it.bytes,
        "live_bytes": it.live_bytes,
    })
}

/// What every answer says of the process.
#[derive(Serialize)]
struct About {
    version: &'static str,
    pid: u32,
    host: String,
    uptime_ms: u64,
    config: Option<String>,
    process: ProcessFigures,
}

impl About {
    fn of(sources: &Sources) -> Self {
        let config = sources.shared.config_file.as_ref();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            host: sources.shared.own_process.host().to_owned(),
            uptime_ms: u64::try_from(sources.uptime().as_millis()).unwrap_or(u64::MAX),
            config: config.map(|file| file.to_string_lossy().into_owned()),
            process: sources.shared.own_process.figures(),
        }
    }
}

/// What every answer says of a disk.
#[derive(Serialize)]
struct Brief {
    name: String,
    state: &'static str,
    length: u64,
    layers: usize,
    indexed_layers: Option<usize>,
    clients: usize,
    writable: bool,
    failure: Option<String>,
    latch: Option<String>,
    device_error: Option<&'static str>,
    weakness: Option<Cow<'static, str>>,
    /// The merge of its layers that is under way.
    merge: Option<JobReport>,
}

impl Brief {
    fn of(served: &Served) -> Self {
        let image = served.image_figures();
        Self {
            name: served.name.clone(),
            state: served.condition(),
            length: image.len,
            layers: image.layers,
            indexed_layers: image.indexed_layers,
            clients: served.clients(),
            writable: image.is_writable,
            failure: served.failure().map(|error| error.in_one_line()),
            latch: image.latch.map(|error| error.in_one_line()),
            device_error: served.device_error(),
            weakness: image.weakness,
            merge: served.job_under_way().map(|job| job.report()),
        }
    }
}

#[derive(Serialize)]
struct Overview {
    #[serde(flatten)]
    process: About,
    disks: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    #[serde(flatten)]
    brief: Brief,
    #[serde(flatten)]
    totals: Totals,
    /// In the last hour.
    errors_lately: u64,
}

fn status_of(served: &Served) -> Map<String, Value> {
    let settings = &served.settings;
    let mut status = map(&Brief::of(served));
    let nbd = served.nbd_places();
    let export = (!nbd.is_empty()).then(|| served.export_name());
    let more = json!({
        "image": served.image().to_string_lossy(),
        "format": served.format(),
        "nbd": nbd,
        "export_name": export,
        "vhost_user": settings.vhost_user.as_ref().map(|path| path.to_string_lossy()),
        "fuse": settings.fuse.as_ref().map(|path| path.to_string_lossy()),
        "queues": settings.vhost_user.is_some().then(|| settings.num_queues()),
        "iops": limit(settings.rates().iops),
        "bps": limit(settings.rates().bps),
    });
    if let Value::Object(more) = more {
        status.extend(more);
    }
    let backup = served
        .backup()
        .map(|backup| json!({ "state": backup.state, "since": backup.since, "nbd": backup.place }));
    status.insert("backup".to_owned(), backup.unwrap_or_default());
    // As in `/v1/stats`; nothing if it is no volume that is written.
    status.insert("volume".to_owned(), served.figures().remove("volume").unwrap_or_default());
    status
}

/// Zero means that there is none.
fn limit(rate: u64) -> Option<u64> {
    Some(rate).filter(|rate| *rate > 0)
}

/// The fields of a struct.
fn map(value: &impl Serialize) -> Map<String, Value> {
    match serde_json::to_value(value) {
        Ok(Value::Object(map)) => map,
        _ => Map::new(),
    }
}
