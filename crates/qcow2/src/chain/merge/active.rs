//! The active layer, and perhaps others beneath it, go down into a frozen one, while the guest
//! writes on; then the active layer is empty.
//!
//! ```text
//! note what the guest changes ─▶ copy everything ─▶ copy what was changed meanwhile, in rounds
//!   ─▶ hold the gate ─▶ copy the rest ─▶ the base is durable ─▶ the active layer names it
//!   ─▶ the layers in between leave ─▶ an empty L1 table ─▶ let go ─▶ free what the old one named
//! ```
//!
//! A guest that writes faster than the rounds copy is slowed down: from some round on the gate is
//! held for moments of [`HELD_MAX`], with ever shorter ones in between.
//!
//! Invariants, beside those of [`super`]
//! - A1 The active layer owns whatever the guest changed, also what it discarded, until its L1
//!   table is empty: nothing of the base shows before that.
//! - A2 What was read while the guest wrote is copied again: see [`super::touched`].
//! - A3 The empty table counts only when the base is durable and the header names it; in memory
//!   only when the layers in between have left, as reads go on: the old table over the base shows
//!   the same, the empty one over a layer in between would not.

use super::pace::Pace;
use super::target::Target;
use super::{SCAN_BYTES, STEP_BYTES, backing_name, check_no_snapshots, position_at, warn_of_plain};
use crate::chain::{Chain, not_writable};
use crate::gate::HeldGate;
use crate::write::Writer;
use crate::write::empty::OldTable;
use crate::write::pull::{Leaving, Need};
use mica_block::{
    ActiveAfter, Disk, Error, ErrorKind, Extent, MergeControl, MergeProgress, Merged, Result,
};
use mica_qcow2_format::BackingName;
use mica_rt::Buf;
use mica_units::{GuestOffset, GuestRange};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Limit for what is copied while the gate is held, for which the guest waits.
const HELD_MAX: Duration = Duration::from_millis(20);
/// Bytes that are taken to be copied in that time, whatever was measured.
const HELD_BYTES_MIN: u64 = 1 << 20;
/// Rounds after which the guest is slowed down, and after which nothing is waited for any more.
const ROUNDS_FREE: u32 = 4;
const ROUNDS_MAX: u32 = 12;
/// Who rested for longer begins the rounds again: much may have changed.
const RESTED: Duration = Duration::from_secs(1);

/// What is copied, and how fast.
struct Carrying<'a> {
    chain: &'a Chain,
    target: &'a Target,
    leaving: Leaving,
    end: u64,
    copied: u64,
    /// Bytes of the disk that were looked at while something was copied, and how long that took.
    looked_at: u64,
    took: Duration,
}

impl Chain {
    /// Merges the active layer, and those beneath it, into the one at `base`, by default the one
    /// beneath it, and leaves it empty on top of that, unless it stays as it is `after` that.
    ///
    /// # Errors
    /// As [`ManageChain::commit`](mica_block::ManageChain::commit).
    pub(super) async fn commit_active(
        &self,
        base: Option<&Path>,
        after: ActiveAfter,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        let _under_way = self.begin_merge().await?;
        self.set_resume(None);
        let Some(writer) = self.writer.load_full() else { return Err(not_writable()) };
        let (base, name) = self.plan_commit_active(&writer, base).await?;
        let map = &self.map;
        let _index = map.hold_index().await;
        map.index.cut(base);
        // Whoever loads slices with the longer tree is done (I3).
        self.gate.grace().await;
        let number = map.layers().all()[base].number;
        let target = self.open_target(number, base).await?;
        warn_of_plain(&map.layers().all()[base], &map.layers().all()[base + 1..]);
        let leaving = map.layers().frozen()[base + 1..].to_vec();
        let carried = match target.may_change(map.len(), control).await {
            ControlFlow::Break(()) => Ok(None),
            ControlFlow::Continue(()) => {
                match self.bitmaps_go_down(&leaving, &target, map.len()).await {
                    Ok(()) => self.carry_all(&target, base, control).await,
                    Err(error) => Err(error),
                }
            }
        };
        drop(leaving);
        let frozen = target.close(self).await?;
        map.replace_layers(map.layers().replaced(Arc::new(frozen)));
        let Some((held, copied)) = carried? else { return Ok(Merged::Cancelled) };
        if after == ActiveAfter::Kept {
            return Ok(Merged::Done { dropped: Vec::new(), copied });
        }
        let emptied = self.empty_active(&writer, base, name.as_ref()).await;
        drop(held);
        // Layers may have left, also after an error.
        self.forget_retired().await;
        let (dropped, old) = emptied?;
        if let Err(error) = self.give_back(old).await {
            // The merge itself is done.
            tracing::warn!(%error, "the space of what was merged is not given back");
        }
        Ok(Merged::Done { dropped, copied })
    }

