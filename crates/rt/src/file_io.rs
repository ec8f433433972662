//! Reads, writes and what else is done to files, as operations of the runtime.

use crate::buf::Buf;
use crate::file::File;
use crate::op::OpKind;
use crate::submit::{Op, RawOp};
use rustix::fs::FallocateFlags;
use std::future::Future;
use std::io;
use std::sync::Arc;

/// Reads at `offset` until `buf` is full or the file ends; the count is less than the buffer's
/// length only at the end of the file.
///
/// # Panics
/// Outside an executor.
pub fn read_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    Op::start(OpKind::Read { file: Arc::clone(file), buf, offset, done: 0 })
}

/// Writes `buf` at `offset` until all of it is written; the count is less than the buffer's length
/// only where the file took no more and gave no error.
///
/// The write goes on when its future is dropped, but one that the system cut short is then not
/// continued.
///
/// # Panics
/// Outside an executor.
pub fn write_at(file: &Arc<File>, buf: Buf, offset: u64) -> Op {
    Op::start(OpKind::Write { file: Arc::clone(file), buf, offset, done: 0 })
}

/// Makes durable what was written to `file` before, and what is needed to read it back, its length
/// among it (fdatasync).
///
/// # Panics
/// Outside an executor.
pub fn sync_data(file: &Arc<File>) -> impl Future<Output = io::Result<()>> + use<> {
    RawOp::start(OpKind::SyncData { file: Arc::clone(file) }).outcome()
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
    RawOp::start(OpKind::Fallocate { file: Arc::clone(file), mode, offset, len }).outcome()
}
