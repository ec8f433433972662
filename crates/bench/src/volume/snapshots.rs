//! Snapshots of a volume while it is written, by the server's HTTP interface; and clones.

use super::Context;
use super::disks::{Disk, NAME, done};
use crate::load::{Durable, Histogram, WriteLoad, ratio, write};
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_gen::Rng;
use mica_tests::{clock, nbd};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Snapshots that are taken, and the pause from one to the next.
const SNAPSHOTS: u32 = 300;
const EVERY: Duration = Duration::from_millis(10);
/// The part of the volume that is written: what Parallax's load touches again and again.
const WORKING_BYTES: u64 = 64 << 20;
/// Writes of a load at most.
const WRITES_MAX: usize = 1 << 19;
/// Clones that are made.
const CLONES: u32 = 100;

/// Writes with and without snapshots: what one takes, and what it costs the writer and the store.
///
/// # Errors
/// If the server fails.
pub(super) fn run(context: &Context<'_>, disk: Disk, sample: &mut Sample) -> Result<()> {
    context.place.make(disk, context.disk_bytes)?;
    let server = context.place.serve(disk)?;
    let limit = EVERY * SNAPSHOTS;
    let mut rng = Rng::new(u64::from(sample.repeat) + 1);
    let places: Vec<_> = (0..WRITES_MAX).map(|_| rng.below(WORKING_BYTES / 4096) * 4096).collect();
    let load = WriteLoad {
        offsets: &places,
        bytes: 4096,
        depth: 1,
        durable: Durable::Every(16),
        limit,
        generation: 1,
    };
    let connect = || server.connect(&nbd::Wish::default());
    let without = write(&mut [connect()?], &load)?;
    let control = context.place.control();
    let mut connection = connect()?;
    let (with, taken) = thread::scope(|scope| {
        let taken = scope.spawn(|| take_snapshots(&control));
        let with = write(std::slice::from_mut(&mut connection), &load);
        (with, taken.join())
    });
    let with = with?;
    let taken =
        taken.map_err(|_| anyhow::anyhow!("the thread that takes snapshots panicked"))??;
    sample.put_speed("snapshot", ratio(taken.total(), 1) / with.elapsed.as_secs_f64(), &taken);
    sample.put("snapshot_p90_us", taken.quantile_us(0.9));
    sample.put("writes_without_per_s", without.per_second());
    sample.put("writes_with_per_s", with.per_second());
    sample.put("writes_slower_percent", 100.0 * (1.0 - with.per_second() / without.per_second()));
    let stopped = server.stop()?;
    ensure!(stopped.status.success(), "{}\n{}", stopped.status, stopped.log);
    Ok(())
}

/// Takes them in the given rhythm; how long each took.
fn take_snapshots(control: &Path) -> Result<Histogram> {
    let mut taken = Histogram::default();
    let start = clock::now();
    for number in 0..SNAPSHOTS {
        clock::sleep((EVERY * number).saturating_sub(start.elapsed()));
        let before = clock::now();
        let body = format!("{{\"label\": \"n{number}\"}}");
        post(control, &format!("/v1/disks/{NAME}/snapshots"), &body)?;
        taken.add(before.elapsed());
    }
    Ok(taken)
}

/// Sends a request over a connection of its own, as the server wants it, and waits for the answer.
fn post(control: &Path, path: &str, body: &str) -> Result<()> {
    let mut http = BufReader::new(UnixStream::connect(control)?);
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: mica\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    http.get_mut().write_all(head.as_bytes())?;
    let mut line = String::new();
    http.read_line(&mut line)?;
    let is_fine = line.starts_with("HTTP/1.1 2");
    let mut len = 0;
    let status = line.clone();
    loop {
        line.clear();
        ensure!(http.read_line(&mut line)? > 0, "the server closed the connection");
        if line == "\r\n" {
            break;
        }
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            len = value.trim().parse().context("a length")?;
        }
    }
    let mut answer = vec![0; len];
    http.read_exact(&mut answer)?;
    ensure!(is_fine, "{status}{}", String::from_utf8_lossy(&answer));
    Ok(())
}

/// Clones a volume, as a program does it that starts `mica` each time.
///
/// # Errors
/// If a verb fails.
pub(super) fn clones(context: &Context<'_>, disk: Disk, sample: &mut Sample) -> Result<()> {
    context.place.make(disk, context.disk_bytes)?;
    let url = |name: &str| context.place.url(disk, name);
    done(context.place.volume().args(["snapshot", &url(NAME), "gold"]))?;
    let source = url(&format!("{NAME}@gold"));
    let mut clones = Histogram::default();
    let start = clock::now();
    for number in 0..CLONES {
        let before = clock::now();
        done(context.place.volume().args(["clone", &source, &url(&format!("clone-{number}"))]))?;
        clones.add(before.elapsed());
    }
    sample.put_speed("clone", f64::from(CLONES) / start.elapsed().as_secs_f64(), &clones);
    for number in 0..CLONES {
        done(context.place.volume().args(["delete", &url(&format!("clone-{number}"))]))?;
    }
    Ok(())
}
