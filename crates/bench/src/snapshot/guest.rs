//! A guest that writes 4 KiB after 4 KiB, one at a time, and notices how long each takes.

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
/// The part of the disk that it writes to: most writes find what they need in memory.
const SPAN: u64 = 256 << 20;

/// When a write began, and how long it took.
pub(super) type Noticed = (Instant, Duration);

/// A guest at work.
pub(super) struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Noticed>>>,
}

impl Writer {
    /// # Errors
    /// If the server lets it not in.
    pub(super) fn start(server: &Server) -> Result<Self> {
        let mut guest = Guest::connect(server)?;
        let stop = Arc::new(AtomicBool::new(false));
        let is_over = Arc::clone(&stop);
        let work = move || {
            let (mut rng, mut noticed) = (Rng::new(7), Vec::new());
            let blocks = SPAN.min(guest.len()) / BLOCK as u64;
            while !is_over.load(Ordering::Relaxed) {
                let start = clock::now();
                let errno = guest.write(rng.below(blocks) * BLOCK as u64, &[7; BLOCK])?;
                ensure!(errno == 0, "a write failed: {errno}");
                noticed.push((start, start.elapsed()));
            }
            Ok(noticed)
        };
        Ok(Self { stop, thread: std::thread::spawn(work) })
    }

    /// Ends it; returns all that it noticed.
    ///
    /// # Errors
    /// If a write failed.
    pub(super) fn stop(self) -> Result<Vec<Noticed>> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("the guest panicked"))?
    }
}

/// Writes one block.
///
/// # Errors
/// If that fails.
pub(super) fn write_once(server: &Server) -> Result<()> {
    let errno = Guest::connect(server)?.write(0, &[7; BLOCK])?;
    ensure!(errno == 0, "a write failed: {errno}");
    Ok(())
}
