//! A volume that is open: a disk.
//!
//! ```text
//! write ─▶ record ─▶ log, batch ─▶ extent ─▶ put ─▶ the next state     writing, destage
//! read  ─▶ batches, map of the state ─▶ blocks                          reader
//! flush ─▶ the log is synced, or everything is in extents that are put
//! ```
//!
//! Invariants
//! - I1 A flush is answered when everything that was done before it is as durable as was promised:
//!   in the log, or in extents that are put, one after the other, without a gap.
//! - I2 After a put that was refused, or an error of the log, nothing is acknowledged: the volume
//!   is latched. A store that does not answer makes everybody wait.

mod automatic;
mod damage;
mod direct;
mod manage;
mod rewrite;
mod snapshots;
mod tidy;

use crate::heads::Heads;
use crate::known::Change;
use crate::place::{BLOCK_BYTES, Writer};
use crate::reader::{self, View, check_range};
use crate::shared::{Durability, Shared};
use crate::stage::Failed;
use crate::state::State;
use crate::tree::Tree;
use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, Haste, IoFuture, LocalFuture, Manage,
    ManageIndex, ManageSnapshots, ManageVolume, MapStats, Plan, Planned, Requests, Result,
    WriteStats, Writing, Zeroes, check_longer,
};
use mica_rt::{Buf, join_all, spawn};
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A volume that is open.
pub struct Volume {
    shared: Arc<Shared>,
}

impl Volume {
    pub(crate) fn of(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A state of a volume, to be read.
    pub(crate) fn readable(tree: Arc<Tree>, heads: Heads, state: State) -> Self {
        // Nobody tends it, and so a boot of it would not end.
        Self::of(Shared::new(tree, heads, None, state, None))
    }

    /// The number under which it writes, if it does.
    pub fn writer(&self) -> Option<Writer> {
        self.shared.writer.as_ref().map(|putter| putter.writer)
    }

    /// Whether it was given up by [`Manage::hasten`], with all that was promised in its log.
    pub fn is_left_to_log(&self) -> bool {
        self.shared.now().stage.has_failed(Failed::LeftToLog)
    }

    /// Describes the outage if the store does not answer.
    fn outage(&self) -> Option<String> {
        let trouble = self.shared.writer.as_ref().and_then(|putter| {
            let trouble = putter.trouble.lock();
            let trouble = trouble.as_ref()?;
            let now_ns = self.shared.heads.environment.now_ns();
            let seconds = now_ns.saturating_sub(trouble.since_ns) / 1_000_000_000;
            let error = trouble.error.in_one_line();
            Some(format!("the store has taken nothing for {seconds} s: {error}"))
        });
        let failing = self.shared.tree.failing_reads();
        let reads = || format!("the store does not answer: {failing} reads wait for it");
        trouble.or_else(|| (failing > 0).then(reads))
    }

    fn planned(&self, view: &View, range: GuestRange, mut extents: Vec<Extent>) -> Plan<'static> {
        view.extents(range, &mut extents);
        view.keep_in(&self.shared.plans);
        Plan::untracked(extents)
    }

    /// Reads `range`, whatever its blocks are.
    fn read_by_view(&self, range: GuestRange, buf: Buf) -> IoFuture {
        let mut view = self.shared.view(range);
        let is_known = view.resolve_cached(&self.shared.tree, &self.shared.plans);
        let shared = Arc::clone(&self.shared);
        IoFuture::boxed(async move {
            let (mut first, mut buf) = (Some((view, is_known)), Some(buf));
            let read = shared.reading(async || {
                let (mut view, is_known) =
                    first.take().unwrap_or_else(|| (shared.view(range), false));
                // While the map is asked, too.
                let _guest = shared.boot.as_ref().map(|boot| boot.guest());
                if !is_known && let Err(error) = view.resolve(&shared.tree).await {
                    return (view.generation(), Err(error));
                }
                if let Some(boot) = &shared.boot {
                    boot.note(&view);
                }
                let room = buf.take().expect("it comes back");
                let (result, room) = view.read(&shared.tree, range, room).await;
                buf = Some(room);
                (view.generation(), result)
            });
            let result = match read.await {
                Err(error) => Err(shared.located(error, range).await),
                Ok(()) => Ok(()),
            };
            (result, buf.expect("it came back"))
        })
    }

    /// Does `act` as a request that is in flight until it is done, whoever waits for it.
    fn request<T: 'static>(
        &self,
        act: impl AsyncFnOnce(Arc<Shared>) -> T + 'static,
    ) -> impl Future<Output = T> + 'static {
        let shared = Arc::clone(&self.shared);
        let in_flight = Requests::enter_owned(&shared.requests);
        spawn(async move {
            let done = act(shared).await;
            drop(in_flight);
            done
        })
    }
}

