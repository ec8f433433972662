//! The first layer of a disk that was a raw image until now: somebody else wrote what lies beneath.

use super::{Chain, not_writable};
use crate::open::freeze;
use crate::write::beneath::Settling;
use mica_block::{Result, StoreIdentity};
use std::sync::Arc;

impl Chain {
    /// Whether it is an overlay of a raw image, the one with this identity, and of nothing else.
    pub fn stands_on_raw(&self, raw: StoreIdentity) -> bool {
        match self.map.layers().frozen() {
            [base] => base.tables.is_none() && base.store.identity() == raw,
            _ => false,
        }
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
    /// `Denied` if another file has its name; what the system reports. It is read as before then.
    pub fn reopen_base(&self) -> Result<()> {
        let layers = self.map.layers();
        let base = layers.base();
        let frozen = freeze(&*self.map.images, base, &base.path)?;
        self.map.replace_layers(layers.replaced(Arc::new(frozen)));
        Ok(())
    }
}
