//! What requests to an open volume share with the tasks that put its extents and heads.
//!
//! Lock order: what the volume is now, then the log. No lock is held across I/O.

use crate::boot::Boot;
use crate::build::Builder;
use crate::format::head::Head;
use crate::heads::{Heads, Owned};
use crate::keep::SnapshotPer;
use crate::known::Now;
use crate::labels::Labels;
use crate::log::Log;
use crate::meter::Meter;
use crate::place::{BLOCK_BYTES, Writer};
use crate::plans::Plans;
use crate::put::Patience;
use crate::reader::{View, blocks_of, check_range};
use crate::stage::Failed;
use crate::state::State;
use crate::tree::Tree;
use mica_block::{Error, ErrorKind, Requests, Result};
use mica_rt::sync::{SharedLock, Signal, Waiters};
use mica_rt::{now, timeout};
use mica_units::GuestRange;
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Bytes of the log that a sync would write: below, a flush does not look for anything better.
const NEARER_BYTES_MIN: u64 = 64 << 20;
/// How long a flush waits for a store that seemed to be nearer than the log.
const NEARER_LIMIT: Duration = Duration::from_millis(500);
/// Views of one read at most, each of another state: what is missing from all of them is lost.
const VIEWS_MAX: usize = 8;

/// See the module.
pub(crate) struct Shared {
    /// For requests of the guest.
    pub(crate) tree: Arc<Tree>,
    pub(crate) heads: Heads,
    /// Who writes it; nobody if it is only read.
    pub(crate) writer: Option<Putter>,
    now: Mutex<Now>,
    /// Woken when what the volume is now has changed in a way that somebody may wait for.
    pub(crate) progress: Waiters,
    /// Raised when nothing is put any more: closed or latched.
    pub(crate) over: Signal,
    /// Raised when the store is not waited for any more.
    pub(crate) given_up: Signal,
    pub(crate) requests: Arc<Requests>,
    /// Held from the look whether a label is free until a snapshot has it.
    pub(crate) naming: SharedLock,
    /// The labels that there are, once somebody asked: for whoever holds `naming`.
    pub(crate) labels: Mutex<Option<Labels>>,
    pub(crate) plans: Plans,
    /// What is recorded and fetched ahead for boots, if anything is.
    pub(crate) boot: Option<Arc<Boot>>,
    /// The snapshot that is read, as it was named, if it is one.
    pub(crate) snapshot: OnceLock<String>,
}

/// What the answer to a flush promises.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// It is in the log on this machine: a power cut does not lose it, the loss of the machine
    /// does. Needs a log.
    Host,
    /// It is in the store.
    Store,
}

/// What puts extents and heads.
pub(crate) struct Putter {
    pub(crate) writer: Writer,
    pub(crate) durability: Durability,
    /// After what of its guest a snapshot is taken.
    pub(crate) snapshot_per: SnapshotPer,
    pub(crate) log: Option<Log>,
    /// Whether the last flush left the log alone because the store was nearer.
    pub(crate) was_store_nearer: AtomicBool,
    /// What was lost when the volume was opened, in words.
    pub(crate) loss: Option<String>,
    /// See [`Putter::tree`].
    pub(crate) tree: Mutex<Arc<Tree>>,
    /// Absent while an extent is made.
    pub(crate) builder: Mutex<Option<Builder>>,
    pub(crate) owned: Mutex<Owned>,
    /// The head that ends the writer's time, once it is decided: no other is put then.
    pub(crate) last_head: Mutex<Option<LastHead>>,
    pub(crate) trouble: Mutex<Option<Trouble>>,
    pub(crate) counts: Counts,
}

impl Putter {
    /// What extents are made with, and how patiently they are put. Not what guests read with: they
    /// are given up for themselves.
    pub(crate) fn tree(&self) -> Arc<Tree> {
        Arc::clone(&self.tree.lock())
    }
}

/// The head that ends a writer's time.
#[derive(Clone)]
pub(crate) struct LastHead {
    pub(crate) head: Head,
    /// Whether it is in the store. The log may be left to end then.
    pub(crate) is_put: bool,
}

/// Since when the store has not answered puts, in nanoseconds since 1970, and why.
pub(crate) struct Trouble {
    pub(crate) since_ns: u64,
    pub(crate) error: Error,
}

