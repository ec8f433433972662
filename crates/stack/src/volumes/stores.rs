//! The stores that a process uses: each is opened once, whatever disks are in it.

use super::bucket;
use super::collecting::Collecting;
use super::faults::StoreFaults;
use super::logs::{LogPlace, Logs};
use super::machine::host;
use super::promises::{AllPromises, PromisedObjects};
use super::url::StoreUrl;
use super::waiting::{WaitedFor, Waiting};
use crate::files::{sync_folder_of, unless_denied};
use mica_block::{Error, ErrorKind, Objects, Result};
use mica_rados::{PoolOptions, ReconnectingPool};
use mica_store::Handles;
use mica_store::object::{DirectoryObjects, MemoryObjects};
use mica_volume::{Environment, LogDevice, Volumes};
use parking_lot::{Mutex, MutexGuard};
use rustix::rand::{GetRandomFlags, getrandom};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{SystemTime, UNIX_EPOCH};

/// How long requests to a store may fail: volumes repeat them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    /// For seconds: somebody waits for a verb.
    Verb,
    /// Those to a disk for as long as it takes: a guest must not see an error for an outage.
    Guest,
}

/// The stores of a process.
pub struct Stores {
    handles: Arc<Handles>,
    cache_bytes: u64,
    patience: Patience,
    /// By where they are, and how they misbehave.
    open: Mutex<BTreeMap<(StoreUrl, StoreFaults), Weak<Store>>>,
    promises: AllPromises,
    /// Those in memory live as long as the process.
    in_memory: Mutex<BTreeMap<String, MemoryObjects>>,
    logs: Logs,
}

/// A store that is open.
pub struct Store {
    url: StoreUrl,
    volumes: Volumes,
    pub(super) collecting: Mutex<Collecting>,
}

impl Stores {
    /// No stores yet. Their files are opened through `handles`; the cache of each takes about
    /// `cache_bytes`.
    pub fn new(handles: Arc<Handles>, cache_bytes: u64, patience: Patience) -> Self {
        let (open, promises, in_memory, logs) = Default::default();
        Self { handles, cache_bytes, patience, open, promises, in_memory, logs }
    }

    /// The log at `place`, which all volumes of the process share that have it.
    pub(super) async fn log(&self, place: &LogPlace) -> Result<Arc<LogDevice>> {
        self.logs.open(place, &self.handles, random_id()?).await
    }

    /// The log at `path`, which is there and no server has open, to look at it or to give up what
    /// nobody needs.
    ///
    /// # Errors
    /// `NotFound` if nothing is there, `Invalid` if it is something else; `Denied` if another
    /// process has it open.
    pub async fn existing_log(&self, path: &Path) -> Result<Arc<LogDevice>> {
        Logs::open_existing(path, &self.handles, random_id()?).await
    }

    /// The store at `url`, which has volumes.
    ///
    /// # Errors
    /// `NotFound` if there is none; otherwise what it reports.
    pub async fn open(&self, url: &StoreUrl) -> Result<Arc<Store>> {
        self.open_with(url, &StoreFaults::NONE).await
    }

