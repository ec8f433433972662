//! The disk as a frozen layer has it, for reading beside the chain that is being written.
//!
//! A view is a chain of its own: it has the same layers, as they are open already, and its own map.
//! So it shares no lock with those who write, but for the budget of the cache, and what it costs is
//! its own.

use super::{Chain, IndexUse};
use crate::index::cache::Sharing;
use crate::map::Map;
use mica_block::{Error, ErrorKind, Result, View};
use std::sync::Arc;

impl Chain {
    /// See [`mica_block::ManageChain::view`].
    pub(super) async fn view(&self, position: usize) -> Result<View> {
        let layers = self.map.layers();
        let Some(_) = layers.frozen().get(position) else {
            let context = format!("the chain has no frozen layer {position}");
            return Err(Error::new(ErrorKind::NotFound, context));
        };
        let images = Arc::clone(&self.map.images);
        let below = layers.all()[..=position].to_vec();
        let cache = self.map.index.cache.shared().clone();
        let opening = (images.now_ns(), Sharing::Alone);
        let map = Map::new(images, below, cache, opening);
        if self.index == IndexUse::Read {
            map.adopt_sidecars().await;
            map.images.sidecars().chain_is_open();
        }
        let layers = map.layers().all().iter().map(|layer| layer.number).collect();
        let disk = Arc::new(Self::of(map, None, (self.repair, self.index)));
        Ok(View { disk, layers })
    }
}
