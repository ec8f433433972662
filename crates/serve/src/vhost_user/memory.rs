//! A guest's memory, as its front end shares it.
//!
//! The front end hands over files and says which guest addresses they are. What it says is checked
//! against the files before anything is mapped. A file that may be sealed is sealed, so that it
//! cannot shrink afterwards either. One that cannot be (a file system's, a memfd without seals) may
//! be truncated at any time: then its device is broken, and no other ([`super::lost`]).

use super::chain::Piece;
use super::lost::{Lost, Pages, Watched};
use mica_block::{Error, ErrorKind, Result};
use mica_rt::{Buf, SharedMemory};
use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Address, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Regions at most, as QEMU has them with memory slots.
pub(super) const REGIONS_MAX: usize = 509;

/// The smallest page of any machine that is served.
const PAGE_BYTES: u64 = 4096;

/// One region.
#[derive(Clone)]
pub(super) struct Region {
    pub(super) layout: VhostUserMemoryRegion,
    mapped: Arc<Watched<Arc<GuestRegionMmap>>>,
    shared: SharedMemory,
}

impl Region {
    /// Maps the region that `layout` describes; `lost` is notified if it disappears.
    ///
    /// # Errors
    /// `Invalid` if the file does not have it; else any error of the system.
    pub(super) fn map(layout: VhostUserMemoryRegion, file: File, lost: &Arc<Lost>) -> Result<Self> {
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("guest memory: {what}"));
        let (start, len, offset) = (layout.guest_phys_addr, layout.memory_size, layout.mmap_offset);
        let metadata = file.metadata().map_err(|error| Error::from_io("guest memory", error))?;
        if !metadata.is_file() {
            return Err(invalid("a descriptor that is not a file"));
        }
        let end = offset.checked_add(len).ok_or_else(|| invalid("an offset beyond 64 bits"))?;
        if len == 0 || metadata.len() < end {
            return Err(invalid("a region that its file does not have"));
        }
        // Rings are read and written with atomic operations, which have to be aligned here as well.
        if !start.is_multiple_of(PAGE_BYTES) || !len.is_multiple_of(PAGE_BYTES) {
            return Err(invalid("a region that is not in whole pages"));
        }
        if start.checked_add(len).is_none() || layout.user_addr.checked_add(len).is_none() {
            return Err(invalid("a region beyond 64 bits"));
        }
        let size = usize::try_from(len).map_err(|_| invalid("a region that is too long"))?;
        keep_long(&file);
        let pages = Pages::of(&file, lost);
        let file = Some(FileOffset::new(file, offset));
        let mapped = GuestRegionMmap::from_range(GuestAddress(start), size, file)
            .map_err(|error| Error::new(ErrorKind::Io, format!("guest memory: {error}")))?;
        let memory = NonNull::new(mapped.as_ptr()).ok_or_else(|| invalid("an empty mapping"))?;
        let place = (memory.as_ptr().cast_const(), size);
        let mapped = Arc::new(Watched::new(Arc::new(mapped), place, &pages));
        // SAFETY: `mapped` owns the mapping of `size` bytes; all other accesses of this process
        // are those of `vm_memory`, which are volatile.
        let shared = unsafe { SharedMemory::new(memory, size, Box::new(Arc::clone(&mapped))) };
        Ok(Self { layout, mapped, shared })
    }
}

/// Forbids that the file shrinks, where it is of a kind that can promise that.
fn keep_long(file: &File) {
    let is_sealed = |file| fcntl_get_seals(file).is_ok_and(|has| has.contains(SealFlags::SHRINK));
    if !is_sealed(file) && fcntl_add_seals(file, SealFlags::SHRINK).is_err() {
        tracing::debug!("guest memory is in a file that its owner may truncate");
    }
}

/// All of a guest's memory.
pub(super) struct Memory {
    /// Dropped first: the regions watch over it.
    pub(super) guest: GuestMemoryMmap,
    regions: Vec<Region>,
    lost: Arc<Lost>,
}

impl Memory {
    /// The memory in `regions`, which all notify `lost` if they disappear.
    ///
    /// # Errors
    /// `Invalid` if they overlap.
    pub(super) fn new(mut regions: Vec<Region>, lost: &Arc<Lost>) -> Result<Self> {
        regions.sort_by_key(|region| region.layout.guest_phys_addr);
        let mapped = regions.iter().map(|region| Arc::clone(&**region.mapped)).collect();
        // `vm_memory` makes no memory of no regions that way; a guest may lose its last one.
        let guest = match regions.is_empty() {
            true => Ok(GuestMemoryMmap::new()),
            false => GuestMemoryMmap::from_arc_regions(mapped),
        };
        let guest = guest
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("guest memory: {error}")))?;
        Ok(Self { guest, regions, lost: Arc::clone(lost) })
    }

    /// Whether some of it is gone: what was read of it may be zeros that were never there.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.lost.is_lost()
    }

    /// The guest address of what the front end has at `user` in its own address space.
    pub(super) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|Region { layout, .. }| {
            let within = user.checked_sub(layout.user_addr)?;
            (within < layout.memory_size).then(|| GuestAddress(layout.guest_phys_addr + within))
        })
    }

    /// The bytes of `piece`, in place; `None` if the guest does not have them in one region.
    pub(super) fn buf(&self, piece: Piece) -> Option<Buf> {
        let at = piece.at.raw_value();
        let after = self.regions.partition_point(|region| region.layout.guest_phys_addr <= at);
        let region = &self.regions[after.checked_sub(1)?];
        let within = usize::try_from(at - region.layout.guest_phys_addr).ok()?;
        region.shared.buf(within, piece.len as usize)
    }

    /// `pieces`, divided where a region ends, so that each lies in one: guest addresses may go on
    /// in the next. What is not memory stays as it is.
    pub(super) fn divide(&self, pieces: Vec<Piece>) -> Vec<Piece> {
        let mut divided = Vec::with_capacity(pieces.len());
        for mut piece in pieces {
            while let Some(left) = self.left_in_region(piece.at)
                && left < u64::from(piece.len)
                && let Some(next) = piece.at.checked_add(left)
            {
                let len = u32::try_from(left).expect("less than the piece");
                divided.push(Piece { at: piece.at, len });
                piece = Piece { at: next, len: piece.len - len };
            }
            divided.push(piece);
        }
        divided
    }

    /// Whether `piece` lies in one region.
    pub(super) fn is_in_one(&self, piece: Piece) -> bool {
        self.left_in_region(piece.at).is_some_and(|left| u64::from(piece.len) <= left)
    }

    /// Bytes from `at` to the end of its region.
    fn left_in_region(&self, at: GuestAddress) -> Option<u64> {
        let after = self.regions.partition_point(|region| region.layout.guest_phys_addr <= at.0);
        let layout = self.regions[after.checked_sub(1)?].layout;
        (layout.guest_phys_addr + layout.memory_size).checked_sub(at.0).filter(|left| *left > 0)
    }

    /// The last address, and one.
    pub(super) fn end(&self) -> u64 {
        self.regions.last().map_or(0, |last| last.layout.guest_phys_addr + last.layout.memory_size)
    }
}
