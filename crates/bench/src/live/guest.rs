//! A guest that writes or reads 4 KiB after 4 KiB, one at a time, and notices how long each takes.

use anyhow::{Result, anyhow, ensure};
use mica_gen::Rng;
use mica_tests::clock;
use mica_tests::guest::Guest;
use mica_tests::server::Server;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const READ_BYTES: u32 = 4096;
/// The part of the disk that it works on: most requests find what they need in memory.
const SPAN: u64 = 256 << 20;

/// How often one begins to write that works steadily.
const EVERY: Duration = Duration::from_micros(500);

/// When a request began, and how long it took.
pub(crate) type Noticed = (Instant, Duration);

/// What a guest does.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    Read,
    Write,
    /// The same number of writes a second to each server that keeps up: so all have the same to
    /// make durable.
    SteadyWrite,
}

/// A guest at work.
pub(crate) struct Worker {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Noticed>>>,
}

impl Worker {
    /// # Errors
    /// If the server lets it not in.
    pub(crate) fn start(server: &Server, kind: Work, seed: u64) -> Result<Self> {
        let mut guest = Guest::connect(server)?;
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let work = move || {
            let (mut rng, mut noticed) = (Rng::new(seed), Vec::new());
            let blocks = SPAN.min(guest.len()) / BLOCK as u64;
            let mut next = clock::now();
            while !is_over.load(Ordering::Relaxed) {
                if kind == Work::SteadyWrite {
                    next += EVERY;
                    clock::sleep(next.saturating_duration_since(clock::now()));
                }
                let start = clock::now();
                let at = rng.below(blocks) * BLOCK as u64;
                let errno = match kind {
                    Work::Write | Work::SteadyWrite => guest.write(at, &[7; BLOCK])?,
                    Work::Read => guest.read(at, READ_BYTES)?.errno(),
                };
                ensure!(errno == 0, "a request failed: {errno}");
                noticed.push((start, start.elapsed()));
            }
            Ok(noticed)
        };
        Ok(Self { stop, thread: std::thread::spawn(work) })
    }

    /// Ends it; returns all that it noticed.
    ///
    /// # Errors
    /// If a request failed.
    pub(crate) fn stop(self) -> Result<Vec<Noticed>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the guest panicked"))?
    }
}

/// Writes one block.
///
/// # Errors
/// If that fails.
pub(crate) fn write_once(server: &Server) -> Result<()> {
    let errno = Guest::connect(server)?.write(0, &[7; BLOCK])?;
    ensure!(errno == 0, "a write failed: {errno}");
    Ok(())
}
