//! The loads on a disk, one after the other on one server: it is filled, read, and written again.

use super::Context;
use super::disks::Disk;
use crate::cost::Meter;
use crate::load::{
    Durable, Load, Pattern, Request, WriteLoad, Written, ratio, run_on_all, stamp, write,
};
use crate::places::settle;
use crate::samples::Sample;
use anyhow::{Result, ensure};
use mica_gen::Rng;
use mica_tests::nbd;
use mica_tests::server::Server;
use std::collections::BTreeSet;
use std::time::Duration;

const KIB_4: u32 = 4 << 10;
const MIB: u32 = 1 << 20;
/// How long the disk may take to be filled.
const FILL_LIMIT: Duration = Duration::from_secs(120);
/// Writers that wait for a flush each, on a connection of their own.
const WRITERS: usize = 16;
/// Writes of a load at most.
const WRITES_MAX: usize = 1 << 18;
/// Places that are read back after writes.
const READ_BACK_MAX: usize = 1024;
/// What fills the disk, and what is written over it.
const FILLED: u64 = 1;
const WRITTEN: u64 = 2;

/// Runs them all.
///
/// # Errors
/// If the server fails, or what was acknowledged is not there.
pub(super) fn run(context: &Context<'_>, disk: Disk, sample: &mut Sample) -> Result<()> {
    context.place.make(disk, context.disk_bytes)?;
    let server = context.place.serve(disk)?;
    settle(context.place.folder)?;
    let places: Vec<_> = (0..context.disk_bytes).step_by(MIB as usize).collect();
    let fill = WriteLoad {
        offsets: &places,
        bytes: MIB,
        depth: 4,
        durable: Durable::AtEnd,
        limit: FILL_LIMIT,
        generation: FILLED,
    };
    let filled = put(&server, 1, &fill, "seq_write", sample)?;
    ensure!(filled.offsets.len() == places.len(), "the disk was not filled in {FILL_LIMIT:?}");
    read(context, &server, (Pattern::Sequential, MIB, 4), "seq_read", sample)?;
    // Once more: the first time fills the page cache and the map's.
    for _ in 0..2 {
        read(context, &server, (Pattern::Mix, KIB_4, 1), "rand_read_1", sample)?;
        read(context, &server, (Pattern::Mix, KIB_4, 16), "rand_read_16", sample)?;
    }
    let mut rng = Rng::new(u64::from(sample.repeat) + 1);
    let mut written = BTreeSet::new();
    let loads = [
        ("fsync_1", 1, 1, Durable::Each),
        ("fsync_16", WRITERS, 1, Durable::Each),
        ("rand_write_16", 1, 16, Durable::AtEnd),
    ];
    for (name, connections, depth, durable) in loads {
        let blocks = context.disk_bytes / u64::from(KIB_4);
        let places: Vec<_> =
            (0..WRITES_MAX).map(|_| rng.below(blocks) * u64::from(KIB_4)).collect();
        let load = WriteLoad {
            offsets: &places,
            bytes: KIB_4,
            depth,
            durable,
            limit: context.limit,
            generation: WRITTEN,
        };
        settle(context.place.folder)?;
        written.extend(put(&server, connections, &load, name, sample)?.offsets);
    }
    sample.put("rss_peak_mib", ratio(server.memory().1, 1 << 20));
    check(context, &server, &written)?;
    let stopped = server.stop()?;
    ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
    if let Some(occupied) = context.place.occupied(disk) {
        sample.put("occupied_mib", ratio(occupied, 1 << 20));
    }
    Ok(())
}

fn connect(server: &Server, count: usize) -> Result<Vec<nbd::Connection>> {
    (0..count).map(|_| server.connect(&nbd::Wish::default())).collect()
}

/// Puts writes on the server, and notes what they cost.
fn put(
    server: &Server,
    connections: usize,
    load: &WriteLoad<'_>,
    name: &str,
    sample: &mut Sample,
) -> Result<Written> {
    let mut connections = connect(server, connections)?;
    let meter = Meter::start(server);
    let written = write(&mut connections, load)?;
    let cost = meter.stop();
    sample.put(format!("{name}_mib_s"), written.mib_per_second());
    sample.put_speed(name, written.per_second(), &written.writes);
    sample.put_cost(name, cost, &written.writes);
    if load.durable == Durable::Each {
        sample.put(format!("{name}_flush_p50_us"), written.flushes.quantile_us(0.5));
        sample.put(format!("{name}_flush_p99_us"), written.flushes.quantile_us(0.99));
    }
    disconnect(connections)?;
    Ok(written)
}

/// Reads, and notes what that cost.
fn read(
    context: &Context<'_>,
    server: &Server,
    (pattern, bytes, depth): (Pattern, u32, usize),
    name: &str,
    sample: &mut Sample,
) -> Result<()> {
    let mut connections = connect(server, 1)?;
    let load = Load {
        request: Request::Read,
        pattern,
        bytes,
        depth,
        limit: context.limit,
        owners: None,
        seed: u64::from(sample.repeat) + 1,
    };
    let meter = Meter::start(server);
    let outcome = run_on_all(&mut connections, &load)?;
    let cost = meter.stop();
    outcome.check()?;
    sample.put(format!("{name}_mib_s"), outcome.mib_per_second());
    sample.put_speed(name, outcome.per_second(), &outcome.latency);
    sample.put_cost(name, cost, &outcome.latency);
    disconnect(connections)
}

fn disconnect(connections: Vec<nbd::Connection>) -> Result<()> {
    connections.into_iter().try_for_each(nbd::Connection::disconnect)
}

/// Reads back what was written, and as many places of what was not.
fn check(context: &Context<'_>, server: &Server, written: &BTreeSet<u64>) -> Result<()> {
    let mut client = server.connect(&nbd::Wish::default())?;
    let step = written.len().div_ceil(READ_BACK_MAX).max(1);
    for &at in written.iter().step_by(step) {
        for at in [at, at ^ u64::from(KIB_4)] {
            if at >= context.disk_bytes {
                continue;
            }
            let generation = if written.contains(&at) { WRITTEN } else { FILLED };
            let read = client.read(at, u64::from(KIB_4))?;
            let wrong = stamp::first_wrong(&read, at, generation);
            ensure!(wrong.is_none(), "WRONG CONTENT at {wrong:?}");
        }
    }
    client.disconnect()
}
