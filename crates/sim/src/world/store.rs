//! A file of the world that someone has open.

use super::file::SharedFile;
use super::{Operation, ReadFault, World};
use crate::power::Change;
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, Result, Run, RunKind, Space, Store, StoreIdentity,
    Witness,
};
use mica_rt::{Buf, Op, Parts};
use mica_units::HostOffset;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// How much longer a read takes if a spike hits it.
const SPIKE_FACTOR: u32 = 100;
/// How much longer a sync takes than a read.
const SYNC_FACTOR: u32 = 6;
/// The error for any use of a file on a machine without power.
const EIO: i32 = 5;

/// A file of the world that someone has open.
pub(super) struct SimStore {
    pub(super) world: World,
    pub(super) file: SharedFile,
    /// Held while it is open for writing; absent if it is open for reading.
    pub(super) writer: Option<Arc<()>>,
}

impl SimStore {
    /// The fate of the read that starts now: its latency, and the errno with which it fails.
    fn fate(&self) -> (Duration, Option<i32>) {
        let mut file = self.file.lock();
        file.reads += 1;
        let mut latency = file.nominal_latency();
        let mut errno = None;
        for fault in &file.faults {
            match *fault {
                ReadFault::FailNth(number, code) if number == file.reads => errno = Some(code),
                ReadFault::FailNth(..) => {}
                ReadFault::FailAll(code) => errno = Some(code),
                ReadFault::SpikeOneIn(count) => {
                    if self.world.random_below(count.max(1)) == 0 {
                        latency *= SPIKE_FACTOR;
                    }
                }
            }
        }
        (latency, errno)
    }

