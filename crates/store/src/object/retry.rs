//! A store of objects whose requests are repeated until they are answered.
//!
//! Invariants
//! - I1 A put is [`Put::Done`] only if an attempt was answered so, or if after an attempt whose
//!   outcome is unclear the object is there with exactly the bytes that were put. So puts of
//!   different writers must differ: each carries a number that no other has.
//! - I2 An object that is missing decides nothing as long as an attempt is unclear, as that may
//!   still arrive: the put is repeated.
//! - I3 Pauses are bounded. Their number is only where somebody waits for a verb: whoever serves a
//!   guest decides how long to wait.
//!
//! A request that is never answered is not repeated either: the store beneath has to end it.

use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LocalFuture, Object, ObjectName, Objects, Put,
    PutFuture, Result,
};
use mica_rt::{Buf, sleep};
use mica_units::random_at;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Options of a [`RetryObjects`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RetryOptions {
    /// The first pause, at most. Each is up to twice as long as the one before.
    pub pause_min: Duration,
    /// The longest pause.
    pub pause_max: Duration,
    /// Where the length of pauses comes from: processes that fail at one time do not all return at
    /// one time.
    pub seed: u64,
    /// Attempts of a request at most; `None` if it may take as long as it likes.
    pub tries_max: Option<u32>,
}

impl RetryOptions {
    /// For a store over a network.
    pub fn new(seed: u64) -> Self {
        let (pause_min, pause_max) = (Duration::from_millis(50), Duration::from_secs(10));
        Self { pause_min, pause_max, seed, tries_max: None }
    }
}

/// A store of objects whose requests are repeated if the store or the network failed
/// ([`ErrorKind::Io`]). Every other error is an answer.
pub struct RetryObjects {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<dyn Objects>,
    options: RetryOptions,
    /// Pauses so far.
    pauses: AtomicU64,
}

/// The pauses of one request.
struct Pauses<'a> {
    shared: &'a Shared,
    doing: &'static str,
    count: u32,
}

/// After so many failed attempts it is said that a request is still repeated.
const SAY_AFTER: u32 = 4;

impl RetryObjects {
    /// Repeats the requests to `inner`.
    pub fn new(inner: Arc<dyn Objects>, options: RetryOptions) -> Self {
        Self { shared: Arc::new(Shared { inner, options, pauses: AtomicU64::default() }) }
    }
}

impl Shared {
    fn pauses(&self, doing: &'static str) -> Pauses<'_> {
        Pauses { shared: self, doing, count: 0 }
    }

    /// Repeats a request that has no buffer, whose first attempt is under way.
    async fn repeat<T>(
        &self,
        doing: &'static str,
        first: LocalFuture<'static, Result<T>>,
        again: impl Fn(&dyn Objects) -> LocalFuture<'static, Result<T>>,
    ) -> Result<T> {
        let mut pauses = self.pauses(doing);
        let mut attempt = first;
        loop {
            match attempt.await {
                Err(error) if pauses.may_pass(&error) => pauses.pause(&error).await,
                answer => return answer,
            }
            attempt = again(&*self.inner);
        }
    }

    /// Puts; the first attempt is under way.
    async fn put(&self, name: &ObjectName, first: PutFuture) -> (Result<Put>, Buf) {
        let mut pauses = self.pauses("putting an object");
        let mut attempt = first;
        let mut is_unclear = false;
        loop {
            let (put, content) = attempt.await;
            match put {
                // It may be our own.
                Ok(Put::Exists) if is_unclear => {}
                Err(error) if pauses.may_pass(&error) => {
                    is_unclear = true;
                    pauses.pause(&error).await;
                }
                put => return (put, content),
            }
            match self.find_out(name, &content).await {
                Ok(None) => attempt = self.inner.put_if_absent(name, content),
                Ok(Some(put)) => return (Ok(put), content),
                Err(error) => return (Err(error), content),
            }
        }
    }

    /// What became of a put of `content` whose outcome is unclear; `None` if there is no object.
    async fn find_out(&self, name: &ObjectName, content: &[u8]) -> Result<Option<Put>> {
        let object = self.inner.open(name);
        let first = object.read_end(Buf::new(content.len()));
        match self.read_end(&*object, first).await {
            (Ok(len), found) if len == content.len() as u64 && *found == *content => {
                Ok(Some(Put::Done))
            }
            (Ok(_), _) => Ok(Some(Put::Exists)),
            (Err(error), _) if error.kind() == ErrorKind::NotFound => Ok(None),
            (Err(error), _) => Err(error),
        }
    }

    /// Reads the end of `object`; the first attempt is under way.
    async fn read_end(&self, object: &dyn Object, first: EndFuture) -> (Result<u64>, Buf) {
        let mut pauses = self.pauses("reading an object");
        let mut attempt = first;
        loop {
            match attempt.await {
                (Err(error), buf) if pauses.may_pass(&error) => {
                    pauses.pause(&error).await;
                    attempt = object.read_end(buf);
                }
                answer => return answer,
            }
        }
    }
}

impl Pauses<'_> {
    /// Whether another attempt is made, which may have another outcome.
    fn may_pass(&self, error: &Error) -> bool {
        let has_tries = self.shared.options.tries_max.is_none_or(|most| self.count + 1 < most);
        error.kind() == ErrorKind::Io && has_tries
    }

