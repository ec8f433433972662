//! The device without a guest: random reads and writes by the load generator, in turns.

use super::{Context, KIB_4, QUEUES};
use crate::load::vhost::{Absence, Access, BLOCK_BYTES, Device, DiskLoad, Done, run};
use crate::load::{Pattern, ratio};
use crate::parts::Chain;
use crate::peers::Peer;
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_gen::Rng;
use mica_gen::owner::{Owner, OwnerMap};
use mica_tests::server::Server;
use mica_tests::{command, tools};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Queues and requests in flight on each, in the order of tables.
pub(super) const SHAPES: [(u16, usize); 4] = [(1, 1), (1, 32), (4, 1), (4, 32)];
/// The same for longer reads: enough work for the server that the single thread of the load
/// generator is not the bottleneck.
const LONG_SHAPES: [(u16, usize); 2] = [(1, 8), (4, 8)];
const LONG_BYTES: usize = 64 << 10;
/// How long the first pass over a disk may take.
const WARM_LIMIT: Duration = Duration::from_secs(60);
/// Each allocating write has its own stretch of this size: the largest cluster used.
const STRETCH_BYTES: u64 = 128 << 10;
/// Places that are written repeatedly: 64 MiB, which the page cache holds.
const REWRITTEN_MAX: usize = 16 << 10;
/// Layers up to which QEMU judges an image that was written.
const CHECKED_LAYERS_MAX: u32 = 50;

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
    answered(&run(&mut device(context, peer, 1)?, &warm)?)?;
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
    let mut places = owned_by_active(&chain.owners, chain.layers);
    shuffle(&mut places, &mut Rng::new(1));
    places.truncate(REWRITTEN_MAX);
    forget_pages(&chain.image)?;
    let running = peer.start(&chain.image, "qcow2", &[])?;
    // The first write to a page of a file measures the file system, whichever server makes it.
    let first = DiskLoad { limit: WARM_LIMIT, ..load(Access::Once(&places), 32) };
    answered(&run(&mut device(context, peer, 1)?, &first)?)?;
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

/// Writes out what earlier loads left in the page cache of `file`. Otherwise a faster server has
/// more of it in the later ones, up to where the kernel makes every writer sleep
/// (`vm.dirty_background_ratio`), and loses by what it did before.
fn settle(file: &Path) -> Result<()> {
    Ok(fs::File::open(file)?.sync_all()?)
}

/// Drops `file` from the page cache. Made by long writes, it is cached in pieces of up to 2 MiB,
/// and for each write the kernel (ext4, Linux 6.18) examines every block of a piece: that would be
/// most of what is measured, for any server. A guest that fills its disk by small writes has small
/// ones.
fn forget_pages(file: &Path) -> Result<()> {
    let file = fs::File::open(file)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// Random writes into a fresh layer on top of the chain, each into a different cluster. Each shape
/// has its share of the clusters, and ends when all of them are written.
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
    let overlay = overlay(context, chain, options)?;
    let places = random_stretches(chain.owners.disk_bytes(), seed(sample.repeat, 0));
    let running = peer.start(&overlay, "qcow2", &[])?;
    let mut written = BTreeMap::new();
    let shares = places.chunks(places.len().div_ceil(SHAPES.len()));
    for (number, (shape, places)) in (1..).zip(SHAPES.into_iter().zip(shares)) {
        settle(&overlay)?;
        let load = DiskLoad {
            seed: seed(sample.repeat, number),
            limit: context.limit,
            ..load(Access::Once(places), shape.1)
        };
        let done = put(context, peer, &running.server, (shape, BLOCK_BYTES), &load, sample)?;
        written.extend(done.written);
    }
    check(context, peer, &written)?;
    sample.put("writes", ratio(written.len() as u64, 1));
    running.stop()?;
    if sample.repeat == 0 && chain.layers <= CHECKED_LAYERS_MAX {
        let mut judge = Command::new(tools::QEMU_IMG.program);
        let said = command::finish(judge.args(["check", "-f", "qcow2"]).arg(&overlay));
        ensure!(said.status.success(), "{said}");
    }
    fs::remove_file(overlay)?;
    Ok(())
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
    answered(&done)?;
    let read = done.outcome.latency.total();
    ensure!(read == written.len() as u64, "only {read} of {} were read back", written.len());
    Ok(())
}

