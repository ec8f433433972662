//! A writable disk in memory that records its requests.

use super::gauge::{Gauge, Held};
use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, LocalFuture, Plan, Planned,
    Requests, Result, Writing, Zeroes, ready,
};
use mica_rt::{BUF_ALIGN, Buf, simulate, sleep};
use mica_units::{GuestOffset, GuestRange};
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// What a [`MemoryDisk`] was asked for, when it was done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Event {
    Write { at: u64, len: usize },
    Zeroes { at: u64, len: u64, how: Zeroes },
    Discard { at: u64, len: u64 },
    Flush,
}

/// A disk in memory.
pub(crate) struct MemoryDisk {
    pub(crate) len: u64,
    /// Nominal time of a write or flush; with none they complete on the spot.
    pub(crate) latency: Option<Duration>,
    /// Nominal time of a read; with none it completes on the spot.
    pub(crate) read_latency: Option<Duration>,
    /// Changes that touch this fail, with this kind.
    pub(crate) bad: Range<u64>,
    pub(crate) kind: ErrorKind,
    /// Whether flushes fail.
    pub(crate) flush_fails: bool,
    /// Whether zeros are written out, so that fast ones are refused.
    pub(crate) slow_zeroes: bool,
    /// Where payloads have to start: on multiples of this.
    pub(crate) align: usize,
    pub(crate) requests: Requests,
    pub(crate) state: Arc<State>,
    /// Bytes of payloads that the disk has now, and the most that was.
    pub(crate) writing: Arc<Gauge>,
}

#[derive(Default)]
pub(crate) struct State {
    /// The first bytes of the disk; what lies behind is as long as the disk and forgotten.
    bytes: Mutex<Vec<u8>>,
    events: Mutex<Vec<Event>>,
}

/// Bytes that are remembered.
const KEPT_BYTES: u64 = 8 << 20;

impl State {
    fn put(&self, at: u64, bytes: &[u8]) {
        let mut kept = self.bytes.lock();
        let start = usize::try_from(at).expect("small").min(kept.len());
        let count = bytes.len().min(kept.len() - start);
        kept[start..start + count].copy_from_slice(&bytes[..count]);
    }

    fn fill(&self, range: GuestRange) {
        let mut kept = self.bytes.lock();
        let clamp = |at: GuestOffset| usize::try_from(at.bytes()).expect("64 bits").min(kept.len());
        let (start, end) = (clamp(range.start()), clamp(range.end()));
        kept[start..end].fill(0);
    }

    fn note(&self, event: Event) {
        self.events.lock().push(event);
    }
}

impl MemoryDisk {
    /// A disk of `len` bytes that are 0xee, where they are remembered.
    pub(crate) fn new(len: u64) -> Self {
        let kept = usize::try_from(len.min(KEPT_BYTES)).expect("small");
        let state = State { bytes: Mutex::new(vec![0xee; kept]), events: Mutex::default() };
        Self {
            len,
            latency: None,
            read_latency: None,
            bad: 0..0,
            kind: ErrorKind::Io,
            flush_fails: false,
            slow_zeroes: false,
            align: BUF_ALIGN,
            requests: Requests::default(),
            state: Arc::new(state),
            writing: Arc::default(),
        }
    }

    /// The remembered bytes of `range`.
    pub(crate) fn bytes(&self, range: Range<usize>) -> Vec<u8> {
        self.state.bytes.lock()[range].to_vec()
    }

    /// What it was asked for since this was last called.
    pub(crate) fn events(&self) -> Vec<Event> {
        std::mem::take(&mut *self.state.events.lock())
    }

    /// Whether no request is under way.
    pub(crate) fn is_quiet(&self) -> bool {
        self.requests.is_idle()
    }

    fn check(&self, range: GuestRange) -> Result<()> {
        assert!(range.end().bytes() <= self.len, "the server checks the range");
        assert!(!range.is_empty() && range.start().bytes().is_multiple_of(512));
        assert!(range.len().is_multiple_of(512), "the server checks that sectors are whole");
        if self.bad.start < range.end().bytes() && range.start().bytes() < self.bad.end {
            return Err(Error::new(self.kind, "this failure is part of the test"));
        }
        Ok(())
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, preferred_bytes: 4096 }
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        extents.push(Extent::unplaced(range, ExtentKind::Data));
        Planned::Ready(Ok(Plan::new(extents, self.requests.enter())))
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        assert!(!self.is_quiet(), "the plan is gone");
        let start = usize::try_from(extent.start.bytes()).expect("small");
        let kept = self.state.bytes.lock();
        let end = start + buf.len();
        buf.copy_from_slice(&kept[start..end]);
        let Some(latency) = self.read_latency else { return ready(Ok(()), buf) };
        IoFuture::boxed(async move {
            sleep(latency).await;
            (Ok(()), buf)
        })
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let (start, len) = (at.bytes(), buf.len());
        assert!(buf.as_ptr().addr().is_multiple_of(self.align), "payloads start on a page");
        let range = GuestRange::new(at, len as u64).expect("the server checks the range");
        if let Err(error) = self.check(range) {
            return Writing::Direct(ready(Err(error), buf));
        }
        let state = Arc::clone(&self.state);
        let Some(latency) = self.latency else {
            state.put(start, &buf);
            state.note(Event::Write { at: start, len });
            return Writing::Direct(ready(Ok(()), buf));
        };
        let held = Held::new(&self.writing, len as u64);
        // As an operation of the kernel: it goes on when nobody waits for it any more.
        let work = move |buf: &mut Buf| {
            state.put(start, buf);
            state.note(Event::Write { at: start, len });
            Ok(buf.len())
        };
        let in_flight = self.requests.enter();
        Writing::Boxed(Box::pin(async move {
            let (result, buf) = simulate(buf, latency, Box::new(work)).await;
            drop((held, in_flight));
            (result.map(drop).map_err(|error| Error::from_io("writing", error)), buf)
        }))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check(range)?;
            if how.fast && self.slow_zeroes {
                return Err(Error::new(ErrorKind::Unsupported, "zeros are written out here"));
            }
            self.state.fill(range);
            let (at, len) = (range.start().bytes(), range.len());
            self.state.note(Event::Zeroes { at, len, how });
            Ok(())
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.check(range)?;
            self.state.fill(range);
            let (at, len) = (range.start().bytes(), range.len());
            self.state.note(Event::Discard { at, len });
            Ok(())
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            if let Some(latency) = self.latency {
                sleep(latency).await;
            }
            if self.flush_fails {
                return Err(Error::new(ErrorKind::Io, "this failure is part of the test"));
            }
            self.state.note(Event::Flush);
            Ok(())
        })
    }
}