    /// Starts an operation that makes `change` when it completes.
    fn start(&self, operation: Operation, change: Change, buf: Buf) -> Op {
        let errno = self.world.start_change(operation).or_else(|| self.world.lacks_space(&change));
        let mut file = self.file.lock();
        let name = file.journal().start(change);
        let latency = file.nominal_latency();
        drop(file);
        let (world, file) = (self.world.clone(), Arc::clone(&self.file));
        let work = move |buf: &mut Buf| {
            let now_ns = world.tick();
            let mut draw = |bound| world.random_below(bound);
            let mut locked = file.lock();
            if locked.dead {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            let change = locked.journal().complete(name).expect("an operation completes once");
            world.trace(|| format!("{} {}", locked.path.display(), describe(&change, errno)));
            let made = match errno {
                None => vec![change],
                // A failed write has written none or some of its sectors.
                Some(_) if operation == Operation::Write && draw(2) == 0 => change.torn(&mut draw),
                Some(_) => Vec::new(),
            };
            made.into_iter().for_each(|change| locked.make(change, now_ns));
            drop(locked);
            world.complete_change(operation);
            errno.map_or(Ok(buf.len()), |code| Err(io::Error::from_raw_os_error(code)))
        };
        mica_rt::simulate(buf, latency, Box::new(work))
    }

    /// Starts a sync of everything, or of these bytes alone.
    fn start_sync(&self, only: Option<(usize, Vec<u8>)>) -> ChangeFuture {
        let errno = self.world.start_change(Operation::Sync);
        let mut file = self.file.lock();
        let (mark, ctime_ns) = (file.journal().mark(), file.ctime_ns);
        let latency = file.nominal_latency() * SYNC_FACTOR;
        drop(file);
        let (world, file) = (self.world.clone(), Arc::clone(&self.file));
        let work = move |_: &mut Buf| {
            let mut locked = file.lock();
            if locked.dead {
                return Err(io::Error::from_raw_os_error(EIO));
            }
            world.trace(|| format!("{} sync {errno:?}", locked.path.display()));
            match (errno, &only) {
                (None, _) if world.ignores_sync() => {}
                (None, Some((at, bytes))) => locked.journal().sync_written(*at, bytes),
                (None, None) => {
                    locked.journal().sync(mark);
                    locked.durable_ctime_ns = ctime_ns;
                }
                (Some(_), _) => {
                    locked.journal().fail_sync(mark, &mut |bound| world.random_below(bound));
                }
            }
            drop(locked);
            world.complete_change(Operation::Sync);
            errno.map_or(Ok(0), |code| Err(io::Error::from_raw_os_error(code)))
        };
        finish(mica_rt::simulate(Buf::new(0), latency, Box::new(work)), "syncing")
    }

    /// As [`Self::start`], without bytes.
    fn start_space(
        &self,
        operation: Operation,
        change: Change,
        what: &'static str,
    ) -> ChangeFuture {
        if self.writer.is_none() {
            let error = self.opened_for_reading();
            return Box::pin(async move { Err(error) });
        }
        let op = self.start(operation, change, Buf::new(0));
        finish(op, what)
    }
}

fn finish(op: Op, what: &'static str) -> ChangeFuture {
    Box::pin(async move {
        let (result, _) = op.await;
        result.map(drop).map_err(|error| Error::from_io(what, error))
    })
}

fn at(offset: HostOffset) -> usize {
    usize::try_from(offset.bytes()).expect("files of the world are small")
}

fn bytes(len: u64) -> usize {
    usize::try_from(len).expect("files of the world are small")
}

impl Store for SimStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let (latency, errno) = self.fate();
        let file = Arc::clone(&self.file);
        let work = move |buf: &mut Buf| {
            let file = file.lock();
            match errno.or(file.dead.then_some(EIO)) {
                Some(code) => Err(io::Error::from_raw_os_error(code)),
                None => Ok(file.read(buf, offset.bytes())),
            }
        };
        IoFuture::file(mica_rt::simulate(buf, latency, Box::new(work)), offset)
    }

    fn len(&self) -> Result<u64> {
        Ok(self.file.lock().bytes.len() as u64)
    }

    /// Blocks of zeros are holes, as they would be in a file that was written sparsely.
    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        const BLOCK: u64 = 4096;
        if len == 0 {
            return Err(Error::new(ErrorKind::Invalid, "a run of no bytes was asked for"));
        }
        let file = self.file.lock();
        let kind_at = |at: u64| {
            let start = usize::try_from(at - at % BLOCK).unwrap_or(usize::MAX);
            let there = file.bytes.get(start..).unwrap_or_default();
            let block = usize::try_from(BLOCK).unwrap_or(usize::MAX).min(there.len());
            match there[..block].iter().all(|byte| *byte == 0) {
                true => RunKind::Hole,
                false => RunKind::Data,
            }
        };
        let start = offset.bytes();
        let end = start.saturating_add(len);
        let kind = kind_at(start);
        let file_len = file.bytes.len() as u64;
        let mut at = start - start % BLOCK;
        while at < end && kind_at(at) == kind {
            at = match at {
                // The rest is a hole.
                at if at >= file_len => end,
                at => at.saturating_add(BLOCK),
            };
        }
        Ok(Run { kind, len: at.min(end) - start })
    }

    fn name(&self) -> String {
        self.file.lock().path.display().to_string()
    }

    fn identity(&self) -> StoreIdentity {
        StoreIdentity::from(&self.file.lock().identity())
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        true
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }

    fn witness(&self) -> Witness {
        let (reports_remounts, life) = {
            let state = self.world.state.lock();
            (state.reports_remounts, state.changes.lives)
        };
        match reports_remounts {
            true => Witness::MountGeneration(life),
            false => Witness::Changed(self.file.lock().ctime_ns),
        }
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if self.writer.is_none() {
            return mica_block::ready(Err(self.opened_for_reading()), buf);
        }
        let change = Change::Data { at: at(offset), bytes: buf.to_vec() };
        IoFuture::write(self.start(Operation::Write, change, buf), offset)
    }

    fn write_parts(
        &self,
        parts: Parts,
        offset: HostOffset,
    ) -> std::result::Result<ChangeFuture, Parts> {
        let written = self.write_at(parts.to_buf(0..parts.len()), offset);
        Ok(Box::pin(async move { written.await.0 }))
    }

    fn sync(&self) -> ChangeFuture {
        self.start_sync(None)
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        if self.writer.is_none() {
            let error = self.opened_for_reading();
            return Box::pin(async move { Err(error) });
        }
        self.start_sync(Some((at(offset), bytes.to_vec())))
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let (at, len) = (at(offset), bytes(len));
        match change {
            Space::Punch => {
                self.start_space(Operation::Space, Change::Zeros { at, len }, "punching a hole")
            }
            // As FALLOC_FL_ZERO_RANGE, which can extend a file.
            Space::Zero => {
                let change = Change::Data { at, bytes: vec![0; len] };
                self.start_space(Operation::Space, change, "zeroing")
            }
            Space::Allocate => {
                let change = Change::Grow { len: at + len };
                self.start_space(Operation::Space, change, "allocating")
            }
        }
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        let len = bytes(len);
        let change = match len < self.file.lock().bytes.len() {
            true => Change::Shrink { len },
            false => Change::Grow { len },
        };
        self.start_space(Operation::SetLen, change, "setting the length")
    }
}

fn describe(change: &Change, errno: Option<i32>) -> String {
    let what = match change {
        Change::Data { at, bytes } => format!("write {at:#x}+{:#x}", bytes.len()),
        Change::Zeros { at, len } => format!("zeros {at:#x}+{len:#x}"),
        Change::Grow { len } => format!("grow to {len:#x}"),
        Change::Shrink { len } => format!("shrink to {len:#x}"),
    };
    errno.map_or(what.clone(), |code| format!("{what} fails with errno {code}"))
}
