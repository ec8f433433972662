//! The results as a page: a table for each load, and one for what was counted.

use super::Part;
use super::images::Kind;
use super::loads::Case;
use super::{counted_part, part};
use crate::page::{Column, Found, Rows, Table};
use crate::samples::Samples;
use clap::ValueEnum;

const SPEED: &[Column] = &[
    ("writes/s", "writes_per_s", 0),
    ("before the last flush", "unflushed_per_s", 0),
    ("MiB/s", "mib_s", 1),
    ("write p50 µs", "write_p50_us", 0),
    ("p99 µs", "write_p99_us", 0),
    ("fsync p50 µs", "flush_p50_us", 0),
    ("p99 µs", "flush_p99_us", 0),
    ("CPU µs/write", "cpu_us", 1),
    ("to devices per guest byte", "device_per_guest_byte", 2),
    ("file MiB", "file_mib", 0),
    ("room MiB", "file_room_mib", 0),
    ("syncs/fsync, own count", "syncs_per_flush", 2),
    ("metadata KiB/fsync, own", "metadata_per_flush_kib", 1),
    ("written per guest byte, own", "written_per_guest_byte", 2),
];
const COUNTED: &[Column] = &[
    ("guest MiB", "guest_mib", 1),
    ("fsyncs", "flushes", 0),
    ("syncs", "syncs", 0),
    ("syncs/fsync", "syncs_per_flush", 2),
    ("own count", "own_syncs", 0),
    ("writes", "write_calls", 0),
    ("written MiB", "written_mib", 1),
    ("zeroed MiB", "zeroed_mib", 1),
    ("written per guest byte", "written_per_guest_byte", 2),
    ("beyond data and copies, KiB/fsync", "metadata_per_flush_kib", 1),
    ("reads of the base", "base_reads", 0),
    ("read MiB", "base_read_mib", 1),
    ("image read MiB", "image_read_mib", 1),
];

/// The page.
pub(super) fn page(found: &Found<'_>) -> String {
    let verified = "Every image was checked by QEMU after each run, and its content read back \
                    through QEMU after the first of each kind. A flush at the end is part of every \
                    load's time. What a server counts itself includes opening and closing.";
    found.page("Writing: mica beside its peers", verified, |page| {
        speeds(page, found.samples);
        counts(page, found.samples);
    })
}

/// A table for each load.
fn speeds(page: &mut String, samples: &Samples) {
    let mut seen = Vec::new();
    let parts = Part::value_variants().iter().filter(|part| **part != Part::Counts);
    for case in parts.flat_map(|part| part.runs()).map(|(_, case)| case) {
        if seen.contains(&case) {
            continue;
        }
        seen.push(case);
        let name = |kind| part(kind, case);
        let kinds = Kind::ALL.iter().copied().filter(|kind| is_there(samples, &name(*kind)));
        let row = |kind: Kind| rows(kind.name().to_owned(), name(kind), kind);
        let table = Table { title: &case.words(), first: "image", columns: SPEED };
        table.put(page, samples, &kinds.map(row).collect::<Vec<_>>());
    }
}

fn counts(page: &mut String, samples: &Samples) {
    let counted: Vec<_> = Part::Counts
        .runs()
        .into_iter()
        .map(|(kind, case)| rows(row_name(kind, case), counted_part(kind, case), kind))
        .filter(|rows| is_there(samples, &rows.part))
        .collect();
    let title = "Counted by strace, I/O in threads (as the paper's tables 1, 2 and 4)";
    Table { title, first: "image and load", columns: COUNTED }.put(page, samples, &counted);
}

fn row_name(kind: Kind, case: Case) -> String {
    format!("{}: {}", kind.name(), case.words())
}

fn is_there(samples: &Samples, part: &str) -> bool {
    !samples.servers(part).is_empty()
}

fn rows(name: String, part: String, kind: Kind) -> Rows {
    Rows { in_words: name.clone(), name, part, layers: kind.layers() }
}