/// What writing has cost.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) extents: AtomicU64,
    pub(crate) heads: AtomicU64,
    pub(crate) metadata_bytes: AtomicU64,
    pub(crate) blocks: AtomicU64,
    pub(crate) extent_bytes: AtomicU64,
    /// Of extents, until the store answered.
    pub(crate) puts: Meter,
    pub(crate) put_failures: AtomicU64,
    /// Of the log, for flushes.
    pub(crate) syncs: Meter,
    /// Changes that waited for the log or the store.
    pub(crate) throttled: AtomicU64,
    /// Records below are in the last automatic snapshot.
    pub(crate) snapshot_records: AtomicU64,
    /// The number of the first record that was made since the volume was opened.
    pub(crate) first_record: AtomicU64,
}

impl Shared {
    pub(crate) fn new(
        tree: Arc<Tree>,
        heads: Heads,
        writer: Option<Putter>,
        state: State,
        boot: Option<Arc<Boot>>,
    ) -> Arc<Self> {
        let tree = boot.as_ref().map_or_else(|| Arc::clone(&tree), |boot| boot.for_guests(&tree));
        let (progress, over, requests) = (Waiters::default(), Signal::default(), Arc::default());
        let given_up = Signal::default();
        let (now, naming) = (Mutex::new(Now::new(state)), SharedLock::default());
        let (plans, labels) = (Plans::default(), Mutex::default());
        Arc::new(Self {
            tree,
            heads,
            writer,
            now,
            progress,
            over,
            given_up,
            requests,
            naming,
            labels,
            plans,
            boot,
            snapshot: OnceLock::new(),
        })
    }

