//! Bytes in memory, read and written without waiting.

use crate::facts::check_run_len;
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, Result, Run, RunKind, Space, Store, StoreIdentity,
    Witness, ready,
};
use mica_rt::Buf;
use mica_units::HostOffset;
use parking_lot::{RwLock, RwLockReadGuard};
use std::sync::Arc;

/// A store in memory.
pub struct MemoryStore {
    name: String,
    content: Content,
    identity: StoreIdentity,
    len_max: u64,
}

enum Content {
    Frozen(Arc<[u8]>),
    Writable(RwLock<Vec<u8>>),
}

/// Maximum number of bytes that a store in memory grows to, unless it is limited to fewer.
const LEN_MAX: u64 = 1 << 32;

impl MemoryStore {
    /// A store that holds `bytes`, for reading, named `name` in messages.
    pub fn new(name: impl Into<String>, bytes: impl Into<Arc<[u8]>>) -> Self {
        Self::of(name.into(), Content::Frozen(bytes.into()))
    }

    /// A store that holds `bytes`, for reading and writing, named `name` in messages. It grows to
    /// at most 4 GiB.
    pub fn new_writable(name: impl Into<String>, bytes: Vec<u8>) -> Self {
        Self::of(name.into(), Content::Writable(RwLock::new(bytes)))
    }

    fn of(name: String, content: Content) -> Self {
        Self { name, content, identity: StoreIdentity::own(), len_max: LEN_MAX }
    }

    /// The same, full at `len_max` bytes; no more than the 4 GiB that any has.
    #[must_use]
    pub fn limited(mut self, len_max: u64) -> Self {
        self.len_max = len_max.min(LEN_MAX);
        self
    }

    fn bytes(&self) -> Bytes<'_> {
        match &self.content {
            Content::Frozen(bytes) => Bytes::Frozen(bytes),
            Content::Writable(bytes) => Bytes::Writable(bytes.read()),
        }
    }

    /// Changes the content, which is first extended to at least `end` bytes.
    fn change(&self, end: Option<u64>, act: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        let Content::Writable(bytes) = &self.content else {
            return Err(self.opened_for_reading());
        };
        let full = || {
            let what = format!("{} grows to at most {} bytes", self.name, self.len_max);
            Error::new(ErrorKind::NoSpace, what)
        };
        let end = end.filter(|end| *end <= self.len_max).ok_or_else(full)?;
        let end = usize::try_from(end).map_err(|_| full())?;
        let mut bytes = bytes.write();
        if bytes.len() < end {
            bytes.resize(end, 0);
        }
        act(&mut bytes);
        Ok(())
    }

    fn change_space(&self, change: Space, start: u64, len: u64) -> Result<()> {
        let end = start.checked_add(len);
        match change {
            Space::Allocate => self.change(end, |_| {}),
            Space::Zero => self.change(end, |bytes| part_of(bytes, start, len).fill(0)),
            Space::Punch => self.change(Some(0), |bytes| part_of(bytes, start, len).fill(0)),
        }
    }
}

/// What is there of `len` bytes from `start` on.
fn part_of(bytes: &mut [u8], start: u64, len: u64) -> &mut [u8] {
    let clamp = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
    let (start, end) = (clamp(start), clamp(start.saturating_add(len)));
    &mut bytes[start..end]
}

enum Bytes<'a> {
    Frozen(&'a [u8]),
    Writable(RwLockReadGuard<'a, Vec<u8>>),
}

impl std::ops::Deref for Bytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Frozen(bytes) => bytes,
            Self::Writable(bytes) => bytes,
        }
    }
}

impl Store for MemoryStore {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let bytes = self.bytes();
        let start = usize::try_from(offset.bytes()).unwrap_or(usize::MAX);
        let there = bytes.get(start..).unwrap_or_default();
        let count = there.len().min(buf.len());
        buf.put(0, &there[..count]);
        buf.fill_part(count..buf.len(), 0);
        ready(Ok(()), buf)
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let (start, len) = (offset.bytes(), buf.len() as u64);
        let end = if len == 0 { Some(0) } else { start.checked_add(len) };
        let result = self.change(end, |bytes| part_of(bytes, start, len).copy_from_slice(&buf));
        ready(result, buf)
    }

    fn sync(&self) -> ChangeFuture {
        // Memory cannot be made durable: callers want the ordering.
        let result = self.change(Some(0), |_| {});
        Box::pin(async move { result })
    }

    fn sync_written(&self, _bytes: Buf, _offset: HostOffset) -> ChangeFuture {
        self.sync()
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let result = match len {
            0 => self.change(Some(0), |_| {}),
            len => self.change_space(change, offset.bytes(), len),
        };
        Box::pin(async move { result })
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        let keep = usize::try_from(len).unwrap_or(usize::MAX);
        let result = self.change(Some(len), |bytes| bytes.truncate(keep));
        Box::pin(async move { result })
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes().len() as u64)
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        check_run_len(len)?;
        let left = (self.bytes().len() as u64).saturating_sub(offset.bytes());
        Ok(match left {
            0 => Run { kind: RunKind::Hole, len },
            left => Run { kind: RunKind::Data, len: len.min(left) },
        })
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        true
    }

    fn witness(&self) -> Witness {
        Witness::None
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.len()
    }
}
