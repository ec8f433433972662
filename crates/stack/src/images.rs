//! Image files of the host, opened under the policy.

use crate::inject::Fault;
use crate::may_write::MayWrite;
use crate::policy::{Names, Policy};
use crate::redo::RedoPlace;
use crate::redo::logs::FileRedoLogs;
use crate::secrets::Secrets;
use crate::sidecars::{FileSidecars, SidecarPlace};
use crate::written::WrittenImages;
use mica_block::{
    Error, ErrorKind, Identity, Images, OpenImage, Passphrase, ProofSlot, RedoLogs, Result,
    Sidecars, Store, Upgradable,
};
use mica_store::{CacheMode, FileStore, Handles, Located, Locking, WritableFile};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How image files are opened.
#[derive(Clone)]
pub struct ImageOptions {
    /// Which files images may name.
    pub names: Names,
    /// Directories whose files they may name in addition.
    pub allow_paths: Vec<PathBuf>,
    /// Whether reads and writes go through the host's page cache.
    pub cache: CacheMode,
    /// The bound on open descriptors.
    pub handles: Arc<Handles>,
    /// Where the indexes of layers are kept.
    pub sidecars: SidecarPlace,
    /// Where writers keep their redo logs.
    pub redo: RedoPlace,
    /// Faults of operations on images, the first next to the file.
    pub faults: Vec<Fault>,
    /// Whether QEMU's locks of images are taken and honoured.
    pub locking: Locking,
    /// Where the passphrases of encrypted images are.
    pub secrets: Secrets,
}

impl ImageOptions {
    /// The default options, with this bound on open descriptors.
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
            secrets: Secrets::default(),
        }
    }
}

/// Image files of the host. Each command that names an image creates one of these.
pub struct FileImages {
    policy: Arc<Policy>,
    sidecars: FileSidecars,
    redo_logs: FileRedoLogs,
    cache: CacheMode,
    handles: Arc<Handles>,
    faults: Vec<Fault>,
    locking: Locking,
    secrets: Secrets,
    written: Arc<WrittenImages>,
    /// Without it nothing is opened for writing.
    may_write: Option<MayWrite>,
}

impl FileImages {
    /// The files that belong to the image that the user `named`, for writing, too.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn to_write(named: &Path, options: ImageOptions, may_write: MayWrite) -> Result<Self> {
        Ok(Self { may_write: Some(may_write), ..Self::new(named, options)? })
    }

    /// The files that belong to the image that the user `named`, for reading.
    ///
    /// # Errors
    /// If there is no such image, or an option names a directory that does not exist.
    pub fn new(named: &Path, options: ImageOptions) -> Result<Self> {
        let ImageOptions { names, allow_paths, cache, handles, sidecars, redo, .. } = options;
        let ImageOptions { faults, locking, secrets, .. } = options;
        let policy = Arc::new(Policy::new(named, names, &allow_paths)?);
        let written = Arc::<WrittenImages>::default();
        let sidecars = FileSidecars::new(sidecars, Arc::clone(&policy), Arc::clone(&handles))?;
        let limit = faults.iter().find_map(|fault| match fault {
            Fault::RedoMemory(bytes) => Some(*bytes),
            _ => None,
        });
        let redo = match limit {
            Some(bytes) => redo.limited(bytes),
            None => redo,
        };
        let redo_logs = FileRedoLogs::new(redo, Arc::clone(&policy), locking, Arc::clone(&written));
        Ok(Self {
            policy,
            sidecars,
            redo_logs,
            cache,
            handles,
            faults,
            locking,
            secrets,
            written,
            may_write: None,
        })
    }

    /// Opens the file at `path` for reading, whoever is writing it: for what does not change
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Images::open`].
    pub(crate) fn glance(&self, path: &Path) -> Result<(Located, FileStore)> {
        let located = self.policy.find(path)?;
        let store = FileStore::new_apart(&located, CacheMode::Writeback, &self.handles)?;
        Ok((located, store))
    }

    /// The name of a file that is about to be made at `path`, made absolute.
    ///
    /// # Errors
    /// `Denied` if it could not be opened there afterwards.
    pub fn find_new(&self, path: &Path) -> Result<PathBuf> {
        self.policy.find_new(path)
    }

    /// The leave to write.
    fn may_write(&self, path: &Path) -> Result<&MayWrite> {
        self.may_write.as_ref().ok_or_else(|| {
            let what = format!("{} may only be read here", path.display());
            Error::new(ErrorKind::Denied, what)
        })
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
}

impl Images for FileImages {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        self.policy.resolve(referrer, name)
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        let mut located = self.policy.find(path)?;
        let locking = if self.written.has(&located) { Locking::Off } else { self.locking };
        let store = FileStore::new_shared(&mut located, self.cache, locking, &self.handles)?;
        let content = store.content();
        self.sidecars.note(path, &located);
        self.opened(&located, store, content)
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        let may_write = self.may_write(path)?;
        let mut located = self.policy.find(path)?;
        let store = WritableFile::open(&mut located, self.cache, self.locking, &self.handles)?;
        may_write.holds(path, located.owner())?;
        let name = store.own_name();
        // Its descriptor is separate, and stays open.
        let image = self.opened(&located, store, ProofSlot::default())?;
        self.written.add(&image, name);
        Ok(image)
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        let mut located = self.policy.find(path)?;
        let (locking, handles) = (self.locking, &self.handles);
        let store = FileStore::new_frozen(&mut located, self.cache, locking, handles)?;
        let content = store.content();
        self.opened(&located, store, content)
    }

    fn note_name(&self, path: &Path) {
        if let Ok(located) = self.policy.find(path)
            && let Some(name) = self.written.name(&located)
        {
            name.note(located.path());
        }
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        self.may_write(path)?;
        let mut located = self.policy.find(path)?;
        let (store, upgrade) =
            WritableFile::open_upgradable(&mut located, self.cache, self.locking, &self.handles)?;
        let name = store.own_name();
        let image = self.opened(&located, store, ProofSlot::default())?;
        // Whoever opens it again from now on finds its locks.
        self.written.add(&image, name);
        Ok(Upgradable::new(image, upgrade))
    }

    fn open_alone(&self, path: &Path) -> Result<OpenImage> {
        self.may_write(path)?;
        if self.locking != Locking::On {
            let what = format!("{}: not checking who else has it open", path.display());
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let mut located = self.policy.find(path)?;
        let store = WritableFile::open_alone(&mut located, self.cache, &self.handles)?;
        self.opened(&located, store, ProofSlot::default())
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        let located = self.policy.find(path)?;
        let len = match located.known_len() {
            Some(len) => len,
            None => FileStore::new(&located, CacheMode::Writeback, &self.handles)?.len()?,
        };
        Ok(located.identity(len))
    }

    fn passphrase(&self, path: &Path) -> Result<Option<Arc<Passphrase>>> {
        self.secrets.of(path)
    }

    fn sidecars(&self) -> &dyn Sidecars {
        &self.sidecars
    }

    fn redo_logs(&self) -> &dyn RedoLogs {
        &self.redo_logs
    }

    fn now_ns(&self) -> i128 {
        mica_store::now_ns()
    }
}

#[cfg(test)]
mod tests;
