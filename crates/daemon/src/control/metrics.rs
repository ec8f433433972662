//! The figures for Prometheus. The names are those of `/v1/stats`: `nbd.reads` is
//! `mica_nbd_reads_total`.
//!
//! At a thousand disks each line of a disk is 50 to 100 KB. So what a disk does not use is left
//! out: a server that had no client, the map of a chain that nobody read, times of requests that
//! never came. What alerts need is always there (`mica_disk_…`), so that a first error is an
//! increase and not a new series.

#[cfg(test)]
mod documents;
mod exposition;

pub(super) use exposition::KIND;

use super::sources::Sources;
use crate::jobs::JobReport;
use crate::opened::Figures;
use crate::own_process::ProcessFigures;
use crate::stats::{self, Counts};
use exposition::Page;
use mica_stack::Collection;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// All figures.
pub(super) fn text(sources: &Sources) -> String {
    let mut page = Page::default();
    of_process(&mut page, sources.uptime().as_secs(), &sources.shared.own_process.figures());
    for store in sources.shared.resources.stores.collections() {
        of_store(&mut page, &store);
    }
    for served in sources.shared.disks.all() {
        of_disk(
            &mut page,
            &Seen {
                name: &served.name,
                image: &served.image().to_string_lossy(),
                format: served.format(),
                is_serving: served.is_serving(),
                is_failed: served.failure().is_some(),
                is_device_broken: served.device_error().is_some(),
                clients: served.clients(),
                shown: served.image_figures(),
                counts: served.counts(),
            },
        );
    }
    for job in sources.shared.disks.all().iter().filter_map(|served| served.job()) {
        of_merge(&mut page, &job.report());
    }
    page.to_string()
}

/// A merge of a disk's layers, which may have ended.
fn of_merge(page: &mut Page, job: &JobReport) {
    let merge = [("disk", &*job.disk), ("kind", job.kind)];
    let help = "Whether layers of a disk are being merged.";
    page.gauge("mica_merge_running", help, merge, u64::from(job.is_under_way()));
    let help = "Whether the last merge of a disk failed; see `mica ctl jobs`.";
    page.gauge("mica_merge_failed", help, merge, u64::from(job.failure.is_some()));
    let help = "Bytes of a disk that a merge has dealt with.";
    page.gauge("mica_merge_done_bytes", help, merge, job.done);
    let help = "Bytes that a merge has to deal with.";
    page.gauge("mica_merge_total_bytes", help, merge, job.total);
    let help = "Bytes that a merge copied.";
    page.gauge("mica_merge_copied_bytes", help, merge, job.copied_bytes);
}

/// What Prometheus expects of every process, and which one it is.
fn of_process(page: &mut Page, uptime: u64, figures: &ProcessFigures) {
    page.gauge("mica_build_info", "The version of the server.", [("version", VERSION)], 1);
    page.gauge("mica_uptime_seconds", "Seconds since the start.", [], uptime);
    let help = "Total user and system CPU time spent in seconds.";
    page.counter("process_cpu_seconds_total", help, [], figures.cpu_seconds);
    let help = "Resident memory size in bytes.";
    page.gauge("process_resident_memory_bytes", help, [], figures.resident_bytes);
    let help = "Virtual memory size in bytes.";
    page.gauge("process_virtual_memory_bytes", help, [], figures.virtual_bytes);
    let help = "Number of OS threads in the process.";
    page.gauge("process_threads", help, [], figures.threads);
    let help = "Number of open file descriptors.";
    page.gauge("process_open_fds", help, [], figures.open_descriptors);
    if let Some(max) = figures.max_descriptors {
        let help = "Maximum number of open file descriptors.";
        page.gauge("process_max_fds", help, [], max);
    }
    let help = "Start time of the process since unix epoch in seconds.";
    page.gauge("process_start_time_seconds", help, [], figures.start_seconds);
}

