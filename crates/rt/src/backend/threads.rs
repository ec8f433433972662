//! Threads that do for one executor what may wait for a file.
//!
//! A file may make its jobs wait for ever, so what waits is sorted into [`Lanes`], and a thread
//! that waits for long does not count: the others go on as if it were not there.
//!
//! Invariants
//! - I1 A thread owns the buffer that it reads into or writes from: it is moved to the thread and
//!   back.
//! - I2 While a job may begin, some thread is on its way to begin it. Whoever adds a job, and
//!   whoever begins one and leaves another, calls the next ([`Shared::call`]), unless as many are
//!   on their way as jobs may begin; if the system refuses a thread, the executor tries again.
//! - I3 While jobs wait because [`THREADS`] are at work, one thread watches: what has been at work
//!   for a whole [`WINDOW`] counts no more, and as many others may be at work as wait like that.
//! - I4 The executor sleeps only if nothing is finished, and then the next job that ends rings.

use super::lanes::{LaneKey, Lanes, TURNS_MAX};
use super::now;
use crate::buf::Buf;
use crate::file::{Access, File};
use crate::op::{Call, OpKey, OpKind, Ops, resume_at};
use crate::remote::Remote;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::fs::{Advice, FallocateFlags, fadvise, fallocate, fdatasync, ftruncate};
use rustix::io::Errno;
use std::io;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Threads of one executor that are at work at once, those apart that are slow.
const THREADS: usize = 32;
/// Threads of one executor in all.
const THREADS_MAX: usize = 4096;
/// If this many jobs wait for long, a file has one job at work at once; with fewer, more.
const SLOW_MAX: usize = 1024;
/// What is at work for longer than this, and less than twice as long, waits for something.
const WINDOW: Duration = Duration::from_millis(50);
/// When to try again after the system refused a thread.
const RETRY: Duration = Duration::from_millis(100);
/// A thread without work for so long ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

pub(super) struct Threads {
    shared: Arc<Shared>,
    /// Operations given to threads and not yet taken back, and how many of them the executor could
    /// have done by itself.
    given: usize,
    offloaded: usize,
}

struct Job {
    key: OpKey,
    file: Arc<File>,
    work: Work,
    is_offloaded: bool,
}

/// What a thread does with the file of a job.
enum Work {
    Read(Transfer),
    Write(Transfer),
    SyncData,
    ReadAhead { offset: u64, len: u32 },
    Fallocate { mode: FallocateFlags, offset: u64, len: u64 },
    SetLen { len: u64 },
    Call(Option<Call>),
}

/// A buffer that a thread has, and where its bytes from `done` on are in the file.
struct Transfer {
    buf: Buf,
    done: usize,
    offset: u64,
}

impl Transfer {
    /// Takes `buf`, which begins at `offset`, to go on after `done` bytes.
    fn take(file: &File, buf: &mut Buf, offset: u64, done: usize) -> Self {
        let done = resume_at(file, done);
        Self { buf: std::mem::replace(buf, Buf::new(0)), done, offset: offset + done as u64 }
    }
}

struct Shared {
    queue: Mutex<Queue>,
    /// There may be something to begin, or the queue is closed.
    called: Condvar,
    /// A thread has ended.
    ended: Condvar,
    finished: Mutex<Finished>,
    /// Whether there are finished jobs: a hint for who polls.
    has_finished: AtomicBool,
    /// Whether the system refused a thread that was of use.
    is_short: AtomicBool,
    remote: Arc<Remote>,
}

#[derive(Default)]
struct Queue {
    lanes: Lanes<Job>,
    /// The window that jobs begin in now, and when it ends if somebody watches.
    window: u64,
    window_end: Option<Instant>,
    /// Jobs at work that began in this window, in the one before, and earlier: the last count no
    /// more (I3).
    working: [usize; 3],
    threads: usize,
    /// Threads that wait to be called, until they look at the queue again.
    idle_threads: usize,
    /// Of these, at least so many are on their way, because they were called or by themselves.
    called_threads: usize,
    /// Threads that were started and have not looked at the queue yet.
    new_threads: usize,
    is_watched: bool,
    /// Whether it was said that the system refuses threads.
    was_told: bool,
    is_closed: bool,
}

