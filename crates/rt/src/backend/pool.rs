//! The pool backend, for systems that refuse io_uring: threads for files, poll(2) for sockets.
//!
//! Whatever changes a file goes to a thread, since even a write into the page cache may wait.
//! A read through the page cache is first tried on the spot with RWF_NOWAIT, which needs no thread
//! when the data is cached. With O_DIRECT that flag waits for the device, so it is not used there.
//!
//! Invariants
//! - I1 A socket operation is retried only after poll reported it ready.

use super::threads::{Threads, code_of};
use crate::file::{Access, Way};
use crate::op::{OpKey, OpKind, Ops};
use crate::remote::Remote;
use crate::socket::Socket;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

pub(crate) struct Pool {
    remote: Arc<Remote>,
    threads: Threads,
    waiting: Vec<Waiting>,
}

/// A socket operation that waits until poll reports it ready.
struct Waiting {
    key: OpKey,
    socket: Arc<Socket>,
    events: PollFlags,
}

impl Pool {
    #[expect(clippy::unnecessary_wraps, reason = "the same shape as the other backends")]
    pub(crate) fn new(remote: Arc<Remote>) -> io::Result<Self> {
        let threads = Threads::new(Arc::clone(&remote));
        Ok(Self { remote, threads, waiting: Vec::new() })
    }

    pub(crate) fn submit(&mut self, key: OpKey, op: &mut OpKind) -> Option<i32> {
        match op {
            OpKind::Read { file, buf, offset, done, way } => {
                if *way == Way::Ring && file.access() == Access::Buffered {
                    match buf.read_now(file, *done, *offset + *done as u64) {
                        // Not cached, or a file system without NOWAIT support.
                        Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INVAL) => {}
                        result => return Some(code_of(result)),
                    }
                }
                self.threads.give_op(key, op);
                None
            }
            OpKind::Write { .. }
            | OpKind::SyncData { .. }
            | OpKind::ReadAhead { .. }
            | OpKind::Fallocate { .. }
            | OpKind::SetLen { .. }
            | OpKind::Call { .. } => {
                self.threads.give_op(key, op);
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
        let mut wait = if completions.is_empty() { wait } else { Some(Duration::ZERO) };
        wait = self.threads.call_again(wait);
        if wait != Some(Duration::ZERO) && !self.threads.may_sleep() {
            wait = Some(Duration::ZERO);
        }
        if wait != Some(Duration::ZERO) || !self.waiting.is_empty() {
            self.poll(wait, ops, completions);
        }
        self.threads.take_finished(ops, completions, |_| {});
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
