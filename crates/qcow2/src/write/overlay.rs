//! The active layer's image file as a store to read, with the metadata that is in memory laid over
//! it.

use super::pages::Metadata;
use mica_block::{IoFuture, Result, Run, Store, Witness};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::Arc;

/// The image file as its metadata is now: what is in memory lies over what is in the file.
pub(crate) struct MetadataStore(pub(crate) Arc<Metadata>);

impl MetadataStore {
    /// Copies what is in memory over `buf`, which is what the file has at `offset`; whether that
    /// was all of it.
    fn overlay(metadata: &Metadata, buf: &mut [u8], offset: HostOffset) -> bool {
        let state = metadata.lock();
        let page_bytes = state.page_bytes();
        let end = offset.bytes() + buf.len() as u64;
        let mut at = offset.bytes();
        let mut complete = true;
        while at < end {
            let stop = (state.page_of(HostOffset::new(at)) + page_bytes).min(end);
            let len = usize::try_from(stop - at).expect("within a page");
            let to = usize::try_from(at - offset.bytes()).expect("within the buffer");
            match state.get(HostOffset::new(at), len) {
                Some(bytes) => buf[to..to + len].copy_from_slice(bytes),
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
            return self.0.store.read_at(buf, offset);
        }
        if Self::overlay(&self.0, &mut buf, offset) {
            return mica_block::ready(Ok(()), buf);
        }
        let metadata = Arc::clone(&self.0);
        let pinned = metadata.pin(offset, buf.len() as u64);
        IoFuture::boxed(async move {
            let _pinned = pinned;
            let (result, mut buf) = metadata.store.read_at(buf, offset).await;
            Self::overlay(&metadata, &mut buf, offset);
            (result, buf)
        })
    }

    fn len(&self) -> Result<u64> {
        self.0.store.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.0.store.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.0.store.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.0.store.name()
    }

    fn witness(&self) -> Witness {
        self.0.store.witness()
    }
}
