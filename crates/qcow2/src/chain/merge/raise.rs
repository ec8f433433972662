//! Frozen layers go up into the frozen layer above them.
//!
//! As a stream, but the layer that takes over is not the one that guests write: it is opened for
//! writing as the base of a commit is, over a map that ends with it, and reads what it copies
//! through that map. What it shows is the same before, meanwhile and afterwards: whoever stands on
//! it, or reads it after a power cut at any step, notices nothing.

use super::pace::Pace;
use super::stream::{PASSES_MAX, first_missing, is_layer_of, step_from};
use super::target::Target;
use super::{backing_name, check_no_snapshots, position_at};
use crate::chain::Chain;
use crate::write::Writer;
use crate::write::backing::plan_backing;
use crate::write::pull::Leaving;
use mica_block::{Error, ErrorKind, MergeControl, MergeProgress, Merged, RaiseLayers, Result};
use mica_qcow2_format::BackingName;
use std::ops::ControlFlow;
use std::sync::Arc;

/// The layers of a raise, by position.
#[derive(Clone, Copy)]
pub(super) struct Positions {
    /// The lowest that leaves.
    from: usize,
    into: usize,
}

impl Positions {
    /// The layer that is written.
    pub(super) fn target(self) -> usize {
        self.into
    }
}

/// How the copying ended.
enum Raised {
    All(u64),
    Cancelled,
}

impl Chain {
    /// As [`ManageChain::raise`](mica_block::ManageChain::raise).
    pub(in crate::chain) async fn raise(
        &self,
        wanted: RaiseLayers<'_>,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        let _under_way = self.begin_merge().await?;
        self.set_resume(None);
        let (at, name) = self.plan_raise(wanted).await?;
        let map = &self.map;
        if at.from == at.into {
            return Ok(Merged::Done { dropped: Vec::new(), copied: 0 });
        }
        let _index = map.hold_index().await;
        map.index.cut(at.from);
        // Whoever loads slices with the longer tree is done (I3).
        self.gate.grace().await;
        let number = map.layers().all()[at.into].number;
        let target = self.open_target(number, at.into).await?;
        let copied = self.raise_into(&target, at, name.as_ref(), control).await;
        // Whatever became of it, the layer is frozen again.
        let frozen = Arc::new(target.close(self).await?);
        let copied = match copied {
            Ok(Raised::All(copied)) => copied,
            other => {
                map.replace_layers(map.layers().replaced(frozen));
                return other.map(|_| Merged::Cancelled);
            }
        };
        let held = self.gate.hold().await;
        let before = map.layers();
        let gone = &before.all()[at.from..at.into];
        let dropped = gone.iter().map(|layer| layer.path.to_path_buf()).collect();
        let next = before.replaced(frozen).without(at.from, at.into, at.from);
        let stays = is_layer_of(&next);
        self.exchange_layers(next, stays);
        drop((held, before));
        self.forget_retired().await;
        Ok(Merged::Done { dropped, copied })
    }

    /// Which layers are meant, and by which name the one above them names what is beneath.
    pub(super) async fn plan_raise(
        &self,
        wanted: RaiseLayers<'_>,
    ) -> Result<(Positions, Option<BackingName>)> {
        let refuse = |what: &str| Err(Error::new(ErrorKind::Invalid, what));
        let (images, layers) = (&*self.map.images, self.map.layers());
        let into = position_at(images, &layers, wanted.into)?;
        if into == layers.frozen().len() {
            return refuse("the layer that takes over is the active one: that is a stream");
        }
        let from = match wanted.base {
            Some(path) => position_at(images, &layers, path)? + 1,
            None => 0,
        };
        if from > into {
            return refuse("the base is not beneath the layer that takes over");
        }
        if from < into {
            check_no_snapshots(&layers.all()[into..=into]).await?;
        }
        let upper = &layers.all()[into];
        let name = match from {
            0 => None,
            from => Some(backing_name(images, upper, &layers.all()[from - 1])?),
        };
        // A header without room for the name is better refused before than after.
        if let Some(tables) = &upper.tables {
            plan_backing(&*upper.store, tables.l2.cluster_bits, name.as_ref()).await?;
        }
        Ok((Positions { from, into }, name))
    }

    /// Copies what shows through the layers that leave into the `target`, makes that durable, and
    /// then the name of what is beneath.
    async fn raise_into(
        &self,
        target: &Target,
        at: Positions,
        name: Option<&BackingName>,
        control: &dyn MergeControl,
    ) -> Result<Raised> {
        let Target::Qcow2(writer) = target else {
            let what = "a raw image stands on nothing";
            return Err(Error::new(ErrorKind::Invalid, what));
        };
        let layers = self.map.layers();
        let leaving = layers.all()[at.from..at.into].to_vec();
        self.bitmaps_go_down(&leaving, target, target.len()).await?;
        let pace = Pace::new(self, &leaving, control);
        let leaving = Arc::new(Leaving::new(&layers, at.from, at.into));
        let mut raise = Raise { writer, leaving, pace, copied: 0, done: 0 };
        for pass in 0.. {
            if pass == PASSES_MAX {
                let what = "what was copied is not found in the layer that takes over";
                return Err(Error::new(ErrorKind::Io, what));
            }
            match raise.pass(self).await? {
                ControlFlow::Break(()) => return Ok(Raised::Cancelled),
                ControlFlow::Continue(is_settled) if is_settled => break,
                ControlFlow::Continue(_) => {}
            }
        }
        let copied = raise.copied;
        if let ControlFlow::Break(()) = raise.pace.ask_at_end(writer.layer_len(), copied).await {
            return Ok(Raised::Cancelled);
        }
        let named = Arc::clone(writer).complete(async |writer: Arc<Writer>| {
            writer.flush().await?;
            writer.name_backing(name).await
        });
        named.await?;
        Ok(Raised::All(copied))
    }
}

/// A raise that is under way.
struct Raise<'a> {
    writer: &'a Arc<Writer>,
    leaving: Arc<Leaving>,
    pace: Pace<'a>,
    copied: u64,
    /// How far a pass came.
    done: u64,
}

impl Raise<'_> {
    /// Goes over the layer once and copies what is missing; breaks if it is to end. Returns whether
    /// nothing was.
    async fn pass(&mut self, chain: &Chain) -> Result<ControlFlow<(), bool>> {
        let (end, mut at, mut is_settled) = (self.writer.layer_len(), 0, true);
        while at < end {
            self.done = self.done.max(at);
            let (done, copied) = (self.done, self.copied);
            let progress = MergeProgress { done, total: end, copied, ..MergeProgress::default() };
            if let ControlFlow::Break(()) = self.pace.step(progress).await {
                return Ok(ControlFlow::Break(()));
            }
            let map = self.writer.map();
            let (needed, scanned) = first_missing(chain, map, &self.leaving, at..end).await?;
            let Some(needed) = needed else {
                at = scanned;
                continue;
            };
            self.pace.begin();
            is_settled = false;
            let window = step_from(self.writer, at, needed.bytes(), end);
            let leaving = Arc::clone(&self.leaving);
            let pull = async move |writer: Arc<Writer>| writer.pull(window, &leaving).await;
            self.copied += Arc::clone(self.writer).complete(pull).await?;
            at = window.end().bytes();
        }
        Ok(ControlFlow::Continue(is_settled))
    }
}
