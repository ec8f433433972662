//! Disks in memory, for tests.

use crate::copy::{Run, Source};
use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, IoFuture, LocalFuture, Plan, Planned,
    Result, Writing, Zeroes, ready,
};
use mica_rt::{Backend, Buf, Executor};
use mica_units::{GuestOffset, GuestRange, Rng};
use parking_lot::{Mutex, MutexGuard};

pub(crate) const UNIT: usize = 512;

pub(crate) fn block_on<T>(future: impl Future<Output = T>) -> T {
    Executor::new(Backend::Pool).unwrap().block_on(future)
}

/// A disk that is written, or compared.
pub(crate) struct MemoryDisk(pub(crate) Mutex<Vec<u8>>);

impl MemoryDisk {
    pub(crate) fn new(len: usize) -> Self {
        Self(Mutex::new(vec![0; len]))
    }

    pub(crate) fn bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.lock()
    }
}

impl Disk for MemoryDisk {
    fn geometry(&self) -> Geometry {
        Geometry { len: self.bytes().len() as u64, preferred_bytes: 4096 }
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        if !range.is_empty() {
            extents.push(Extent::unplaced(range, ExtentKind::Data));
        }
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        let at = usize::try_from(extent.start.bytes()).unwrap();
        let len = buf.len();
        buf.put(0, &self.bytes()[at..at + len]);
        ready(Ok(()), buf)
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let at = usize::try_from(at.bytes()).unwrap();
        self.bytes()[at..at + buf.len()].copy_from_slice(&buf);
        Writing::Direct(ready(Ok(()), buf))
    }

    fn write_zeroes(&self, range: GuestRange, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        let at = usize::try_from(range.start().bytes()).unwrap();
        let len = usize::try_from(range.len()).unwrap();
        self.bytes()[at..at + len].fill(0);
        Box::pin(async { Ok(()) })
    }
}

/// A state in memory, and what of it is told.
pub(crate) struct MemorySource {
    pub(crate) bytes: Vec<u8>,
    pub(crate) runs: Vec<Run>,
    /// Reads after which there is an error.
    pub(crate) reads_max: usize,
    next: usize,
}

impl MemorySource {
    /// All of it, which may have zeros.
    pub(crate) fn whole(bytes: &[u8]) -> Self {
        let range = GuestRange::new(GuestOffset::ZERO, bytes.len() as u64).unwrap();
        Self::of(bytes, vec![Run { range, is_zeros: false }])
    }

    /// What of `bytes` is not as in `before`.
    pub(crate) fn since(bytes: &[u8], before: &[u8]) -> Self {
        let sector = |bytes: &[u8], at: usize| bytes.get(at..at + UNIT).map(<[u8]>::to_vec);
        let mut runs = Vec::new();
        for at in (0..bytes.len()).step_by(UNIT) {
            let (now, then) = (sector(bytes, at), sector(before, at));
            if now != then.or_else(|| Some(vec![0; UNIT])) {
                let is_zeros = now == Some(vec![0; UNIT]);
                let range = GuestRange::new(GuestOffset::new(at as u64), UNIT as u64).unwrap();
                runs.push(Run { range, is_zeros });
            }
        }
        Self::of(bytes, runs)
    }

    fn of(bytes: &[u8], runs: Vec<Run>) -> Self {
        Self { bytes: bytes.to_vec(), runs, reads_max: usize::MAX, next: 0 }
    }
}

impl Source for MemorySource {
    fn next(&mut self) -> LocalFuture<'_, Result<Option<Vec<Run>>>> {
        let end = (self.next + 3).min(self.runs.len());
        let runs = self.runs[self.next..end].to_vec();
        self.next = end;
        Box::pin(async move { Ok((!runs.is_empty()).then_some(runs)) })
    }

    fn read<'a>(&'a mut self, ranges: &'a [GuestRange]) -> LocalFuture<'a, Result<Vec<Buf>>> {
        Box::pin(async move {
            let Some(left) = self.reads_max.checked_sub(1) else {
                return Err(Error::new(ErrorKind::Io, "the source is gone"));
            };
            self.reads_max = left;
            let read = |range: &GuestRange| {
                let at = usize::try_from(range.start().bytes()).unwrap();
                Buf::from_slice(&self.bytes[at..at + usize::try_from(range.len()).unwrap()])
            };
            Ok(ranges.iter().map(read).collect())
        })
    }
}

/// Changes some of `bytes`: to data that compresses well or not at all, or to zeros.
pub(crate) fn change(bytes: &mut [u8], rng: &mut Rng) {
    let sectors = (bytes.len() / UNIT) as u64;
    for _ in 0..1 + rng.below(12) {
        let at = rng.below(sectors);
        let most = rng.choose(&[1, 8, 300, 5000]);
        let len = (1 + rng.below(most)).min(sectors - at);
        let [at, len] = [at, len].map(|count| usize::try_from(count).unwrap() * UNIT);
        match rng.below(4) {
            0 => bytes[at..at + len].fill(0),
            1 => bytes[at..at + len].fill(u8::try_from(rng.below(255)).unwrap() + 1),
            _ => {
                for word in bytes[at..at + len].chunks_mut(8) {
                    word.copy_from_slice(&rng.next_u64().to_le_bytes());
                }
            }
        }
    }
}
