//! Machines with a log each, processes on them, and the store that they share.

use mica_block::{
    EndFuture, Entry, Error, ErrorKind, Images, IoFuture, LocalFuture, Manage, Object, ObjectName,
    Objects, Put, PutFuture, PutPartsFuture, Result,
};
use mica_rt::{Buf, Parts, spawn};
use mica_sim::crash::loss_at_random;
use mica_sim::{Loss, World};
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects};
use mica_volume::{
    Compression, Durability, Encryption, Environment, LogDevice, NewVolume, Opening, Volume,
    VolumeKey, VolumeName, Volumes,
};
use std::future::pending;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Length of a log: few short segments, so that it is full soon.
const LOG_LEN: usize = 4096 + 6 * (16 << 10);

/// See the module.
pub(crate) struct Machines {
    pub(crate) world: World,
    pub(crate) memory: MemoryObjects,
    next: Arc<AtomicU64>,
}

/// How a process dies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Death {
    /// What it wrote stays.
    Killed,
    /// With its machine.
    PowerCut(Loss),
}

/// A process: all its requests to the store go through its life.
#[derive(Clone)]
pub(crate) struct Life {
    world: World,
    memory: MemoryObjects,
    /// Requests until it dies; 0 if it is dead.
    left: Arc<AtomicU64>,
    death: Death,
    is_down: Arc<AtomicBool>,
}

/// What becomes of a request.
enum Fate {
    Done,
    /// The store does not answer: an error.
    Fails,
    /// Nobody waits for it any more.
    Never,
}

impl Life {
    /// The store answers no more, or again.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Relaxed);
    }

    pub(crate) fn die(&self) {
        if self.left.swap(0, Ordering::Relaxed) > 0 {
            match self.death {
                Death::Killed => self.world.kill(),
                Death::PowerCut(loss) => {
                    // The store may be a directory of the machine.
                    self.memory.cut_power();
                    self.world.cut_power(loss);
                }
            }
        }
    }

    /// Counts a request.
    fn step(&self) -> Fate {
        let left = self.left.load(Ordering::Relaxed);
        if left == 1 {
            self.die();
        } else if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        match left > 1 {
            true if self.is_down.load(Ordering::Relaxed) => Fate::Fails,
            true => Fate::Done,
            false => Fate::Never,
        }
    }

    fn down<T>() -> Result<T> {
        Err(Error::new(ErrorKind::Io, "injected: the store is down"))
    }
}

/// What a process has.
pub(crate) struct Process {
    pub(crate) life: Life,
    pub(crate) volumes: Volumes,
    pub(crate) device: Option<Arc<LogDevice>>,
}

/// What does not come to an end within this simulated time never will.
pub(crate) const PATIENCE: Duration = Duration::from_secs(3600);

/// How a process is made.
#[derive(Clone, Copy)]
pub(crate) struct Plan {
    pub(crate) machine: usize,
    pub(crate) has_log: bool,
    pub(crate) durability: Durability,
    pub(crate) faults: FaultyOptions,
    pub(crate) steps: u64,
    pub(crate) death: Death,
}

impl Plan {
    /// A process on `machine`. If its store is bad, it refuses this share of the requests; if it
    /// dies by itself, after so many `steps`.
    pub(crate) fn draw(
        machines: &Machines,
        machine: usize,
        refused: f64,
        steps: Range<u64>,
    ) -> Self {
        let below = |bound| machines.below(bound);
        let has_log = below(4) > 0;
        let durability = match has_log && below(2) == 0 {
            true => Durability::Host,
            false => Durability::Store,
        };
        let is_bad = below(2) == 0;
        let share = |share| if is_bad { share } else { 0.0 };
        let faults = FaultyOptions {
            seed: below(1 << 40),
            refused: share(refused),
            lost: share(0.05),
            late: share(0.03),
            slow: share(0.1),
            slow_by: Duration::from_millis(300),
            ..FaultyOptions::default()
        };
        let is_mortal = below(2) == 0;
        let steps = if is_mortal { steps.start + below(steps.end - steps.start) } else { u64::MAX };
        let death = match below(2) {
            0 => Death::Killed,
            _ => Death::PowerCut(loss_at_random(&machines.world)),
        };
        Self { machine, has_log, durability, faults, steps, death }
    }

