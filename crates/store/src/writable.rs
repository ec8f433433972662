//! A file or block device of the host, for reading and writing.
//!
//! Invariants
//! - I1 The descriptor stays open as long as the store: the image's locks depend on it, and so does
//!   the system's promise to report a failed write-back to the next sync.
//! - I2 After a failed sync no later one succeeds: the system may have dropped what it could not
//!   write. Syncs take turns, so that this is known before the next one starts.
//! - I3 Past the page cache, a write of parts of blocks reads these blocks, changes them and writes
//!   them back, all under a claim ([`Claims`]) and in a task of its own: it never writes back data
//!   that is older than another write, even if its caller is gone.
//! - I4 The file is never longer than requested: a write that had to pad a block truncates the file
//!   again, under a claim on everything behind it.
//! - I5 A change of space that fails leaves no byte older than the last write to it. ext4 drops
//!   what is in the page cache of a range before it looks for the space that zeros need there, and
//!   block devices do before they find that they cannot do what is asked for: so that is on the
//!   device by then.

use crate::direct::Alignment;
use crate::facts::{Facts, check_run_len};
use crate::file::{CacheMode, hint};
use crate::handles::{Handles, SetAside};
use crate::kind::{FileKind, end_of};
use crate::located::Located;
use crate::lock::{self, Locking, Role};
use mica_block::{
    ChangeFuture, Error, ErrorKind, IoFuture, LocalFuture, Result, Run, Space, Store,
    StoreIdentity, Witness, ready,
};
use mica_rt::sync::{self, Claim, Claims, Mode};
use mica_rt::{Access, Buf, FallocateFlags, File, Parts};
use mica_units::HostOffset;
use rustix::io::{Errno, ReadWriteFlags, pwritev2};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// A file or block device of the host, for reading and writing. Keeps its descriptor, and the
/// image's locks, as long as it lives.
pub struct WritableFile {
    inner: Arc<Inner>,
}

/// The name of an open [`WritableFile`], for who opened it. It does not keep it open.
#[derive(Clone)]
pub struct WriterName(Weak<Inner>);

struct Inner {
    file: Arc<File>,
    path: PathBuf,
    /// Another name that the file got since, for messages.
    later_path: OnceLock<PathBuf>,
    kind: FileKind,
    align: Alignment,
    /// Claims on the bytes of the file, if it is written past the page cache. Writes of whole
    /// blocks share, since they preserve no old bytes; everything else is exclusive.
    claims: Claims,
    /// The sync under way, and those that wait for their turn.
    syncs: sync::Mutex,
    /// Whether a sync failed (I2).
    sync_failed: AtomicBool,
    /// The mount generation, which stays the same while the file is open.
    mount_generation: Option<u64>,
    identity: StoreIdentity,
    _descriptor: SetAside,
}

