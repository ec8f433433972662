//! Layers that are put on top of a chain while a guest works on it, and the power goes, or the
//! process dies: the guest notices nothing, and no layer is damaged.

use crate::beside::{self, Ends, death, either, never, power};
use crate::chain::{ChainSubject, Shape};
use crate::plain::{Plain, read, write};
use mica_block::{
    Error, ErrorKind, Images as _, LocalFuture, Manage, ManageChain, Renaming, Result,
    SnapshotGroup, write_all,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_rt::Buf;
use mica_sim::crash::{Crashes, Cut, Mode, Subject};
use mica_sim::{Loss, ModelDisk, World, scenario};
use mica_stack::{LayeredRaw, RawDisk};
use mica_units::HostOffset;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A chain on which layers are put.
struct Growing {
    shape: Shape,
    /// Whether the lowest of `tops` is a raw image.
    begins_raw: bool,
    /// The active layers that it had, the last one last.
    tops: RefCell<Vec<PathBuf>>,
    open: RefCell<Option<Arc<dyn Manage>>>,
}

/// The mark of the layer at `path`: what `stack::NewLayer` puts beside it.
pub(crate) fn mark_of(path: &Path) -> PathBuf {
    path.with_extension("above")
}

/// What stands for the folder that is made durable.
fn folder() -> PathBuf {
    Path::new(crate::chain::FOLDER).join("folder")
}

/// The mark of a layer, which gets its name, or does not.
pub(crate) struct Marks {
    world: World,
    mark: PathBuf,
    fails: bool,
}

impl Marks {
    /// For a layer on top of the one at `beneath`.
    pub(crate) fn of(world: &World, beneath: &Path) -> Self {
        let mark = mark_of(beneath);
        world.put(unnamed(&mark), Vec::new());
        world.put(folder(), Vec::new());
        Self { world: world.clone(), mark, fails: false }
    }
}

fn unnamed(mark: &Path) -> PathBuf {
    mark.with_extension("unnamed")
}

impl Renaming for Marks {
    fn kept(&self) -> Option<&Path> {
        None
    }

    fn rename(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            mica_rt::sleep(Duration::from_micros(self.world.random_below(200))).await;
            if self.fails {
                return Err(Error::new(ErrorKind::Io, NOT_RENAMED));
            }
            self.world.rename(unnamed(&self.mark), &self.mark);
            Ok(())
        })
    }

    fn undo(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.world.rename(&self.mark, unnamed(&self.mark));
            self.sync().await
        })
    }

    fn sync(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            // Something during which the power may go.
            let folder = self.world.open_writable(&folder())?.store;
            write_all(&*folder, Buf::zeroed(512), HostOffset::ZERO).await?;
            self.world.sync_names();
            Ok(())
        })
    }
}

impl Growing {
    fn new(shape: Shape) -> Self {
        let tops = RefCell::new(vec![shape.top.clone()]);
        Self { shape, begins_raw: false, tops, open: RefCell::default() }
    }

    fn is_raw(&self, top: &Path) -> bool {
        self.begins_raw && top == self.shape.top
    }

    /// The active layer as determined from the files alone: where the marks lead.
    fn top(&self, world: &World) -> PathBuf {
        let tops = self.tops.borrow();
        let frozen = tops.iter().take_while(|top| world.identify(&mark_of(top)).is_ok()).count();
        tops[frozen].clone()
    }

    fn subject(&self, top: PathBuf) -> ChainSubject {
        ChainSubject { shape: Shape { top, ..self.shape.clone() } }
    }

