//! A store that is slow.

use super::{Operation, Operations};
use mica_block::{ChangeFuture, IoFuture, Result, Run, Space, Store, StoreIdentity, Witness};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;
use std::time::Duration;

/// Options of a [`DelayStore`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DelayOptions {
    /// The operations that take longer.
    pub operations: Operations,
    /// Delay before an operation is passed on to the store below.
    pub time: Duration,
}

/// A store that is slow.
pub struct DelayStore {
    inner: Arc<dyn Store>,
    options: DelayOptions,
}

impl DelayStore {
    /// Delays operations of `inner`.
    pub fn new(inner: Arc<dyn Store>, options: DelayOptions) -> Self {
        Self { inner, options }
    }

    fn delay(
        &self,
        operation: Operation,
        act: impl FnOnce(&dyn Store) -> ChangeFuture + 'static,
    ) -> ChangeFuture {
        if !self.options.operations.contains(operation) {
            return act(&*self.inner);
        }
        let inner = Arc::clone(&self.inner);
        // Whoever asks may not be in an executor yet.
        let time = self.options.time;
        Box::pin(async move {
            mica_rt::sleep(time).await;
            act(&*inner).await
        })
    }

    fn delay_io(
        &self,
        operation: Operation,
        act: impl FnOnce(&dyn Store) -> IoFuture + 'static,
    ) -> IoFuture {
        if !self.options.operations.contains(operation) {
            return act(&*self.inner);
        }
        let inner = Arc::clone(&self.inner);
        let time = self.options.time;
        IoFuture::boxed(async move {
            mica_rt::sleep(time).await;
            act(&*inner).await
        })
    }
}

impl Store for DelayStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.delay_io(Operation::Read, move |inner| inner.read_at(buf, offset))
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.delay_io(Operation::Write, move |inner| inner.write_at(buf, offset))
    }

    fn sync(&self) -> ChangeFuture {
        self.delay(Operation::Sync, |inner| inner.sync())
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        self.delay(Operation::Sync, move |inner| inner.sync_written(bytes, offset))
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let operation = Operation::of_space(change);
        self.delay(operation, move |inner| inner.space(change, offset, len))
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.delay(Operation::SetLen, move |inner| inner.set_len(len))
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