/// Places of the active layer's own data.
pub(super) fn owned_by_active(owners: &OwnerMap, layers: u32) -> Vec<u64> {
    let is_active = |at: &u64| match owners.at(*at) {
        Owner::Data(layer) => u32::from(layer.as_u16()) + 1 == layers,
        _ => false,
    };
    let blocks = |unit: u64| (unit..unit + owners.unit_bytes()).step_by(KIB_4);
    owners.data_units().filter(is_active).flat_map(blocks).collect()
}

/// A new layer on top of `chain`, with QEMU's `options`.
fn overlay(context: &Context<'_>, chain: &Chain, options: &str) -> Result<PathBuf> {
    let path = context.parts.work.join("overlay.qcow2");
    let mut create = Command::new(tools::QEMU_IMG.program);
    // -u: the layers below are not opened, which takes seconds where there are many.
    create.args(["create", "-q", "-u", "-f", "qcow2", "-F", "qcow2", "-o", options, "-b"]);
    create.arg(&chain.image).arg(&path).arg(chain.owners.disk_bytes().to_string());
    let done = command::finish(&mut create);
    ensure!(done.status.success(), "{done}");
    Ok(path)
}

/// One block in each stretch of the disk, in random order.
fn random_stretches(disk_bytes: u64, seed: u32) -> Vec<u64> {
    let mut rng = Rng::new(u64::from(seed));
    let blocks = STRETCH_BYTES / KIB_4 as u64;
    let mut places: Vec<_> = (0..disk_bytes / STRETCH_BYTES)
        .map(|stretch| stretch * STRETCH_BYTES + rng.below(blocks) * KIB_4 as u64)
        .collect();
    shuffle(&mut places, &mut rng);
    places
}

fn shuffle(places: &mut [u64], rng: &mut Rng) {
    for last in (1..places.len()).rev() {
        let other = usize::try_from(rng.below(last as u64 + 1)).unwrap_or(last);
        places.swap(last, other);
    }
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
    let mut device = connect(context, peer, shape.0, request_bytes)?;
    let before = (server.processor_time(), own_processor_time());
    let done = run(&mut device, load)?;
    let used = server.processor_time().saturating_sub(before.0);
    let own = own_processor_time().saturating_sub(before.1);
    answered(&done)?;
    let outcome = &done.outcome;
    let requests = ratio(outcome.latency.total().max(1), 1);
    let name = shape_name(shape, request_bytes);
    sample.put(format!("{name}_per_s"), outcome.per_second());
    sample.put(format!("{name}_p50_us"), outcome.latency.quantile_us(0.5));
    sample.put(format!("{name}_p99_us"), outcome.latency.quantile_us(0.99));
    sample.put(format!("{name}_cpu_us"), used.as_secs_f64() * 1e6 / requests);
    sample.put(format!("{name}_load_cpu_us"), own.as_secs_f64() * 1e6 / requests);
    Ok(done)
}

fn answered(done: &Done) -> Result<()> {
    let outcome = &done.outcome;
    ensure!(outcome.failed == 0, "{} requests failed", outcome.failed);
    let first = &outcome.first_wrong;
    ensure!(outcome.wrong == 0, "{} WRONG ANSWERS: {first:?}", outcome.wrong);
    Ok(())
}

/// Processor time of this thread, which is the load generator's.
fn own_processor_time() -> Duration {
    let text = fs::read_to_string(Path::new("/proc/thread-self/schedstat")).unwrap_or_default();
    let nanoseconds = text.split(' ').next().and_then(|text| text.parse().ok());
    Duration::from_nanos(nanoseconds.unwrap_or(0))
}

const _: () = assert!(QUEUES >= SHAPES[3].0);

#[cfg(test)]
mod tests {
    use super::{STRETCH_BYTES, random_stretches};

    #[test]
    fn every_stretch_is_written_once_in_random_order() {
        let places = random_stretches(64 << 20, 3);
        let mut stretches: Vec<_> = places.iter().map(|place| place / STRETCH_BYTES).collect();
        assert!(!stretches.is_sorted());
        stretches.sort_unstable();
        assert_eq!(stretches, (0..512).collect::<Vec<_>>());
        assert!(places.iter().all(|place| place % 4096 == 0));
    }
}