    /// As [`Self::open`], for those who look in several places: `None` if there is none, which
    /// costs one request.
    ///
    /// # Errors
    /// What it reports.
    pub async fn find(&self, url: &StoreUrl) -> Result<Option<Arc<Store>>> {
        let named = (url.clone(), StoreFaults::NONE);
        if let Some(store) = self.known(&named) {
            return Ok(Some(store));
        }
        let objects = match self.reach(url) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            reached => self.there(&named, reached?),
        };
        let volumes = Volumes::find(objects, environment()?, self.cache_bytes).await?;
        Ok(volumes.map(|volumes| self.keep(named, volumes)))
    }

    /// As [`Self::open`], with faults: those who name others, or none, have another one.
    pub(super) async fn open_with(
        &self,
        url: &StoreUrl,
        faults: &StoreFaults,
    ) -> Result<Arc<Store>> {
        let named = (url.clone(), faults.clone());
        if let Some(store) = self.known(&named) {
            return Ok(store);
        }
        let objects = self.there(&named, faults.stack_on(self.reach(url)?)?);
        let volumes = Volumes::open(objects, environment()?, self.cache_bytes).await?;
        Ok(self.keep(named, volumes))
    }

    /// As [`Self::open`]; makes a store of what is empty, and a directory for it in one that there
    /// is. A store that breaks its promises is refused.
    ///
    /// # Errors
    /// `Unsupported` if it breaks its promises; `Invalid` if something else is there.
    pub async fn open_or_make(&self, url: &StoreUrl) -> Result<Arc<Store>> {
        if let Some(store) = self.find(url).await? {
            return Ok(store);
        }
        if let StoreUrl::Directory(path) = url {
            self.check_no_store_above(path).await?;
            make_directory(path, sync_folder_of)?;
        }
        let named = (url.clone(), StoreFaults::NONE);
        let objects = self.promised(&named, self.waited_for(url, self.reach(url)?));
        let volumes = Volumes::open_or_make(objects, environment()?, self.cache_bytes).await?;
        Ok(self.keep(named, volumes))
    }

    /// Checks that no store is made inside another one: names of volumes have no slash.
    async fn check_no_store_above(&self, path: &Path) -> Result<()> {
        let Some(above) = path.parent().filter(|_| !path.exists()) else { return Ok(()) };
        let above = StoreUrl::Directory(above.to_owned());
        if !matches!(self.find(&above).await, Ok(Some(_))) {
            return Ok(());
        }
        let path = path.display();
        let what = format!(
            "{above} is a store, in which {path} would be another: names of volumes have no slash"
        );
        Err(Error::new(ErrorKind::Invalid, what))
    }

    /// Those that are open.
    pub(super) fn all(&self) -> Vec<Arc<Store>> {
        self.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The one that is open already.
    fn known(&self, named: &(StoreUrl, StoreFaults)) -> Option<Arc<Store>> {
        self.lock().get(named).and_then(Weak::upgrade)
    }

    /// Keeps a store that was opened, unless somebody else was faster.
    fn keep(&self, named: (StoreUrl, StoreFaults), volumes: Volumes) -> Arc<Store> {
        let volumes = match self.patience {
            Patience::Guest => volumes,
            Patience::Verb => volumes.for_verbs(),
        };
        let mut open = self.lock();
        if let Some(store) = open.get(&named).and_then(Weak::upgrade) {
            return store;
        }
        open.retain(|_, store| store.strong_count() > 0);
        let (url, collecting) = (named.0.clone(), Mutex::default());
        let store = Arc::new(Store { url, volumes, collecting });
        open.insert(named, Arc::downgrade(&store));
        store
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<(StoreUrl, StoreFaults), Weak<Store>>> {
        self.open.lock()
    }

    /// The store that is reached by `objects`, which was made earlier. It may have changed its ways
    /// since if it is elsewhere: a service is updated, or another one answers at its address. A
    /// directory does not.
    fn there(
        &self,
        named: &(StoreUrl, StoreFaults),
        objects: Arc<dyn Objects>,
    ) -> Arc<dyn Objects> {
        let objects = self.waited_for(&named.0, objects);
        if named.0.is_remote() { self.promised(named, objects) } else { objects }
    }

    /// The same, of which nobody has to ask whether it keeps its promises.
    fn promised(
        &self,
        named: &(StoreUrl, StoreFaults),
        objects: Arc<dyn Objects>,
    ) -> Arc<dyn Objects> {
        Arc::new(PromisedObjects::new(objects, self.promises.of(named), random_numbers))
    }

    /// The store at `url`, of which a server says that it does not answer, and a verb if it is
    /// elsewhere.
    fn waited_for(&self, url: &StoreUrl, objects: Arc<dyn Objects>) -> Arc<dyn Objects> {
        let waiting = match (self.patience, url) {
            (_, StoreUrl::Memory(_)) | (Patience::Verb, StoreUrl::Directory(_)) => return objects,
            (Patience::Verb, StoreUrl::Bucket { .. }) => {
                Waiting::Verb(Some(mica_s3::REQUEST_LIMIT))
            }
            (Patience::Verb, StoreUrl::Pool { .. }) => Waiting::Verb(None),
            (Patience::Guest, _) => Waiting::Server,
        };
        Arc::new(WaitedFor::new(objects, waiting))
    }

    fn reach(&self, url: &StoreUrl) -> Result<Arc<dyn Objects>> {
        Ok(match url {
            StoreUrl::Directory(path) => {
                let objects = DirectoryObjects::open(path, &self.handles);
                Arc::new(objects.map_err(|error| missing(path, error))?)
            }
            StoreUrl::Bucket { bucket: name, prefix } => {
                Arc::new(bucket::open(url, name, prefix.as_ref())?)
            }
            StoreUrl::Pool { pool, prefix } => {
                let options = PoolOptions { namespace: prefix.clone(), ..PoolOptions::new(pool) };
                Arc::new(ReconnectingPool::open(options)?)
            }
            StoreUrl::Memory(name) => {
                let mut in_memory = self.in_memory.lock();
                let new = || MemoryObjects::new(format!("memory:{name}"));
                Arc::new(in_memory.entry(name.clone()).or_insert_with(new).clone())
            }
        })
    }
}

impl Store {
    /// Where it is.
    pub fn url(&self) -> &StoreUrl {
        &self.url
    }

    /// Its volumes.
    pub fn volumes(&self) -> &Volumes {
        &self.volumes
    }

    /// Its directory, if it is in one of this machine.
    pub(super) fn directory(&self) -> Option<&Path> {
        match &self.url {
            StoreUrl::Directory(path) => Some(path),
            _ => None,
        }
    }

    /// Whether it is elsewhere.
    pub fn is_remote(&self) -> bool {
        self.url.is_remote()
    }
}

#[cfg(test)]
impl Store {
    /// The store in `objects`, as if it were in a bucket.
    pub(super) async fn of_bucket(objects: Arc<dyn Objects>) -> Result<Self> {
        let objects = Arc::new(PromisedObjects::new(objects, Arc::default(), random_numbers));
        let volumes = Volumes::open_or_make(objects, environment()?, 1 << 20).await?;
        let (url, collecting) = ("s3://bucket/volumes".parse()?, Mutex::default());
        Ok(Self { url, volumes, collecting })
    }
}

/// Makes the directory of a new store. The one that it is in must be there: it may be a file
/// system that is not mounted. Its name is durable before anything is in it, also if somebody else
/// has just made it, or was killed then.
fn make_directory(path: &Path, sync: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    match std::fs::create_dir(path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(missing(path, Error::from_io(format!("making {}", path.display()), error)))
        }
        Ok(()) => sync(path).inspect_err(|_| {
            // The first failure is reported.
            let _ = std::fs::remove_dir(path);
        }),
        Err(_) => unless_denied(sync(path)),
    }
}

