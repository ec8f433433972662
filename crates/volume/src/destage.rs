//! Puts what was done into the store.
//!
//! ```text
//! drive ─▶ make an extent ─▶ put it, with up to three others ─▶ answered ─▶ the next state
//!   ▲                                                              │ ├─▶ the log is freed
//!   └──────────────────────────────────────────────────────────────┘ └─▶ a checkpoint, if due
//! ```
//!
//! Invariants
//! - I1 One task at a time makes extents ([`Now::is_driven`](crate::known::Now)), whoever waits for
//!   them. It ends when there is nothing to make, or enough is under way. Of a long stream it runs
//!   where the volume is tended, so that the guest's executor has its processor for the guest; but
//!   of one volume only, as all are tended on one thread.
//! - I2 An extent is put, with the same bytes, until the store answers. Guests wait meanwhile, and
//!   see no error. (Where a verb is the only guest, or the volume is just being opened, whoever
//!   waits is told in the end: the volume is latched.)
//! - I3 A refused put means that the writer was fenced: the volume is latched. So it is if one of
//!   these tasks ends early.
//! - I4 The log is freed up to a state when that is the state of the volume: its extent and all
//!   before it are answered.

use crate::build::Built;
use crate::place::ExtentId;
use crate::put::{Content, Putting, Tries};
use crate::segment::Segment;
use crate::shared::{Putter, Shared, Trouble};
use mica_block::{Error, ErrorKind, ObjectName, Put, Result};
use mica_rt::{Handle, Parts, now, sleep, spawn, timeout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How old what waits becomes before it is put, while somebody tends the volume.
const AGE_MAX: Duration = Duration::from_secs(1);
/// The same for changes of snapshots: those of a moment are put together.
const CUT_AGE_MAX: Duration = Duration::from_millis(200);

/// Whether the extents of a volume are made where volumes are tended, apart from their guests.
static IS_APART: AtomicBool = AtomicBool::new(false);

/// The right to make extents where volumes are tended, until it is dropped.
struct Apart;

impl Apart {
    fn take() -> Option<Self> {
        (!IS_APART.swap(true, Ordering::Relaxed)).then_some(Self)
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        IS_APART.store(false, Ordering::Relaxed);
    }
}

/// Until it is dropped, the caller's executor tends the volume.
struct Tended<'a>(&'a Shared);

impl<'a> Tended<'a> {
    fn new(shared: &'a Shared) -> Self {
        shared.now().tender = Some(Handle::current());
        Self(shared)
    }
}

impl Drop for Tended<'_> {
    fn drop(&mut self) {
        self.0.now().tender = None;
    }
}

/// Latches the volume if a task ends before it has done what must not be left half done (I3).
#[must_use]
pub(crate) struct CompletionGuard {
    pub(crate) shared: Arc<Shared>,
    is_done: bool,
}

impl CompletionGuard {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: Arc::clone(shared), is_done: false }
    }

    pub(crate) fn done(mut self) {
        self.is_done = true;
    }
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if !self.is_done {
            let what = "the thread that put the volume's extents has ended";
            self.shared.latch_with(Error::new(ErrorKind::Io, what));
        }
    }
}

impl Shared {
    /// Sees to it that extents are made if there is something to make.
    pub(crate) fn drive(self: &Arc<Self>) {
        if self.writer.is_none() {
            return;
        }
        let other = {
            let mut now = self.now();
            if now.is_driven || now.stage.failure().is_some() || !now.has_work() {
                return;
            }
            now.is_driven = true;
            now.other_maker()
        };
        let driver = CompletionGuard::new(self);
        let drive = || async move {
            let this = Arc::clone(&driver.shared);
            if let Err(error) = this.make_extents().await {
                this.latch_with(error);
            }
            driver.done();
        };
        match other.and_then(|other| Some((other, Apart::take()?))) {
            Some((other, apart)) => other.spawn_with(move || async move {
                drive().await;
                drop(apart);
            }),
            None => drop(spawn(async move { drive().await })),
        }
    }

    async fn make_extents(self: &Arc<Self>) -> Result<()> {
        let putter = self.putter()?;
        loop {
            let segments = {
                let mut now = self.now();
                let segments = match now.stage.failure() {
                    Some(_) => None,
                    None => now.take(&self.heads.environment),
                };
                now.is_driven = segments.is_some();
                segments
            };
            // A batch was sealed, so that there is room for the next one; or it is at rest.
            self.progress.wake_all();
            let Some(segments) = segments else { return Ok(()) };
            self.make_extent(putter, &segments).await?;
        }
    }

    async fn make_extent(self: &Arc<Self>, putter: &Putter, segments: &[Segment]) -> Result<()> {
        let sequence = self.now().next_sequence();
        let id = ExtentId { writer: putter.writer, sequence };
        if sequence == u32::MAX {
            let what = format!("writer {} has no extent numbers left", id.writer.number());
            return Err(Error::new(ErrorKind::Limit, what));
        }
        // One that fails is not put back: it has a part of the segments. Nothing is made then.
        let mut builder = putter.builder.lock().take().expect("one task makes extents (I1)");
        let nonce = self.heads.environment.random();
        let built = builder.build(&putter.tree(), id, segments, nonce).await;
        let built = self.explained(built).await?;
        let Built { state, content, blocks, data_len, nodes, nodes_at } = built;
        *putter.builder.lock() = Some(builder);
        self.tree.hold(id, nodes_at, nodes);
        self.now().begin(sequence, segments.len(), state);
        self.put_extent(id, (blocks as u64, data_len as u64), content);
        Ok(())
    }

