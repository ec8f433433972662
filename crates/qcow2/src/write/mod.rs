//! Writing to the active layer of a chain.
//!
//! ```text
//! write ─▶ in place?  the slice knows ──▶ one write, no metadata
//!       └▶ request    claim clusters ─▶ reserve ─▶ write data ─▶ link ─▶ log, publish
//! flush ─▶ commit     counts, new tables │ sync │ links │ sync        shared by all who wait
//! ```
//!
//! Invariants, upheld by the order of writes and syncs in [`commit`]:
//! - I1 A link to a cluster is durable only when its refcount is.
//! - I2 A link is durable before its data only if what was visible before reads as zeros and the
//!   cluster is blank: a power cut then shows zeros, which is the old content. If the store does
//!   not read unwritten bytes as zeros, no cluster is blank.
//! - I3 A freed cluster is not allocated again before the metadata that dropped it is durable and
//!   every request that may have seen it is done.
//! - I4 After a failed sync, or a metadata write that failed for any reason other than lack of
//!   space, nothing more is written or acknowledged.
//! - I5 Every read that starts after a write was acknowledged sees that write.

pub(crate) mod allocate;
pub(crate) mod backing;
pub(crate) mod beneath;
pub(crate) mod bitmaps;
pub(crate) mod clusters;
mod commit;
mod drops;
mod due;
pub(crate) mod empty;
mod file;
mod fill;
mod gather;
pub(crate) mod grow;
pub(crate) mod header;
mod link;
mod logged;
pub(crate) mod offline;
pub(crate) mod overlay;
pub(crate) mod pages;
mod plan;
pub(crate) mod pull;
mod renaming;
mod request;
mod streams;
mod zero;

use crate::gate::Gate;
use crate::l1_place::L1Place;
use crate::layer::Layer;
use crate::live::TableKind;
use crate::map::{Map, slice_of};
use crate::redo::{HeaderFields, HeaderState};
use allocate::Space;
use commit::Limbo;
use mica_block::{
    Error, ErrorKind, GroupSync, IoFuture, OwnedInFlight, RedoMemory, Result, Store, WriteStats,
    read_exact,
};
use mica_qcow2_format::{Encryption, Header, L1Entry, L2Format};
use mica_rt::Buf;
use mica_rt::sync::{self, Claims};
use mica_units::{GuestOffset, GuestRange, HostOffset};
use pages::Metadata;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Size of the pieces in which the L1 table is read when an image is opened.
const TABLE_PIECE_BYTES: usize = 1 << 20;

/// What copy-on-write and syncs have cost since the disk was opened.
#[derive(Default)]
pub(crate) struct WriteCounters {
    pub(crate) copied_read_bytes: AtomicU64,
    pub(crate) copied_written_bytes: AtomicU64,
    pub(crate) metadata_bytes: AtomicU64,
    pub(crate) syncs: AtomicU64,
    pub(crate) groups: AtomicU64,
    pub(crate) linked_clusters: AtomicU64,
}

/// The topmost layer of a map, open for writing.
pub(crate) struct Writer {
    map: Arc<Map>,
    layer: Arc<Layer>,
    metadata: Arc<Metadata>,
    data: Arc<dyn Store>,
    l2: L2Format,
    l1_place: Arc<L1Place>,
    space: Space,
    /// Guest clusters whose entry is being changed.
    clusters: Claims,
    gather: gather::Gather,
    /// L1 entries whose table is being created.
    tables: Claims,
    /// A disk grows once at a time.
    growing: sync::Mutex,
    /// Held while the L1 table is moved, or replaced.
    l1_moves: sync::Mutex,
    /// Held while the header is made to say that the image is in use.
    marking: sync::Mutex,
    gate: Arc<Gate>,
    flushes: GroupSync,
    streams: streams::Streams,
    header: header::InUse,
    bitmaps: bitmaps::Bitmaps,
    /// The redo log's location for the next process to open the image, and when this one opened it.
    redo_memory: Option<Arc<dyn RedoMemory>>,
    now_ns: i128,
    wrote: AtomicBool,
    due: due::Due,
    renaming: renaming::LogRenaming,
    /// Whether a change began since somebody last asked ([`Writer::flush_ahead`]).
    has_begun: AtomicBool,
    beneath: beneath::Beneath,
    /// Whether an earlier process may have left writes in the page cache: no sync of this one has
    /// ended yet.
    inherits: AtomicBool,
    limbo: Mutex<Limbo>,
    pub(crate) counters: WriteCounters,
}

