//! Files and block devices of the host, read through the page cache or past it.

use crate::direct::Alignment;
use crate::facts::{Facts, check_run_len};
use crate::handles::{Got, Handle, Handles, Unproven};
use crate::kind::{FileKind, end_of};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use mica_block::{
    Error, ErrorKind, IoFuture, ProofSlot, Result, Run, Store, StoreIdentity, Witness,
};
use mica_rt::{Access, Buf, File};
use mica_units::HostOffset;
use std::sync::Arc;
use std::time::Duration;

/// How files are read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CacheMode {
    /// Through the page cache of the host.
    #[default]
    Writeback,
    /// Past it, with O_DIRECT.
    None,
}

/// A file or block device of the host, for reading.
pub struct FileStore {
    reader: Arc<Reader>,
}

impl CacheMode {
    pub(crate) fn access(self) -> Access {
        match self {
            Self::Writeback => Access::Buffered,
            Self::None => Access::Direct,
        }
    }
}

impl FileStore {
    /// A store in the file that was `located`, without locks. Through the page cache the file is
    /// opened at the first read.
    ///
    /// # Errors
    /// Any error of the system; `Unsupported` if O_DIRECT is requested and the file system does not
    /// support it.
    pub fn new(located: &Located, cache: CacheMode, handles: &Arc<Handles>) -> Result<Self> {
        let access = cache.access();
        if access == Access::Buffered && located.kind() == FileKind::Regular {
            located.check_readable()?;
            let handle = Arc::new(Handle::new(located, access, Locking::Off));
            let handles = Arc::clone(handles);
            return Ok(Self::read_by(Reader { handles, handle, align: Alignment::NONE }));
        }
        let file = handles.open_located(located, access)?;
        Self::opened(located, file, Locking::Off, handles)
    }

    /// A store in the file that was `located`, with QEMU's locks of an image that is read.
    /// `located` is refreshed once the locks are held.
    ///
    /// # Errors
    /// As [`Self::new`]; `Denied` if another process has the image open for writing.
    pub fn new_shared(
        located: &mut Located,
        cache: CacheMode,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<Self> {
        if locking == Locking::Off {
            return Self::new(located, cache, handles);
        }
        let file = handles.open_located(located, cache.access())?;
        lock::take(&file, located.path(), Role::Reader, locking)?;
        located.refresh(&file)?;
        Self::opened(located, file, locking, handles)
    }

    fn opened(
        located: &Located,
        file: File,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<Self> {
        let align = Alignment::of(&file, located)?;
        let handle = Arc::new(Handle::new(located, file.access(), locking));
        handles.keep(&handle, Arc::new(file));
        Ok(Self::read_by(Reader { handles: Arc::clone(handles), handle, align }))
    }

    /// The proof of its content, in case it is closed and reopened ([`crate::Handles`]).
    pub fn content(&self) -> ProofSlot {
        self.reader.handle.proof().clone()
    }

    fn read_by(reader: Reader) -> Self {
        Self { reader: Arc::new(reader) }
    }

    /// Calls `act` on the open file. If every descriptor of the cache is busy, the file is opened
    /// outside it for the duration of the call.
    fn with_file<T>(&self, act: impl FnOnce(Facts<'_>) -> Result<T>) -> Result<T> {
        let Reader { handles, handle, .. } = &*self.reader;
        let facts = |file| act(Facts { file, path: handle.path(), kind: handle.kind() });
        match handles.get(handle)? {
            Got::File(file) => facts(&file),
            // `act` reads none of its content.
            Got::Unproven(opened) => facts(opened.file()),
            Got::Busy => facts(&handle.open_beside()?),
        }
    }
}

impl Store for FileStore {
    #[inline]
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.reader.read_at(buf, offset)
    }

    fn len(&self) -> Result<u64> {
        self.with_file(|facts| facts.len())
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.with_file(|facts| facts.allocated_bytes())
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        check_run_len(len)?;
        self.with_file(|facts| facts.run_at(offset.bytes(), len))
    }

    fn name(&self) -> String {
        self.reader.handle.path().display().to_string()
    }

    fn identity(&self) -> StoreIdentity {
        self.reader.handle.store_identity()
    }

    /// Of a device nothing is known.
    fn reads_unwritten_as_zeros(&self) -> bool {
        self.reader.handle.kind() == FileKind::Regular
    }

    fn witness(&self) -> Witness {
        let witness = self.with_file(|facts| Ok(facts.witness_now()));
        witness.unwrap_or(Witness::None)
    }
}

/// The state that a read needs, even if it has to wait for a descriptor and outlives its store.
struct Reader {
    handles: Arc<Handles>,
    handle: Arc<Handle>,
    align: Alignment,
}

/// How long a read that found every descriptor busy waits before it retries, and how often.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSES_MAX: usize = 60_000;

impl Reader {
    #[inline]
    fn read_at(self: &Arc<Self>, mut buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() || end_of(offset, buf.len() as u64).is_none() {
            // No file is that long.
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        match self.handles.get(&self.handle) {
            Ok(Got::File(file)) => self.start(&file, buf, offset),
            Ok(Got::Unproven(opened)) => {
                let reader = Arc::clone(self);
                IoFuture::boxed(async move { reader.prove_and_start(opened, buf, offset).await })
            }
            Ok(Got::Busy) => self.wait_and_start(buf, offset),
            Err(error) => mica_block::ready(Err(error), buf),
        }
    }

    /// Reads from a file that was reopened, once its content proves it.
    async fn prove_and_start(
        self: &Arc<Self>,
        opened: Box<Unproven>,
        buf: Buf,
        offset: HostOffset,
    ) -> (Result<()>, Buf) {
        match opened.prove(self.align).await {
            Ok(file) => {
                self.handles.keep(&self.handle, Arc::clone(&file));
                self.start(&file, buf, offset).await
            }
            Err(error) => (Err(error), buf),
        }
    }

    #[inline]
    fn start(&self, file: &Arc<File>, buf: Buf, offset: HostOffset) -> IoFuture {
        self.align.read(file, buf, offset)
    }

    /// Every descriptor has operations in flight. They all end, so one becomes free.
    #[cold]
    fn wait_and_start(self: &Arc<Self>, buf: Buf, offset: HostOffset) -> IoFuture {
        let reader = Arc::clone(self);
        IoFuture::boxed(async move {
            for _ in 0..BUSY_PAUSES_MAX {
                mica_rt::sleep(BUSY_PAUSE).await;
                match reader.handles.get(&reader.handle) {
                    Ok(Got::File(file)) => return reader.start(&file, buf, offset).await,
                    Ok(Got::Unproven(opened)) => {
                        return reader.prove_and_start(opened, buf, offset).await;
                    }
                    Ok(Got::Busy) => {}
                    Err(error) => return (Err(error), buf),
                }
            }
            let path = reader.handle.path().display();
            let what = format!("no descriptor became free for reading {path}: raise `ulimit -n`");
            (Err(Error::new(ErrorKind::Limit, what)), buf)
        })
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.handles.forget(&self.handle);
    }
}
