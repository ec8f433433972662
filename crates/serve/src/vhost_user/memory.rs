//! A guest's memory, as its front end shares it.
//!
//! The front end hands over files and says which guest addresses they are. What it says is checked
//! against the files before anything is mapped: memory beyond the end of a file kills whoever
//! touches it.

use super::chain::Piece;
use mica_block::{Error, ErrorKind, Result};
use mica_rt::{Buf, SharedMemory};
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{Address, FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

/// Regions at most, as QEMU has them with memory slots.
pub(super) const REGIONS_MAX: usize = 509;

/// One region.
#[derive(Clone)]
pub(super) struct Region {
    pub(super) told: VhostUserMemoryRegion,
    mapped: Arc<GuestRegionMmap>,
    shared: SharedMemory,
}

impl Region {
    /// Maps the region that `told` describes.
    ///
    /// # Errors
    /// `Invalid` if the file does not have it; else what the system says.
    pub(super) fn map(told: VhostUserMemoryRegion, file: File) -> Result<Self> {
        let invalid = |what: &str| Error::new(ErrorKind::Invalid, format!("guest memory: {what}"));
        let (start, len, offset) = (told.guest_phys_addr, told.memory_size, told.mmap_offset);
        let metadata = file.metadata().map_err(|error| Error::from_io("guest memory", error))?;
        if !metadata.is_file() {
            return Err(invalid("a descriptor that is no file"));
        }
        let end = offset.checked_add(len).ok_or_else(|| invalid("an offset beyond 64 bits"))?;
        if len == 0 || metadata.len() < end {
            return Err(invalid("a region that its file does not have"));
        }
        if start.checked_add(len).is_none() || told.user_addr.checked_add(len).is_none() {
            return Err(invalid("a region beyond 64 bits"));
        }
        let size = usize::try_from(len).map_err(|_| invalid("a region that is too long"))?;
        let file = Some(FileOffset::new(file, offset));
        let mapped = GuestRegionMmap::from_range(GuestAddress(start), size, file)
            .map_err(|error| Error::new(ErrorKind::Io, format!("guest memory: {error}")))?;
        let mapped = Arc::new(mapped);
        let memory = NonNull::new(mapped.as_ptr()).ok_or_else(|| invalid("an empty mapping"))?;
        // SAFETY: `mapped` owns the mapping of `size` bytes; all other accesses of this process
        // are those of `vm_memory`, which are volatile.
        let shared = unsafe { SharedMemory::new(memory, size, Box::new(Arc::clone(&mapped))) };
        Ok(Self { told, mapped, shared })
    }
}

/// All of a guest's memory.
pub(super) struct Memory {
    pub(super) guest: GuestMemoryMmap,
    regions: Vec<Region>,
}

impl Memory {
    /// The memory in `regions`.
    ///
    /// # Errors
    /// `Invalid` if they overlap.
    pub(super) fn new(mut regions: Vec<Region>) -> Result<Self> {
        regions.sort_by_key(|region| region.told.guest_phys_addr);
        let mapped = regions.iter().map(|region| Arc::clone(&region.mapped)).collect();
        let guest = GuestMemoryMmap::from_arc_regions(mapped)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("guest memory: {error}")))?;
        Ok(Self { guest, regions })
    }

    /// The guest address of what the front end has at `user` in its own address space.
    pub(super) fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.regions.iter().find_map(|Region { told, .. }| {
            let within = user.checked_sub(told.user_addr)?;
            (within < told.memory_size).then(|| GuestAddress(told.guest_phys_addr + within))
        })
    }

    /// The bytes of `piece`, in place; `None` if the guest does not have them in one region.
    pub(super) fn buf(&self, piece: Piece) -> Option<Buf> {
        let at = piece.at.raw_value();
        let after = self.regions.partition_point(|region| region.told.guest_phys_addr <= at);
        let region = &self.regions[after.checked_sub(1)?];
        let within = usize::try_from(at - region.told.guest_phys_addr).ok()?;
        region.shared.buf(within, piece.len as usize)
    }

    /// The last address, and one.
    pub(super) fn end(&self) -> u64 {
        self.regions.last().map_or(0, |last| last.told.guest_phys_addr + last.told.memory_size)
    }
}
