//! The fields of the header that writing changes: flags for an image that is in use or corrupt, the
//! places of the tables, and the length of the disk.

use super::Writer;
use super::allocate::Space;
use super::pages::Metadata;
use crate::redo::{HeaderFields, HeaderLogged, HeaderState, LOG_NAME_SHIFT};
use mica_block::{Error, Result, Store};
use mica_map::crc32c;
use mica_qcow2_format::bits::{CORRUPT, DIRTY, RAW_EXTERNAL};
use mica_qcow2_format::{Autoclear, Header, Version, field};
use mica_units::HostOffset;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const VERSION_2: &str = "writes that are not flushed are lost if this process is killed: images of \
                         version 2 have no redo log";
const SNAPSHOTS: &str = "writes that are not flushed are lost if this process is killed: an image \
                         with internal snapshots has no redo log, because QEMU's repair would forget \
                         the snapshots of an image that names one";
const NO_PLACE: &str = "writes that are not flushed are lost if this process is killed: there is no \
                        directory for the redo log";
const NO_LOG: &str = "writes that are not flushed are lost if this process is killed: the redo log \
                      could not be written, as the server's log says";
const FAILED: &str = "the disk accepts no more writes after an error: the server's log says which";

/// What the header has to record before the first write.
pub(crate) struct InUse {
    is_v3: bool,
    lazy_refcounts: bool,
    has_snapshots: bool,
    marked: AtomicBool,
    /// Whether it was put on top of a chain that is being written: its first write, which a guest
    /// waits for, waits for no sync.
    was_pushed: AtomicBool,
    /// Logs that were begun.
    logs: AtomicU32,
}

impl InUse {
    pub(crate) fn new(header: &Header) -> Self {
        Self {
            is_v3: header.version == Version::V3,
            lazy_refcounts: header.compatible.lazy_refcounts,
            has_snapshots: header.snapshot_count > 0,
            marked: AtomicBool::new(false),
            was_pushed: AtomicBool::new(false),
            logs: AtomicU32::new(0),
        }
    }

    /// Notes that this image has just been put on top of a chain.
    pub(super) fn note_pushed(&self) {
        self.was_pushed.store(true, Ordering::Release);
    }

    /// Whether the header already records it.
    #[inline]
    pub(crate) fn is_marked(&self) -> bool {
        self.marked.load(Ordering::Acquire)
    }
}

impl Writer {
    /// Before the first write: clears the autoclear bits that mica does not know, marks the bitmaps
    /// as in use, and sets the dirty bit of an image with lazy refcounts, as QEMU does.
    pub(crate) async fn mark_in_use(&self) -> Result<()> {
        if self.header.is_marked() {
            return Ok(());
        }
        let _locked = self.marking.lock().await;
        if self.header.is_marked() {
            return Ok(());
        }
        self.metadata.ranges.check_areas()?;
        if self.header.is_v3 {
            let autoclear = self.metadata.read_u64(place_of(field::AUTOCLEAR)).await?;
            let bitmaps = self.load_bitmaps(!self.header.has_snapshots).await?;
            let kept = autoclear & RAW_EXTERNAL | bitmaps.autoclear;
            let marked = self.begin_log(kept);
            let named_only = (marked ^ autoclear) >> LOG_NAME_SHIFT << LOG_NAME_SHIFT;
            if marked != autoclear {
                self.write_autoclear(marked).await?;
                // A power cut ends the log, and its name with it. A file system that is remounted
                // does not, and a process that then only reads is warned by the name alone. What
                // other programs rely on has to be durable before anything is written.
                let was_pushed = self.header.was_pushed.load(Ordering::Acquire);
                if !was_pushed || named_only != marked ^ autoclear {
                    self.metadata.sync().await?;
                }
            }
            self.mark_bitmaps(bitmaps).await?;
            if self.header.lazy_refcounts {
                self.change_incompatible(DIRTY, 0).await?;
            }
        }
        self.header.marked.store(true, Ordering::Release);
        Ok(())
    }

    /// Why nothing is acknowledged any more, if so.
    pub(crate) fn latch(&self) -> Option<Error> {
        self.metadata.failure().cloned()
    }

