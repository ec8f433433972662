//! Listing a folder.
//!
//! RADOS lists names only, and what it lists may not be durable yet. So each object is asked for
//! its length, which waits until it is; and each folder for an object in it, because its marker
//! stays when it is empty. A folder costs [`BUCKETS`] requests, and one for each entry.
//!
//! Whoever lists a folder of many pages asks for the next one by the last name. The few walks that
//! were last used go on from there; any other has to begin again.
//!
//! [`BUCKETS`]: crate::layout::BUCKETS

use crate::ffi::{Context, Cursor, Errno};
use crate::layout::{Found, LAYOUT_NAME, hash_of, locator};
use crate::outcome::error_of;
use crate::pool::Shared;
use crate::threads::Threads;
use crate::walk::Walk;
use futures_channel::oneshot;
use mica_block::{Entry, ErrorKind, LIST_MAX, LocalFuture, ObjectName, Result};
use mica_rt::join_all;
use std::collections::VecDeque;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Threads that wait for listings.
const THREADS: usize = 4;
/// Walks that may go on, at most.
const WALKS_MAX: usize = 8;
/// Entries that are looked at at a time: less than all requests, so that others get through.
const LOOKED_AT: usize = 32;

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
        self.walks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A walk through what `folder` has after `after`.
    fn walk(
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
    fn keep(&self, mut walk: Walk) {
        walk.pause();
        let mut walks = self.walks();
        if walks.len() >= WALKS_MAX {
            walks.pop_front();
        }
        walks.push_back(walk);
    }
}

type Step = std::result::Result<Vec<Found>, Errno>;

impl Shared {
    pub(crate) async fn list(
        self: &Arc<Self>,
        folder: Option<ObjectName>,
        after: Option<ObjectName>,
    ) -> Result<Vec<Entry>> {
        let failed = |errno| self.listing_failed(errno);
        if !self.check_layout().await? {
            return Ok(Vec::new());
        }
        let mut walk = self.lists.walk(folder.as_ref(), after.as_ref()).map_err(failed)?;
        // Most folders are read completely by this.
        let groups = walk.split(THREADS).into_iter().map(|mut group| {
            self.lists.wait(move || {
                let filled = group.fill();
                (group, filled)
            })
        });
        for (group, filled) in join_all(groups).await {
            walk.join(group);
            filled.map_err(failed)?;
        }
        let mut entries = Vec::new();
        while entries.len() < LIST_MAX {
            let wanted = LIST_MAX - entries.len();
            let (walked, names) = self.step(walk, move |walk| walk.next(wanted)).await;
            walk = walked;
            let names = names.map_err(failed)?;
            for some in names.chunks(LOOKED_AT) {
                for entry in join_all(some.iter().map(|found| self.look_at(found))).await {
                    entries.extend(entry?);
                }
            }
            if names.len() < wanted {
                return Ok(entries);
            }
        }
        self.lists.keep(walk);
        Ok(entries)
    }

    /// Takes `walk` a step further, on a thread that waits.
    async fn step(
        &self,
        mut walk: Walk,
        step: impl FnOnce(&mut Walk) -> Step + Send + 'static,
    ) -> (Walk, Step) {
        let walking = self.lists.wait(move || {
            let names = step(&mut walk);
            (walk, names)
        });
        walking.await
    }

    /// The entry for what was found, if it is there.
    async fn look_at(self: &Arc<Self>, found: &Found) -> Result<Option<Entry>> {
        match found {
            Found::Object(name) => match self.len(name).await {
                Ok(len) => Ok(Some(Entry::Object { name: name.clone(), len })),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
            Found::Folder(name) => {
                let has_any = self.has_any(name.clone()).await?;
                Ok(has_any.then(|| Entry::Folder(name.clone())))
            }
        }
    }

    /// Whether there is an object in `folder`, or in a folder of it.
    fn has_any(self: &Arc<Self>, folder: ObjectName) -> LocalFuture<'static, Result<bool>> {
        let shared = Arc::clone(self);
        Box::pin(async move {
            let failed = |errno| shared.listing_failed(errno);
            let Lists { context, namespace, .. } = &shared.lists;
            let mut walk = Walk::new(context, namespace, Some(folder), None).map_err(failed)?;
            loop {
                let (walked, names) = shared.step(walk, Walk::some).await;
                walk = walked;
                let names = names.map_err(failed)?;
                if names.is_empty() {
                    return Ok(false);
                }
                for found in names {
                    if shared.look_at(&found).await?.is_some() {
                        return Ok(true);
                    }
                }
            }
        })
    }

    fn listing_failed(&self, errno: Errno) -> mica_block::Error {
        error_of(&format!("listing objects of {}", self.name), errno)
    }

    /// Whether the object that says how the store is laid out is listed where it has to be.
    pub(crate) async fn lists_layout(&self) -> Result<bool> {
        let Lists { context, namespace, .. } = &self.lists;
        let (context, namespace) = (Arc::clone(context), Arc::clone(namespace));
        let looking = self.lists.wait(move || {
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
        looking.await.map_err(|errno| self.listing_failed(errno))
    }
}
