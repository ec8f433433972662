//! Small writes to the page cache, where the ring would hand each to a thread of the kernel: on a
//! file system that cannot tell beforehand whether a write would wait (ext4). To hand over costs
//! several times what the write does, which is to copy a few pages. Here one thread per executor
//! takes all that a turn of it left, one write after the other.
//!
//! A write may wait for long: for dirty pages, for a journal, for a file system that is frozen. What
//! stands behind it belongs to other disks, so it does not stay there.
//!
//! Invariants
//! - I1 The thread owns the buffer that it writes from: it is moved there and back.
//! - I2 What the thread has not begun goes to the ring [`STALL_MAX`] after its last sign of life,
//!   and so does all that comes before the next.
//! - I3 The thread holds no lock while it writes.

use crate::buf::Buf;
use crate::file::{Access, File};
use crate::op::{OpKey, OpKind, Ops};
use crate::remote::Remote;
use rustix::io::pwrite;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Longest write that the thread gets: beside a longer one, handing over costs little.
const LENGTH_MAX: usize = 64 << 10;
/// How long the thread may be silent with work to do.
pub(super) const STALL_MAX: Duration = Duration::from_millis(1);

/// The executor's side.
pub(super) struct Writer {
    shared: Arc<Shared>,
    thread: Thread,
    /// What was asked for in this turn.
    asked: VecDeque<Job>,
    /// Writes that the thread has and has not given back.
    out: usize,
    /// How many writes it had ended at its last sign of life, and when that was seen.
    seen: (u64, Option<Instant>),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Thread {
    NotStarted,
    Runs,
    /// The system has none for us.
    Refused,
}

struct Job {
    key: OpKey,
    file: Arc<File>,
    buf: Buf,
    offset: u64,
}

struct Shared {
    queue: Mutex<Queue>,
    job_added: Condvar,
    ended: Mutex<Vec<(Job, i32)>>,
    ended_count: AtomicU64,
    /// Whether the executor sleeps, or is about to, and is to be woken.
    sleeps: AtomicBool,
    remote: Arc<Remote>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_idle: bool,
    is_closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Writer {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            job_added: Condvar::new(),
            ended: Mutex::default(),
            ended_count: AtomicU64::new(0),
            sleeps: AtomicBool::new(false),
            remote,
        });
        let (asked, seen) = (VecDeque::new(), (0, None));
        Self { shared, thread: Thread::NotStarted, asked, out: 0, seen }
    }

    /// Takes the write of `buf` at `offset` of `file` if it is one for the thread; whether it did.
    pub(super) fn take(
        &mut self,
        key: OpKey,
        file: &Arc<File>,
        buf: &mut Buf,
        offset: u64,
    ) -> bool {
        let is_small = file.access() == Access::Buffered && buf.len() <= LENGTH_MAX;
        if !is_small || !file.waits_untold() || self.is_stalled() || !self.runs() {
            return false;
        }
        let buf = std::mem::replace(buf, Buf::new(0));
        self.asked.push_back(Job { key, file: Arc::clone(file), buf, offset });
        true
    }

    /// Whether the thread is there, if need be from now on.
    fn runs(&mut self) -> bool {
        if self.thread == Thread::NotStarted {
            let shared = Arc::clone(&self.shared);
            let thread = std::thread::Builder::new().name("mica-write".to_owned());
            self.thread = match thread.spawn(move || shared.work()) {
                Ok(_) => Thread::Runs,
                Err(error) => {
                    tracing::warn!(%error, "no thread for small writes: the ring gets them");
                    Thread::Refused
                }
            };
        }
        self.thread == Thread::Runs
    }

    fn is_stalled(&self) -> bool {
        let is_silent = self.shared.ended_count.load(Ordering::SeqCst) == self.seen.0;
        is_silent && self.seen.1.is_some_and(|seen| seen.elapsed() >= STALL_MAX)
    }

    /// Gives the thread what was asked for. To be called when a turn ends.
    pub(super) fn give(&mut self) {
        if self.asked.is_empty() {
            return;
        }
        if self.out == 0 {
            self.seen.1 = Some(now());
        }
        self.out += self.asked.len();
        let mut queue = lock(&self.shared.queue);
        queue.jobs.append(&mut self.asked);
        if std::mem::take(&mut queue.is_idle) {
            drop(queue);
            self.shared.job_added.notify_one();
        }
    }

    /// How long the executor may sleep that wants to sleep for `wait`; it will be woken before if
    /// something ends.
    pub(super) fn may_sleep(&self, wait: Option<Duration>) -> Option<Duration> {
        if self.out == 0 || wait == Some(Duration::ZERO) {
            return wait;
        }
        self.shared.sleeps.store(true, Ordering::SeqCst);
        if self.shared.ended_count.load(Ordering::SeqCst) != self.seen.0 {
            return Some(Duration::ZERO);
        }
        // The last one has nothing behind it: it may take its time.
        if self.out == 1 {
            return wait;
        }
        Some(wait.map_or(STALL_MAX, |wait| wait.min(STALL_MAX)))
    }

    /// Tells what ended, and of what the ring is to do instead of the thread.
    pub(super) fn collect(
        &mut self,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
        for_the_ring: &mut Vec<OpKey>,
    ) {
        if self.out == 0 {
            return;
        }
        self.shared.sleeps.store(false, Ordering::Relaxed);
        let ended = self.shared.ended_count.load(Ordering::SeqCst);
        if ended != self.seen.0 {
            self.seen = (ended, Some(now()));
            for (job, code) in lock(&self.shared.ended).drain(..) {
                self.out -= 1;
                completions.push((job.key, code));
                give_back(ops, job);
            }
        } else if self.out > 1 && self.is_stalled() {
            let left = std::mem::take(&mut lock(&self.shared.queue).jobs);
            self.out -= left.len();
            for job in left {
                for_the_ring.push(job.key);
                give_back(ops, job);
            }
        }
        if self.out == 0 {
            self.seen.1 = None;
        }
    }
}

