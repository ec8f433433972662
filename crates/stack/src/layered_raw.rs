//! A raw image that is served, on top of which a layer may be put at any time: from then on it is
//! the chain of both.
//!
//! ```text
//! open the overlay, on top of the image ─▶ flush the image ─▶ hold all changes ─▶ names
//!   ─▶ the chain ─▶ let go ─▶ the image and the names durable ─▶ the image is only read
//! ```
//!
//! A raw image has no map, so that nothing is known of a place but that it is there: what was
//! planned before is read from the image afterwards, too, and is what the disk had when the plan
//! was made. Changes wait while those that are under way come to an end, and a name is changed.
//! Flushes wait until the image is durable, as in a chain (`qcow2/src/chain/push.rs`), and what a
//! crash leaves is what it leaves there.
//!
//! Invariants
//! - I1 It is raw as long as there is no chain, and never again afterwards. The file of the image
//!   is open for writing as long as it is raw, and longer only if it cannot be opened again.
//! - I2 While changes are held none is under way in the image, and none begins. After that none
//!   begins there ever again.
//! - I3 After an error it is raw, unless the chain was there already: then it stays, and nothing is
//!   acknowledged that is not durable.
//! - I4 Who planned a read while it was raw has ended it before a layer leaves the chain.

mod manage;

use crate::raw::RawDisk;
use arc_swap::{ArcSwapOption, Guard};
use mica_block::{
    Disk, Error, ErrorKind, Extent, Geometry, Images, IoFuture, LocalFuture, Manage as _, Plan,
    Planned, Pushed, Renaming, Requests, Result, SnapshotGroup, Writing, Zeroes,
};
use mica_qcow2::{Chain, ChainOptions, flush_ahead, flush_while_long};
use mica_rt::sync::{self, Notify, OwnedInFlight, Waiters};
use mica_rt::{Buf, spawn};
use mica_units::{GuestOffset, GuestRange};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// See the module.
pub struct LayeredRaw {
    images: Arc<dyn Images>,
    path: PathBuf,
    options: ChainOptions,
    /// The image, as long as it is written; see I1.
    raw: ArcSwapOption<RawDisk>,
    chain: OnceLock<Chain>,
    /// Whether `chain` is there: looked at after a request was counted.
    is_chain: AtomicBool,
    /// Reads of the image, from their plan on, and changes of it, to their end.
    reads: Requests,
    changes: Arc<Requests>,
    /// Whether changes are held, and who waits for that to end.
    is_held: AtomicBool,
    released: Waiters,
    pushing: sync::Mutex,
    /// Called when there is a chain, and by whoever waits for that no longer.
    index_call: Notify,
}

/// What the disk is now.
enum Now<'a> {
    Raw(Raw),
    Chain(&'a Chain),
}

/// The image, while it is looked at.
struct Raw(Guard<Option<Arc<RawDisk>>>);

impl Deref for Raw {
    type Target = Arc<RawDisk>;

    fn deref(&self) -> &Arc<RawDisk> {
        self.0.as_ref().expect("it was there when it was loaded")
    }
}

/// What a change that has begun is done to.
enum Entered<'a> {
    Raw(Arc<RawDisk>, OwnedInFlight),
    Chain(&'a Chain),
}

/// Changes are held as long as this is there.
struct Held<'a>(&'a LayeredRaw);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.is_held.store(false, Ordering::SeqCst);
        self.0.released.wake_all();
    }
}

impl LayeredRaw {
    /// The raw image at `path`, open for writing. The chain is opened with `options`.
    ///
    /// # Errors
    /// Any error of opening it.
    pub fn open(images: Arc<dyn Images>, path: &Path, options: &ChainOptions) -> Result<Self> {
        let raw = RawDisk::open_writable(&*images, path)?;
        Ok(Self {
            images,
            path: path.to_owned(),
            options: ChainOptions { writable: true, ..options.clone() },
            raw: ArcSwapOption::from_pointee(raw),
            chain: OnceLock::new(),
            is_chain: AtomicBool::new(false),
            reads: Requests::default(),
            changes: Arc::default(),
            is_held: AtomicBool::new(false),
            released: Waiters::default(),
            pushing: sync::Mutex::default(),
            index_call: Notify::default(),
        })
    }

