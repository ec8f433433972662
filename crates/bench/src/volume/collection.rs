//! Collection: how much of a store it goes through in a second, how long a guest's reads take
//! meanwhile, and what the store takes afterwards.

use super::Context;
use super::disks::{Disk, NAME, done};
use crate::load::{
    Durable, Histogram, Load, Pattern, Request, WriteLoad, ratio, run_on_all, write,
};
use crate::places::settle;
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_gen::Rng;
use mica_tests::nbd::{Connection, Wish};
use mica_tests::server::Server;
use mica_tests::{clock, command, mica};
use serde_json::Value;
use std::process::Command;
use std::thread;
use std::time::Duration;

const KIB_4: u32 = 4 << 10;
/// Bytes of the writes that fill the disk, and of those that make garbage of a part of it.
const MIB: u32 = 1 << 20;
const STALE_BYTES: u32 = 64 << 10;
/// How long writes may take.
const WRITE_LIMIT: Duration = Duration::from_secs(120);
/// After so long a change of snapshots is in a head.
const IN_HEAD: Duration = Duration::from_secs(1);

/// A volume that is full, a third of it written twice, and read by a guest while its store is
/// collected, again and again.
///
/// # Errors
/// If the server fails, or the collection.
pub(super) fn run(context: &Context<'_>, disk: Disk, sample: &mut Sample) -> Result<()> {
    context.place.make(disk, context.disk_bytes)?;
    // What is measured is collected by the verb alone.
    let server = context.place.serve_with(disk, &["--gc", "off"])?;
    let mut connection = server.connect(&Wish::default())?;
    let filled: Vec<_> = (0..context.disk_bytes).step_by(MIB as usize).collect();
    put(&mut connection, &filled, MIB)?;
    let mut rng = Rng::new(u64::from(sample.repeat) + 1);
    let places = context.disk_bytes / u64::from(STALE_BYTES);
    let stale: Vec<_> =
        (0..places / 3).map(|_| rng.below(places) * u64::from(STALE_BYTES)).collect();
    put(&mut connection, &stale, STALE_BYTES)?;
    connection.disconnect()?;
    put_all(context)?;
    settle(context.place.folder)?;

    let idle = read(context, &server, sample.repeat)?;
    let (meanwhile, collected) = thread::scope(|scope| {
        let reading = scope.spawn(|| read(context, &server, sample.repeat));
        let collected = collect_while(context, disk, || !reading.is_finished());
        (reading.join(), collected)
    });
    let meanwhile = meanwhile.map_err(|_| anyhow::anyhow!("the thread that reads panicked"))??;
    let (bytes, elapsed) = collected?;
    sample.put("collect_mib_s", ratio(bytes, 1 << 20) / elapsed.as_secs_f64());
    let (idle, meanwhile) = (idle.quantile_us(0.99), meanwhile.quantile_us(0.99));
    sample.put("collect_read_p99_idle_us", idle);
    sample.put("collect_read_p99_us", meanwhile);
    sample.put("collect_read_p99_ratio", meanwhile / idle);
    let stopped = server.stop()?;
    ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
    // While a writer has the volume, only that writes its sparse extents again.
    collect_while(context, disk, || false)?;
    if let Some(occupied) = context.place.occupied(disk) {
        sample.put("collect_space_ratio", ratio(occupied, context.disk_bytes));
    }
    Ok(())
}

/// Writes `bytes` at each of `offsets`.
fn put(connection: &mut Connection, offsets: &[u64], bytes: u32) -> Result<()> {
    let load = WriteLoad {
        offsets,
        bytes,
        depth: 4,
        durable: Durable::AtEnd,
        limit: WRITE_LIMIT,
        generation: 1,
    };
    let written = write(std::slice::from_mut(connection), &load)?;
    ensure!(written.offsets.len() == offsets.len(), "not written within {WRITE_LIMIT:?}");
    Ok(())
}

/// Takes a snapshot and drops it, so that the newest head has all that was written: what is newer
/// than that no collection touches.
fn put_all(context: &Context<'_>) -> Result<()> {
    for verb in ["snapshot", "drop"] {
        let mut ctl = Command::new(mica::binary());
        ctl.args(["ctl", "--control"]).arg(context.place.control()).args([verb, NAME, "full"]);
        done(&mut ctl)?;
    }
    clock::sleep(IN_HEAD);
    Ok(())
}

/// Reads at random, one read at a time.
fn read(context: &Context<'_>, server: &Server, repeat: u32) -> Result<Histogram> {
    let load = Load {
        request: Request::Read,
        pattern: Pattern::Mix,
        bytes: KIB_4,
        depth: 1,
        limit: context.limit,
        owners: None,
        seed: u64::from(repeat) + 1,
    };
    let mut connections = [server.connect(&Wish::default())?];
    let outcome = run_on_all(&mut connections, &load)?;
    outcome.check()?;
    let [connection] = connections;
    connection.disconnect()?;
    Ok(outcome.latency)
}

/// Collects the store as long as `is_wanted`, and once at least. Returns how many bytes the first
/// time went through, which frees most, and how long that took, with the start of the program.
fn collect_while(
    context: &Context<'_>,
    disk: Disk,
    is_wanted: impl Fn() -> bool,
) -> Result<(u64, Duration)> {
    let url = context.place.url(disk, NAME);
    let (store, _) = url.rsplit_once('/').context("a volume is in a store")?;
    let collect = || -> Result<(u64, Duration)> {
        let mut gc = context.place.volume();
        let finished = command::finish(gc.args(["gc", "--output", "json", store]));
        ensure!(finished.status.success(), "{finished}");
        let report: Value = serde_json::from_str(&finished.stdout)?;
        let bytes = report["bytes"].as_u64().context("how many bytes there were")?;
        Ok((bytes, finished.wall))
    };
    let first = collect()?;
    while is_wanted() {
        collect()?;
    }
    Ok(first)
}
