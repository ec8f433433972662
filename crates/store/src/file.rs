//! Files and block devices of the host, read through the page cache or past it.

use crate::direct::Alignment;
use crate::facts::{Facts, check_run_len};
use crate::handles::{Got, Handle, Handles, Mode, SharedHandle, Unproven};
use crate::kind::{FileKind, end_of};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, LocalFuture, ProofSlot, Result, Run, Store,
    StoreIdentity, Witness,
};
use mica_rt::{Access, Buf, File};
use mica_units::HostOffset;
use rustix::io::Errno;
use std::path::Path;
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
    reader: Reader,
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
        let mode = Mode { access: cache.access(), locking: Locking::Off };
        if mode.access == Access::Buffered && located.kind() == FileKind::Regular {
            located.check_readable()?;
            return Ok(Self::of(located, handles.join(located, mode, Alignment::NONE)));
        }
        Self::new_opened(located, cache, handles)
    }

    /// As [`Self::new`], for a file that is read at once: it is opened now.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn new_opened(located: &Located, cache: CacheMode, handles: &Arc<Handles>) -> Result<Self> {
        let mode = Mode { access: cache.access(), locking: Locking::Off };
        let file = handles.open_located(located, mode.access)?;
        Self::opened(located, file, mode, handles)
    }

    /// As [`Self::new_opened`], for a file that somebody may be writing: its descriptor is its own
    /// and stays open, so that nobody asks whether the file is still what it was.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn new_apart(located: &Located, cache: CacheMode, handles: &Arc<Handles>) -> Result<Self> {
        let mode = Mode { access: cache.access(), locking: Locking::Off };
        let file = handles.open_located(located, mode.access)?;
        Self::opened(located, file, mode, &Handles::new(Handles::BOUND_MIN))
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
        let mode = Mode { access: cache.access(), locking };
        if let Some(shared) = handles.join_open(located, mode)? {
            return Ok(Self::of(located, shared));
        }
        let file = handles.open_located(located, mode.access)?;
        lock::take(&file, located.path(), Role::Reader, locking)?;
        located.refresh_locked(&file)?;
        Self::opened(located, file, mode, handles)
    }

    /// As [`Self::new_shared`], for a file that this process has open for writing and writes no
    /// more: the writer's locks keep others out until these are held.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn new_frozen(
        located: &mut Located,
        cache: CacheMode,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<Self> {
        let mode = Mode { access: cache.access(), locking };
        let file = handles.open_located(located, mode.access)?;
        lock::take_beside_writer(&file, located.path(), locking)?;
        located.refresh(&file)?;
        Self::opened(located, file, mode, handles)
    }

    fn opened(located: &Located, file: File, mode: Mode, handles: &Arc<Handles>) -> Result<Self> {
        let align = Alignment::of(&file, located)?;
        Ok(Self::of(located, handles.join_with(located, mode, (file, align))))
    }

    /// The proof of its content, in case it is closed and reopened ([`crate::Handles`]).
    pub fn content(&self) -> ProofSlot {
        self.reader.handle().proof().clone()
    }

    fn of(located: &Located, shared: Arc<SharedHandle>) -> Self {
        let (handles, handle) = (Arc::clone(shared.handles()), Arc::clone(shared.handle()));
        Self { reader: Reader { handles, handle, _shared: shared, path: located.path().into() } }
    }

    /// Calls `act` on the open file. If every descriptor of the cache is busy, the file is opened
    /// outside it for the duration of the call.
    fn with_file<T>(&self, act: impl FnOnce(Facts<'_>) -> Result<T>) -> Result<T> {
        let Reader { path, .. } = &self.reader;
        let handle = self.reader.handle();
        let facts = |file| act(Facts { file, path, kind: handle.kind() });
        match self.reader.get()? {
            Got::File(file) => facts(&file),
            // `act` reads none of its content.
            Got::Unproven(opened) => facts(opened.file()),
            Got::Busy => facts(&handle.open_beside(path)?),
        }
    }
}

