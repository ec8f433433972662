//! Files in memory as the code under test sees them: through [`Images`] and [`Store`].
//!
//! - A store is bound to its file, as a descriptor is: a file that was replaced can still be read
//!   by those who opened it, while a new opener gets the new one, with another identity.
//! - A read or a write takes effect when it completes, so a read may see concurrent writes. What is
//!   written is volatile until a later sync: see `power.rs`.
//! - Only one store at a time is open for writing.
//! - Everything depends only on the seed and the order of calls. Mica's own order follows from the
//!   executor's seed.

mod fault;
mod file;
mod kept;
mod names;
mod redo;
mod store;

pub use fault::{ChangeFault, ENOSPC, Operation, PowerCut};
pub use redo::LogCopies;

use fault::Changes;
use file::{SharedFile, SimFile};
use mica_block::{
    Error, ErrorKind, Identity, Images, OpenImage, ProofSlot, Result, Store, Upgradable,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::hint::black_box;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Once, Weak};
use std::time::Duration;
use store::SimStore;

/// How long reads of a file take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Latency {
    /// A page cache: 2 us.
    Cached,
    /// A good disk: 80 us.
    Flash,
    /// A disk over a network: 1 ms.
    Remote,
}

/// The faults of reads of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadFault {
    /// The read with this number, counted from 1 as of now, fails with this errno.
    FailNth(u64, i32),
    /// Every read fails with this errno.
    FailAll(i32),
    /// One read in this many, at random, takes a hundred times as long.
    SpikeOneIn(u64),
}

/// A world of files. Clones are the same world.
#[derive(Clone)]
pub struct World {
    state: Arc<Mutex<State>>,
}

struct State {
    seed: u64,
    drawn: u64,
    now_ns: i128,
    next_inode: u64,
    files: BTreeMap<PathBuf, SharedFile>,
    /// What names that are not durable yet stood for, the oldest first.
    names_before: Vec<names::Before>,
    sidecars: BTreeMap<PathBuf, SharedFile>,
    sidecars_denied: bool,
    redo_memories: BTreeMap<PathBuf, redo::Memory>,
    /// How many of them were ever made.
    memories_made: u64,
    memory_is_full: bool,
    memory_capacity: u64,
    /// Whether file systems report that they were remounted.
    reports_remounts: bool,
    changes: Changes,
}

/// A world begins at this time, so that file times are not near zero, nor whole seconds.
const START_NS: i128 = 1_700_000_000_000_456_789;
/// Time advances by this much at each change, so that each has a time of its own.
const TICK_NS: i128 = 1_000_000;

/// Files are copied all the time, and are some MiB long. The allocator would return each copy to
/// the kernel, and much of the time would go into getting zeroed pages back. glibc keeps blocks of
/// up to the size of the largest that was mapped and freed before.
fn keep_freed_memory() {
    const BLOCK_BYTES: usize = 31 << 20;
    static ONCE: Once = Once::new();
    ONCE.call_once(|| drop(black_box(Vec::<u8>::with_capacity(BLOCK_BYTES))));
}

impl World {
    /// An empty world.
    pub fn new(seed: u64) -> Self {
        keep_freed_memory();
        let state = State {
            seed,
            drawn: 0,
            now_ns: START_NS,
            next_inode: 1,
            files: BTreeMap::new(),
            names_before: Vec::new(),
            sidecars: BTreeMap::new(),
            sidecars_denied: false,
            redo_memories: BTreeMap::new(),
            memories_made: 0,
            memory_is_full: false,
            memory_capacity: redo::CAPACITY,
            reports_remounts: true,
            changes: Changes::default(),
        };
        Self { state: Arc::new(Mutex::new(state)) }
    }

    /// The seed from which it was made.
    pub fn seed(&self) -> u64 {
        self.state.lock().seed
    }

