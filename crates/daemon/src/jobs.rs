//! Merges of layers, which take their time: each on a thread of its own, one of a disk at a time.
//!
//! ```text
//! running ⇄ paused ─▶ done | cancelled | failed
//! ```
//!
//! Invariants
//! - I1 Once [`Job::stop`] returned, the thread of the job has ended and touches the disk no more.
//! - I2 A job that has ended stays known until the disk gets another one; what is told of it stays
//!   for a while longer.

use mica_block::{
    ActiveAfter, CommitLayers, Error, ErrorKind, LocalFuture, Manage, ManageChain, MergeControl,
    MergeProgress, Merged, RaiseLayers, Result,
};
use mica_rt::{Backend, Executor};
use mica_stack::{GoneFiles, GoneImages, ImageOptions, MergeMarks};
use parking_lot::{Condvar, Mutex, MutexGuard};
use serde::Serialize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a job that waits looks whether it is to go on, or to end.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes of which the copying tells how fast that is.
const TELLING_BYTES: u64 = 8 << 20;
/// Jobs of a disk that are told of after another one began.
pub(crate) const PAST_MAX: usize = 32;
/// Numbers of jobs.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// What is merged.
pub(crate) enum Merge {
    /// The layers above `base` go up into the active layer; with none all layers beneath it. If one
    /// is to be removed afterwards, `marks` keep others from standing on it.
    Stream { base: Option<PathBuf>, marks: Option<MergeMarks> },
    /// The layers above `base` up to `top`, or up to the active layer, go down into it.
    Commit { top: Option<PathBuf>, base: PathBuf, marks: MergeMarks },
    /// The layers beneath `into`, which is frozen, go up into it; it stands on `base` then.
    Raise { into: PathBuf, base: Option<PathBuf>, marks: MergeMarks },
    /// A kept state goes: its layer leaves as with `how`, and then its file is removed.
    Drop { file: DroppedFile, how: Box<Merge> },
}

/// The file of a state that is dropped.
#[derive(Clone)]
pub(crate) struct DroppedFile {
    pub(crate) path: PathBuf,
    /// The layer above, which has what it had.
    pub(crate) into: PathBuf,
    /// How it is opened, to find out whether anybody else has it open.
    pub(crate) options: ImageOptions,
    /// How to treat missing images that were overlays of it when it is removed.
    pub(crate) gone: GoneImages,
}

/// What became of the file of a dropped state.
#[derive(Serialize, Clone, Debug)]
struct FileEnd {
    path: String,
    removed: bool,
    /// Why it is there still.
    reason: Option<String>,
}

impl Merge {
    fn kind(&self) -> &'static str {
        match self {
            Self::Stream { .. } => "stream",
            Self::Raise { .. } => "raise",
            Self::Commit { .. } => "commit",
            Self::Drop { .. } => "drop",
        }
    }

    async fn run(self, chain: &dyn ManageChain, control: &dyn MergeControl) -> Result<Merged> {
        match self {
            Self::Stream { base, marks } => {
                let merged = chain.stream(base.as_deref(), control).await;
                // Unless it is done nothing is marked: the layers are as they were.
                marks.into_iter().for_each(|marks| marks.end(merged.as_ref().ok()));
                merged
            }
            Self::Commit { top, base, marks } => {
                let (top, base, active) = (top.as_deref(), Some(&*base), ActiveAfter::Emptied);
                let layers = CommitLayers { top, base, active };
                let merged = chain.commit(layers, &marks.watch(control)).await;
                marks.end(merged.as_ref().ok());
                merged
            }
            Self::Raise { into, base, marks } => {
                let layers = RaiseLayers { into: &into, base: base.as_deref() };
                let merged = chain.raise(layers, control).await;
                // Unless it is done nothing is marked: all layers show what they did.
                marks.end(merged.as_ref().ok());
                merged
            }
            Self::Drop { how, .. } => Box::pin(how.run(chain, control)).await,
        }
    }

    /// The layer that has what left the chain, if it went down.
    fn base_of_commit(&self) -> Option<PathBuf> {
        match self {
            Self::Commit { base, .. } => Some(base.clone()),
            Self::Stream { .. } | Self::Raise { .. } | Self::Drop { .. } => None,
        }
    }

    /// The lowest layer that it writes to, or whose file it removes; `None` if that is no frozen
    /// one.
    fn lowest_changed(&self) -> Option<PathBuf> {
        match self {
            Self::Stream { .. } => None,
            Self::Commit { base, .. } => Some(base.clone()),
            Self::Raise { into, .. } => Some(into.clone()),
            Self::Drop { file, .. } => Some(file.path.clone()),
        }
    }

    /// The file to be removed when the layers have left.
    fn dropped_file(&self) -> Option<DroppedFile> {
        match self {
            Self::Drop { file, .. } => Some(file.clone()),
            Self::Stream { .. } | Self::Raise { .. } | Self::Commit { .. } => None,
        }
    }
}

