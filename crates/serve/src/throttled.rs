//! A disk whose clients have a limit: requests that would exceed it wait before they reach the
//! disk. A device does that itself, before it takes a request from its ring.

use crate::limit::Limiter;
use mica_block::{Disk, Extent, Geometry, IoFuture, LocalFuture, Planned, Result, Writing, Zeroes};
use mica_rt::{Buf, now};
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// A disk with a limit. Servers divide long requests: each part counts as an operation. Flushes do
/// not count.
pub struct Throttled {
    disk: Arc<dyn Disk>,
    limiter: Arc<Limiter>,
}

impl Throttled {
    /// `disk`, whose clients share `limiter`.
    pub fn new(disk: Arc<dyn Disk>, limiter: Arc<Limiter>) -> Self {
        Self { disk, limiter }
    }

    fn is_admitted(&self, bytes: u64) -> bool {
        self.limiter.admit(bytes, now()).is_ok()
    }

    async fn wait(&self, bytes: u64) {
        self.limiter.wait(bytes).await;
    }
}

impl Disk for Throttled {
    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        // Whoever does not wait for what is pending plans again: it is admitted once.
        match self.disk.plan(range, extents) {
            Planned::Ready(plan) if plan.is_err() || self.is_admitted(range.len()) => {
                Planned::Ready(plan)
            }
            _ => Planned::Pending(Box::pin(async move {
                self.wait(range.len()).await;
                self.disk.plan(range, Vec::new()).finish().await
            })),
        }
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.disk.survey(range)
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        self.disk.read(extent, buf)
    }

    fn is_writable(&self) -> bool {
        self.disk.is_writable()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let bytes = buf.len() as u64;
        if self.is_admitted(bytes) {
            return self.disk.write(at, buf);
        }
        Writing::Boxed(Box::pin(async move {
            self.wait(bytes).await;
            self.disk.write(at, buf).await
        }))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.wait(0).await;
            self.disk.write_zeroes(range, how).await
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.wait(0).await;
            self.disk.discard(range).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.disk.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Rates;
    use crate::testing::memory::MemoryDisk;
    use mica_block::read_whole;
    use mica_rt::{Backend, Executor};
    use std::time::Duration;

    #[test]
    fn requests_beyond_the_rate_wait_and_are_done() {
        let executor = Executor::new(Backend::Sim { seed: 3 }).expect("simulated");
        executor.block_on(async {
            let rates = Rates { bps: 64 << 10, bps_burst: 4096, ..Rates::default() };
            let limiter = Limiter::shared(rates).expect("a limit");
            let memory = Arc::new(MemoryDisk::new(1 << 20));
            let disk = Throttled::new(memory, Arc::clone(&limiter));
            let began = now();
            for number in 0..16 {
                let at = GuestOffset::new(number * 4096);
                disk.write(at, Buf::from_slice(&[7; 4096])).await.0.expect("room");
            }
            let range = GuestRange::new(GuestOffset::ZERO, 64 << 10).expect("small");
            let plan = disk.plan(range, Vec::new()).finish().await.expect("a plan");
            let read = read_whole(&disk, &plan).await.expect("read");
            assert!(read.iter().all(|byte| *byte == 7));
            let took = now().saturating_since(began);
            let expected = Duration::from_millis(900)..Duration::from_millis(1100);
            assert!(expected.contains(&took), "{took:?}");
            // The first write had the burst; each of the others waited, and so did the read.
            assert_eq!(limiter.delayed(), 16);
            disk.flush().await.expect("nothing to wait for");
        });
    }
}
