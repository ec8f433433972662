//! Frozen layers go down into the one beneath them.

use super::pace::Pace;
use super::sources::{Sources, Wanted};
use super::target::{Target, check_is_written};
use super::{Resume, STEP_BYTES, backing_name, check_no_snapshots, position_at, warn_of_plain};
use crate::chain::{Chain, not_writable};
use crate::layer::Layer;
use crate::open::freeze;
use crate::write::Writer;
use crate::write::backing::{name_backing, plan_backing};
use mica_block::{
    CommitLayers, Error, ErrorKind, Extent, MergeControl, MergeProgress, Merged, Result,
};
use mica_qcow2_format::BackingName;
use mica_units::{ClusterBits, GuestRange, LayerNumber};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The layers of a commit, by position.
#[derive(Clone, Copy)]
pub(super) struct Positions {
    base: usize,
    top: usize,
}

impl Positions {
    /// The layer that is written.
    pub(super) fn base(self) -> usize {
        self.base
    }
}

/// How the copying ended.
enum Copied {
    All(u64),
    Cancelled,
}

impl Chain {
    /// As [`ManageChain::commit`](mica_block::ManageChain::commit).
    pub(in crate::chain) async fn commit(
        &self,
        wanted: CommitLayers<'_>,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        match self.frozen_top(wanted)? {
            Some(top) => self.commit_frozen(top, wanted.base, control).await,
            None => self.commit_active(wanted.base, wanted.active, control).await,
        }
    }

    /// The uppermost of the layers that are `wanted`, unless it is the active one.
    pub(super) fn frozen_top<'a>(&self, wanted: CommitLayers<'a>) -> Result<Option<&'a Path>> {
        let Some(top) = wanted.top else { return Ok(None) };
        let layers = self.map.layers();
        let at = position_at(&*self.map.images, &layers, top)?;
        Ok((at != layers.frozen().len()).then_some(top))
    }

    /// Merges down from a `top` that is frozen.
    async fn commit_frozen(
        &self,
        top: &Path,
        base: Option<&Path>,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        let _under_way = self.begin_merge().await?;
        let (at, name) = self.plan_commit(top, base).await?;
        let map = &self.map;
        let _index = map.hold_index().await;
        map.index.cut(at.base);
        // Whoever loads slices with the longer tree is done (I3).
        self.gate.grace().await;
        let (base, top) = {
            let layers = map.layers();
            (layers.all()[at.base].number, layers.all()[at.top].number)
        };
        let target = self.open_target(base, at.base).await?;
        let sources = Sources::new(&map.layers().all()[at.base + 1..=at.top]);
        let leaving = map.layers().all()[at.base + 1..=at.top].to_vec();
        warn_of_plain(&map.layers().all()[at.base], &leaving);
        let resume = Resume { base, top, done: 0 };
        let copied = match target.may_change(sources.top_len(), control).await {
            ControlFlow::Break(()) => Ok(Copied::Cancelled),
            ControlFlow::Continue(()) => {
                match self.bitmaps_go_down(&leaving, &target, sources.top_len()).await {
                    Ok(()) => {
                        let pace = Pace::new(self, &leaving, control);
                        self.copy_down(&sources, &target, resume, pace).await
                    }
                    Err(error) => Err(error),
                }
            }
        };
        drop(leaving);
        // Whatever became of it, the base is frozen again.
        let frozen = target.close(self).await.inspect_err(|_| self.set_resume(None))?;
        map.replace_layers(map.layers().replaced(Arc::new(frozen)));
        let copied = match copied? {
            Copied::All(bytes) => bytes,
            Copied::Cancelled => return Ok(Merged::Cancelled),
        };
        let dropped = self.drop_sources(at, &name).await?;
        self.set_resume(None);
        Ok(Merged::Done { dropped, copied })
    }

    /// Which layers are meant, and by which name the one above names the base.
    pub(super) async fn plan_commit(
        &self,
        top: &Path,
        base: Option<&Path>,
    ) -> Result<(Positions, BackingName)> {
        let refuse = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
        let (images, layers) = (&*self.map.images, self.map.layers());
        let top = position_at(images, &layers, top)?;
        if top == layers.frozen().len() {
            return refuse("the top is the active layer");
        }
        let base = match base {
            Some(path) => position_at(images, &layers, path)?,
            None if top == 0 => return refuse("there is no layer beneath the top"),
            None => top - 1,
        };
        if base >= top {
            return refuse("the base is not beneath the top");
        }
        check_no_snapshots(&layers.all()[base + 1..=top]).await?;
        let upper = &layers.all()[top + 1];
        let name = backing_name(images, upper, &layers.all()[base])?;
        // A header without room for the name is better refused before than after.
        match &upper.tables {
            Some(tables) if upper.live.is_none() => {
                check_is_written(upper)?;
                let bits = tables.l2.cluster_bits;
                plan_backing(&*upper.store, bits, Some(&name)).await?;
            }
            _ => {
                let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
                writer.plan_backing(Some(&name)).await?;
            }
        }
        Ok((Positions { base, top }, name))
    }

    /// Copies what the `sources` own into the `target`, and makes nothing of it count.
    async fn copy_down(
        &self,
        sources: &Sources,
        target: &Target,
        mut resume: Resume,
        mut pace: Pace<'_>,
    ) -> Result<Copied> {
        target.grow_to(sources.top_len()).await?;
        let (end, mut copied) = (target.len(), 0);
        let mut at = self.resumes_at(resume).min(end);
        // Another commit that did not end cannot go on: this one may put down what is older than
        // that has put there, and be cancelled, too.
        resume.done = at;
        self.set_resume(Some(resume));
        while at < end {
            let progress =
                MergeProgress { done: at, total: end, copied, ..MergeProgress::default() };
            if let ControlFlow::Break(()) = pace.step(progress).await {
                return Ok(Copied::Cancelled);
            }
            let idle = sources.idle_from(at, end).await?;
            if idle > 0 {
                at += idle;
                continue;
            }
            let window = Sources::window(at, end);
            for wanted in sources.wanted(window, STEP_BYTES).await? {
                let done = match &wanted {
                    Wanted::Data(extents) => extents[0].start,
                    Wanted::Zeros(range) => range.start(),
                };
                let done = done.bytes();
                let progress =
                    MergeProgress { done, total: end, copied, ..MergeProgress::default() };
                if let ControlFlow::Break(()) = pace.step(progress).await {
                    return Ok(Copied::Cancelled);
                }
                pace.begin();
                copied += put_down(sources, target, wanted).await?;
            }
            at = window.end().bytes();
            resume.done = at;
            self.set_resume(Some(resume));
        }
        Ok(match pace.ask_at_end(end, copied).await {
            ControlFlow::Break(()) => Copied::Cancelled,
            ControlFlow::Continue(()) => Copied::All(copied),
        })
    }

    /// Takes the sources out of the chain, whose base has all that they own. Returns their paths.
    async fn drop_sources(&self, at: Positions, name: &BackingName) -> Result<Vec<PathBuf>> {
        let map = &self.map;
        let (upper, cluster_bits) = {
            // Nobody holds on to the layer: its file is about to be locked.
            let layers = map.layers();
            let upper = &layers.all()[at.top + 1];
            let tables = upper.tables.as_ref().filter(|_| upper.live.is_none());
            (upper.number, tables.map(|tables| tables.l2.cluster_bits))
        };
        let renamed = match cluster_bits {
            Some(bits) => Some(self.rename_frozen(upper, bits, name).await?),
            None => None,
        };
        let held = self.gate.hold().await;
        if renamed.is_none() {
            let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
            let named = writer.complete(async |writer: Arc<Writer>| {
                writer.flush().await?;
                writer.name_backing(Some(name)).await
            });
            named.await?;
        }
        let mut layers = map.layers();
        if let Some(renamed) = renamed {
            layers = Arc::new(layers.replaced(Arc::new(renamed)));
        }
        let gone = &layers.all()[at.base + 1..=at.top];
        let dropped = gone.iter().map(|layer| layer.path.to_path_buf()).collect();
        let next = layers.without(at.base + 1, at.top + 1, at.base);
        // The base has changed: no slice of it is known to be right.
        self.exchange_layers(next, |_| false);
        drop((held, layers));
        self.forget_retired().await;
        Ok(dropped)
    }

    /// Makes the base the backing file of the frozen layer `number`. Returns what it is then.
    async fn rename_frozen(
        &self,
        number: LayerNumber,
        cluster_bits: ClusterBits,
        name: &BackingName,
    ) -> Result<Layer> {
        let store = self.borrow_for_writing(number).await?;
        let layers = self.map.layers();
        let layer = layers.get(number);
        let named = name_backing(&*store, cluster_bits, Some(name)).await;
        named.map_err(|error| layer.explain(error))?;
        // Others may read it again.
        freeze(&*self.map.images, layer, &layer.path)
    }

    fn resumes_at(&self, wanted: Resume) -> u64 {
        let resumes = self.merging.resumes.lock();
        let known = resumes.filter(|known| Resume { done: 0, ..*known } == wanted);
        known.map_or(0, |known| known.done)
    }

    /// Only the next merge may resume, and only the same one.
    pub(super) fn set_resume(&self, resume: Option<Resume>) {
        *self.merging.resumes.lock() = resume;
    }
}

/// Puts into the base what is `wanted` of it; returns how many bytes were copied.
async fn put_down(sources: &Sources, target: &Target, wanted: Wanted) -> Result<u64> {
    match wanted {
        Wanted::Data(extents) => {
            let len = Extent::total_len(&extents);
            let range = GuestRange::new(extents[0].start, len).expect("a part of the disk");
            let bytes = sources.read(&extents).await?;
            target.write(range, bytes).await?;
            Ok(len)
        }
        Wanted::Zeros(range) => {
            target.zero(range).await?;
            Ok(0)
        }
    }
}
