//! The io_uring backend: one ring per executor, and threads for what a ring does badly.
//!
//! The kernel lets the changes of one regular file wait for each other, and sorts files for that
//! into 64 buckets by a hash: a file that waits, for a frozen file system perhaps for hours, holds
//! up every other file of its bucket. So a change is tried in the ring only where it can be tried
//! without waiting ([`Way::Try`]); otherwise, and if that fails, it goes
//! to threads of our own, which know the files apart.
//!
//! Invariants
//! - I1 The kernel is handed only memory that the operation's slot owns until the completion
//!   arrives ([`crate::op`] I1), so every pointer in a submission outlives it.
//! - I2 The bell is always armed: its completion is taken in and it is armed again in one turn.
//! - I3 Only operations that the kernel supports are submitted: `new` probes for them.
//! - I4 A ring does nothing else, no matter who controls it: no filter of system calls sees what
//!   goes through a ring, so the kernel gets the list of operations, which is then sealed.

use super::in_place::{InPlace, is_fit};
use super::lone_sync::{Disturbed, Due, LoneSyncs};
use super::now;
use super::offload::Offload;
use super::threads::Threads;
use crate::file::{Access, File, Way};
use crate::looking::{Looking, ran_dry};
use crate::op::{OpKey, OpKind, Ops, resume_at};
use crate::remote::Remote;
use crate::restrict::enable;
use crate::send::{SEND_BUFS_MAX, SendParts};
use io_uring::types::{Fd, FsyncFlags, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

/// Entries of the submission queue: what one turn can submit with one system call.
const SUBMISSIONS_MAX: u32 = 256;
/// Entries of the completion queue. More completions than this wait in the kernel.
const COMPLETIONS_MAX: u32 = 2048;
/// After so many reads past the page cache the kernel gets what there is, instead of at the end of
/// the turn: it prepares all that it gets before the device has the first of it, and a device that
/// waits for the next requests of many clients' reads would be idle meanwhile.
const HELD_READS_MAX: u32 = 8;
/// How long an executor polls for completions before it sleeps. A processor that went to sleep
/// takes about as long to wake; polling longer costs processor time and gains nothing more.
const LOOK_MAX: Duration = Duration::from_micros(15);
/// A wait up to this long counts as short: the next one may be short as well.
const SHORT_WAIT_MAX: Duration = Duration::from_micros(60);
/// Largest single read, write or receive that is submitted: the length field has 32 bits.
const LENGTH_MAX: usize = 1 << 30;
/// Threads of the kernel that may wait for files at once. It starts one only when all the others
/// wait, and by default stops at four per processor: then a disk that answers nothing would hold up
/// the others.
const KERNEL_THREADS_MAX: u32 = 1024;

/// The operations of a ring.
const NEEDED: [u8; 10] = [
    opcode::Read::CODE,
    opcode::Fadvise::CODE,
    opcode::Write::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Recv::CODE,
    opcode::Send::CODE,
    opcode::SendMsg::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
];

const BELL: u64 = u64::MAX;
const CANCELLED: u64 = u64::MAX - 1;

pub(crate) struct Uring {
    ring: IoUring,
    remote: Arc<Remote>,
    bell_armed: bool,
    /// Completions that had to be reaped to make room for submissions.
    early: Vec<(OpKey, i32)>,
    /// Reads past the page cache that the kernel does not have yet.
    held_reads: u32,
    /// Whether the last wait was so short that polling for a while beats sleeping.
    looks_first: bool,
    in_place: InPlace,
    offload: Offload,
    lone_syncs: LoneSyncs,
    threads: Threads,
}

impl Uring {
    pub(crate) fn new(remote: Arc<Remote>) -> io::Result<Self> {
        let ring = build_ring()?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if NEEDED.iter().any(|code| !probe.is_supported(*code)) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        // The second number, 0, leaves those that wait for sockets as they are.
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut [KERNEL_THREADS_MAX, 0])
        {
            tracing::debug!(%error, "the kernel decides how many of its threads wait for files");
        }
        enable(&ring, &NEEDED, &[])?;
        Ok(Self {
            ring,
            bell_armed: false,
            early: Vec::new(),
            held_reads: 0,
            looks_first: false,
            in_place: InPlace::new(Arc::clone(&remote)),
            offload: Offload::default(),
            lone_syncs: LoneSyncs::default(),
            threads: Threads::new(Arc::clone(&remote)),
            remote,
        })
    }

    pub(crate) fn submit(&mut self, key: OpKey, op: &mut OpKind) -> Option<i32> {
        if let ControlFlow::Break(outcome) = self.write_without_ring(key, op) {
            return outcome;
        }
        let is_direct = matches!(op, OpKind::Read { file, .. } if file.access() == Access::Direct);
        let entry = match op {
            OpKind::Read { way: Way::Thread, .. }
            | OpKind::SyncData { way: Way::Thread, .. }
            | OpKind::ReadAhead { way: Way::Thread, .. }
            | OpKind::Fallocate { way: Way::Thread, .. }
            | OpKind::SetLen { .. }
            | OpKind::Call { .. } => {
                self.threads.give_op(key, op);
                return None;
            }
            OpKind::Read { file, buf, offset, done, .. } => {
                let from = resume_at(file, *done);
                let (memory, left) = buf.target(from);
                let length = u32_of(left.min(LENGTH_MAX));
                let at = *offset + from as u64;
                opcode::Read::new(Fd(file.raw()), memory, length).offset(at).build()
            }
            OpKind::Write { file, buf, offset, done, way } => {
                let from = resume_at(file, *done);
                let flags = if *way == Way::Try { libc::RWF_NOWAIT } else { 0 };
                write_entry(file, &buf[from..], *offset + from as u64).rw_flags(flags).build()
            }
            OpKind::SyncData { file, .. } => {
                if !self.lone_syncs.put_off(key, file) {
                    self.submit_sync(key, file);
                }
                return None;
            }
            // The kernel does it on a thread of its own.
            OpKind::ReadAhead { file, offset, len, .. } => {
                opcode::Fadvise::new(Fd(file.raw()), i64::from(*len), libc::POSIX_FADV_WILLNEED)
                    .offset(*offset)
                    .build()
            }
            OpKind::Fallocate { file, mode, offset, len, .. } => {
                let mode = mode.bits().cast_signed();
                opcode::Fallocate::new(Fd(file.raw()), *len).offset(*offset).mode(mode).build()
            }
            OpKind::Recv { socket, buf } => {
                let length = u32_of(buf.len().min(LENGTH_MAX));
                opcode::Recv::new(Fd(socket.raw()), buf.target(0).0, length).build()
            }
            OpKind::Send { socket, parts } => send_entry(Fd(socket.raw()), parts),
            OpKind::Readable { socket } => {
                opcode::PollAdd::new(Fd(socket.raw()), u32::from(POLL_IN)).build()
            }
            OpKind::Simulated { .. } => return Some(-libc::ENOSYS),
        };
        self.push(entry.user_data(key.to_user_data()));
        if is_direct {
            self.hold_read();
        }
        None
    }

    /// Does a write in place, or gives it to a thread. What is left to the ring continues.
    fn write_without_ring(&mut self, key: OpKey, op: &mut OpKind) -> ControlFlow<Option<i32>> {
        let OpKind::Write { file, buf, offset, done, way } = op else {
            return ControlFlow::Continue(());
        };
        self.lone_syncs.note_write(buf.len() - *done);
        // A short write continues elsewhere, where it is reported why it was short.
        if *done == 0 && is_fit(file, buf) {
            // Both are asked each time: each forgets what it has told.
            if self.in_place.has_slept() | ran_dry() {
                self.offload.note_rest();
            }
            if self.offload.takes(buf.len(), self.threads.offloaded()) {
                self.threads.offload(key, op);
                return ControlFlow::Break(None);
            }
            if let Some(count) = self.in_place.write(file, buf, *offset, &mut self.offload) {
                let count = i32::try_from(count).expect("shorter than what is tried");
                return ControlFlow::Break(Some(count));
            }
        }
        if *way == Way::Thread {
            self.threads.give_op(key, op);
            return ControlFlow::Break(None);
        }
        ControlFlow::Continue(())
    }

    /// Counts a read past the page cache that was pushed; hands them over when they are enough.
    fn hold_read(&mut self) {
        self.held_reads += 1;
        if self.held_reads >= HELD_READS_MAX {
            self.enter(Some(Duration::ZERO));
        }
    }

    pub(crate) fn cancel(&mut self, key: OpKey) {
        let entry = opcode::AsyncCancel::new(key.to_user_data()).build().user_data(CANCELLED);
        self.push(entry);
    }

    pub(crate) fn turn(
        &mut self,
        wait: Option<Duration>,
        ops: &mut Ops,
        completions: &mut Vec<(OpKey, i32)>,
    ) {
        if !self.bell_armed {
            let bell = Fd(self.remote.bell().as_raw_fd());
            let entry = opcode::PollAdd::new(bell, u32::from(POLL_IN)).build().user_data(BELL);
            self.bell_armed = true;
            self.push(entry);
        }
        let wait = if self.early.is_empty() { wait } else { Some(Duration::ZERO) };
        let wait = match self.lone_syncs.is_waiting() {
            true => self.sync_if_due(wait, completions),
            false => wait,
        };
        self.enter(self.threads.call_again(wait));
        completions.append(&mut self.early);
        self.take_in(completions);
        self.threads.take_finished(ops, completions, |took| self.offload.note(took));
        self.offload.begin_turn(self.threads.offloaded());
    }

    fn submit_sync(&mut self, key: OpKey, file: &File) {
        self.lone_syncs.note_submitted(key);
        let sync = opcode::Fsync::new(Fd(file.raw())).flags(FsyncFlags::DATASYNC).build();
        self.push(sync.user_data(key.to_user_data()));
    }

    /// Does the sync that was put off, if this is the moment, and returns how long the turn may
    /// wait then.
    fn sync_if_due(
        &mut self,
        wait: Option<Duration>,
        completions: &mut Vec<(OpKey, i32)>,
    ) -> Option<Duration> {
        let is_idle = wait != Some(Duration::ZERO) && {
            self.enter(Some(Duration::ZERO));
            has_news(&mut self.ring, &self.remote, &self.threads) == Disturbed::No
        };
        match self.lone_syncs.due(is_idle) {
            Some(Due::Here(sync)) => {
                self.remote.set_is_writing(true);
                let (ring, remote, threads) = (&mut self.ring, &self.remote, &self.threads);
                let code = self.lone_syncs.sync(&sync, || has_news(ring, remote, threads));
                self.remote.set_is_writing(false);
                self.in_place.note_rest();
                completions.push((sync.key, code));
            }
            Some(Due::InRing(sync)) => self.submit_sync(sync.key, sync.file()),
            None => {}
        }
        Some(Duration::ZERO)
    }

    fn take_in(&mut self, completions: &mut Vec<(OpKey, i32)>) {
        for completion in self.ring.completion() {
            match completion.user_data() {
                BELL => {
                    self.remote.clear_bell();
                    self.bell_armed = false;
                    self.lone_syncs.note_event(None);
                }
                CANCELLED => {}
                data => {
                    let key = OpKey::from_user_data(data);
                    self.lone_syncs.note_event(Some(key));
                    completions.push((key, completion.result()));
                }
            }
        }
    }

    fn enter(&mut self, wait: Option<Duration>) {
        self.held_reads = 0;
        let waits = wait != Some(Duration::ZERO) && self.ring.completion().is_empty();
        let result = if waits {
            self.wait(wait)
        } else {
            let submissions = self.ring.submission();
            // The flags say when the kernel has work that only a call lets it do.
            if submissions.is_empty() && !submissions.taskrun() && !submissions.cq_overflow() {
                return;
            }
            drop(submissions);
            self.ring.submit()
        };
        match result {
            Ok(_) => {}
            // The time ran out, a signal arrived, or completions must be reaped first: the caller's
            // next turn carries on.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETIME | libc::EINTR | libc::EBUSY | libc::EAGAIN)
                ) => {}
            Err(error) => panic!("io_uring_enter: {error}"),
        }
    }

    /// Submits, and waits for a completion: polling for a while if the last wait was short, then
    /// asleep.
    fn wait(&mut self, wait: Option<Duration>) -> io::Result<usize> {
        let start = now();
        if self.looks_first
            && let Some(_looking) = Looking::begin()
        {
            self.ring.submit()?;
            while start.elapsed() < LOOK_MAX.min(wait.unwrap_or(LOOK_MAX)) {
                let submissions = self.ring.submission();
                let is_flagged = submissions.taskrun() || submissions.cq_overflow();
                drop(submissions);
                if is_flagged || !self.ring.completion().is_empty() {
                    return self.ring.submit();
                }
                if self.threads.have_finished() {
                    return Ok(0);
                }
                self.offload.note_rest();
                std::hint::spin_loop();
            }
        }
        if !self.threads.may_sleep() {
            return self.ring.submit();
        }
        let timespec;
        let mut args = SubmitArgs::new();
        if let Some(wait) = wait {
            timespec = Timespec::from(wait);
            args = args.timespec(&timespec);
        }
        self.in_place.note_rest();
        let result = self.ring.submitter().submit_with_args(1, &args);
        self.looks_first = start.elapsed() <= SHORT_WAIT_MAX;
        result
    }

    fn push(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: I1 for operations; the bell and a cancellation name no memory.
            if unsafe { self.ring.submission().push(&entry) }.is_ok() {
                return;
            }
            self.enter(Some(Duration::ZERO));
            if self.ring.submission().is_full() {
                // The kernel accepts nothing more until there is room for completions.
                let mut early = std::mem::take(&mut self.early);
                self.take_in(&mut early);
                self.early = early;
            }
        }
    }
}