    /// Waits before the next attempt.
    async fn pause(&mut self, error: &Error) {
        let Self { shared, doing, count } = self;
        *count = count.saturating_add(1);
        if *count == SAY_AFTER {
            let (store, error) = (shared.inner.name(), error.in_one_line());
            tracing::warn!(%store, %error, "{doing} failed {count} times: still trying");
        }
        let RetryOptions { pause_min, pause_max, seed, .. } = shared.options;
        let longest = pause_min.saturating_mul(1 << (*count - 1).min(20)).min(pause_max);
        let number = shared.pauses.fetch_add(1, Ordering::Relaxed);
        let longest = u64::try_from(longest.as_nanos()).unwrap_or(u64::MAX);
        let half = longest / 2;
        let nanos = half + random_at(seed, number) % (longest - half + 1);
        sleep(Duration::from_nanos(nanos)).await;
    }
}

impl Objects for RetryObjects {
    fn name(&self) -> String {
        self.shared.inner.name()
    }

    fn is_far(&self) -> bool {
        self.shared.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        let object = self.shared.inner.open(name);
        Arc::new(RetryObject { shared: Arc::clone(&self.shared), object })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let first = self.shared.inner.put_if_absent(name, content);
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        Box::pin(async move { shared.put(&name, first).await })
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let first = self.shared.inner.list(folder, after);
        let shared = Arc::clone(&self.shared);
        let (folder, after) = (folder.cloned(), after.cloned());
        Box::pin(async move {
            let again = |inner: &dyn Objects| inner.list(folder.as_ref(), after.as_ref());
            shared.repeat("listing objects", first, again).await
        })
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let first = self.shared.inner.list_all(folder, after);
        let shared = Arc::clone(&self.shared);
        let (folder, after) = (folder.clone(), after.cloned());
        Box::pin(async move {
            let again = |inner: &dyn Objects| inner.list_all(&folder, after.as_ref());
            shared.repeat("listing objects", first, again).await
        })
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let first = self.shared.inner.delete(name);
        let (shared, name) = (Arc::clone(&self.shared), name.clone());
        Box::pin(async move {
            shared.repeat("deleting an object", first, |inner| inner.delete(&name)).await
        })
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        let first = self.shared.inner.punch(name, ranges);
        let (shared, name, ranges) = (Arc::clone(&self.shared), name.clone(), ranges.to_vec());
        Box::pin(async move {
            let again = |inner: &dyn Objects| inner.punch(&name, &ranges);
            shared.repeat("giving back parts of an object", first, again).await
        })
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.shared.inner.give_up_reserve()
    }

    fn client(&self) -> Option<String> {
        self.shared.inner.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        let first = self.shared.inner.shut_out(client);
        let (shared, client) = (Arc::clone(&self.shared), client.to_owned());
        Box::pin(async move {
            let again = |inner: &dyn Objects| inner.shut_out(&client);
            shared.repeat("shutting out a client", first, again).await
        })
    }
}

struct RetryObject {
    shared: Arc<Shared>,
    object: Arc<dyn Object>,
}

impl Object for RetryObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let mut attempt = self.object.read_at(buf, offset);
        let (shared, object) = (Arc::clone(&self.shared), Arc::clone(&self.object));
        IoFuture::boxed(async move {
            let mut pauses = shared.pauses("reading an object");
            loop {
                match attempt.await {
                    (Err(error), buf) if pauses.may_pass(&error) => {
                        pauses.pause(&error).await;
                        attempt = object.read_at(buf, offset);
                    }
                    answer => return answer,
                }
            }
        })
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let first = self.object.read_end(buf);
        let (shared, object) = (Arc::clone(&self.shared), Arc::clone(&self.object));
        Box::pin(async move { shared.read_end(&*object, first).await })
    }
}

#[cfg(test)]
mod tests;
