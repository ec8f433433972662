//! The device without a guest: random reads and writes by the load generator, in turns.

use super::{Context, QUEUES};
use crate::chains::Chain;
use crate::cost::{Cost, Meter};
use crate::load::vhost::{Absence, Access, BLOCK_BYTES, Device, DiskLoad, Done, run};
use crate::load::{Histogram, Outcome, Pattern, ratio};
use crate::peers::Peer;
use crate::places;
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_tests::server::Server;
use std::collections::BTreeMap;
use std::fs;
use std::time::Duration;

/// Queues and requests in flight on each, in the order of tables.
pub(super) const SHAPES: [(u16, usize); 4] = [(1, 1), (1, 32), (4, 1), (4, 32)];
/// The same for longer reads: enough work for the server that the single thread of the load
/// generator is not the bottleneck.
const LONG_SHAPES: [(u16, usize); 2] = [(1, 8), (4, 8)];
const LONG_BYTES: usize = 64 << 10;
/// Fresh layers that one shape fills at most.
const LAPS_MAX: u32 = 16;
/// Seeds of one lap: more than all runs have of their first ones.
const LAP_SEEDS: u32 = 1 << 16;
/// How long the first pass over a disk may take.
const WARM_LIMIT: Duration = Duration::from_secs(60);

/// The prefix of the names of a shape's figures.
pub(super) fn shape_name((queues, depth): (u16, usize), request_bytes: usize) -> String {
    match request_bytes {
        BLOCK_BYTES => format!("q{queues}_d{depth}"),
        bytes => format!("{}k_q{queues}_d{depth}", bytes >> 10),
    }
}

/// Random reads where some layer has data, every answer verified.
///
/// # Errors
/// If the server dies, breaks the protocol, or answers wrongly.
pub(super) fn reads(
    context: &Context<'_>,
    peer: &Peer,
    chain: &Chain,
    sample: &mut Sample,
) -> Result<()> {
    chain.read_all()?;
    let running = peer.start(&chain.image, "qcow2", &[])?;
    let server = &running.server;
    sample.put("open_ms", server.open.as_secs_f64() * 1e3);
    let warm = Pattern::Warm { table_bytes: chain.table_bytes };
    let warm = DiskLoad { limit: WARM_LIMIT, ..load(Access::Read(warm, Some(&chain.owners)), 1) };
    run(&mut device(context, peer, 1)?, &warm)?.outcome.check()?;
    for (number, shape) in (1..).zip(SHAPES) {
        let access = Access::Read(Pattern::Hits, Some(&chain.owners));
        let load = DiskLoad { seed: seed(sample.repeat, number), ..load(access, shape.1) };
        let load = DiskLoad { limit: context.limit, ..load };
        put(context, peer, server, (shape, BLOCK_BYTES), &load, sample)?;
    }
    for (number, shape) in (5..).zip(LONG_SHAPES) {
        let access = Access::Read(Pattern::Hits, Some(&chain.owners));
        let load = DiskLoad { seed: seed(sample.repeat, number), ..load(access, shape.1) };
        let load = DiskLoad { limit: context.limit, ..load };
        put(context, peer, server, (shape, LONG_BYTES), &load, sample)?;
    }
    sample.put("rss_peak_mib", ratio(server.memory().1, 1 << 20));
    running.stop()?;
    Ok(())
}

/// Random writes where the active layer has data already: nothing is allocated.
///
/// # Errors
/// As [`reads`], and if what was acknowledged is not there.
pub(super) fn rewrites(
    context: &Context<'_>,
    peer: &Peer,
    chain: &Chain,
    sample: &mut Sample,
) -> Result<()> {
    let places = places::to_rewrite(chain);
    places::forget_pages(&chain.image)?;
    let running = peer.start(&chain.image, "qcow2", &[])?;
    // The first write to a page of a file measures the file system, whichever server makes it.
    let first = DiskLoad { limit: WARM_LIMIT, ..load(Access::Once(&places), 32) };
    run(&mut device(context, peer, 1)?, &first)?.outcome.check()?;
    let mut written = BTreeMap::new();
    for (number, shape) in (1..).zip(SHAPES) {
        let load = DiskLoad {
            seed: seed(sample.repeat, number),
            limit: context.limit,
            ..load(Access::Rewrite(&places), shape.1)
        };
        let done = put(context, peer, &running.server, (shape, BLOCK_BYTES), &load, sample)?;
        written.extend(done.written);
    }
    check(context, peer, &written)?;
    running.stop()?;
    Ok(())
}

/// Random writes into fresh layers on top of the chain, each into a different cluster. A layer is
/// full after a fraction of a second, which says little: so each shape gets one after the other,
/// until it has written long enough. Only one layer is there at a time.
///
/// # Errors
/// As [`rewrites`].
pub(super) fn allocating(
    context: &Context<'_>,
    peer: &Peer,
    chain: &Chain,
    options: &str,
    sample: &mut Sample,
) -> Result<()> {
    let mut writes = 0;
    for (number, shape) in (1..).zip(SHAPES) {
        let (mut all, mut cost) = (Outcome::default(), Cost::default());
        let mut queues = vec![Histogram::default(); shape.0.into()];
        for lap in 0..LAPS_MAX {
            let seed = seed(sample.repeat, number) + lap * LAP_SEEDS;
            let limit = context.fresh.saturating_sub(all.elapsed);
            let fresh = Fresh { options, shape, seed, limit, is_first: lap == 0 };
            let (done, its_cost) = fresh.fill(context, peer, chain, sample.repeat == 0)?;
            all = all.then(&done.outcome);
            queues.iter_mut().zip(&done.queues).for_each(|(all, its)| all.merge(its));
            cost = cost.plus(its_cost);
            if all.elapsed >= context.fresh {
                break;
            }
        }
        writes += all.latency.total();
        put_done(sample, &shape_name(shape, BLOCK_BYTES), (&all, &queues), cost);
    }
    sample.put("writes", ratio(writes, 1));
    Ok(())
}