/// Whether something is there for the executor to do, or only a call away.
fn has_news(ring: &mut IoUring, remote: &Remote, threads: &Threads) -> Disturbed {
    let submissions = ring.submission();
    let is_flagged = submissions.taskrun() || submissions.cq_overflow();
    drop(submissions);
    let is_quiet = !is_flagged
        && ring.completion().is_empty()
        && !remote.has_items()
        && !threads.have_finished();
    if is_quiet { Disturbed::No } else { Disturbed::Yes }
}

const POLL_IN: u16 = libc::POLLIN.cast_unsigned();

fn build_ring() -> io::Result<IoUring> {
    // Newest kernels first: completions are processed on this thread, when it asks for them.
    let attempts: [fn(&mut io_uring::Builder); 3] = [
        |builder| {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        },
        |builder| {
            builder.setup_coop_taskrun().setup_taskrun_flag();
        },
        |_| {},
    ];
    let mut last = io::Error::from(io::ErrorKind::Unsupported);
    for configure in attempts {
        let mut builder = IoUring::builder();
        builder.setup_cqsize(COMPLETIONS_MAX).setup_r_disabled();
        configure(&mut builder);
        match builder.build(SUBMISSIONS_MAX) {
            Ok(ring) => {
                if !ring.params().is_feature_ext_arg() || !ring.params().is_feature_nodrop() {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                return Ok(ring);
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

/// A write of `bytes`, which stay where they are until it is done.
fn write_entry(file: &File, bytes: &[u8], offset: u64) -> opcode::Write {
    let length = u32_of(bytes.len().min(LENGTH_MAX));
    opcode::Write::new(Fd(file.raw()), bytes.as_ptr(), length).offset(offset)
}

fn send_entry(fd: Fd, parts: &mut SendParts) -> squeue::Entry {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
    if parts.bufs.len() == 1 {
        let buf = &parts.bufs[0];
        let length = u32_of(buf.len().min(LENGTH_MAX));
        return opcode::Send::new(fd, buf.as_ptr(), length).flags(flags).build();
    }
    let message = parts.scratch.message.get_or_insert_with(|| {
        // SAFETY: an all-zero msghdr is a valid one that names nothing.
        Box::new((unsafe { std::mem::zeroed() }, Vec::new()))
    });
    let (header, vectors) = &mut **message;
    vectors.clear();
    vectors.extend(
        parts.bufs.iter().take(SEND_BUFS_MAX).map(|buf| libc::iovec {
            iov_base: buf.as_ptr().cast_mut().cast(),
            iov_len: buf.len(),
        }),
    );
    header.msg_iov = vectors.as_mut_ptr();
    header.msg_iovlen = vectors.len();
    opcode::SendMsg::new(fd, &raw const *header).flags(flags.cast_unsigned()).build()
}

fn u32_of(length: usize) -> u32 {
    u32::try_from(length).expect("bounded by the caller")
}
