//! `mica volume stats`.

use super::session::{SessionArgs, Subject, instant, show_on, time_text, url_in};
use crate::failure::Failure;
use crate::output::{OutputArgs, OutputFormat, human_size, print, print_json, progress_bar};
use crate::plain::plain;
use crate::table::table;
use clap::Args;
use mica_stack::StoreUrl;
use mica_volume::{Bytes, SnapshotUsage, Speed, Usage, VolumeUsage};
use serde_json::{Value, json};
use std::process::ExitCode;

/// Show how much each volume holds, shares, and owns alone.
///
/// For a store, a line per volume; for a volume, also what each of its snapshots owns alone, which
/// is freed when the snapshot is dropped. Changes nothing. Reads all maps: for a large store this
/// takes as long as `mica volume gc --dry-run`.
#[derive(Args)]
pub(super) struct StatsArgs {
    #[command(flatten)]
    pub(super) output: OutputArgs,
    #[command(flatten)]
    pub(super) session: SessionArgs,
    /// The store, or a volume.
    #[arg(value_name = "URL")]
    pub(super) url: String,
}

pub(super) fn run(args: &StatsArgs) -> Result<ExitCode, Failure> {
    let session = args.session.start()?;
    let bar = progress_bar(0, "extents");
    let found = session.executor.block_on(async {
        let mut show = show_on(&bar);
        let (store, name) = match session.subject(&args.url, "volume stats").await? {
            Subject::Store(store) => (store, None),
            Subject::Volume(store, name) => (store, Some(name)),
        };
        let usage = store.volumes().usage(name.as_ref(), Speed::default(), &mut show).await?;
        Ok::<_, Failure>((store.url().clone(), name, usage))
    });
    bar.finish_and_clear();
    let (store, name, usage) = found?;
    let one = name.is_some().then(|| usage.volumes.first()).flatten();
    match (args.output.output, one) {
        (OutputFormat::Json, Some(volume)) => print_json(&volume_json(&store, volume))?,
        (OutputFormat::Json, None) => print_json(&store_json(&store, &usage))?,
        (OutputFormat::Human, Some(volume)) => print(&volume_text(&store, volume))?,
        (OutputFormat::Human, None) => print(&store_text(&store, &usage))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn store_json(store: &StoreUrl, usage: &Usage) -> Value {
    let Usage { collected, needed, shared, volumes } = usage;
    let volumes: Vec<_> = volumes.iter().map(|volume| volume_json(store, volume)).collect();
    json!({
        "url": store.to_string(),
        "extents": collected.extents,
        "bytes": collected.bytes,
        "live-bytes": collected.live_bytes,
        "shared-bytes": shared.all(),
        "metadata-bytes": needed.metadata,
        "recent-bytes": collected.recent_bytes,
        "garbage-extents": collected.freed_extents,
        "garbage-bytes": collected.freed_bytes,
        "sparse-bytes": sparse_bytes(usage),
        "volumes": volumes,
    })
}

/// What nothing needs within extents that stay.
fn sparse_bytes(usage: &Usage) -> u64 {
    let collected = &usage.collected;
    collected.bytes.saturating_sub(collected.live_bytes + collected.freed_bytes)
}

fn volume_json(store: &StoreUrl, volume: &VolumeUsage) -> Value {
    let snapshot = |snapshot: &SnapshotUsage| {
        json!({
            "label": snapshot.info.label,
            "sequence": snapshot.info.number,
            "time": instant(snapshot.info.time_ns),
            "exclusive-bytes": snapshot.only.all(),
        })
    };
    let held = |of: fn(&mica_volume::Held) -> u64| volume.held.as_ref().map(of);
    json!({
        "name": volume.name.as_str(),
        "url": url_in(store, &volume.name),
        "virtual-size": volume.len,
        "open-on": volume.open_on,
        "live-bytes": held(|held| held.bytes.all()),
        "data-bytes": held(|held| held.bytes.data),
        "metadata-bytes": held(|held| held.bytes.metadata),
        "exclusive-bytes": volume.only.all(),
        "shared-bytes": volume.held.map(|held| (held.bytes - volume.only).all()),
        "only-now-bytes": volume.only_now.all(),
        "recent-bytes": volume.recent_bytes,
        "extents": held(|held| held.extents),
        "extent-bytes": held(|held| held.extent_bytes),
        "snapshot-count": volume.snapshot_count,
        "snapshots": volume.snapshots.iter().map(snapshot).collect::<Vec<_>>(),
    })
}

fn store_text(store: &StoreUrl, usage: &Usage) -> String {
    let Usage { collected, needed, shared, volumes } = usage;
    let rows = volumes.iter().map(|volume| {
        vec![
            volume.name.as_str().to_owned(),
            human_size(volume.len),
            volume.held.map_or_else(|| "-".to_owned(), |held| human_size(held.bytes.all())),
            human_size(volume.only.all()),
            human_size(volume.recent_bytes),
            volume.snapshot_count.to_string(),
        ]
    });
    let head = ["VOLUME", "SIZE", "HOLDS", "ALONE", "RECENT", "SNAPSHOTS"];
    let size = human_size;
    format!(
        "store: {store}\n\
         bytes: {} in {} extents\n\
         needed: {}, of which {} metadata ({}), {} shared by volumes, {} put lately by open ones\n\
         garbage: {} in {} extents that nothing needs, {} within others\n\n{}",
        size(collected.bytes),
        collected.extents,
        size(collected.live_bytes),
        size(needed.metadata),
        share(*needed),
        size(shared.all()),
        size(collected.recent_bytes),
        size(collected.freed_bytes),
        collected.freed_extents,
        size(sparse_bytes(usage)),
        table(&head, &[1, 2, 3, 4, 5], rows.collect())
    )
}

fn volume_text(store: &StoreUrl, volume: &VolumeUsage) -> String {
    let size = |bytes: Bytes| human_size(bytes.all());
    let held = volume.held.unwrap_or_default();
    let open = match &volume.open_on {
        Some(host) => {
            let recent = human_size(volume.recent_bytes);
            format!("open on {}: {recent} were put since its last checkpoint\n", plain(host))
        }
        None => String::new(),
    };
    let rows = volume.snapshots.iter().map(|snapshot| {
        let info = &snapshot.info;
        let label = plain(&info.label);
        vec![info.number.to_string(), label, time_text(info.time_ns), size(snapshot.only)]
    });
    let snapshots = match volume.snapshots.is_empty() {
        true => String::new(),
        false => {
            let head = ["NUMBER", "LABEL", "TAKEN (UTC)", "ALONE"];
            format!("\n{}", table(&head, &[0, 3], rows.collect()))
        }
    };
    format!(
        "volume: {}\nvirtual size: {}\n\
         holds: {}, of which {} metadata ({}), in {} extents of {}\n\
         alone: {}, of which {} no snapshot needs\n\
         shared with other volumes: {}\n{open}{snapshots}",
        url_in(store, &volume.name),
        human_size(volume.len),
        size(held.bytes),
        human_size(held.bytes.metadata),
        share(held.bytes),
        held.extents,
        human_size(held.extent_bytes),
        size(volume.only),
        size(volume.only_now),
        size(held.bytes - volume.only),
    )
}

/// The share of metadata.
fn share(bytes: Bytes) -> String {
    let thousandths = bytes.metadata.saturating_mul(1000) / bytes.all().max(1);
    format!("{}.{} %", thousandths / 10, thousandths % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_of_metadata_has_one_digit_behind_the_point() {
        for (data, metadata, wanted) in
            [(0, 0, "0.0 %"), (985, 15, "1.5 %"), (0, 7, "100.0 %"), (1 << 40, 1 << 30, "0.0 %")]
        {
            assert_eq!(share(Bytes { data, metadata }), wanted);
        }
    }
}