#[derive(Default)]
struct Finished {
    jobs: Vec<Done>,
    /// Whether the executor sleeps, and has to be told.
    is_awaited: bool,
}

/// A job that has ended.
struct Done {
    job: Job,
    code: i32,
    took: Duration,
}

/// A job at work.
struct Begun {
    window: u64,
    lane: LaneKey,
    job: Job,
}

impl Threads {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            called: Condvar::new(),
            ended: Condvar::new(),
            finished: Mutex::default(),
            has_finished: AtomicBool::new(false),
            is_short: AtomicBool::new(false),
            remote,
        });
        Self { shared, given: 0, offloaded: 0 }
    }

    /// How many operations of [`Self::offload`] are not yet taken back.
    pub(super) fn offloaded(&self) -> usize {
        self.offloaded
    }

    /// Whether there is something to take; it may be noticed late.
    pub(super) fn have_finished(&self) -> bool {
        self.shared.has_finished.load(Ordering::Relaxed)
    }

    /// Whether the executor may sleep until its bell rings; if not, there is something to take.
    pub(super) fn may_sleep(&self) -> bool {
        if self.given == 0 {
            return true;
        }
        let mut finished = self.shared.finished.lock();
        finished.is_awaited = finished.jobs.is_empty();
        finished.is_awaited
    }

    /// Takes over the buffers and outcomes of finished work, and tells how long each operation of
    /// [`Self::offload`] took.
    pub(super) fn take_finished(
        &mut self,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
        mut note: impl FnMut(Duration),
    ) {
        if !self.have_finished() {
            return;
        }
        let mut finished = self.shared.finished.lock();
        finished.is_awaited = false;
        self.shared.has_finished.store(false, Ordering::Relaxed);
        for Done { job, code, took } in finished.jobs.drain(..) {
            self.given -= 1;
            if job.is_offloaded {
                self.offloaded -= 1;
                note(took);
            }
            if let Work::Read(Transfer { buf: back, .. })
            | Work::Write(Transfer { buf: back, .. }) = job.work
            {
                let (OpKind::Read { buf, .. } | OpKind::Write { buf, .. }) = ops.kind_mut(job.key)
                else {
                    unreachable!("a buffer returns to the operation that it belongs to");
                };
                *buf = back;
            }
            completions.push((job.key, code));
        }
    }

    /// Gives an operation on a file to a thread.
    pub(super) fn give_op(&mut self, key: OpKey, op: &mut OpKind) {
        let (file, work) = work_of(op);
        self.give(Job { key, file: Arc::clone(file), work, is_offloaded: false });
    }

    /// Gives a thread an operation on a file that the executor could do by itself.
    pub(super) fn offload(&mut self, key: OpKey, op: &mut OpKind) {
        let (file, work) = work_of(op);
        self.offloaded += 1;
        self.give(Job { key, file: Arc::clone(file), work, is_offloaded: true });
    }

    /// Gives `job` to a thread. If there is none and none can be started, does it here.
    fn give(&mut self, job: Job) {
        self.given += 1;
        let mut queue = self.shared.queue.lock();
        queue.lanes.add(job.lane(), job);
        let is_of_use = self.shared.call(&mut queue);
        while queue.threads == 0
            && let Some(begun) = queue.begin()
        {
            drop(queue);
            self.shared.remote.set_is_writing(true);
            queue = self.shared.run(begun);
            self.shared.remote.set_is_writing(false);
        }
        drop(queue);
        if is_of_use {
            self.shared.called.notify_one();
        }
    }

    /// Calls again if a thread was refused. How long the executor may sleep of the time that it
    /// wants to.
    pub(super) fn call_again(&self, wait: Option<Duration>) -> Option<Duration> {
        if !self.shared.is_short.load(Ordering::Relaxed) {
            return wait;
        }
        let is_of_use = self.shared.call(&mut self.shared.queue.lock());
        if is_of_use {
            self.shared.called.notify_one();
        }
        Some(wait.map_or(RETRY, |wait| wait.min(RETRY)))
    }
}

