//! Another backing file for an image that is being written, or for one that is frozen.
//!
//! The redo log has nothing of it: whatever a log links is in the layer itself. So the log allows
//! the write as it allows a mark.

use super::Writer;
use super::pages::Metadata;
use mica_block::{Result, Store, read_exact, write_all};
use mica_qcow2_format::{BackingChange, BackingName, Header, HeaderChange};
use mica_rt::Buf;
use mica_units::{ClusterBits, HostOffset};
use std::sync::Arc;

/// The writes that make `new` the backing file of the image in `store`.
///
/// # Errors
/// As [`BackingChange::plan`], and any error of the store.
pub(crate) async fn plan_backing(
    store: &dyn Store,
    cluster_bits: ClusterBits,
    new: Option<&BackingName>,
) -> Result<BackingChange> {
    let len = usize::try_from(cluster_bits.bytes()).expect("2 MiB");
    let cluster = read_exact(store, HostOffset::ZERO, len).await?;
    BackingChange::plan(&cluster, new)
}

/// Makes `new` the backing file of the image in `store`, which nobody else uses, durably.
///
/// # Errors
/// As [`plan_backing`].
pub(crate) async fn name_backing(
    store: &dyn Store,
    cluster_bits: ClusterBits,
    new: Option<&BackingName>,
) -> Result<()> {
    let BackingChange { name, fields } = plan_backing(store, cluster_bits, new).await?;
    for (at, bytes) in name.into_iter().chain([fields]) {
        write_all(store, Buf::from_slice(&bytes), HostOffset::new(at as u64)).await?;
        store.sync().await?;
    }
    Ok(())
}

/// Makes `new` the backing file of the image in `store`, which nobody else uses and has no redo
/// log, durably; or leaves it without one. Nothing else changes.
///
/// # Errors
/// As [`read_header`](crate::read_header), and [`BackingChange::plan`]: then nothing has changed;
/// any error of the store.
pub async fn change_backing(store: &dyn Store, new: Option<&BackingName>) -> Result<()> {
    let header = crate::header_io::read_header(store).await?;
    name_backing(store, header.cluster_bits, new).await
}

impl Writer {
    /// The writes that [`Self::name_backing`] will do.
    ///
    /// # Errors
    /// As [`plan_backing`].
    pub(crate) async fn plan_backing(&self, new: Option<&BackingName>) -> Result<BackingChange> {
        plan_backing(&*self.metadata.store, self.l2.cluster_bits, new).await
    }

    /// Makes `new` the layer's backing file, durably. The caller holds the gate, and has flushed.
    ///
    /// # Errors
    /// As [`plan_backing`]: nothing has changed. Any failure of a write or a sync: then nothing
    /// more is written.
    pub(crate) async fn name_backing(&self, new: Option<&BackingName>) -> Result<()> {
        self.check_usable()?;
        // The plan has a part of the header in which the log's name is.
        let _group = self.metadata.page_writes.lock().await;
        self.metadata.unname_before_group().await?;
        let BackingChange { name, fields } = self.plan_backing(new).await?;
        for (at, bytes) in name.into_iter().chain([fields]) {
            self.metadata.write_backing(HostOffset::new(at as u64), &bytes).await?;
        }
        Ok(())
    }
}

impl Metadata {
    /// Whether [`Self::replace_header`] with `change` would have room.
    ///
    /// # Errors
    /// As [`HeaderChange::plan`], and any failure to read the header.
    pub(super) async fn check_header(
        &self,
        cluster_bits: ClusterBits,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        self.plan_header(cluster_bits, change).await.map(drop)
    }

    async fn plan_header(
        &self,
        cluster_bits: ClusterBits,
        change: impl FnOnce(&mut Header),
    ) -> Result<HeaderChange> {
        let len = usize::try_from(cluster_bits.bytes()).expect("2 MiB");
        let cluster = read_exact(&*self.store, HostOffset::ZERO, len).await?;
        let mut header = Header::decode(&cluster, self.store.len()?)?;
        change(&mut header);
        HeaderChange::plan(&cluster, &header)
    }

    /// Replaces the header by what `change` makes of it, durably. What the log has of the header
    /// stays as it is.
    ///
    /// # Errors
    /// As [`HeaderChange::plan`]: nothing has changed. Any failure of a write or a sync: then
    /// nothing more is written.
    pub(super) async fn replace_header(
        self: &Arc<Self>,
        cluster_bits: ClusterBits,
        change: impl FnOnce(&mut Header),
    ) -> Result<()> {
        // A group gives the log another name, which is in the part that is written.
        let _group = self.page_writes.lock().await;
        let _locked = self.header_changes.lock().await;
        self.unname_lost_log().await?;
        let HeaderChange { name, sector } = self.plan_header(cluster_bits, change).await?;
        for (at, bytes) in name.into_iter().chain([(0, sector)]) {
            self.write_parts(HostOffset::new(at as u64), &bytes).await?;
        }
        Ok(())
    }

    /// Writes a part of the header durably, in memory and in the file.
    async fn write_backing(self: &Arc<Self>, at: HostOffset, bytes: &[u8]) -> Result<()> {
        let _locked = self.header_changes.lock().await;
        self.unname_lost_log().await.inspect_err(|error| self.fail(error))?;
        self.write_parts(at, bytes).await
    }

    /// As [`Self::write_backing`], page by page. The caller has `header_changes` locked.
    async fn write_parts(self: &Arc<Self>, at: HostOffset, bytes: &[u8]) -> Result<()> {
        let written = async {
            let page_bytes = self.lock().page_bytes();
            let mut done = 0;
            while done < bytes.len() {
                let start = HostOffset::new(at.bytes() + done as u64);
                let left = page_bytes - start.bytes() % page_bytes;
                let len = usize::try_from(left).expect("4 KiB").min(bytes.len() - done);
                let logged = self.lock().logging.allow_marks();
                self.write_header(logged, &bytes[done..done + len], start).await?;
                done += len;
            }
            Ok(())
        };
        let written = written.await;
        if let Err(error) = &written {
            self.fail(error);
        }
        written?;
        self.sync().await
    }
}
