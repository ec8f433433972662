//! One run of one server: the requests, their order, and the figures recorded.

use super::cost::Meter;
use super::peers::{Peer, Running};
use super::samples::Sample;
use crate::load::{Load, Outcome, Pattern, Request, ratio, run};
use anyhow::Result;
use mica_gen::owner::OwnerMap;
use mica_tests::nbd;
use mica_tests::server::Server;
use std::path::Path;
use std::time::Duration;

/// Bytes of a random read.
pub(super) const RANDOM_BYTES: u32 = 4096;
/// Bytes of a sequential read, and how many are in flight.
const SEQUENTIAL_BYTES: u32 = 256 << 10;
const SEQUENTIAL_DEPTH: usize = 4;
/// How long the first pass over a disk may take.
const FIRST_PASS_MAX: Duration = Duration::from_secs(300);
/// Depth at which throughput is measured.
pub(super) const DEPTH: usize = 32;

/// The disk that is read, and for how long.
#[derive(Clone, Copy)]
pub(super) struct Subject<'a> {
    /// The active layer.
    pub(super) image: &'a Path,
    /// Its format.
    pub(super) format: &'a str,
    /// The owners of the disk's parts.
    pub(super) owners: Option<&'a OwnerMap>,
    /// Bytes of the disk that one L2 table covers.
    pub(super) table_bytes: u64,
    /// How long random reads last.
    pub(super) random: Duration,
    /// How long sequential reads last at most.
    pub(super) sequential: Duration,
}

/// Requests that a run has made so far, to relate the server's own counts to.
struct Run<'a> {
    subject: Subject<'a>,
    sample: &'a mut Sample,
    requests: u64,
}

/// Everything warm: the page cache, and the server's own by a first pass.
///
/// # Errors
/// If the server dies, breaks the protocol, or answers wrongly.
pub(super) fn warm(peer: &Peer, subject: Subject<'_>, sample: &mut Sample) -> Result<()> {
    let running = peer.start(subject.image, subject.format, &[])?;
    let server = &running.server;
    sample.put("open_ms", server.open.as_secs_f64() * 1e3);
    sample.put("rss_open_mib", ratio(server.memory().0, 1 << 20));
    let mut run = Run { subject, sample, requests: 0 };
    run.warm_up(server)?;
    run.random(server, "random_1", 1)?;
    run.random(server, "random_32", DEPTH)?;
    run.lookups(server)?;
    run.sequential(server, "sequential")?;
    let requests = run.requests;
    sample.put("rss_peak_mib", ratio(server.memory().1, 1 << 20));
    finish(running, sample, requests)
}

/// Nothing is warm except what `drop_caches` leaves: the caller has dropped the page cache. All
/// reads are first reads.
///
/// # Errors
/// As [`warm`].
pub(super) fn cold(
    peer: &Peer,
    subject: Subject<'_>,
    what: Cold,
    sample: &mut Sample,
) -> Result<()> {
    let running = peer.start(subject.image, subject.format, &[])?;
    let server = &running.server;
    let mut run = Run { subject, sample, requests: 0 };
    match what {
        Cold::Random => {
            run.sample.put("cold_open_ms", server.open.as_secs_f64() * 1e3);
            run.random(server, "cold_random_1", 1)?;
        }
        Cold::Sequential => run.sequential(server, "cold_sequential")?,
    }
    running.stop()?;
    Ok(())
}

/// What is read cold.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Cold {
    Random,
    Sequential,
}

/// A server without any sidecar encounters the chain for the first time: open, random reads at
/// once, one pass over the whole disk, random reads again.
///
/// # Errors
/// As [`warm`].
pub(super) fn without_index(peer: &Peer, subject: Subject<'_>, sample: &mut Sample) -> Result<()> {
    let subject = Subject { sequential: FIRST_PASS_MAX, ..subject };
    let running = peer.start(subject.image, subject.format, &[])?;
    let server = &running.server;
    sample.put("open_ms", server.open.as_secs_f64() * 1e3);
    let mut run = Run { subject, sample, requests: 0 };
    run.random(server, "at_once_32", DEPTH)?;
    run.sequential(server, "first_pass")?;
    run.random(server, "random_32", DEPTH)?;
    let requests = run.requests;
    finish(running, sample, requests)
}

/// Only random reads at depth: for ceilings and budgets. `limit` wraps the server's command.
///
/// # Errors
/// As [`warm`].
pub(super) fn random_only(
    peer: &Peer,
    subject: Subject<'_>,
    limit: &[&str],
    sample: &mut Sample,
) -> Result<()> {
    let running = peer.start(subject.image, subject.format, limit)?;
    let server = &running.server;
    sample.put("open_ms", server.open.as_secs_f64() * 1e3);
    let mut run = Run { subject, sample, requests: 0 };
    if subject.owners.is_some() {
        run.warm_up(server)?;
    }
    run.random(server, "random_32", DEPTH)?;
    let requests = run.requests;
    sample.put("rss_peak_mib", ratio(server.memory().1, 1 << 20));
    finish(running, sample, requests)
}

