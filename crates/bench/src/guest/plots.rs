//! The figures 17 and 18 of the sQemu paper with today's programs, and the device's own.

use super::device::{SHAPES, shape_name};
use super::{BOOT, DATABASE_PART, READS};
use crate::charts::{Bars, Chart, Group, Line, Scale};
use crate::load::vhost::BLOCK_BYTES;
use crate::plots::{Plot, Plots};
use crate::samples::Samples;
use anyhow::Result;
use std::path::Path;

/// Draws what there are figures for.
pub(super) fn write(samples: &Samples, out: &Path, name: &str) -> Result<Vec<Plot>> {
    let mut plots = Plots::new(out, name);
    let title = "Random 4 KiB reads over vhost-user-blk, one queue, 32 in flight";
    plots.put("reads", title, by_layers(samples, READS, title, "reads/s", "q1_d32_per_s"))?;
    let title = "Server's processor time of a random 4 KiB read, one queue, 32 in flight";
    plots.put("reads-cpu", title, by_layers(samples, READS, title, "µs", "q1_d32_cpu_us"))?;
    let title = "Random 4 KiB reads at one layer, by queues and requests in flight on each";
    plots.put("queues", title, by_shape(samples, title))?;
    let title = "Boot to the login prompt (as sQemu figure 17)";
    plots.put("boot", title, by_layers(samples, BOOT, title, "s", "login_s"))?;
    let title = "RocksDB, read-only, uniform keys (as sQemu figure 18)";
    plots.put("database", title, databases(samples, title))?;
    Ok(plots.written())
}

/// A line for each server over the number of layers.
fn by_layers(
    samples: &Samples,
    part: &str,
    title: &str,
    unit: &str,
    metric: &str,
) -> Result<Option<String>> {
    let line = |server: String| {
        let point = |layers: u32| {
            let value = samples.median(part, &server, layers, metric)?;
            Some([f64::from(layers), value])
        };
        let points = samples.layers(part).into_iter().filter_map(point).collect();
        Line { name: server, points }
    };
    let lines = samples.servers(part).into_iter().map(line).collect();
    Chart { title, x: ("layers", Scale::Log), y: (unit, Scale::Log), lines }.draw()
}

fn databases(samples: &Samples, title: &str) -> Result<Option<String>> {
    let series = samples.servers(DATABASE_PART);
    let group = |layers: u32| {
        let value = |server: &String| samples.median(DATABASE_PART, server, layers, "reads_per_s");
        let values = series.iter().map(value).collect();
        Group { name: format!("{layers} layers"), values }
    };
    let groups = samples.layers(DATABASE_PART).into_iter().map(group).collect();
    Bars { title, unit: "keys/s", series: series.clone(), groups }.draw()
}

fn by_shape(samples: &Samples, title: &str) -> Result<Option<String>> {
    let series = samples.servers(READS);
    let group = |shape: (u16, usize)| {
        let metric = format!("{}_per_s", shape_name(shape, BLOCK_BYTES));
        let value = |server: &String| samples.median(READS, server, 1, &metric);
        Group {
            name: format!("{} × {}", shape.0, shape.1),
            values: series.iter().map(value).collect(),
        }
    };
    let groups = SHAPES.map(group).into();
    Bars { title, unit: "reads/s", series: series.clone(), groups }.draw()
}