    /// Puts another layer on top.
    async fn push(&self, world: &World) -> Result<()> {
        let number = self.tops.borrow().len();
        let path = Path::new(crate::chain::FOLDER).join(format!("pushed-{number}.qcow2"));
        let beneath = self.tops.borrow()[number - 1].clone();
        let format = if self.is_raw(&beneath) { "raw" } else { "qcow2" };
        let len = self.shape.initial.len() as u64;
        let disk = self.open.borrow().clone().unwrap();
        let chain = disk.chain().expect("it is written");
        let mut made: Vec<LocalFuture<'_, Result<()>>> =
            vec![Box::pin(make_overlay_of(world, &path, (&beneath, format), len))];
        let ahead = world.random_below(3);
        if ahead == 0 {
            made.push(chain.write_ahead());
        }
        mica_rt::join_all(made).await.into_iter().collect::<Result<()>>()?;
        self.tops.borrow_mut().push(path.clone());
        let mut names = Marks::of(world, &beneath);
        let how = world.random_below(3);
        names.fails = how > 1;
        let push = async {
            match how {
                1 => push_with_another(world, chain, (&path, &names)).await,
                _ => chain.push(&path, &names, None).await.map(drop),
            }
        };
        // As one that was asked for just before, whose flush takes long.
        let other = async { if ahead == 1 { chain.write_ahead().await } else { Ok(()) } };
        let both: [LocalFuture<'_, Result<()>>; 2] = [Box::pin(other), Box::pin(push)];
        let mut ended = mica_rt::join_all(both).await;
        let pushed = ended.pop().expect("two");
        ended.into_iter().collect::<Result<()>>()?;
        if let Err(error) = pushed {
            // The chain is as it was, whether or not its writer was closed.
            let expected =
                [OTHER_FAILED, NOT_RENAMED].iter().any(|it| error.to_string().contains(it));
            assert!(expected, "{error}");
            self.tops.borrow_mut().pop();
        }
        Ok(())
    }
}

/// What another disk of a group says if it fails.
const OTHER_FAILED: &str = "the other one failed";

/// What a renaming says that fails.
const NOT_RENAMED: &str = "not renamed";

/// Puts a layer on top at one instant with another disk, which may fail at any time.
async fn push_with_another(
    world: &World,
    chain: &dyn ManageChain,
    (path, names): (&Path, &Marks),
) -> Result<()> {
    let group = SnapshotGroup::new(2);
    let fails_at = world.random_below(4);
    let pause = || mica_rt::sleep(Duration::from_micros(world.random_below(2000)));
    let other = async {
        let failed = || Error::new(ErrorKind::Io, OTHER_FAILED);
        pause().await;
        if fails_at == 0 {
            return Err(group.fail(failed()));
        }
        group.all_hold().await?;
        pause().await;
        if fails_at == 1 {
            return Err(group.fail(failed()));
        }
        group.all_taken().await
    };
    let push = async { chain.push(path, names, Some(&group)).await.map(drop) };
    let both: [LocalFuture<'_, Result<()>>; 2] = [Box::pin(push), Box::pin(other)];
    let ended = mica_rt::join_all(both).await;
    assert_eq!(ended[0].is_ok(), ended[1].is_ok(), "both or none: {ended:?}");
    ended.into_iter().collect()
}

impl Subject for Growing {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            drop(self.open.take());
            let top = self.top(world);
            // What is above is a stray file, and is made again.
            self.tops.borrow_mut().truncate_after(&top);
            let writable = mode == Mode::Write;
            if writable {
                // As `stack::above` does: the process that put the mark may have died before that.
                world.sync_names();
            }
            let cache_bytes = CACHE_BYTES_MIN << (4 * world.random_below(3));
            let options = ChainOptions {
                cache: MapCache::new(cache_bytes),
                writable,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            let images = Arc::new(world.clone());
            let disk: Arc<dyn Manage> = match (self.is_raw(&top), writable) {
                (true, true) => Arc::new(LayeredRaw::open(images, &top, &options)?),
                (true, false) => Arc::new(RawDisk::open(world, &top)?),
                (false, _) => Arc::new(Chain::open(images, &top, &options).await?),
            };
            *self.open.borrow_mut() = writable.then(|| Arc::clone(&disk));
            Ok(disk)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async move {
            drop(self.open.take());
            let top = self.top(world);
            let mut leaks = 0;
            let tops = self.tops.borrow().clone();
            for one in tops.into_iter().filter(|top| !self.is_raw(top)) {
                leaks += self.subject(one.clone()).check(world).await?;
                if one == top {
                    break;
                }
            }
            Ok(leaks)
        })
    }

    fn outlives_the_process(&self) -> bool {
        self.begins_raw || self.subject(self.shape.top.clone()).outlives_the_process()
    }

    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        let top = self.tops.borrow().last().unwrap().clone();
        if !self.is_raw(&top) {
            self.subject(top).judge_elsewhere(world, model);
        }
    }
}

/// Makes an overlay of `beneath`, a qcow2 image beside it, of a disk of `len` bytes.
pub(crate) async fn make_overlay(
    world: &World,
    path: &Path,
    beneath: &Path,
    len: u64,
) -> Result<()> {
    make_overlay_of(world, path, (beneath, "qcow2"), len).await
}

/// The same, of an image of that format.
async fn make_overlay_of(
    world: &World,
    path: &Path,
    (beneath, format): (&Path, &str),
    len: u64,
) -> Result<()> {
    let mut wish = ImageWish {
        cluster_bytes: Some(512 << world.random_below(8)),
        backing_name: Some(beneath.file_name().unwrap().to_owned()),
        backing_format: Some(format.to_owned()),
        ..ImageWish::default()
    };
    wish.lazy_refcounts = Some(world.random_below(6) == 0);
    world.put(path, Vec::new());
    let plan = wish.plan(len).unwrap();
    let image = world.open_writable(path).unwrap().store;
    create(plan, Stores { image: &*image, data: None }).await?;
    Ok(())
}

