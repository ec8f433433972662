//! Whether stores keep their promises, which is found out once in the life of a process: by a
//! probe, which waits for eight answers in sequence, and puts and deletes some dozens of objects.
//!
//! Invariants
//! - I1 Nothing is put, deleted or given back before a probe was passed: that is asked for by the
//!   first such request to a [`PromisedObjects`], and by nobody else. So who only reads, or is
//!   refused for what is read first, probes nothing.

use super::faults::StoreFaults;
use super::url::StoreUrl;
use mica_block::{
    Entry, LocalFuture, Object, ObjectName, Objects, PutFuture, PutPartsFuture, Result,
};
use mica_rt::sync::SharedLock;
use mica_rt::{Buf, Parts};
use mica_store::object::{RetryObjects, RetryOptions, probe};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Attempts of a request of a probe: some seconds.
const PROBE_TRIES_MAX: u32 = 7;
/// Stores that were probed and that nobody uses any more, at most: then each is probed again.
const UNUSED_MAX: usize = 1024;

/// What is known of the promises of one store.
#[derive(Default)]
pub(super) struct Promises {
    /// Held by whoever probes it.
    probing: SharedLock,
    are_kept: AtomicBool,
}

/// By where a store is, and how it misbehaves.
type Named = (StoreUrl, StoreFaults);

/// Those of the stores of a process, also of such as are closed and opened again.
#[derive(Default)]
pub(super) struct AllPromises(Mutex<BTreeMap<Named, Arc<Promises>>>);

/// Random numbers for a probe: one that no other has, and one for its pauses.
type Numbers = fn() -> Result<[u64; 2]>;

impl Promises {
    /// Whether a probe was passed.
    pub(super) fn are_kept(&self) -> bool {
        self.are_kept.load(Ordering::Acquire)
    }

    /// Probes `objects`, unless that was done.
    ///
    /// # Errors
    /// `Unsupported` if a promise is broken; otherwise what the store reports.
    async fn check(&self, objects: &Arc<dyn Objects>, numbers: Numbers) -> Result<()> {
        let _alone = self.probing.alone().await;
        if self.are_kept() {
            return Ok(());
        }
        let [nonce, seed] = numbers()?;
        let options = RetryOptions { tries_max: Some(PROBE_TRIES_MAX), ..RetryOptions::new(seed) };
        probe(&RetryObjects::new(Arc::clone(objects), options), nonce).await?;
        self.are_kept.store(true, Ordering::Release);
        Ok(())
    }
}

impl AllPromises {
    pub(super) fn of(&self, named: &Named) -> Arc<Promises> {
        let mut all = self.0.lock();
        if let Some(known) = all.get(named) {
            return Arc::clone(known);
        }
        if all.len() >= UNUSED_MAX {
            all.retain(|_, promises| Arc::strong_count(promises) > 1);
        }
        Arc::clone(all.entry(named.clone()).or_default())
    }
}

/// A store whose promises are known to be kept before anybody relies on them (I1). A request that
/// has to wait for that does not begin before it is awaited.
#[derive(Clone)]
pub(super) struct PromisedObjects {
    inner: Arc<dyn Objects>,
    promises: Arc<Promises>,
    numbers: Numbers,
}

impl PromisedObjects {
    pub(super) fn new(inner: Arc<dyn Objects>, promises: Arc<Promises>, numbers: Numbers) -> Self {
        Self { inner, promises, numbers }
    }

    fn put(
        &self,
        name: &ObjectName,
        content: Buf,
        put: fn(&dyn Objects, &ObjectName, Buf) -> PutFuture,
    ) -> PutFuture {
        if self.promises.are_kept() {
            return put(&*self.inner, name, content);
        }
        let (this, name) = (self.clone(), name.clone());
        Box::pin(async move {
            match this.promises.check(&this.inner, this.numbers).await {
                Ok(()) => put(&*this.inner, &name, content).await,
                Err(error) => (Err(error), content),
            }
        })
    }

    fn once_kept<T: 'static>(
        &self,
        request: impl FnOnce(&dyn Objects) -> LocalFuture<'static, Result<T>> + 'static,
    ) -> LocalFuture<'static, Result<T>> {
        if self.promises.are_kept() {
            return request(&*self.inner);
        }
        let this = self.clone();
        Box::pin(async move {
            this.promises.check(&this.inner, this.numbers).await?;
            request(&*this.inner).await
        })
    }
}

impl Objects for PromisedObjects {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        self.inner.open(name)
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.put(name, content, |inner, name, content| inner.put_if_absent(name, content))
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        if self.promises.are_kept() {
            return self.inner.put_parts(name, content);
        }
        // Whether the store takes parts is known only by beginning a put: the first goes in one.
        None
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        self.put(name, content, |inner, name, content| inner.put_early(name, content))
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.inner.list(folder, after)
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        self.inner.list_all(folder, after)
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let name = name.clone();
        self.once_kept(move |inner| inner.delete(&name))
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        // Without ranges it is only asked whether the store can.
        if ranges.is_empty() {
            return self.inner.punch(name, ranges);
        }
        let (name, ranges) = (name.clone(), ranges.to_vec());
        self.once_kept(move |inner| inner.punch(&name, &ranges))
    }

    fn give_up_reserve(&self) -> LocalFuture<'static, Result<bool>> {
        self.inner.give_up_reserve()
    }

    fn client(&self) -> Option<String> {
        self.inner.client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        self.inner.shut_out(client)
    }
}