impl Store for FileStore {
    #[inline]
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        self.reader.read_at(buf, offset)
    }

    fn is_cached(&self, offset: HostOffset) -> bool {
        match self.reader.get_if_hints_help() {
            Some(file) => mica_rt::is_cached(&file, offset.bytes()),
            None => true,
        }
    }

    fn read_ahead(&self, offset: HostOffset, len: u64) -> LocalFuture<'static, ()> {
        let Some(file) = self.reader.get_if_hints_help() else {
            return Box::pin(std::future::ready(()));
        };
        hint(file, offset, len)
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
        self.reader.path.display().to_string()
    }

    fn identity(&self) -> StoreIdentity {
        self.reader.handle().store_identity()
    }

    /// Of a device nothing is known.
    fn reads_unwritten_as_zeros(&self) -> bool {
        self.reader.handle().kind() == FileKind::Regular
    }

    /// Makes durable what others wrote to the file: which descriptor they used does not matter.
    /// Nobody can have written to it where the file system is for reading only (squashfs, erofs and
    /// ISO 9660 know no sync).
    fn sync(&self) -> ChangeFuture {
        let Reader { path, .. } = &self.reader;
        let file = self.reader.get().and_then(|got| match got {
            Got::File(file) => Ok(file),
            Got::Unproven(_) | Got::Busy => self.reader.handle().open_beside(path).map(Arc::new),
        });
        let name = self.name();
        Box::pin(async move {
            match mica_rt::sync_data(&file?).await {
                Err(error) if is_without_sync(&error) => Ok(()),
                synced => {
                    synced.map_err(|error| Error::from_io(format!("making {name} durable"), error))
                }
            }
        })
    }

    fn witness(&self) -> Witness {
        let witness = self.with_file(|facts| Ok(facts.witness_now()));
        witness.unwrap_or(Witness::None)
    }
}

/// Whether a sync failed because the file system has none.
fn is_without_sync(error: &std::io::Error) -> bool {
    let errno = error.raw_os_error();
    [Errno::INVAL, Errno::ROFS].iter().any(|known| errno == Some(known.raw_os_error()))
}

/// The state that a read needs, even if it has to wait for a descriptor and outlives its store.
#[derive(Clone)]
struct Reader {
    /// Those of the shared handle, so that a read need not look there.
    handles: Arc<Handles>,
    handle: Arc<Handle>,
    /// The last of its clones closes the handle.
    _shared: Arc<SharedHandle>,
    /// The name by which the file is opened again.
    path: Arc<Path>,
}

/// Reads ahead, through the page cache.
pub(crate) fn hint(file: Arc<File>, offset: HostOffset, len: u64) -> LocalFuture<'static, ()> {
    let len = u32::try_from(len).unwrap_or(u32::MAX);
    Box::pin(async move {
        // It changes nothing if it fails.
        let _ = mica_rt::read_ahead(&file, offset.bytes(), len).await;
    })
}

/// How long a read that found every descriptor busy waits before it retries, and how often.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
const BUSY_PAUSES_MAX: usize = 60_000;

impl Reader {
    fn handle(&self) -> &Arc<Handle> {
        &self.handle
    }

    #[inline]
    fn get(&self) -> Result<Got> {
        self.handles.get(&self.handle, &self.path)
    }

    /// The file, if it is read through the page cache and there is a descriptor for it.
    fn get_if_hints_help(&self) -> Option<Arc<File>> {
        if self.handle().align() != Alignment::NONE {
            return None;
        }
        match self.get() {
            Ok(Got::File(file)) => Some(file),
            _ => None,
        }
    }

    #[inline]
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() || end_of(offset, buf.len() as u64).is_none() {
            // No file is that long.
            buf.fill(0);
            return mica_block::ready(Ok(()), buf);
        }
        match self.get() {
            Ok(Got::File(file)) => self.start(&file, buf, offset),
            Ok(Got::Unproven(opened)) => {
                let reader = self.clone();
                IoFuture::boxed(async move { reader.prove_and_start(opened, buf, offset).await })
            }
            Ok(Got::Busy) => self.wait_and_start(buf, offset),
            Err(error) => mica_block::ready(Err(error), buf),
        }
    }

    /// Reads from a file that was reopened, once its content proves it.
    async fn prove_and_start(
        &self,
        opened: Box<Unproven>,
        buf: Buf,
        offset: HostOffset,
    ) -> (Result<()>, Buf) {
        match opened.prove().await {
            Ok(file) => {
                self.handles.keep(self.handle(), Arc::clone(&file));
                self.start(&file, buf, offset).await
            }
            Err(error) => (Err(error), buf),
        }
    }

    #[inline]
    fn start(&self, file: &Arc<File>, buf: Buf, offset: HostOffset) -> IoFuture {
        self.handle().align().read(file, buf, offset)
    }

    /// Every descriptor has operations in flight. They all end, so one becomes free.
    #[cold]
    fn wait_and_start(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let reader = self.clone();
        IoFuture::boxed(async move {
            for _ in 0..BUSY_PAUSES_MAX {
                mica_rt::sleep(BUSY_PAUSE).await;
                match reader.get() {
                    Ok(Got::File(file)) => return reader.start(&file, buf, offset).await,
                    Ok(Got::Unproven(opened)) => {
                        return reader.prove_and_start(opened, buf, offset).await;
                    }
                    Ok(Got::Busy) => {}
                    Err(error) => return (Err(error), buf),
                }
            }
            let path = reader.path.display();
            let what = format!("no descriptor became free for reading {path}: raise `ulimit -n`");
            (Err(Error::new(ErrorKind::Limit, what)), buf)
        })
    }
}
