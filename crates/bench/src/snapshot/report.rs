//! The results as a page.

use super::{BY_LAYERS, BY_SIZE, CLONES, SYNCS};
use crate::page::{Column, Found, Rows, Table, by_layers};

const TAKEN: &[Column] = &[
    ("caller ms", "caller_ms", 2),
    ("caller max ms", "caller_max_ms", 2),
    ("guest's slowest write ms", "pause_ms", 2),
    ("max ms", "pause_max_ms", 2),
    ("otherwise p50 ms", "idle_p50_ms", 3),
    ("p99 ms", "idle_p99_ms", 3),
    ("space KiB", "space_kib", 0),
];
const COUNTED: &[Column] = &[("fsync and fdatasync, at most", "syncs", 0)];
const CLONED: &[Column] = &[("a clone, ms", "clone_ms", 1)];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let samples = found.samples;
    let verified = "A guest writes 4 KiB at random places, one at a time, 2000 a second, while \
                    snapshots are taken over the server's control socket; the last layer is \
                    checked by qemu-img.";
    found.page("Snapshots of served chains", verified, |page| {
        by_layers(page, samples, BY_LAYERS, "By the length of the chain", TAKEN);
        let rows = samples.layers(BY_SIZE).into_iter().map(|gib| Rows {
            name: gib.to_string(),
            in_words: format!("{gib} GiB"),
            part: BY_SIZE.to_owned(),
            layers: gib,
        });
        let title = "By the size of the disk, one layer";
        Table { title, first: "GiB", columns: TAKEN }.put(page, samples, &rows.collect::<Vec<_>>());
        by_layers(page, samples, SYNCS, "Making things durable, after a write", COUNTED);
        by_layers(page, samples, CLONES, "Clones of what nobody writes", CLONED);
    })
}
