//! The crash scenario on a raw disk that is right, and on disks that are wrong on purpose: it must
//! pass the one and catch each of the others. The raw disk of production is tried too.

#![expect(clippy::unwrap_used, reason = "a test stops where it cannot continue")]
#![expect(clippy::cast_possible_truncation, reason = "numbers below 256")]

use mica_block::{
    Disk, Error, ErrorKind, Extent, ExtentKind, Geometry, Images, IoFuture, LocalFuture, Manage,
    Plan, Planned, Result, Space, Store, Unmanaged, Writing, Zeroes,
};
use mica_rt::{Backend, Buf, Executor};
use mica_sim::crash::{Crashes, Cut, Mode, Subject, cut_at_random, load_at_random, loss_at_random};
use mica_sim::{ChangeFault, ModelDisk, Operation, World, scenario};
use mica_units::{GuestOffset, GuestRange, HostOffset, LayerNumber};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::Duration;

const DISK_BYTES: usize = 64 << 10;
const PATH: &str = "/disk.raw";
const EIO: i32 = 5;
const ENOSPC: i32 = 28;

/// What is wrong with a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Flaw {
    /// Nothing.
    None,
    /// A flush does nothing.
    FlushWithoutSync,
    /// A flush is acknowledged before its sync is done.
    FlushBeforeItsSync,
    /// A flush that arrives while another one's sync is in flight waits only for that.
    FlushSharesTheSyncUnderWay,
    /// A write is acknowledged before it is done.
    WriteBeforeItIsDone,
    /// One write in twenty is acknowledged and not done.
    LostWrite,
    /// The last sector of longer writes is not written.
    ShortWrite,
    /// One write in ten is one sector off.
    AstrayWrite,
    /// The second half of the last sector is not written.
    TornSector,
    /// A discard frees space some time after it was acknowledged.
    LateDiscard,
    /// Zeroes do nothing.
    LostZeroes,
    /// A read may return what was read before its start.
    StaleRead,
    /// A failed sync is retried.
    SyncTriedAgain,
    /// A failed sync is ignored.
    SyncErrorSwallowed,
    /// A failed write is ignored.
    WriteErrorSwallowed,
}

/// A raw file as a disk.
struct Raw {
    store: Arc<dyn Store>,
    world: World,
    flaw: Flaw,
    syncs: AtomicU64,
    latched: AtomicBool,
}

impl Raw {
    fn one_in(&self, count: u64) -> bool {
        self.world.random_below(count) == 0
    }

    async fn write_at(&self, at: GuestOffset, mut buf: Buf) -> (Result<()>, Buf) {
        let mut host = HostOffset::new(at.bytes());
        match self.flaw {
            _ if self.latched.load(SeqCst) => return (Err(failed_before()), buf),
            Flaw::WriteBeforeItIsDone => {
                drop(self.store.write_at(Buf::from_slice(&buf), host));
                return (Ok(()), buf);
            }
            Flaw::LostWrite if self.one_in(20) => return (Ok(()), buf),
            Flaw::ShortWrite if buf.len() > 512 => buf.truncate(buf.len() - 512),
            Flaw::AstrayWrite if self.one_in(10) => {
                host = HostOffset::new(at.bytes().saturating_sub(512));
            }
            Flaw::TornSector => buf.truncate(buf.len() - 256),
            _ => {}
        }
        match self.store.write_at(buf, host).await {
            (Err(_), buf) if self.flaw == Flaw::WriteErrorSwallowed => (Ok(()), buf),
            done => done,
        }
    }

    async fn sync(&self) -> Result<()> {
        match self.flaw {
            _ if self.latched.load(SeqCst) => return Err(failed_before()),
            Flaw::FlushWithoutSync => return Ok(()),
            Flaw::FlushBeforeItsSync => {
                drop(self.store.sync());
                return Ok(());
            }
            Flaw::FlushSharesTheSyncUnderWay if self.syncs.load(SeqCst) > 0 => {
                while self.syncs.load(SeqCst) > 0 {
                    mica_rt::sleep(Duration::from_micros(5)).await;
                }
                return Ok(());
            }
            _ => {}
        }
        self.syncs.fetch_add(1, SeqCst);
        let result = self.store.sync().await;
        self.syncs.fetch_sub(1, SeqCst);
        match (result, self.flaw) {
            (Err(_), Flaw::SyncTriedAgain) => self.store.sync().await,
            (Err(_), Flaw::SyncErrorSwallowed) => Ok(()),
            (Err(error), _) => {
                self.latched.store(true, SeqCst);
                Err(error)
            }
            // The sync of another flush failed meanwhile.
            (Ok(()), _) if self.latched.load(SeqCst) => Err(failed_before()),
            (Ok(()), _) => Ok(()),
        }
    }
}

