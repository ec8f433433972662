//! States of a disk that are kept under other names while a guest works on it, and the power goes,
//! or the process dies: under its own name there is always everything.

use crate::beside::{self, Ends, death, either, never, power};
use crate::chain::{ChainSubject, FOLDER, Shape};
use mica_block::{Images as _, LocalFuture, Manage, Renaming, Result, write_all};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_rt::Buf;
use mica_sim::crash::{Crashes, Cut, Mode, Subject};
use mica_sim::{Loss, ModelDisk, World, scenario};
use mica_units::HostOffset;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A disk whose states are kept.
struct Keeping {
    shape: Shape,
    open: RefCell<Option<Chain>>,
    /// How many states were to be kept.
    begun: Cell<u64>,
}

/// What `stack::Keeping` does to files.
struct Names {
    world: World,
    image: PathBuf,
    overlay: PathBuf,
    kept: PathBuf,
}

impl Renaming for Names {
    fn kept(&self) -> Option<&Path> {
        Some(&self.kept)
    }

    fn rename(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.world.rename(&self.overlay, &self.image);
            Ok(())
        })
    }

    fn undo(&self) -> LocalFuture<'_, Result<()>> {
        Box::pin(async {
            self.world.link(&self.kept, &self.image);
            Ok(())
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

/// What stands for the folder that is made durable.
fn folder() -> PathBuf {
    Path::new(FOLDER).join("folder")
}

impl Keeping {
    fn new(world: &World, shape: Shape) -> Self {
        world.put(folder(), Vec::new());
        Self { shape, open: RefCell::default(), begun: Cell::new(0) }
    }

    fn kept(&self, number: u64) -> PathBuf {
        Path::new(FOLDER).join(format!("kept-{number}.qcow2"))
    }

    async fn keep(&self, world: &World) -> Result<()> {
        let number = self.begun.get();
        self.begun.set(number + 1);
        let image = self.shape.top.clone();
        let overlay = Path::new(FOLDER).join(format!("overlay-{number}"));
        let kept = self.kept(number);
        let wish = ImageWish {
            cluster_bytes: Some(512 << world.random_below(8)),
            backing_name: Some(kept.file_name().unwrap().to_owned()),
            backing_format: Some("qcow2".to_owned()),
            ..ImageWish::default()
        };
        world.put(&overlay, Vec::new());
        let plan = wish.plan(self.shape.initial.len() as u64).unwrap();
        let store = world.open_writable(&overlay)?.store;
        create(plan, Stores { image: &*store, data: None }).await?;
        drop(store);
        world.link(&image, &kept);
        world.sync_names();
        let chain = self.open.borrow().clone().unwrap();
        let names = Names { world: world.clone(), image, overlay: overlay.clone(), kept };
        let manage: &dyn Manage = &chain;
        manage.chain().unwrap().push(&overlay, &names, None).await.map(drop)
    }
}

impl Subject for Keeping {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            drop(self.open.take());
            let writable = mode == Mode::Write;
            let options = ChainOptions {
                cache: MapCache::new(CACHE_BYTES_MIN << (4 * world.random_below(3))),
                writable,
                repair: Some(repair_for_opening),
                ..ChainOptions::default()
            };
            let images = Arc::new(world.clone());
            let chain = Chain::open(images, &self.shape.top, &options).await?;
            if writable {
                // As `stack::settle_names` does.
                world.sync_names();
            }
            *self.open.borrow_mut() = writable.then(|| chain.clone());
            Ok(Arc::new(chain) as Arc<dyn Manage>)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async move {
            drop(self.open.take());
            let subject = |top: PathBuf| {
                let shape = Shape { top, ..self.shape.clone() };
                ChainSubject { shape }
            };
            let mut leaks = subject(self.shape.top.clone()).check(world).await?;
            let mut seen = vec![world.identify(&self.shape.top).unwrap().inode];
            for kept in (0..self.begun.get()).map(|number| self.kept(number)) {
                // The name may be lost, or still be another one of a file.
                let Ok(found) = world.identify(&kept) else { continue };
                if !seen.contains(&found.inode) {
                    seen.push(found.inode);
                    leaks += subject(kept).check(world).await?;
                }
            }
            Ok(leaks)
        })
    }

    fn outlives_the_process(&self) -> bool {
        ChainSubject { shape: self.shape.clone() }.outlives_the_process()
    }

    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        ChainSubject { shape: self.shape.clone() }.judge_elsewhere(world, model);
    }
}

async fn rounds(world: &World, ends: Ends<impl Fn() -> (Cut, Loss)>) {
    let shape = Shape::random(world);
    shape.put_in(world);
    let keeping = Keeping::new(world, shape);
    let mut crashes = Crashes::new(world, &keeping, keeping.shape.model());
    let disk = (&mut crashes, keeping.shape.initial.len() as u64 / 512);
    beside::rounds(world, disk, ends, async |_| keeping.keep(world).await.unwrap()).await;
}

#[test]
fn guest_notices_nothing_of_states_that_are_kept() {
    scenario(16, |world| async move { rounds(&world, never()).await });
}

#[test]
fn power_may_go_while_states_are_kept() {
    scenario(30, |world| async move { rounds(&world, power(&world)).await });
}

#[test]
fn process_may_die_while_states_are_kept() {
    scenario(16, |world| async move { rounds(&world, death(&world, 20_000)).await });
}

#[test]
fn power_may_go_after_a_process_died_while_states_are_kept() {
    scenario(20, |world| async move { rounds(&world, either(&world, 20_000)).await });
}