/// A merge of a disk.
pub(crate) struct Job {
    number: u64,
    disk: String,
    /// The image that the configuration names for the disk.
    named: PathBuf,
    kind: &'static str,
    /// The lowest frozen layer that changes, if one does.
    lowest_changed: Option<PathBuf>,
    began: Instant,
    /// Bytes a second at most; 0 if there is no limit.
    rate: u64,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    wish: Wish,
    progress: MergeProgress,
    /// Time for which it was paused before.
    paused: Duration,
    /// What became of the file of the state, if one was dropped.
    file: Option<FileEnd>,
    end: Option<End>,
}

/// What a job is to do.
#[derive(Clone, Copy, Default)]
enum Wish {
    #[default]
    GoOn,
    Rest {
        since: Instant,
    },
    /// For good.
    Cease,
}

struct End {
    at: Instant,
    outcome: Result<Merged>,
}

/// How a job is doing, or ended, as clients of the control socket see it.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct JobReport {
    number: u64,
    pub(crate) disk: String,
    pub(crate) kind: &'static str,
    state: JobState,
    /// Bytes of the disk.
    pub(crate) done: u64,
    pub(crate) total: u64,
    pub(crate) copied_bytes: u64,
    /// Bytes that are copied in a second, on average.
    rate: u64,
    elapsed_ms: u64,
    /// Until the end, as far as can be told.
    estimate_ms: Option<u64>,
    pub(crate) failure: Option<String>,
    /// Paths of the layers that are not in the chain any more.
    dropped: Vec<String>,
    /// What has become of the file of a state that was dropped.
    file: Option<FileEnd>,
}

/// How far a job is.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "kebab-case")]
enum JobState {
    Running,
    Paused,
    Cancelling,
    Done,
    Cancelled,
    Failed,
}

impl JobReport {
    /// Whether it has not ended.
    pub(crate) fn is_under_way(&self) -> bool {
        match self.state {
            JobState::Running | JobState::Paused | JobState::Cancelling => true,
            JobState::Done | JobState::Cancelled | JobState::Failed => false,
        }
    }
}

impl State {
    /// Changes what the job is to do, unless it has ended.
    fn wish(&mut self, wish: Wish) {
        if self.end.is_some() {
            return;
        }
        self.paused = self.paused_until(now());
        self.wish = wish;
    }

    /// For how long it was paused until then.
    fn paused_until(&self, then: Instant) -> Duration {
        match self.wish {
            Wish::Rest { since } => self.paused + then.saturating_duration_since(since),
            Wish::GoOn | Wish::Cease => self.paused,
        }
    }

    fn job_state(&self) -> JobState {
        match (&self.end, self.wish) {
            (None, Wish::GoOn) => JobState::Running,
            (None, Wish::Rest { .. }) => JobState::Paused,
            (None, Wish::Cease) => JobState::Cancelling,
            (Some(End { outcome: Ok(Merged::Done { .. }), .. }), _) => JobState::Done,
            (Some(End { outcome: Ok(Merged::Cancelled), .. }), _) => JobState::Cancelled,
            (Some(End { outcome: Err(_), .. }), _) => JobState::Failed,
        }
    }
}