    /// Makes the active layer empty on top of the layer at `base`, which has all that the layers
    /// above it own (A3). The caller holds the gate. Returns the paths of the layers that left, and
    /// the tables to free.
    async fn empty_active(
        &self,
        writer: &Arc<Writer>,
        base: usize,
        name: Option<&BackingName>,
    ) -> Result<(Vec<PathBuf>, Vec<OldTable>)> {
        let prepared = Arc::clone(writer).complete(async |writer: Arc<Writer>| {
            writer.flush().await?;
            let empty = writer.prepare_empty().await?;
            if let Some(name) = name {
                writer.name_backing(Some(name)).await?;
            }
            Ok::<_, Error>(empty)
        });
        let empty = prepared.await?;
        let layers = self.map.layers();
        let active = layers.frozen().len();
        let gone = &layers.all()[base + 1..active];
        let dropped = gone.iter().map(|layer| layer.path.to_path_buf()).collect();
        self.exchange_layers(layers.without(base + 1, active, base), |_| false);
        let emptied = Arc::clone(writer)
            .complete(async |writer: Arc<Writer>| writer.become_empty(empty).await);
        let old = emptied.await?;
        // They were loaded since, and name what is about to be freed.
        self.map.index.cache.retain(|_| false);
        Ok((dropped, old))
    }

    /// Frees what the `old` tables name, and gives it back to the file system.
    async fn give_back(&self, old: Vec<OldTable>) -> Result<()> {
        for table in old {
            self.change(async move |writer: Arc<Writer>| writer.free_table(table).await).await?;
        }
        for _ in 0..3 {
            self.flush().await?;
        }
        Ok(())
    }

    /// Which layer is the base, and by which name the active one names it, if it has another one.
    pub(super) async fn plan_commit_active(
        &self,
        writer: &Writer,
        base: Option<&Path>,
    ) -> Result<(usize, Option<BackingName>)> {
        let (images, layers) = (&*self.map.images, self.map.layers());
        let refuse = |kind, what: &str| Err(Error::new(kind, what));
        let active = layers.frozen().len();
        let base = match base {
            Some(path) => position_at(images, &layers, path)?,
            None if active == 0 => {
                return refuse(ErrorKind::Invalid, "no layer is beneath the active one");
            }
            None => active - 1,
        };
        if base >= active {
            return refuse(ErrorKind::Invalid, "the base is not beneath the active layer");
        }
        if layers.active().data_path.is_some() {
            let what = "it keeps its data in an external file, and would have to be emptied: take a \
                        snapshot, and commit up to this layer (--top)";
            return Err(layers.active().explain(Error::new(ErrorKind::Unsupported, what)));
        }
        check_no_snapshots(&layers.all()[base + 1..]).await?;
        if base + 1 == active {
            return Ok((base, None));
        }
        let name = backing_name(images, layers.active(), &layers.all()[base])?;
        // A header without room for the name is better refused before than after.
        writer.plan_backing(Some(&name)).await?;
        Ok((base, Some(name)))
    }