impl Writer {
    /// For `layer`, the topmost of `map`, which has this `header` and this `metadata`.
    pub(crate) async fn open(
        map: Arc<Map>,
        layer: Arc<Layer>,
        header: &Header,
        metadata: Arc<Metadata>,
        gate: Arc<Gate>,
        (redo_memory, now_ns): (Option<Arc<dyn RedoMemory>>, i128),
    ) -> Result<Self> {
        let ranges = &metadata.ranges;
        let bits = header.cluster_bits;
        ranges.set_file_end(bits.host_cluster_up(HostOffset::new(metadata.store.len()?)));
        ranges.add(HostOffset::ZERO, bits.bytes(), "the header");
        let l1_bytes = u64::from(header.l1_entries) * 8;
        ranges.add(header.l1_offset, l1_bytes, "the L1 table");
        let table_bytes = u64::from(header.refcount_table_clusters) * bits.bytes();
        ranges.add(header.refcount_table_offset, table_bytes, "the refcount table");
        if header.snapshot_count > 0 {
            ranges.add(header.snapshots_offset, 1, "the snapshot table");
        }
        if let Encryption::Luks { header: Some((at, len)) } = header.encryption {
            ranges.add(at, len, "the LUKS header");
        }
        find_l2_tables(header, &metadata).await?;
        let has_blanks =
            metadata.store.reads_unwritten_as_zeros() && layer.data.reads_unwritten_as_zeros();
        let space = Space::open(&metadata, header, has_blanks).await?;
        metadata.lock().header = HeaderState { now: HeaderFields::of(header, 1), next: None };
        let tables = layer.tables.as_ref().expect("an image that is written has tables");
        Ok(Self {
            data: Arc::clone(&layer.data),
            l2: header.l2_format(),
            l1_place: Arc::clone(&tables.l1_place),
            map,
            layer,
            space,
            clusters: Claims::default(),
            gather: gather::Gather::default(),
            tables: Claims::default(),
            growing: sync::Mutex::default(),
            l1_moves: sync::Mutex::default(),
            marking: sync::Mutex::default(),
            gate,
            flushes: GroupSync::new(),
            streams: streams::Streams::default(),
            header: header::InUse::new(header),
            bitmaps: bitmaps::Bitmaps::new(header),
            redo_memory,
            now_ns,
            wrote: AtomicBool::new(false),
            due: due::Due::default(),
            renaming: renaming::LogRenaming::default(),
            has_begun: AtomicBool::new(true),
            beneath: beneath::Beneath::default(),
            inherits: AtomicBool::new(true),
            limbo: Mutex::default(),
            counters: WriteCounters::default(),
            metadata,
        })
    }

    pub(crate) fn stats(&self) -> WriteStats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        WriteStats {
            copied_read_bytes: get(&self.counters.copied_read_bytes),
            copied_written_bytes: get(&self.counters.copied_written_bytes),
            metadata_bytes: get(&self.counters.metadata_bytes),
            syncs: get(&self.counters.syncs),
            groups: get(&self.counters.groups),
            linked_clusters: get(&self.counters.linked_clusters),
        }
    }

    /// The layer that it writes.
    pub(crate) fn layer(&self) -> &Layer {
        &self.layer
    }

    /// Bytes of the disk that the layer covers.
    pub(crate) fn layer_len(&self) -> u64 {
        self.map.len()
    }

    /// The map that ends with the layer.
    pub(crate) fn map(&self) -> &Map {
        &self.map
    }

    /// Size of a cluster.
    pub(crate) fn cluster_bytes(&self) -> u64 {
        self.l2.cluster_bits.bytes()
    }

    /// Whether another layer lies beneath the one that is written.
    fn has_backing(&self) -> bool {
        self.map.layers().position(self.layer.number) > 0
    }

    /// Whether writes may still be acknowledged.
    pub(crate) fn check_usable(&self) -> Result<()> {
        match self.metadata.failure() {
            None => Ok(()),
            Some(error) => {
                let context = "the disk accepts no more writes after an error";
                Err(error.clone().wrap(context))
            }
        }
    }

    /// From now on nothing is acknowledged (I4).
    pub(crate) fn fail(&self, error: &Error) {
        self.metadata.fail(error);
    }

    /// Remembers `error`. If the image contradicts itself, marks the image as corrupt too, so that
    /// nobody writes to it before it is repaired. Errors of reading what the disk shows are to pass
    /// through [`unreadable`] before.
    async fn note_corruption(&self, error: Error) -> Error {
        if error.kind() == ErrorKind::Corrupt && self.metadata.failure().is_none() {
            self.metadata.fail_for_good(&error);
            if let Err(error) = self.mark_corrupt().await {
                tracing::error!(?error, "the image could not be marked as corrupt");
            }
        }
        error
    }
}