fn give_back(ops: &mut Ops, job: Job) {
    let OpKind::Write { buf, .. } = ops.kind_mut(job.key) else {
        unreachable!("a buffer comes back to the operation that it came from");
    };
    *buf = job.buf;
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Not waited for: a write that is still under way owns all that it needs.
        lock(&self.shared.queue).is_closed = true;
        self.shared.job_added.notify_one();
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let job = loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if queue.is_closed {
                    return;
                }
                queue.is_idle = true;
                queue = self.job_added.wait(queue).unwrap_or_else(PoisonError::into_inner);
            };
            drop(queue);
            let code = match pwrite(&*job.file, &job.buf, job.offset) {
                Ok(count) => i32::try_from(count).expect("at most the limit of length"),
                Err(error) => -error.raw_os_error(),
            };
            let mut ended = lock(&self.ended);
            ended.push((job, code));
            // Under the lock: who has seen the number finds them all.
            self.ended_count.fetch_add(1, Ordering::SeqCst);
            drop(ended);
            if self.sleeps.swap(false, Ordering::SeqCst) {
                self.remote.ring();
            }
        }
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "how long the system takes is no matter of the clock"
)]
pub(super) fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made() -> (tempfile::NamedTempFile, Arc<File>) {
        let made = tempfile::NamedTempFile::new().unwrap();
        let file = File::new(made.reopen().unwrap().into(), Access::Buffered);
        (made, Arc::new(file))
    }

    fn write_of(ops: &mut Ops, file: &Arc<File>, byte: u8, offset: u64) -> OpKey {
        let (file, buf) = (Arc::clone(file), Buf::from_slice(&[byte; 3000]));
        ops.insert(OpKind::Write { file, buf, offset, done: 0 })
    }

    fn take(writer: &mut Writer, ops: &mut Ops, key: OpKey) -> bool {
        let OpKind::Write { file, buf, offset, .. } = ops.kind_mut(key) else {
            unreachable!("made as a write");
        };
        writer.take(key, file, buf, *offset)
    }

    fn buf_len(ops: &mut Ops, key: OpKey) -> usize {
        let OpKind::Write { buf, .. } = ops.kind_mut(key) else {
            unreachable!("made as a write");
        };
        buf.len()
    }

    fn writer() -> Writer {
        Writer::new(Arc::new(Remote::new().unwrap()))
    }

    fn with_a_thread_that_does_nothing() -> Writer {
        let mut writer = writer();
        writer.thread = Thread::Runs;
        writer
    }

    #[test]
    fn writes_are_made_and_their_buffers_come_back() {
        let (made, file) = made();
        if !file.waits_untold() {
            println!("SKIPPED: the temporary folder is not on ext4");
            return;
        }
        let (mut writer, mut ops) = (writer(), Ops::default());
        let keys = [1, 2, 3].map(|byte| write_of(&mut ops, &file, byte, u64::from(byte) * 5000));
        assert!(keys.iter().all(|key| take(&mut writer, &mut ops, *key)));
        writer.give();
        let (mut completions, mut for_the_ring) = (Vec::new(), Vec::new());
        while completions.len() + for_the_ring.len() < 3 {
            writer.collect(&mut ops, &mut completions, &mut for_the_ring);
        }
        for (key, code) in &completions {
            assert_eq!((*code, buf_len(&mut ops, *key)), (3000, 3000));
        }
        let content = std::fs::read(made.path()).unwrap();
        for (byte, key) in (1_u8..).zip(keys) {
            let at = usize::from(byte) * 5000;
            let is_made = content.get(at..at + 3000) == Some(&[byte; 3000]);
            assert_eq!(is_made, !for_the_ring.contains(&key));
        }
        assert_eq!(writer.may_sleep(None), None, "nothing is awaited");
    }

    #[test]
    fn what_a_stalled_thread_has_not_begun_goes_to_the_ring() {
        let (_made, file) = made();
        if !file.waits_untold() {
            println!("SKIPPED: the temporary folder is not on ext4");
            return;
        }
        let (mut writer, mut ops) = (with_a_thread_that_does_nothing(), Ops::default());
        let keys = [1, 2].map(|byte| write_of(&mut ops, &file, byte, 0));
        assert!(keys.iter().all(|key| take(&mut writer, &mut ops, *key)));
        writer.give();
        let (mut completions, mut for_the_ring) = (Vec::new(), Vec::new());
        assert_eq!(writer.may_sleep(None), Some(STALL_MAX));
        while for_the_ring.is_empty() {
            writer.collect(&mut ops, &mut completions, &mut for_the_ring);
        }
        assert_eq!(for_the_ring, keys);
        assert!(keys.iter().all(|key| buf_len(&mut ops, *key) == 3000));
        assert_eq!(completions, []);
    }

    #[test]
    fn a_stalled_thread_gets_nothing_more() {
        let (_made, file) = made();
        if !file.waits_untold() {
            println!("SKIPPED: the temporary folder is not on ext4");
            return;
        }
        let (mut writer, mut ops) = (with_a_thread_that_does_nothing(), Ops::default());
        let key = write_of(&mut ops, &file, 1, 0);
        assert!(take(&mut writer, &mut ops, key));
        writer.give();
        // As if the thread had begun it.
        let begun = lock(&writer.shared.queue).jobs.pop_front().unwrap();
        while !writer.is_stalled() {
            std::hint::spin_loop();
        }
        let next = write_of(&mut ops, &file, 2, 0);
        assert!(!take(&mut writer, &mut ops, next), "the ring gets it");
        lock(&writer.shared.ended).push((begun, 3000));
        writer.shared.ended_count.fetch_add(1, Ordering::SeqCst);
        assert!(take(&mut writer, &mut ops, next), "it gave a sign of life");
    }

    #[test]
    fn long_and_direct_writes_are_the_rings() {
        let (made, file) = made();
        let (mut writer, key) = (writer(), OpKey { index: 0, generation: 0 });
        assert!(!writer.take(key, &file, &mut Buf::zeroed(LENGTH_MAX + 1), 0));
        let direct = File::new(made.reopen().unwrap().into(), Access::Direct);
        assert!(!writer.take(key, &Arc::new(direct), &mut Buf::zeroed(4096), 0));
    }
}
