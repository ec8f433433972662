//! A volume that is open: a disk.
//!
//! ```text
//! write ─▶ batch ─▶ flush, or a full batch: build an extent ─▶ put ─▶ the next state
//! read  ─▶ batch, or map of the state ─▶ blocks
//! ```
//!
//! Invariants
//! - I1 A flush is answered when everything that was done before it is in extents that are put, one
//!   after the other, without a gap.
//! - I2 Extents are put by one task at a time, which runs to its end whoever waits for it.
//! - I3 After a put that failed for good nothing is acknowledged: the volume is latched.

mod rewrite;

use crate::build::{Builder, Signature};
use crate::heads::{End, Heads, Owned};
use crate::known::Now;
use crate::place::{BLOCK_BYTES, ExtentId};
use crate::put::{Patience, put};
use crate::reader::{self, View, blocks_of, check_range};
use crate::recent::{Block, Known};
use crate::segment::{Segment, WEIGHT_MAX};
use crate::state::State;
use crate::tree::Tree;
use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, GroupSync, IoFuture, LocalFuture, Manage,
    ManageIndex, ManageSnapshots, MapStats, Plan, Planned, Put, Requests, Result, WriteStats,
    Writing, Zeroes, check_longer,
};
use mica_rt::sync::SharedLock;
use mica_rt::{Buf, spawn};
use mica_units::{GuestOffset, GuestRange, LayerNumber};
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A volume that is open.
pub struct Volume {
    shared: Arc<Shared>,
}

/// What requests and the task that puts extents share.
pub(crate) struct Shared {
    pub(crate) tree: Arc<Tree>,
    heads: Heads,
    /// Who writes it; nobody if it is only read.
    writer: Option<Putter>,
    now: Mutex<Now>,
    requests: Arc<Requests>,
}

/// What puts extents.
struct Putter {
    owned: Owned,
    /// Held by the task that does (I2).
    turn: SharedLock,
    /// Its builder; absent while it is used, and after that failed.
    builder: Mutex<Option<Builder>>,
    flushes: GroupSync,
    counts: Counts,
}

/// What writing has cost.
#[derive(Default)]
struct Counts {
    extents: AtomicU64,
    metadata_bytes: AtomicU64,
    blocks: AtomicU64,
}

impl Volume {
    /// The volume of `owned`, for its writer.
    pub(crate) fn writable(tree: Arc<Tree>, heads: Heads, owned: Owned) -> Self {
        let signature = Signature { store: heads.store, volume: owned.head.volume };
        let state = owned.head.state;
        let writer = Putter {
            builder: Mutex::new(Some(Builder::new(signature, state))),
            owned,
            turn: SharedLock::default(),
            flushes: GroupSync::new(),
            counts: Counts::default(),
        };
        Self::new(tree, heads, Some(writer), state)
    }

    /// A state of a volume, to be read.
    pub(crate) fn readable(tree: Arc<Tree>, heads: Heads, state: State) -> Self {
        Self::new(tree, heads, None, state)
    }

    fn new(tree: Arc<Tree>, heads: Heads, writer: Option<Putter>, state: State) -> Self {
        let (now, requests) = (Mutex::new(Now::new(state)), Arc::default());
        Self { shared: Arc::new(Shared { tree, heads, writer, now, requests }) }
    }
}

