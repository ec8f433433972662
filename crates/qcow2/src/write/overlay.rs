//! The active layer's image file as a readable store, with the metadata in memory laid over it.

use super::pages::Metadata;
use mica_block::{ChangeFuture, IoFuture, Result, Run, Store, StoreIdentity, Witness};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// The image file with its present metadata: what is in memory hides what is in the file.
pub(crate) struct MetadataStore {
    metadata: Arc<Metadata>,
    identity: StoreIdentity,
}

impl MetadataStore {
    pub(crate) fn new(metadata: Arc<Metadata>) -> Self {
        Self { metadata, identity: StoreIdentity::own() }
    }

    /// Copies what is in memory over `buf`, which holds the file's bytes at `offset`. Returns
    /// whether that was all of it.
    fn overlay(metadata: &Metadata, buf: &mut Buf, offset: HostOffset) -> bool {
        let mut state = metadata.lock();
        metadata.log_links(&mut state);
        let page_bytes = state.page_bytes();
        let end = offset.bytes() + buf.len() as u64;
        let mut at = offset.bytes();
        let mut complete = true;
        while at < end {
            let stop = (state.page_of(HostOffset::new(at)) + page_bytes).min(end);
            let len = usize::try_from(stop - at).expect("within a page");
            let to = usize::try_from(at - offset.bytes()).expect("within the buffer");
            match state.get(HostOffset::new(at), len) {
                Some(bytes) => buf.put(to, bytes),
                None => complete = false,
            }
            at = stop;
        }
        complete
    }
}

impl Store for MetadataStore {
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        if offset.checked_add(buf.len() as u64).is_none() {
            return self.metadata.store.read_at(buf, offset);
        }
        if Self::overlay(&self.metadata, &mut buf, offset) {
            return mica_block::ready(Ok(()), buf);
        }
        let metadata = Arc::clone(&self.metadata);
        let pinned = metadata.pin(offset, buf.len() as u64);
        IoFuture::boxed(async move {
            let _pinned = pinned;
            let (result, mut buf) = metadata.store.read_at(buf, offset).await;
            Self::overlay(&metadata, &mut buf, offset);
            (result, buf)
        })
    }

    fn len(&self) -> Result<u64> {
        self.metadata.store.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.metadata.store.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.metadata.store.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.metadata.store.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.metadata.store.reads_unwritten_as_zeros()
    }

    /// Makes durable what is in the file: what is in memory alone is its writer's to flush.
    fn sync(&self) -> ChangeFuture {
        let metadata = Arc::clone(&self.metadata);
        Box::pin(async move { metadata.sync().await })
    }

    fn witness(&self) -> Witness {
        self.metadata.store.witness()
    }
}
