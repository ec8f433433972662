//! A wrapper around a store that reports, once, when a request takes longer than a few seconds:
//! otherwise a verb would be silent while a bucket hangs.
//!
//! Invariant: every request and answer passes through unchanged.

use mica_block::{
    EndFuture, Entry, IoFuture, LocalFuture, Object, ObjectName, Objects, Put, PutFuture,
    PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts, timeout};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How long a request may take before it is reported.
const SAY_AFTER: Duration = Duration::from_secs(3);

/// The store.
pub(super) struct WaitedFor {
    inner: Arc<dyn Objects>,
    said: Arc<Said>,
}

/// What is said of it.
struct Said {
    name: String,
    /// How long a request may take, if it is known.
    limit: Option<Duration>,
    /// Whether it was said since the last answer.
    is_said: AtomicBool,
}

impl WaitedFor {
    /// The store `inner`, where a request takes `limit` at most, if that is known.
    pub(super) fn new(inner: Arc<dyn Objects>, limit: Option<Duration>) -> Self {
        let said = Said { name: inner.name(), limit, is_said: AtomicBool::new(false) };
        Self { inner, said: Arc::new(said) }
    }

    fn wait<T>(&self, request: impl Future<Output = T> + 'static) -> LocalFuture<'static, T> {
        let said = Arc::clone(&self.said);
        Box::pin(async move { said.wait(request).await })
    }
}

impl Said {
    async fn wait<T>(&self, request: impl Future<Output = T>) -> T {
        let mut request = pin!(request);
        let answer = match timeout(SAY_AFTER, request.as_mut()).await {
            Ok(answer) => answer,
            Err(_) => {
                self.say();
                request.await
            }
        };
        self.is_said.store(false, Ordering::Relaxed);
        answer
    }

    fn say(&self) {
        if self.is_said.swap(true, Ordering::Relaxed) {
            return;
        }
        let (name, seconds) = (&self.name, SAY_AFTER.as_secs());
        let limit = self.limit.map_or(String::new(), |limit| {
            format!("; a request is given up after {} s, and tried once more", limit.as_secs())
        });
        tracing::warn!("waiting for {name}: no answer for {seconds} s{limit}");
    }
}

impl Objects for WaitedFor {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        let inner = self.inner.open(name);
        Arc::new(WaitedForObject { inner, said: Arc::clone(&self.said) })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.wait(self.inner.put_if_absent(name, content))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        let put = self.inner.put_parts(name, content)?;
        Some(self.wait::<Result<Put>>(put))
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.wait(self.inner.put_early(name, content))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.wait(self.inner.list(folder, after))
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.wait(self.inner.list_all(folder, after))
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        self.wait(self.inner.delete(name))
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        self.wait(self.inner.punch(name, ranges))
    }

    fn client(&self) -> Option<String> {
        self.inner.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.wait(self.inner.shut_out(client))
    }
}

struct WaitedForObject {
    inner: Arc<dyn Object>,
    said: Arc<Said>,
}

impl Object for WaitedForObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let (said, read) = (Arc::clone(&self.said), self.inner.read_at(buf, offset));
        IoFuture::boxed(async move { said.wait(read).await })
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let (said, read) = (Arc::clone(&self.said), self.inner.read_end(buf));
        Box::pin(async move { said.wait(read).await })
    }
}
