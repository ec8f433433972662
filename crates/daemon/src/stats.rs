//! The figures of a disk: each has one name, one help text and one value, wherever it is shown.
//!
//! The file of `--stats-file`, `/v1/stats` and `/metrics` are made from the same sections.

use crate::opened::Figures;
use mica_block::{BootStats, MapStats, VolumeStats, WriteStats};
use mica_serve::{Latencies, Latency, fuse, nbd, vhost_user};
use serde::Serialize;
use serde_json::{Map, Value, json};

/// What the servers of a disk have counted.
#[derive(Clone, Copy, Default)]
pub(crate) struct Counts {
    pub(crate) nbd: nbd::Counters,
    pub(crate) device: Option<vhost_user::Counters>,
    pub(crate) file: Option<fuse::Counters>,
    /// Requests of NBD clients and of the file that waited because of rate limits.
    pub(crate) delayed: u64,
}

/// What a disk did for its clients, whichever server they use.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Totals {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    /// How long all reads together took.
    pub(crate) read_ns: u64,
    pub(crate) write_ns: u64,
    /// Requests that were answered with an error.
    pub(crate) errors: u64,
    /// Times that a request waited because of rate limits.
    pub(crate) delayed: u64,
}

impl Counts {
    /// The sums over its servers.
    pub(crate) fn totals(&self) -> Totals {
        let mut totals = Totals::default();
        let Self { nbd, device, file, delayed } = self;
        totals.delayed = *delayed;
        let moved = [nbd.reads, nbd.writes, nbd.read_bytes, nbd.written_bytes];
        totals.add(moved, nbd.errors, &nbd.latencies);
        if let Some(it) = device {
            let moved = [it.reads, it.writes, it.read_bytes, it.written_bytes];
            totals.add(moved, it.failed + it.refused + it.malformed, &it.latencies);
            totals.delayed += it.delayed;
        }
        if let Some(it) = file {
            let moved = [it.reads, it.writes, it.read_bytes, it.written_bytes];
            totals.add(moved, it.failed + it.refused, &it.latencies);
        }
        totals
    }
}

impl Totals {
    fn add(&mut self, moved: [u64; 4], errors: u64, latencies: &Latencies) {
        let [reads, writes, read_bytes, written_bytes] = moved;
        self.reads += reads;
        self.writes += writes;
        self.read_bytes += read_bytes;
        self.written_bytes += written_bytes;
        self.read_ns = self.read_ns.wrapping_add(latencies.read.sum_ns());
        self.write_ns = self.write_ns.wrapping_add(latencies.write.sum_ns());
        self.errors += errors;
    }

    /// What came since `before`; everything, if the disk was opened again in between.
    pub(crate) fn since(&self, before: &Self) -> Self {
        let now = self.values();
        let before = before.values();
        let is_later = now.iter().zip(&before).all(|(now, before)| now >= before);
        let mut more = now;
        if is_later {
            more.iter_mut().zip(before).for_each(|(more, before)| *more -= before);
        }
        Self::of_values(more)
    }

    /// The sum of both.
    #[must_use]
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.values();
        let others = other.values();
        sum.iter_mut().zip(others).for_each(|(sum, other)| *sum = sum.saturating_add(other));
        Self::of_values(sum)
    }

    fn of_values(values: [u64; 8]) -> Self {
        let [reads, writes, read_bytes, written_bytes, read_ns, write_ns, errors, delayed] = values;
        Self { reads, writes, read_bytes, written_bytes, read_ns, write_ns, errors, delayed }
    }

    fn values(&self) -> [u64; 8] {
        let Self { reads, writes, read_bytes, written_bytes, read_ns, write_ns, errors, delayed } =
            *self;
        [reads, writes, read_bytes, written_bytes, read_ns, write_ns, errors, delayed]
    }
}

/// How a figure changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
}

/// One figure.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Figure {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) kind: Kind,
    pub(crate) value: u64,
}

/// What may be used, whether it is or not.
const BUDGET: &str = "budget_bytes";

/// Figures of the map, the write path or one server.
#[derive(Debug)]
pub(crate) struct Section {
    pub(crate) name: &'static str,
    /// `None` if the disk has no such server.
    pub(crate) figures: Option<Vec<Figure>>,
    pub(crate) latencies: Option<Latencies>,
}

