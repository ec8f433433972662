//! One run: a fresh image, a server, a load, and what it cost.

use super::Run;
use super::images::{self, BASE_GENERATION, Image, Images, Kind};
use super::loads::{Case, Mode};
use crate::load::{WriteLoad, Written, ratio, stamp, write};
use crate::peers::{Peer, Running};
use crate::samples::Sample;
use anyhow::{Context as _, Result, ensure};
use mica_tests::nbd;
use mica_tests::server::Server;
use serde_json::Value;
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// Bytes that are read back around a write: a cluster of the largest kind but one.
const WINDOW_BYTES: u64 = 128 << 10;
/// Windows that are read back after a run.
const WINDOWS_MAX: usize = 256;

/// What all runs share.
pub(crate) struct Context<'a> {
    /// Makes the images.
    pub(crate) images: Images<'a>,
    /// Length of the disks.
    pub(crate) disk_bytes: u64,
    /// How much is measured against the clock.
    pub(crate) bounds: Bounds,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// How long a load lasts at most.
    pub(crate) limit: Duration,
    /// Maximum number of writes of a load.
    pub(crate) writes_max: usize,
}

impl Context<'_> {
    /// Puts `case` on `running`, at the same places for every server and different ones in every
    /// run.
    pub(crate) fn put(
        &self,
        running: &Running,
        case: Case,
        repeat: u32,
        bounds: Bounds,
    ) -> Result<Written> {
        let (count, depth) = case.connections();
        let connect = |_| running.server.connect(&nbd::Wish::default());
        let mut connections: Vec<_> = (0..count).map(connect).collect::<Result<_>>()?;
        let generation = generation(repeat);
        let offsets = case.offsets(self.disk_bytes, bounds.writes_max, generation);
        let load = WriteLoad {
            offsets: &offsets,
            bytes: case.bytes,
            depth,
            durable: case.durable(),
            limit: bounds.limit,
            generation,
        };
        let written = write(&mut connections, &load)?;
        for connection in connections {
            connection.disconnect()?;
        }
        Ok(written)
    }
}

/// The generation that writes in a run: never the base's.
fn generation(repeat: u32) -> u64 {
    BASE_GENERATION + 1 + u64::from(repeat)
}

/// A run, from a fresh image to the check of the result.
///
/// # Errors
/// If the server fails or writes anything wrong.
pub(crate) fn run(context: &Context<'_>, peer: &Peer, run: Run, sample: &mut Sample) -> Result<()> {
    let (kind, case) = run;
    let image = context.images.make(kind)?;
    let running = peer.start(&image.path, kind.format(), &[])?;
    let server = &running.server;
    let before = (server.processor_time(), device_bytes(server));
    let written = context.put(&running, case, sample.repeat, context.bounds)?;
    let used = server.processor_time().saturating_sub(before.0);
    let to_device = device_bytes(server).saturating_sub(before.1);
    let writes = ratio(written.writes.total().max(1), 1);
    sample.put("writes_per_s", written.per_second());
    sample.put("mib_s", written.mib_per_second());
    if case.mode == Mode::Never {
        sample.put("unflushed_per_s", written.per_second_before_the_end());
    }
    sample.put("writes", writes);
    sample.put("write_p50_us", written.writes.quantile_us(0.5));
    sample.put("write_p99_us", written.writes.quantile_us(0.99));
    sample.put("flushes", ratio(written.flushes.total(), 1));
    sample.put("flush_p50_us", written.flushes.quantile_us(0.5));
    sample.put("flush_p99_us", written.flushes.quantile_us(0.99));
    sample.put("cpu_us", used.as_secs_f64() * 1e6 / writes);
    sample.put("device_per_guest_byte", ratio(to_device, written.bytes.max(1)));
    let figures = running.stop()?;
    // mica counts nothing for a raw file: there are only the guest's bytes.
    if let Some(figures) = figures.filter(|_| kind != Kind::Raw) {
        own_figures(&figures["write"], kind, case, &written, sample);
    }
    let file = fs::metadata(&image.path)?;
    sample.put("file_mib", ratio(file.len(), 1 << 20));
    sample.put("file_room_mib", ratio(file.blocks() * 512, 1 << 20));
    images::check(&image)?;
    if sample.repeat == 0 {
        verify(&image, case, &written, generation(sample.repeat))?;
    }
    Ok(())
}

/// Bytes that the server has written to devices so far, in whole pages, as the kernel counts them.
fn device_bytes(server: &Server) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/io", server.pid())).unwrap_or_default();
    let bytes = text.lines().find_map(|line| line.strip_prefix("write_bytes: "));
    bytes.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// What the server itself counted, from opening the image to closing it.
fn own_figures(figures: &Value, kind: Kind, case: Case, written: &Written, sample: &mut Sample) {
    let Some(figures) = figures.as_object() else { return };
    for (name, count) in figures {
        sample.put(name.clone(), ratio(count.as_u64().unwrap_or(0), 1));
    }
    let count = |name: &str| figures.get(name).and_then(Value::as_u64).unwrap_or(0);
    let flushes = written.flushes.total().max(1);
    let extra = count("copied_written_bytes") + count("metadata_bytes");
    sample.put("syncs_per_flush", ratio(count("syncs"), flushes));
    sample.put("metadata_per_flush_kib", ratio(count("metadata_bytes"), flushes * 1024));
    sample.put("written_per_guest_byte", 1.0 + ratio(extra, written.bytes.max(1)));
    let copied = kind.copied_bytes(&written.offsets, u64::from(case.bytes));
    sample.put("copied_expected_bytes", ratio(copied, 1));
}

/// Reads back, through QEMU, what was written and what is around it.
fn verify(image: &Image, case: Case, written: &Written, generation: u64) -> Result<()> {
    let reader = Peer::qemu_nbd(&[]).start(&image.path, image.kind.format(), &[])?;
    let mut client = reader.server.connect(&nbd::Wish::default())?;
    let bytes = u64::from(case.bytes);
    let window = WINDOW_BYTES.max(bytes);
    let ours: HashSet<u64> = written.offsets.iter().copied().collect();
    let step = written.offsets.len().div_ceil(WINDOWS_MAX).max(1);
    for offset in written.offsets.iter().step_by(step) {
        let start = offset / window * window;
        let read = client.read(start, window.min(client.len - start))?;
        for (block, at) in read.chunks(4096).zip((start..).step_by(4096)) {
            let wrong = if ours.contains(&(at / bytes * bytes)) {
                stamp::first_wrong(block, at, generation)
            } else if image.kind.has_base() {
                stamp::first_wrong(block, at, BASE_GENERATION)
            } else if image.kind.is_fresh() {
                block.iter().any(|byte| *byte != 0).then_some(at)
            } else {
                None
            };
            ensure!(wrong.is_none(), "WRONG CONTENT at {wrong:?}");
        }
    }
    client.disconnect()?;
    reader.stop().context("the reader")?;
    Ok(())
}
