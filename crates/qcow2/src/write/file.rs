//! The image file as its writer sees it: writable everywhere but in the header's cluster, which
//! requires proof that the log allows the change.
//!
//! Invariants
//! - I1 Only [`ImageFile::write_header`] writes the header, and it requires a [`HeaderLogged`].

use crate::redo::HeaderLogged;
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, Result, Run, Space, Store, StoreIdentity, Witness,
    write_all,
};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostOffset};
use std::sync::Arc;

/// An image file that is being written.
pub(crate) struct ImageFile {
    file: Arc<dyn Store>,
    header_end: HostOffset,
}

impl ImageFile {
    pub(super) fn new(file: Arc<dyn Store>, cluster_bits: ClusterBits) -> Self {
        Self { file, header_end: HostOffset::new(cluster_bits.bytes()) }
    }

    /// Writes `bytes` into the header at `at`, in one write, now that the log allows it.
    pub(super) async fn write_header(
        &self,
        logged: HeaderLogged,
        bytes: &[u8],
        at: HostOffset,
    ) -> Result<()> {
        let HeaderLogged { .. } = logged;
        assert!(
            at.bytes() + bytes.len() as u64 <= self.header_end.bytes(),
            "a field of the header"
        );
        write_all(&*self.file, Buf::from_slice(bytes), at).await
    }

    /// The file itself, for work before the first write or after the last: no log exists then.
    pub(crate) fn raw_file(&self) -> Arc<dyn Store> {
        Arc::clone(&self.file)
    }

    /// The error of a write that would reach into the header.
    fn refuse(&self, at: HostOffset) -> Option<Error> {
        (at < self.header_end).then(|| {
            let context = format!("{}: a write at {at} would reach into the header", self.name());
            Error::new(ErrorKind::Corrupt, context)
        })
    }
}

impl Store for ImageFile {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.file.read_at(buf, offset)
    }

    fn len(&self) -> Result<u64> {
        self.file.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.file.allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        self.file.run_at(offset, len)
    }

    fn name(&self) -> String {
        self.file.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.file.identity()
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.file.reads_unwritten_as_zeros()
    }

    fn witness(&self) -> Witness {
        self.file.witness()
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        match self.refuse(offset) {
            Some(error) => mica_block::ready(Err(error), buf),
            None => self.file.write_at(buf, offset),
        }
    }

    fn sync(&self) -> ChangeFuture {
        self.file.sync()
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        match self.refuse(offset) {
            Some(error) => Box::pin(async move { Err(error) }),
            None => self.file.sync_written(bytes, offset),
        }
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        match self.refuse(offset) {
            Some(error) => Box::pin(async move { Err(error) }),
            None => self.file.space(change, offset, len),
        }
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        match self.refuse(HostOffset::new(len)) {
            Some(error) => Box::pin(async move { Err(error) }),
            None => self.file.set_len(len),
        }
    }
}