/// What a thread does for `op`, and with which file. Its buffer goes with it.
fn work_of(op: &mut OpKind) -> (&Arc<File>, Work) {
    match op {
        OpKind::Read { file, buf, offset, done, .. } => {
            (&*file, Work::Read(Transfer::take(file, buf, *offset, *done)))
        }
        OpKind::Write { file, buf, offset, done, .. } => {
            (&*file, Work::Write(Transfer::take(file, buf, *offset, *done)))
        }
        OpKind::SyncData { file, .. } => (&*file, Work::SyncData),
        OpKind::ReadAhead { file, offset, len, .. } => {
            (&*file, Work::ReadAhead { offset: *offset, len: *len })
        }
        OpKind::Fallocate { file, mode, offset, len, .. } => {
            (&*file, Work::Fallocate { mode: *mode, offset: *offset, len: *len })
        }
        OpKind::SetLen { file, len } => (&*file, Work::SetLen { len: *len }),
        OpKind::Call { file, work } => (&*file, Work::Call(work.take())),
        OpKind::Recv { .. }
        | OpKind::Send { .. }
        | OpKind::Readable { .. }
        | OpKind::Simulated { .. } => unreachable!("not an operation on a file"),
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.is_closed = true;
        self.shared.called.notify_all();
        while queue.threads > 0 {
            self.shared.ended.wait(&mut queue);
        }
    }
}

impl Queue {
    fn may_begin(&self) -> bool {
        self.lanes.is_ready() && self.working[0] + self.working[1] < THREADS.max(self.working[2])
    }

    fn begin(&mut self) -> Option<Begun> {
        if !self.may_begin() {
            return None;
        }
        let (lane, job) = self.lanes.begin()?;
        self.working[0] += 1;
        Some(Begun { window: self.window, lane, job })
    }

    /// A job that began in `window` has ended.
    fn end(&mut self, lane: LaneKey, window: u64) {
        self.lanes.end(lane);
        let age = usize::try_from(self.window - window).unwrap_or(usize::MAX).min(2);
        self.working[age] -= 1;
        if age == 2 {
            self.share_turns();
        }
    }

    fn next_window(&mut self) {
        let [now, before, earlier] = self.working;
        self.working = [0, now, before + earlier];
        self.window += 1;
        self.share_turns();
    }

    /// The more jobs wait for long, the fewer turns a file has; all of them when they have ended.
    fn share_turns(&mut self) {
        self.lanes.set_turns(TURNS_MAX.min(SLOW_MAX / self.working[2].max(1)));
    }

    /// Whether one more thread has something to do: to begin a job, or to watch.
    fn is_one_more_of_use(&self) -> bool {
        if self.may_begin() {
            self.coming_threads() < self.lanes.startable()
        } else {
            self.lanes.is_ready() && !self.is_watched && self.coming_threads() == 0
        }
    }

    /// Threads that were called or started and have not looked at the queue yet.
    fn coming_threads(&self) -> usize {
        self.called_threads + self.new_threads
    }

    /// A thread that was idle looks at the queue: because it was called, or by itself. It counts as
    /// called in any case: more may be on their way than are counted, never fewer.
    fn has_come(&mut self) {
        self.idle_threads -= 1;
        self.called_threads = self.called_threads.saturating_sub(1);
        debug_assert!(self.called_threads <= self.idle_threads, "those called are idle");
    }

    /// How long the thread that watches waits for the window to end.
    fn watch(&mut self) -> Duration {
        let now = now();
        let end = *self.window_end.get_or_insert(now + WINDOW);
        end.saturating_duration_since(now)
    }

