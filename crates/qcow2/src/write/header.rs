//! What writing changes in the header: bits that say that someone is writing, or that the image is
//! broken.

use super::Writer;
use crate::format::{Header, Version};
use crate::write::pages::Stage;
use mica_block::{Result, write_all};
use mica_rt::Buf;
use mica_units::HostOffset;
use std::sync::atomic::{AtomicBool, Ordering};

/// Where the feature bits stand in a header of version 3.
const INCOMPATIBLE_AT: u64 = 72;
const AUTOCLEAR_AT: u64 = 88;
const DIRTY: u64 = 1;
const CORRUPT: u64 = 2;
/// The autoclear bit that stays true while mica writes: the data file is a raw disk.
const RAW_EXTERNAL: u64 = 2;

/// What has to be said in the header before the first write.
pub(crate) struct InUse {
    is_v3: bool,
    lazy_refcounts: bool,
    marked: AtomicBool,
}

impl InUse {
    pub(crate) fn new(header: &Header) -> Self {
        Self {
            is_v3: header.version == Version::V3,
            lazy_refcounts: header.compatible.lazy_refcounts,
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
    /// Clears what no writer keeps true (autoclear bits, the bitmaps' among them) before the first
    /// write, and sets the dirty bit of an image with lazy refcounts, as QEMU does.
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
            if autoclear & !RAW_EXTERNAL != 0 {
                self.write_header_bits(AUTOCLEAR_AT, autoclear & RAW_EXTERNAL).await?;
            }
            if self.header.lazy_refcounts {
                self.change_incompatible(DIRTY, 0).await?;
            }
        }
        self.header.marked.store(true, Ordering::Release);
        Ok(())
    }

    /// The image is as if nobody had it open: refcounts are right.
    pub(crate) async fn unmark(&self) -> Result<()> {
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
        let (at, bytes) = (HostOffset::new(at), bits.to_be_bytes());
        self.metadata
            .change(at, |pages| {
                let field = pages.get_mut(at, 8, Stage::Early).expect("the page is there");
                field.copy_from_slice(&bytes);
            })
            .await?;
        write_all(&*self.metadata.store, Buf::from_slice(&bytes), at).await?;
        self.metadata.store.sync().await
    }
}