impl Shared {
    pub(crate) fn now(&self) -> MutexGuard<'_, Now> {
        // No code that may panic runs while it is half changed.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn len(&self) -> u64 {
        self.now().len
    }

    fn view(&self, range: GuestRange) -> View {
        View::new(&self.now(), blocks_of(range))
    }

    fn putter(&self) -> Result<&Putter> {
        let putter = self.writer.as_ref().ok_or_else(|| {
            Error::new(ErrorKind::Denied, "the volume was opened for reading only")
        })?;
        self.now().latch.clone().map_or(Ok(putter), Err)
    }

    /// Puts everything that was done until now.
    async fn store(self: &Arc<Self>) -> Result<()> {
        let putter = self.putter()?;
        putter
            .flushes
            .run(async || {
                let this = Arc::clone(self);
                spawn(async move { this.put_batch().await }).await
            })
            .await
    }

    /// Puts the batch that fills.
    async fn put_batch(&self) -> Result<()> {
        let putter = self.putter()?;
        let _alone = putter.turn.alone().await;
        let segment = {
            let mut now = self.now();
            if let Some(error) = &now.latch {
                return Err(error.clone());
            }
            if now.is_stored() {
                return Ok(());
            }
            let (len, records) = (now.len, now.state.records + 1);
            let time_ns = self.heads.environment.now_ns();
            Segment { batch: now.seal(), len, records, time_ns, cuts: Vec::new() }
        };
        let outcome = self.put_extent(putter, &[segment]).await;
        let mut now = self.now();
        match outcome {
            Ok(state) => now.publish(state),
            Err(error) => {
                tracing::error!(error = error.in_one_line(), "the volume takes no more writes");
                now.latch = Some(error.clone());
                return Err(error);
            }
        }
        Ok(())
    }

    async fn put_extent(&self, putter: &Putter, segments: &[Segment]) -> Result<State> {
        let taken = putter.builder.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut builder = taken.ok_or_else(|| Error::new(ErrorKind::Io, "an extent failed"))?;
        let writer = putter.owned.writer;
        let sequence =
            u32::try_from(putter.counts.extents.load(Ordering::Relaxed)).map_err(|_| {
                Error::new(
                    ErrorKind::Limit,
                    format!("writer {} has put every extent", writer.number()),
                )
            })?;
        let (id, nonce) = (ExtentId { writer, sequence }, self.heads.environment.random());
        let built = builder.build(&self.tree, id, segments, nonce).await?;
        let bytes = built.content.len() as u64;
        let objects = &*self.heads.objects;
        match put(objects, &id.name(), built.content, Patience::Endless).await? {
            Put::Done => {}
            Put::Exists => return Err(self.heads.lost(writer).await),
        }
        let blocks = segments.iter().map(|segment| segment.batch.data_blocks() as u64).sum::<u64>();
        let counts = &putter.counts;
        counts.extents.fetch_add(1, Ordering::Relaxed);
        counts.blocks.fetch_add(blocks, Ordering::Relaxed);
        let metadata = bytes - blocks * BLOCK_BYTES as u64;
        counts.metadata_bytes.fetch_add(metadata, Ordering::Relaxed);
        *putter.builder.lock().unwrap_or_else(PoisonError::into_inner) = Some(builder);
        Ok(built.state)
    }

    /// Waits until there is room for something in the batch that fills, and does `act` to it.
    async fn change<T>(self: &Arc<Self>, act: impl FnOnce(&mut Now) -> T) -> Result<T> {
        loop {
            {
                let mut now = self.now();
                if let Some(error) = &now.latch {
                    return Err(error.clone());
                }
                if now.filling_weight() < WEIGHT_MAX {
                    return Ok(act(&mut now));
                }
            }
            self.store().await?;
        }
    }

    async fn write(self: &Arc<Self>, at: GuestOffset, bytes: &[u8]) -> Result<()> {
        let (mut at, mut bytes) = (at.bytes(), bytes);
        while !bytes.is_empty() {
            let (block, within) = (at / BLOCK_BYTES as u64, at % BLOCK_BYTES as u64);
            let within = usize::try_from(within).expect("less than a block");
            let (part, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - within));
            match part.try_into() {
                Ok(whole) => {
                    let data: Block = Arc::new(whole);
                    self.change(|now| now.put(block, data)).await?;
                }
                Err(_) => self.write_part(block, within, part).await?,
            }
            (at, bytes) = (at + part.len() as u64, rest);
        }
        Ok(())
    }

    /// Changes a part of a block: what else is in it is read first, if it has to be.
    async fn write_part(self: &Arc<Self>, block: u64, within: usize, part: &[u8]) -> Result<()> {
        let mut stored: Option<(u64, Block)> = None;
        loop {
            let merged = self
                .change(|now| {
                    let old = match (now.recent(block), &stored) {
                        (Some(Known::Data(old)), _) => old,
                        (Some(Known::Nothing), _) => Arc::new([0; BLOCK_BYTES]),
                        (None, Some((generation, old))) if *generation == now.generation => {
                            Arc::clone(old)
                        }
                        (None, _) => return false,
                    };
                    let mut new = *old;
                    new[within..within + part.len()].copy_from_slice(part);
                    now.put(block, Arc::new(new));
                    true
                })
                .await?;
            if merged {
                return Ok(());
            }
            let (generation, map) = {
                let now = self.now();
                (now.generation, now.state.map)
            };
            stored = Some((generation, reader::stored_block(&self.tree, map, block).await?));
        }
    }

    /// Whole blocks of `range` have nothing from now on; what is left of it at its ends is written
    /// with zeros if `exact`.
    async fn clear(self: &Arc<Self>, range: GuestRange, exact: bool) -> Result<()> {
        let size = BLOCK_BYTES as u64;
        let (start, end) = (range.start().bytes(), range.end().bytes());
        // A disk's last block may be shorter than a block: nobody sees what is beyond.
        let end_blocks = if end == self.len() { end.div_ceil(size) } else { end / size };
        let first = start.div_ceil(size);
        if first >= end_blocks {
            return if exact { self.write_zeros(start, end).await } else { Ok(()) };
        }
        if exact {
            self.write_zeros(start, first * size).await?;
            self.write_zeros((end_blocks * size).min(end), end).await?;
        }
        self.change(|now| now.clear(first..end_blocks)).await
    }

    async fn write_zeros(self: &Arc<Self>, start: u64, end: u64) -> Result<()> {
        let len = usize::try_from(end - start).expect("less than two blocks");
        self.write(GuestOffset::new(start), &vec![0; len]).await
    }
}