trait TruncateAfter {
    fn truncate_after(&mut self, last: &Path);
}

impl TruncateAfter for Vec<PathBuf> {
    fn truncate_after(&mut self, last: &Path) {
        let at = self.iter().position(|path| path == last).unwrap();
        self.truncate(at + 1);
    }
}

async fn rounds(world: &World, ends: Ends<impl Fn() -> (Cut, Loss)>) {
    let shape = Shape::random(world);
    shape.put_in(world);
    rounds_of(world, Growing::new(shape), ends).await;
}

/// The same of a disk that begins as a raw image.
async fn raw_rounds(world: &World, ends: Ends<impl Fn() -> (Cut, Loss)>) {
    let shape = Shape::raw(world);
    shape.put_in(world);
    rounds_of(world, Growing { begins_raw: true, ..Growing::new(shape) }, ends).await;
}

async fn rounds_of(world: &World, growing: Growing, ends: Ends<impl Fn() -> (Cut, Loss)>) {
    let mut crashes = Crashes::new(world, &growing, growing.shape.model());
    let disk = (&mut crashes, growing.shape.initial.len() as u64 / 512);
    beside::rounds(world, disk, ends, async |_| growing.push(world).await.unwrap()).await;
}

#[test]
fn guest_notices_nothing_of_layers_that_are_put_on_top() {
    scenario(20, |world| async move { rounds(&world, never()).await });
}

#[test]
fn power_may_go_while_layers_are_put_on_top() {
    scenario(20, |world| async move { rounds(&world, power(&world)).await });
}

#[test]
fn process_may_die_while_layers_are_put_on_top() {
    scenario(20, |world| async move { rounds(&world, death(&world, 20_000)).await });
}

#[test]
fn power_may_go_after_a_process_died_while_layers_are_put_on_top() {
    scenario(20, |world| async move { rounds(&world, either(&world, 20_000)).await });
}

#[test]
fn guest_notices_nothing_when_a_raw_image_gets_layers() {
    scenario(30, |world| async move { raw_rounds(&world, never()).await });
}

#[test]
fn power_may_go_while_a_raw_image_gets_layers() {
    scenario(30, |world| async move { raw_rounds(&world, power(&world)).await });
}

#[test]
fn process_may_die_while_a_raw_image_gets_layers() {
    scenario(30, |world| async move { raw_rounds(&world, death(&world, 20_000)).await });
}

#[test]
fn power_may_go_after_a_process_died_while_a_raw_image_gets_layers() {
    scenario(30, |world| async move { raw_rounds(&world, either(&world, 20_000)).await });
}

/// The story: the disk grew while an overlay of the old length was about to become the active
/// layer. Writes to the new part changed what lies behind its L1 table.
#[test]
fn layer_that_became_too_short_is_not_put_on_top() {
    const OLD: u64 = 2 << 20;
    const NEW: u64 = 64 << 20;
    scenario(20, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), OLD).await;
        let path = Path::new(crate::chain::FOLDER).join("pushed.qcow2");
        let wish = ImageWish {
            cluster_bytes: Some(512),
            backing_name: Some(Plain::top().file_name().unwrap().to_owned()),
            backing_format: Some("qcow2".to_owned()),
            ..ImageWish::default()
        };
        world.put(&path, Vec::new());
        let store = world.open_writable(&path).unwrap().store;
        create(wish.plan(OLD).unwrap(), Stores { image: &*store, data: None }).await.unwrap();
        drop(store);
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        let push = async {
            mica_rt::sleep(Duration::from_micros(world.random_below(200))).await;
            chain.push(&path, &Marks::of(&world, &Plain::top()), None).await.map(drop)
        };
        let grow = async {
            mica_rt::sleep(Duration::from_micros(world.random_below(2000))).await;
            chain.resize(NEW).await
        };
        let both: [LocalFuture<'_, Result<()>>; 2] = [Box::pin(push), Box::pin(grow)];
        let ended = mica_rt::join_all(both).await;
        ended[1].as_ref().expect("the disk grows");
        let top = if ended[0].is_ok() { path } else { Plain::top() };
        write(&chain, NEW - 4096, 9, 4096).await.unwrap();
        chain.close().await.unwrap();
        drop(chain);
        let options = ChainOptions::default();
        let chain = Chain::open(Arc::new(world.clone()), &top, &options).await.unwrap();
        assert_eq!(read(&chain, 0, 4096).await.unwrap(), [7; 4096]);
        assert_eq!(read(&chain, NEW - 4096, 4096).await.unwrap(), [9; 4096]);
    });
}
