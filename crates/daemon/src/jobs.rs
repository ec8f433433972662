//! Merges of layers, which take their time: each on a thread of its own, one of a disk at a time.
//! [`mica_stack::merge`] has the steps of a merge; here is how one is run beside guests: how fast,
//! with pauses, and until somebody cancels it.
//!
//! Invariants
//! - I1 Once [`Job::stop`] returned, the thread of the job has ended and touches the disk no more.
//! - I2 A job that has ended stays known until the disk gets another one; what is told of it stays
//!   for a while longer.

mod phase;

use mica_block::{
    Error, ErrorKind, LocalFuture, Manage, MergeControl, MergeProgress, Merged, Result,
};
use mica_rt::{Backend, Executor};
use mica_stack::merge::{Ended, Prepared, Settled, StateFile};
use parking_lot::{Condvar, Mutex, MutexGuard};
use phase::{Course, Event, Phase};
use serde::Serialize;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
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

/// The disk whose layers are merged.
pub(crate) struct JobDisk {
    pub(crate) name: String,
    /// The image that the configuration names for it.
    pub(crate) named: PathBuf,
    pub(crate) disk: Arc<dyn Manage>,
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

struct State {
    progress: MergeProgress,
    course: Course,
}

/// How a job is doing, or ended, as clients see it.
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

/// What became of the file of a dropped state.
#[derive(Serialize, Clone, Debug)]
struct FileEnd {
    path: String,
    removed: bool,
    /// Why it is there still.
    reason: Option<String>,
}

impl From<&StateFile> for FileEnd {
    fn from(file: &StateFile) -> Self {
        let path = file.path.to_string_lossy().into_owned();
        let reason = file.removed.as_ref().err().map(Error::in_one_line);
        Self { path, removed: reason.is_none(), reason }
    }
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

impl JobReport {
    /// Whether it has not ended.
    pub(crate) fn is_under_way(&self) -> bool {
        match self.state {
            JobState::Running | JobState::Paused | JobState::Cancelling => true,
            JobState::Done | JobState::Cancelled | JobState::Failed => false,
        }
    }
}

impl Job {
    /// Begins a `merge` of the layers of a disk, at `rate` bytes a second at most if that is not 0.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn start(of: JobDisk, merge: Prepared, rate: u64) -> Result<Arc<Self>> {
        let JobDisk { name, named, disk } = of;
        let job = Arc::new(Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            disk: name,
            named,
            kind: merge.kind(),
            lowest_changed: merge.lowest_changed(),
            began: now(),
            rate,
            state: Mutex::new(State { progress: MergeProgress::default(), course: Course::new() }),
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

    fn run(&self, disk: &dyn Manage, merge: Prepared) -> Result<Ended> {
        let context = |error| Error::from_io("starting a merge", error);
        // Large copies, one at a time: plain threads serve that and leave the guests' rings alone.
        let executor = Executor::new(Backend::Pool).map_err(context)?;
        let ended = executor.block_on(merge.run(disk, self))?;
        if let Merged::Done { dropped, .. } = &ended.merged {
            self.warn_of_unsettled(&ended.settled);
            self.warn_if_configured_layer_left(&disk.layer_paths(), dropped);
        }
        Ok(ended)
    }

    /// Warns of what lies beside layers as it was. The merge itself is done, and durable.
    fn warn_of_unsettled(&self, settled: &Settled) {
        let disk = &self.disk;
        if let Err(error) = &settled.marks {
            tracing::warn!(disk, %error, "could not update the mark of a frozen layer");
        }
        if let Some(StateFile { removed: Err(error), .. }) = &settled.file {
            tracing::warn!(disk, %error, "could not remove the file of the dropped state");
        }
        if let Err(error) = &settled.drops {
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

    fn end(&self, outcome: Result<Ended>) {
        let (disk, kind) = (&self.disk, self.kind);
        let mut state = self.lock();
        match outcome.as_ref().map(|ended| &ended.merged) {
            Ok(Merged::Done { dropped, copied }) => {
                tracing::info!(disk, kind, copied, layers = dropped.len(), "layers were merged");
                // What was copied last was not reported: there was nothing left to do after it.
                state.progress.copied = *copied;
            }
            Ok(Merged::Cancelled) => tracing::info!(disk, kind, "a merge was cancelled"),
            Err(error) => tracing::warn!(disk, kind, ?error, "a merge failed"),
        }
        state.course.apply(Event::End(outcome), now());
        self.ended.notify_all();
    }

    /// Ends it, if it has not ended, and waits until it has.
    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.course.apply(Event::Cancel, now());
        self.ended.wait_while(&mut state, |state| !state.course.has_ended());
    }

    /// Whether the layers of a chain with these `layers` stay as they are, and their files, up to
    /// the one at `position`.
    pub(crate) fn leaves_as_it_is(&self, layers: &[PathBuf], position: usize) -> bool {
        let Some(lowest) = &self.lowest_changed else { return true };
        mica_stack::position_of(layers, lowest).is_some_and(|lowest| lowest > position)
    }

    /// How long it takes from here on, as far as can be told.
    pub(crate) fn time_left(&self) -> Option<Duration> {
        self.report().estimate_ms.map(Duration::from_millis)
    }

    /// What it is called where it is in the way.
    pub(crate) fn name(&self) -> String {
        format!("merge {} ({})", self.number, self.kind)
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().course.has_ended()
    }

    /// Lets it rest.
    pub(crate) fn pause(&self) {
        self.lock().course.apply(Event::Pause, now());
    }

    /// Lets it go on.
    pub(crate) fn resume(&self) {
        self.lock().course.apply(Event::Resume, now());
    }

    /// How it is doing, or ended.
    pub(crate) fn report(&self) -> JobReport {
        let state = self.lock();
        let MergeProgress { done, total, copied, .. } = state.progress;
        let (name, ended) = match state.course.phase() {
            Phase::Running => (JobState::Running, None),
            Phase::Paused { .. } => (JobState::Paused, None),
            Phase::Cancelling => (JobState::Cancelling, None),
            Phase::Ended { at, outcome } => (JobState::of(outcome), Some((*at, outcome))),
        };
        let until = ended.map_or_else(now, |(at, _)| at);
        let rested = state.course.rested_at(until);
        let worked = until.duration_since(self.began).saturating_sub(rested);
        let worked_ms = u64::try_from(worked.as_millis()).unwrap_or(u64::MAX).max(1);
        let rate = u128::from(copied) * 1000 / u128::from(worked_ms);
        let estimate_ms = match ended {
            None => estimate_ms(state.progress, worked_ms),
            Some(_) => None,
        };
        let outcome = ended.map(|(_, outcome)| outcome.as_ref());
        let well = outcome.and_then(|outcome| outcome.ok());
        let dropped = match well.map(|ended| &ended.merged) {
            Some(Merged::Done { dropped, .. }) => &dropped[..],
            Some(Merged::Cancelled) | None => &[],
        };
        JobReport {
            number: self.number,
            disk: self.disk.clone(),
            kind: self.kind,
            state: name,
            done: if name == JobState::Done { total } else { done },
            total,
            copied_bytes: copied,
            rate: u64::try_from(rate).unwrap_or(u64::MAX),
            elapsed_ms: worked_ms,
            estimate_ms,
            failure: outcome.and_then(|outcome| outcome.err()).map(Error::in_one_line),
            dropped: dropped.iter().map(|path| path.to_string_lossy().into_owned()).collect(),
            file: well.and_then(|ended| ended.settled.file.as_ref()).map(FileEnd::from),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// How long it has to rest before the step after this `progress`; a break if it is to end.
    fn rest(&self, progress: MergeProgress) -> ControlFlow<(), Duration> {
        let state = self.lock();
        match state.course.phase() {
            Phase::Cancelling | Phase::Ended { .. } => ControlFlow::Break(()),
            Phase::Paused { .. } => ControlFlow::Continue(LOOK),
            Phase::Running if self.rate == 0 || progress.is_ending => {
                ControlFlow::Continue(Duration::ZERO)
            }
            Phase::Running => {
                let now = now();
                let due_ns = u128::from(progress.copied) * 1_000_000_000 / u128::from(self.rate);
                let due = Duration::from_nanos(u64::try_from(due_ns).unwrap_or(u64::MAX));
                let rested = state.course.rested_at(now);
                let worked = now.duration_since(self.began).saturating_sub(rested);
                ControlFlow::Continue(due.saturating_sub(worked))
            }
        }
    }
}

impl JobState {
    fn of(outcome: &Result<Ended>) -> Self {
        match outcome.as_ref().map(|ended| &ended.merged) {
            Ok(Merged::Done { .. }) => Self::Done,
            Ok(Merged::Cancelled) => Self::Cancelled,
            Err(_) => Self::Failed,
        }
    }
}

impl MergeControl for Job {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        self.lock().progress = progress;
        Box::pin(async move {
            loop {
                match self.rest(progress) {
                    ControlFlow::Break(()) => return ControlFlow::Break(()),
                    ControlFlow::Continue(Duration::ZERO) => return ControlFlow::Continue(()),
                    ControlFlow::Continue(rest) => mica_rt::sleep(rest.min(LOOK)).await,
                }
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

    #[test]
    fn merge_that_was_cancelled_while_it_rested_does_not_go_on_and_its_time_stays_as_it_was() {
        let began = now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut course = Course::new();
        course.apply(Event::Pause, at(5));
        let job = Job {
            number: 1,
            disk: "a".to_owned(),
            named: PathBuf::from("a.qcow2"),
            kind: "stream",
            lowest_changed: None,
            began,
            rate: 0,
            state: Mutex::new(State { progress: MergeProgress::default(), course }),
            ended: Condvar::new(),
        };
        assert_eq!(job.report().state, JobState::Paused);
        // What is cancelled does not go on.
        job.lock().course.apply(Event::Cancel, at(7));
        job.resume();
        assert_eq!(job.report().state, JobState::Cancelling);
        assert_eq!(serde_json::to_value(job.report()).expect("text")["state"], "cancelling");
        let settled = Settled { marks: Ok(()), drops: Ok(()), file: None };
        let ended = Ended { merged: Merged::Cancelled, settled };
        job.lock().course.apply(Event::End(Ok(ended)), at(7));
        let report = job.report();
        assert_eq!((report.state, report.elapsed_ms), (JobState::Cancelled, 5000));
        assert!(!report.is_under_way());
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
