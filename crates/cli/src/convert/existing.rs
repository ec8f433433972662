//! Copies onto something that exists: a block device, or with -n an image.

use super::content::ContentRules;
use super::engine::{self, Job, Target};
use super::progress::Progress;
use super::{ConvertArgs, raw_unit};
use crate::create::{Sources, claim, is_block_device, warn_of_plain};
use crate::failure::Failure;
use mica_block::{Disk, Manage, Result, Zeroes};
use mica_qcow2::IndexUse;
use mica_rt::Executor;
use mica_stack::Format;
use mica_units::{GuestOffset, GuestRange};
use std::sync::Arc;

/// Bytes zeroed at a time: a device may take long over them.
const ZEROED_BYTES_MAX: u64 = 1 << 30;

/// A copy onto something that exists.
pub(super) struct Onto<'a> {
    pub(super) args: &'a ConvertArgs,
    pub(super) format: Format,
    pub(super) executor: &'a Executor,
    /// Length of a run of zeros to leave out; 0 for none.
    pub(super) sparse: u64,
}

impl Onto<'_> {
    pub(super) fn convert(
        &self,
        (source, source_is_encrypted): (Arc<dyn Disk>, bool),
        sources: &Sources,
        progress: &Progress,
    ) -> std::result::Result<(), Failure> {
        let path = &self.args.names.target;
        let _claim = is_block_device(path).then(|| claim(path)).transpose()?;
        sources.check(path)?;
        let target = self.executor.block_on(self.open())?;
        target.data_paths().iter().try_for_each(|path| sources.check(path))?;
        // What is written goes into the uppermost layer.
        if source_is_encrypted && !target.is_encrypted(target.layer_count() - 1) {
            warn_of_plain(path);
        }
        let copied = self.fill(source, &target, progress);
        // Also after an error: what a qcow2 image has in memory belongs into its file.
        let closed = self.executor.block_on(target.close());
        copied?;
        Ok(closed?)
    }

    async fn open(&self) -> std::result::Result<Arc<dyn Manage>, Failure> {
        let chain = self.args.images.chain_options(IndexUse::Read)?;
        let images = self.args.target_options()?;
        Ok(mica_stack::open_writable(&self.args.names.target, self.format, images, &chain).await?)
    }

    fn fill(
        &self,
        source: Arc<dyn Disk>,
        target: &Arc<dyn Manage>,
        progress: &Progress,
    ) -> std::result::Result<(), Failure> {
        let Self { args, executor, sparse, .. } = self;
        let needed = source.geometry().len;
        let there = target.geometry().len;
        if there < needed {
            return Err(Failure::new(format!(
                "{} is too small: it holds {there} bytes, and the disk has {needed}",
                args.names.target.display()
            )));
        }
        let are_zeros_done =
            || args.target_is_zero || executor.block_on(zero_quickly(&**target, needed));
        let unit = raw_unit(*sparse);
        let rules = ContentRules {
            cluster_bytes: unit,
            subcluster_bytes: unit,
            keep_zeros: *sparse == 0 || !are_zeros_done(),
            reserve_zeros: false,
            compress: None,
        };
        let job = Job {
            source,
            backing: None,
            target: Target::Disk(Arc::clone(target)),
            rules,
            coroutines: args.new.coroutines,
            backend: args.images.backend(),
            rate: args.rate()?,
        };
        Ok(engine::copy(&job, progress)?)
    }
}

/// Makes the first `len` bytes read as zeros if that is cheaper than writing them. If not, and
/// also if it fails, all zeros have to be written with the data; then an error that lasts shows.
async fn zero_quickly(target: &dyn Manage, len: u64) -> bool {
    let zero = async || -> Result<()> {
        // A device zeroes no range that has changes in the page cache.
        target.flush().await?;
        let how = Zeroes { may_unmap: true, fast: true };
        let mut at = 0;
        while at < len {
            let piece = ZEROED_BYTES_MAX.min(len - at);
            let range = GuestRange::new(GuestOffset::new(at), piece).expect("within the disk");
            target.write_zeroes(range, how).await?;
            at += piece;
        }
        target.flush().await
    };
    let zeroed = zero().await;
    // As after a copy.
    target.idle().await;
    if let Err(error) = &zeroed {
        tracing::info!(%error, "zeros are written out");
    }
    zeroed.is_ok()
}
