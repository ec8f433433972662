//! Boots of clones in a store that is far: the first, and the next with the record of the first.
//!
//! What a boot reads is made up: clusters of short reads, each of which waits for the one before,
//! as a machine's do that starts one program after the other.

use super::Context;
use super::disks::{Disk, NAME, done};
use crate::load::{Histogram, ratio};
use crate::samples::Sample;
use anyhow::{Result, ensure};
use mica_gen::Rng;
use mica_tests::{clock, nbd};
use std::process::Command;

/// What each request to the store takes, besides what it takes anyway.
const FAR: &str = "delay=30ms";
/// Bytes of the image that is booted, and of the reads of a boot.
const IMAGE_BYTES: u64 = 256 << 20;
const READS_BYTES: u64 = 12 << 20;
/// Files that a boot reads one after the other lie together, about so many reads.
const CLUSTER: u64 = 24;

/// Boots twice, from clones of one snapshot, in servers that have nothing in memory.
///
/// # Errors
/// If a server fails, or gives wrong bytes.
pub(super) fn run(context: &Context<'_>, disk: Disk, sample: &mut Sample) -> Result<()> {
    context.place.make(disk, IMAGE_BYTES)?;
    let server = context.place.serve(disk)?;
    let mut fill = Command::new("qemu-io");
    fill.args(["-f", "raw", "-t", "none", "-c"]);
    done(fill.arg(format!("write -P 7 0 {IMAGE_BYTES}")).arg(server.uri()))?;
    let stopped = server.stop()?;
    ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
    let url = |name: &str| context.place.url(disk, name);
    done(context.place.volume().args(["snapshot", &url(NAME), "gold"]))?;
    let reads = reads(u64::from(sample.repeat) + 1);
    for (boot, name) in ["first", "next"].into_iter().zip(["cold-1", "cold-2"]) {
        done(context.place.volume().args(["clone", &url(&format!("{NAME}@gold")), &url(name)]))?;
        let start = clock::now();
        let more = ["--inject", FAR, "--boot-fetch", "128M"];
        let server = context.place.serve_volume(disk, name, &more)?;
        let mut connection = server.connect(&nbd::Wish::default())?;
        connection.read(0, 4096)?;
        sample.put(format!("{boot}_serves_ms"), 1000.0 * start.elapsed().as_secs_f64());
        let (mut latency, mut bytes) = (Histogram::default(), 0);
        let start = clock::now();
        for (offset, len) in &reads {
            let before = clock::now();
            let read = connection.read(*offset, *len)?;
            latency.add(before.elapsed());
            ensure!(read.iter().all(|byte| *byte == 7), "wrong bytes at {offset}");
            bytes += len;
        }
        let seconds = start.elapsed().as_secs_f64();
        connection.disconnect()?;
        sample.put(format!("{boot}_boot_s"), seconds);
        sample.put(format!("{boot}_reads_per_s"), ratio(latency.total(), 1) / seconds);
        sample.put(format!("{boot}_mib_s"), ratio(bytes, 1 << 20) / seconds);
        sample.put(format!("{boot}_p99_ms"), latency.quantile_us(0.99) / 1000.0);
        let stopped = server.stop()?;
        ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
    }
    for name in ["cold-1", "cold-2"] {
        done(context.place.volume().args(["delete", &url(name)]))?;
    }
    Ok(())
}

/// Offsets and lengths.
fn reads(seed: u64) -> Vec<(u64, u64)> {
    let mut rng = Rng::new(seed);
    let (mut reads, mut bytes) = (Vec::new(), 0);
    while bytes < READS_BYTES {
        let mut at = rng.below(IMAGE_BYTES - (8 << 20)) / 4096 * 4096;
        for _ in 0..=rng.below(CLUSTER) {
            let len = 4096 << rng.below(5);
            reads.push((at, len));
            bytes += len;
            at += len + rng.below(8) * 4096;
        }
    }
    reads
}