    /// Makes it.
    ///
    /// # Errors
    /// As [`Machines::process`].
    pub(crate) async fn begin(&self, machines: &Machines) -> Result<Process> {
        let mortal = (self.steps, self.death);
        machines.process(self.machine, self.has_log, &self.faults, mortal).await
    }
}

impl std::fmt::Debug for Plan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { machine, has_log, durability, death, .. } = self;
        write!(f, "host-{machine}, log: {has_log}, {durability:?}, {death:?}")
    }
}

pub(crate) fn name() -> VolumeName {
    VolumeName::new("web").unwrap()
}

impl Machines {
    pub(crate) fn new(world: &World, count: usize) -> Self {
        for machine in 0..count {
            world.put(log_path(machine), vec![0; LOG_LEN]);
        }
        let memory = MemoryObjects::new("memory").with_latency(Duration::from_millis(2));
        Self { world: world.clone(), memory, next: Arc::new(AtomicU64::new(1)) }
    }

    /// What a volume of this world is: compressed or not, encrypted or not.
    pub(crate) fn kind(&self) -> NewVolume {
        let compression = if self.below(2) == 0 { Compression::None } else { Compression::Zstd };
        let encryption = if self.below(2) == 0 { Encryption::None } else { Encryption::WithKey };
        NewVolume { compression, encryption }
    }

    pub(crate) fn below(&self, bound: u64) -> u64 {
        self.world.random_below(bound)
    }

    /// A process on `machine` that dies after so many requests to the store.
    pub(crate) async fn process(
        &self,
        machine: usize,
        has_log: bool,
        faults: &FaultyOptions,
        (steps, death): (u64, Death),
    ) -> Result<Process> {
        let left = Arc::new(AtomicU64::new(steps));
        let (world, memory) = (self.world.clone(), self.memory.clone());
        let life = Life { world, memory, left, death, is_down: Arc::default() };
        let faulty = FaultyObjects::new(Arc::new(self.memory.clone()), *faults);
        let objects: Arc<dyn Objects> =
            Arc::new(Mortal { inner: Arc::new(faulty), life: life.clone() });
        let next = Arc::clone(&self.next);
        let random = move || {
            let number = next.fetch_add(1, Ordering::Relaxed).to_le_bytes();
            let mut id = [0; 16];
            id[..8].copy_from_slice(&number);
            // Numbers of writers with logs depend on these.
            id[14..].copy_from_slice(&number[..2]);
            id
        };
        let device = match has_log {
            false => None,
            true => {
                let store = self.world.open_writable(&log_path(machine))?.store;
                Some(LogDevice::open(store, random()).await?)
            }
        };
        let clock = Arc::clone(&self.next);
        let now = move || clock.fetch_add(1, Ordering::Relaxed) * 1_000_000;
        let environment = Environment::new(format!("host-{machine}"), now, random);
        let volumes = Volumes::open_or_make(objects, environment, 1 << 16).await?;
        let volumes = volumes.with_key(Some(Arc::new(VolumeKey::of_file("key", &[7; 32])?)));
        Ok(Process { life, volumes, device })
    }

    /// A process that lives, over a store without faults.
    pub(crate) async fn sound(&self, machine: usize, has_log: bool) -> Process {
        let options = FaultyOptions::default();
        let process = self.process(machine, has_log, &options, (u64::MAX, Death::Killed));
        process.await.unwrap()
    }
}

