//! The process and its disks as JSON.

use super::sources::Sources;
use crate::served::Served;
use serde_json::{Map, Value, json};

/// `/v1/status`
pub(super) fn status(sources: &Sources) -> Value {
    all(sources, status_of)
}

/// `/v1/stats`
pub(super) fn stats(sources: &Sources) -> Value {
    all(sources, |served| {
        let mut document = brief(served);
        document.extend(served.figures());
        document
    })
}

fn all(sources: &Sources, each: impl Fn(&Served) -> Map<String, Value>) -> Value {
    let uptime_ms = u64::try_from(sources.uptime().as_millis()).unwrap_or(u64::MAX);
    let all = sources.shared.disks.all();
    let disks = all.iter().map(|served| Value::Object(each(served)));
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "pid": std::process::id(),
        "uptime_ms": uptime_ms,
        "config": sources.shared.config_file.as_ref().map(|file| file.to_string_lossy()),
        "disks": disks.collect::<Vec<_>>(),
    })
}

/// What both answers contain.
fn brief(served: &Served) -> Map<String, Value> {
    let image = served.image_figures();
    object([
        ("name", json!(served.name)),
        ("state", json!(served.condition())),
        ("length", json!(image.len)),
        ("layers", json!(image.layers)),
        ("indexed_layers", json!(image.indexed_layers)),
        ("clients", json!(served.clients())),
    ])
}

fn status_of(served: &Served) -> Map<String, Value> {
    let settings = &served.settings;
    let image = served.image_figures();
    let mut status = brief(served);
    status.extend(object([
        ("image", json!(served.image().to_string_lossy())),
        ("format", json!(served.images.format)),
        ("writable", json!(image.is_writable)),
        ("nbd", json!(settings.nbd)),
        ("vhost_user", json!(settings.vhost_user.as_ref().map(|path| path.to_string_lossy()))),
        ("failure", json!(served.failure().map(|error| error.in_one_line()))),
        ("device_error", json!(served.device_error())),
        ("weakness", json!(image.weakness)),
        ("fuse", json!(settings.fuse.as_ref().map(|path| path.to_string_lossy()))),
    ]));
    status
}

fn object<const N: usize>(entries: [(&str, Value); N]) -> Map<String, Value> {
    entries.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
