//! What listings are made with: threads that wait, and walks that go on.
//!
//! Whoever lists a folder of many pages asks for the next one by the last name. The few walks that
//! were last used go on from there; any other has to begin again.

use crate::ffi::{Context, Cursor, Errno};
use crate::layout::{LAYOUT_NAME, hash_of, locator};
use crate::threads::Threads;
use crate::walk::Walk;
use futures_channel::oneshot;
use mica_block::{LIST_MAX, ObjectName, Result};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

/// Threads that wait for listings.
pub(crate) const THREADS: usize = 4;
/// Walks that may go on, at most.
const WALKS_MAX: usize = 8;

/// What is needed for listing.
pub(crate) struct Lists {
    context: Arc<Context>,
    namespace: Arc<str>,
    threads: Threads,
    /// The last used is the last.
    walks: Mutex<VecDeque<Walk>>,
}

impl Lists {
    pub(crate) fn new(context: Context, namespace: String) -> Result<Self> {
        let threads = Threads::start("mica-rados-list", THREADS)?;
        let (context, namespace) = (Arc::new(context), namespace.into());
        Ok(Self { context, namespace, threads, walks: Mutex::default() })
    }

    /// Calls `act` on a thread that may wait for the cluster.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        act: impl FnOnce() -> T + Send + 'static,
    ) -> impl Future<Output = T> + 'static {
        let (answer, answered) = oneshot::channel();
        self.threads.run(move || {
            // Perhaps nobody waits any more.
            let _ = answer.send(act());
        });
        async move { answered.await.expect("a listing panicked") }
    }

    fn walks(&self) -> MutexGuard<'_, VecDeque<Walk>> {
        self.walks.lock()
    }

    /// A walk through what `folder` has after `after`.
    pub(crate) fn walk(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> std::result::Result<Walk, Errno> {
        let mut walks = self.walks();
        if let Some(at) = walks.iter().position(|walk| walk.is_at(folder, after)) {
            return Ok(walks.remove(at).expect("it is there"));
        }
        drop(walks);
        Walk::new(&self.context, &self.namespace, folder.cloned(), after.cloned())
    }

    /// Keeps a walk that may be gone on with.
    pub(crate) fn keep(&self, mut walk: Walk) {
        walk.pause();
        let mut walks = self.walks();
        if walks.len() >= WALKS_MAX {
            walks.pop_front();
        }
        walks.push_back(walk);
    }

    /// Whether the object that says how the store is laid out is listed where it has to be.
    pub(crate) async fn has_layout(&self) -> std::result::Result<bool, Errno> {
        let (context, namespace) = (Arc::clone(&self.context), Arc::clone(&self.namespace));
        let looking = self.wait(move || {
            let hash = hash_of(&namespace, &locator(None, 0));
            let (mut from, end) = Cursor::range(&context, hash)?;
            loop {
                let (listed, next) = from.list(&end, LIST_MAX)?;
                if listed.iter().any(|listed| listed.name == LAYOUT_NAME.as_bytes()) {
                    return Ok(true);
                }
                let Some(next) = next else { return Ok(false) };
                from = next;
            }
        });
        looking.await
    }
}