/// The few figures that a glance shows.
///
/// # Errors
/// As [`warm`].
pub(super) fn glance(peer: &Peer, subject: Subject<'_>, sample: &mut Sample) -> Result<()> {
    let running = peer.start(subject.image, subject.format, &[])?;
    let server = &running.server;
    sample.put("open_ms", server.open.as_secs_f64() * 1e3);
    let mut run = Run { subject, sample, requests: 0 };
    run.sequential(server, "sequential")?;
    run.random(server, "random_32", DEPTH)?;
    let requests = run.requests;
    sample.put("rss_peak_mib", ratio(server.memory().1, 1 << 20));
    finish(running, sample, requests)
}

impl Run<'_> {
    fn warm_up(&mut self, server: &Server) -> Result<()> {
        let table_bytes = self.subject.table_bytes;
        let limit = Duration::from_secs(600);
        let load = load(Request::Read, Pattern::Warm { table_bytes }, RANDOM_BYTES, 1, limit);
        let outcome = self.put_on(server, &load)?;
        self.sample.put("first_pass_s", outcome.elapsed.as_secs_f64());
        Ok(())
    }

    fn random(&mut self, server: &Server, name: &str, depth: usize) -> Result<()> {
        let pattern = if self.subject.owners.is_some() { Pattern::Hits } else { Pattern::Mix };
        let limit = self.subject.random;
        let load = load(Request::Read, pattern, RANDOM_BYTES, depth, limit);
        let meter = Meter::start(server);
        let outcome = self.put_on(server, &load)?;
        let cost = meter.stop();
        self.sample.put_speed(name, outcome.per_second(), &outcome.latency);
        self.sample.put_cost(name, cost, &outcome.latency);
        Ok(())
    }

    /// Look-ups without data: block status of one block where some layer has data.
    fn lookups(&mut self, server: &Server) -> Result<()> {
        let limit = self.subject.random;
        let load = load(Request::BlockStatus, Pattern::Hits, RANDOM_BYTES, 1, limit);
        let outcome = self.put_on(server, &load)?;
        self.sample.put("lookup_mean_us", outcome.latency.mean_us());
        self.sample.put("lookup_p50_us", outcome.latency.quantile_us(0.5));
        self.sample.put("lookup_p99_us", outcome.latency.quantile_us(0.99));
        self.sample.put("lookup_max_us", outcome.latency.max_us());
        self.sample.curves.insert("lookup_us".to_owned(), outcome.latency.distribution());
        Ok(())
    }

    fn sequential(&mut self, server: &Server, name: &str) -> Result<()> {
        let limit = self.subject.sequential;
        let (bytes, depth) = (SEQUENTIAL_BYTES, SEQUENTIAL_DEPTH);
        let load = load(Request::Read, Pattern::Sequential, bytes, depth, limit);
        let before = server.processor_time();
        let outcome = self.put_on(server, &load)?;
        let used = server.processor_time().saturating_sub(before).as_secs_f64();
        let gib = ratio(outcome.bytes.max(1), 1 << 30);
        self.sample.put(format!("{name}_mib_s"), outcome.mib_per_second());
        self.sample.put(format!("{name}_cpu_s_per_gib"), used / gib);
        Ok(())
    }

    fn put_on(&mut self, server: &Server, load: &Load<'_>) -> Result<Outcome> {
        let allocation = load.request == Request::BlockStatus;
        let wish = nbd::Wish { structured: allocation, allocation };
        let mut connection = server.connect(&wish)?;
        let seed = u64::from(self.sample.repeat) + 1;
        let load = Load { owners: self.subject.owners, seed, ..*load };
        let outcome = run(&mut connection, &load)?;
        connection.disconnect()?;
        outcome.check()?;
        self.requests += outcome.latency.total();
        Ok(outcome)
    }
}

fn load(
    request: Request,
    pattern: Pattern,
    bytes: u32,
    depth: usize,
    limit: Duration,
) -> Load<'static> {
    Load { request, pattern, bytes, depth, limit, owners: None, seed: 0 }
}

/// Stops the server and records its own counts.
fn finish(running: Running, sample: &mut Sample, requests: u64) -> Result<()> {
    let Some(figures) = running.stop()? else { return Ok(()) };
    let map = figures["map"].as_object().into_iter().flatten();
    let map = map.filter_map(|(name, count)| Some((name.clone(), count.as_u64()?)));
    let mut lookups = 0;
    for (name, count) in map {
        if name == "hits" || name == "misses" {
            lookups += count;
        }
        sample.put(format!("map_{name}"), ratio(count, 1));
    }
    sample.put("lookups_per_request", ratio(lookups, requests.max(1)));
    Ok(())
}