impl WritableFile {
    /// A store in the file that was `located`, which nobody else has open for writing, in a process
    /// with these `handles`. `located` is refreshed once the locks are held.
    ///
    /// # Errors
    /// Any error of the system; `Denied` if the file may not be written or another process has it
    /// open; `Unsupported` if O_DIRECT is requested and the file system does not support it.
    pub fn open(
        located: &mut Located,
        cache: CacheMode,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<Self> {
        let (this, _) = Self::open_as(Role::Writer, located, cache, locking, handles)?;
        if locking != Locking::Off {
            refuse_readers_here(handles, located)?;
        }
        Ok(this)
    }

    /// As [`Self::open`], for one that nobody at all has open otherwise, and that nobody opens
    /// meanwhile: who tries that waits for a few seconds. It is not to be open for longer.
    ///
    /// # Errors
    /// As [`Self::open`]; `Denied` also where the file system has no locks.
    pub fn open_alone(
        located: &mut Located,
        cache: CacheMode,
        handles: &Arc<Handles>,
    ) -> Result<Self> {
        // Before it keeps others out, and once nobody can come any more.
        refuse_readers_here(handles, located)?;
        let (this, is_locked) = Self::open_as(Role::Alone, located, cache, Locking::On, handles)?;
        if !is_locked {
            let what = format!("{}: its file system has no locks", located.path().display());
            return Err(Error::new(ErrorKind::Denied, what));
        }
        refuse_readers_here(handles, located)?;
        Ok(this)
    }

    /// As [`Self::open_alone`], for one that is only read at first, as other stores of this process
    /// may do, too. Nobody writes it before the function that is returned with it succeeds: that
    /// takes the locks of a writer, once no other store reads the file.
    ///
    /// # Errors
    /// As [`Self::open`], but for other readers.
    pub fn open_upgradable(
        located: &mut Located,
        cache: CacheMode,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<(Self, impl Fn() -> Result<()> + Send + Sync + use<>)> {
        let (this, _) = Self::open_as(Role::Reader, located, cache, locking, handles)?;
        let (inner, handles, node) =
            (Arc::downgrade(&this.inner), Arc::clone(handles), located.node());
        let upgrade = move || {
            let Some(inner) = inner.upgrade() else { return Ok(()) };
            if locking != Locking::Off && handles.is_read_locked(node) {
                return Err(lock::read_here(&inner.path));
            }
            lock::upgrade(&inner.file, &inner.path, locking)
        };
        Ok((this, upgrade))
    }

    fn open_as(
        role: Role,
        located: &mut Located,
        cache: CacheMode,
        locking: Locking,
        handles: &Arc<Handles>,
    ) -> Result<(Self, bool)> {
        let descriptor = handles.set_aside(1);
        let file = handles.open_located_writable(located, cache.access())?;
        let file = handles.in_place().apply_to(file);
        let is_locked = lock::take(&file, located.path(), role, locking)?;
        located.refresh_locked(&file)?;
        let align = Alignment::of(&file, located)?;
        let inner = Inner {
            file: Arc::new(file),
            path: located.path().to_owned(),
            later_path: OnceLock::new(),
            kind: located.kind(),
            align,
            claims: Claims::default(),
            syncs: sync::Mutex::default(),
            sync_failed: AtomicBool::new(false),
            mount_generation: located.mount_generation(),
            identity: StoreIdentity::from(&located.identity(0)),
            _descriptor: descriptor,
        };
        Ok((Self { inner: Arc::new(inner) }, is_locked))
    }

    /// Its name.
    pub fn own_name(&self) -> WriterName {
        WriterName(Arc::downgrade(&self.inner))
    }
}

/// Fails if another store of this process reads the file.
fn refuse_readers_here(handles: &Handles, located: &Located) -> Result<()> {
    match handles.is_read_locked(located.node()) {
        true => Err(lock::read_here(located.path())),
        false => Ok(()),
    }
}

impl WriterName {
    /// The file has another name since it was opened: messages name it so. Counts once.
    pub fn note(&self, path: &Path) {
        if let Some(inner) = self.0.upgrade() {
            // It is already known.
            let _ = inner.later_path.set(path.to_owned());
        }
    }
}

/// Writes `bytes`, and waits until they are durable: of the page cache, the system writes these out
/// and nothing else.
fn write_through(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let part = [io::IoSlice::new(bytes)];
        let count = match pwritev2(file, &part, offset, ReadWriteFlags::DSYNC) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => count,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        (bytes, offset) = (&bytes[count..], offset + count as u64);
    }
    Ok(())
}

impl Store for WritableFile {
    #[inline]
    fn read_at(&self, mut buf: Buf, offset: HostOffset) -> IoFuture {
        let Inner { file, align, .. } = &*self.inner;
        if buf.is_empty() || end_of(offset, buf.len() as u64).is_none() {
            // No file is that long.
            buf.fill(0);
            return ready(Ok(()), buf);
        }
        align.read(file, buf, offset)
    }

    #[inline]
    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        if buf.is_empty() {
            return ready(Ok(()), buf);
        }
        let Some(end) = end_of(offset, buf.len() as u64) else {
            return ready(Err(self.inner.too_far(offset)), buf);
        };
        if self.inner.align == Alignment::NONE {
            return IoFuture::write(
                mica_rt::write_at(&self.inner.file, buf, offset.bytes()),
                offset,
            );
        }
        let inner = Arc::clone(&self.inner);
        if self.inner.align.fits_range(offset, buf.len() as u64) {
            return IoFuture::boxed(async move {
                let claim = inner.claims.claim_range(offset.bytes()..=end - 1, Mode::Shared).await;
                let written = inner.write_blocks(buf, offset).await;
                drop(claim);
                written
            });
        }
        IoFuture::boxed(in_own_task(async move {
            let result = inner.write_parts(&buf, offset.bytes()).await;
            (result, buf)
        }))
    }

