//! Image files of the host, opened under the policy.

use crate::inject::Fault;
use crate::policy::{Names, Policy};
use crate::redo::{RedoFile, RedoPlace};
use crate::sidecars::{SidecarPlace, Sidecars};
use mica_block::{Error, Identity, Images, OpenImage, ProofSlot, RedoMemory, Result, Store};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking, WritableFile};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How image files are opened.
#[derive(Clone)]
pub struct ImageOptions {
    /// Which files images may name.
    pub names: Names,
    /// Directories whose files they may name besides.
    pub allow_paths: Vec<PathBuf>,
    /// Whether reads and writes go through the host's page cache.
    pub cache: CacheMode,
    /// The bound on open descriptors.
    pub handles: Arc<Handles>,
    /// Where the indexes of layers are kept.
    pub sidecars: SidecarPlace,
    /// Where writers leave what they acknowledged and did not flush.
    pub redo: RedoPlace,
    /// What shall go wrong with what is done to images, the first next to the file.
    pub faults: Vec<Fault>,
    /// Whether QEMU's locks of images are taken and honoured.
    pub locking: Locking,
}

impl ImageOptions {
    /// The options that nobody asked anything of, with this bound on open descriptors.
    pub fn new(handles: Arc<Handles>) -> Self {
        Self {
            names: Names::default(),
            allow_paths: Vec::new(),
            cache: CacheMode::default(),
            handles,
            sidecars: SidecarPlace::default(),
            redo: RedoPlace::default(),
            faults: Vec::new(),
            locking: Locking::default(),
        }
    }
}

/// Image files of the host. Each command that names an image makes one of these.
pub struct FileImages {
    policy: Policy,
    sidecars: Sidecars,
    redo: RedoPlace,
    cache: CacheMode,
    handles: Arc<Handles>,
    faults: Vec<Fault>,
    locking: Locking,
    written: Mutex<Vec<Written>>,
}

/// An image that was opened for writing here.
struct Written {
    device: u64,
    inode: u64,
    store: Weak<dyn Store>,
}

impl FileImages {
    /// The files that belong to the image that the user `named`.
    ///
    /// # Errors
    /// If there is no such image, or an option names a directory that is not there.
    pub fn new(named: &Path, options: ImageOptions) -> Result<Self> {
        let ImageOptions { names, allow_paths, cache, handles, sidecars, redo, faults, locking } =
            options;
        let policy = Policy::new(named, names, &allow_paths)?;
        let sidecars = Sidecars::new(sidecars, Arc::clone(&handles))?;
        let written = Mutex::default();
        Ok(Self { policy, sidecars, redo, cache, handles, faults, locking, written })
    }

    /// The image in `store`, which is what was `located`.
    fn opened(
        &self,
        located: &Located,
        store: impl Store + 'static,
        content: ProofSlot,
    ) -> Result<OpenImage> {
        let len = located.known_len().map_or_else(|| store.len(), Ok)?;
        let identity = located.identity(len);
        let mut store: Arc<dyn Store> = Arc::new(store);
        for fault in &self.faults {
            store = fault.stack_on(store);
        }
        Ok(OpenImage { store, identity, content })
    }

    /// Whether what was `located` is open for writing here: then its lock is our own, and whoever
    /// opens it once more may find out that the chain bites its tail.
    fn writes(&self, located: &Located) -> bool {
        let Identity { device, inode, .. } = located.identity(0);
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        written.retain(|image| image.store.strong_count() > 0);
        written.iter().any(|image| (image.device, image.inode) == (device, inode))
    }
}

impl Images for FileImages {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        self.policy.resolve(referrer, name)
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        let mut located = self.policy.find(path)?;
        let locking = if self.writes(&located) { Locking::Off } else { self.locking };
        let store = FileStore::new_shared(&mut located, self.cache, locking, &self.handles)?;
        let content = store.content();
        self.opened(&located, store, content)
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        let mut located = self.policy.find(path)?;
        let store = WritableFile::open(&mut located, self.cache, self.locking)?;
        // Its descriptor is its own, and stays open.
        let image = self.opened(&located, store, ProofSlot::default())?;
        let Identity { device, inode, .. } = image.identity;
        let written = Written { device, inode, store: Arc::downgrade(&image.store) };
        self.written.lock().unwrap_or_else(PoisonError::into_inner).push(written);
        Ok(image)
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        let located = self.policy.find(path)?;
        let len = match located.known_len() {
            Some(len) => len,
            None => FileStore::new(&located, CacheMode::Writeback, &self.handles)?.len()?,
        };
        Ok(located.identity(len))
    }

    fn open_sidecar(&self, path: &Path) -> Result<Option<Arc<dyn Store>>> {
        self.sidecars.open(&self.policy.find(path)?)
    }

    fn write_sidecar(&self, path: &Path, content: &[u8]) -> Result<()> {
        self.sidecars.write(&self.policy.find(path)?, content)
    }

    fn remove_sidecar(&self, path: &Path) -> Result<()> {
        self.sidecars.remove(&self.policy.find(path)?)
    }

    fn redo_log(&self, path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        let identity = self.policy.find(path)?.identity(0);
        let file = RedoFile::new(&self.redo, identity);
        Ok(file.map(|file| Arc::new(file) as Arc<dyn RedoMemory>))
    }

    fn orphaned_redo_logs(&self, path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>> {
        let located = self.policy.find(path)?;
        // The image's lock, which we hold, keeps later writers away. That there is none now is said
        // by the log's own: a writer may have taken none of the image.
        if self.locking != Locking::On || self.writes(&located) {
            return Ok(Vec::new());
        }
        let owner = owner_of(path)?;
        let files = RedoFile::orphaned(&self.redo, located.identity(0), owner)?;
        Ok(files.into_iter().map(|file| Arc::new(file) as Arc<dyn RedoMemory>).collect())
    }

    fn redo_log_elsewhere(&self, path: &Path) -> Result<Option<PathBuf>> {
        let identity = self.policy.find(path)?.identity(0);
        Ok(RedoFile::elsewhere(&self.redo, identity))
    }

    fn redo_log_of_another(&self, path: &Path) -> Result<Option<PathBuf>> {
        let identity = self.policy.find(path)?.identity(0);
        Ok(RedoFile::of_another(&self.redo, identity, owner_of(path)?))
    }

    fn now_ns(&self) -> i128 {
        // The coarse clock is the one that file systems stamp with: whatever changes after this
        // call is stamped with this time or a later one.
        let now = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
        i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
    }
}

fn owner_of(path: &Path) -> Result<u32> {
    let found = std::fs::metadata(path);
    found
        .map(|found| found.uid())
        .map_err(|error| Error::from_io(path.display().to_string(), error))
}

#[cfg(test)]
mod tests;