/// Says what to do about a directory that is not there.
fn missing(path: &Path, error: Error) -> Error {
    if error.kind() != ErrorKind::NotFound {
        return error;
    }
    let parent = path.parent().filter(|parent| !parent.is_dir());
    let folder = parent.map_or_else(|| path.to_owned(), PathBuf::from);
    let what = match folder.exists() {
        true => format!("{} is a file, and no directory", folder.display()),
        false => format!("there is no directory {}", folder.display()),
    };
    Error::new(ErrorKind::NotFound, what)
}

/// What volumes need of this machine.
fn environment() -> Result<Environment> {
    // Fails here rather than when a number is needed.
    random_numbers()?;
    let random = || random_id().expect("the system had random numbers before");
    let now = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
    };
    Ok(Environment::new(host(), now, random))
}

fn random_id() -> Result<[u8; 16]> {
    let [high, low] = random_numbers()?;
    let mut id = [0; 16];
    id[..8].copy_from_slice(&high.to_le_bytes());
    id[8..].copy_from_slice(&low.to_le_bytes());
    Ok(id)
}

/// Random numbers of the system.
fn random_numbers() -> Result<[u64; 2]> {
    let mut bytes = [0; 16];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| Error::from_io("random numbers", error.into()))?;
    if filled < bytes.len() {
        return Err(Error::new(ErrorKind::Io, "the system has too few random numbers"));
    }
    let [high, low] = [0, 8].map(|at| {
        let mut number = [0; 8];
        number.copy_from_slice(&bytes[at..at + 8]);
        u64::from_le_bytes(number)
    });
    Ok([high, low])
}