/// What the collection of a store in the background does.
fn of_store(page: &mut Page, it: &Collection) {
    let store = [("store", &*it.store)];
    let help = "Collections of a store in the background.";
    page.counter("mica_store_gc_passes_total", help, store, it.passes);
    let help = "Collections of a store that failed; the server's log says why.";
    page.counter("mica_store_gc_failures_total", help, store, it.failures);
    let help = "Bytes that collections of a store freed.";
    let freed = it.freed_bytes + it.punched_bytes;
    page.counter("mica_store_gc_freed_bytes_total", help, store, freed);
    let help = "Bytes that collections of a store wrote again.";
    page.counter("mica_store_gc_rewritten_bytes_total", help, store, it.rewritten_bytes);
    let help = "Bytes of a store after its last collection.";
    page.gauge("mica_store_bytes", help, store, it.bytes);
    let help = "Bytes of a store that volumes and snapshots needed at its last collection.";
    page.gauge("mica_store_live_bytes", help, store, it.live_bytes);
}

/// What is told of a disk.
struct Seen<'a> {
    name: &'a str,
    image: &'a str,
    format: &'a str,
    is_serving: bool,
    is_failed: bool,
    is_device_broken: bool,
    clients: usize,
    shown: Figures,
    counts: Counts,
}

fn of_disk(page: &mut Page, seen: &Seen<'_>) {
    let Seen { name, image, format, shown, counts, .. } = seen;
    let info = [("disk", *name), ("image", *image), ("format", *format)];
    page.gauge("mica_disk_info", "Image and format of a disk.", info, 1);
    conditions(page, seen);
    let disk = [("disk", *name)];
    page.gauge("mica_disk_length_bytes", "Length of a disk.", disk, shown.len);
    let help = "Open connections to a disk, front ends included.";
    page.gauge("mica_disk_clients", help, disk, seen.clients);
    page.gauge("mica_disk_layers", "Layers of the chain of a disk.", disk, shown.layers);
    if let Some(indexed) = shown.indexed_layers {
        let help = "Layers of the chain of a disk that an index covers.";
        page.gauge("mica_disk_indexed_layers", help, disk, indexed);
    }
    let totals = counts.totals();
    let help = "Bytes that clients of a disk read, by whichever server.";
    page.counter("mica_disk_read_bytes_total", help, disk, totals.read_bytes);
    let help = "Bytes that clients of a disk wrote, by whichever server.";
    page.counter("mica_disk_written_bytes_total", help, disk, totals.written_bytes);
    let help = "Requests that were answered with an error, by whichever server.";
    page.counter("mica_disk_errors_total", help, disk, totals.errors);
    if totals.delayed > 0 {
        let help = "Times that requests of a disk waited because of its rate limits.";
        page.counter("mica_disk_delayed_total", help, disk, totals.delayed);
    }
    for section in stats::sections(shown, counts) {
        page.section(name, &section);
    }
}

/// What is true or false of a disk.
fn conditions(page: &mut Page, seen: &Seen<'_>) {
    let disk = [("disk", seen.name)];
    let mut condition = |name, help, is_true| page.gauge(name, help, disk, u64::from(is_true));
    condition("mica_disk_serving", "Whether a disk is served.", seen.is_serving);
    let help = "Whether a disk should be served and cannot be; see `mica ctl status`.";
    condition("mica_disk_failed", help, seen.is_failed);
    let help = "Whether a disk accepts no more writes after an error; see `mica ctl status`.";
    condition("mica_disk_latched", help, seen.shown.latch.is_some());
    if seen.counts.device.is_some() {
        let help = "Whether a machine's device is broken because its shared memory was taken away.";
        condition("mica_device_broken", help, seen.is_device_broken);
    }
    let help = "Whether a disk gives weaker guarantees than it should; see `mica ctl status`.";
    condition("mica_disk_weakened", help, seen.shown.weakness.is_some());
}
