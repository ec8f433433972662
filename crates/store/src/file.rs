//! Files and block devices of the host, read through the page cache or past it.

use crate::handles::{Handle, Handles};
use crate::located::{FileKind, Located};
use mica_block::{Error, ErrorKind, IoFuture, Result, Run, RunKind, Store};
use mica_rt::{Access, BUF_ALIGN, Buf, File};
use mica_units::{HostOffset, SECTOR_BYTES};
use rustix::fs::{AtFlags, SeekFrom, StatxFlags, fstat, seek, statx};
use rustix::io::Errno;
use std::sync::Arc;
use std::time::Duration;

/// How files are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// Through the page cache of the host.
    #[default]
    Writeback,
    /// Past it, with O_DIRECT.
    None,
}

/// A file or block device of the host.
pub struct FileStore {
    reader: Arc<Reader>,
}

impl FileStore {
    /// A store in what was `located`. Through the page cache the file is opened at the first read.
    ///
    /// # Errors
    /// What the system says; `Unsupported` if the file system knows no O_DIRECT and it is asked
    /// for.
    pub fn new(located: &Located, cache: CacheMode, handles: &Arc<Handles>) -> Result<Self> {
        let access = match cache {
            CacheMode::Writeback => Access::Buffered,
            CacheMode::None => Access::Direct,
        };
        let handle = Arc::new(Handle::new(located, access));
        let handles = Arc::clone(handles);
        if access == Access::Buffered && located.kind() == FileKind::Regular {
            located.check_readable()?;
            return Ok(Self::read_by(Reader { handles, handle, align: Alignment::NONE }));
        }
        let file = handle.open_located(located).map_err(|error| {
            let path = located.path().display();
            if access == Access::Direct && error == Errno::INVAL {
                return no_direct(&path.to_string());
            }
            Error::from_io(format!("opening {path}"), error.into())
        })?;
        let align = match access {
            Access::Buffered => Alignment::NONE,
            Access::Direct => Alignment::of(&file, located.kind())
                .ok_or_else(|| no_direct(&located.path().display().to_string()))?,
        };
        handles.keep(&handle, Arc::new(file));
        Ok(Self::read_by(Reader { handles, handle, align }))
    }

    fn read_by(reader: Reader) -> Self {
        Self { reader: Arc::new(reader) }
    }

    /// Calls `act` on the open file. Beside the cache if every descriptor of it is busy: the call
    /// takes no longer than it takes.
    fn with_file<T>(&self, act: impl FnOnce(&File) -> Result<T>) -> Result<T> {
        let Reader { handles, handle, .. } = &*self.reader;
        match handles.get(handle)? {
            Some(file) => act(&file),
            None => act(&handle.open_beside()?),
        }
    }

    fn failed(&self, doing: &str, error: Errno) -> Error {
        Error::from_io(format!("{doing} {}", self.reader.handle.path().display()), error.into())
    }

    fn len_of(&self, file: &File) -> Result<u64> {
        let len = match self.reader.handle.kind() {
            FileKind::Regular => fstat(file).map(|stat| u64::try_from(stat.st_size).unwrap_or(0)),
            // Nothing reads at the descriptor's own position, so that it may move.
            FileKind::BlockDevice => seek(file, SeekFrom::End(0)),
        };
        len.map_err(|error| self.failed("asking for the length of", error))
    }

    fn run_of(&self, file: &File, offset: u64, len: u64) -> Result<Run> {
        let nothing_more = Run { kind: RunKind::Hole, len };
        let data = |end: u64| Run { kind: RunKind::Data, len: len.min(end - offset) };
        let file_len = self.len_of(file)?;
        if offset >= file_len {
            return Ok(nothing_more);
        }
        let next = match seek(file, SeekFrom::Data(offset)) {
            // Nothing but a hole up to the end, or the file was cut just now.
            Err(Errno::NXIO) => return Ok(nothing_more),
            // Devices and some file systems do not tell: all of it is data.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(data(file_len)),
            Err(error) => return Err(self.failed("looking for data in", error)),
            Ok(next) => next,
        };
        if next > offset {
            return Ok(Run { kind: RunKind::Hole, len: len.min(next - offset) });
        }
        match seek(file, SeekFrom::Hole(offset)) {
            Ok(end) if end > offset => Ok(data(end)),
            // Someone punched or cut the file in between. That it is data is always true enough.
            Ok(_) | Err(Errno::NXIO | Errno::INVAL | Errno::OPNOTSUPP) => Ok(data(file_len)),
            Err(error) => Err(self.failed("looking for a hole in", error)),
        }
    }
}

