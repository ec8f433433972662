//! What bytes lie in: a file, an object, memory. Knows addresses and nothing of formats.

use crate::{Error, LocalFuture, Result};
use mica_rt::{Buf, Op};
use mica_units::HostOffset;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// What a run of a store is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunKind {
    /// Bytes were written here, as far as the store knows.
    Data,
    /// Nothing was written: reads as zeros.
    Hole,
}

/// A run of bytes of one kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// What it is.
    pub kind: RunKind,
    /// How long it is, in bytes; never zero.
    pub len: u64,
}

/// A place for bytes. Shared by all queues; each call runs on the executor of the calling thread.
pub trait Store: Send + Sync {
    /// Fills `buf` from `offset` on. What lies beyond the end reads as zeros, as it does in QEMU.
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture;

    /// Length in bytes.
    ///
    /// # Errors
    /// What the system says.
    fn len(&self) -> Result<u64>;

    /// Bytes that it takes where it is kept; less than its length if it has holes.
    ///
    /// # Errors
    /// What the system says.
    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }

    /// Whether there is no byte in it.
    ///
    /// # Errors
    /// What the system says.
    fn is_empty(&self) -> Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// What lies at `offset`, and for how long at most `len` bytes that is so.
    ///
    /// # Errors
    /// What the system says.
    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run>;

    /// What the store is called in messages.
    fn name(&self) -> String;
}

/// A read in flight. Resolves to the outcome and the buffer; an error leaves the buffer's content
/// unspecified.
#[must_use = "the buffer comes back only when awaited"]
pub enum IoFuture {
    /// One operation on a file.
    File(FileRead),
    /// Anything longer.
    Boxed(LocalFuture<'static, (Result<()>, Buf)>),
    /// Known already.
    Ready(Option<(Result<()>, Buf)>),
}

/// A read of a file. See [`IoFuture::file`].
pub struct FileRead {
    op: Op,
    offset: HostOffset,
}

impl IoFuture {
    /// Waits for `op`, which reads at `offset`, and fills with zeros what lies beyond the end.
    pub fn file(op: Op, offset: HostOffset) -> Self {
        Self::File(FileRead { op, offset })
    }

    /// Boxes `future`.
    pub fn boxed(future: impl Future<Output = (Result<()>, Buf)> + 'static) -> Self {
        Self::Boxed(Box::pin(future))
    }
}

impl Future for IoFuture {
    type Output = (Result<()>, Buf);

    #[inline]
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.get_mut() {
            Self::File(read) => Pin::new(&mut read.op).poll(context).map(|(result, mut buf)| {
                let result = match result {
                    Ok(count) => {
                        buf[count..].fill(0);
                        Ok(())
                    }
                    Err(error) => {
                        let (len, offset) = (buf.len(), read.offset);
                        Err(Error::from_io(format!("reading {len} bytes at {offset}"), error))
                    }
                };
                (result, buf)
            }),
            Self::Boxed(future) => future.as_mut().poll(context),
            Self::Ready(output) => Poll::Ready(output.take().expect("polled after it was ready")),
        }
    }
}

/// Reads `len` bytes at `offset` into a buffer of their own.
///
/// # Errors
/// What the store says, with its name.
pub async fn read_exact(store: &dyn Store, offset: HostOffset, len: usize) -> Result<Buf> {
    let (result, buf) = store.read_at(Buf::new(len), offset).await;
    match result {
        Ok(()) => Ok(buf),
        Err(error) => Err(error.wrap(store.name())),
    }
}