    fn write_parts(
        &self,
        parts: Parts,
        offset: HostOffset,
    ) -> std::result::Result<ChangeFuture, Parts> {
        let inner = Arc::clone(&self.inner);
        // Of a device the system writes single bytes no better.
        let is_simple = inner.kind == FileKind::Regular && inner.align == Alignment::NONE;
        if !is_simple || end_of(offset, parts.len() as u64).is_none() {
            return Err(parts);
        }
        Ok(Box::pin(async move {
            let written = mica_rt::write_parts(&inner.file, parts, offset.bytes()).await;
            written.map_err(|error| inner.failed("writing", error))
        }))
    }

    fn is_cached(&self, offset: HostOffset) -> bool {
        self.inner.align != Alignment::NONE || mica_rt::is_cached(&self.inner.file, offset.bytes())
    }

    fn read_ahead(&self, offset: HostOffset, len: u64) -> LocalFuture<'static, ()> {
        if self.inner.align != Alignment::NONE {
            return Box::pin(std::future::ready(()));
        }
        hint(Arc::clone(&self.inner.file), offset, len)
    }

    fn sync(&self) -> ChangeFuture {
        let inner = Arc::clone(&self.inner);
        Box::pin(in_own_task(async move {
            // One at a time: of two at once, the system reports a failed write-back to only one.
            let _turn = inner.syncs.lock().await;
            inner.check_synced()?;
            mica_rt::sync_data(&inner.file).await.map_err(|error| {
                inner.sync_failed.store(true, Ordering::SeqCst);
                inner.failed("making durable", error)
            })
        }))
    }

    fn sync_written(&self, bytes: Buf, offset: HostOffset) -> ChangeFuture {
        let inner = Arc::clone(&self.inner);
        if inner.kind != FileKind::Regular || inner.align != Alignment::NONE {
            return self.sync();
        }
        Box::pin(in_own_task(async move {
            let _turn = inner.syncs.lock().await;
            inner.check_synced()?;
            let written = mica_rt::on_thread(&inner.file, move |file| {
                write_through(file, &bytes, offset.bytes())
            });
            written.await.map_err(|error| {
                inner.sync_failed.store(true, Ordering::SeqCst);
                inner.failed("making durable", error)
            })
        }))
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let inner = Arc::clone(&self.inner);
        if inner.align == Alignment::NONE {
            return Box::pin(async move { inner.change_space(change, offset, len).await });
        }
        Box::pin(in_own_task(async move {
            let Some(end) = end_of(offset, len) else { return Err(inner.too_far(offset)) };
            if len == 0 {
                return Ok(());
            }
            let (_claim, _) = inner.claim_parts(offset.bytes(), end).await?;
            inner.change_space(change, offset, len).await
        }))
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            let now = inner.len()?;
            if inner.kind == FileKind::BlockDevice {
                return if len == now { Ok(()) } else { Err(inner.fixed_len()) };
            }
            let _claim = match inner.align {
                Alignment::NONE => None,
                _ => Some(inner.claims.claim_range(len.min(now)..=u64::MAX, Mode::Exclusive).await),
            };
            inner.cut(len).await
        })
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.facts().allocated_bytes()
    }

    fn run_at(&self, offset: HostOffset, len: u64) -> Result<Run> {
        check_run_len(len)?;
        self.inner.facts().run_at(offset.bytes(), len)
    }

    fn name(&self) -> String {
        self.inner.path().display().to_string()
    }

    fn identity(&self) -> StoreIdentity {
        self.inner.identity
    }

    /// Of a device nothing is known.
    fn reads_unwritten_as_zeros(&self) -> bool {
        self.inner.kind == FileKind::Regular
    }

    fn witness(&self) -> Witness {
        self.inner.facts().witness(self.inner.mount_generation)
    }
}

impl Inner {
    /// Writes whole blocks.
    async fn write_blocks(&self, buf: Buf, offset: HostOffset) -> (Result<()>, Buf) {
        let write =
            |buf| IoFuture::write(mica_rt::write_at(&self.file, buf, offset.bytes()), offset);
        if self.align.fits_memory(&buf) {
            return write(buf).await;
        }
        let (result, _) = write(Buf::from_slice(&buf)).await;
        (result, buf)
    }

