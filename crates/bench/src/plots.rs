//! The figures 12 to 16 of the sQemu paper with today's programs.

use super::charts::{Chart, Line, Scale};
use super::samples::{Samples, median};
use anyhow::Result;
use std::fs;
use std::path::Path;

/// Layers whose look-up latencies are shown, as the paper does.
const LATENCY_LAYERS: [u32; 2] = [1, 100];

/// Shares of all look-ups that are too small to be drawn.
const SHARE_MIN: f64 = 0.001;

/// A plot that was written.
pub(super) struct Plot {
    /// File name, beside the results.
    pub(super) file: String,
    /// What it shows.
    pub(super) title: String,
}

/// The plots of a bench, written as they are drawn.
pub(super) struct Plots<'a> {
    out: &'a Path,
    name: &'a str,
    written: Vec<Plot>,
}

impl<'a> Plots<'a> {
    /// No plots yet; they go to the folder `out`, under names that begin with `name`.
    pub(super) fn new(out: &'a Path, name: &'a str) -> Self {
        Self { out, name, written: Vec::new() }
    }

    /// Writes one, if there was something to draw.
    ///
    /// # Errors
    /// If it could not be drawn, or cannot be written.
    pub(super) fn put(
        &mut self,
        what: &str,
        title: &str,
        svg: Result<Option<String>>,
    ) -> Result<()> {
        let Some(svg) = svg? else { return Ok(()) };
        let file = format!("{}-{what}.svg", self.name);
        fs::write(self.out.join(&file), svg)?;
        self.written.push(Plot { file, title: title.to_owned() });
        Ok(())
    }

    /// Those that were written.
    pub(super) fn written(self) -> Vec<Plot> {
        self.written
    }
}

/// Figures of the warm runs by the number of layers: file, title, axis, scale, figure.
const BY_LAYERS: &[(&str, &str, &str, Scale, &str)] = &[
    ("memory", "Peak memory (as sQemu figure 12)", "MiB", Scale::Log, "rss_peak_mib"),
    (
        "lookup-latency",
        "Latency of a block status, the look-up alone, p50 (as sQemu figure 14)",
        "µs",
        Scale::Log,
        "lookup_p50_us",
    ),
    (
        "sequential",
        "Sequential reads (as sQemu figure 15)",
        "MiB/s",
        Scale::Log,
        "sequential_mib_s",
    ),
    ("random", "Random 4 KiB reads at depth 32", "reads/s", Scale::Log, "random_32_per_s"),
    ("open", "Time from start to the first handshake, warm", "ms", Scale::Log, "open_ms"),
];

/// Draws what there are figures for.
pub(super) fn write(samples: &Samples, out: &Path, name: &str) -> Result<Vec<Plot>> {
    let layers = ("layers", Scale::Log);
    let by_layers = BY_LAYERS.iter().map(|&(file, title, unit, scale, metric)| {
        let lines = by_layers(samples, "warm", metric);
        (file, Chart { title, x: layers, y: (unit, scale), lines })
    });
    let counts = Chart {
        title: "mica's map: misses, walks, loads in a run (as sQemu figure 13a)",
        x: layers,
        y: ("count", Scale::Linear),
        lines: map_counts(samples),
    };
    let lookups = Chart {
        title: "Look-ups per read (as sQemu figure 13c)",
        x: layers,
        y: ("look-ups", Scale::Log),
        lines: lookups_per_read(samples),
    };
    let latency = Chart {
        title: "Distribution of block-status latency (as sQemu figure 14)",
        x: ("µs", Scale::Log),
        y: ("part of all", Scale::Linear),
        lines: distributions(samples),
    };
    let budget = Chart {
        title: "Random reads by memory for the map (as sQemu figure 16)",
        x: ("MiB for the map of the whole chain", Scale::Log),
        y: ("reads/s", Scale::Log),
        lines: budgets(samples),
    };
    let others =
        [("misses", counts), ("lookups", lookups), ("latency", latency), ("budget", budget)];
    let mut plots = Plots::new(out, name);
    for (what, chart) in by_layers.chain(others) {
        plots.put(what, chart.title, chart.draw())?;
    }
    Ok(plots.written())
}

/// A line for each server: a figure of `part`'s runs by the number of layers.
fn by_layers(samples: &Samples, part: &str, metric: &str) -> Vec<Line> {
    let line = |server: String| {
        let point = |layers| {
            let value = samples.median(part, &server, layers, metric)?;
            Some([f64::from(layers), value])
        };
        Line { points: samples.layers(part).into_iter().filter_map(point).collect(), name: server }
    };
    samples.servers(part).into_iter().map(line).filter(|line| !line.points.is_empty()).collect()
}

fn map_counts(samples: &Samples) -> Vec<Line> {
    let counts = ["misses", "walks", "index_loads"];
    let lines = counts.into_iter().flat_map(|count| {
        let lines = by_layers(samples, "warm", &format!("map_{count}"));
        lines.into_iter().map(move |line| Line { name: format!("{} {count}", line.name), ..line })
    });
    lines.collect()
}

/// mica's look-ups, which it counts itself, beside those of a walk from layer to layer, which
/// follow from the owners of the disk: no other server reports its own.
fn lookups_per_read(samples: &Samples) -> Vec<Line> {
    let measured = by_layers(samples, "warm", "lookups_per_request");
    let computed = by_layers(samples, "index", "walk_lookups_per_read");
    let walk = |line: Line| Line { name: "a walk of the chain (computed)".to_owned(), ..line };
    measured.into_iter().chain(computed.into_iter().map(walk)).collect()
}

fn distributions(samples: &Samples) -> Vec<Line> {
    let mut lines = Vec::new();
    for server in samples.servers("warm") {
        for layers in LATENCY_LAYERS {
            let first =
                samples.of("warm", &server, layers).find_map(|run| run.curves.get("lookup_us"));
            if let Some(points) = first {
                let name = format!("{server}, {layers} layers");
                let points = points.iter().filter(|point| point[1] >= SHARE_MIN).copied().collect();
                lines.push(Line { name, points });
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
