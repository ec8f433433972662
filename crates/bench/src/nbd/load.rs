//! The loads on chains: random 4 KiB reads and writes in all shapes, verified.

use super::Context;
use super::cells::{SHAPES, shape_name};
use crate::chains::Chain;
use crate::cost::Meter;
use crate::load::{Durable, Load, Pattern, Request, WriteLoad, Written, run_on_all, stamp, write};
use crate::peers::Peer;
use crate::places;
use crate::samples::Sample;
use anyhow::{Result, ensure};
use mica_gen::Rng;
use mica_tests::nbd;
use mica_tests::server::Server;
use std::fs;
use std::time::Duration;

const BLOCK_BYTES: u32 = 4 << 10;
/// How long the first pass over a disk may take.
const WARM_LIMIT: Duration = Duration::from_secs(60);
/// Maximum number of writes of a load that writes the same places repeatedly.
const REWRITES_MAX: usize = 1 << 20;
/// Places that are read back after writes.
const READ_BACK_MAX: usize = 2048;

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
    let load = Load {
        request: Request::Read,
        pattern: Pattern::Warm { table_bytes: chain.table_bytes },
        bytes: BLOCK_BYTES,
        depth: 1,
        limit: WARM_LIMIT,
        owners: Some(&chain.owners),
        seed: u64::from(sample.repeat) + 1,
    };
    run_on_all(&mut connect(server, 1)?, &load)?.check()?;
    for shape in SHAPES {
        let load = Load { pattern: Pattern::Hits, depth: shape.1, limit: context.limit, ..load };
        let mut connections = connect(server, shape.0)?;
        let meter = Meter::start(server);
        let outcome = run_on_all(&mut connections, &load)?;
        let cost = meter.stop();
        outcome.check()?;
        let name = shape_name(shape);
        sample.put_speed(&name, outcome.per_second(), &outcome.latency);
        sample.put_cost(&name, cost, &outcome.latency);
        disconnect(connections)?;
    }
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
    let server = &running.server;
    // The first write to a page of a file measures the file system, whichever server makes it.
    write(&mut connect(server, 1)?, &write_load(&places, 32, WARM_LIMIT, 1))?;
    let mut rng = Rng::new(u64::from(sample.repeat));
    for shape in SHAPES {
        let at = |_| usize::try_from(rng.below(places.len() as u64)).unwrap_or(0);
        let offsets: Vec<_> = (0..REWRITES_MAX).map(at).map(|at| places[at]).collect();
        put(context, server, (shape, &offsets), sample)?;
    }
    running.stop()?;
    Ok(())
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
    let overlay = chain.overlay(&context.parts, options)?;
    let places = places::one_in_each_stretch(chain.owners.disk_bytes(), sample.repeat + 1);
    let running = peer.start(&overlay, "qcow2", &[])?;
    let shares = places.chunks(places.len().div_ceil(SHAPES.len()));
    for (shape, places) in SHAPES.into_iter().zip(shares) {
        places::settle(&overlay)?;
        chain.read_all()?;
        put(context, &running.server, (shape, places), sample)?;
    }
    running.stop()?;
    if sample.repeat == 0 {
        chain.check_overlay(&overlay)?;
    }
    fs::remove_file(overlay)?;
    Ok(())
}

/// Writes to `offsets` and notes what it cost, then reads back some of it.
fn put(
    context: &Context<'_>,
    server: &Server,
    (shape, offsets): ((usize, usize), &[u64]),
    sample: &mut Sample,
) -> Result<()> {
    let generation = u64::from(sample.repeat) + 2;
    let load = write_load(offsets, shape.1, context.limit, generation);
    let mut connections = connect(server, shape.0)?;
    let meter = Meter::start(server);
    let written = write(&mut connections, &load)?;
    let cost = meter.stop();
    let name = shape_name(shape);
    sample.put_speed(&name, written.per_second_before_the_end(), &written.writes);
    sample.put_cost(&name, cost, &written.writes);
    read_back(&mut connections[0], &written, generation)?;
    disconnect(connections)
}

fn read_back(client: &mut nbd::Connection, written: &Written, generation: u64) -> Result<()> {
    let step = written.offsets.len().div_ceil(READ_BACK_MAX).max(1);
    for &offset in written.offsets.iter().step_by(step) {
        let read = client.read(offset, u64::from(BLOCK_BYTES))?;
        let wrong = stamp::first_wrong(&read, offset, generation);
        ensure!(wrong.is_none(), "WRONG CONTENT at {wrong:?}");
    }
    Ok(())
}

fn write_load(offsets: &[u64], depth: usize, limit: Duration, generation: u64) -> WriteLoad<'_> {
    let (bytes, durable) = (BLOCK_BYTES, Durable::AtEnd);
    WriteLoad { offsets, bytes, depth, durable, limit, generation }
}

fn connect(server: &Server, count: usize) -> Result<Vec<nbd::Connection>> {
    (0..count).map(|_| server.connect(&nbd::Wish::default())).collect()
}

fn disconnect(connections: Vec<nbd::Connection>) -> Result<()> {
    connections.into_iter().try_for_each(nbd::Connection::disconnect)
}