    /// Writes `bytes`, which begin or end within a block (I3).
    async fn write_parts(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let asked_end = offset + bytes.len() as u64;
        let (_claim, len) = self.claim_parts(offset, asked_end).await?;
        let (start, end) = self.align.around(offset, bytes.len() as u64);
        let around_len = usize::try_from(end - start)
            .map_err(|_| Error::new(ErrorKind::Limit, "the write is too long"))?;
        let mut around = Buf::new(around_len);
        let block = usize::try_from(self.align.block_bytes()).expect("at most a page");
        let skipped = usize::try_from(offset - start).expect("less than a block");
        // Only the first and the last block have bytes to preserve.
        if skipped > 0 {
            self.read_block(&mut around.own_bytes()[..block], start).await?;
        }
        let last = around_len - block;
        if asked_end < end && (last > 0 || skipped == 0) {
            self.read_block(&mut around.own_bytes()[last..], end - block as u64).await?;
        }
        around.put(skipped, bytes);
        let (result, _) = self.write_blocks(around, HostOffset::new(start)).await;
        let wanted = if result.is_ok() { len.max(asked_end) } else { len };
        if self.kind == FileKind::Regular && end > len && self.len()? > wanted {
            self.cut(wanted).await?;
        }
        result
    }

    async fn read_block(&self, block: &mut [u8], at: u64) -> Result<()> {
        let read = mica_rt::read_at(&self.file, Buf::new(block.len()), at);
        let (result, read) = IoFuture::file(read, HostOffset::new(at)).await;
        block.copy_from_slice(&read);
        result
    }

    /// Claims the blocks around a range, and everything behind them if they reach beyond the end of
    /// the file (I4). Returns the length of the file as well.
    async fn claim_parts(&self, offset: u64, asked_end: u64) -> Result<(Claim<'_>, u64)> {
        let (start, end) = self.align.around(offset, asked_end - offset);
        let mut last = end - 1;
        loop {
            if end > self.len()? {
                last = u64::MAX;
            }
            let claim = self.claims.claim_range(start..=last, Mode::Exclusive).await;
            let len = self.len()?;
            // Otherwise it was truncated in the meantime.
            if end <= len || last == u64::MAX {
                return Ok((claim, len));
            }
        }
    }

    async fn change_space(&self, change: Space, offset: HostOffset, len: u64) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let (doing, mode) = match change {
            Space::Punch => ("punching", FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE),
            Space::Zero => ("zeroing", FallocateFlags::ZERO_RANGE),
            Space::Allocate => ("allocating", FallocateFlags::empty()),
        };
        if self.drops_before_it_fails(change) {
            let written = mica_rt::write_back(&self.file, offset.bytes(), len).await;
            written.map_err(|error| self.failed("writing out", error))?;
        }
        let changed = mica_rt::fallocate(&self.file, mode, offset.bytes(), len).await;
        changed.map_err(|error| Error::from_io(format!("{doing} {len} bytes at {offset}"), error))
    }

    /// Whether such a change may lose what is only in the page cache (I5).
    fn drops_before_it_fails(&self, change: Space) -> bool {
        let drops = match change {
            Space::Zero => true,
            Space::Punch => self.kind == FileKind::BlockDevice,
            Space::Allocate => false,
        };
        drops && self.file.access() == Access::Buffered
    }

    async fn cut(&self, len: u64) -> Result<()> {
        let cut = mica_rt::set_len(&self.file, len).await;
        cut.map_err(|error| self.failed(&format!("setting the length to {len} of"), error))
    }

    fn check_synced(&self) -> Result<()> {
        if !self.sync_failed.load(Ordering::SeqCst) {
            return Ok(());
        }
        let what =
            format!("an earlier sync of {} failed: nothing is durable any more", self.name());
        Err(Error::new(ErrorKind::Io, what))
    }

    fn path(&self) -> &Path {
        self.later_path.get().unwrap_or(&self.path)
    }

    fn facts(&self) -> Facts<'_> {
        Facts { file: &self.file, path: self.path(), kind: self.kind }
    }

    fn len(&self) -> Result<u64> {
        self.facts().len()
    }

    fn name(&self) -> std::path::Display<'_> {
        self.path().display()
    }

    fn failed(&self, doing: &str, error: io::Error) -> Error {
        Error::from_io(format!("{doing} {}", self.name()), error)
    }

    fn too_far(&self, offset: HostOffset) -> Error {
        Error::new(ErrorKind::Limit, format!("{} does not reach {offset}", self.name()))
    }

    fn fixed_len(&self) -> Error {
        let what = format!("{} is a block device: its length is fixed", self.name());
        Error::new(ErrorKind::Unsupported, what)
    }
}

/// Runs `work` in a task of its own, from the first poll of what this gives.
async fn in_own_task<T: 'static>(work: impl Future<Output = T> + 'static) -> T {
    mica_rt::spawn(work).await
}
