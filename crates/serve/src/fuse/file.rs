//! The kernel's requests: taken from it on one thread, handed to the executors, answered there.
//!
//! Requests that need the disk go through the gate and to an executor. The others are answered
//! here: `stat` needs no I/O, and waits for that of others only while the gate is full, which holds
//! up this thread.

use super::attributes::{Access, Change};
use super::export::{Export, Mapping};
use super::gate::REQUEST_BYTES;
use super::request::{Durability, Seek, Task};
use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo, InitFlags, IoctlFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyIoctl,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use mica_rt::{Buf, Handle, catch_panic};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// The file, as the kernel sees it.
pub(super) struct DiskFile {
    pub(super) export: Arc<Export>,
    /// The executors. Not their owner: this may be dropped last, and on one of them.
    pub(super) workers: Vec<Handle>,
    pub(super) next: AtomicUsize,
}

/// Asynchronous requests that the kernel sends at once.
const BACKGROUND_MAX: u16 = 128;
/// How long the kernel may cache attributes.
const ATTRIBUTES_FOR: Duration = Duration::from_secs(1);
const STATFS_BLOCK_BYTES: u32 = 4096;
const NAME_BYTES_MAX: u32 = 255;

/// An answer that may be an error.
trait Refuse: Send + 'static {
    fn refuse(self, errno: Errno);
}

macro_rules! refuse {
    ($($reply:ty),*) => {
        $(impl Refuse for $reply {
            fn refuse(self, errno: Errno) {
                self.error(errno);
            }
        })*
    };
}

refuse!(ReplyData, ReplyWrite, ReplyEmpty, ReplyLseek);

impl DiskFile {
    /// Runs `work` on one of the executors as soon as there is room for `bytes`.
    fn hand_over<R, F>(
        &self,
        bytes: usize,
        reply: R,
        work: impl FnOnce(Task, R) -> F + Send + 'static,
    ) where
        R: Refuse,
        F: Future<Output = ()> + 'static,
    {
        let Some(entered) = self.export.gate.enter(bytes) else {
            return reply.refuse(Errno::ESHUTDOWN);
        };
        let worker = self.next.fetch_add(1, Ordering::Relaxed) % self.workers.len();
        let export = Arc::clone(&self.export);
        self.workers[worker].spawn_with(move || async move {
            let task = Task { export: Arc::clone(&export), entered, worker };
            // A reply that is dropped answers with EIO.
            if catch_panic(async move { work(task, reply).await }).await.is_err() {
                export.stats[worker].panics.add(1);
                tracing::error!("the server panicked on a request of a FUSE file");
            }
        });
    }

    /// Counts a request that this thread refuses.
    fn refuse_here(&self, errno: Errno) -> Errno {
        self.export.stats[self.workers.len()].refused.add(1);
        errno
    }

    fn reply_attributes(&self, reply: ReplyAttr) {
        match self.export.gate.disk_len() {
            Some(len) => reply.attr(&ATTRIBUTES_FOR, &self.export.attributes.stat(len)),
            None => reply.error(Errno::ESHUTDOWN),
        }
    }
}

impl Filesystem for DiskFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let refused = || io::Error::other("a limit that FUSE does not take");
        config.set_max_write(REQUEST_BYTES).map_err(|_| refused())?;
        config.set_max_background(BACKGROUND_MAX).map_err(|_| refused())?;
        // Each makes something faster or possible; older kernels lack them.
        let mapping = match self.export.mapping {
            Mapping::Allowed => InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
            Mapping::Refused => InitFlags::empty(),
        };
        for wish in [InitFlags::FUSE_ASYNC_DIO, mapping] {
            let _ = config.add_capabilities(wish);
        }
        Ok(())
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.reply_attributes(reply);
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let outcome = match size {
            // Also for `O_TRUNC`: a stray `>` does not empty a disk.
            Some(size) if Some(size) != self.export.gate.disk_len() => Err(Errno::EPERM),
            None if atime.is_some() || mtime.is_some() => Err(Errno::EOPNOTSUPP),
            _ => self.export.attributes.set(Change { mode, uid, gid }),
        };
        match outcome {
            Ok(()) => self.reply_attributes(reply),
            Err(errno) => reply.error(self.refuse_here(errno)),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let mut answer = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        match (flags.acc_mode(), self.export.attributes.access()) {
            // Nothing to flush when it is closed.
            (OpenAccMode::O_RDONLY, _) => answer |= FopenFlags::FOPEN_NOFLUSH,
            (_, Access::ReadWrite) => {}
            (_, Access::Read) => return reply.error(self.refuse_here(Errno::EROFS)),
        }
        reply.opened(FileHandle(0), answer);
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // The kernel asks for no more than it was configured to.
        let size = size.min(REQUEST_BYTES);
        self.hand_over(size as usize, reply, async move |task, reply| {
            match task.settle(task.read(offset, size).await) {
                Ok(bytes) => reply.data(&bytes),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let is_durable = flags.0 & libc::O_DSYNC != 0;
        let durability = if is_durable { Durability::Durable } else { Durability::Done };
        // The thread's own memory is reused for the next request.
        let payload = Buf::from_slice(data);
        self.hand_over(data.len(), reply, async move |task, reply| {
            match task.settle(task.write(offset, payload, durability).await) {
                Ok(count) => reply.written(count),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.hand_over(0, reply, flush);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.hand_over(0, reply, flush);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.hand_over(0, reply, async move |task, reply| {
            match task.settle(task.fallocate(offset, length, mode).await) {
                Ok(()) => reply.ok(),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        // The kernel handles the others by itself.
        let what = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(self.refuse_here(Errno::EINVAL)),
        };
        self.hand_over(0, reply, async move |task, reply| {
            match task.settle(task.seek(offset, what).await) {
                Ok(found) => reply.offset(found),
                Err(errno) => reply.error(errno),
            }
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let Some(len) = self.export.gate.disk_len() else { return reply.error(Errno::ESHUTDOWN) };
        let blocks = len.div_ceil(STATFS_BLOCK_BYTES.into());
        reply.statfs(blocks, 0, 0, 1, 0, STATFS_BLOCK_BYTES, NAME_BYTES_MAX, STATFS_BLOCK_BYTES);
    }

    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }
}

async fn flush(task: Task, reply: ReplyEmpty) {
    match task.settle(task.flush().await) {
        Ok(()) => reply.ok(),
        Err(errno) => reply.error(errno),
    }
}