impl Disk for Volume {
    fn geometry(&self) -> Geometry {
        let preferred_bytes = u32::try_from(BLOCK_BYTES).expect("small");
        Geometry { len: self.shared.len(), preferred_bytes }
    }

    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        let mut view = match self.shared.checked_view(range) {
            Ok(view) => view,
            Err(error) => return Planned::Ready(Err(error)),
        };
        let (tree, plans) = (&self.shared.tree, &self.shared.plans);
        if view.resolve_cached(tree, plans) {
            return Planned::Ready(Ok(self.planned(&view, range, extents)));
        }
        Planned::Pending(Box::pin(async move {
            let _guest = self.shared.boot.as_ref().map(|boot| boot.guest());
            let mut first = Some(view);
            let view = self.shared.reading(async || {
                let mut view = first.take().unwrap_or_else(|| self.shared.view(range));
                let resolved = view.resolve(tree).await;
                (view.generation(), resolved.map(|()| view))
            });
            let view = view.await.map_err(|error| self.shared.located_in_map(error, range))?;
            Ok(self.planned(&view, range, extents))
        }))
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            self.shared.checked_view(range).map(drop)?;
            let blocks = reader::blocks_of(range);
            let surveyed = self.shared.reading(async || {
                let (generation, map, recent) = {
                    let now = self.shared.now();
                    (now.generation, now.state.map, now.recent_batches(&blocks))
                };
                (generation, reader::survey(&self.shared.tree, map, &recent, range).await)
            });
            surveyed.await.map_err(|error| self.shared.located_in_map(error, range))
        })
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        if extent.kind != ExtentKind::Encoded {
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        let range = extent.range();
        match self.read_directly(range, buf) {
            Ok(reading) => reading,
            Err(buf) => self.read_by_view(range, buf),
        }
    }

    fn is_writable(&self) -> bool {
        self.shared.writer.is_some()
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        let range = GuestRange::new(at, buf.len() as u64);
        let checked = range.map(|range| check_range(range, self.shared.len()));
        let is_fine = self.shared.putter().map(drop).and(
            checked
                .unwrap_or_else(|| Err(Error::new(ErrorKind::Invalid, "a write beyond 64 bits"))),
        );
        if let Err(error) = is_fine {
            return Writing::Direct(mica_block::ready(Err(error), buf));
        }
        Writing::Boxed(Box::pin(self.request(async move |shared| {
            let result = match shared.write(at, buf).await {
                Ok(()) => shared.after_change().await,
                Err(error) => Err(error),
            };
            // What is kept of it is not given back.
            (result, Buf::new(0))
        })))
    }

    fn write_zeroes(&self, range: GuestRange, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.putter()?;
            check_range(range, self.shared.len())?;
            self.request(async move |shared| {
                shared.clear(range, true).await?;
                shared.after_change().await
            })
            .await
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.putter()?;
            check_range(range, self.shared.len())?;
            self.request(async move |shared| {
                shared.clear(range, false).await?;
                shared.after_change().await
            })
            .await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.shared.writer {
                Some(_) => {
                    self.shared.before_flush().await?;
                    self.shared.flush().await
                }
                None => Ok(()),
            }
        })
    }
}

impl Manage for Volume {
    fn resize(&self, len: u64) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.putter()?;
            check_longer(self.shared.len(), len)?;
            if len > State::LEN_MAX {
                let what = format!("a volume has at most {} bytes", State::LEN_MAX);
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            self.request(async move |shared| {
                shared.change_once(Change::Length(len)).await?;
                shared.flush().await
            })
            .await
        })
    }

    fn idle(&self) -> LocalFuture<'_, ()> {
        Box::pin(self.shared.requests.grace())
    }

    /// Puts what was done, and ends the writer's time.
    fn close(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let close = async {
                match self.shared.writer {
                    Some(_) => self.shared.close().await,
                    None => {
                        self.shared.end_reading();
                        Ok(())
                    }
                }
            };
            let record = async {
                self.shared.end_boot(false).await;
                Ok(())
            };
            let both: [LocalFuture<'_, Result<()>>; 2] = [Box::pin(close), Box::pin(record)];
            join_all(both).await.into_iter().collect()
        })
    }

    fn hasten(&self, haste: Haste) -> LocalFuture<'_, ()> {
        Box::pin(self.shared.hasten(haste))
    }

    fn latch(&self) -> Option<Error> {
        self.shared.latch()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        if let Some(outage) = self.outage() {
            return Some(outage.into());
        }
        let putter = self.shared.writer.as_ref()?;
        if let Some(loss) = &putter.loss {
            return Some(loss.clone().into());
        }
        match (putter.durability, &putter.log) {
            (Durability::Host, _) => Some(Cow::Borrowed(
                "what was flushed may be in the log of this machine only: a host that takes the \
                 volume over by force does not have it",
            )),
            (Durability::Store, None) => Some(Cow::Borrowed(
                "without a log, what was not flushed is lost if this server is killed",
            )),
            (Durability::Store, Some(_)) => None,
        }
    }

    fn write_stats(&self) -> WriteStats {
        let Some(putter) = &self.shared.writer else { return WriteStats::default() };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let extents = count(&putter.counts.extents);
        WriteStats {
            metadata_bytes: count(&putter.counts.metadata_bytes),
            syncs: extents + count(&putter.counts.heads),
            groups: extents,
            linked_clusters: count(&putter.counts.blocks),
            ..WriteStats::default()
        }
    }

    fn map_stats(&self) -> MapStats {
        self.shared.tree.stats()
    }

    fn layer_count(&self) -> usize {
        1
    }

    fn layer_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn data_paths(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    fn is_encrypted(&self, _position: usize) -> bool {
        self.shared.tree.is_encrypted()
    }

    fn layer_position(&self, _layer: LayerNumber) -> usize {
        0
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        None
    }

    fn chain(&self) -> Option<&dyn mica_block::ManageChain> {
        None
    }

    fn bitmaps(&self) -> Option<&dyn mica_block::ManageBitmaps> {
        None
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        Some(self)
    }

    fn volume(&self) -> Option<&dyn ManageVolume> {
        self.shared.writer.is_some().then_some(self as _)
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        let both: [LocalFuture<'_, ()>; 2] =
            [Box::pin(self.shared.tend()), Box::pin(self.shared.tend_boot())];
        Box::pin(async { join_all(both).await.into_iter().collect() })
    }
}

#[cfg(test)]
mod tests;