#[cfg(test)]
mod tests {
    use super::super::tests::{kind, run};
    use super::*;
    use mica_block::{ObjectName, Which};
    use mica_store::object::{FaultyObjects, FaultyOptions, Lie, ObjectOperation};
    use mica_volume::{Claimed, Encryption, NewVolume, ReceiveOptions, VolumeName};

    /// The story: a store that had failed its probe when a volume was made in it was taken at the
    /// second try, and by all verbs but one.
    #[test]
    fn store_that_lies_is_refused_by_whatever_puts_something_however_often_it_is_asked() {
        run(async {
            let memory = MemoryObjects::new("memory");
            let name = VolumeName::new("web").expect("a name");
            let honest = Store::of_bucket(Arc::new(memory.clone())).await.expect("made");
            let volumes = honest.volumes();
            volumes.create(&name, 1 << 20).await.expect("made");
            let which =
                Which::Number(volumes.take_snapshot(&name, "s").await.expect("taken").number);
            let mut stream = Vec::new();
            let out = |bytes: &[u8]| {
                stream.extend_from_slice(bytes);
                Ok(())
            };
            volumes.send(&name, &which, (None, false), out, |_| ()).await.expect("sent");
            let before = memory.contents();
            let lie = Some(Lie::IgnoresCondition);
            let lying = FaultyOptions { lie, ..FaultyOptions::default() };
            let lying = Arc::new(FaultyObjects::new(Arc::new(memory.clone()), lying));
            let store = Arc::new(Store::of_bucket(lying).await.expect("it was made before"));
            let stores = Stores::new(Handles::new(8), 1 << 20, Patience::Verb);
            let named = (store.url().clone(), StoreFaults::NONE);
            stores.lock().insert(named, Arc::downgrade(&store));
            let other = VolumeName::new("other").expect("a name");
            for _ in 0..2 {
                let there = stores.open_or_make(store.url()).await.expect("it was made before");
                let made = there.volumes().create(&other, 1 << 20).await;
                assert_eq!(kind(made), ErrorKind::Unsupported);
            }
            let _held = store.settle(&name).await.expect("nothing is put for that");
            let (volumes, options) = (store.volumes(), (ReceiveOptions::default(), None));
            let refusals = [
                kind(volumes.take_snapshot(&name, "").await),
                kind(volumes.open_volume(&name, Claimed::TakeOver).await),
                kind(store.delete(&name, true).await),
                kind(store.clone_volume(&name, None, &other).await),
                kind(store.begin_import(&other, 1 << 20, None, NewVolume::default()).await),
                kind(store.receive(&other, options, &mut &stream[..], |_| ()).await),
            ];
            assert_eq!(refusals, [ErrorKind::Unsupported; 6]);
            assert_eq!(memory.contents(), before);
        });
    }

