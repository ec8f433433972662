//! An image that is only read, with the log of its dead writer laid over it.

use super::replay::Replay;
use mica_block::{IoFuture, Result, Run, Store, StoreIdentity, Witness};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// The image as the log makes it.
pub(super) struct Over {
    below: Arc<dyn Store>,
    replay: Arc<Replay>,
    identity: StoreIdentity,
}

impl Over {
    pub(super) fn new(below: Arc<dyn Store>, replay: Replay) -> Self {
        Self { below, replay: Arc::new(replay), identity: StoreIdentity::own() }
    }
}

impl Store for Over {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let reading = self.below.read_at(buf, offset);
        let replay = Arc::clone(&self.replay);
        IoFuture::boxed(async move {
            let (result, mut buf) = reading.await;
            if result.is_ok() && offset.checked_add(buf.len() as u64).is_some() {
                replay.lay_over(buf.len(), offset.bytes(), |at, bytes| buf.put(at, bytes));
            }
            (result, buf)
        })
    }

    fn len(&self) -> Result<u64> {
        self.below.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.below.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.below.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.below.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.below.reads_unwritten_as_zeros()
    }

    fn witness(&self) -> Witness {
        self.below.witness()
    }
}
