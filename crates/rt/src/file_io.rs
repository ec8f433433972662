//! Reads, writes and other operations on files.

use crate::buf::Buf;
use crate::file::{File, Way};
use crate::op::{Call, OpKind};
use crate::submit::{Op, RawOp};
use parking_lot::Mutex;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

/// Reads at `offset` until `buf` is full or the file ends; the count is less than the buffer's
/// length only at the end of the file.
///
/// # Panics
/// Outside an executor.
pub fn read_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    let (file, way) = (Arc::clone(file), file.read_way());
    Op::start(OpKind::Read { file, buf, offset, done: 0, way })
}

/// Writes `buf` at `offset` until all of it is written; the count is less than the buffer's length
/// only if the file accepted no more and reported no error.
///
/// The write continues when its future is dropped, but a short write is then not resumed.
///
/// # Panics
/// Outside an executor.
pub fn write_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    let (file, way) = (Arc::clone(file), file.write_way());
    Op::start(OpKind::Write { file, buf, offset, done: 0, way })
}

/// Makes durable what was written to `file` before, and what is needed to read it back, including
/// its length (fdatasync).
///
/// # Panics
/// Outside an executor.
pub fn sync_data(file: &Arc<File>) -> impl Future<Output = io::Result<()>> + use<> {
    RawOp::start(OpKind::SyncData { file: Arc::clone(file), way: Way::Ring }).outcome()
}

/// Begins to read `len` bytes at `offset` of `file`, which is read through the page cache, into
/// that; resolves when that is under way. It may be ignored, and never changes what is read.
///
/// # Panics
/// Outside an executor.
pub fn read_ahead(
    file: &Arc<File>,
    offset: u64,
    len: u32,
) -> impl Future<Output = io::Result<()>> + use<> {
    let (file, way) = (Arc::clone(file), file.read_way());
    RawOp::start(OpKind::ReadAhead { file, offset, len, way }).outcome()
}

/// Whether the byte at `offset` of `file` is in the page cache; true as well if there is no way to
/// tell. If it is not, the system begins to read it, and may block for a moment.
pub fn is_cached(file: &File, offset: u64) -> bool {
    file.read_way() != Way::Ring || file.probe(offset) != Err(Errno::AGAIN)
}

/// Changes the space of `len` bytes at `offset`, as `mode` says.
///
/// # Panics
/// Outside an executor.
pub fn fallocate(
    file: &Arc<File>,
    mode: FallocateFlags,
    offset: u64,
    len: u64,
) -> impl Future<Output = io::Result<()>> + use<> {
    let (file, way) = (Arc::clone(file), file.space_way());
    RawOp::start(OpKind::Fallocate { file, mode, offset, len, way }).outcome()
}

/// Makes `file` end after `len` bytes: what is cut off is lost, what is added reads as zeros.
///
/// # Panics
/// Outside an executor.
pub fn set_len(file: &Arc<File>, len: u64) -> impl Future<Output = io::Result<()>> + use<> {
    RawOp::start(OpKind::SetLen { file: Arc::clone(file), len }).outcome()
}

/// Runs `work` on a thread of the executor: for system calls on `file`, or on what lies beneath it
/// if it is a directory, that may wait for a device and have no operation of their own. It runs to
/// its end even if the future is dropped; a panic of it continues in whoever awaits it.
///
/// # Panics
/// Outside an executor. When awaited under the simulator, which has no threads.
pub fn on_thread<T, W>(file: &Arc<File>, work: W) -> impl Future<Output = T> + use<T, W>
where
    T: Send + 'static,
    W: FnOnce(&File) -> T + Send + 'static,
{
    let returned = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&returned);
    let call = move |file: &File| {
        // What it changed is not looked at again if it panicked.
        let output = catch_unwind(AssertUnwindSafe(|| work(file)));
        *slot.lock() = Some(output);
    };
    let (file, work) = (Arc::clone(file), Some(Box::new(call) as Call));
    let op = RawOp::start(OpKind::Call { file, work });
    async move {
        let outcome = op.outcome().await;
        let output = returned.lock().take();
        match output {
            Some(Ok(output)) => output,
            Some(Err(panic)) => resume_unwind(panic),
            None => panic!("a call on a thread without an outcome: {outcome:?}"),
        }
    }
}