impl Section {
    /// Whether anything was counted: a server or a map that nobody used was not.
    pub(crate) fn is_used(&self) -> bool {
        let mut counted = self.figures.iter().flatten().filter(|figure| figure.name != BUDGET);
        counted.any(|figure| figure.value > 0)
    }
}

/// All figures of a disk.
pub(crate) fn sections(image: &Figures, counts: &Counts) -> [Section; 6] {
    let Counts { nbd, device, file, delayed: _ } = counts;
    let server = |name, fields: Option<(Vec<_>, _, _)>| {
        let (fields, latencies) = match fields {
            Some((fields, help, latencies)) => (Some((fields, help)), Some(latencies)),
            None => (None, None),
        };
        Section { name, figures: fields.map(|(fields, help)| counted(fields, help)), latencies }
    };
    let plain =
        |name, figures: Vec<Figure>| Section { name, figures: Some(figures), latencies: None };
    let device = device.as_ref();
    let file = file.as_ref();
    [
        plain("map", map(image.map)),
        plain("write", write(image.write)),
        Section { name: "volume", figures: image.volume.as_deref().map(volume), latencies: None },
        server("nbd", Some((nbd.fields(), nbd::Counters::HELP, nbd.latencies))),
        server(
            "vhost_user",
            device.map(|device| (device.fields(), vhost_user::Counters::HELP, device.latencies)),
        ),
        server("fuse", file.map(|file| (file.fields(), fuse::Counters::HELP, file.latencies))),
    ]
}

/// All figures of a disk, as JSON.
pub(crate) fn document(image: &Figures, counts: &Counts) -> Map<String, Value> {
    let mut document = Map::new();
    let mut latencies = Map::new();
    for section in sections(image, counts) {
        let figures = section.figures.map(|figures| {
            let entries =
                figures.iter().map(|figure| (figure.name.to_owned(), json!(figure.value)));
            Value::Object(entries.collect())
        });
        document.insert(section.name.to_owned(), figures.unwrap_or_default());
        if let Some(of_kinds) = section.latencies {
            let kinds = of_kinds.each().map(|(kind, latency)| (kind.to_owned(), times(latency)));
            latencies.insert(section.name.to_owned(), Value::Object(kinds.into_iter().collect()));
        }
    }
    document.insert("latency".to_owned(), Value::Object(latencies));
    document
}

/// A latency histogram: `[below, count]` for each bucket that is not empty, `below` in
/// microseconds.
fn times(latency: &Latency) -> Value {
    let filled = latency.buckets().filter(|(_, count)| *count > 0);
    json!({
        "count": latency.count(),
        "sum_ns": latency.sum_ns(),
        "buckets": filled.map(|(below, count)| json!([below, count])).collect::<Vec<_>>(),
    })
}

fn counted(fields: Vec<(&'static str, u64)>, help: &[&'static str]) -> Vec<Figure> {
    let figures = fields.into_iter().zip(help);
    figures.map(|((name, value), help)| counter(name, help.trim(), value)).collect()
}

fn counter(name: &'static str, help: &'static str, value: u64) -> Figure {
    Figure { name, help, kind: Kind::Counter, value }
}

fn gauge(name: &'static str, help: &'static str, value: u64) -> Figure {
    Figure { name, help, kind: Kind::Gauge, value }
}

fn map(stats: MapStats) -> Vec<Figure> {
    let MapStats { hits, misses, index_loads, walks, layers_walked, cached_bytes, budget_bytes } =
        stats;
    vec![
        counter("hits", "Look-ups of the map that were answered from its cache.", hits),
        counter("misses", "Look-ups of the map that had to load a slice.", misses),
        counter("index_loads", "Slices that were loaded from an index.", index_loads),
        counter("walks", "Windows of slices that were resolved by walking the chain.", walks),
        counter("layers_walked", "Layers that walks examined.", layers_walked),
        gauge(
            "cached_bytes",
            "Bytes of slices in the cache that no other disk shares.",
            cached_bytes,
        ),
        gauge(
            BUDGET,
            "The most that the caches of all disks together may hold, in bytes.",
            budget_bytes,
        ),
    ]
}