impl Volume {
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
        if let Err(error) = check_range(range, self.shared.len()) {
            return Planned::Ready(Err(error));
        }
        let view = self.shared.view(range);
        Planned::Pending(Box::pin(async move {
            Ok(Plan::untracked(view.extents(&self.shared.tree, range, extents).await?))
        }))
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            check_range(range, self.shared.len())?;
            if range.is_empty() {
                return Ok(Vec::new());
            }
            // What is not in the map yet is little, and is put first where there is a writer.
            if self.is_writable() {
                self.shared.store().await?;
            }
            let map = self.shared.now().state.map;
            reader::survey_map(&self.shared.tree, map, range).await
        })
    }

    fn read(&self, extent: &Extent, mut buf: Buf) -> IoFuture {
        if extent.kind != ExtentKind::Encoded {
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        let range = extent.range();
        let view = self.shared.view(range);
        let tree = Arc::clone(&self.shared.tree);
        IoFuture::boxed(async move {
            let len = buf.len();
            match view.read(&tree, range, buf).await {
                Ok(buf) => (Ok(()), buf),
                Err(error) => (Err(error), Buf::new(len)),
            }
        })
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
            let result = shared.write(at, &buf).await;
            (result, buf)
        })))
    }

    fn write_zeroes(&self, range: GuestRange, _how: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.putter()?;
            check_range(range, self.shared.len())?;
            self.request(async move |shared| shared.clear(range, true).await).await
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            self.shared.putter()?;
            check_range(range, self.shared.len())?;
            self.request(async move |shared| shared.clear(range, false).await).await
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            match self.shared.writer {
                Some(_) => self.shared.store().await,
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
                shared.change(|now| now.len = now.len.max(len)).await?;
                shared.store().await
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
            let Some(putter) = &self.shared.writer else { return Ok(()) };
            self.shared.store().await?;
            let state = self.shared.now().state;
            let heads = &self.shared.heads;
            let last = heads.last_head(&putter.owned, state, &End::Closed);
            heads.end(putter.owned.writer, &last).await
        })
    }

    fn latch(&self) -> Option<Error> {
        self.shared.now().latch.clone()
    }

    fn weakness(&self) -> Option<Cow<'static, str>> {
        None
    }

    fn write_stats(&self) -> WriteStats {
        let Some(putter) = &self.shared.writer else { return WriteStats::default() };
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let extents = count(&putter.counts.extents);
        WriteStats {
            metadata_bytes: count(&putter.counts.metadata_bytes),
            syncs: extents,
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

    fn layer_position(&self, _layer: LayerNumber) -> usize {
        0
    }

    fn index(&self) -> Option<&dyn ManageIndex> {
        None
    }

    fn snapshots(&self) -> Option<&dyn ManageSnapshots> {
        None
    }

    fn tend(&self) -> LocalFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }
}

#[cfg(test)]
mod tests;