    pub(crate) fn now(&self) -> MutexGuard<'_, Now> {
        // No code that may panic runs while it is half changed.
        self.now.lock()
    }

    pub(crate) fn len(&self) -> u64 {
        self.now().len
    }

    pub(crate) fn view(&self, range: GuestRange) -> View {
        View::new(&self.now(), blocks_of(range))
    }

    /// As [`Self::view`], of a range that may be beyond the end.
    ///
    /// # Errors
    /// `Invalid` if it is; `Denied` if the volume is another writer's by now: what is here is old.
    pub(crate) fn checked_view(&self, range: GuestRange) -> Result<View> {
        let now = self.now();
        if let Some(why) = now.stage.fence() {
            return Err(why.clone());
        }
        check_range(range, now.len)?;
        Ok(View::new(&now, blocks_of(range)))
    }

    pub(crate) fn log(&self) -> Option<&Log> {
        self.writer.as_ref()?.log.as_ref()
    }

    /// Who writes the volume, unless it is latched.
    pub(crate) fn putter(&self) -> Result<&Putter> {
        let putter = self.writer.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Denied, "the volume was opened for reading only")
        })?;
        self.latch().map_or(Ok(putter), Err)
    }

    pub(crate) fn latch(&self) -> Option<Error> {
        self.now().stage.failure().cloned()
    }

    /// Nothing is acknowledged any more. Returns why: the first reason stays.
    pub(crate) fn latch_with(&self, error: Error) -> Error {
        self.fail(error, Failed::Latched)
    }

    /// The same: others have the volume.
    pub(crate) async fn fence(&self, putter: &Putter) -> Error {
        self.fail(self.heads.lost(putter.writer).await, Failed::Fenced)
    }

    fn fail(&self, error: Error, how: Failed) -> Error {
        let (latch, is_first, unstored) = {
            let mut now = self.now();
            let is_first = now.stage.fail(error.clone(), how);
            let unstored = now.records - now.state.records;
            (now.stage.failure().cloned().unwrap_or(error), is_first, unstored)
        };
        let is_verb = |putter: &Putter| putter.tree().patience() != Patience::Endless;
        // Whoever waits for a verb is told at its end.
        if is_first && !self.writer.as_ref().is_some_and(is_verb) {
            let error = latch.in_one_line();
            tracing::error!(
                volume = self.heads.name.as_str(),
                error,
                unstored,
                "the volume takes no more writes; its last writes are not in the store"
            );
        }
        self.over.raise();
        self.progress.wake_all();
        latch
    }

    /// Does `act`, which takes a view of what the volume is now, reads, and says which generation
    /// it read. It does so again if something is missing and the volume is another by now: what
    /// only the older one named may have been collected, once a head had the newer one.
    ///
    /// # Errors
    /// As `act`; `Denied` if others have the volume.
    pub(crate) async fn reading<T>(
        &self,
        mut act: impl AsyncFnMut() -> (u64, Result<T>),
    ) -> Result<T> {
        let mut views = 0;
        loop {
            let (generation, outcome) = act().await;
            views += 1;
            let is_corrupt = outcome.as_ref().is_err_and(|e| e.kind() == ErrorKind::Corrupt);
            if !is_corrupt || views == VIEWS_MAX || self.now().generation == generation {
                return self.explained(outcome).await;
            }
        }
    }

    /// As `tree`, for what must come to an end though guests have all the time of the world.
    pub(crate) fn tree_for_verbs(&self) -> Arc<Tree> {
        self.tree.with_patience(Patience::VERB)
    }

    /// What a failed read means: what is missing may have been taken away by those who have the
    /// volume now.
    pub(crate) async fn explained<T>(&self, outcome: Result<T>) -> Result<T> {
        let (Err(error), Some(putter)) = (&outcome, &self.writer) else { return outcome };
        if error.kind() != ErrorKind::Corrupt {
            return outcome;
        }
        let is_taken = match self.heads.newest().await {
            Ok(head) => head.writer() != Some(putter.writer),
            Err(error) => error.kind() == ErrorKind::NotFound,
        };
        if !is_taken {
            return outcome;
        }
        Err(self.fence(putter).await)
    }

    /// Sets whether the volume is about to leave this host: then little waits for the store.
    pub(crate) fn set_handover_expected(&self, is_leaving: bool) {
        self.now().stage.expect_handover(is_leaving);
        // There may be room again, or an extent to make.
        self.progress.wake_all();
    }

    /// Puts everything that was acknowledged so far into the store.
    pub(crate) async fn destage_all(self: &Arc<Self>) -> Result<()> {
        self.putter()?;
        let records = {
            let mut now = self.now();
            now.want();
            now.records
        };
        self.drive();
        let is_stored = || {
            let now = self.now();
            let is_stored = now.state.records >= records;
            let failure = now.stage.failure().cloned().map(Err);
            failure.or(is_stored.then_some(Ok(())))
        };
        self.progress.until(is_stored).await
    }

    /// Whether what is not in the store yet is much less than what a sync of the log would write:
    /// most of that was put since, and the device has better to do.
    fn is_store_nearer(&self, putter: &Putter, log: &Log) -> bool {
        let unsynced = log.unsynced();
        if unsynced < NEARER_BYTES_MIN || putter.trouble.lock().is_some() {
            return false;
        }
        let now = self.now();
        let left = (now.records - now.state.records).saturating_mul(BLOCK_BYTES as u64);
        left <= unsynced / 2
    }

    /// As [`Self::destage_all`] if that is nearer than the log's device; `None` if not, or if it
    /// takes too long nevertheless. The second time in a row the log is synced, too, beside that:
    /// what comes next may be small.
    async fn store_if_nearer(self: &Arc<Self>, putter: &Putter, log: &Log) -> Option<Result<()>> {
        let is_nearer = self.is_store_nearer(putter, log);
        let was_nearer = putter.was_store_nearer.swap(is_nearer, Ordering::Relaxed);
        if !is_nearer {
            return None;
        }
        if was_nearer {
            log.sync_in_background();
        }
        timeout(NEARER_LIMIT, self.destage_all()).await.ok()
    }

    /// Everything that was done until now is as durable as was promised when this returns.
    pub(crate) async fn flush(self: &Arc<Self>) -> Result<()> {
        let putter = self.putter()?;
        match (putter.durability, &putter.log) {
            (Durability::Host, Some(log)) => {
                if let Some(stored) = self.store_if_nearer(putter, log).await {
                    return stored;
                }
                let start = now();
                log.sync().await.map_err(|error| self.latch_with(error))?;
                putter.counts.syncs.note(now().saturating_since(start));
                self.latch().map_or(Ok(()), Err)
            }
            (Durability::Host | Durability::Store, _) => self.destage_all().await,
        }
    }
}
