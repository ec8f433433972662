//! The first layer of a disk that was a raw image until now: somebody else wrote what lies beneath.

use super::{Chain, not_writable};
use crate::open::freeze;
use crate::write::beneath::Settling;
use mica_block::{Result, StoreIdentity};
use mica_units::GuestOffset;
use std::sync::Arc;

impl Chain {
    /// Whether it is an empty overlay of a raw image, the one with this identity, and of nothing
    /// else.
    ///
    /// # Errors
    /// If its table cannot be read.
    pub async fn is_empty_on_raw(&self, raw: StoreIdentity) -> Result<bool> {
        let layers = self.map.layers();
        let [base] = layers.frozen() else { return Ok(false) };
        let is_raw = base.tables.is_none() && base.cipher.is_none();
        if !is_raw || base.store.identity() != raw {
            return Ok(false);
        }
        let end = GuestOffset::new(layers.active().len());
        Ok(layers.active().unowned_until(GuestOffset::ZERO, end).await? == end)
    }

    /// From now on flushes wait until the caller has made durable what lies beneath.
    ///
    /// # Errors
    /// `Denied` if the chain was opened for reading only.
    pub fn begin_settling(&self) -> Result<Settling> {
        Ok(self.writer.load_full().ok_or_else(not_writable)?.begin_settling())
    }

    /// Opens the lowest layer again, which this process has written until now and writes no more:
    /// it has the locks of a reader then.
    ///
    /// # Errors
    /// `Denied` if another file has its name; what the system reports. It is read as before then,
    /// without locks of its own.
    pub fn reopen_base(&self) -> Result<()> {
        let layers = self.map.layers();
        let base = layers.base();
        let frozen = freeze(&*self.map.images, base, &base.path)?;
        self.map.replace_layers(layers.replaced(Arc::new(frozen)));
        Ok(())
    }
}
