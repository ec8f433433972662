//! A disk in memory whose requests wait, fail or panic where a test says so.

use crate::testing::memory::MemoryDisk;
use mica_block::{
    Disk, Error, ErrorKind, Extent, Geometry, IoFuture, LocalFuture, Planned, Result, Writing,
    Zeroes, ready,
};
use mica_rt::{Buf, sleep};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// A [`MemoryDisk`] with a gate in front of it.
pub(in crate::vhost_user) struct TestDisk {
    pub(in crate::vhost_user) memory: Arc<MemoryDisk>,
    gate: Arc<Gate>,
    /// Its length, as far as `memory` goes.
    pub(in crate::vhost_user) len: AtomicU64,
    pub(in crate::vhost_user) is_writable: bool,
    /// Requests take as long as their place says, so that they overtake each other.
    pub(in crate::vhost_user) is_uneven: bool,
    /// A read that touches this fails.
    pub(in crate::vhost_user) bad: Range<u64>,
    /// A read that touches this panics.
    pub(in crate::vhost_user) poisoned: Range<u64>,
}

#[derive(Default)]
struct Gate {
    closed: AtomicBool,
    waiting: AtomicUsize,
    /// The most that waited at the same time.
    most: AtomicUsize,
}

impl Gate {
    async fn pass(&self) {
        if self.closed.load(Ordering::Acquire) {
            let before = self.waiting.fetch_add(1, Ordering::AcqRel);
            self.most.fetch_max(before + 1, Ordering::AcqRel);
            while self.closed.load(Ordering::Acquire) {
                sleep(Duration::from_millis(1)).await;
            }
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl TestDisk {
    pub(in crate::vhost_user) fn new(len: u64) -> Self {
        let mut memory = MemoryDisk::new(len);
        memory.align = 1;
        Self {
            memory: Arc::new(memory),
            gate: Arc::default(),
            len: AtomicU64::new(len),
            is_writable: true,
            is_uneven: false,
            bad: 0..0,
            poisoned: 0..0,
        }
    }

    /// From now on requests wait.
    pub(in crate::vhost_user) fn close(&self) {
        self.gate.closed.store(true, Ordering::Release);
    }

    pub(in crate::vhost_user) fn open(&self) {
        self.gate.closed.store(false, Ordering::Release);
    }

    /// How many requests wait.
    pub(in crate::vhost_user) fn waiting(&self) -> usize {
        self.gate.waiting.load(Ordering::Acquire)
    }

    /// The most that waited at the same time.
    pub(in crate::vhost_user) fn most_waiting(&self) -> usize {
        self.gate.most.load(Ordering::Acquire)
    }

    fn pause(&self, at: u64) -> Duration {
        Duration::from_micros(if self.is_uneven { at / 512 * 7919 % 2000 } else { 0 })
    }
}

fn touches(range: &Range<u64>, extent: &Extent) -> bool {
    range.start < extent.start.bytes() + extent.len && extent.start.bytes() < range.end
}

impl Disk for TestDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len.load(Ordering::Acquire), ..self.memory.geometry() }
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        self.memory.plan(range, extents)
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        assert!(!touches(&self.poisoned, extent), "this panic is part of the test");
        if touches(&self.bad, extent) {
            let error = Error::new(ErrorKind::Io, "this failure is part of the test");
            return ready(Err(error), buf);
        }
        let pause = self.pause(extent.start.bytes());
        let (gate, memory, extent) = (Arc::clone(&self.gate), Arc::clone(&self.memory), *extent);
        IoFuture::boxed(async move {
            if !pause.is_zero() {
                sleep(pause).await;
            }
            gate.pass().await;
            memory.read(&extent, buf).await
        })
    }

    fn is_writable(&self) -> bool {
        self.is_writable
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        Writing::Boxed(Box::pin(async move {
            let pause = self.pause(at.bytes());
            if !pause.is_zero() {
                sleep(pause).await;
            }
            self.gate.pass().await;
            self.memory.write(at, buf).await
        }))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.gate.pass().await;
            self.memory.write_zeroes(range, how).await
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.gate.pass().await;
            self.memory.discard(range).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.gate.pass().await;
            self.memory.flush().await
        })
    }
}