    /// The story: whoever mistyped the name of a volume, or imported to one that there was, waited
    /// for a probe, and left objects in a bucket that may be written for money, before he was told.
    #[test]
    fn verb_that_is_wrong_in_any_case_says_so_and_puts_nothing() {
        run(async {
            let memory = MemoryObjects::new("memory");
            let [web, other] = ["web", "other"].map(|name| VolumeName::new(name).expect("a name"));
            let made = Store::of_bucket(Arc::new(memory.clone())).await.expect("made");
            made.volumes().create(&web, 1 << 20).await.expect("made");
            let only = Some(ObjectOperation::Put);
            let options = FaultyOptions { only, ..FaultyOptions::default() };
            let counting = Arc::new(FaultyObjects::new(Arc::new(memory.clone()), options));
            let store = Store::of_bucket(counting.clone()).await.expect("it is there");
            let (new, no) = (NewVolume::default(), Which::Label("no".to_owned()));
            let encrypted = NewVolume { encryption: Encryption::WithKey, ..new };
            let (not_there, taken) = (ErrorKind::NotFound, ErrorKind::Invalid);
            for (refused, expected) in [
                (kind(store.clone_volume(&other, None, &web).await), not_there),
                (kind(store.clone_volume(&web, Some(&no), &other).await), not_there),
                (kind(store.clone_volume(&web, None, &web).await), taken),
                (kind(store.begin_import(&web, 1 << 20, None, new).await), taken),
                (kind(store.begin_import(&other, 1, None, new).await), taken),
                (kind(store.begin_import(&other, 1 << 20, None, encrypted).await), taken),
                (kind(store.settle(&other).await), not_there),
                (kind(store.delete(&other, true).await), not_there),
            ] {
                assert_eq!(refused, expected);
                assert_eq!(counting.requests(), 0);
            }
            // What is not wrong is found out once.
            store.clone_volume(&web, None, &other).await.expect("cloned");
            let probed = counting.requests();
            assert!(probed > 40, "dozens of puts race");
            store.delete(&other, false).await.expect("deleted");
            assert!(counting.requests() < probed + 40);
        });
    }

    /// The story: each disk that came back to a server, after the last one of its store had gone,
    /// waited for another probe.
    #[test]
    fn store_that_kept_its_promises_is_not_probed_when_it_is_opened_again() {
        run(async {
            let memory = Arc::new(MemoryObjects::new("memory"));
            let counting = Arc::new(FaultyObjects::new(memory, FaultyOptions::default()));
            let stores = Stores::new(Handles::new(8), 1 << 20, Patience::Guest);
            let url: StoreUrl = "s3://bucket/volumes".parse().expect("a URL");
            let named = (url.clone(), StoreFaults::NONE);
            let requests = async || {
                let (store, before) = (stores.there(&named, counting.clone()), counting.requests());
                let name = ObjectName::new("name").expect("a name");
                store.delete(&name).await.expect("its promises are kept");
                counting.requests() - before
            };
            assert!(requests().await > 40, "dozens of puts race");
            assert_eq!(requests().await, 1);
            let faults = StoreFaults::new(&["lie=racers-win".to_owned()]).expect("a fault");
            let other = stores.promises.of(&(url, faults));
            assert!(!other.are_kept(), "with a fault it is another store");
        });
    }

    #[test]
    fn nothing_that_says_it_is_a_store_is_left_in_one_that_failed_its_probe() {
        run(async {
            let memory = MemoryObjects::new("memory");
            let objects: Arc<dyn Objects> = Arc::new(memory.clone());
            let lie = Some(Lie::IgnoresCondition);
            let lying = FaultyOptions { lie, ..FaultyOptions::default() };
            let lying: Arc<dyn Objects> = Arc::new(FaultyObjects::new(objects, lying));
            let stores = Stores::new(Handles::new(8), 1 << 20, Patience::Guest);
            let named = (StoreUrl::Directory("/srv".into()), StoreFaults::NONE);
            for _ in 0..2 {
                let lying = stores.promised(&named, Arc::clone(&lying));
                let made = Volumes::open_or_make(lying, environment().expect("one"), 1 << 20);
                assert_eq!(kind(made.await), ErrorKind::Unsupported);
                assert!(memory.contents().is_empty());
            }
        });
    }

    /// The story: a machine lost its power soon after its first volume was made, and the store's
    /// directory was gone: everything in it had been synced, and the folder that it is in had not.
    #[test]
    fn directory_of_a_store_is_durable_before_anything_is_in_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("vols");
        let no = |kind| Err(Error::new(kind, "no"));
        let failed = make_directory(&path, |_| no(ErrorKind::Io));
        assert_eq!(failed.expect_err("it is said").kind(), ErrorKind::Io);
        assert!(!path.exists());
        let mut synced = Vec::new();
        for _ in 0..2 {
            let made = make_directory(&path, |path| {
                synced.push(path.to_owned());
                Ok(())
            });
            made.expect("made");
        }
        assert_eq!(synced, [path.clone(), path.clone()]);
        // Whoever made it may have to do without.
        make_directory(&path, |_| no(ErrorKind::Denied)).expect("it is there");
    }
}
