//! A store whose reads fail, at times that follow from its options alone.

use mica_block::{Error, IoFuture, Result, Run, Store, ready};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Which reads fail.
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
    /// Those that touch one of these ranges of the store, in bytes.
    Ranges(Vec<Range<u64>>),
}

/// What an [`ErrorStore`] does.
#[derive(Clone, PartialEq, Debug)]
pub struct ErrorOptions {
    /// Which reads fail.
    pub when: When,
    /// With which errno of the system.
    pub errno: i32,
}

/// A store whose reads fail.
pub struct ErrorStore {
    inner: Arc<dyn Store>,
    options: ErrorOptions,
    reads: AtomicU64,
}

impl ErrorStore {
    /// Fails reads of `inner`.
    pub fn new(inner: Arc<dyn Store>, options: ErrorOptions) -> Self {
        Self { inner, options, reads: AtomicU64::new(0) }
    }

    fn fails(&self, offset: u64, len: u64) -> bool {
        let number = self.reads.fetch_add(1, Ordering::Relaxed) + 1;
        match &self.options.when {
            When::Rate { share, seed } => share_of(*seed, number) < *share,
            When::Every(count) => *count > 0 && number.is_multiple_of(*count),
            When::Ranges(ranges) => {
                let end = offset.saturating_add(len);
                ranges.iter().any(|range| range.start < end && offset < range.end)
            }
        }
    }
}

impl Store for ErrorStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if !self.fails(offset.bytes(), buf.len() as u64) {
            return self.inner.read_at(buf, offset);
        }
        let what = format!("injected: reading {} bytes at {offset}", buf.len());
        let cause = io::Error::from_raw_os_error(self.options.errno);
        ready(Err(Error::from_io(what, cause)), buf)
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
}

/// A number between 0 and 1 for read `number` (SplitMix64 of Steele, Lea and Flood).
#[expect(clippy::cast_precision_loss, reason = "a share of 53 bits is exact enough")]
fn share_of(seed: u64, number: u64) -> f64 {
    let mut z = seed.wrapping_add(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}