    /// The thread that watched was called, or the window has ended.
    fn watched(&mut self) {
        if self.window_end.is_some_and(|end| end <= now()) {
            self.window_end = None;
            self.next_window();
        }
    }
}

impl Shared {
    /// Whether an idle thread has to be called to look at the queue, once that is unlocked. Starts
    /// a thread if one would be of use and none is idle.
    #[must_use]
    fn call(self: &Arc<Self>, queue: &mut Queue) -> bool {
        let is_of_use = queue.is_one_more_of_use();
        let is_idle = queue.idle_threads > queue.called_threads;
        // One that comes calls the next: by then a job may have ended.
        let needs_one =
            is_of_use && !is_idle && queue.coming_threads() == 0 && queue.threads < THREADS_MAX;
        let started = if needs_one { self.start(queue) } else { Ok(()) };
        self.is_short.store(started.is_err(), Ordering::Relaxed);
        if let Err(error) = started
            && !std::mem::replace(&mut queue.was_told, true)
        {
            tracing::warn!(%error, "cannot start a thread for I/O: it may be slow");
        }
        let is_called = is_of_use && is_idle;
        queue.called_threads += usize::from(is_called);
        is_called
    }

    fn start(self: &Arc<Self>, queue: &mut Queue) -> io::Result<()> {
        let shared = Arc::clone(self);
        let builder = std::thread::Builder::new().name("mica-io".to_owned());
        builder.spawn(move || shared.work())?;
        // It cannot have ended: the queue is locked.
        queue.threads += 1;
        queue.new_threads += 1;
        Ok(())
    }

    fn work(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        queue.new_threads -= 1;
        loop {
            if let Some(begun) = queue.begin() {
                let is_of_use = self.call(&mut queue);
                drop(queue);
                if is_of_use {
                    self.called.notify_one();
                }
                if self.is_short.load(Ordering::Relaxed) {
                    // While this one works nobody else would ask for a thread again.
                    self.remote.ring();
                }
                queue = self.run(begun);
                continue;
            }
            let watches = queue.lanes.is_ready() && !queue.is_watched;
            // Beyond what may be at work at once, none is kept.
            if queue.is_closed || (!watches && queue.idle_threads >= THREADS) {
                break;
            }
            let wait = if watches { queue.watch() } else { IDLE_MAX };
            queue.is_watched |= watches;
            queue.idle_threads += 1;
            let waited = self.called.wait_for(&mut queue, wait);
            queue.has_come();
            if watches {
                queue.is_watched = false;
                queue.watched();
            } else if waited.timed_out() && !queue.lanes.is_ready() {
                break;
            }
        }
        queue.threads -= 1;
        drop(queue);
        self.ended.notify_all();
    }

    /// Runs a job. The queue must not be locked, and is in the end.
    fn run(&self, begun: Begun) -> MutexGuard<'_, Queue> {
        let Begun { window, lane, mut job } = begun;
        let start = now();
        let code = code_of(job.run());
        let done = Done { job, code, took: start.elapsed() };
        let mut finished = self.finished.lock();
        finished.jobs.push(done);
        self.has_finished.store(true, Ordering::Relaxed);
        let is_awaited = std::mem::take(&mut finished.is_awaited);
        drop(finished);
        if is_awaited {
            self.remote.ring();
        }
        let mut queue = self.queue.lock();
        queue.end(lane, window);
        queue
    }
}

impl Job {
    fn lane(&self) -> LaneKey {
        let is_serial = match self.work {
            Work::Write(_) => self.file.access() == Access::Buffered,
            Work::Fallocate { .. } | Work::SetLen { .. } => true,
            Work::Read(_) | Work::SyncData | Work::ReadAhead { .. } | Work::Call(_) => false,
        };
        if is_serial && self.file.is_regular() {
            LaneKey::serial(&self.file)
        } else {
            LaneKey::parallel(&self.file)
        }
    }

