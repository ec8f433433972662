//! Images that are encrypted with LUKS, under power cuts and kills: the header and the key material
//! are in the file, and every byte that a guest wrote passes the cipher.

use crate::chain::{ChainSubject, FOLDER, Shape};
use crate::plain::{read, write};
use mica_block::{
    Disk as _, Identity, Images, LocalFuture, Manage, OpenImage, Passphrase, RedoLogs, Result,
    Sidecars, Upgradable,
};
use mica_crypt::luks::{NewLuks, NewSlot, Wish};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_qcow2_tools::resize::Resizer;
use mica_sim::crash::{
    Crashes, Cut, Mode, Subject, cut_at_random, load_at_random, until_power_cut,
};
use mica_sim::{Loss, World, scenario};
use std::collections::HashSet;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use zeroize::Zeroizing;

/// The files of a world whose images have one passphrase.
struct Locked {
    world: World,
    passphrase: Arc<Passphrase>,
}

impl Images for Locked {
    fn resolve(&self, referrer: &Path, name: &Path) -> Result<PathBuf> {
        self.world.resolve(referrer, name)
    }

    fn open(&self, path: &Path) -> Result<OpenImage> {
        Images::open(&self.world, path)
    }

    fn open_writable(&self, path: &Path) -> Result<OpenImage> {
        self.world.open_writable(path)
    }

    fn open_frozen(&self, path: &Path) -> Result<OpenImage> {
        self.world.open_frozen(path)
    }

    fn open_upgradable(&self, path: &Path) -> Result<Upgradable> {
        self.world.open_upgradable(path)
    }

    fn identify(&self, path: &Path) -> Result<Identity> {
        self.world.identify(path)
    }

    fn sidecars(&self) -> &dyn Sidecars {
        self.world.sidecars()
    }

    fn redo_logs(&self) -> &dyn RedoLogs {
        self.world.redo_logs()
    }

    fn now_ns(&self) -> i128 {
        self.world.now_ns()
    }

    fn passphrase(&self, _path: &Path) -> Result<Option<Arc<Passphrase>>> {
        Ok(Some(Arc::clone(&self.passphrase)))
    }
}

fn new_luks() -> (Arc<Passphrase>, NewLuks) {
    let words = Zeroizing::new(b"words".to_vec());
    let passphrase = Arc::new(Passphrase::new("a test", words));
    let slot = NewSlot::Iterations(NonZeroU32::MIN);
    let luks = NewLuks::make(Wish { slot, ..Wish::default() }, &passphrase).unwrap();
    (passphrase, luks)
}

struct LuksSubject {
    plain: ChainSubject,
    passphrase: Arc<Passphrase>,
}

impl LuksSubject {
    /// A new image of random shape.
    async fn new(world: &World) -> Self {
        let choice = usize::try_from(world.random_below(3)).unwrap();
        let (cluster_bytes, is_extended) =
            [(4096, false), (64 << 10, false), (64 << 10, true)][choice];
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            extended_l2: Some(is_extended),
            ..ImageWish::default()
        };
        let disk = (1 + world.random_below(4)) << 20;
        let (passphrase, luks) = new_luks();
        let plan = wish.plan(disk).unwrap().encrypted(luks).unwrap();
        let top = Path::new(FOLDER).join("luks.qcow2");
        world.put(&top, Vec::new());
        let image = world.open_writable(&top).unwrap().store;
        create(plan, Stores { image: &*image, data: None }).await.unwrap();
        drop(image);
        world.pass_time(Duration::from_secs(3600));
        let shape = Shape {
            files: Vec::new(),
            top,
            cluster_bytes,
            version: 3,
            has_snapshot: false,
            initial: vec![0; usize::try_from(disk).unwrap()],
            about: format!("LUKS in {wish:?}"),
        };
        Self { plain: ChainSubject { shape }, passphrase }
    }
}

impl Subject for LuksSubject {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            let passphrase = Arc::clone(&self.passphrase);
            let images = Arc::new(Locked { world: world.clone(), passphrase });
            let options = ChainOptions {
                writable: mode == Mode::Write,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            Ok(Arc::new(Chain::open(images, &self.plain.shape.top, &options).await?) as _)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        self.plain.check(world)
    }

    fn outlives_the_process(&self) -> bool {
        true
    }
}

/// No sector of the file is one that a guest wrote, as it wrote it.
fn expect_no_plain_sector(world: &World, shape: &Shape, written: &[u8]) {
    let sectors = written.as_chunks::<512>().0.iter();
    let written: HashSet<_> =
        sectors.filter(|sector| sector.iter().any(|byte| *byte != 0)).collect();
    assert!(!written.is_empty(), "nothing was written");
    world.inspect(&shape.top, |file| {
        for sector in file.as_chunks::<512>().0 {
            assert!(!written.contains(sector), "a sector is in the file in plain form");
        }
    });
}

