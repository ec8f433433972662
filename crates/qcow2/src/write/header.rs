//! What writing changes in the header: bits that say that someone is writing, or that the image is
//! broken.

use super::Writer;
use crate::format::{BitmapsExtension, Header, Version, mark_bitmaps_in_use};
use crate::index::sidecar::crc32c;
use mica_block::{Result, read_exact};
use mica_units::HostOffset;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the feature bits stand in a header of version 3.
const INCOMPATIBLE_AT: u64 = 72;
pub(crate) const AUTOCLEAR_AT: u64 = 88;
const DIRTY: u64 = 1;
const CORRUPT: u64 = 2;
/// The autoclear bits that stay true while mica writes: the bitmaps say themselves that they are
/// out of date, and the data file is a raw disk.
const BITMAPS: u64 = 1;
const RAW_EXTERNAL: u64 = 2;

/// The autoclear bits that name the log of this writer (see [`super::handover`]): whoever else
/// opens the image for writing clears them, as it must with bits that it does not know.
pub(crate) const LOG_NAME_SHIFT: u32 = 32;

/// What has to be said in the header before the first write.
pub(crate) struct InUse {
    is_v3: bool,
    lazy_refcounts: bool,
    bitmaps: Option<BitmapsExtension>,
    marked: AtomicBool,
}

impl InUse {
    pub(crate) fn new(header: &Header) -> Self {
        Self {
            is_v3: header.version == Version::V3,
            lazy_refcounts: header.compatible.lazy_refcounts,
            bitmaps: header.bitmaps.filter(|_| header.autoclear.bitmaps_consistent),
            marked: AtomicBool::new(false),
        }
    }

    /// Whether the header says already what it has to.
    #[inline]
    pub(crate) fn is_marked(&self) -> bool {
        self.marked.load(Ordering::Acquire)
    }
}

impl Writer {
    /// Before the first write: clears the autoclear bits that mica does not know, marks the bitmaps
    /// as out of date, and sets the dirty bit of an image with lazy refcounts, as QEMU does.
    pub(crate) async fn mark_in_use(&self) -> Result<()> {
        if self.header.is_marked() {
            return Ok(());
        }
        let _claim = self.tables.claim(u64::MAX).await;
        if self.header.is_marked() {
            return Ok(());
        }
        if self.header.is_v3 {
            let autoclear = self.metadata.read_u64(HostOffset::new(AUTOCLEAR_AT)).await?;
            let bitmaps = if self.mark_bitmaps().await? { BITMAPS } else { 0 };
            let kept = autoclear & (RAW_EXTERNAL | bitmaps);
            let marked = self.begin_log(kept);
            if marked != autoclear {
                self.write_header_bits(AUTOCLEAR_AT, marked).await?;
            }
            if self.header.lazy_refcounts {
                self.change_incompatible(DIRTY, 0).await?;
            }
        }
        self.header.marked.store(true, Ordering::Release);
        Ok(())
    }

    /// Has the directory of bitmaps say that they are in use. Whether that could be said of all.
    async fn mark_bitmaps(&self) -> Result<bool> {
        let Some(bitmaps) = &self.header.bitmaps else { return Ok(false) };
        let store = &*self.metadata.store;
        let at = bitmaps.directory_offset;
        if store.len()? < at.bytes().saturating_add(bitmaps.directory_bytes) {
            return Ok(false);
        }
        let Ok(len) = usize::try_from(bitmaps.directory_bytes) else { return Ok(false) };
        let mut directory = read_exact(store, at, len).await?;
        if !mark_bitmaps_in_use(&mut directory, bitmaps.count) {
            return Ok(false);
        }
        self.metadata.ranges.check(at, bitmaps.directory_bytes)?;
        self.metadata.write_through(directory, at).await?;
        self.metadata.sync().await?;
        Ok(true)
    }

    /// Begins the log; the autoclear bits with its name, if there is one, besides those `kept`.
    fn begin_log(&self, kept: u64) -> u64 {
        let Some(handover) = self.handover.clone() else { return kept };
        let seed = self.now_ns.cast_unsigned() ^ u128::from(std::process::id()) << 64;
        let name = crc32c(&seed.to_le_bytes());
        let mut stores = vec![Arc::clone(&self.metadata.store)];
        if self.l2.data_file {
            stores.push(Arc::clone(&self.data));
        }
        self.metadata.lock().logging.begin(handover, stores, (name, kept))
    }

    /// The image is as if nobody had it open: refcounts are right.
    pub(crate) async fn unmark(&self) -> Result<()> {
        self.metadata.lock().logging.end();
        if self.header.is_v3 {
            // A log that could not be written on is named still.
            let autoclear = self.metadata.read_u64(HostOffset::new(AUTOCLEAR_AT)).await?;
            let kept = autoclear & ((1 << LOG_NAME_SHIFT) - 1);
            if kept != autoclear {
                self.write_header_bits(AUTOCLEAR_AT, kept).await?;
            }
        }
        if self.header.is_v3 && self.header.lazy_refcounts {
            self.change_incompatible(0, DIRTY).await?;
        }
        Ok(())
    }

    pub(crate) async fn mark_corrupt(&self) -> Result<()> {
        if self.header.is_v3 { self.change_incompatible(CORRUPT, 0).await } else { Ok(()) }
    }

    async fn change_incompatible(&self, set: u64, clear: u64) -> Result<()> {
        let bits = self.metadata.read_u64(HostOffset::new(INCOMPATIBLE_AT)).await?;
        let changed = (bits | set) & !clear;
        if changed == bits {
            return Ok(());
        }
        self.write_header_bits(INCOMPATIBLE_AT, changed).await
    }

    async fn write_header_bits(&self, at: u64, bits: u64) -> Result<()> {
        self.write_header_bytes(at, &bits.to_be_bytes()).await
    }

    /// Has the header say `bytes` at `at`, in one write, and makes that durable.
    pub(super) async fn write_header_bytes(&self, at: u64, bytes: &[u8]) -> Result<()> {
        let written = self.metadata.write_field(bytes, HostOffset::new(at)).await;
        if let Err(error) = &written {
            self.fail(error);
        }
        written?;
        self.metadata.sync().await
    }
}
