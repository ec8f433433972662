//! Requests of a collector: repeated for a while, no faster than it may go, some at a time.

use crate::put::{Patience, Tries};
use mica_block::{Entry, Error, ErrorKind, LIST_MAX, LocalFuture, ObjectName, Objects, Result};
use mica_rt::{Buf, Instant, Task, now, sleep, spawn};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Requests under way at once.
pub(crate) const IN_FLIGHT_MAX: usize = 16;

/// How fast a collector may go; nothing bounds it by default.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Speed {
    /// Requests to the store each second, at most.
    pub requests: Option<u32>,
    /// Bytes read from the store each second, at most.
    pub bytes: Option<u64>,
}

/// See the module.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) objects: Arc<dyn Objects>,
    speed: Speed,
    /// When the next request may begin.
    next: Arc<Mutex<Option<Instant>>>,
}

impl Client {
    pub(crate) fn new(objects: Arc<dyn Objects>, speed: Speed) -> Self {
        Self { objects, speed, next: Arc::default() }
    }

    /// Waits until a request for `bytes` may begin.
    async fn wait(&self, bytes: usize) {
        if self.speed == Speed::default() {
            return;
        }
        let share = |count: u64, rate: u64| {
            Duration::from_nanos(count.saturating_mul(1_000_000_000) / rate.max(1))
        };
        let takes = self.speed.requests.map_or(Duration::ZERO, |rate| share(1, rate.into()));
        let bytes = self.speed.bytes.map_or(Duration::ZERO, |rate| share(bytes as u64, rate));
        let pause = {
            let mut next = self.next.lock();
            let start = next.map_or(now(), |next| next.max(now()));
            *next = Some(start.after(takes.max(bytes)));
            start.saturating_since(now())
        };
        if !pause.is_zero() {
            sleep(pause).await;
        }
    }

    /// Repeats `act`, which is about `bytes`.
    async fn repeat<T>(
        &self,
        bytes: usize,
        act: impl Fn() -> LocalFuture<'static, Result<T>>,
    ) -> Result<T> {
        let mut tries = Tries::new(Patience::VERB);
        loop {
            self.wait(bytes).await;
            match act().await {
                Ok(done) => return Ok(done),
                Err(error) => {
                    tries.pause(error, || format!("a request to {}", self.objects.name())).await?;
                }
            }
        }
    }

    /// What is directly in `folder`.
    ///
    /// # Errors
    /// What the store reports in the end.
    pub(crate) async fn list(&self, folder: &ObjectName) -> Result<Vec<Entry>> {
        self.list_after(folder, None).await
    }

    /// As [`Self::list`], after `first`.
    ///
    /// # Errors
    /// As [`Self::list`].
    pub(crate) async fn list_after(
        &self,
        folder: &ObjectName,
        first: Option<&ObjectName>,
    ) -> Result<Vec<Entry>> {
        let mut all: Vec<Entry> = Vec::new();
        loop {
            let after = all.last().map(Entry::name).or(first).cloned();
            let list = || self.objects.list(Some(folder), after.as_ref());
            let page = self.repeat(0, list).await?;
            let is_full = page.len() >= LIST_MAX;
            all.extend(page);
            if !is_full {
                return Ok(all);
            }
        }
    }

    /// A page of all that is in `folder` and in its folders, after `after`.
    ///
    /// # Errors
    /// `Unsupported` if the store lists each folder by itself; what it reports in the end.
    pub(super) async fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> Result<Vec<Entry>> {
        self.repeat(0, || self.objects.list_all(folder, after)).await
    }

    /// The first `len` bytes of `name` from `offset` on.
    ///
    /// # Errors
    /// `NotFound` if there is no such object; what the store reports in the end.
    pub(crate) async fn read(&self, name: &ObjectName, offset: u64, len: usize) -> Result<Buf> {
        let object = self.objects.open(name);
        let read = || -> LocalFuture<'static, Result<Buf>> {
            let read = object.read_at(Buf::new(len), offset);
            Box::pin(async move {
                let (result, buf) = read.await;
                result.map(|()| buf)
            })
        };
        self.repeat(len, read).await
    }

    /// The last bytes of `name`, at most `len`, and where they begin.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(crate) async fn read_end(&self, name: &ObjectName, len: usize) -> Result<(u64, Buf)> {
        let object = self.objects.open(name);
        let read = || -> LocalFuture<'static, Result<(u64, Buf)>> {
            let read = object.read_end(Buf::new(len));
            Box::pin(async move {
                let (result, mut buf) = read.await;
                let whole = result?;
                if whole < buf.len() as u64 {
                    buf.truncate(usize::try_from(whole).expect("shorter than the buffer"));
                }
                Ok((whole - buf.len() as u64, buf))
            })
        };
        self.repeat(len, read).await
    }

    /// Deletes `name`.
    ///
    /// # Errors
    /// What the store reports in the end.
    pub(crate) async fn delete(&self, name: &ObjectName) -> Result<()> {
        self.repeat(0, || self.objects.delete(name)).await
    }

    /// Gives the space of `ranges` of `name` back, and says how much that was.
    ///
    /// # Errors
    /// What the store reports in the end; `Unsupported` if it cannot.
    pub(crate) async fn punch(
        &self,
        name: &ObjectName,
        ranges: &[std::ops::Range<u64>],
    ) -> Result<u64> {
        self.repeat(0, || self.objects.punch(name, ranges)).await
    }
}

/// Requests that were begun, in order.
pub(crate) struct InFlight<T> {
    tasks: VecDeque<Task<T>>,
    max: usize,
}

impl<T: 'static> InFlight<T> {
    pub(crate) fn new() -> Self {
        Self::with_max(IN_FLIGHT_MAX)
    }

    /// At most `max` at a time.
    pub(crate) fn with_max(max: usize) -> Self {
        Self { tasks: VecDeque::new(), max }
    }

    /// Begins `request`; if there are as many as there may be, waits for the oldest first.
    pub(crate) async fn push(&mut self, request: impl Future<Output = T> + 'static) -> Option<T> {
        let done = if self.tasks.len() >= self.max { self.next().await } else { None };
        self.tasks.push_back(spawn(request));
        done
    }

    /// The answer to the oldest; `None` if there is none.
    pub(crate) async fn next(&mut self) -> Option<T> {
        Some(self.tasks.pop_front()?.await)
    }
}

/// The error: an object is not what its name says.
pub(crate) fn stranger(name: &ObjectName, objects: &dyn Objects, wanted: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} of {} is not a valid {wanted}", objects.name()))
}
