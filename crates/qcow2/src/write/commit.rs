//! Making a group of changes durable: the group sync of the transactional hypervisor (paper,
//! section IV-B).
//!
//! ```text
//! take the group ─▶ early pages ─▶ sync ─▶ late pages ─▶ sync     in two steps
//!                └▶ early and late pages ───────────────▶ sync     where that is safe
//! then: clusters that lost their last link ─▶ limbo ─▶ punched, counted down, free
//! ```
//!
//! Alongside the last sync the image gets the name that the log has from then on
//! ([`redo`](crate::redo)).
//!
//! One step is enough if every link of the group names clusters whose counts are durable already
//! and either replaces zeros by a blank cluster (see [`super`], I2) or changes no cluster's place.
//! A unit that shows the base's bytes takes two steps, and no record in a log of ours could make it
//! one. A power cut leaves any part of what was being written, so perhaps the link and not the
//! data. Whoever opens the image next follows the link, and reads what the place held before: zeros
//! where the base's bytes were. A record that would tell us to undo the link says nothing to QEMU,
//! which may be the one. If the record held the data, and its sync alone were waited for, QEMU
//! would read the base's bytes after the flush was acknowledged. Only an image that other programs
//! refuse could be written so, and ours are plain qcow2 at any moment. One step therefore needs a
//! place that durably holds what shows there already, which only a blank one over zeros does.
//!
//! A group is written from a copy: changes made in the meantime belong to the next one, so that a
//! link never becomes durable with a group that its data does not belong to.
//!
//! A group whose pages find no space in the file system is put back and retried with the next one;
//! any other failure ends the writing.
//!
//! Freed clusters leave limbo with the first group that begins when their moment is over ([`Gate`],
//! I3). It comes at the earliest when the next group begins after the one that freed them. Then the
//! changes that are under way have to end, and after that the reads and the writes in place that
//! had begun before the last of them ended: they may have found these clusters in the map.
//!
//! [`Gate`]: crate::gate::Gate

use super::Writer;
use super::pages::{Dirty, Group};
use crate::gate::Moment;
use mica_block::{ErrorKind, LocalFuture, Result, Space as SpaceChange, Store};
use mica_qcow2_format::field;
use mica_rt::{Buf, Pace};
use mica_units::{HostCluster, HostOffset};
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// Number of freed clusters after which other tasks get a turn: a group may have freed very many.
const CLUSTERS_PER_TURN: u64 = 256;
/// Pages that are written to the page cache in much less than a millisecond.
const PAGES_SOON_WRITTEN: usize = 32;

/// When the last sync of a group comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LastSync {
    Now,
    /// The caller sees to it. Until then the group is in the file, and may be lost with the power.
    Later,
}

/// How the writing ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Durable,
    /// All that shows is durable. Neither counts need to be, nor what the header says of its end.
    Frozen,
}

/// Host clusters that nothing durable names any more, but that running requests may use.
#[derive(Default)]
pub(crate) struct Limbo {
    /// Freed since the last drain began.
    waiting: Vec<HostCluster>,
    /// A drain, and what was freed before it.
    ending: Option<(Moment, Vec<HostCluster>)>,
}

impl Writer {
    /// Makes durable everything that completed before the call.
    pub(crate) async fn flush(&self) -> Result<()> {
        self.check_usable()?;
        self.streams.note_flush();
        self.settle_beneath().await?;
        if !self.wrote.load(Ordering::Acquire) && !self.inherits.load(Ordering::Acquire) {
            return Ok(());
        }
        self.flushes.run(async || self.commit(LastSync::Now).await).await
    }

    /// Makes the same durable for the writer itself: whoever is acknowledged has to wait for what
    /// lies beneath, too.
    pub(super) async fn flush_own(&self) -> Result<()> {
        self.flushes.run(async || self.commit(LastSync::Now).await).await
    }

    async fn commit(&self, last_sync: LastSync) -> Result<()> {
        self.check_usable()?;
        let committed = self.commit_group(last_sync).await;
        // If only space was missing, the group was put back, and the next flush retries it.
        if let Err(error) = &committed
            && error.kind() != ErrorKind::NoSpace
        {
            self.fail(error);
        }
        committed
    }

