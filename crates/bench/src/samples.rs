//! What was measured, run by run, and its medians.

use super::cost::Cost;
use crate::load::{Histogram, ratio};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// One run of one server.
#[derive(Clone, Default, Debug, Serialize)]
pub(super) struct Sample {
    /// The part of the bench it belongs to.
    pub(super) part: String,
    /// The server.
    pub(super) server: String,
    /// Layers of the chain.
    pub(super) layers: u32,
    /// Number of the run.
    pub(super) repeat: u32,
    /// Figures by name; the unit is the name's last word.
    pub(super) metrics: BTreeMap<String, f64>,
    /// Distributions by name.
    pub(super) curves: BTreeMap<String, Vec<[f64; 2]>>,
    /// Programs that were ready to run when the run began, including this bench's own.
    pub(super) load_average: f64,
    /// Why there are no figures, or not all.
    pub(super) error: Option<String>,
}

impl Sample {
    /// A run without figures yet.
    pub(super) fn new(part: &str, server: &str, layers: u32, repeat: u32) -> Self {
        let (part, server) = (part.to_owned(), server.to_owned());
        let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
        let load = load.split(' ').next().and_then(|load| load.parse().ok());
        let load_average = load.unwrap_or(f64::NAN);
        Self { part, server, layers, repeat, load_average, ..Self::default() }
    }

    /// Records a figure.
    pub(super) fn put(&mut self, name: impl Into<String>, value: f64) {
        self.metrics.insert(name.into(), value);
    }

    /// Records the speed of the load `name`.
    pub(super) fn put_speed(&mut self, name: &str, per_second: f64, latency: &Histogram) {
        self.put(format!("{name}_per_s"), per_second);
        self.put(format!("{name}_p50_us"), latency.quantile_us(0.5));
        self.put(format!("{name}_p99_us"), latency.quantile_us(0.99));
        // Few requests that wait long show in no quantile of a queue that others keep busy.
        self.put(format!("{name}_mean_us"), latency.mean_us());
        self.put(format!("{name}_max_us"), latency.max_us());
    }

    /// Records what each request of the load `name` cost.
    pub(super) fn put_cost(&mut self, name: &str, cost: Cost, latency: &Histogram) {
        let each = |time: Duration| time.as_secs_f64() * 1e6 / ratio(latency.total().max(1), 1);
        self.put(format!("{name}_cpu_us"), each(cost.server));
        self.put(format!("{name}_load_cpu_us"), each(cost.load));
    }
}

/// All runs.
#[derive(Default, Debug, Serialize)]
pub(super) struct Samples {
    runs: Vec<Sample>,
}

impl Samples {
    /// Adds a run, and prints it.
    pub(super) fn push(&mut self, sample: Sample) {
        let Sample { part, server, layers, repeat, .. } = &sample;
        match &sample.error {
            Some(error) => println!("{part}: {server}, {layers} layers, run {repeat}: {error}"),
            None => {
                let figures: Vec<_> = sample
                    .metrics
                    .iter()
                    .map(|(name, value)| format!("{name} {value:.1}"))
                    .collect();
                let figures = figures.join(", ");
                println!("{part}: {server}, {layers} layers, run {repeat}: {figures}");
            }
        }
        self.add(sample);
    }

    /// Adds a run.
    pub(super) fn add(&mut self, sample: Sample) {
        self.runs.push(sample);
    }

    /// The runs of `server` on `layers` layers in `part`.
    pub(super) fn of<'a>(
        &'a self,
        part: &'a str,
        server: &'a str,
        layers: u32,
    ) -> impl Iterator<Item = &'a Sample> {
        self.runs
            .iter()
            .filter(move |run| run.part == part && run.server == server && run.layers == layers)
    }

    /// The median of a figure, if there is one.
    pub(super) fn median(
        &self,
        part: &str,
        server: &str,
        layers: u32,
        metric: &str,
    ) -> Option<f64> {
        median(self.of(part, server, layers).filter_map(|run| run.metrics.get(metric).copied()))
    }

    /// The median of a figure at the first number of `layers`, each by that at the second in the
    /// run of the same number.
    pub(super) fn paired(
        &self,
        part: &str,
        server: &str,
        layers: (u32, u32),
        metric: &str,
    ) -> Option<f64> {
        let ratios = self.of(part, server, layers.0).filter_map(|run| {
            let than = self.of(part, server, layers.1).find(|than| than.repeat == run.repeat)?;
            Some(run.metrics.get(metric)? / than.metrics.get(metric)?)
        });
        median(ratios)
    }

    /// Numbers of layers for which `part` has runs.
    pub(super) fn layers(&self, part: &str) -> Vec<u32> {
        let mut layers: Vec<_> =
            self.runs.iter().filter(|run| run.part == part).map(|run| run.layers).collect();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    /// Servers that `part` has runs of, in the order of their first runs.
    pub(super) fn servers(&self, part: &str) -> Vec<String> {
        let mut servers: Vec<String> = Vec::new();
        for run in self.runs.iter().filter(|run| run.part == part) {
            if !servers.contains(&run.server) {
                servers.push(run.server.clone());
            }
        }
        servers
    }

    /// The median of the load average over all runs.
    pub(super) fn load_average(&self) -> Option<f64> {
        median(self.runs.iter().map(|run| run.load_average))
    }

    /// Why runs of `server` on `layers` layers in `part` have no figures.
    pub(super) fn errors(&self, part: &str, server: &str, layers: u32) -> Vec<String> {
        self.of(part, server, layers).filter_map(|run| run.error.clone()).collect()
    }
}

/// The middle of `values`; the mean of the middle two if their number is even.
pub(super) fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let high = *values.get(values.len() / 2)?;
    let low = if values.len().is_multiple_of(2) { values[values.len() / 2 - 1] } else { high };
    Some(f64::midpoint(low, high))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_of_one_run_each() {
        let mut samples = Samples::default();
        for (layers, repeat, rate) in [(9, 0, 5.0), (1, 0, 10.0), (9, 1, 60.0), (1, 1, 100.0)] {
            let mut sample = Sample::new("warm", "mica", layers, repeat);
            sample.put("rate", rate);
            samples.add(sample);
        }
        assert_eq!(samples.paired("warm", "mica", (9, 1), "rate"), Some(0.55));
    }

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0].into_iter()), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0].into_iter()), Some(2.5));
        assert_eq!(median([].into_iter()), None);
    }
}
