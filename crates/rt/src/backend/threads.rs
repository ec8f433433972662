//! Threads that do for one executor what may wait for a file.
//!
//! A file may make its jobs wait for ever, so what waits is sorted into [`Lanes`], and a thread
//! that waits for long does not count: the others go on as if it were not there.
//!
//! Invariants
//! - I1 A thread owns the buffer that it reads into or writes from: it is moved to the thread and
//!   back.
//! - I2 While a job may begin, some thread is on its way to begin it. Whoever adds a job, and
//!   whoever begins one and leaves another, calls the next ([`Shared::call`]).
//! - I3 While jobs wait because [`THREADS`] are at work, one thread watches: when none has begun
//!   for [`PATIENCE`], those at work are slow and count no more, until they end.
//! - I4 The executor sleeps only if nothing is finished, and then the next job that ends rings.

use super::lanes::{LaneKey, Lanes};
use crate::buf::Buf;
use crate::file::{Access, File};
use crate::op::{OpKey, OpKind, Ops};
use crate::remote::Remote;
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Threads of one executor that are at work at once, those apart that are slow.
const THREADS: usize = 32;
/// Threads of one executor in all.
const THREADS_MAX: usize = 1024;
/// If no job has begun for so long, those at work wait for something.
const PATIENCE: Duration = Duration::from_millis(5);
/// A thread without work for so long ends.
const IDLE_MAX: Duration = Duration::from_secs(10);

pub(super) struct Threads {
    shared: Arc<Shared>,
    /// Operations given to threads and not yet taken back.
    given: usize,
}

struct Job {
    key: OpKey,
    file: Arc<File>,
    work: Work,
}

/// What a thread does with the file of a job.
pub(super) enum Work {
    Read { buf: Buf, done: usize, offset: u64 },
    Write { buf: Buf, done: usize, offset: u64 },
    SyncData,
    Fallocate { mode: FallocateFlags, offset: u64, len: u64 },
}

struct Shared {
    queue: Mutex<Queue>,
    /// There may be something to begin, or the queue is closed.
    called: Condvar,
    /// A thread has ended.
    ended: Condvar,
    finished: Mutex<Finished>,
    remote: Arc<Remote>,
}

#[derive(Default)]
struct Queue {
    lanes: Lanes<Job>,
    /// Jobs begun so far: the number of the next.
    begun: u64,
    working: usize,
    /// Of the jobs at work, those that count no more: their numbers are below `slow_below` (I3).
    slow: usize,
    slow_below: u64,
    threads: usize,
    idle_threads: usize,
    is_watched: bool,
    /// Whether a thread could not be started, which was said.
    was_refused: bool,
    is_closed: bool,
}

#[derive(Default)]
struct Finished {
    jobs: Vec<(Job, i32)>,
    /// Whether the executor sleeps, and has to be told.
    is_awaited: bool,
}