    fn run(&mut self) -> Result<usize, Errno> {
        let file = &*self.file;
        match &mut self.work {
            Work::Read(Transfer { buf, done, offset }) => buf.read_from(file, *done, *offset),
            Work::Write(Transfer { buf, done, offset }) => {
                rustix::io::pwrite(file, &buf[*done..], *offset)
            }
            Work::SyncData => fdatasync(file).map(|()| 0),
            Work::ReadAhead { offset, len } => {
                fadvise(file, *offset, NonZeroU64::new((*len).into()), Advice::WillNeed).map(|()| 0)
            }
            Work::Fallocate { mode, offset, len } => {
                fallocate(file, *mode, *offset, *len).map(|()| 0)
            }
            Work::SetLen { len } => ftruncate(file, *len).map(|()| 0),
            Work::Call(work) => {
                if let Some(work) = work.take() {
                    work(file);
                }
                Ok(0)
            }
        }
    }
}

pub(super) fn code_of(result: Result<usize, Errno>) -> i32 {
    match result {
        Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_units::next_random;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn file() -> Arc<File> {
        let made = tempfile::tempfile().expect("made");
        Arc::new(File::new(made.into(), Access::Buffered))
    }

    fn job(work: Work) -> Job {
        let key = OpKey { index: 0, generation: 0 };
        Job { key, file: file(), work, is_offloaded: false }
    }

    #[test]
    fn changes_of_a_file_wait_for_each_other_and_nothing_else_does() {
        let part = || Transfer { buf: Buf::zeroed(1), done: 0, offset: 0 };
        let write = || Work::Write(part());
        let mode = FallocateFlags::empty();
        let serial = |file: &Arc<File>, work| {
            let job = Job { file: Arc::clone(file), ..job(work) };
            job.lane() == LaneKey::serial(file)
        };
        let buffered = file();
        assert!(serial(&buffered, write()));
        assert!(serial(&buffered, Work::Fallocate { mode, offset: 0, len: 1 }));
        assert!(!serial(&buffered, Work::SyncData));
        assert!(!serial(&buffered, Work::Read(part())));
        let direct = File::new(tempfile::tempfile().expect("made").into(), Access::Direct);
        assert!(!serial(&Arc::new(direct), write()));
        let device = std::fs::File::open("/dev/null").expect("a device");
        let device = Arc::new(File::new(device.into(), Access::Buffered));
        assert!(!serial(&device, write()));
    }

    #[test]
    fn jobs_that_wait_for_long_count_no_more() {
        let mut queue = Queue::default();
        for _ in 0..4 * THREADS {
            let job = job(Work::SyncData);
            queue.lanes.add(job.lane(), job);
        }
        let begin =
            |queue: &mut Queue| -> Vec<Begun> { std::iter::from_fn(|| queue.begin()).collect() };
        let end = |queue: &mut Queue, from: &mut Vec<Begun>| {
            let Begun { window, lane, .. } = from.pop().expect("at work");
            queue.end(lane, window);
        };
        let mut slow = begin(&mut queue);
        assert_eq!(slow.len(), THREADS);
        end(&mut queue, &mut slow);
        queue.next_window();
        let mut others = begin(&mut queue);
        assert_eq!(others.len(), 1, "the slow ones may have begun just before");
        queue.next_window();
        others.append(&mut begin(&mut queue));
        assert_eq!(others.len(), THREADS);
        end(&mut queue, &mut slow);
        assert!(!queue.may_begin(), "a slow one made no room before, and makes none now");
        end(&mut queue, &mut others);
        assert_eq!(begin(&mut queue).len(), 1);
        while !slow.is_empty() {
            end(&mut queue, &mut slow);
        }
        while !others.is_empty() {
            end(&mut queue, &mut others);
        }
        assert_eq!(queue.working, [1, 0, 0]);
    }

    #[test]
    fn file_has_its_turns_again_when_the_others_have_ended() {
        let mut queue = Queue::default();
        for _ in 0..SLOW_MAX {
            let job = job(Work::SyncData);
            queue.lanes.add(job.lane(), job);
        }
        let mut slow = Vec::new();
        while slow.len() < SLOW_MAX {
            slow.extend(std::iter::from_fn(|| queue.begin()));
            queue.next_window();
        }
        queue.next_window();
        let file = file();
        for _ in 0..TURNS_MAX {
            let job = Job { file: Arc::clone(&file), ..job(Work::SyncData) };
            queue.lanes.add(job.lane(), job);
        }
        let begun = |queue: &mut Queue| std::iter::from_fn(|| queue.begin()).count();
        assert_eq!(begun(&mut queue), 1);
        // No window ends any more: nobody has to watch.
        for Begun { window, lane, .. } in slow {
            queue.end(lane, window);
        }
        assert_eq!(begun(&mut queue), TURNS_MAX - 1);
    }

    #[test]
    fn a_window_ends_while_somebody_watches() {
        let mut queue = Queue::default();
        assert!(queue.watch() <= WINDOW);
        queue.window_end = Some(now() + 100 * WINDOW);
        queue.watched();
        assert_eq!(queue.window, 0, "it was called before the end");
        queue.window_end = Some(now());
        assert_eq!(queue.watch(), Duration::ZERO);
        queue.watched();
        assert_eq!((queue.window, queue.window_end), (1, None));
    }

    #[test]
    fn file_whose_changes_wait_for_each_other_keeps_one_thread_busy() {
        let remote = Arc::new(Remote::new().expect("made"));
        let mut threads = Threads::new(remote);
        let (file, mut ops, mut ended) = (file(), Ops::default(), Vec::new());
        for generation in 0..1000 {
            let key = OpKey { index: 0, generation };
            let work = Work::SetLen { len: 4096 };
            threads.give(Job { key, file: Arc::clone(&file), ..job(work) });
        }
        while ended.len() < 1000 {
            threads.take_finished(&mut ops, &mut ended, |_| {});
        }
        assert_eq!(threads.shared.queue.lock().threads, 1);
    }

    #[test]
    fn every_job_ends_and_the_sleeper_is_told() {
        let remote = Arc::new(Remote::new().expect("made"));
        let mut threads = Threads::new(Arc::clone(&remote));
        let files: Vec<_> = (0..40).map(|_| file()).collect();
        let (mut state, mut ops) = (1, Ops::default());
        let mut below = |bound: u64| next_random(&mut state) % bound;
        for round in 0..3000 {
            let count = 1 + below(if round % 10 == 0 { 200 } else { 3 });
            for generation in 0..u32::try_from(count).expect("few") {
                let file = &files[usize::try_from(below(40)).expect("few")];
                let work = match below(2) {
                    0 => Work::SyncData,
                    _ => Work::Fallocate {
                        mode: FallocateFlags::empty(),
                        offset: below(64) << 12,
                        len: 4096,
                    },
                };
                let key = OpKey { index: 0, generation };
                threads.give(Job { key, file: Arc::clone(file), ..job(work) });
            }
            let mut ended = Vec::new();
            while threads.given > 0 {
                if threads.may_sleep() {
                    let mut bell = [PollFd::new(remote.bell(), PollFlags::IN)];
                    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
                    assert_ne!(poll(&mut bell, Some(&limit)), Ok(0), "round {round}: not told");
                    remote.clear_bell();
                }
                threads.take_finished(&mut ops, &mut ended, |_| {});
            }
            let mut numbers: Vec<_> = ended.iter().map(|(key, _)| key.generation).collect();
            numbers.sort_unstable();
            assert!(numbers.iter().copied().map(u64::from).eq(0..count), "each once");
            assert!(ended.iter().all(|(_, code)| *code == 0), "{ended:?}");
        }
    }
}
