//! Threads that do for one executor what may wait for a file.
//!
//! Invariants
//! - I1 A thread owns the buffer that it reads into or writes from: it is moved to the thread and
//!   back.

use crate::buf::Buf;
use crate::file::File;
use crate::op::{OpKey, OpKind, Ops};
use crate::remote::Remote;
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Threads of one executor's pool: enough to keep a disk busy at depth 32.
const THREADS_MAX: usize = 32;

pub(super) struct Threads {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Operations given to threads and not yet finished.
    working: usize,
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
    job_added: Condvar,
    finished: Mutex<Vec<(Job, i32)>>,
    remote: Arc<Remote>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    idle_threads: usize,
    closed: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            job_added: Condvar::new(),
            finished: Mutex::default(),
            remote,
        });
        Self { shared, threads: Vec::new(), working: 0 }
    }

    /// Whether an operation was given to a thread and is not yet finished.
    pub(super) fn are_working(&self) -> bool {
        self.working > 0
    }

    /// Takes over the buffers and outcomes of finished work.
    pub(super) fn take_finished(&mut self, ops: &mut Ops, completions: &mut Vec<(OpKey, i32)>) {
        for (job, code) in lock(&self.shared.finished).drain(..) {
            self.working -= 1;
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

    /// Gives `work` to a thread.
    pub(super) fn give(&mut self, key: OpKey, file: &Arc<File>, work: Work) {
        let job = Job { key, file: Arc::clone(file), work };
        let mut queue = lock(&self.shared.queue);
        queue.jobs.push_back(job);
        let need_thread = queue.idle_threads < queue.jobs.len();
        drop(queue);
        self.working += 1;
        if need_thread && self.threads.len() < THREADS_MAX {
            self.add_thread();
        }
        self.shared.job_added.notify_one();
    }

    fn add_thread(&mut self) {
        let shared = Arc::clone(&self.shared);
        let name = "mica-io".to_owned();
        match std::thread::Builder::new().name(name).spawn(move || shared.work()) {
            Ok(thread) => self.threads.push(thread),
            Err(error) if self.threads.is_empty() => {
                tracing::warn!(%error, "cannot start an I/O thread: file I/O blocks its queue");
                lock(&self.shared.queue).closed = true;
                self.shared.work();
                lock(&self.shared.queue).closed = false;
            }
            Err(error) => tracing::warn!(%error, "the thread pool is smaller than planned"),
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        lock(&self.shared.queue).closed = true;
        self.shared.job_added.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        loop {
            let mut queue = lock(&self.queue);
            let mut job = loop {
                if let Some(job) = queue.jobs.pop_front() {
                    break job;
                }
                if queue.closed {
                    return;
                }
                queue.idle_threads += 1;
                queue = self.job_added.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.idle_threads -= 1;
            };
            drop(queue);
            let code = code_of(job.run());
            lock(&self.finished).push((job, code));
            self.remote.ring();
        }
    }
}

impl Job {
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
