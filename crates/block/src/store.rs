//! What bytes are stored in: a file, an object, memory. Knows addresses and nothing of formats.

use crate::{Error, ErrorKind, LocalFuture, Result};
use mica_rt::{Buf, Op, Parts};
use mica_units::HostOffset;
use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

/// What a run of a store contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunKind {
    /// Bytes were written here, as far as the store knows.
    Data,
    /// Reads as zeros, because nothing was written here, or because it was punched.
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

/// The outcome of a change to a store that has no buffer to give back.
pub type ChangeFuture = LocalFuture<'static, Result<()>>;

/// A change of the space of a range, as `fallocate` makes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Space {
    /// Gives the space back; the range reads as zeros. The length stays.
    Punch,
    /// The range reads as zeros and keeps, or gets, its space.
    Zero,
    /// The range gets space; existing bytes stay, new ones were never written
    /// ([`Store::reads_unwritten_as_zeros`]). The store grows to the range's end.
    Allocate,
}

/// Shows whether the system has lost what was written and not synced, without a reboot: the file
/// system may have been remounted, or its device may have been reconnected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Witness {
    /// Nothing shows it.
    None,
    /// A number that changes with each loss.
    MountGeneration(u64),
    /// When the file last changed, in nanoseconds since the epoch. A file that lost its last
    /// changes often has an earlier time again, but not where times become durable before data.
    /// Some file systems offer nothing better.
    Changed(i128),
}

impl Witness {
    /// Whether something was lost between `self`, which was taken earlier, and `now`.
    pub fn tells_loss(self, now: Self) -> bool {
        match (self, now) {
            (Self::MountGeneration(before), Self::MountGeneration(now)) => now != before,
            (Self::Changed(before), Self::Changed(now)) => now < before,
            _ => false,
        }
    }
}

/// Which bytes a store shows: the key under which they may be cached. It says nothing about when
/// they change.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StoreIdentity {
    /// Those of a file, as they are. The file is the same for as long as a store has it open.
    File {
        /// Device that holds it; for a block device its own number.
        device: u64,
        /// Inode on that device; zero for a block device.
        inode: u64,
    },
    /// Those shown only by stores with this number, which is unique in the process.
    Own(u64),
}

impl StoreIdentity {
    /// One that no other store has.
    pub fn own() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self::Own(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Whether it is that of a block device, which keeps its length.
    pub fn is_device(self) -> bool {
        matches!(self, Self::File { inode: 0, .. })
    }
}

/// A place for bytes. Shared by all queues; each call runs on the executor of the calling thread.
///
/// Only the changes and the hints have defaults. Changes refuse, as on a store that was opened for
/// reading, so that a wrapper that forgets to forward one fails at its first use. A default for a
/// query could be a wrong answer that nobody would notice, and so could a detour for a change.
pub trait Store: Send + Sync {
    /// Fills `buf` from `offset` on. What is beyond the end reads as zeros, as it does in QEMU.
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture;

    /// Length in bytes.
    ///
    /// # Errors
    /// What the system reports.
    fn len(&self) -> Result<u64>;

    /// Bytes that it occupies in storage; less than its length if it has holes.
    ///
    /// # Errors
    /// What the system reports.
    fn allocated_bytes(&self) -> Result<u64>;

    /// Whether it has no bytes.
    ///
    /// # Errors
    /// What the system reports.
    fn is_empty(&self) -> Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// The run at `offset`, cut at `len` bytes.
    ///
    /// # Errors
    /// What the system reports.
    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run>;

    /// The store's name in messages.
    fn name(&self) -> String;

    /// Which bytes these are: stores that have the same identity at one time show the same bytes.
    /// A store that shows other bytes than the one beneath it has an identity of its own.
    fn identity(&self) -> StoreIdentity;

    /// Whether what was never written reads as zeros: what [`Store::set_len`] and
    /// [`Space::Allocate`] added and was not written since. If not (a store that encrypts) it reads
    /// as anything, also after a power cut. What is beyond the end reads as zeros in any case, and
    /// so does what was punched or zeroed.
    fn reads_unwritten_as_zeros(&self) -> bool;

    /// A witness that shows later whether the system lost what was written until now. Does not wait
    /// for a device.
    fn witness(&self) -> Witness;

    /// Whether the byte at `offset` can be read without waiting for a device, or hints are useless
    /// here. It may begin to read it, and block for a moment. A hint.
    fn is_cached(&self, offset: HostOffset) -> bool {
        let _ = offset;
        true
    }

    /// Begins to bring `len` bytes at `offset` to where reads need not wait for a device; resolves
    /// when that is under way. A hint: it changes nothing that is read, and has no errors.
    fn read_ahead(&self, offset: HostOffset, len: u64) -> LocalFuture<'static, ()> {
        let _ = (offset, len);
        Box::pin(std::future::ready(()))
    }

