//! A store that takes its time.

use mica_block::{IoFuture, Result, Run, Store};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;
use std::time::Duration;

/// What a [`DelayStore`] does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DelayOptions {
    /// Time that passes before a read goes on to the store beneath.
    pub read: Duration,
}

/// A store that takes its time.
pub struct DelayStore {
    inner: Arc<dyn Store>,
    options: DelayOptions,
}

impl DelayStore {
    /// Delays the reads of `inner`.
    pub fn new(inner: Arc<dyn Store>, options: DelayOptions) -> Self {
        Self { inner, options }
    }
}

impl Store for DelayStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let inner = Arc::clone(&self.inner);
        let delay = mica_rt::sleep(self.options.read);
        IoFuture::boxed(async move {
            delay.await;
            inner.read_at(buf, offset).await
        })
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
