//! A store that tells of each of its operations.

use mica_block::{IoFuture, Result, Run, Store};
use mica_rt::{Buf, Instant, now};
use mica_units::HostOffset;
use std::sync::{Arc, OnceLock};

/// Takes the lines of a log, without an end of line.
pub type Sink = Arc<dyn Fn(&str) + Send + Sync>;

/// What a [`LogStore`] does.
#[derive(Clone)]
pub struct LogOptions {
    /// Where its lines go: `<seconds> <op> <store> offset=<bytes> len=<bytes> <outcome>`.
    pub sink: Sink,
}

/// A store that tells of each of its operations, when it is over.
pub struct LogStore {
    inner: Arc<dyn Store>,
    options: LogOptions,
    start: OnceLock<Instant>,
}

impl LogStore {
    /// Logs the operations of `inner`. Time counts from the first of them.
    pub fn new(inner: Arc<dyn Store>, options: LogOptions) -> Self {
        Self { inner, options, start: OnceLock::new() }
    }
}

impl Store for LogStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let began = now();
        let start = *self.start.get_or_init(|| began);
        let sink = Arc::clone(&self.options.sink);
        let (name, len) = (self.inner.name(), buf.len());
        let read = self.inner.read_at(buf, offset);
        IoFuture::boxed(async move {
            let (result, buf) = read.await;
            let at = began.saturating_since(start).as_secs_f64();
            let took = now().saturating_since(began).as_micros();
            let outcome = match &result {
                Ok(()) => format!("ok in {took} us"),
                Err(error) => format!("failed in {took} us: {error:?}"),
            };
            sink(&format!("{at:.6} read {name} offset={offset} len={len} {outcome}"));
            (result, buf)
        })
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        let result = self.inner.run_at(offset, len);
        let name = self.inner.name();
        let outcome = match &result {
            Ok(run) => format!("{:?} for {}", run.kind, run.len),
            Err(error) => format!("failed: {error:?}"),
        };
        (self.options.sink)(&format!("- run {name} offset={offset} len={len} {outcome}"));
        result
    }

    fn name(&self) -> String {
        self.inner.name()
    }
}