    /// Copies into the `target` what shows through the layers above it. Returns the held gate, so
    /// that nothing changes before the layers do, and how many bytes were copied; `None` if it was
    /// cancelled.
    async fn carry_all(
        &self,
        target: &Target,
        base: usize,
        control: &dyn MergeControl,
    ) -> Result<Option<(HeldGate<'_>, u64)>> {
        let map = &self.map;
        let mut pace = Pace::new(self, &map.layers().all()[base + 1..], control);
        let (wanted, end) = {
            let _held = self.gate.hold().await;
            let end = map.len();
            (self.merging.touches.want(end), end)
        };
        target.grow_to(end).await?;
        let layers = map.layers();
        let leaving = Leaving::new(&layers, base + 1, layers.all().len());
        let leaving = leaving.over(target.len());
        drop(layers);
        let took = Duration::ZERO;
        let mut carrying =
            Carrying { chain: self, target, leaving, end, copied: 0, looked_at: 0, took };
        let whole = GuestRange::between(GuestOffset::ZERO, GuestOffset::new(target.len()));
        let whole = whole.expect("a disk");
        if carrying.carry(whole, Some(&mut pace)).await?.is_break() {
            return Ok(None);
        }
        let (mut is_durable, mut round) = (false, 0);
        loop {
            // Before what was changed is taken: it may rest, and the guest goes on meanwhile.
            let progress = MergeProgress { is_ending: true, ..carrying.progress(end) };
            if pace.ask(progress).await.is_break() {
                return Ok(None);
            }
            // Now, or within the round before.
            if pace.take_rested() > RESTED {
                (is_durable, round) = (false, 0);
            }
            let touched = wanted.notes.take(end);
            let bytes: u64 = touched.iter().map(|range| range.len()).sum();
            let is_little = bytes <= carrying.held_bytes();
            if is_little && is_durable || round == ROUNDS_MAX {
                let held = self.gate.hold().await;
                carrying.carry_ranges(&touched).await?;
                carrying.carry_ranges(&wanted.notes.take(end)).await?;
                return Ok(Some((held, carrying.copied)));
            }
            // What was under way when the notes were taken is done before it is read (A2).
            self.gate.in_place_grace().await;
            self.gate.changes_grace().await;
            let ended = match round {
                0..ROUNDS_FREE => carrying.carry_freely(&touched, &mut pace).await?,
                _ => {
                    let pause = HELD_MAX / 2_u32.pow(round - ROUNDS_FREE);
                    carrying.carry_in_turns(&touched, pause, &mut pace).await?
                }
            };
            if ended.is_break() {
                return Ok(None);
            }
            if is_little {
                // So that little is left to be made durable while the guest waits.
                target.flush().await?;
                is_durable = true;
            }
            round += 1;
        }
    }
}