fn write(stats: WriteStats) -> Vec<Figure> {
    let WriteStats {
        copied_read_bytes,
        copied_written_bytes,
        metadata_bytes,
        syncs,
        groups,
        linked_clusters,
    } = stats;
    vec![
        counter(
            "copied_read_bytes",
            "Bytes read to fill the parts of a new unit that a write does not cover.",
            copied_read_bytes,
        ),
        counter(
            "copied_written_bytes",
            "Bytes of these that were written, including zeros around them.",
            copied_written_bytes,
        ),
        counter("metadata_bytes", "Bytes of metadata that were written.", metadata_bytes),
        counter("syncs", "Syncs of image files.", syncs),
        counter("groups", "Groups of changes that were made durable.", groups),
        counter("linked_clusters", "Entries of the map that writes changed.", linked_clusters),
    ]
}

fn boot(stats: &BootStats) -> [Figure; 3] {
    let (record, fetched) = (stats.record_bytes, stats.fetched_bytes);
    [
        gauge("boot_record_bytes", "What boots of a volume's image read.", record),
        counter("boot_fetched_bytes", "Bytes fetched ahead for boots of an image.", fetched),
        counter("boot_served_bytes", "Bytes of reads that these had.", stats.served_bytes),
    ]
}

fn volume(stats: &VolumeStats) -> Vec<Figure> {
    let seconds = |ms: u64| ms / 1000;
    let mut figures = vec![
        counter("records", "Changes that a volume recorded.", stats.records),
        gauge(
            "pending_records",
            "Changes that the store of a volume does not have yet.",
            stats.pending_records,
        ),
        gauge(
            "pending_bytes",
            "Bytes of memory of what the store of a volume does not have yet.",
            stats.pending_bytes,
        ),
        gauge(
            "pending_seconds",
            "Age of the oldest change that the store of a volume does not have yet.",
            seconds(stats.pending_ms),
        ),
        gauge(
            "extents_in_flight",
            "Extents of a volume that are being put.",
            stats.extents_in_flight,
        ),
        counter("extents", "Extents of a volume that its store took.", stats.extents),
        counter("extent_bytes", "Bytes of these extents.", stats.extent_bytes),
        counter("heads", "Heads of a volume that its store took.", stats.heads),
        counter("put_failures", "Puts that failed and were tried again.", stats.put_failures),
        counter("put_ns", "How long all puts of extents took together.", stats.puts.sum_ns),
        gauge(
            "put_p50_us",
            "Half of the last 512 puts of extents took no longer.",
            stats.puts.p50_us,
        ),
        gauge("put_p99_us", "99 of 100 of them took no longer.", stats.puts.p99_us),
        gauge(
            "store_silent_seconds",
            "For how long the store of a volume has taken nothing; 0 if it answers.",
            seconds(stats.store_silent_ms),
        ),
        counter(
            "throttled_writes",
            "Changes that waited because the log or the store is slower than the guest.",
            stats.throttled_writes,
        ),
        gauge("throttled", "Whether changes of a volume wait now.", stats.is_throttled.into()),
        gauge("fenced", "Whether another host has taken a volume over.", stats.is_fenced.into()),
    ];
    if let Some(count) = stats.snapshots {
        figures.push(gauge("snapshots", "Snapshots of a volume.", count));
    }
    figures.extend(stats.boot.iter().flat_map(boot));
    if let Some(log) = stats.log {
        figures.extend([
            gauge("log_used_bytes", "Bytes of a volume's write log in use.", log.used_bytes),
            gauge("log_bytes", "Bytes of the write log that a volume can use.", log.bytes),
            counter("log_syncs", "Syncs of the write log for flushes.", log.syncs.count),
            counter("log_sync_ns", "How long all of them took together.", log.syncs.sum_ns),
            gauge("log_sync_p50_us", "Half of the last 512 took no longer.", log.syncs.p50_us),
            gauge("log_sync_p99_us", "99 of 100 of them took no longer.", log.syncs.p99_us),
        ]);
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: at a thousand disks at rest, a third of the metrics were zeros of their maps.
    #[test]
    fn map_that_nobody_reads_counts_as_unused_whatever_it_may_hold() {
        let is_used = |map: MapStats| {
            let image = Figures { map, ..Figures::default() };
            sections(&image, &Counts::default())[0].is_used()
        };
        let idle = MapStats { budget_bytes: 1 << 25, ..MapStats::default() };
        assert!(!is_used(idle));
        assert!(is_used(MapStats { misses: 1, ..idle }));
        assert!(is_used(MapStats { cached_bytes: 1, ..idle }));
    }
}