#[test]
fn luks_image_survives_power_cuts_and_kills_and_has_nothing_in_plain_form() {
    scenario(6, |world| async move {
        let subject = LuksSubject::new(&world).await;
        let shape = &subject.plain.shape;
        let sectors = shape.initial.len() as u64 / 512;
        let mut crashes = Crashes::new(&world, &subject, shape.model());
        for _ in 0..3 {
            let load = load_at_random(&world, sectors);
            let (cut, loss) = cut_at_random(&world, 150);
            crashes.round(cut, loss, async |guest| guest.run(&load).await).await;
        }
        let load = load_at_random(&world, sectors);
        let work = async |guest: &mica_sim::Guest| {
            guest.run(&load).await;
            guest.read_all().await;
        };
        crashes.round(Cut::Never, Loss::Nothing, work).await;
        let model = crashes.model();
        let bytes = model.borrow().bytes();
        if let Some(bytes) = bytes.filter(|bytes| bytes.iter().any(|byte| *byte != 0)) {
            expect_no_plain_sector(&world, shape, &bytes);
        }
    });
}

/// Bytes of a disk whose last cluster is written up to its end, and as many as it gets.
const SHORT: u64 = (128 << 10) + 512;
const LONG: u64 = (2 << 20) + 1536;

/// An image with such a disk, whose data are in another file, behind which something is left.
async fn with_data_file(world: &World, wish: &ImageWish) -> Arc<Locked> {
    let (passphrase, luks) = new_luks();
    let [top, data] = ["luks.qcow2", "luks.data"].map(|name| Path::new(FOLDER).join(name));
    for path in [&top, &data] {
        world.put(path, Vec::new());
    }
    let stores = [&top, &data].map(|path| world.open_writable(path).unwrap().store);
    let plan = wish.plan(SHORT).unwrap().encrypted(luks).unwrap();
    create(plan, Stores { image: &*stores[0], data: Some(&*stores[1]) }).await.unwrap();
    drop(stores);
    let images = Arc::new(Locked { world: world.clone(), passphrase });
    let chain = open_top(&images).await;
    write(&chain, 0, 7, usize::try_from(SHORT).unwrap()).await.unwrap();
    chain.close().await.unwrap();
    drop(chain);
    world.change(&data, |file| file.resize(usize::try_from(LONG).unwrap(), 0xaa));
    images
}

async fn open_top(images: &Arc<Locked>) -> Chain {
    let options = ChainOptions {
        writable: true,
        repair: Some(repair_for_opening),
        ..ChainOptions::default()
    };
    let top = Path::new(FOLDER).join("luks.qcow2");
    Chain::open(Arc::clone(images) as _, &top, &options).await.unwrap()
}

/// What was never written in a file of data reads as anything, once it is decrypted. The part by
/// which the disk grows has no cluster there, and what its last cluster has behind the old end is
/// zeros, encrypted, before the header says that the disk is longer.
#[test]
fn disk_that_is_encrypted_in_a_data_file_grows_by_zeros_wherever_the_power_is_cut() {
    for (cluster_bytes, is_extended) in [(4096, false), (64 << 10, false), (64 << 10, true)] {
        let wish = ImageWish {
            cluster_bytes: Some(cluster_bytes),
            extended_l2: Some(is_extended),
            data_file: Some("luks.data".into()),
            ..ImageWish::default()
        };
        scenario(1, |world| {
            let wish = &wish;
            async move {
                for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
                    grow_with_cuts(&world, wish, loss).await;
                }
            }
        });
    }
}

async fn grow_with_cuts(world: &World, wish: &ImageWish, loss: Loss) {
    let expect_whole = async |chain: &Chain, about: &str| {
        let shown = read(chain, 0, chain.geometry().len).await.unwrap();
        let (written, grown) = shown.split_at(usize::try_from(SHORT).unwrap());
        assert!(written.iter().all(|byte| *byte == 7), "{about}: what was written is lost");
        assert!(grown.iter().all(|byte| *byte == 0), "{about}: the new part is not zeros");
    };
    for operations in 1.. {
        let world = World::new(world.seed() * 1000 + operations);
        let about = format!("{wish:?}, cut after {operations}, losing {loss:?}");
        let images = with_data_file(&world, wish).await;
        world.cut_power_after(operations, loss);
        let top = Path::new(FOLDER).join("luks.qcow2");
        let grow = async {
            let mut resizer = Resizer::open(Arc::clone(&images) as _, &top).await?;
            resizer.resize(LONG).await
        };
        let ended = until_power_cut(&world, grow).await;
        world.keep_power();
        let chain = open_top(&images).await;
        let len = chain.geometry().len;
        assert!(len == LONG || ended.is_none() && len == SHORT, "{about}: {len} bytes");
        expect_whole(&chain, &about).await;
        chain.close().await.unwrap();
        drop(chain);
        let Some(done) = ended else {
            // Whatever the cut left, the disk gets its length with the next try.
            let mut resizer = Resizer::open(Arc::clone(&images) as _, &top).await.unwrap();
            resizer.resize(LONG).await.unwrap();
            drop(resizer);
            expect_whole(&open_top(&images).await, &about).await;
            continue;
        };
        done.unwrap();
        break;
    }
}