fn failed_before() -> Error {
    Error::new(ErrorKind::Io, "a sync failed before")
}

impl Disk for Raw {
    fn geometry(&self) -> Geometry {
        Geometry { len: DISK_BYTES as u64, preferred_bytes: 4096 }
    }

    fn plan(&self, range: GuestRange, mut extents: Vec<Extent>) -> Planned<'_> {
        let (start, len, kind) = (range.start(), range.len(), ExtentKind::Data);
        let host = HostOffset::new(start.bytes());
        extents.push(Extent { start, len, kind, layer: LayerNumber::BASE, host });
        Planned::Ready(Ok(Plan::untracked(extents)))
    }

    fn read(&self, extent: &Extent, buf: Buf) -> IoFuture {
        let read = self.store.read_at(buf, extent.host);
        if self.flaw != Flaw::StaleRead {
            return read;
        }
        let (world, store, at) = (self.world.clone(), Arc::clone(&self.store), extent.host);
        IoFuture::boxed(async move {
            let (result, buf) = read.await;
            // As a cache that misses a write: the first sector has its initial content.
            if at == HostOffset::ZERO && world.random_below(4) == 0 {
                let mut stale = buf;
                stale.put(0, &initial()[..512]);
                drop(store);
                return (result, stale);
            }
            (result, buf)
        })
    }

    fn is_writable(&self) -> bool {
        true
    }

    fn write(&self, at: GuestOffset, buf: Buf) -> Writing<'_> {
        Writing::Boxed(Box::pin(self.write_at(at, buf)))
    }

    fn write_zeroes(&self, range: GuestRange, _: Zeroes) -> LocalFuture<'_, Result<()>> {
        Box::pin(async move {
            let len = usize::try_from(range.len()).unwrap();
            match self.flaw {
                Flaw::LostZeroes => Ok(()),
                _ => self.write_at(range.start(), Buf::zeroed(len)).await.0,
            }
        })
    }

    fn discard(&self, range: GuestRange) -> LocalFuture<'_, Result<()>> {
        let host = HostOffset::new(range.start().bytes());
        if self.flaw == Flaw::LateDiscard {
            let store = Arc::clone(&self.store);
            mica_rt::spawn(async move {
                mica_rt::sleep(Duration::from_micros(200)).await;
                drop(store.space(Space::Punch, host, range.len()).await);
            });
            return Box::pin(async { Ok(()) });
        }
        Box::pin(async move {
            match self.latched.load(SeqCst) {
                true => Err(failed_before()),
                false => self.store.space(Space::Punch, host, range.len()).await,
            }
        })
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(self.sync())
    }
}

impl Unmanaged for Raw {
    const LENGTH: &'static str = "no test makes it longer";
}

struct RawSubject(Flaw);

impl Subject for RawSubject {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            let image = match mode {
                Mode::Read => world.open(Path::new(PATH))?,
                Mode::Write => world.open_writable(Path::new(PATH))?,
            };
            let (syncs, latched) = (AtomicU64::new(0), AtomicBool::new(false));
            let world = world.clone();
            Ok(Arc::new(Raw { store: image.store, world, flaw: self.0, syncs, latched }) as _)
        })
    }

    fn check<'a>(&'a self, _: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async { Ok(0) })
    }
}

/// The raw disk of production.
struct ProductionRaw;

impl Subject for ProductionRaw {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            let disk = match mode {
                Mode::Read => mica_stack::RawDisk::open(world, Path::new(PATH))?,
                Mode::Write => mica_stack::RawDisk::open_writable(world, Path::new(PATH))?,
            };
            Ok(Arc::new(disk) as _)
        })
    }

    fn check<'a>(&'a self, _: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async { Ok(0) })
    }
}

