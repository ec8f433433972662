//! The figures of a run, as JSON.

use mica_block::{Disk, MapStats};
use mica_serve::nbd::Counters;
use serde_json::{Value, json};

/// What `--stats-file` holds.
pub(crate) fn document(disk: &dyn Disk, nbd: &Counters) -> Value {
    let MapStats { hits, misses, index_loads, walks, layers_walked, cached_bytes, budget_bytes } =
        disk.map_stats();
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
        "nbd": nbd_counters(nbd),
    })
}

fn nbd_counters(counters: &Counters) -> Value {
    counters.fields().into_iter().map(|(name, count)| (name.to_owned(), json!(count))).collect()
}