    /// The files and what readers see of them.
    pub fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let files = self.state.lock().files.clone();
        files.into_iter().map(|(path, file)| (path, file.lock().bytes.clone())).collect()
    }

    /// A number below `bound`, determined by the seed and by how many were drawn before.
    ///
    /// # Panics
    /// If `bound` is zero.
    pub fn random_below(&self, bound: u64) -> u64 {
        self.state.lock().random() % bound
    }

    /// What `look` makes of what readers see of the file at `path`.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn inspect<T>(&self, path: impl AsRef<Path>, look: impl FnOnce(&[u8]) -> T) -> T {
        self.with_file(path.as_ref(), |file| look(&file.bytes))
    }

    /// Advances the clock that stamps files by `duration`. The executor's clock is separate.
    pub fn pass_time(&self, duration: Duration) {
        self.state.lock().now_ns += i128::try_from(duration.as_nanos()).unwrap_or(i128::MAX / 4);
    }

    /// Puts a file of `bytes` at `path`. An existing one is replaced by a new inode: those who have
    /// it open keep it.
    pub fn put(&self, path: impl AsRef<Path>, bytes: Vec<u8>) {
        let path = normal(path.as_ref());
        let mut state = self.state.lock();
        let file = state.make_file(&path, bytes);
        state.files.insert(path, file);
    }

    /// Removes the file at `path`: those who have it open keep it.
    pub fn remove(&self, path: impl AsRef<Path>) {
        self.state.lock().files.remove(&normal(path.as_ref()));
    }

    /// Changes the content of the file at `path` in place, as a writer of the same inode would.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn change(&self, path: impl AsRef<Path>, change: impl FnOnce(&mut Vec<u8>)) {
        let now_ns = self.state.lock().tick();
        self.with_file(path.as_ref(), |file| {
            file.change_durably(change);
            (file.mtime_ns, file.ctime_ns) = (now_ns, now_ns);
        });
    }

    /// Changes the content and sets the modification time back, as `touch -d` and `cp -p` do. The
    /// change time reveals it, as on a real file system.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn change_keeping_mtime(&self, path: impl AsRef<Path>, change: impl FnOnce(&mut Vec<u8>)) {
        let now_ns = self.state.lock().tick();
        self.with_file(path.as_ref(), |file| {
            file.change_durably(change);
            file.ctime_ns = now_ns;
        });
    }

    /// Changes the content but no time: a second change within one tick of the file system's clock.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn change_within_tick(&self, path: impl AsRef<Path>, change: impl FnOnce(&mut Vec<u8>)) {
        self.with_file(path.as_ref(), |file| file.change_durably(change));
    }

    /// How long reads of the file at `path` take from now on.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn set_latency(&self, path: impl AsRef<Path>, latency: Latency) {
        self.with_file(path.as_ref(), |file| file.latency = latency);
    }

    /// Adds a fault to the file at `path`. Reads are counted from now on.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn inject(&self, path: impl AsRef<Path>, fault: ReadFault) {
        self.with_file(path.as_ref(), |file| {
            file.reads = 0;
            file.faults.push(fault);
        });
    }

    /// Removes all faults of the file at `path`.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn heal(&self, path: impl AsRef<Path>) {
        self.with_file(path.as_ref(), |file| file.faults.clear());
    }

    /// How many reads of the file at `path` were started since the last fault was added.
    ///
    /// # Panics
    /// If there is no such file.
    pub fn reads_of(&self, path: impl AsRef<Path>) -> u64 {
        self.with_file(path.as_ref(), |file| file.reads)
    }

    /// The content of the sidecar of the layer at `path`, if it has one.
    pub fn sidecar(&self, path: impl AsRef<Path>) -> Option<Vec<u8>> {
        let file = self.state.lock().sidecars.get(&normal(path.as_ref())).cloned()?;
        let bytes = file.lock().bytes.clone();
        Some(bytes)
    }

    /// Falsifies the sidecar of the layer at `path`: `change` gets its content, whole and in place.
    /// Returns whether there is one.
    pub fn change_sidecar(
        &self,
        path: impl AsRef<Path>,
        change: impl FnOnce(&mut Vec<u8>),
    ) -> bool {
        let file = self.state.lock().sidecars.get(&normal(path.as_ref())).cloned();
        file.is_some_and(|file| {
            change(&mut file.lock().bytes);
            true
        })
    }

    /// Inverts one bit, drawn at random, of the sidecar of the layer at `path`. Returns the byte
    /// that it is in, or `None` if there is no bit to invert.
    pub fn flip_sidecar_bit(&self, path: impl AsRef<Path>) -> Option<usize> {
        let len = self.sidecar(path.as_ref())?.len();
        if len == 0 {
            return None;
        }
        let byte = usize::try_from(self.random_below(len as u64)).ok()?;
        let bit = self.random_below(8);
        self.change_sidecar(path, |bytes| bytes[byte] ^= 1 << bit);
        Some(byte)
    }

    /// Adds a fault to reads of the sidecar of the layer at `path`. Returns whether there is one.
    pub fn inject_sidecar(&self, path: impl AsRef<Path>, fault: ReadFault) -> bool {
        let file = self.state.lock().sidecars.get(&normal(path.as_ref())).cloned();
        file.is_some_and(|file| {
            let mut file = file.lock();
            file.reads = 0;
            file.faults.push(fault);
            true
        })
    }

    /// Whether sidecars may be written: the folder is writable or read-only.
    pub fn deny_sidecars(&self, denied: bool) {
        self.state.lock().sidecars_denied = denied;
    }

    /// Whether the memory that outlives a process is full.
    pub fn fill_memory(&self, is_full: bool) {
        self.state.lock().memory_is_full = is_full;
    }

    /// How much memory outlives a process, for each image, in bytes.
    pub fn set_log_capacity(&self, capacity: u64) {
        self.state.lock().memory_capacity = capacity;
    }

    /// Copies the logs of writers.
    pub fn copy_logs(&self) -> LogCopies {
        LogCopies(self.state.lock().redo_memories.clone())
    }

    /// Puts copies of logs in the place of what is there, or writes them into it; let some time
    /// pass before.
    pub fn put_back_logs(&self, LogCopies(copies): LogCopies, in_place: bool) {
        let state = &mut *self.state.lock();
        state.redo_memories = copies;
        let now_ns = state.now_ns;
        for memory in state.redo_memories.values_mut() {
            state.memories_made += 1;
            memory.put_back((!in_place).then_some(state.memories_made), now_ns);
        }
    }

    /// Whether file systems report that they were remounted; if not, only the times of files show
    /// it.
    pub fn report_remounts(&self, tells: bool) {
        self.state.lock().reports_remounts = tells;
    }

    fn with_file<T>(&self, path: &Path, act: impl FnOnce(&mut SimFile) -> T) -> T {
        let file = self.file(path).expect("the scenario named a file that is there");
        let mut file = file.lock();
        act(&mut file)
    }

    fn file(&self, path: &Path) -> Result<SharedFile> {
        let found = self.state.lock().files.get(&normal(path)).cloned();
        found.ok_or_else(|| {
            let what = format!("opening {}", path.display());
            Error::from_io(what, io::ErrorKind::NotFound.into())
        })
    }

    fn store(&self, file: SharedFile) -> Arc<dyn Store> {
        Arc::new(SimStore { world: self.clone(), file, writer: None })
    }

    fn tick(&self) -> i128 {
        self.state.lock().tick()
    }
}