fn initial() -> Vec<u8> {
    (0..DISK_BYTES).map(|at| (at / 512 % 250 + 1) as u8).collect()
}

/// Rounds that end in power cuts and closes.
async fn crash(world: &World, subject: &dyn Subject) {
    world.put(PATH, initial());
    let mut crashes = Crashes::new(world, subject, ModelDisk::new(initial()));
    for _ in 0..3 {
        let (cut, loss) = cut_at_random(world, 100);
        let load = load_at_random(world, DISK_BYTES as u64 / 512);
        crashes.round(cut, loss, async |guest| guest.run(&load).await).await;
    }
    let load = load_at_random(world, DISK_BYTES as u64 / 512);
    let calm = async |guest: &mica_sim::Guest| {
        guest.run(&load).await;
        guest.read_all().await;
    };
    crashes.round(Cut::Never, mica_sim::Loss::Nothing, calm).await;
}

/// Rounds in which an operation fails.
async fn fail(world: &World, subject: &dyn Subject) {
    for (operation, errno) in [(Operation::Sync, EIO), (Operation::Write, ENOSPC)] {
        for nth in 1..100 {
            let world = World::new(world.seed());
            world.put(PATH, initial());
            let mut crashes = Crashes::new(&world, subject, ModelDisk::new(initial()));
            let lasting = world.random_below(2) == 0;
            let fault = ChangeFault { operation, nth, lasting, errno };
            let load = mica_sim::Load {
                tasks: 3,
                requests: 8,
                sectors_max: 16,
                flush_one_in: 4,
                give_up_one_in: 0,
            };
            let loss = Some(loss_at_random(&world));
            if !crashes.fault_round(fault, loss, async |guest| guest.run(&load).await).await {
                break;
            }
        }
    }
}

#[test]
fn right_disk_survives_crashes() {
    scenario(300, |world| async move { crash(&world, &RawSubject(Flaw::None)).await });
}

#[test]
fn right_disk_survives_faults() {
    scenario(30, |world| async move { fail(&world, &RawSubject(Flaw::None)).await });
}

#[test]
fn raw_disk_of_production_survives_crashes() {
    scenario(200, |world| async move { crash(&world, &ProductionRaw).await });
}

#[test]
fn raw_disk_of_production_survives_faults() {
    scenario(30, |world| async move { fail(&world, &ProductionRaw).await });
}

/// The seed from which the flaw is found, among the first few.
fn found_from(flaw: Flaw, try_once: impl AsyncFn(&World, &dyn Subject)) -> Option<u64> {
    (0..60).find(|seed| {
        let run = AssertUnwindSafe(|| {
            let executor = Executor::new(Backend::Sim { seed: *seed }).unwrap();
            executor.block_on(try_once(&World::new(*seed), &RawSubject(flaw)));
        });
        catch_unwind(run).is_err()
    })
}

#[test]
fn every_disk_that_is_wrong_in_a_crash_is_caught() {
    for flaw in [
        Flaw::FlushWithoutSync,
        Flaw::FlushBeforeItsSync,
        Flaw::FlushSharesTheSyncUnderWay,
        Flaw::WriteBeforeItIsDone,
        Flaw::LostWrite,
        Flaw::ShortWrite,
        Flaw::AstrayWrite,
        Flaw::TornSector,
        Flaw::LateDiscard,
        Flaw::LostZeroes,
        Flaw::StaleRead,
    ] {
        let seed = found_from(flaw, crash);
        println!("{flaw:?} is found from seed {seed:?}");
        assert!(seed.is_some(), "{flaw:?} is not found");
    }
}

#[test]
fn every_disk_that_is_wrong_about_errors_is_caught() {
    for flaw in [Flaw::SyncTriedAgain, Flaw::SyncErrorSwallowed, Flaw::WriteErrorSwallowed] {
        let seed = found_from(flaw, fail);
        println!("{flaw:?} is found from seed {seed:?}");
        assert!(seed.is_some(), "{flaw:?} is not found");
    }
}