    async fn commit_group(&self, last_sync: LastSync) -> Result<()> {
        self.release_drained().await?;
        let _locked = self.metadata.page_writes.lock().await;
        let (mut dirty, mut taken) = {
            let mut pages = self.metadata.lock();
            pages.take_group(self.space.state())
        };
        let number = taken.number;
        let early = std::mem::take(&mut dirty.early);
        let late = std::mem::take(&mut dirty.late);
        // The clients of a process that died ask this one to make durable what that one
        // acknowledged: its data, and the links that lead to it.
        let inherits = self.inherits.load(Ordering::Acquire);
        let has_metadata = inherits || !early.is_empty() || !late.is_empty();
        let in_two_steps = taken.in_two_steps && !late.is_empty();
        let written = async {
            self.metadata.unname_before_group().await?;
            self.write_pages(early).await
        };
        if let Err(error) = written.await {
            self.metadata.lock().put_back(&dirty, taken);
            return Err(error);
        }
        if in_two_steps {
            self.sync(true).await?;
            let mut pages = self.metadata.lock();
            pages.group.durable = number;
            // Not earlier: until then another program could make the same links (R7 of the log).
            pages.expect_links(&late, self.space.state());
        }
        let linked = async {
            self.metadata.unname_before_group().await?;
            self.write_pages(late).await
        };
        if let Err(error) = linked.await {
            // Some links may be in the file. What they need must be durable before any others
            // follow.
            if !in_two_steps {
                self.sync(true).await?;
            }
            self.metadata.lock().put_back_links(&dirty, taken);
            return Err(error);
        }
        // The name need not be durable: a power cut ends the log.
        let synced: LocalFuture<'_, Result<()>> = match in_two_steps {
            _ if last_sync == LastSync::Later => Box::pin(async { Ok(()) }),
            true => Box::pin(self.sync_metadata()),
            false => Box::pin(self.sync(has_metadata)),
        };
        let is_named = Cell::new(false);
        let named: LocalFuture<'_, Result<()>> = Box::pin(async {
            is_named.set(self.name_log(&taken).await?);
            Ok(())
        });
        mica_rt::join_all([synced, named]).await.into_iter().collect::<Result<()>>()?;
        if !is_named.get() && taken.logged.take().is_some() {
            // The log goes on from where it was, and expects what it was there.
            self.metadata.lock().group.freed.append(&mut taken.freed);
        }
        if inherits && last_sync == LastSync::Now {
            self.inherits.store(false, Ordering::Release);
        }
        self.end_group(&dirty, &taken);
        self.counters.groups.fetch_add(1, Ordering::Relaxed);
        if !taken.freed.is_empty() {
            let mut limbo = self.limbo.lock();
            limbo.waiting.extend(taken.freed);
        }
        Ok(())
    }

    /// Puts everything into the file that a flush would make durable, and makes durable only what
    /// has to be so before the rest may be there: [`Self::sync_written_out`] is still to come. No
    /// change is under way.
    pub(crate) async fn write_out(&self) -> Result<()> {
        self.commit(LastSync::Later).await
    }

    /// Makes durable what was written out.
    ///
    /// # Errors
    /// Any failure of the syncs: then nothing more is acknowledged.
    pub(crate) async fn sync_written_out(&self) -> Result<()> {
        self.check_usable()?;
        self.settle_beneath().await?;
        self.sync(true).await
    }

    /// Whether it takes long to write out what there is: a sync is needed in between, or there are
    /// many pages.
    pub(crate) fn has_much_to_write_out(&self) -> bool {
        self.needs_sync_between() || self.has_many_pages()
    }

    /// Whether writing out needs a sync in between.
    pub(crate) fn needs_sync_between(&self) -> bool {
        self.metadata.lock().group.in_two_steps
    }

    /// Whether it takes long to put what there is into the page cache.
    pub(crate) fn has_many_pages(&self) -> bool {
        self.metadata.lock().dirty_count() > PAGES_SOON_WRITTEN
    }

    /// Makes the guest's data durable: the next sync has so much less to do.
    ///
    /// # Errors
    /// Any failure of the sync: then nothing more is acknowledged.
    pub(crate) async fn sync_ahead(&self) -> Result<()> {
        self.check_usable()?;
        self.sync(false).await
    }

    /// Flushes so that everything that ends before the flush begins is durable afterwards, and
    /// later changes are noted: see [`Self::has_begun_since`].
    pub(crate) async fn flush_ahead(&self) -> Result<()> {
        self.has_begun.swap(false, Ordering::SeqCst);
        self.gate.in_place_grace().await;
        self.gate.changes_grace().await;
        let flushed = self.flush().await;
        if flushed.is_err() {
            self.has_begun.store(true, Ordering::SeqCst);
        }
        flushed
    }

    /// Whether a change has begun since the last [`Self::flush_ahead`].
    pub(crate) fn has_begun_since(&self) -> bool {
        self.has_begun.load(Ordering::SeqCst)
    }

    fn end_group(&self, dirty: &Dirty, taken: &Group) {
        let mut pages = self.metadata.lock();
        pages.written(dirty);
        pages.group.durable = taken.number;
        pages.forget_zeroed(taken.number);
        pages.forget_logged(taken, self.space.state());
    }

    /// Makes the image name the log as of the group `taken`, whose pages are in the file. Returns
    /// whether it does.
    async fn name_log(&self, taken: &Group) -> Result<bool> {
        let Some(mark) = &taken.logged else { return Ok(false) };
        let (named, page_bytes) = {
            let pages = self.metadata.lock();
            let bits = pages.logging.bits_of(mark);
            (bits.map(|bits| (bits, pages.logging.allow_name(bits))), pages.page_bytes())
        };
        let Some((bits, logged)) = named else { return Ok(false) };
        // A page is the unit that a device writes.
        self.counters.metadata_bytes.fetch_add(page_bytes, Ordering::Relaxed);
        let at = HostOffset::new(field::AUTOCLEAR as u64);
        match self.metadata.write_header(logged, &bits.to_be_bytes(), at).await {
            // The group can be durable without the name.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                self.metadata.lock().logging.not_named(mark, &error);
                Ok(false)
            }
            named => {
                named?;
                self.metadata.lock().logging.note_bits(bits);
                Ok(true)
            }
        }
    }

    async fn write_pages(&self, pages: Vec<(HostOffset, Buf)>) -> Result<()> {
        let bytes: u64 = pages.iter().map(|(_, buf)| buf.len() as u64).sum();
        self.counters.metadata_bytes.fetch_add(bytes, Ordering::Relaxed);
        let store = &*self.metadata.store;
        let writes: Vec<_> = pages.into_iter().map(|(at, buf)| store.write_at(buf, at)).collect();
        let results = mica_rt::join_all(writes).await.into_iter().map(|(result, _)| result);
        let error = results.filter_map(Result::err).reduce(|one, other| {
            // It may be retried only if nothing but space is missing.
            if one.kind() == ErrorKind::NoSpace { other } else { one }
        });
        error.map_or(Ok(()), |error| Err(error.wrap(store.name())))
    }

    /// Syncs the guest's data, and the metadata if there is any.
    async fn sync(&self, has_metadata: bool) -> Result<()> {
        if !self.l2.data_file {
            return self.sync_metadata().await;
        }
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        let data = self.data.sync().await.map_err(|error| error.wrap(self.data.name()));
        if let Err(error) = &data {
            self.metadata.fail_for_good(error);
        }
        match has_metadata {
            true => data.and(self.sync_metadata().await),
            false => data,
        }
    }

    async fn sync_metadata(&self) -> Result<()> {
        self.counters.syncs.fetch_add(1, Ordering::Relaxed);
        self.metadata.sync().await
    }

    /// Frees the clusters that no request can touch any more.
    async fn release_drained(&self) -> Result<()> {
        let drained = {
            let mut limbo = self.limbo.lock();
            let drained = limbo.ending.take_if(|(moment, _)| self.gate.is_over(moment));
            if limbo.ending.is_none()
                && !limbo.waiting.is_empty()
                && let Some(moment) = self.gate.moment()
            {
                let freed = std::mem::take(&mut limbo.waiting);
                limbo.ending = Some((moment, freed));
            }
            drained
        };
        match drained {
            Some((_, clusters)) => self.release(clusters).await,
            None => Ok(()),
        }
    }

    /// Takes one reference from each of `clusters`. Those that lose the last one first return their
    /// space to the file system, as they may be allocated again right after.
    async fn release(&self, mut clusters: Vec<HostCluster>) -> Result<()> {
        clusters.sort_unstable();
        let mut pace = Pace::new(CLUSTERS_PER_TURN);
        let mut last = Vec::new();
        for run in clusters.chunk_by(|one, next| one == next) {
            pace.steps(1).await;
            if self.space.refcount(run[0]).await? == Some(run.len() as u64) {
                last.push(run[0]);
            }
        }
        let bits = self.l2.cluster_bits;
        for cluster in &last {
            // Tables that free metadata are corrupt.
            let at = bits.start_of(*cluster);
            if let Err(error) = self.metadata.ranges.check(at, bits.bytes()) {
                return Err(self.note_corruption(error).await);
            }
        }
        for run in last.chunk_by(|one, next| next.checked_since(*one) == Some(1)) {
            let at = bits.start_of(run[0]);
            let len = bits.bytes_of(run.len() as u64);
            match self.metadata.store.space(SpaceChange::Punch, at, len).await {
                // Keeping the space costs nothing but the space.
                Err(error) if error.kind() != ErrorKind::Unsupported => {
                    tracing::debug!(%error, "freed clusters keep their space");
                }
                _ => {}
            }
        }
        for cluster in clusters {
            pace.steps(1).await;
            self.space.release(cluster).await?;
        }
        Ok(())
    }

    /// Ends the writing. Nothing else is running.
    pub(crate) async fn close(&self) -> Result<()> {
        self.end(Ending::Durable).await
    }

    /// As [`Self::close`], for a layer that is frozen, and durable as it is: not durably. A power
    /// cut before its file is synced leaves clusters counted that nothing uses, at most, and
    /// perhaps the name of a log.
    pub(crate) async fn close_frozen(&self) -> Result<()> {
        self.end(Ending::Frozen).await
    }

    async fn end(&self, ending: Ending) -> Result<()> {
        self.check_usable()?;
        if !self.wrote.load(Ordering::Acquire) {
            return match ending {
                Ending::Durable => self.flush().await,
                Ending::Frozen => Ok(()),
            };
        }
        let closed = self.end_inner(ending).await;
        // If only space is missing, the log stays: the next process to open the image has the
        // writes.
        if let Err(error) = &closed
            && error.kind() != ErrorKind::NoSpace
        {
            self.fail(error);
        }
        closed
    }

    async fn end_inner(&self, ending: Ending) -> Result<()> {
        // A dirty bit is taken away only when the counts are durable.
        let ending = if self.must_be_closed_durably() { Ending::Durable } else { ending };
        if ending == Ending::Durable || self.has_limbo() {
            self.flush().await?;
        }
        // Each round drains what was freed before it, and frees what the previous round drained.
        while self.has_limbo() {
            self.gate.grace().await;
            self.flush().await?;
            if self.is_limbo_empty() {
                // What the group freed goes nowhere while the image cannot be named: without space
                // for its header, it cannot be closed either.
                break;
            }
        }
        let mut unused = self.space.drain_pool();
        unused.sort_unstable();
        for cluster in &unused {
            self.space.release(*cluster).await?;
        }
        match ending {
            Ending::Durable => self.flush().await?,
            Ending::Frozen => self.commit(LastSync::Later).await?,
        }
        if let Err(error) = self.space.cut_tail(&unused).await {
            tracing::debug!(%error, "the file keeps its length");
        }
        self.store_bitmaps().await?;
        self.unmark(ending == Ending::Durable).await?;
        self.check_usable()
    }

    fn has_limbo(&self) -> bool {
        !self.metadata.lock().group.freed.is_empty() || !self.is_limbo_empty()
    }

    fn is_limbo_empty(&self) -> bool {
        let limbo = self.limbo.lock();
        limbo.ending.is_none() && limbo.waiting.is_empty()
    }
}