impl Job {
    /// Begins `merge` of `disk`, which is called `name` and was named by the image `named`, at
    /// `rate` bytes a second at most if that is not 0.
    ///
    /// # Errors
    /// `Unsupported` if the disk is no chain that is written; if the system refuses a thread.
    pub(crate) fn start(
        (name, named): (&str, &Path),
        disk: Arc<dyn Manage>,
        merge: Merge,
        rate: u64,
    ) -> Result<Arc<Self>> {
        if disk.chain().is_none() {
            let what = format!("the disk {name:?} is not a writable image chain");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let job = Arc::new(Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            disk: name.to_owned(),
            named: named.to_owned(),
            kind: merge.kind(),
            lowest_changed: merge.lowest_changed(),
            began: now(),
            rate,
            state: Mutex::default(),
            ended: Condvar::new(),
        });
        let this = Arc::clone(&job);
        let thread = std::thread::Builder::new().name("mica-merge".to_owned());
        let body = move || {
            let ran = catch_unwind(AssertUnwindSafe(|| this.run(&*disk, merge)));
            // Whoever waits for the end may close the disk.
            drop(disk);
            let outcome = ran.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::Io, "the thread of the merge failed"))
            });
            this.end(outcome);
        };
        thread.spawn(body).map_err(|error| Error::from_io("starting a merge", error))?;
        Ok(job)
    }

    fn run(&self, disk: &dyn Manage, merge: Merge) -> Result<Merged> {
        let context = |error| Error::from_io("starting a merge", error);
        // Large copies, one at a time: plain threads serve that and leave the guests' rings alone.
        let executor = Executor::new(Backend::Pool).map_err(context)?;
        let Some(chain) = disk.chain() else {
            return Err(Error::new(ErrorKind::Denied, "the disk is closed"));
        };
        let (file, base) = (merge.dropped_file(), merge.base_of_commit());
        let merged = executor.block_on(merge.run(chain, self))?;
        if let Merged::Done { dropped, .. } = &merged {
            let layers = disk.layer_paths();
            let files = if file.is_some() { GoneFiles::Go } else { GoneFiles::Stay };
            let marks = mica_stack::settle_marks(&layers, dropped, files).inspect_err(|error| {
                // The merge itself is done, and durable.
                let disk = &self.disk;
                tracing::warn!(disk, %error, "could not update the mark of a frozen layer");
            });
            self.warn_if_configured_layer_left(&layers, dropped);
            mica_stack::settle_notes(&layers, dropped, base.as_deref());
            self.settle_files((dropped, &layers), file.as_ref(), marks);
        }
        Ok(merged)
    }

    /// Layers that were `dropped` have left the chain: the file of a state that is dropped goes,
    /// those of others stay. If the `marks` were not settled one may lead through the file: it
    /// stays, with what says that it was dropped, so that the next drop or keep tries it again.
    fn settle_files(
        &self,
        (dropped, layers): (&[PathBuf], &[PathBuf]),
        file: Option<&DroppedFile>,
        marks: Result<()>,
    ) {
        let Some(DroppedFile { path, into, options, gone }) = file else {
            return self.forget_drops(dropped);
        };
        let is_settled = marks.is_ok();
        // Another program may have made an image on it meanwhile.
        let removed = marks
            .and_then(|()| mica_stack::remove_dropped_file(path, (into, layers), options, *gone));
        let reason = removed.err().map(|error| {
            tracing::warn!(
                disk = self.disk,
                %error,
                "could not remove the file of the dropped state"
            );
            if is_settled {
                self.forget_drops(dropped);
            }
            error.in_one_line()
        });
        let path = path.to_string_lossy().into_owned();
        self.lock().file = Some(FileEnd { path, removed: reason.is_none(), reason });
    }

    /// Clears drop marks: these files are no longer ours to delete.
    fn forget_drops(&self, dropped: &[PathBuf]) {
        if let Err(error) = mica_stack::forget_drops(dropped) {
            let disk = &self.disk;
            tracing::warn!(
                disk,
                %error,
                "could not clear drop marks: the next drop may remove a file that has left the \
                 chain"
            );
        }
    }

    /// Warns if the layer that the configuration names is among those `dropped`: nothing leads from
    /// it to the layers that the disk has now, which would otherwise be noticed only at the next
    /// start.
    fn warn_if_configured_layer_left(&self, layers: &[PathBuf], dropped: &[PathBuf]) {
        if let Some(active) = layers.last()
            && mica_stack::position_of(dropped, &self.named).is_some()
        {
            let (named, active) = (self.named.display(), active.display());
            tracing::warn!(
                disk = self.disk,
                "{named}, which names the disk, has left its chain: change the configuration to \
                 name {active}, as a qcow2 image, before the next start"
            );
        }
    }

    fn end(&self, outcome: Result<Merged>) {
        let (disk, kind) = (&self.disk, self.kind);
        match &outcome {
            Ok(Merged::Done { dropped, copied }) => {
                tracing::info!(disk, kind, copied, layers = dropped.len(), "layers were merged");
            }
            Ok(Merged::Cancelled) => tracing::info!(disk, kind, "a merge was cancelled"),
            Err(error) => tracing::warn!(disk, kind, ?error, "a merge failed"),
        }
        let mut state = self.lock();
        state.end = Some(End { at: now(), outcome });
        self.ended.notify_all();
    }

    /// Ends it, if it has not ended, and waits until it has.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.wish(Wish::Cease);
        self.ended.wait_while(&mut state, |state| state.end.is_none());
    }

    /// Whether the layers of a chain with these `layers` stay as they are, and their files, up to
    /// the one at `position`.
    pub(crate) fn leaves_as_it_is(&self, layers: &[PathBuf], position: usize) -> bool {
        let Some(lowest) = &self.lowest_changed else { return true };
        mica_stack::position_of(layers, lowest).is_some_and(|lowest| lowest > position)
    }

    /// What it is called where it is in the way.
    pub(crate) fn name(&self) -> String {
        format!("merge {} ({})", self.number, self.kind)
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().end.is_some()
    }

    /// Lets it rest, or go on, unless it is being cancelled.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        let mut state = self.lock();
        match (state.wish, is_paused) {
            (Wish::GoOn, true) => state.wish(Wish::Rest { since: now() }),
            (Wish::Rest { .. }, false) => state.wish(Wish::GoOn),
            (Wish::GoOn, false) | (Wish::Rest { .. }, true) | (Wish::Cease, _) => {}
        }
    }

    /// How it is doing, or ended.
    pub(crate) fn report(&self) -> JobReport {
        let state = self.lock();
        let MergeProgress { done, total, copied, .. } = state.progress;
        let (job_state, outcome) = (state.job_state(), state.end.as_ref().map(|end| &end.outcome));
        let failure = outcome.and_then(|outcome| outcome.as_ref().err()).map(Error::in_one_line);
        let dropped = match outcome {
            Some(Ok(Merged::Done { dropped, .. })) => &dropped[..],
            Some(Ok(Merged::Cancelled) | Err(_)) | None => &[],
        };
        let until = state.end.as_ref().map_or_else(now, |end| end.at);
        let resting = state.paused_until(until);
        let worked = until.duration_since(self.began).saturating_sub(resting);
        let worked_ms = u64::try_from(worked.as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = u128::from(copied) * 1000 / u128::from(worked_ms);
        let estimate_ms = match state.end {
            None => estimate_ms(state.progress, worked_ms),
            Some(_) => None,
        };
        JobReport {
            number: self.number,
            disk: self.disk.clone(),
            kind: self.kind,
            state: job_state,
            done: if job_state == JobState::Done { total } else { done },
            total,
            copied_bytes: copied,
            rate: u64::try_from(rate).unwrap_or(u64::MAX),
            elapsed_ms: worked_ms,
            estimate_ms,
            failure,
            dropped: dropped.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
            file: state.file.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// How long it has to rest so that it does not exceed its rate.
    fn ahead_of_rate(&self, copied: u64) -> Duration {
        let due_ns = u128::from(copied) * 1_000_000_000 / u128::from(self.rate.max(1));
        let due = Duration::from_nanos(u64::try_from(due_ns).unwrap_or(u64::MAX));
        let state = self.lock();
        let resting = state.paused;
        due.saturating_sub(now().duration_since(self.began).saturating_sub(resting))
    }
}

impl MergeControl for Job {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        self.lock().progress = progress;
        Box::pin(async move {
            loop {
                let wish = self.lock().wish;
                let rest = match (wish, self.rate) {
                    (Wish::Cease, _) => return ControlFlow::Break(()),
                    (Wish::Rest { .. }, _) => LOOK,
                    (Wish::GoOn, 0) => Duration::ZERO,
                    (Wish::GoOn, _) if progress.is_ending => Duration::ZERO,
                    (Wish::GoOn, _) => self.ahead_of_rate(progress.copied),
                };
                if rest.is_zero() {
                    return ControlFlow::Continue(());
                }
                mica_rt::sleep(rest.min(LOOK)).await;
            }
        })
    }
}

/// How long a merge will take from here on, if it came to `progress` in `worked_ms`. The time goes
/// into what is copied. How much that will be in all shows in what was found so far, within what
/// the sizes of the layers allow: their data may be anywhere on the disk.
fn estimate_ms(progress: MergeProgress, worked_ms: u64) -> Option<u64> {
    let MergeProgress { done, total, copied, expected: (least, most), .. } = progress;
    let (done, total, worked) = (u128::from(done), u128::from(total), u128::from(worked_ms));
    let left = if copied < TELLING_BYTES {
        ((total - done) * worked).checked_div(done)?
    } else {
        let copied = u128::from(copied);
        let found = (copied * total).checked_div(done)?;
        let all = match done == total {
            true => copied,
            false => found.clamp(least.into(), most.max(least).into()),
        };
        all.saturating_sub(copied) * worked / copied
    };
    u64::try_from(left).ok()
}

#[expect(clippy::disallowed_methods, reason = "it is asked outside of executors, too")]
fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The story: a merge that ended while it was paused was told of as shorter each time.
    #[test]
    fn time_of_a_merge_that_ended_while_it_rested_stays_as_it_was() {
        let second = Duration::from_secs(1);
        let began = now();
        let job = |wish, end| Job {
            number: 1,
            disk: "a".to_owned(),
            named: PathBuf::from("a.qcow2"),
            kind: "stream",
            lowest_changed: None,
            began,
            rate: 0,
            state: Mutex::new(State { wish, end, ..State::default() }),
            ended: Condvar::new(),
        };
        let end = |outcome| Some(End { at: began + 7 * second, outcome });
        let rest = Wish::Rest { since: began + 5 * second };
        let report = job(rest, end(Ok(Merged::Cancelled))).report();
        assert_eq!((report.state, report.elapsed_ms), (JobState::Cancelled, 5000));
        assert!(!report.is_under_way());

        // What is cancelled does not go on.
        let job = job(rest, None);
        assert_eq!(job.report().state, JobState::Paused);
        job.lock().wish(Wish::Cease);
        job.set_paused(false);
        assert_eq!(job.report().state, JobState::Cancelling);
        assert_eq!(serde_json::to_value(job.report()).expect("text")["state"], "cancelling");
    }

    #[test]
    fn estimate_follows_what_is_copied_within_what_the_layers_have() {
        const MIB: u64 = 1 << 20;
        let at = |done: u64, copied: u64| MergeProgress {
            done: done * MIB,
            total: 1000 * MIB,
            copied: copied * MIB,
            expected: (100 * MIB, 400 * MIB),
            is_ending: false,
        };
        // Evenly spread data.
        assert_eq!(estimate_ms(at(250, 50), 500), Some(1500));
        // All at the start of the disk: no more than the layers have.
        assert_eq!(estimate_ms(at(100, 100), 500), Some(1500));
        // All at its end.
        assert_eq!(estimate_ms(at(900, 10), 100), Some(900));
        // It only makes sure that nothing is missing.
        assert_eq!(estimate_ms(at(1000, 300), 500), Some(0));
        // Nothing was copied yet, or nothing was done.
        assert_eq!(estimate_ms(at(500, 0), 100), Some(100));
        assert_eq!(estimate_ms(at(0, 0), 100), None);
    }
}