    /// Writes all of `buf` from `offset` on. Reads that start after it completed see it; it is
    /// durable after the next [`Store::sync`]. The store grows if the end is beyond its own. `buf`
    /// is never changed, and may be a guest's memory: what has to be changed is changed in a copy.
    ///
    /// An error leaves each sector of the range old or new. Fails with `Denied` if the store was
    /// opened for reading.
    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let _ = offset;
        IoFuture::Ready(Some((Err(self.opened_for_reading()), buf)))
    }

    /// As [`Store::write_at`], of bytes in several buffers, which are not copied together. Gives
    /// them back if they cannot be written so.
    fn write_parts(
        &self,
        parts: Parts,
        offset: HostOffset,
    ) -> std::result::Result<ChangeFuture, Parts> {
        let _ = offset;
        Err(parts)
    }

    /// Makes durable what was completed before the call: bytes, space and length. A file that was
    /// opened for reading may do so, too, with what others wrote to it.
    ///
    /// After an error nothing that was not durable before can be relied on.
    fn sync(&self) -> ChangeFuture {
        let error = self.opened_for_reading();
        Box::pin(async move { Err(error) })
    }

    /// Makes durable `bytes`, which were written at `offset` and not changed since, with what is
    /// needed to read them back, and says nothing of what else was written. May write them again.
    /// Less than a [`Store::sync`] where much else is waiting for the device.
    ///
    /// After an error nothing that was not durable before can be relied on.
    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        let _ = (bytes, offset);
        let error = self.opened_for_reading();
        Box::pin(async move { Err(error) })
    }

    /// Changes the space of `len` bytes at `offset`; see [`Space`]. `Unsupported` if the file
    /// system cannot.
    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let _ = (change, offset, len);
        let error = self.opened_for_reading();
        Box::pin(async move { Err(error) })
    }

    /// Makes it `len` bytes long: what is beyond is gone, new bytes were never written
    /// ([`Store::reads_unwritten_as_zeros`]).
    fn set_len(&self, len: u64) -> ChangeFuture {
        let _ = len;
        let error = self.opened_for_reading();
        Box::pin(async move { Err(error) })
    }

    /// The error of a write to a store that was opened for reading.
    fn opened_for_reading(&self) -> Error {
        Error::new(ErrorKind::Denied, format!("{} was opened for reading only", self.name()))
    }
}

/// A read or write in flight. Resolves to the outcome and the buffer; an error of a read leaves the
/// buffer's content unspecified.
#[must_use = "the buffer comes back only when awaited"]
pub enum IoFuture {
    /// One read of a file.
    File(FileRead),
    /// One write of a file.
    Write(FileWrite),
    /// Anything that takes more steps.
    Boxed(LocalFuture<'static, (Result<()>, Buf)>),
    /// The outcome is known already.
    Ready(Option<(Result<()>, Buf)>),
}

/// A read of a file. See [`IoFuture::file`].
pub struct FileRead {
    op: Op,
    offset: HostOffset,
}

/// A write of a file. See [`IoFuture::write`].
pub struct FileWrite {
    op: Op,
    offset: HostOffset,
}

impl IoFuture {
    /// Waits for `op`, which writes all of its buffer at `offset`.
    pub fn write(op: Op, offset: HostOffset) -> Self {
        Self::Write(FileWrite { op, offset })
    }

    /// Waits for `op`, which reads at `offset`, and fills with zeros what is beyond the end.
    pub fn file(op: Op, offset: HostOffset) -> Self {
        Self::File(FileRead { op, offset })
    }

    /// Drops `guard` when the I/O is done, not before, even if this future is dropped earlier.
    pub fn hold(mut self, guard: impl Any) -> Self {
        match &mut self {
            Self::File(FileRead { op, .. }) | Self::Write(FileWrite { op, .. }) => {
                op.hold(Box::new(guard));
                self
            }
            Self::Ready(_) => self,
            Self::Boxed(_) => {
                let Self::Boxed(future) = self else { unreachable!("matched above") };
                Self::boxed(mica_rt::spawn(async move {
                    let output = future.await;
                    drop(guard);
                    output
                }))
            }
        }
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
                        buf.fill_part(count..buf.len(), 0);
                        Ok(())
                    }
                    Err(error) => {
                        let (len, offset) = (buf.len(), read.offset);
                        Err(Error::from_io(format!("reading {len} bytes at {offset}"), error))
                    }
                };
                (result, buf)
            }),
            Self::Write(write) => Pin::new(&mut write.op).poll(context).map(|(result, buf)| {
                let (len, offset) = (buf.len(), write.offset);
                let explain =
                    |error| Err(Error::from_io(format!("writing {len} bytes at {offset}"), error));
                let result = match result {
                    Ok(count) if count == len => Ok(()),
                    // A short write without an error means that the device is full.
                    Ok(_) => explain(std::io::Error::from_raw_os_error(ENOSPC)),
                    Err(error) => explain(error),
                };
                (result, buf)
            }),
            Self::Boxed(future) => future.as_mut().poll(context),
            Self::Ready(output) => Poll::Ready(output.take().expect("polled after it was ready")),
        }
    }
}

/// Linux's error number for "no space left on device".
const ENOSPC: i32 = 28;

/// Writes all of `buf` at `offset`.
///
/// # Errors
/// What the store reports, with its name.
pub async fn write_all(store: &dyn Store, buf: Buf, offset: HostOffset) -> Result<()> {
    let (result, _) = store.write_at(buf, offset).await;
    result.map_err(|error| error.wrap(store.name()))
}

/// Reads `len` bytes at `offset` into a new buffer.
///
/// # Errors
/// What the store reports, with its name.
pub async fn read_exact(store: &dyn Store, offset: HostOffset, len: usize) -> Result<Buf> {
    let (result, buf) = store.read_at(Buf::new(len), offset).await;
    match result {
        Ok(()) => Ok(buf),
        Err(error) => Err(error.wrap(store.name())),
    }
}
