//! Layers that are put on top of a chain while a guest works on it, and the power goes, or the
//! process dies: the guest notices nothing, and no layer is damaged.

use crate::beside::{self, Ends, death, never, power};
use crate::chain::{ChainSubject, Shape};
use crate::plain::{Plain, read, write};
use mica_block::{
    Error, ErrorKind, Images as _, LocalFuture, Manage, ManageChain, Renaming, Result,
    SnapshotGroup, read_exact,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::recover::repair_for_opening;
use mica_sim::crash::{Crashes, Cut, Mode, Subject};
use mica_sim::{Loss, ModelDisk, World, scenario};
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A chain on which layers are put.
struct Growing {
    shape: Shape,
    /// The active layers that it had, the last one last.
    tops: RefCell<Vec<PathBuf>>,
    open: RefCell<Option<Chain>>,
    /// How many of them were the active layer when the last call for one returned.
    confirmed: Cell<usize>,
}

impl Growing {
    fn new(shape: Shape) -> Self {
        let tops = RefCell::new(vec![shape.top.clone()]);
        Self { shape, tops, open: RefCell::default(), confirmed: Cell::new(1) }
    }

    /// The active layer as determined from the files alone: the last one, unless the one beneath
    /// still names a log and nobody has used the last one. Where the first one cannot name a log,
    /// its user has to know whether it got a layer on top.
    async fn top(&self, world: &World) -> PathBuf {
        let tops = self.tops.borrow().clone();
        if !self.outlives_the_process() && self.confirmed.get() == 1 {
            return tops[0].clone();
        }
        let mut found = tops[tops.len() - 1].clone();
        for (at, top) in tops.iter().enumerate() {
            let is_above_used = match tops.get(at + 1) {
                Some(above) => is_used(world, above).await,
                None => false,
            };
            if is_in_use(world, top).await && !is_above_used {
                found.clone_from(top);
                break;
            }
        }
        found
    }

    /// Before `top` is written: what beneath it says that the writing goes on there is durable. The
    /// process that closed those layers may have died before it was, and a power cut would show
    /// them in use again.
    async fn settle_beneath(&self, world: &World, top: &Path) -> Result<()> {
        let tops = self.tops.borrow().clone();
        for beneath in tops.iter().take_while(|path| *path != top) {
            world.open_writable(beneath)?.store.sync().await?;
        }
        Ok(())
    }

    fn subject(&self, top: PathBuf) -> ChainSubject {
        ChainSubject { shape: Shape { top, ..self.shape.clone() } }
    }

    /// Puts another layer on top.
    async fn push(&self, world: &World) -> Result<()> {
        let number = self.tops.borrow().len();
        let path = Path::new(crate::chain::FOLDER).join(format!("pushed-{number}.qcow2"));
        let beneath = self.tops.borrow()[number - 1].clone();
        make_overlay(world, &path, &beneath, self.shape.initial.len() as u64).await?;
        let chain = self.open.borrow().clone().unwrap();
        self.tops.borrow_mut().push(path.clone());
        let pushed = match world.random_below(3) {
            0 => chain.push(&path).await.map(drop),
            1 => push_with_another(world, &chain, &path).await,
            _ => push_without_name(&chain, &path).await,
        };
        if let Err(error) = pushed {
            // The chain is as it was, whether or not its writer was closed.
            let expected =
                [OTHER_FAILED, NOT_RENAMED].iter().any(|it| error.to_string().contains(it));
            assert!(expected, "{error}");
            self.tops.borrow_mut().pop();
        }
        self.confirmed.set(self.tops.borrow().len());
        Ok(())
    }
}

/// Whether its writer has not closed the image.
async fn is_in_use(world: &World, path: &Path) -> bool {
    let header = inspect(world, path).await.map(|info| info.header);
    header.is_ok_and(|header| header.autoclear.unknown != 0)
}

/// Whether the image was written.
async fn is_used(world: &World, path: &Path) -> bool {
    let Ok(found) = inspect(world, path).await else { return false };
    let (l1_offset, entries) = (found.header.l1_offset, found.header.l1_entries as usize);
    let store = world.open(path).unwrap().store;
    let l1 = read_exact(&*store, l1_offset, entries * 8).await;
    is_in_use(world, path).await || l1.is_ok_and(|l1| l1.iter().any(|byte| *byte != 0))
}

/// What another disk of a group says if it fails.
const OTHER_FAILED: &str = "the other one failed";

/// What a renaming says that fails.
const NOT_RENAMED: &str = "not renamed";

/// Files that do not get their names.
struct NotRenamed;

impl Renaming for NotRenamed {
    fn kept(&self) -> &Path {
        Path::new("/nowhere")
    }

    fn rename(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            mica_rt::sleep(Duration::from_micros(100)).await;
            Err(Error::new(ErrorKind::Io, NOT_RENAMED))
        })
    }

    fn undo(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }

    fn sync(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async { Ok(()) })
    }
}

/// Puts no layer on top, as the files do not get their names: the writer is closed when that is
/// found out, and goes on.
async fn push_without_name(chain: &Chain, path: &Path) -> Result<()> {
    let chain: &dyn ManageChain = chain;
    chain.push_renaming(path, &NotRenamed).await.map(drop)
}

/// Puts a layer on top at one instant with another disk, which may fail at any time.
async fn push_with_another(world: &World, chain: &Chain, path: &Path) -> Result<()> {
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
    let push = async { chain.push_in_group(path, &group).await.map(drop) };
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
            let top = self.top(world).await;
            // What is above is empty, and is added again.
            self.tops.borrow_mut().truncate_after(&top);
            self.confirmed.set(self.tops.borrow().len());
            let writable = mode == Mode::Write;
            if writable {
                self.settle_beneath(world, &top).await?;
            }
            let cache_bytes = CACHE_BYTES_MIN << (4 * world.random_below(3));
            let options = ChainOptions {
                cache: MapCache::new(cache_bytes),
                writable,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            let chain = Chain::open(Arc::new(world.clone()), &top, &options).await?;
            *self.open.borrow_mut() = writable.then(|| chain.clone());
            Ok(Arc::new(chain) as Arc<dyn Manage>)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async move {
            drop(self.open.take());
            let top = self.top(world).await;
            let mut leaks = 0;
            let tops = self.tops.borrow().clone();
            for one in tops {
                leaks += self.subject(one.clone()).check(world).await?;
                if one == top {
                    break;
                }
            }
            Ok(leaks)
        })
    }

    fn outlives_the_process(&self) -> bool {
        self.subject(self.shape.top.clone()).outlives_the_process()
    }

    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        let top = self.tops.borrow().last().unwrap().clone();
        self.subject(top).judge_elsewhere(world, model);
    }
}

/// Makes an overlay of `beneath`, a qcow2 image beside it, of a disk of `len` bytes.
pub(crate) async fn make_overlay(
    world: &World,
    path: &Path,
    beneath: &Path,
    len: u64,
) -> Result<()> {
    let mut wish = ImageWish {
        cluster_bytes: Some(512 << world.random_below(8)),
        backing_name: Some(beneath.file_name().unwrap().to_owned()),
        backing_format: Some("qcow2".to_owned()),
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
    let growing = Growing::new(shape);
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
            chain.push(&path).await.map(drop)
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
