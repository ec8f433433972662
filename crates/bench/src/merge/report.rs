//! The results as a page.

use super::{COMMIT, STREAM};
use crate::page::{Column, Found, by_layers};

const COLUMNS: &[Column] = &[
    ("reads' p99 before ms", "before_p99_ms", 3),
    ("during ms", "p99_ms", 3),
    ("ratio", "p99_ratio", 2),
    ("slowest read ms", "max_ms", 1),
    ("reads a second, during / before", "reads_ratio", 2),
    ("takes s", "took_s", 2),
    ("/ qemu-img convert", "took_ratio", 2),
    ("without a guest s", "idle_s", 2),
    ("under writes s", "loaded_s", 2),
    ("ratio", "loaded_ratio", 2),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let verified = "A guest reads 4 KiB at random places, one at a time, before and during a merge \
                    that is asked for over the server's control socket; the chain is checked by \
                    qemu-img afterwards.";
    found.page("Merges of served chains", verified, |page| {
        let (stream, commit) =
            ("All layers into the active one", "All but the active into the base");
        by_layers(page, found.samples, STREAM, stream, COLUMNS);
        by_layers(page, found.samples, COMMIT, commit, COLUMNS);
    })
}