impl Store for FileStore {
    #[inline]
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.reader.read_at(buf, offset)
    }

    fn len(&self) -> Result<u64> {
        self.with_file(|file| self.len_of(file))
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.with_file(|file| {
            let stat = rustix::fs::fstat(file);
            let stat = stat.map_err(|error| self.failed("asking for the size of", error))?;
            Ok(u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(SECTOR_BYTES))
        })
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        if len == 0 {
            return Err(Error::new(ErrorKind::Invalid, "a run of no bytes was asked for"));
        }
        self.with_file(|file| self.run_of(file, offset.bytes(), len))
    }

    fn name(&self) -> String {
        self.reader.handle.path().display().to_string()
    }
}

/// What a read needs, also one that has to wait for a descriptor and outlives its store.
struct Reader {
    handles: Arc<Handles>,
    handle: Arc<Handle>,
    align: Alignment,
}

/// How often a read that found every descriptor busy asks again, and how many times.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSES_MAX: usize = 60_000;

impl Reader {
    #[inline]
    fn read_at(self: &Arc<Self>, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let end = offset.checked_add(buf.len() as u64).map(HostOffset::bytes);
        if buf.is_empty() || end.is_none_or(|end| i64::try_from(end).is_err()) {
            // No file reaches that far.
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        match self.handles.get(&self.handle) {
            Ok(Some(file)) => self.start(&file, buf, offset),
            Ok(None) => self.wait_and_start(buf, offset),
            Err(error) => mica_block::ready(Err(error), buf),
        }
    }

    #[inline]
    fn start(&self, file: &Arc<File>, buf: Buf, offset: HostOffset) -> IoFuture {
        if self.align.fits(&buf, offset) {
            IoFuture::file(mica_rt::read_at(file, buf, offset.bytes()), offset)
        } else {
            self.align.read_around(file, buf, offset)
        }
    }

    /// Every descriptor has operations in flight. Each of them ends, so that one comes free.
    #[cold]
    fn wait_and_start(self: &Arc<Self>, buf: Buf, offset: HostOffset) -> IoFuture {
        let reader = Arc::clone(self);
        IoFuture::boxed(async move {
            for _ in 0..BUSY_PAUSES_MAX {
                mica_rt::sleep(BUSY_PAUSE).await;
                match reader.handles.get(&reader.handle) {
                    Ok(Some(file)) => return reader.start(&file, buf, offset).await,
                    Ok(None) => {}
                    Err(error) => return (Err(error), buf),
                }
            }
            let path = reader.handle.path().display();
            let what = format!("no descriptor came free for reading {path}: raise `ulimit -n`");
            (Err(Error::new(ErrorKind::Limit, what)), buf)
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.handles.forget(&self.handle);
    }
}

/// What O_DIRECT demands of a read, in bytes; 1 for a file that is read through the page cache.
#[derive(Clone, Copy)]
struct Alignment {
    memory: usize,
    offset: u64,
}

impl Alignment {
    const NONE: Self = Self { memory: 1, offset: 1 };
    /// What satisfies every device that is known.
    const PAGE: Self = Self { memory: BUF_ALIGN, offset: BUF_ALIGN as u64 };

    /// What the file system says about `file`; `None` if it knows no O_DIRECT.
    fn of(file: &File, kind: FileKind) -> Option<Self> {
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

    /// At least a sector, so that a device that asks for less costs nothing; a page where the
    /// system's answer is beyond what buffers can give.
    fn checked(memory: u32, offset: u32) -> Self {
        let memory = (memory as usize).max(512);
        let offset = offset.max(512);
        if memory.is_power_of_two() && memory <= BUF_ALIGN && offset.is_power_of_two() {
            Self { memory, offset: offset.into() }
        } else {
            Self::PAGE
        }
    }

    #[inline]
    fn fits(self, buf: &Buf, offset: HostOffset) -> bool {
        let address = buf.as_ptr().addr();
        address & (self.memory - 1) == 0
            && (offset.bytes() | buf.len() as u64) & (self.offset - 1) == 0
    }

    /// Reads the aligned range around the request into a buffer of its own and copies from there.
    #[cold]
    fn read_around(self, file: &Arc<File>, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let mask = self.offset - 1;
        let start = offset.bytes() & !mask;
        // The caller made sure that the end fits 63 bits.
        let end = (offset.bytes() + buf.len() as u64 + mask) & !mask;
        let Ok(around_len) = usize::try_from(end - start) else {
            return mica_block::ready(Err(Error::new(ErrorKind::Limit, "a read too long")), buf);
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

fn no_direct(path: &str) -> Error {
    let what = format!("the file system of {path} knows no O_DIRECT: use --cache writeback");
    Error::new(ErrorKind::Unsupported, what)
}
