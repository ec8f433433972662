//! A pool whose client is made again when the cluster has blocklisted it.
//!
//! Whoever takes a volume over by force blocklists the client of its old writer: what that one sent
//! before arrives no more. But a process has one client for all of its volumes in a store, and the
//! others are still its own. So it connects again, under another address. Whose a volume is, is
//! decided by heads and fences, whatever a client is called.
//!
//! Invariants
//! - R1 Whatever was asked of the old client, and is refused because that is blocklisted, ends with
//!   an error of kind `Io`: it may have been done, and is to be tried again. What was sent and not
//!   answered is never sent again by itself.
//! - R2 One client is made at a time, and no more often than [`PAUSE`]. Whoever waits for one that
//!   is being made has the outcome of that, whatever it is, and makes no other.

use crate::pool::{Pool, PoolOptions};
use crate::threads::Threads;
use futures_channel::oneshot;
use mica_block::{
    EndFuture, Entry, Error, ErrorKind, IoFuture, LocalFuture, Object, ObjectName, Objects, Put,
    PutFuture, Result,
};
use mica_rt::sync::SharedLock;
use mica_rt::{Buf, now, sleep};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Between two clients.
const PAUSE: Duration = Duration::from_secs(1);

/// See the module.
pub struct ReconnectingPool {
    inner: Arc<Inner>,
}

struct Inner {
    options: PoolOptions,
    current: Mutex<Arc<Pool>>,
    connecting: SharedLock,
    /// Attempts that have ended.
    attempts: AtomicU64,
    /// It connects: that waits for the monitors.
    thread: Threads,
}

impl ReconnectingPool {
    /// As [`Pool::open`].
    ///
    /// # Errors
    /// As [`Pool::open`].
    pub fn open(options: PoolOptions) -> Result<Self> {
        let current = Mutex::new(Arc::new(Pool::open(options.clone())?));
        let (connecting, thread) = (SharedLock::default(), Threads::start("mica-rados-new", 1)?);
        let attempts = AtomicU64::default();
        Ok(Self { inner: Arc::new(Inner { options, current, connecting, attempts, thread }) })
    }
}

impl Inner {
    fn current(&self) -> Arc<Pool> {
        Arc::clone(&self.current.lock())
    }

    /// What `outcome`, which `pool` gave, means: another client is made if that one is blocklisted.
    async fn explained<T>(&self, pool: &Arc<Pool>, outcome: Result<T>) -> Result<T> {
        let Err(error) = outcome else { return outcome };
        if error.kind() != ErrorKind::Denied || !pool.is_blocklisted() {
            return Err(error);
        }
        // R1.
        let again = Error::new(ErrorKind::Io, format!("{}: connecting again", error.in_one_line()));
        let attempts = self.attempts.load(Ordering::Relaxed);
        let _alone = self.connecting.alone().await;
        let is_tried = self.attempts.load(Ordering::Relaxed) != attempts;
        // R2.
        if is_tried || !Arc::ptr_eq(&self.current(), pool) {
            return Err(again);
        }
        let begun = now();
        let (options, (answer, answered)) = (self.options.clone(), oneshot::channel());
        self.thread.run(move || {
            // Perhaps nobody waits any more.
            let _ = answer.send(Pool::open(options));
        });
        let opened = answered.await.expect("connecting panicked");
        self.attempts.fetch_add(1, Ordering::Relaxed);
        let pause = PAUSE.saturating_sub(now().saturating_since(begun));
        match opened {
            Ok(new) => {
                let new = Arc::new(new);
                tracing::warn!(
                    store = new.name(),
                    "the cluster has blocklisted this client, as is done when another host takes a \
                     volume over: connected again"
                );
                *self.current.lock() = new;
            }
            Err(error) => {
                let error = error.in_one_line();
                tracing::warn!(error, "connecting again after being blocklisted failed");
            }
        }
        sleep(pause).await;
        Err(again)
    }
}

impl Objects for ReconnectingPool {
    fn name(&self) -> String {
        self.inner.current().name()
    }

    fn is_far(&self) -> bool {
        true
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        Arc::new(PoolObject { inner: Arc::clone(&self.inner), name: name.clone() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let putting = pool.put_if_absent(name, content);
        Box::pin(async move {
            let (result, content): (Result<Put>, Buf) = putting.await;
            (inner.explained(&pool, result).await, content)
        })
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let listing = pool.list(folder, after);
        Box::pin(async move { inner.explained(&pool, listing.await).await })
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let deleting = pool.delete(name);
        Box::pin(async move { inner.explained(&pool, deleting.await).await })
    }

    fn client(&self) -> Option<String> {
        self.inner.current().client()
    }

    fn shut_out(&self, client: &str) -> LocalFuture<'static, Result<()>> {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let shutting = pool.shut_out(client);
        Box::pin(async move { inner.explained(&pool, shutting.await).await })
    }
}

struct PoolObject {
    inner: Arc<Inner>,
    name: ObjectName,
}

impl Object for PoolObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let reading = pool.open(&self.name).read_at(buf, offset);
        IoFuture::boxed(async move {
            let (result, buf) = reading.await;
            (inner.explained(&pool, result).await, buf)
        })
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        let (inner, pool) = (Arc::clone(&self.inner), self.inner.current());
        let reading = pool.open(&self.name).read_end(buf);
        Box::pin(async move {
            let (result, buf) = reading.await;
            (inner.explained(&pool, result).await, buf)
        })
    }
}