    /// Does a change in a task of its own while it is raw: a client that disconnects does not leave
    /// it half-done.
    fn change<'a>(
        &'a self,
        of_raw: impl AsyncFnOnce(&RawDisk) -> Result<()> + 'static,
        of_chain: impl FnOnce(&'a Chain) -> LocalFuture<'a, Result<()>> + 'a,
    ) -> LocalFuture<'a, Result<()>> {
        if let Some(chain) = self.chain() {
            return of_chain(chain);
        }
        Box::pin(async move {
            match self.enter().await {
                Entered::Chain(chain) => of_chain(chain).await,
                Entered::Raw(raw, under_way) => {
                    spawn(async move {
                        let done = of_raw(&raw).await;
                        drop(under_way);
                        done
                    })
                    .await
                }
            }
        })
    }

    fn chain(&self) -> Option<&Chain> {
        self.is_chain.load(Ordering::SeqCst).then(|| self.chain.get().expect("it was set before"))
    }

    fn now(&self) -> Now<'_> {
        if let Some(chain) = self.chain() {
            return Now::Chain(chain);
        }
        let raw = self.raw.load();
        match raw.is_some() {
            true => Now::Raw(Raw(raw)),
            false => Now::Chain(self.chain().expect("I1: it is one or the other")),
        }
    }

    /// Counts a change of the image; `None` if changes are held, or it is none any more.
    #[inline]
    fn try_enter(&self) -> Option<OwnedInFlight> {
        let entered = self.changes.enter_owned();
        // Asked after it was counted: whoever holds changes waits for it, or it sees that (I2).
        let is_open = !self.is_held.load(Ordering::SeqCst) && !self.is_chain.load(Ordering::SeqCst);
        is_open.then_some(entered)
    }

    /// Waits while changes are held.
    async fn enter(&self) -> Entered<'_> {
        let entered = self.released.until(|| match (self.chain(), self.try_enter()) {
            (Some(chain), _) => Some(Entered::Chain(chain)),
            (None, Some(entered)) => {
                let raw = self.raw.load_full().expect("I1: it is there while a change is counted");
                Some(Entered::Raw(raw, entered))
            }
            (None, None) => None,
        });
        entered.await
    }

    /// Holds changes: none is under way when this is ready (I2).
    async fn hold(&self) -> Held<'_> {
        self.is_held.store(true, Ordering::SeqCst);
        let held = Held(self);
        self.changes.grace().await;
        held
    }

    /// The chain of the image and of the overlay at `path`, which nothing shows yet.
    async fn open_chain(&self, path: &Path, raw: &RawDisk) -> Result<Chain> {
        let chain = Chain::open(Arc::clone(&self.images), path, &self.options).await?;
        let checked = match chain.is_empty_on_raw(raw.identity()).await {
            Ok(true) => check_length(&chain, raw, path),
            Ok(false) => {
                let what = format!(
                    "{} is not an empty overlay of {} as a raw image (`-F raw`)",
                    path.display(),
                    self.path.display()
                );
                Err(Error::new(ErrorKind::Invalid, what))
            }
            Err(error) => Err(error),
        };
        match checked {
            Ok(()) => Ok(chain),
            Err(error) => {
                abandon(&chain).await;
                Err(error)
            }
        }
    }

    /// As [`Chain::write_ahead`].
    async fn write_ahead(&self) -> Result<()> {
        let _alone = self.pushing.lock().await;
        match (self.chain(), self.raw.load_full()) {
            (Some(chain), _) => chain.write_ahead().await,
            (None, Some(raw)) => flush_ahead(async || raw.flush().await.map(|()| true)).await,
            (None, None) => Ok(()),
        }
    }

    async fn put_on_top(
        &self,
        path: &Path,
        names: &dyn Renaming,
        group: Option<&SnapshotGroup>,
    ) -> Result<Pushed> {
        let _alone = self.pushing.lock().await;
        if let Some(chain) = self.chain() {
            return chain.push(path, names, group).await;
        }
        if names.kept().is_some() {
            let what = format!(
                "{} is a raw image, of which states cannot be kept: put a layer on top of it first \
                 (`mica ctl snapshot`)",
                self.path.display()
            );
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let raw = self.raw.load_full().expect("I1: there is no chain");
        let chain = self.open_chain(path, &raw).await?;
        let flushed = flush_while_long(async || raw.flush().await.map(|()| true)).await;
        let start = mica_rt::now();
        let held = self.hold().await;
        let named = match flushed.and_then(|()| check_length(&chain, &raw, path)) {
            Ok(()) => rename(names, group).await,
            failed => failed,
        };
        let settling = match named.and_then(|()| chain.begin_settling()) {
            Ok(settling) => settling,
            Err(error) => {
                drop(held);
                abandon(&chain).await;
                return Err(error);
            }
        };
        assert!(self.chain.set(chain).is_ok(), "one at a time puts a layer on top");
        self.is_chain.store(true, Ordering::SeqCst);
        self.raw.store(None);
        drop(held);
        let pause = mica_rt::now().saturating_since(start);
        let settled: [LocalFuture<'_, Result<()>>; 2] = [raw.flush(), names.sync()];
        let settled: Result<()> = mica_rt::join_all(settled).await.into_iter().collect();
        settling.end(&settled);
        self.end_raw(raw).await;
        self.index_call.set();
        settled.map(|()| Pushed { pause })
    }

    /// Ends writing to the raw image, so that other processes may read it from now on.
    async fn end_raw(&self, raw: Arc<RawDisk>) {
        let chain = self.chain().expect("it is there now");
        // Its readers have a file of their own, with locks, before the one that was written is
        // closed.
        if let Err(error) = chain.reopen_base() {
            tracing::warn!(
                image = %self.path.display(),
                %error,
                "the frozen layer stays locked: reopening it read-only failed"
            );
            self.raw.store(Some(Arc::clone(&raw)));
        }
        // Whoever began to read of it has what it read when the layer is said to be on top.
        self.reads.grace().await;
        drop(raw);
    }
}

/// Closes a chain that nobody has written to.
async fn abandon(chain: &Chain) {
    if let Err(error) = chain.close().await {
        tracing::debug!(%error, "could not close an unused overlay");
    }
}

fn check_length(chain: &Chain, raw: &RawDisk, path: &Path) -> Result<()> {
    let (is, wanted) = (chain.geometry().len, raw.geometry().len);
    if is == wanted {
        return Ok(());
    }
    let what = format!("{} has {is} bytes, and the disk {wanted}", path.display());
    Err(Error::new(ErrorKind::Invalid, what))
}

/// Changes the names, if all others of the group get as far.
async fn rename(names: &dyn Renaming, group: Option<&SnapshotGroup>) -> Result<()> {
    let Some(group) = group else { return names.rename().await };
    group.all_hold().await?;
    names.rename().await?;
    match group.all_taken().await {
        Ok(()) => Ok(()),
        Err(error) => {
            // If that fails, the mark leads to the overlay: it is empty, and the disk goes on in it
            // when it is opened again.
            if let Err(undone) = names.undo().await {
                tracing::error!(
                    %undone,
                    "could not remove the mark of a layer that was not put on top"
                );
            }
            Err(error)
        }
    }
}

impl Disk for LayeredRaw {
    fn geometry(&self) -> Geometry {
        match self.now() {
            Now::Raw(raw) => raw.geometry(),
            Now::Chain(chain) => chain.geometry(),
        }
    }

    #[inline]
    fn plan(&self, range: GuestRange, extents: Vec<Extent>) -> Planned<'_> {
        if let Some(chain) = self.chain() {
            return chain.plan(range, extents);
        }
        let in_flight = self.reads.enter();
        match self.now() {
            Now::Raw(raw) => {
                let planned = raw.extents_of(range, extents);
                Planned::Ready(planned.map(|extents| Plan::new(extents, in_flight)))
            }
            Now::Chain(chain) => {
                drop(in_flight);
                chain.plan(range, extents)
            }
        }
    }

    fn survey(&self, range: GuestRange) -> LocalFuture<'_, Result<Vec<Extent>>> {
        Box::pin(async move {
            match self.now() {
                Now::Raw(raw) => raw.survey(range).await,
                Now::Chain(chain) => chain.survey(range).await,
            }
        })
    }

    #[inline]
    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        match self.now() {
            Now::Raw(raw) => raw.read(extent, buf),
            // What was planned while it was raw is in the chain's lowest layer.
            Now::Chain(chain) => chain.read(extent, buf),
        }
    }

    fn is_writable(&self) -> bool {
        true
    }

    #[inline]
    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        if let Some(chain) = self.chain() {
            return chain.write(at, buf);
        }
        if let Some(under_way) = self.try_enter()
            && let Now::Raw(raw) = self.now()
        {
            return Writing::Direct(raw.begin_write(at, buf).hold(under_way));
        }
        Writing::Boxed(Box::pin(async move {
            match self.enter().await {
                Entered::Chain(chain) => chain.write(at, buf).await,
                Entered::Raw(raw, under_way) => raw.begin_write(at, buf).hold(under_way).await,
            }
        }))
    }

    fn write_zeroes(&self, range: GuestRange, how: Zeroes) -> LocalFuture<'_, Result<()>> {
        self.change(
            async move |raw| raw.write_zeroes(range, how).await,
            move |chain| chain.write_zeroes(range, how),
        )
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        self.change(async move |raw| raw.discard(range).await, move |chain| chain.discard(range))
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        if let Some(chain) = self.chain() {
            return chain.flush();
        }
        Box::pin(async move {
            match self.now() {
                Now::Raw(raw) => raw.flush().await,
                Now::Chain(chain) => chain.flush().await,
            }
        })
    }
}