impl Carrying<'_> {
    /// Bytes of the disk that can be copied within [`HELD_MAX`], as far as is known: a multiple of
    /// [`HELD_BYTES_MIN`].
    fn held_bytes(&self) -> u64 {
        let took = u64::try_from(self.took.as_micros()).unwrap_or(u64::MAX);
        let held = u64::try_from(HELD_MAX.as_micros()).unwrap_or(u64::MAX);
        let bytes = u128::from(self.looked_at) * u128::from(held);
        let bytes = bytes.checked_div(u128::from(took)).and_then(|bytes| bytes.try_into().ok());
        let bytes: u64 = bytes.unwrap_or(0);
        (bytes / HELD_BYTES_MIN * HELD_BYTES_MIN).max(HELD_BYTES_MIN)
    }

    async fn carry_ranges(&mut self, ranges: &[GuestRange]) -> Result<()> {
        for range in ranges {
            let _ = self.carry(*range, None).await?;
        }
        Ok(())
    }

    async fn carry_freely(
        &mut self,
        ranges: &[GuestRange],
        pace: &mut Pace<'_>,
    ) -> Result<ControlFlow<()>> {
        for range in ranges {
            if self.carry(*range, Some(pace)).await?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Copies `ranges` while the gate is held, for moments with a `pause` in between.
    async fn carry_in_turns(
        &mut self,
        ranges: &[GuestRange],
        pause: Duration,
        pace: &mut Pace<'_>,
    ) -> Result<ControlFlow<()>> {
        for range in ranges {
            let mut at = range.start();
            while at < range.end() {
                let progress = MergeProgress { is_ending: true, ..self.progress(self.end) };
                if pace.ask(progress).await.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                let stop = at.checked_add(self.held_bytes()).unwrap_or(range.end());
                let part = GuestRange::between(at, stop.min(range.end())).expect("it goes on");
                let held = self.chain.gate.hold().await;
                let _ = self.carry(part, None).await?;
                drop(held);
                mica_rt::sleep(pause).await;
                at = part.end();
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn progress(&self, done: u64) -> MergeProgress {
        MergeProgress {
            done: done.min(self.end),
            total: self.end,
            copied: self.copied,
            ..MergeProgress::default()
        }
    }

    /// Copies what is needed of `range`, in steps; at a `pace`, if there is one.
    async fn carry(
        &mut self,
        range: GuestRange,
        mut pace: Option<&mut Pace<'_>>,
    ) -> Result<ControlFlow<()>> {
        let mut at = range.start().bytes();
        let end = range.end().bytes();
        while at < end {
            if let Some(pace) = &mut pace {
                if pace.step(self.progress(at)).await.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                let skipped = self.skip(at, end).await?;
                if skipped > 0 {
                    at += skipped;
                    continue;
                }
                pace.begin();
            }
            let stop = ((at / STEP_BYTES + 1) * STEP_BYTES).min(end);
            let step = GuestRange::between(GuestOffset::new(at), GuestOffset::new(stop));
            let began = mica_rt::now();
            let step = step.expect("it goes on");
            if self.carry_step(step).await? {
                self.looked_at += step.len();
                self.took += mica_rt::now().saturating_since(began);
            } else if let Some(pace) = &mut pace {
                pace.forget();
            }
            at = stop;
        }
        Ok(ControlFlow::Continue(()))
    }

    /// How far from `at` on, up to `end`, nothing has to be copied, as far as was looked; 0 if
    /// something has to be.
    async fn skip(&self, at: u64, end: u64) -> Result<u64> {
        let (start, disk_end) = (GuestOffset::new(at), GuestOffset::new(self.end.min(end)));
        let rest = GuestRange::between(start, disk_end).filter(|rest| !rest.is_empty());
        let Some(rest) = rest else { return Ok(0) };
        let map = &self.chain.map;
        let _in_flight = self.chain.gate.enter();
        if self.leaving.ignores_holes(rest)
            && let Some(len) = map.skip_unowned(start, disk_end).await?
        {
            return Ok(len);
        }
        let stop = disk_end.min(GuestOffset::new((at / SCAN_BYTES + 1) * SCAN_BYTES));
        let window = GuestRange::between(start, stop).expect("it goes on");
        let needed = self.leaving.first_need(&map.plan(window).await?);
        let until = needed.map_or(stop.bytes(), |needed| needed.bytes() / STEP_BYTES * STEP_BYTES);
        Ok(until.saturating_sub(at))
    }

    /// Copies what is needed of one step; returns whether anything was.
    async fn carry_step(&mut self, step: GuestRange) -> Result<bool> {
        let map = &self.chain.map;
        let mut data: Vec<(GuestRange, Buf)> = Vec::new();
        let mut zeros: Vec<GuestRange> = Vec::new();
        let disk_end = GuestOffset::new(self.end);
        if let Some(shown) = GuestRange::between(step.start(), step.end().min(disk_end))
            .filter(|shown| !shown.is_empty())
        {
            // Places that the plan names are not used again while this lives.
            let _in_flight = self.chain.gate.enter();
            let extents = map.plan(shown).await?;
            let mut runs: Vec<Vec<Extent>> = Vec::new();
            for extent in &extents {
                match self.leaving.need(extent) {
                    None => {}
                    Some((range, Need::Zeros)) => zeros.push(range),
                    Some((range, Need::Data)) => match runs.last_mut() {
                        Some(run)
                            if run.last().is_some_and(|l| l.range().end() == range.start()) =>
                        {
                            run.push(*extent);
                        }
                        _ => runs.push(vec![*extent]),
                    },
                }
            }
            for run in runs {
                let range = GuestRange::new(run[0].start, Extent::total_len(&run));
                data.push((range.expect("a part"), map.read_extents(run).await?));
            }
        }
        // The base may be longer than the disk: what is behind its end would show if it grew.
        zeros.extend(
            GuestRange::between(step.start().max(disk_end), step.end())
                .filter(|behind| !behind.is_empty()),
        );
        let is_anything = !(data.is_empty() && zeros.is_empty());
        for (range, bytes) in data {
            self.copied += range.len();
            self.target.write(range, bytes).await?;
        }
        for range in zeros {
            self.target.zero(range).await?;
        }
        Ok(is_anything)
    }
}

#[cfg(test)]
mod tests;
