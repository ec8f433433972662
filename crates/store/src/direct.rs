//! The alignment that O_DIRECT requires, and how requests that do not meet it are read anyway.

use crate::kind::{FileKind, no_direct};
use crate::located::Located;
use mica_block::{Error, ErrorKind, IoFuture, Result};
use mica_rt::{Access, BUF_ALIGN, Buf, File};
use mica_units::HostOffset;
use rustix::fs::{AtFlags, StatxFlags, statx};
use std::sync::Arc;

/// The alignment that O_DIRECT requires, in bytes; 1 for a file accessed through the page cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Alignment {
    memory: usize,
    offset: u64,
}

impl Alignment {
    pub(crate) const NONE: Self = Self { memory: 1, offset: 1 };
    /// Satisfies every known device.
    const PAGE: Self = Self { memory: BUF_ALIGN, offset: BUF_ALIGN as u64 };

    /// The requirements on reads and writes of `file`, which was opened from `located`.
    pub(crate) fn of(file: &File, located: &Located) -> Result<Self> {
        match file.access() {
            Access::Buffered => Ok(Self::NONE),
            Access::Direct => {
                Self::of_direct(file, located.kind()).ok_or_else(|| no_direct(located.path()))
            }
        }
    }

    /// What the file system reports for `file`; `None` if it does not support O_DIRECT.
    fn of_direct(file: &File, kind: FileKind) -> Option<Self> {
        let asked = StatxFlags::DIOALIGN;
        if let Ok(stat) = statx(file, "", AtFlags::EMPTY_PATH, asked)
            && StatxFlags::from_bits_retain(stat.stx_mask).contains(asked)
        {
            let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
            if memory == 0 || offset == 0 {
                return None;
            }
            return Some(Self::checked(memory, offset));
        }
        if kind == FileKind::BlockDevice
            && let Ok(sector) = rustix::fs::ioctl_blksszget(file)
        {
            return Some(Self::checked(sector, sector));
        }
        Some(Self::PAGE)
    }

    /// At least a sector, so that a device that requires less costs nothing; a page if the system
    /// reports more than buffers can satisfy.
    fn checked(memory: u32, offset: u32) -> Self {
        let memory = (memory as usize).max(512);
        let offset = offset.max(512);
        if memory.is_power_of_two() && memory <= BUF_ALIGN && offset.is_power_of_two() {
            Self { memory, offset: offset.into() }
        } else {
            Self::PAGE
        }
    }

    /// The unit of offsets and lengths, in bytes.
    pub(crate) fn block_bytes(self) -> u64 {
        self.offset
    }

    #[inline]
    pub(crate) fn fits(self, buf: &Buf, offset: HostOffset) -> bool {
        self.fits_memory(buf) && self.fits_range(offset, buf.len() as u64)
    }

    #[inline]
    pub(crate) fn fits_memory(self, buf: &Buf) -> bool {
        buf.as_ptr().addr() & (self.memory - 1) == 0
    }

    #[inline]
    pub(crate) fn fits_range(self, offset: HostOffset, len: u64) -> bool {
        (offset.bytes() | len) & (self.offset - 1) == 0
    }

    /// Start and end of the blocks that contain `len` bytes at `offset`. The caller has checked
    /// that the end fits in 63 bits.
    pub(crate) fn around(self, offset: u64, len: u64) -> (u64, u64) {
        let mask = self.offset - 1;
        (offset & !mask, (offset + len + mask) & !mask)
    }

    /// Fills all of `buf`.
    #[inline]
    pub(crate) fn read(self, file: &Arc<File>, buf: Buf, offset: HostOffset) -> IoFuture {
        if self.fits(&buf, offset) {
            IoFuture::file(mica_rt::read_at(file, buf, offset.bytes()), offset)
        } else {
            self.read_around(file, buf, offset)
        }
    }

    /// Reads the aligned range around the request into a buffer of its own and copies from there.
    #[cold]
    fn read_around(self, file: &Arc<File>, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let (start, end) = self.around(offset.bytes(), buf.len() as u64);
        let Ok(around_len) = usize::try_from(end - start) else {
            return mica_block::ready(
                Err(Error::new(ErrorKind::Limit, "the read is too long")),
                buf,
            );
        };
        let around = IoFuture::file(
            mica_rt::read_at(file, Buf::new(around_len), start),
            HostOffset::new(start),
        );
        let skipped = offset.bytes() - start;
        IoFuture::boxed(async move {
            let (result, around) = around.await;
            if result.is_ok() {
                let skipped = usize::try_from(skipped).expect("less than the alignment");
                let len = buf.len();
                buf.copy_from_slice(&around[skipped..skipped + len]);
            }
            (result, buf)
        })
    }
}
