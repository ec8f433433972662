//! The figures 12 to 16 of the sQemu paper with today's programs.

use super::peers::MICA;
use super::samples::{Samples, median};
use super::svg::{Chart, Line, Scale};
use anyhow::Result;
use std::fs;
use std::path::Path;

/// Layers whose look-up latencies are shown, as the paper does.
const LATENCY_LAYERS: [u32; 2] = [1, 100];

/// A plot that was written.
pub(super) struct Plot {
    /// File name, beside the results.
    pub(super) file: String,
    /// What it shows.
    pub(super) title: String,
}

/// Draws what there are figures for.
pub(super) fn write(samples: &Samples, out: &Path, name: &str) -> Result<Vec<Plot>> {
    let layers = ("layers", Scale::Log);
    let of = |metric| by_layers(samples, metric);
    let charts = [
        (
            "memory",
            Chart {
                title: "Peak memory (as sQemu figure 12)",
                x: layers,
                y: ("MiB", Scale::Log),
                lines: of("rss_peak_mib"),
            },
        ),
        (
            "misses",
            Chart {
                title: "mica's map: misses, walks, loads in a run (as sQemu figure 13)",
                x: layers,
                y: ("count", Scale::Linear),
                lines: ["map_misses", "map_walks", "map_index_loads"]
                    .into_iter()
                    .flat_map(of)
                    .filter(|line| line.name.starts_with(MICA))
                    .collect(),
            },
        ),
        (
            "lookups",
            Chart {
                title: "Latency of a block status, the look-up alone, p50 (as sQemu figure 14)",
                x: layers,
                y: ("µs", Scale::Log),
                lines: of("lookup_p50_us"),
            },
        ),
        (
            "latency",
            Chart {
                title: "Distribution of block-status latency (as sQemu figure 14)",
                x: ("µs", Scale::Log),
                y: ("part of all", Scale::Linear),
                lines: distributions(samples),
            },
        ),
        (
            "sequential",
            Chart {
                title: "Sequential reads (as sQemu figure 15)",
                x: layers,
                y: ("MiB/s", Scale::Log),
                lines: of("sequential_mib_s"),
            },
        ),
        (
            "random",
            Chart {
                title: "Random 4 KiB reads at depth 32",
                x: layers,
                y: ("reads/s", Scale::Log),
                lines: of("random_32_per_s"),
            },
        ),
        (
            "open",
            Chart {
                title: "Time from start to the first handshake, warm",
                x: layers,
                y: ("ms", Scale::Log),
                lines: of("open_ms"),
            },
        ),
        (
            "budget",
            Chart {
                title: "Random reads by memory for the map (as sQemu figure 16)",
                x: ("MiB for the map of the whole chain", Scale::Log),
                y: ("reads/s", Scale::Log),
                lines: budgets(samples),
            },
        ),
    ];
    let mut plots = Vec::new();
    for (what, chart) in charts {
        let Some(svg) = chart.draw() else { continue };
        let file = format!("{name}-{what}.svg");
        fs::write(out.join(&file), svg)?;
        plots.push(Plot { file, title: chart.title.to_owned() });
    }
    Ok(plots)
}

/// A line for each server: a figure of the warm runs by the number of layers.
fn by_layers(samples: &Samples, metric: &str) -> Vec<Line> {
    let line = |server: String| {
        let point = |layers| {
            let value = samples.median("warm", &server, layers, metric)?;
            Some([f64::from(layers), value])
        };
        let points = samples.layers("warm").into_iter().filter_map(point).collect();
        let name = match metric.strip_prefix("map_") {
            Some(count) => format!("{server} {count}"),
            None => server,
        };
        Line { name, points }
    };
    samples.servers("warm").into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

fn distributions(samples: &Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for server in samples.servers("warm") {
        for layers in LATENCY_LAYERS {
            let first =
                samples.of("warm", &server, layers).find_map(|run| run.curves.get("lookup_us"));
            if let Some(points) = first {
                let name = format!("{server}, {layers} layers");
                lines.push(Line { name, points: points.clone() });
            }
        }
    }
    lines
}

fn budgets(samples: &Samples) -> Vec<Line> {
    let mut lines: Vec<Line> = Vec::new();
    for (budget, part) in super::parts::budgets_measured() {
        for server in samples.servers(&part) {
            let layers = samples.layers(&part);
            let rates = layers
                .iter()
                .filter_map(|layers| samples.median(&part, &server, *layers, "random_32_per_s"));
            let Some(rate) = median(rates) else { continue };
            let point = [budget, rate];
            match lines.iter_mut().find(|line| line.name == server) {
                Some(line) => line.points.push(point),
                None => lines.push(Line { name: server, points: vec![point] }),
            }
        }
    }
    lines
}