impl Process {
    /// Opens the volume, and tends it.
    pub(crate) async fn open(&self, opening: Opening) -> Result<Arc<Volume>> {
        let opening = Opening { log: self.device.clone(), ..opening };
        let volume = Arc::new(self.volumes.open_volume(&name(), opening).await?);
        let tended = Arc::clone(&volume);
        drop(spawn(async move { tended.tend().await }));
        Ok(volume)
    }
}

fn log_path(machine: usize) -> PathBuf {
    format!("/log-{machine}").into()
}

/// A store as a process sees it that dies.
struct Mortal {
    inner: Arc<dyn Objects>,
    life: Life,
}

impl Objects for Mortal {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn is_far(&self) -> bool {
        self.inner.is_far()
    }

    fn open(&self, name: &ObjectName) -> Arc<dyn Object> {
        Arc::new(MortalObject { inner: self.inner.open(name), life: self.life.clone() })
    }

    fn put_if_absent(&self, name: &ObjectName, content: Buf) -> PutFuture {
        match self.life.step() {
            Fate::Done => self.inner.put_if_absent(name, content),
            Fate::Fails => Box::pin(async { (Life::down(), content) }),
            Fate::Never => Box::pin(pending::<(Result<Put>, Buf)>()),
        }
    }

    fn put_parts(&self, name: &ObjectName, content: &Arc<Parts>) -> Option<PutPartsFuture> {
        match self.life.step() {
            Fate::Done => self.inner.put_parts(name, content),
            Fate::Fails => Some(Box::pin(async { Life::down() })),
            Fate::Never => Some(Box::pin(pending())),
        }
    }

    fn put_early(&self, name: &ObjectName, content: Buf) -> PutFuture {
        match self.life.step() {
            Fate::Done => self.inner.put_early(name, content),
            Fate::Fails => Box::pin(async { (Life::down(), content) }),
            Fate::Never => Box::pin(pending::<(Result<Put>, Buf)>()),
        }
    }

    fn list(
        &self,
        folder: Option<&ObjectName>,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        match self.life.step() {
            Fate::Done => self.inner.list(folder, after),
            Fate::Fails => Box::pin(async { Life::down() }),
            Fate::Never => Box::pin(pending()),
        }
    }

    fn list_all(
        &self,
        folder: &ObjectName,
        after: Option<&ObjectName>,
    ) -> LocalFuture<'static, Result<Vec<Entry>>> {
        match self.life.step() {
            Fate::Done => self.inner.list_all(folder, after),
            Fate::Fails => Box::pin(async { Life::down() }),
            Fate::Never => Box::pin(pending()),
        }
    }

    fn delete(&self, name: &ObjectName) -> LocalFuture<'static, Result<()>> {
        match self.life.step() {
            Fate::Done => self.inner.delete(name),
            Fate::Fails => Box::pin(async { Life::down() }),
            Fate::Never => Box::pin(pending()),
        }
    }

    fn punch(&self, name: &ObjectName, ranges: &[Range<u64>]) -> LocalFuture<'static, Result<u64>> {
        match self.life.step() {
            Fate::Done => self.inner.punch(name, ranges),
            Fate::Fails => Box::pin(async { Life::down() }),
            Fate::Never => Box::pin(pending()),
        }
    }
}

struct MortalObject {
    inner: Arc<dyn Object>,
    life: Life,
}

impl Object for MortalObject {
    fn read_at(&self, buf: Buf, offset: u64) -> IoFuture {
        match self.life.step() {
            Fate::Done => self.inner.read_at(buf, offset),
            Fate::Fails => IoFuture::boxed(async { (Life::down(), buf) }),
            Fate::Never => IoFuture::boxed(pending()),
        }
    }

    fn read_end(&self, buf: Buf) -> EndFuture {
        match self.life.step() {
            Fate::Done => self.inner.read_end(buf),
            Fate::Fails => Box::pin(async { (Life::down(), buf) }),
            Fate::Never => Box::pin(pending()),
        }
    }
}
