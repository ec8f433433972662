//! A store whose operations fail, at times that follow from its options alone.

use super::{Operation, Operations};
use mica_block::{
    ChangeFuture, Error, IoFuture, Result, Run, Space, Store, StoreIdentity, Witness, ready,
};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which operations fail.
#[derive(Clone, PartialEq, Debug)]
pub enum When {
    /// This share of them, between 0 and 1, at random from `seed`.
    Rate {
        /// The share.
        share: f64,
        /// Where the choice comes from.
        seed: u64,
    },
    /// Every one whose number, counted from 1, is a multiple of this.
    Every(u64),
    /// The one with this number, counted from 1.
    Nth(u64),
    /// All from this number on, counted from 1.
    From(u64),
    /// Those that touch one of these ranges of the store, in bytes. A sync touches all of it.
    Ranges(Vec<Range<u64>>),
}

/// Options of an [`ErrorStore`].
#[derive(Clone, PartialEq, Debug)]
pub struct ErrorOptions {
    /// Which operations are counted, and may fail.
    pub operations: Operations,
    /// Which of these fail.
    pub when: When,
    /// The errno that they fail with.
    pub errno: i32,
}

/// A store whose operations fail and do nothing.
pub struct ErrorStore {
    inner: Arc<dyn Store>,
    options: ErrorOptions,
    counted: AtomicU64,
}

impl ErrorStore {
    /// Fails operations of `inner`.
    pub fn new(inner: Arc<dyn Store>, options: ErrorOptions) -> Self {
        Self { inner, options, counted: AtomicU64::new(0) }
    }

    /// The error of an operation that touches `len` bytes at `offset`, if it is to fail.
    fn failure(&self, operation: Operation, offset: u64, len: u64) -> Option<Error> {
        if !self.options.operations.contains(operation) || !self.fails(offset, len) {
            return None;
        }
        let doing = match operation {
            Operation::Read => format!("reading {len} bytes at {}", HostOffset::new(offset)),
            Operation::Write => format!("writing {len} bytes at {}", HostOffset::new(offset)),
            other => format!("{} of {}", other.name(), self.inner.name()),
        };
        let cause = io::Error::from_raw_os_error(self.options.errno);
        Some(Error::from_io(format!("injected: {doing}"), cause))
    }

    fn fails(&self, offset: u64, len: u64) -> bool {
        let number = self.counted.fetch_add(1, Ordering::Relaxed) + 1;
        match &self.options.when {
            When::Rate { share, seed } => share_of(*seed, number) < *share,
            When::Every(count) => *count > 0 && number.is_multiple_of(*count),
            When::Nth(nth) => number == *nth,
            When::From(first) => number >= *first,
            When::Ranges(ranges) => {
                let end = offset.saturating_add(len);
                ranges.iter().any(|range| range.start < end && offset < range.end)
            }
        }
    }
}

impl Store for ErrorStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        match self.failure(Operation::Read, offset.bytes(), buf.len() as u64) {
            None => self.inner.read_at(buf, offset),
            Some(error) => ready(Err(error), buf),
        }
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        match self.failure(Operation::Write, offset.bytes(), buf.len() as u64) {
            None => self.inner.write_at(buf, offset),
            Some(error) => ready(Err(error), buf),
        }
    }

    fn sync(&self) -> ChangeFuture {
        match self.failure(Operation::Sync, 0, u64::MAX) {
            None => self.inner.sync(),
            Some(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        match self.failure(Operation::Sync, offset.bytes(), bytes.len() as u64) {
            None => self.inner.sync_written(bytes, offset),
            Some(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        match self.failure(Operation::of_space(change), offset.bytes(), len) {
            None => self.inner.space(change, offset, len),
            Some(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        match self.failure(Operation::SetLen, len, u64::MAX) {
            None => self.inner.set_len(len),
            Some(error) => Box::pin(async move { Err(error) }),
        }
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.inner.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.inner.identity()
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.inner.reads_unwritten_as_zeros()
    }

    fn witness(&self) -> Witness {
        self.inner.witness()
    }
}

/// A number between 0 and 1 for operation `number`.
#[expect(clippy::cast_precision_loss, reason = "a share of 53 bits is exact enough")]
fn share_of(seed: u64, number: u64) -> f64 {
    (mica_units::random_at(seed, number) >> 11) as f64 / (1_u64 << 53) as f64
}