    /// Puts an extent in a task of its own: with so many blocks, which take so many bytes.
    fn put_extent(self: &Arc<Self>, id: ExtentId, data: (u64, u64), content: Arc<Parts>) {
        let task = CompletionGuard::new(self);
        drop(spawn(async move {
            let this = Arc::clone(&task.shared);
            let (bytes, start) = (content.len() as u64, now());
            match this.put_until_answered(id.name(), content).await {
                Ok(()) => {
                    if let Some(putter) = &this.writer {
                        putter.counts.puts.note(now().saturating_since(start));
                    }
                    this.answered(id, data, bytes);
                }
                Err(error) => {
                    this.tree.release(id);
                    this.latch_with(error);
                }
            }
            task.done();
        }));
    }

    /// Puts an extent or a head of the writer.
    ///
    /// # Errors
    /// `Denied` if somebody else has the volume by now; why it is latched; what the store reports
    /// if nobody waits for it any longer.
    pub(crate) async fn put_until_answered(
        &self,
        name: ObjectName,
        content: impl Into<Content>,
    ) -> Result<()> {
        let putter = self.putter()?;
        let objects = &*self.heads.objects;
        let mut putting = Putting::new(name.clone(), content);
        let mut tries = Tries::new(putter.tree().patience());
        loop {
            let error = match putting.attempt(objects).await {
                Ok(Put::Done) => {
                    *putter.trouble.lock() = None;
                    return Ok(());
                }
                Ok(Put::Exists) => return Err(self.fence(putter).await),
                Err(error) => error,
            };
            self.note_trouble(putter, &error);
            self.putter()?;
            let pause = tries.pause(error, || format!("putting {name} into {}", objects.name()));
            self.given_up.unless_raised(pause).await.unwrap_or(Ok(()))?;
            // What is not sent when the volume is latched is not sent any more.
            self.putter()?;
        }
    }

    fn note_trouble(&self, putter: &Putter, error: &Error) {
        putter.counts.put_failures.fetch_add(1, Ordering::Relaxed);
        let mut trouble = putter.trouble.lock();
        if trouble.is_none() && putter.tree().patience().is_said(error) {
            let (store, error) = (self.heads.objects.name(), error.in_one_line());
            tracing::warn!(%store, error, "the store takes no writes: still trying");
        }
        let since_ns = trouble.as_ref().map(|trouble| trouble.since_ns);
        let since_ns = since_ns.unwrap_or_else(|| self.heads.environment.now_ns());
        *trouble = Some(Trouble { since_ns, error: error.clone() });
    }

    fn answered(self: &Arc<Self>, id: ExtentId, (blocks, data_len): (u64, u64), bytes: u64) {
        let Some(putter) = &self.writer else { return };
        let counts = &putter.counts;
        counts.extents.fetch_add(1, Ordering::Relaxed);
        counts.blocks.fetch_add(blocks, Ordering::Relaxed);
        counts.extent_bytes.fetch_add(bytes, Ordering::Relaxed);
        counts.metadata_bytes.fetch_add(bytes - data_len, Ordering::Relaxed);
        self.tree.release(id);
        let (stored, turn) = {
            let mut now = self.now();
            // After a latch nothing is acknowledged, and nothing leaves the log.
            let is_newer = now.stage.failure().is_none() && now.answered(id.sequence);
            // In the same step: who waits for a state waits for the checkpoint that it is due for.
            (is_newer.then_some(now.state.records), self.checkpoint_turn(&mut now))
        };
        if let Some(turn) = turn {
            self.put_checkpoint(turn);
        }
        if let Some(records) = stored {
            if let Some(log) = &putter.log {
                log.free(records);
            }
            self.progress.wake_all();
        }
        self.drive();
    }

    /// Sees to it that what was done does not become old before it is put. Ends with the volume's
    /// life.
    pub(crate) async fn tend(self: &Arc<Self>) {
        if self.writer.is_none() {
            return;
        }
        let is_over = || self.over.is_raised();
        let _tended = Tended::new(self);
        drop(spawn(Arc::clone(self).count_snapshots()));
        loop {
            let waiting = || is_over().then_some(0).or_else(|| self.now().waiting());
            let first = self.over.unless_raised(self.progress.until(waiting)).await;
            let Some(first) = first.filter(|_| !is_over()) else { return };
            let cut = || self.now().has_waiting_cuts().then_some(());
            let aged = async {
                // Whether there was one or not.
                let _ = timeout(AGE_MAX - CUT_AGE_MAX, self.progress.until(cut)).await;
                sleep(CUT_AGE_MAX).await;
            };
            if self.over.unless_raised(aged).await.is_none() {
                return;
            }
            let mut now = self.now();
            if now.waiting() == Some(first) {
                now.want();
            }
            drop(now);
            self.drive();
        }
    }
}
