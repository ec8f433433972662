//! A store that logs each of its operations.

use super::Operation;
use mica_block::{ChangeFuture, IoFuture, Result, Run, Space, Store, StoreIdentity, Witness};
use mica_rt::{Buf, Instant, now};
use mica_units::HostOffset;
use std::sync::{Arc, OnceLock};

/// Receives the lines of a log, without line endings.
pub type Sink = Arc<dyn Fn(&str) + Send + Sync>;

/// Options of a [`LogStore`].
#[derive(Clone)]
pub struct LogOptions {
    /// The destination of its lines: `<seconds> <op> <store> offset=<bytes> len=<bytes> <outcome>`.
    pub sink: Sink,
}

/// A store that logs each of its operations when it completes.
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

impl LogStore {
    fn begin_at(&self, operation: Operation, offset: HostOffset, len: u64) -> Line {
        self.begin(operation, format!(" offset={offset} len={len}"))
    }

    fn begin(&self, operation: Operation, on: String) -> Line {
        let began = now();
        let start = *self.start.get_or_init(|| began);
        let what = format!("{} {}{on}", operation.name(), self.inner.name());
        Line { start, began, what, sink: Arc::clone(&self.options.sink) }
    }
}

/// A line that is written when its operation completes.
struct Line {
    start: Instant,
    began: Instant,
    what: String,
    sink: Sink,
}

impl Line {
    fn follow(self, act: ChangeFuture) -> ChangeFuture {
        Box::pin(async move {
            let result = act.await;
            self.end(&result);
            result
        })
    }

    fn end(self, result: &Result<()>) {
        let at = self.began.saturating_since(self.start).as_secs_f64();
        let took = now().saturating_since(self.began).as_micros();
        let outcome = match result {
            Ok(()) => format!("ok in {took} us"),
            Err(error) => format!("failed in {took} us: {error:?}"),
        };
        (self.sink)(&format!("{at:.6} {} {outcome}", self.what));
    }
}

impl Store for LogStore {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let line = self.begin_at(Operation::Read, offset, buf.len() as u64);
        let read = self.inner.read_at(buf, offset);
        IoFuture::boxed(async move {
            let (result, buf) = read.await;
            line.end(&result);
            (result, buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let line = self.begin_at(Operation::Write, offset, buf.len() as u64);
        let write = self.inner.write_at(buf, offset);
        IoFuture::boxed(async move {
            let (result, buf) = write.await;
            line.end(&result);
            (result, buf)
        })
    }

    fn sync(&self) -> ChangeFuture {
        self.begin(Operation::Sync, String::new()).follow(self.inner.sync())
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        let line = self.begin_at(Operation::Sync, offset, bytes.len() as u64);
        line.follow(self.inner.sync_written(bytes, offset))
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let line = self.begin_at(Operation::of_space(change), offset, len);
        line.follow(self.inner.space(change, offset, len))
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.begin(Operation::SetLen, format!(" len={len}")).follow(self.inner.set_len(len))
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