    /// Why acknowledged but unflushed writes are lost if this process is killed now.
    pub(crate) fn weakness(&self) -> Option<&'static str> {
        let is_lost = !self.metadata.lock().logging.is_named();
        match &self.header {
            _ if self.metadata.failure().is_some() => Some(FAILED),
            header if !header.is_v3 => Some(VERSION_2),
            header if header.has_snapshots => Some(SNAPSHOTS),
            _ if self.redo_memory.is_none() => Some(NO_PLACE),
            header if header.is_marked() && is_lost => Some(NO_LOG),
            _ => None,
        }
    }

    /// Begins the log; returns the autoclear bits with its name, if it has one, added to those
    /// `kept`.
    fn begin_log(&self, kept: u64) -> u64 {
        // QEMU forgets all internal snapshots of an image with an autoclear bit that it does not
        // know, when it repairs it (`qemu-img check -r leaks`, seen with 10.0.2).
        let redo_memory = self.redo_memory.clone().filter(|_| !self.header.has_snapshots);
        let Some(redo_memory) = redo_memory else { return kept };
        let number = self.header.logs.fetch_add(1, Ordering::Relaxed);
        let seed = self.now_ns.cast_unsigned()
            ^ u128::from(std::process::id()) << 64
            ^ u128::from(number) << 96;
        let name = crc32c(&seed.to_le_bytes());
        let mut stores = vec![Arc::clone(&self.metadata.store) as Arc<dyn Store>];
        if self.l2.data_file {
            stores.push(Arc::clone(&self.data));
        }
        let mut pages = self.metadata.lock();
        let page_bytes = pages.page_bytes();
        pages.logging.begin(redo_memory, stores, (name, kept), page_bytes)
    }

    /// Leaves the image as if nobody had it open: refcounts are right. If that is not to be
    /// `durably`, it may name a log again after a power cut, until somebody closes it
    /// ([`crate::unclosed`]).
    pub(super) async fn unmark(&self, durably: bool) -> Result<()> {
        self.header.marked.store(false, Ordering::Release);
        // The log gets no other name from here on.
        let _group = self.metadata.page_writes.lock().await;
        if self.header.is_v3 {
            // A log that could not be continued is still named. It is removed only when the image
            // no longer names it: an image that names a missing log looks as if something had been
            // lost.
            let autoclear = self.metadata.read_u64(place_of(field::AUTOCLEAR)).await?;
            let kept = autoclear & ((1 << LOG_NAME_SHIFT) - 1) & !Autoclear::KEPT_BITMAPS;
            if kept != autoclear {
                self.write_autoclear(kept).await?;
                if durably {
                    self.metadata.sync().await?;
                }
            }
        }
        self.metadata.lock().logging.end();
        if self.header.is_v3 && self.header.lazy_refcounts {
            self.change_incompatible(0, DIRTY).await?;
        }
        Ok(())
    }

    pub(crate) async fn mark_corrupt(&self) -> Result<()> {
        if self.header.is_v3 { self.change_incompatible(CORRUPT, 0).await } else { Ok(()) }
    }

    /// Whether the image has a bit that says, to all programs, that its counts are not right yet.
    pub(super) fn must_be_closed_durably(&self) -> bool {
        self.header.is_v3 && self.header.lazy_refcounts
    }

    async fn change_incompatible(&self, set: u64, clear: u64) -> Result<()> {
        // Who replaces the header writes all of the sector as it was read.
        let _locked = self.metadata.header_changes.lock().await;
        let bits = self.metadata.read_u64(place_of(field::INCOMPATIBLE)).await?;
        let changed = (bits | set) & !clear;
        if changed == bits {
            return Ok(());
        }
        let logged = self.metadata.lock().logging.allow_marks();
        let place = place_of(field::INCOMPATIBLE);
        self.metadata.write_header_through(logged, &changed.to_be_bytes(), place).await
    }

    /// Not durably.
    async fn write_autoclear(&self, bits: u64) -> Result<()> {
        let logged = self.metadata.lock().logging.allow_name(bits);
        let place = place_of(field::AUTOCLEAR);
        self.metadata.write_header_or_fail(logged, &bits.to_be_bytes(), place).await?;
        self.metadata.lock().logging.note_bits(bits);
        Ok(())
    }
}

