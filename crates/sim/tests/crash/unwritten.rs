//! Files whose bytes read as anything until they are written, as in a store that encrypts: none of
//! their clusters is blank, and the parts of one that a write does not cover are filled.

use crate::chain::{ChainSubject, Shape};
use mica_block::{
    ChangeFuture, Identity, Images, IoFuture, LocalFuture, Manage, OpenImage, RedoLogs, Result,
    Run, RunKind, Sidecars, Space, Store, StoreIdentity, Upgradable, Witness,
};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_rt::{Backend, Buf, Executor};
use mica_sim::crash::{Crashes, Cut, Mode, Subject, cut_at_random, load_at_random};
use mica_sim::{Loss, World, scenario};
use mica_units::HostOffset;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Whether a store reports this truthfully.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    True,
    /// It says that unwritten bytes read as zeros.
    False,
}

/// What a byte at `at` is encrypted with: never zero.
fn key(at: u64) -> u8 {
    (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56).to_le_bytes()[0] | 1
}

fn encrypt(bytes: &mut [u8], offset: u64) {
    (offset..).zip(bytes).for_each(|(at, byte)| *byte ^= key(at));
}

/// The bytes of a file that keeps them encrypted.
struct Encrypted {
    inner: Arc<dyn Store>,
    identity: StoreIdentity,
    word: Word,
}

impl Encrypted {
    fn write_zeros(&self, offset: HostOffset, end: u64) -> ChangeFuture {
        let len = usize::try_from(end.saturating_sub(offset.bytes())).unwrap();
        let writing = self.write_at(Buf::zeroed(len), offset);
        Box::pin(async move { if len == 0 { Ok(()) } else { writing.await.0 } })
    }
}

impl Store for Encrypted {
    fn read_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let end = self.inner.len();
        let reading = self.inner.read_at(buf, offset);
        IoFuture::boxed(async move {
            let (result, mut buf) = reading.await;
            let held = match &end {
                Ok(end) => end.saturating_sub(offset.bytes()).min(buf.len() as u64),
                Err(_) => 0,
            };
            let held = usize::try_from(held).unwrap();
            let mut plain = buf[..held].to_vec();
            encrypt(&mut plain, offset.bytes());
            buf.put(0, &plain);
            (end.and(result), buf)
        })
    }

    fn write_at(&self, buf: Buf, offset: HostOffset) -> IoFuture {
        let mut encrypted = Buf::from_slice(&buf);
        encrypt(encrypted.own_bytes(), offset.bytes());
        let writing = self.inner.write_at(encrypted, offset);
        IoFuture::boxed(async move { (writing.await.0, buf) })
    }

    fn sync(&self) -> ChangeFuture {
        self.inner.sync()
    }

    fn sync_written(&self, mut bytes: Buf, offset: HostOffset) -> ChangeFuture {
        encrypt(bytes.own_bytes(), offset.bytes());
        self.inner.sync_written(bytes, offset)
    }

    fn space(&self, change: Space, offset: HostOffset, len: u64) -> ChangeFuture {
        let end = offset.bytes() + len;
        match (change, self.inner.len()) {
            (Space::Allocate, _) => self.inner.space(change, offset, len),
            (Space::Zero, _) => self.write_zeros(offset, end),
            (Space::Punch, Ok(there)) => self.write_zeros(offset, end.min(there)),
            (Space::Punch, Err(error)) => Box::pin(async move { Err(error) }),
        }
    }

    fn set_len(&self, len: u64) -> ChangeFuture {
        self.inner.set_len(len)
    }

    fn len(&self) -> Result<u64> {
        self.inner.len()
    }

    fn allocated_bytes(&self) -> Result<u64> {
        self.inner.allocated_bytes()
    }

    fn run_at(&self, _offset: HostOffset, len: u64) -> Result<Run> {
        Ok(Run { kind: RunKind::Data, len })
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn identity(&self) -> StoreIdentity {
        self.identity
    }

    fn reads_unwritten_as_zeros(&self) -> bool {
        self.word == Word::False
    }

    fn witness(&self) -> Witness {
        self.inner.witness()
    }
}

