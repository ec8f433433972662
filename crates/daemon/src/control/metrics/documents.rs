//! Checks that the dashboard and the alert rules in docs/monitoring name only metrics that the
//! server gives.

use super::exposition::{Page, names_of};
use super::{Seen, of_disk, of_process, of_store};
use crate::opened::Figures;
use crate::own_process::ProcessFigures;
use crate::stats::{Counts, sections};
use mica_block::{LogStats, VolumeStats};
use serde_json::Value;
use std::collections::BTreeSet;

const ALERTS: &str = include_str!("../../../../../docs/monitoring/alerts.yml");
const DASHBOARD: &str = include_str!("../../../../../docs/monitoring/dashboard.json");

/// Every name that a sample of a server may have.
fn given() -> BTreeSet<String> {
    let volume = VolumeStats {
        log: Some(LogStats::default()),
        snapshots: Some(1),
        ..VolumeStats::default()
    };
    let shown =
        Figures { indexed_layers: Some(1), volume: Some(Box::new(volume)), ..Figures::default() };
    let device = Some(mica_serve::vhost_user::Counters::default());
    let file = Some(mica_serve::fuse::Counters::default());
    let counts = Counts { device, file, delayed: 1, ..Counts::default() };
    let mut page = Page::default();
    let process = ProcessFigures { max_descriptors: Some(1), ..ProcessFigures::default() };
    of_process(&mut page, 1, &process);
    let of_sections = names_of(&sections(&shown, &counts));
    of_store(&mut page, &mica_stack::Collection::default());
    of_disk(
        &mut page,
        &Seen {
            name: "a",
            image: "b",
            format: "raw",
            is_serving: true,
            is_failed: false,
            is_device_broken: false,
            clients: 0,
            shown,
            counts,
        },
    );
    let text = page.to_string();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let names = samples.filter_map(|line| line.split(['{', ' ']).next());
    names.map(str::to_owned).chain(of_sections).collect()
}

/// What in `text` looks like a name of ours.
fn named(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("mica_") || word.starts_with("process_")).collect()
}

/// The queries of a dashboard, wherever they are in it.
fn queries<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            let keys = ["expr", "query"];
            found.extend(keys.iter().filter_map(|key| fields.get(*key)?.as_str()));
            fields.values().for_each(|value| queries(value, found));
        }
        Value::Array(values) => values.iter().for_each(|value| queries(value, found)),
        _ => {}
    }
}

#[track_caller]
fn check(text: &str, least: usize) {
    let (named, given) = (named(text), given());
    assert!(named.len() >= least, "{named:?}");
    let unknown: Vec<_> = named.iter().filter(|name| !given.contains(**name)).collect();
    assert!(unknown.is_empty(), "not given by the server: {unknown:?}; given are {given:?}");
}

#[test]
fn alert_rules_name_metrics_that_the_server_gives() {
    check(ALERTS, 10);
    // Each of these is a reason to get up at night.
    for name in [
        "mica_disk_failed",
        "mica_disk_latched",
        "mica_device_broken",
        "mica_volume_store_silent_seconds",
        "mica_volume_fenced",
        "mica_volume_log_used_bytes",
    ] {
        assert!(named(ALERTS).contains(name), "{name}");
    }
}

#[test]
fn dashboard_names_metrics_that_the_server_gives() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut found = Vec::new();
    queries(&dashboard, &mut found);
    assert!(found.len() > 20, "{found:?}");
    check(&found.join("\n"), 15);
    let titles = dashboard["panels"].as_array().expect("panels").iter();
    assert!(titles.clone().all(|panel| panel["title"].is_string()));
}

#[test]
fn name_that_is_not_given_is_found() {
    let given = given();
    assert!(!given.contains("mica_disk_lached") && given.contains("mica_disk_delayed_total"));
    assert!(given.contains("mica_request_duration_seconds_bucket"));
    assert!(named("sum(rate(mica_x[5m])) / process_y{a=\"b\"}").is_superset(&["mica_x"].into()));
}
