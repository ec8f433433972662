//! Images in memory that are opened by their names, without sidecars, and with a redo log only if a
//! test gives its memory.

use super::done_at_once;
use mica_block::{
    Error, ErrorKind, Identity, Images, NoSidecars, OpenImage, ProofSlot, RedoLogs, RedoMemory,
    Result, Sidecars, Store, Upgradable, read_exact, write_all,
};
use mica_qcow2_format::RefcountTableEntry;
use mica_rt::Buf;
use mica_store::MemoryStore;
use mica_store::faulty::{LogOptions, LogStore};
use mica_units::HostOffset;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a cluster of the images in a [`Folder`].
pub(crate) const CLUSTER_BYTES: usize = 1 << 12;
/// Where the refcounts are, of one bit each.
pub(crate) const REFCOUNTS_AT: usize = 2 * CLUSTER_BYTES;

/// A folder of images.
#[derive(Clone, Default)]
pub(crate) struct Folder {
    files: Arc<Mutex<BTreeMap<PathBuf, File>>>,
    /// For the logs of all images.
    memory: Option<Arc<dyn RedoMemory>>,
    /// Is told what becomes of images that are opened.
    watch: Option<LogOptions>,
}

/// Its number, and what is in it.
type File = (u64, Arc<MemoryStore>);

impl Folder {
    /// The same folder, whose images are logged in `memory`.
    pub(crate) fn with_log(&self, memory: Arc<dyn RedoMemory>) -> Self {
        Self { memory: Some(memory), ..self.clone() }
    }

    /// The same folder; of images that are opened through it, `watch` is told each operation.
    pub(crate) fn watched(&self, watch: LogOptions) -> Self {
        Self { watch: Some(watch), ..self.clone() }
    }

    /// Makes an empty image called `name` of a disk of `disk_bytes`, at most 2 MiB, over the one
    /// called `backing`.
    pub(crate) fn make(&self, name: &str, disk_bytes: u64, backing: Option<&str>) {
        let mut bytes = vec![0; 4 * CLUSTER_BYTES];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, b"QFI\xfb");
        put(4, &3_u32.to_be_bytes());
        put(20, &CLUSTER_BYTES.trailing_zeros().to_be_bytes());
        put(24, &disk_bytes.to_be_bytes());
        put(36, &1_u32.to_be_bytes());
        // The refcount table, its block, and the L1 table follow the header.
        put(40, &(3 * CLUSTER_BYTES as u64).to_be_bytes());
        put(48, &(CLUSTER_BYTES as u64).to_be_bytes());
        put(56, &1_u32.to_be_bytes());
        put(100, &104_u32.to_be_bytes());
        let block = HostOffset::new(REFCOUNTS_AT as u64);
        put(CLUSTER_BYTES, &RefcountTableEntry::encode(block).0.to_be_bytes());
        put(REFCOUNTS_AT, &[0b1111]);
        if let Some(backing) = backing {
            put(104, &0xe279_2aca_u32.to_be_bytes());
            put(108, &5_u32.to_be_bytes());
            put(112, b"qcow2");
            put(8, &256_u64.to_be_bytes());
            put(16, &u32::try_from(backing.len()).expect("a short name").to_be_bytes());
            put(256, backing.as_bytes());
        }
        let mut files = self.files.lock();
        let file = (files.len() as u64, Arc::new(MemoryStore::new_writable(name, bytes)));
        files.insert(Self::path(name), file);
    }

    /// Puts `bytes` at `at` of the image called `name`.
    pub(crate) fn put(&self, name: &str, at: usize, bytes: &[u8]) {
        let (_, file) = self.find(&Self::path(name)).expect("it was made");
        let at = HostOffset::new(at as u64);
        done_at_once(write_all(&*file, Buf::from_slice(bytes), at));
    }

    /// The `len` bytes at `at` of the image called `name`.
    pub(crate) fn get(&self, name: &str, at: usize, len: usize) -> Vec<u8> {
        let (_, file) = self.find(&Self::path(name)).expect("it was made");
        let at = HostOffset::new(at as u64);
        done_at_once(read_exact(&*file, at, len)).to_vec()
    }

    /// Where the image called `name` is.
    pub(crate) fn path(name: &str) -> PathBuf {
        Path::new("/folder").join(name)
    }

    fn find(&self, path: &Path) -> Result<File> {
        let files = self.files.lock();
        files.get(path).cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, "no such image"))
    }
}

impl Images for Folder {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        Ok(referrer.parent().expect("in the folder").join(name))
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        let (identity, content) = (self.identify(path)?, ProofSlot::default());
        let store: Arc<dyn Store> = self.find(path)?.1;
        let store = match &self.watch {
            Some(watch) => Arc::new(LogStore::new(store, watch.clone())),
            None => store,
        };
        Ok(OpenImage { store, identity, content })
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        self.open(path)
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        self.open(path)
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        Ok(Upgradable::new(self.open(path)?, || Ok(())))
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        let (inode, file) = self.find(path)?;
        Ok(Identity { device: 1, inode, len: file.len()?, mtime_ns: 1, ctime_ns: 1 })
    }

    fn sidecars(&self) -> &dyn Sidecars {
        &NoSidecars
    }

    fn redo_logs(&self) -> &dyn RedoLogs {
        self
    }

    fn now_ns(&self) -> i128 {
        1 << 60
    }
}

impl RedoLogs for Folder {
    fn log(&self, _path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        Ok(self.memory.clone())
    }

    fn unnamed_log(&self, _path: &Path) -> Result<Option<Arc<dyn RedoMemory>>> {
        Ok(None)
    }

    fn orphaned(&self, _path: &Path) -> Result<Vec<Arc<dyn RedoMemory>>> {
        Ok(Vec::new())
    }

    fn elsewhere(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }

    fn of_another(&self, _path: &Path) -> Result<Option<PathBuf>> {
        Ok(None)
    }
}
