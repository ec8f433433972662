//! Keeps the sidecars of chains up to date, on threads that exist only while something is built.
//!
//! Invariants
//! - I1 At most [`THREADS_MAX`] threads build. A chain on storage that hangs may hold one of them
//!   up for as long as that lasts: whoever stops another chain does not wait for it.
//! - I2 Once a chain is stopped, nothing here touches it.
//! - I3 A chain is built by one thread at a time. If it is called for meanwhile, it is built again.
//! - I4 Of chains with one base only one is built at a time: they share layers, and would write the
//!   same sidecars. The others find these when it is their turn.

use mica_block::{ErrorKind, Manage, ManageIndex, StoreIdentity};
use mica_rt::{Backend, Executor, Handle};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Chains that are built at the same time. Each reads in sequence, one read at a time.
const THREADS_MAX: usize = 4;

/// Builds the indexes of all chains of a process.
#[derive(Default)]
pub(crate) struct Indexers {
    state: Mutex<State>,
    /// A chain is no longer being built.
    built: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Arc<Chain>>,
    building: Vec<Building>,
    threads: usize,
}

struct Building {
    chain: Arc<Chain>,
    /// Whether it was called for since.
    is_called: bool,
}

struct Chain {
    disk: Arc<dyn Manage>,
    is_stopping: AtomicBool,
    /// Whether its sidecars cannot be written.
    is_given_up: AtomicBool,
}

/// A chain whose index is kept.
pub(crate) struct Indexed {
    chain: Arc<Chain>,
    indexers: Arc<Indexers>,
}

impl Indexed {
    /// Builds what is missing, and again whenever it is called for, which a task on `worker` waits
    /// for. `None` if the disk has no index.
    pub(crate) fn start(
        disk: Arc<dyn Manage>,
        indexers: &Arc<Indexers>,
        worker: &Handle,
    ) -> Option<Self> {
        let frozen = disk.layer_count().saturating_sub(1);
        let is_complete = disk.index()?.covered_layers() >= frozen;
        let (is_stopping, is_given_up) = (AtomicBool::new(false), AtomicBool::new(false));
        let chain = Arc::new(Chain { disk, is_stopping, is_given_up });
        let (watched, builders) = (Arc::clone(&chain), Arc::clone(indexers));
        worker.spawn_with(move || async move {
            let Some(index) = watched.disk.index() else { return };
            loop {
                // For a damaged sidecar, or for the end.
                index.called().await;
                if watched.is_stopping() {
                    return;
                }
                builders.add(&watched);
            }
        });
        if !is_complete {
            indexers.add(&chain);
        }
        Some(Self { chain, indexers: Arc::clone(indexers) })
    }

    /// Stops after the layer that is being indexed.
    pub(crate) fn stop(self) {
        let Self { chain, indexers } = self;
        chain.is_stopping.store(true, Ordering::Release);
        if let Some(index) = chain.disk.index() {
            index.call();
        }
        let mut state = indexers.lock();
        state.waiting.retain(|waiting| !Arc::ptr_eq(waiting, &chain));
        let is_building = |state: &mut State| state.position(&chain).is_some();
        indexers.built.wait_while(&mut state, is_building);
    }
}

impl Indexers {
    /// Has `chain` built, unless that is already to happen.
    fn add(self: &Arc<Self>, chain: &Arc<Chain>) {
        let mut state = self.lock();
        if chain.is_stopping() || chain.is_given_up.load(Ordering::Relaxed) {
            return;
        }
        if let Some(position) = state.position(chain) {
            state.building[position].is_called = true;
            return;
        }
        if !state.waiting.iter().any(|waiting| Arc::ptr_eq(waiting, chain)) {
            state.waiting.push_back(Arc::clone(chain));
        }
        if state.threads == THREADS_MAX {
            return;
        }
        state.threads += 1;
        drop(state);
        let this = Arc::clone(self);
        let thread = std::thread::Builder::new().name("mica-index".to_owned());
        if let Err(error) = thread.spawn(move || this.work()) {
            let mut state = self.lock();
            state.threads -= 1;
            if state.threads == 0 {
                tracing::warn!(%error, "no thread to write indexes: they wait for the next one");
            }
        }
    }

    /// Builds what waits, until nothing does.
    fn work(&self) {
        // It does large sequential reads, one at a time: plain threads serve that as well as a ring
        // does and leave the guests' rings alone.
        let mut executor = None;
        while let Some(chain) = self.next() {
            let built = catch_unwind(AssertUnwindSafe(|| {
                let executor = match &executor {
                    Some(executor) => executor,
                    None => executor.insert(Executor::new(Backend::Pool)?),
                };
                if let Some(index) = chain.disk.index() {
                    executor.block_on(chain.build(index));
                }
                std::io::Result::Ok(())
            }));
            match built {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "no index will be written");
                    chain.is_given_up.store(true, Ordering::Relaxed);
                }
                Err(_) => {
                    tracing::warn!("the index thread panicked");
                    executor = None;
                    chain.is_given_up.store(true, Ordering::Relaxed);
                }
            }
            self.end(&chain);
        }
    }

    /// The next chain to build; if there is none, the thread that asks has to end.
    fn next(&self) -> Option<Arc<Chain>> {
        let mut state = self.lock();
        let State { waiting, building, .. } = &*state;
        let is_free = |chain: &Arc<Chain>| {
            building.iter().all(|building| building.chain.base() != chain.base())
        };
        // Whoever builds the base of one that is not free takes that next.
        let next = waiting.iter().position(is_free);
        let Some(chain) = next.and_then(|position| state.waiting.remove(position)) else {
            state.threads -= 1;
            return None;
        };
        state.building.push(Building { chain: Arc::clone(&chain), is_called: false });
        Some(chain)
    }

    fn end(&self, chain: &Arc<Chain>) {
        let mut state = self.lock();
        if let Some(position) = state.position(chain) {
            let Building { is_called, .. } = state.building.swap_remove(position);
            if is_called && !chain.is_stopping() && !chain.is_given_up.load(Ordering::Relaxed) {
                state.waiting.push_back(Arc::clone(chain));
            }
        }
        self.built.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

impl State {
    /// Where `chain` is among those that are being built.
    fn position(&self, chain: &Arc<Chain>) -> Option<usize> {
        self.building.iter().position(|building| Arc::ptr_eq(&building.chain, chain))
    }
}

impl Chain {
    fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    fn base(&self) -> Option<StoreIdentity> {
        self.disk.index().map(|index| index.base())
    }

    async fn build(&self, index: &dyn ManageIndex) {
        let mut go_on = |_| match self.is_stopping() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match index.build(&mut go_on).await {
            Ok(0) => {}
            Ok(built) => tracing::info!(built, "the index was written"),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                tracing::warn!(%error, "the index is incomplete");
            }
            Err(error) => {
                tracing::warn!(
                    "the index cannot be written, so each start walks the chain: {error:?}; \
                     --index-dir puts it elsewhere"
                );
                self.is_given_up.store(true, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests;