impl Images for World {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        if name.as_os_str().is_empty() {
            let what = format!("{} names no file", referrer.display());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        Ok(referrer.parent().unwrap_or(Path::new("")).join(name))
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        let file = self.file(path)?;
        let identity = file.lock().identity();
        Ok(OpenImage { store: self.store(file), identity, content: ProofSlot::default() })
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        let file = self.file(path)?;
        let mut locked = file.lock();
        if locked.writer.upgrade().is_some() {
            let what = format!("{} is already open for writing", path.display());
            return Err(Error::new(ErrorKind::Denied, what));
        }
        let writer = Arc::new(());
        locked.writer = Arc::downgrade(&writer);
        // From now on durability matters.
        locked.journal();
        let identity = locked.identity();
        drop(locked);
        let store = Arc::new(SimStore { world: self.clone(), file, writer: Some(writer) });
        Ok(OpenImage { store, identity, content: ProofSlot::default() })
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        self.open(path)
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        // Readers have no locks in this world.
        self.open_writable(path).map(|image| Upgradable::new(image, || Ok(())))
    }

    fn open_alone(&self, path: &Path) -> Result<OpenImage> {
        self.open_writable(path)
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        self.file(path).map(|file| file.lock().identity())
    }

    fn sidecars(&self) -> &dyn mica_block::Sidecars {
        self
    }

    fn redo_logs(&self) -> &dyn mica_block::RedoLogs {
        self
    }

    fn now_ns(&self) -> i128 {
        self.state.lock().now_ns
    }
}

impl State {
    fn tick(&mut self) -> i128 {
        self.now_ns += TICK_NS;
        self.now_ns
    }

    fn random(&mut self) -> u64 {
        self.drawn += 1;
        mica_units::random_at(self.seed, self.drawn)
    }

    fn make_file(&mut self, path: &Path, bytes: Vec<u8>) -> SharedFile {
        let now_ns = self.tick();
        let inode = self.next_inode;
        self.next_inode += 1;
        Arc::new(Mutex::new(SimFile {
            path: path.to_owned(),
            bytes,
            inode,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            durable_ctime_ns: now_ns,
            latency: Latency::Flash,
            faults: Vec::new(),
            reads: 0,
            journal: None,
            writer: Weak::new(),
            dead: false,
        }))
    }
}

/// `path` without `.` and `..`: there are no symbolic links in this world.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            component => normal.push(component),
        }
    }
    normal
}

#[cfg(test)]
mod tests;
