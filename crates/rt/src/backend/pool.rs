//! The pool backend, for systems that refuse io_uring: threads for files, poll(2) for sockets.
//!
//! Whatever changes a file goes to a thread, since even a write into the page cache may wait.
//! A read through the page cache is first tried on the spot with RWF_NOWAIT, which needs no thread
//! when the data is cached. With O_DIRECT that flag waits for the device, so it is not used there.
//!
//! Invariants
//! - I1 A thread owns the buffer that it reads into or writes from: it is moved to the thread and
//!   back.
//! - I2 A socket operation is retried only after poll reported it ready.

use crate::buf::Buf;
use crate::file::{Access, File};
use crate::op::{OpKey, OpKind, Ops, resume_at};
use crate::remote::Remote;
use crate::socket::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Threads of one executor's pool: enough to keep a disk busy at depth 32.
const THREADS_MAX: usize = 32;

pub(crate) struct Pool {
    shared: Arc<Shared>,
    remote: Arc<Remote>,
    threads: Vec<JoinHandle<()>>,
    /// Operations given to threads and not yet finished.
    working: usize,
    waiting: Vec<Waiting>,
}

/// A socket operation that waits until poll reports it ready.
struct Waiting {
    key: OpKey,
    socket: Arc<Socket>,
    events: PollFlags,
}

struct Job {
    key: OpKey,
    file: Arc<File>,
    work: Work,
}

/// What a thread does with the file of a job.
enum Work {
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

impl Pool {
    #[expect(clippy::unnecessary_wraps, reason = "the same shape as the other backends")]
    pub(crate) fn new(remote: Arc<Remote>) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            job_added: Condvar::new(),
            finished: Mutex::default(),
            remote: Arc::clone(&remote),
        });
        Ok(Self { shared, remote, threads: Vec::new(), working: 0, waiting: Vec::new() })
    }

    pub(crate) fn submit(&mut self, key: OpKey, op: &mut OpKind) -> Option<i32> {
        match op {
            OpKind::Read { file, buf, offset, done } => {
                self.submit_read(key, file, buf, *offset, *done)
            }
            OpKind::Write { file, buf, offset, done } => {
                let done = resume_at(file, *done);
                let offset = *offset + done as u64;
                let buf = std::mem::replace(buf, Buf::new(0));
                self.give(key, file, Work::Write { buf, done, offset });
                None
            }
            OpKind::SyncData { file } => {
                self.give(key, file, Work::SyncData);
                None
            }
            OpKind::Fallocate { file, mode, offset, len } => {
                let (mode, offset, len) = (*mode, *offset, *len);
                self.give(key, file, Work::Fallocate { mode, offset, len });
                None
            }
            OpKind::Recv { socket, buf } => {
                self.try_or_wait(key, socket, PollFlags::IN, |socket| {
                    let flags = rustix::net::RecvFlags::DONTWAIT;
                    rustix::net::recv(socket, buf.own_bytes(), flags).map(|(_, count)| count)
                })
            }
            OpKind::Send { socket, parts } => {
                self.try_or_wait(key, socket, PollFlags::OUT, |socket| socket.try_send(parts))
            }
            OpKind::Readable { socket } => {
                self.wait_for(key, socket, PollFlags::IN);
                None
            }
            OpKind::Simulated { .. } => Some(-libc::ENOSYS),
        }
    }

    pub(crate) fn cancel(&mut self, key: OpKey) {
        // Answered at the next turn: a waiting operation without events completes as cancelled.
        for waiting in &mut self.waiting {
            if waiting.key == key {
                waiting.events = PollFlags::empty();
            }
        }
    }

    pub(crate) fn turn(
        &mut self,
        wait: Option<Duration>,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
    ) {
        self.waiting.retain(|waiting| {
            let cancelled = waiting.events.is_empty();
            if cancelled {
                completions.push((waiting.key, -libc::ECANCELED));
            }
            !cancelled
        });
        let wait = if completions.is_empty() { wait } else { Some(Duration::ZERO) };
        if wait != Some(Duration::ZERO) || self.working > 0 || !self.waiting.is_empty() {
            self.poll(wait, ops, completions);
        }
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

    fn poll(&mut self, wait: Option<Duration>, ops: &mut Ops, completions: &mut Vec<(OpKey, i32)>) {
        let mut fds = Vec::with_capacity(self.waiting.len() + 1);
        fds.push(PollFd::new(self.remote.bell(), PollFlags::IN));
        for Waiting { socket, events, .. } in &self.waiting {
            fds.push(PollFd::from_borrowed_fd(socket.as_fd(), *events));
        }
        let timeout = wait.map(|wait| Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: wait.subsec_nanos().into(),
        });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("poll: {error}"),
        }
        let fired: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(fds);
        if fired[0] {
            self.remote.clear_bell();
        }
        let waiting = std::mem::take(&mut self.waiting);
        for (waiting, fired) in waiting.into_iter().zip(fired.into_iter().skip(1)) {
            if !fired {
                self.waiting.push(waiting);
                continue;
            }
            let key = waiting.key;
            let code = match ops.kind_mut(key) {
                OpKind::Readable { .. } => Some(0),
                kind => self.submit(key, kind),
            };
            completions.extend(code.map(|code| (key, code)));
        }
    }

    fn submit_read(
        &mut self,
        key: OpKey,
        file: &Arc<File>,
        buf: &mut Buf,
        offset: u64,
        done: usize,
    ) -> Option<i32> {
        let done = resume_at(file, done);
        let offset = offset + done as u64;
        if file.access() == Access::Buffered {
            match buf.read_now(file, done, offset) {
                Ok(count) => return Some(code_of(Ok(count))),
                // Not cached, or a file system without NOWAIT support: a thread reads it.
                Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL) => {}
                Err(error) => return Some(code_of(Err(error))),
            }
        }
        let buf = std::mem::replace(buf, Buf::new(0));
        self.give(key, file, Work::Read { buf, done, offset });
        None
    }

    /// Gives `work` to a thread.
    fn give(&mut self, key: OpKey, file: &Arc<File>, work: Work) {
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

    fn try_or_wait(
        &mut self,
        key: OpKey,
        socket: &Arc<Socket>,
        events: PollFlags,
        attempt: impl FnOnce(&Socket) -> Result<usize, Errno>,
    ) -> Option<i32> {
        match attempt(socket) {
            Err(Errno::AGAIN) => {
                self.wait_for(key, socket, events);
                None
            }
            result => Some(code_of(result)),
        }
    }

    fn wait_for(&mut self, key: OpKey, socket: &Arc<Socket>, events: PollFlags) {
        self.waiting.push(Waiting { key, socket: Arc::clone(socket), events });
    }
}

impl Drop for Pool {
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

fn code_of(result: Result<usize, Errno>) -> i32 {
    match result {
        Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
        Err(error) => -error.raw_os_error(),
    }
}