/// A change of the fields for the places of the tables and the length of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) enum HeaderChange {
    /// The disk is this long.
    Size(u64),
    /// The L1 table is here, and has this many entries.
    L1(HostOffset, u32),
    /// The refcount table is here, and has this many clusters.
    RefcountTable(HostOffset, u32),
}

impl HeaderChange {
    fn apply(self, fields: &mut HeaderFields) {
        fields.generation += 1;
        match self {
            Self::Size(size) => fields.size = size,
            Self::L1(at, entries) => fields.l1 = (at.bytes(), entries),
            Self::RefcountTable(at, clusters) => fields.refcount_table = (at.bytes(), clusters),
        }
    }

    /// The bytes to write, and where.
    fn bytes(self) -> (HostOffset, Vec<u8>) {
        let (at, bytes) = match self {
            Self::Size(size) => (field::SIZE, size.to_be_bytes().to_vec()),
            Self::L1(at, entries) => {
                let (entries, at) = (entries.to_be_bytes(), at.bytes().to_be_bytes());
                (field::L1_ENTRIES, entries.into_iter().chain(at).collect())
            }
            Self::RefcountTable(at, clusters) => {
                let (at, clusters) = (at.bytes().to_be_bytes(), clusters.to_be_bytes());
                (field::REFCOUNT_TABLE, at.into_iter().chain(clusters).collect())
            }
        };
        (place_of(at), bytes)
    }
}

impl Metadata {
    /// Makes `change` durable in the header: the only way to move a table, or to change the length
    /// of the disk. The log first records the possible contents of the header, and the clusters
    /// that are unused then.
    ///
    /// # Errors
    /// Any failure of the write or the sync: then nothing more is written.
    pub(super) async fn change_header(
        self: &Arc<Self>,
        space: &Space,
        change: HeaderChange,
    ) -> Result<()> {
        let _locked = self.header_changes.lock().await;
        let (next, logged) = {
            let mut pages = self.lock();
            let mut next = pages.header.now;
            change.apply(&mut next);
            pages.header.next = Some(next);
            (next, pages.log_header(space.state()))
        };
        if let Err(error) = self.unname_lost_log().await {
            self.fail(&error);
            return Err(error);
        }
        let (at, bytes) = change.bytes();
        self.write_header_through(logged, &bytes, at).await?;
        self.lock().header = HeaderState { now: next, next: None };
        Ok(())
    }

    /// Before a group is written: see [`Self::unname_lost_log`].
    pub(super) async fn unname_before_group(self: &Arc<Self>) -> Result<()> {
        if self.lock().logging.bits_without_name().is_none() {
            return Ok(());
        }
        let _locked = self.header_changes.lock().await;
        self.unname_lost_log().await
    }

    /// Takes the name of a log that is gone out of the header, before anything is written that it
    /// does not know of: should it come back, it would be taken for the image's own. The caller has
    /// `header_changes` locked. Nothing is synced, as a power cut ends the log, too.
    pub(super) async fn unname_lost_log(self: &Arc<Self>) -> Result<()> {
        let unnamed = {
            let logging = &self.lock().logging;
            logging.bits_without_name().map(|bits| (bits, logging.allow_name(bits)))
        };
        let Some((bits, logged)) = unnamed else { return Ok(()) };
        self.write_header(logged, &bits.to_be_bytes(), place_of(field::AUTOCLEAR)).await?;
        self.lock().logging.note_bits(bits);
        Ok(())
    }

    /// Writes `bytes` durably to the header at `at`. A failure ends the writing, as nobody knows
    /// what the header holds then.
    async fn write_header_through(
        self: &Arc<Self>,
        logged: HeaderLogged,
        bytes: &[u8],
        at: HostOffset,
    ) -> Result<()> {
        self.write_header_or_fail(logged, bytes, at).await?;
        self.sync().await
    }

    /// As [`Self::write_header_through`], and not durably.
    async fn write_header_or_fail(
        self: &Arc<Self>,
        logged: HeaderLogged,
        bytes: &[u8],
        at: HostOffset,
    ) -> Result<()> {
        let written = self.write_header(logged, bytes, at).await;
        if let Err(error) = &written {
            self.fail(error);
        }
        written
    }
}

fn place_of(field: usize) -> HostOffset {
    HostOffset::new(field as u64)
}
