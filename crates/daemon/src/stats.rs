//! The figures of a run, as JSON.

use crate::served::Counts;
use mica_block::{Disk, MapStats, WriteStats};
use serde_json::{Value, json};

/// What `--stats-file` holds.
pub(crate) fn document(disk: &dyn Disk, counts: &Counts) -> Value {
    let Counts { nbd, device, file } = counts;
    let MapStats { hits, misses, index_loads, walks, layers_walked, cached_bytes, budget_bytes } =
        disk.map_stats();
    let WriteStats {
        copied_read_bytes,
        copied_written_bytes,
        metadata_bytes,
        syncs,
        groups,
        linked_clusters,
    } = disk.write_stats();
    json!({
        "map": {
            "hits": hits,
            "misses": misses,
            "index_loads": index_loads,
            "walks": walks,
            "layers_walked": layers_walked,
            "cached_bytes": cached_bytes,
            "budget_bytes": budget_bytes,
        },
        "write": {
            "copied_read_bytes": copied_read_bytes,
            "copied_written_bytes": copied_written_bytes,
            "metadata_bytes": metadata_bytes,
            "syncs": syncs,
            "groups": groups,
            "linked_clusters": linked_clusters,
        },
        "nbd": object(nbd.fields()),
        "vhost_user": device.as_ref().map(|counters| object(counters.fields())),
        "fuse": file.as_ref().map(|counters| object(counters.fields())),
    })
}

fn object(fields: Vec<(&'static str, u64)>) -> Value {
    fields.into_iter().map(|(name, count)| (name.to_owned(), json!(count))).collect()
}
