//! A store in memory that remembers what was done to it.

use mica_block::{ChangeFuture, IoFuture, Result, Run, RunKind, Store, StoreIdentity, Witness};
use mica_rt::Buf;
use mica_units::HostOffset;
use parking_lot::Mutex;
use std::sync::Arc;

/// What a store was told to do.
#[derive(Clone)]
pub(crate) enum Event {
    Write(usize, Vec<u8>),
    SetLen(usize),
    Sync,
}

/// A store that remembers what was done to it.
pub(crate) struct Logged {
    bytes: Mutex<Vec<u8>>,
    log: Mutex<Vec<Event>>,
}

impl Logged {
    pub(crate) fn new(bytes: &[u8]) -> Arc<Self> {
        Arc::new(Self { bytes: Mutex::new(bytes.to_vec()), log: Mutex::default() })
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        self.bytes.lock().clone()
    }

    pub(crate) fn events(&self) -> Vec<Event> {
        self.log.lock().clone()
    }

    fn apply(&self, event: Event) {
        play(&mut self.bytes.lock(), &event);
        self.log.lock().push(event);
    }
}

pub(super) fn play(bytes: &mut Vec<u8>, event: &Event) {
    match event {
        Event::Write(at, written) => {
            let end = at + written.len();
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[*at..end].copy_from_slice(written);
        }
        Event::SetLen(len) => bytes.resize(*len, 0),
        Event::Sync => {}
    }
}

pub(super) fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

impl Store for Logged {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let bytes = self.bytes.lock();
        let there = bytes.get(index(offset.bytes())..).unwrap_or_default();
        let len = there.len().min(buf.len());
        buf.put(0, &there[..len]);
        buf.fill_part(len..buf.len(), 0);
        IoFuture::Ready(Some((Ok(()), buf)))
    }

    fn len(&self) -> Result<u64> {
        Ok(self.bytes.lock().len() as u64)
    }

    fn run_at(&self, _offset: HostOffset, len: u64) -> Result<Run> {
        Ok(Run { kind: RunKind::Data, len })
    }

    fn name(&self) -> String {
        "memory".to_owned()
    }

    fn identity(&self) -> StoreIdentity {
        StoreIdentity::own()
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

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.apply(Event::Write(index(offset.bytes()), buf.to_vec()));
        IoFuture::Ready(Some((Ok(()), buf)))
    }

    fn sync(&self) -> ChangeFuture {
        self.apply(Event::Sync);
        Box::pin(async { Ok(()) })
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.apply(Event::SetLen(index(len)));
        Box::pin(async { Ok(()) })
    }
}