/// A load on a layer that is made for it.
struct Fresh<'a> {
    /// Of the layer.
    options: &'a str,
    shape: (u16, usize),
    seed: u32,
    limit: Duration,
    /// The first of its shape.
    is_first: bool,
}

impl Fresh<'_> {
    /// Writes until the layer is full, or the time is over; checks what was written, and removes
    /// the layer.
    fn fill(
        &self,
        context: &Context<'_>,
        peer: &Peer,
        chain: &Chain,
        by_qemu: bool,
    ) -> Result<(Done, Cost)> {
        let overlay = chain.overlay(&context.parts, self.options)?;
        let places = places::one_in_each_stretch(chain.owners.disk_bytes(), self.seed);
        let running = peer.start(&overlay, "qcow2", &[])?;
        // Later ones find the memory and the page cache as the one before has left them, whose
        // pages went with its layer.
        if self.is_first {
            places::settle(&overlay)?;
            chain.read_all()?;
        }
        let load = DiskLoad {
            seed: self.seed,
            limit: self.limit,
            ..load(Access::Once(&places), self.shape.1)
        };
        let measured = measure(context, peer, &running.server, (self.shape, BLOCK_BYTES), &load)?;
        check(context, peer, &measured.0.written)?;
        running.stop()?;
        if by_qemu && self.is_first {
            chain.check_overlay(&overlay)?;
        }
        fs::remove_file(overlay)?;
        Ok(measured)
    }
}

/// Reads back all that was acknowledged.
///
/// # Errors
/// With the first place that has other content.
pub(super) fn check(
    context: &Context<'_>,
    peer: &Peer,
    written: &BTreeMap<u64, u64>,
) -> Result<()> {
    let load = DiskLoad { limit: WARM_LIMIT, ..load(Access::Check(written), 32) };
    let done = run(&mut device(context, peer, 1)?, &load)?;
    done.outcome.check()?;
    let read = done.outcome.latency.total();
    ensure!(read == written.len() as u64, "only {read} of {} were read back", written.len());
    Ok(())
}

/// Connects to `peer`.
///
/// # Errors
/// If it does not serve.
pub(super) fn device(context: &Context<'_>, peer: &Peer, queues: u16) -> Result<Device> {
    connect(context, peer, queues, BLOCK_BYTES)
}

fn connect(context: &Context<'_>, peer: &Peer, queues: u16, bytes: usize) -> Result<Device> {
    let device = Device::connect(&context.socket(peer), queues, bytes);
    device.with_context(|| format!("{queues} queues"))
}

fn load(access: Access<'_>, depth: usize) -> DiskLoad<'_> {
    DiskLoad { access, depth, limit: Duration::ZERO, seed: 1, absence: Absence::Fails }
}

/// A different one for each load of a chain, the same for every server.
fn seed(repeat: u32, number: u32) -> u32 {
    repeat * 16 + number
}

/// Puts `load` on the server and notes what it cost.
fn put(
    context: &Context<'_>,
    peer: &Peer,
    server: &Server,
    (shape, request_bytes): ((u16, usize), usize),
    load: &DiskLoad<'_>,
    sample: &mut Sample,
) -> Result<Done> {
    let (done, cost) = measure(context, peer, server, (shape, request_bytes), load)?;
    let name = shape_name(shape, request_bytes);
    put_done(sample, &name, (&done.outcome, &done.queues), cost);
    Ok(done)
}

fn put_done(
    sample: &mut Sample,
    name: &str,
    (outcome, queues): (&Outcome, &[Histogram]),
    cost: Cost,
) {
    sample.put_speed(name, outcome.per_second(), &outcome.latency);
    // A queue that is left waiting completes few requests, which show in no quantile of all.
    let p99 = queues.iter().map(|queue| queue.quantile_us(0.99)).fold(0.0, f64::max);
    sample.put(format!("{name}_slowest_queue_p99_us"), p99);
    sample.put_cost(name, cost, &outcome.latency);
}

/// Puts `load` on the server; returns what became of it, and what it cost.
fn measure(
    context: &Context<'_>,
    peer: &Peer,
    server: &Server,
    (shape, request_bytes): ((u16, usize), usize),
    load: &DiskLoad<'_>,
) -> Result<(Done, Cost)> {
    let mut device = connect(context, peer, shape.0, request_bytes)?;
    let meter = Meter::start(server);
    let done = run(&mut device, load)?;
    let cost = meter.stop();
    done.outcome.check()?;
    Ok((done, cost))
}

const _: () = assert!(QUEUES >= SHAPES[3].0);
