//! Disks that are only read: one whose every byte is known, one that cannot plan.

use crate::testing::gauge::{Gauge, Held};
use mica_block::{Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, Plan, Planned};
use mica_rt::{Buf, simulate, yield_now};
use mica_units::{GuestOffset, GuestRange};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of one run of a [`PatternDisk`].
pub(in crate::nbd) const RUN_BYTES: u64 = 4096;

/// A disk whose byte at every offset follows from the offset, in runs of several kinds.
pub(in crate::nbd) struct PatternDisk {
    pub(in crate::nbd) len: u64,
    /// Kind of the run with this number.
    pub(in crate::nbd) kind: fn(u64) -> ExtentKind,
    /// Nominal time of a read; none completes on the spot.
    pub(in crate::nbd) latency: Option<Duration>,
    /// Whether planning has to wait.
    pub(in crate::nbd) slow_plans: bool,
    /// Reads that touch this fail.
    pub(in crate::nbd) bad: Range<u64>,
    /// A read that touches this panics.
    pub(in crate::nbd) poisoned: Range<u64>,
    /// Bytes of buffers that reads own now, and the most that was.
    pub(in crate::nbd) reading: Arc<Gauge>,
}

impl PatternDisk {
    /// All data, at once.
    pub(in crate::nbd) fn data(len: u64) -> Self {
        Self {
            len,
            kind: |_| ExtentKind::Data,
            latency: None,
            slow_plans: false,
            bad: 0..0,
            poisoned: 0..0,
            reading: Arc::default(),
        }
    }

    /// Every kind of run in turn, with latency and plans that wait.
    pub(in crate::nbd) fn mixed(len: u64) -> Self {
        let kind = |run| match run % 7 {
            0 | 1 => ExtentKind::Data,
            2 => ExtentKind::Hole,
            3 => ExtentKind::Encoded,
            4 => ExtentKind::ZeroAllocated,
            5 => ExtentKind::Zero,
            _ => ExtentKind::Data,
        };
        let latency = Some(Duration::from_micros(100));
        Self { kind, latency, slow_plans: true, ..Self::data(len) }
    }

    /// What a read of `range` gives.
    pub(in crate::nbd) fn content(&self, range: Range<u64>) -> Vec<u8> {
        range
            .map(|at| {
                let is_zero = (self.kind)(at / RUN_BYTES).reads_as_zero();
                if is_zero { 0 } else { pattern(at) }
            })
            .collect()
    }

    fn extents_of(&self, range: GuestRange, extents: &mut Vec<Extent>) {
        let mut at = range.start().bytes();
        while at < range.end().bytes() {
            let run = at / RUN_BYTES;
            let end = ((run + 1) * RUN_BYTES).min(range.end().bytes());
            let part = GuestRange::new(GuestOffset::new(at), end - at).expect("in the range");
            let next = Extent::unplaced(part, (self.kind)(run));
            match extents.last_mut() {
                Some(last) if last.kind == next.kind => last.len += next.len,
                _ => extents.push(next),
            }
            at = end;
        }
    }
}

fn pattern(at: u64) -> u8 {
    (at ^ at >> 8 ^ at >> 16 ^ at >> 24).to_le_bytes()[0] | 1
}

fn touches(range: &Range<u64>, extent: &Extent) -> bool {
    let start = extent.start.bytes();
    range.start < start + extent.len && start < range.end
}

impl Disk for PatternDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.len, preferred_bytes: 65536 }
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        assert!(range.end().bytes() <= self.len, "the server checks the range");
        // Every third place waits, so that both ways are used.
        if self.slow_plans && (range.start().bytes() / RUN_BYTES).is_multiple_of(3) {
            return Planned::Pending(Box::pin(async move {
                yield_now().await;
                self.extents_of(range, &mut extents);
                Ok(Plan::untracked(extents))
            }));
        }
        self.extents_of(range, &mut extents);
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        assert_eq!(buf.len() as u64, extent.len, "the server sizes the buffer");
        assert!(!touches(&self.poisoned, extent), "this panic is part of the test");
        let start = extent.start.bytes();
        let is_bad = touches(&self.bad, extent);
        let fill = move |buf: &mut Buf| {
            for (at, byte) in (start..).zip(buf.own_bytes().iter_mut()) {
                *byte = pattern(at);
            }
            if is_bad { Err(io::Error::from_raw_os_error(5)) } else { Ok(buf.len()) }
        };
        let outcome = |result: io::Result<usize>| {
            result.map(drop).map_err(|error| Error::from_io("reading the pattern", error))
        };
        let held = Held::new(&self.reading, extent.len);
        let Some(latency) = self.latency else {
            let result = outcome(fill(&mut buf));
            return mica_block::ready(result, buf);
        };
        IoFuture::boxed(async move {
            let (result, buf) = simulate(buf, latency, Box::new(fill)).await;
            drop(held);
            (outcome(result), buf)
        })
    }
}

/// A disk that cannot plan.
pub(in crate::nbd) struct BrokenDisk;

impl Disk for BrokenDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: 1 << 20, preferred_bytes: 512 }
    }

    fn plan(&self, _: GuestRange, _: Vec<Extent>) -> Planned<'_> {
        Planned::Ready(Err(Error::new(ErrorKind::Corrupt, "the map is nonsense")))
    }

    fn read(&self, _: &Extent, _: Buf) -> IoFuture {
        unreachable!("nothing was planned")
    }
}
