//! A table of mica beside qemu-nbd on a few images: the end of the demonstration.

use super::measure::{self, Subject};
use super::peers::Peer;
use super::samples::{Sample, Samples};
use anyhow::{Result, ensure};
use std::path::Path;
use std::time::Duration;

/// Runs of each server on each image.
const REPEATS: u32 = 3;
/// Columns: what, figure, digits after the point.
const COLUMNS: &[(&str, &str, usize)] = &[
    ("open ms", "open_ms", 0),
    ("random 4 KiB reads/s", "random_32_per_s", 0),
    ("CPU µs/read", "random_32_cpu_us", 1),
    ("sequential MiB/s", "sequential_mib_s", 0),
    ("peak memory MiB", "rss_peak_mib", 0),
];

/// Measures mica and qemu-nbd in turns on `images`, given with their number of layers; each load
/// lasts `time`.
///
/// # Errors
/// If a server cannot be measured.
pub(crate) fn table(images: &[(u32, &Path)], time: Duration) -> Result<String> {
    let peers = [Peer::mica(&[]), Peer::qemu_nbd(&[])];
    let mut samples = Samples::default();
    for &(layers, image) in images {
        let subject = Subject {
            image,
            format: "qcow2",
            owners: None,
            table_bytes: 0,
            random: time,
            sequential: time,
        };
        for repeat in 0..REPEATS {
            for peer in &peers {
                let mut sample = Sample::new("glance", &peer.name, layers, repeat);
                measure::glance(peer, subject, &mut sample)?;
                samples.add(sample);
            }
        }
    }
    let width = COLUMNS.iter().map(|(what, ..)| what.len()).max().unwrap_or(0);
    let mut table = format!("{:>6}  {:<9}", "layers", "server");
    for (what, ..) in COLUMNS {
        table += &format!("  {what:>width$}");
    }
    for &(layers, _) in images {
        for peer in &peers {
            table += &format!("\n{layers:>6}  {:<9}", peer.name);
            for (what, metric, after_point) in COLUMNS {
                let value = samples.median("glance", &peer.name, layers, metric);
                ensure!(value.is_some(), "{what} was not measured");
                table += &format!("  {:>width$.after_point$}", value.unwrap_or(0.0));
            }
        }
    }
    Ok(table)
}