/// A job at work.
struct Begun {
    number: u64,
    lane: LaneKey,
    job: Job,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            called: Condvar::new(),
            ended: Condvar::new(),
            finished: Mutex::default(),
            remote,
        });
        Self { shared, given: 0 }
    }

    /// Whether the executor may sleep until its bell rings; if not, there is something to take.
    pub(super) fn may_sleep(&self) -> bool {
        if self.given == 0 {
            return true;
        }
        let mut finished = lock(&self.shared.finished);
        finished.is_awaited = finished.jobs.is_empty();
        finished.is_awaited
    }

    /// Takes over the buffers and outcomes of finished work.
    pub(super) fn take_finished(&mut self, ops: &mut Ops, completions: &mut Vec<(OpKey, i32)>) {
        if self.given == 0 {
            return;
        }
        let mut finished = lock(&self.shared.finished);
        finished.is_awaited = false;
        for (job, code) in finished.jobs.drain(..) {
            self.given -= 1;
            if let Work::Read { buf: back, .. } | Work::Write { buf: back, .. } = job.work {
                let (OpKind::Read { buf, .. } | OpKind::Write { buf, .. }) = ops.kind_mut(job.key)
                else {
                    unreachable!("a buffer returns to the operation that it belongs to");
                };
                *buf = back;
            }
            completions.push((job.key, code));
        }
    }

    /// Gives `work` to a thread. If there is none and none can be started, does it here.
    pub(super) fn give(&mut self, key: OpKey, file: &Arc<File>, work: Work) {
        let job = Job { key, file: Arc::clone(file), work };
        self.given += 1;
        let mut queue = lock(&self.shared.queue);
        queue.lanes.add(job.lane(), job);
        self.shared.call(&mut queue);
        while queue.threads == 0
            && let Some(begun) = queue.begin()
        {
            queue = self.shared.run(queue, begun);
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        let mut queue = lock(&self.shared.queue);
        queue.is_closed = true;
        self.shared.called.notify_all();
        while queue.threads > 0 {
            queue = self.shared.ended.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Queue {
    fn may_begin(&self) -> bool {
        self.lanes.is_ready() && self.working - self.slow < THREADS
    }

    fn begin(&mut self) -> Option<Begun> {
        if !self.may_begin() {
            return None;
        }
        let (lane, job) = self.lanes.begin()?;
        let number = self.begun;
        self.begun += 1;
        self.working += 1;
        Some(Begun { number, lane, job })
    }

    fn end(&mut self, lane: LaneKey, number: u64) {
        self.lanes.end(lane);
        self.working -= 1;
        if number < self.slow_below {
            self.slow -= 1;
        }
    }

    /// Counts the jobs that are at work no more.
    fn give_up_waiting(&mut self) {
        self.slow = self.working;
        self.slow_below = self.begun;
    }
}

impl Shared {
    /// Makes a thread look at the queue if that is of use.
    fn call(self: &Arc<Self>, queue: &mut Queue) {
        if !queue.lanes.is_ready() || (queue.is_watched && !queue.may_begin()) {
            return;
        }
        if queue.idle_threads > 0 {
            self.called.notify_one();
        } else if queue.threads < THREADS_MAX {
            match Thread::start(self, queue) {
                Ok(()) => {}
                Err(error) if !queue.was_refused => {
                    queue.was_refused = true;
                    tracing::warn!(%error, "cannot start a thread for I/O: it may be slow");
                }
                Err(_) => {}
            }
        }
    }

    fn work(self: &Arc<Self>) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(begun) = queue.begin() {
                self.call(&mut queue);
                queue = self.run(queue, begun);
                continue;
            }
            if queue.is_closed {
                return;
            }
            let watches = queue.lanes.is_ready() && !queue.is_watched;
            let wait = if watches { PATIENCE } else { IDLE_MAX };
            let before = queue.begun;
            queue.is_watched |= watches;
            queue.idle_threads += 1;
            let waited = self.called.wait_timeout(queue, wait);
            let timed_out;
            (queue, timed_out) = waited.unwrap_or_else(PoisonError::into_inner);
            queue.idle_threads -= 1;
            if watches {
                queue.is_watched = false;
                if timed_out.timed_out() && queue.begun == before {
                    queue.give_up_waiting();
                }
            } else if timed_out.timed_out() && !queue.lanes.is_ready() {
                return;
            }
        }
    }

    /// Runs a job, with the queue unlocked.
    fn run<'a>(&'a self, queue: MutexGuard<'a, Queue>, begun: Begun) -> MutexGuard<'a, Queue> {
        drop(queue);
        let Begun { number, lane, mut job } = begun;
        let code = code_of(job.run());
        let mut finished = lock(&self.finished);
        finished.jobs.push((job, code));
        let is_awaited = std::mem::take(&mut finished.is_awaited);
        drop(finished);
        if is_awaited {
            self.remote.ring();
        }
        let mut queue = lock(&self.queue);
        queue.end(lane, number);
        queue
    }
}

/// A thread, for as long as it runs.
struct Thread(Arc<Shared>);

impl Thread {
    fn start(shared: &Arc<Shared>, queue: &mut Queue) -> io::Result<()> {
        let shared = Arc::clone(shared);
        let builder = std::thread::Builder::new().name("mica-io".to_owned());
        builder.spawn(move || {
            let thread = Self(shared);
            thread.0.work();
        })?;
        // It cannot have ended: the queue is locked.
        queue.threads += 1;
        Ok(())
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        lock(&self.0.queue).threads -= 1;
        self.0.ended.notify_all();
    }
}

impl Job {
    fn lane(&self) -> LaneKey {
        let is_serial = match self.work {
            Work::Write { .. } => self.file.access() == Access::Buffered,
            Work::Fallocate { .. } => true,
            Work::Read { .. } | Work::SyncData => false,
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
            Work::Read { buf, done, offset } => buf.read_from(file, *done, *offset),
            Work::Write { buf, done, offset } => rustix::io::pwrite(file, &buf[*done..], *offset),
            Work::SyncData => fdatasync(file).map(|()| 0),
            Work::Fallocate { mode, offset, len } => {
                fallocate(file, *mode, *offset, *len).map(|()| 0)
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
        Job { key: OpKey { index: 0, generation: 0 }, file: file(), work }
    }

    #[test]
    fn changes_of_a_file_wait_for_each_other_and_nothing_else_does() {
        let write = || Work::Write { buf: Buf::zeroed(1), done: 0, offset: 0 };
        let mode = FallocateFlags::empty();
        let serial = |file: &Arc<File>, work| {
            let job = Job { file: Arc::clone(file), ..job(work) };
            job.lane() == LaneKey::serial(file)
        };
        let buffered = file();
        assert!(serial(&buffered, write()));
        assert!(serial(&buffered, Work::Fallocate { mode, offset: 0, len: 1 }));
        assert!(!serial(&buffered, Work::SyncData));
        assert!(!serial(&buffered, Work::Read { buf: Buf::zeroed(1), done: 0, offset: 0 }));
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
        let mut slow = begin(&mut queue);
        assert_eq!(slow.len(), THREADS);
        queue.give_up_waiting();
        let mut others = begin(&mut queue);
        assert_eq!(others.len(), THREADS);
        let end = |queue: &mut Queue, from: &mut Vec<Begun>| {
            let Begun { number, lane, .. } = from.pop().expect("at work");
            queue.end(lane, number);
        };
        end(&mut queue, &mut slow);
        assert!(!queue.may_begin(), "a slow one made no room before, and makes none now");
        end(&mut queue, &mut others);
        assert_eq!(begin(&mut queue).len(), 1);
        while !slow.is_empty() {
            end(&mut queue, &mut slow);
        }
        assert_eq!((queue.working, queue.slow), (THREADS, 0));
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
                threads.give(OpKey { index: 0, generation }, file, work);
            }
            let mut ended = Vec::new();
            while threads.given > 0 {
                if threads.may_sleep() {
                    let mut bell = [PollFd::new(remote.bell(), PollFlags::IN)];
                    let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
                    assert_ne!(poll(&mut bell, Some(&limit)), Ok(0), "round {round}: not told");
                    remote.clear_bell();
                }
                threads.take_finished(&mut ops, &mut ended);
            }
            let mut numbers: Vec<_> = ended.iter().map(|(key, _)| key.generation).collect();
            numbers.sort_unstable();
            assert!(numbers.iter().copied().map(u64::from).eq(0..count), "each once");
            assert!(ended.iter().all(|(_, code)| *code == 0), "{ended:?}");
        }
    }
}