/// Notes where the image with this `header` has its L2 tables.
async fn find_l2_tables(header: &Header, metadata: &Metadata) -> Result<()> {
    let l1_bytes = u64::from(header.l1_entries) * 8;
    let mut l2_tables = metadata.ranges.gather(TableKind::L2);
    for start in (0..l1_bytes).step_by(TABLE_PIECE_BYTES) {
        let len = usize::try_from(l1_bytes - start).expect("the header's limit is 32 MiB");
        let at = HostOffset::new(header.l1_offset.bytes().saturating_add(start));
        let piece = read_exact(&*metadata.store, at, len.min(TABLE_PIECE_BYTES)).await?;
        for entry in piece.as_chunks().0 {
            // A malformed entry is reported to the request that needs it.
            if let Ok(Some(table)) = L1Entry(u64::from_be_bytes(*entry)).decode(header.cluster_bits)
            {
                l2_tables.push(table);
            }
        }
    }
    l2_tables.finish();
    Ok(())
}

/// What shows cannot be read, of this layer or of those beneath. That is an error of the request
/// that needs it alone, as it is of a guest's read: it says nothing of this image's tables.
fn unreadable(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Corrupt => Error::new(ErrorKind::Io, error.in_one_line()),
        _ => error,
    }
}

/// Work that must run to completion. If it does not, because the executor ended first, nobody knows
/// what it has done: nothing more is acknowledged.
struct CompletionGuard {
    writer: Arc<Writer>,
    ended: bool,
}

impl Drop for CompletionGuard {
    fn drop(&mut self) {
        if !self.ended {
            self.writer.fail(&Error::new(ErrorKind::Io, "a request was abandoned halfway"));
        }
    }
}

impl Writer {
    /// Runs `work`, which must run to completion.
    pub(crate) async fn complete<T>(self: Arc<Self>, work: impl AsyncFnOnce(Arc<Self>) -> T) -> T {
        let mut guard = CompletionGuard { writer: self, ended: false };
        let output = work(Arc::clone(&guard.writer)).await;
        guard.ended = true;
        output
    }

    /// Makes what the next changes will need, in a task of its own, which counts as the change that
    /// is `under_way`: space for refcount blocks, and a flush that is due. The log gets another
    /// name, too, for which nobody waits.
    #[inline]
    pub(crate) fn prepare(self: Arc<Self>, under_way: OwnedInFlight) {
        if self.renaming.begin() {
            drop(mica_rt::spawn(renaming::rename_while_it_changes(Arc::downgrade(&self))));
        }
        let (wants_blocks, flushes) = (self.space.wants_blocks(), self.due.begin());
        if wants_blocks || flushes {
            drop(mica_rt::spawn(async move {
                let work = async |writer: Arc<Self>| {
                    if wants_blocks {
                        writer.space.make_blocks_ahead().await;
                    }
                    if flushes {
                        writer.flush_due().await;
                    }
                };
                self.complete(work).await;
                drop(under_way);
            }));
        }
    }

    /// Writes `buf` at `at` if that changes no metadata; returns it otherwise. The write counts as
    /// `under_way` before its place is looked up: anyone who wants to take the place away waits for
    /// it.
    #[inline]
    pub(crate) fn write_in_place(
        &self,
        at: GuestOffset,
        buf: Buf,
        under_way: OwnedInFlight,
    ) -> std::result::Result<IoFuture, Buf> {
        if !self.header.is_marked() || self.metadata.failure().is_some() {
            return Err(buf);
        }
        let len = buf.len() as u64;
        let Some(host) = self.own_place(at, len) else { return Err(buf) };
        if let Some(recorder) = self.bitmaps.recorder()
            && !recorder.note(at.bytes(), len)
        {
            return Err(buf);
        }
        self.note_change();
        // Even if the caller is dropped: until the write is done, nothing else may get this place.
        Ok(self.data.write_at(buf, host).hold(under_way))
    }

    /// Notes that a change begins, before anything of it is written.
    #[inline]
    fn note_change(&self) {
        self.wrote.store(true, Ordering::Release);
        self.has_begun.store(true, Ordering::Release);
    }

    /// Where `len` bytes at `at` can be written without changing metadata.
    #[inline]
    fn own_place(&self, at: GuestOffset, len: u64) -> Option<HostOffset> {
        self.map.index.cache.get(slice_of(at).0)?.own_place(at, len, self.layer.number)
    }

    pub(crate) fn check_writable(&self, range: GuestRange) -> Result<()> {
        self.check_usable()?;
        self.map.check_range(range)
    }
}
