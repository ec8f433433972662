//! Bytes in memory, read without waiting.

use mica_block::{Error, ErrorKind, IoFuture, Result, Run, RunKind, Store, ready};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// A store in memory.
pub struct MemoryStore {
    name: String,
    bytes: Arc<[u8]>,
}

impl MemoryStore {
    /// A store that holds `bytes` and is called `name` in messages.
    pub fn new(name: impl Into<String>, bytes: impl Into<Arc<[u8]>>) -> Self {
        Self { name: name.into(), bytes: bytes.into() }
    }
}

impl Store for MemoryStore {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let start = usize::try_from(offset.bytes()).unwrap_or(usize::MAX);
        let there = self.bytes.get(start..).unwrap_or_default();
        let count = there.len().min(buf.len());
        buf[..count].copy_from_slice(&there[..count]);
        buf[count..].fill(0);
        ready(Ok(()), buf)
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes.len() as u64)
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        if len == 0 {
            return Err(Error::new(ErrorKind::Invalid, "a run of no bytes was asked for"));
        }
        let left = (self.bytes.len() as u64).saturating_sub(offset.bytes());
        Ok(match left {
            0 => Run { kind: RunKind::Hole, len },
            left => Run { kind: RunKind::Data, len: len.min(left) },
        })
    }

    fn name(&self) -> String {
        self.name.clone()
    }
}
