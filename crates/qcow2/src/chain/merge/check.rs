//! What is known of a merge before it begins: which layers it is about, and whether their forms
//! allow it.

use super::target::check_target;
use crate::chain::{Chain, not_writable};
use mica_block::{MergeLayers, Result};

impl Chain {
    /// As [`ManageChain::check_merge`](mica_block::ManageChain::check_merge).
    pub(in crate::chain) async fn check_merge(&self, layers: MergeLayers<'_>) -> Result<()> {
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let target = match layers {
            MergeLayers::Stream(base) => {
                self.plan_stream(&writer, base).await?;
                return Ok(());
            }
            MergeLayers::Raise(wanted) => self.plan_raise(wanted).await?.0.target(),
            MergeLayers::Commit(wanted) => match self.frozen_top(wanted)? {
                Some(top) => self.plan_commit(top, wanted.base).await?.0.base(),
                None => self.plan_commit_active(&writer, wanted.base).await?.0,
            },
        };
        check_target(&self.map.layers().all()[target]).await
    }
}