/// The files of the world, all of them encrypted.
struct EncryptedImages {
    plain: Arc<dyn Images>,
    word: Word,
}

impl EncryptedImages {
    fn encrypted(&self, image: OpenImage) -> OpenImage {
        let (identity, word) = (StoreIdentity::own(), self.word);
        OpenImage { store: Arc::new(Encrypted { inner: image.store, identity, word }), ..image }
    }
}

impl Images for EncryptedImages {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        self.plain.resolve(referrer, name)
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        self.plain.open(path).map(|image| self.encrypted(image))
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        self.plain.open_writable(path).map(|image| self.encrypted(image))
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        self.plain.open_frozen(path).map(|image| self.encrypted(image))
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        self.open_writable(path).map(|image| Upgradable::new(image, || Ok(())))
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        self.plain.identify(path)
    }

    fn sidecars(&self) -> &dyn Sidecars {
        self.plain.sidecars()
    }

    fn redo_logs(&self) -> &dyn RedoLogs {
        self.plain.redo_logs()
    }

    fn now_ns(&self) -> i128 {
        self.plain.now_ns()
    }
}

struct EncryptedSubject {
    plain: ChainSubject,
    word: Word,
}

impl EncryptedSubject {
    fn new(world: &World, word: Word) -> Self {
        let shape = Shape::random(world);
        shape.put_in(world);
        for (path, _) in &shape.files {
            world.change(path, |bytes| encrypt(bytes, 0));
        }
        world.pass_time(Duration::from_secs(3600));
        Self { plain: ChainSubject { shape }, word }
    }
}

impl Subject for EncryptedSubject {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            let images =
                Arc::new(EncryptedImages { plain: Arc::new(world.clone()), word: self.word });
            let writable = mode == Mode::Write;
            let options = ChainOptions {
                writable,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            Ok(Arc::new(Chain::open(images, &self.plain.shape.top, &options).await?) as _)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async move {
            let elsewhere = World::new(1);
            for (path, mut bytes) in world.files() {
                encrypt(&mut bytes, 0);
                elsewhere.put(path, bytes);
            }
            self.plain.check(&elsewhere).await
        })
    }

    fn outlives_the_process(&self) -> bool {
        self.plain.outlives_the_process()
    }
}

/// Rounds that end in power cuts or kills, and one that does not.
async fn crash(world: &World, word: Word) {
    let subject = EncryptedSubject::new(world, word);
    let shape = &subject.plain.shape;
    let sectors = shape.initial.len() as u64 / 512;
    let mut crashes = Crashes::new(world, &subject, shape.model());
    for _ in 0..2 {
        let load = load_at_random(world, sectors);
        let (cut, loss) = cut_at_random(world, 150);
        crashes.round(cut, loss, async |guest| guest.run(&load).await).await;
    }
    let load = load_at_random(world, sectors);
    let work = async |guest: &mica_sim::Guest| {
        guest.run(&load).await;
        guest.read_all().await;
    };
    crashes.round(Cut::Never, Loss::Nothing, work).await;
}

#[test]
fn chain_whose_unwritten_bytes_read_as_anything_survives_power_cuts() {
    scenario(20, |world| async move { crash(&world, Word::True).await });
}

/// The scenario has to notice a writer that takes such bytes for zeros.
#[test]
fn writer_that_takes_unwritten_bytes_for_zeros_is_noticed() {
    let noticed = (0..20).filter(|seed| {
        let run = AssertUnwindSafe(|| {
            let executor = Executor::new(Backend::Sim { seed: *seed }).unwrap();
            executor.block_on(crash(&World::new(*seed), Word::False));
        });
        catch_unwind(run).is_err()
    });
    let noticed = noticed.count();
    assert!(noticed >= 5, "only {noticed} of 20 runs notice");
}
