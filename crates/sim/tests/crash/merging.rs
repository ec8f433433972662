//! Layers that are merged while a guest works on the chain, and the power goes, or the process
//! dies: the guest notices nothing, and no layer is damaged.

use crate::beside::{self, Ends, death, never};
use crate::chain::{ChainSubject, Shape};
use crate::plain::{Plain, read, write};
use crate::pushing::{Marks, make_overlay};
use mica_block::{
    ActiveAfter, CommitLayers, Disk as _, ErrorKind, LocalFuture, Manage, ManageChain as _,
    MergeControl, MergeProgress, Merged, RaiseLayers, Result,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::ImageWish;
use mica_qcow2_tools::inspect;
use mica_qcow2_tools::recover::repair_for_opening;
use mica_sim::crash::{Crashes, Cut, Mode, Subject, cut_at_random};
use mica_sim::{Loss, ModelDisk, World, scenario};
use std::cell::{Cell, RefCell};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// A chain whose layers are merged.
struct Merging {
    shape: RefCell<Shape>,
    open: RefCell<Option<Chain>>,
    /// Merges that were done.
    done: Cell<u32>,
}

impl Merging {
    fn new(shape: Shape) -> Self {
        Self { shape: RefCell::new(shape), open: RefCell::default(), done: Cell::new(0) }
    }

    async fn chain(&self, world: &World, writable: bool) -> Result<Chain> {
        let cache_bytes = CACHE_BYTES_MIN << (4 * world.random_below(3));
        let options = ChainOptions {
            cache: MapCache::new(cache_bytes),
            writable,
            repair: Some(repair_for_opening),
            ..ChainOptions::default()
        };
        let top = self.shape.borrow().top.clone();
        Chain::open(Arc::new(world.clone()), &top, &options).await
    }

    fn subject(&self, top: PathBuf) -> ChainSubject {
        ChainSubject { shape: Shape { top, ..self.shape.borrow().clone() } }
    }

    fn top(&self) -> ChainSubject {
        ChainSubject { shape: self.shape.borrow().clone() }
    }

    /// Puts another layer on top.
    async fn push(&self, world: &World, number: u64) {
        let chain = self.open.borrow().clone().unwrap();
        let path = Path::new(crate::chain::FOLDER).join(format!("pushed-{number}.qcow2"));
        let (beneath, len) = {
            let shape = self.shape.borrow();
            (shape.top.clone(), shape.initial.len() as u64)
        };
        make_overlay(world, &path, &beneath, len).await.unwrap();
        chain.push(&path, &Marks::of(world, &beneath), None).await.unwrap();
        self.shape.borrow_mut().top = path;
    }

    /// Merges some layers, or is cancelled.
    async fn merge(&self, world: &World) {
        let chain = self.open.borrow().clone().unwrap();
        let layers = chain.layer_paths();
        let active = layers.len() as u64 - 1;
        let pick = |bound: u64| usize::try_from(world.random_below(bound)).unwrap();
        let control = Control { world, cancel_one_in: [0, 0, 40][pick(3)] };
        let merges = Manage::chain(&chain).unwrap();
        let merged = match world.random_below(12) {
            8..11 if active >= 2 => {
                let into = 1 + pick(active - 1);
                let base = pick(1 + into as u64);
                let base = base.checked_sub(1).map(|base| &*layers[base]);
                let layers = RaiseLayers { into: &layers[into], base };
                world.trace(|| format!("raise {layers:?}"));
                merges.raise(layers, &control).await
            }
            6..8 if active >= 1 => {
                let base = pick(active);
                let base = (world.random_below(2) == 0).then_some(&*layers[base]);
                let layers = CommitLayers { top: None, base, active: ActiveAfter::Emptied };
                world.trace(|| format!("commit {layers:?}"));
                merges.commit(layers, &control).await
            }
            0..4 if active >= 2 => {
                let top = 1 + pick(active - 1);
                let base = pick(top as u64);
                let base = (base + 1 < top || world.random_below(2) == 0).then_some(&*layers[base]);
                let layers =
                    CommitLayers { top: Some(&layers[top]), base, active: ActiveAfter::Emptied };
                world.trace(|| format!("commit {layers:?}"));
                merges.commit(layers, &control).await
            }
            0..6 if active >= 1 => {
                let base = &layers[pick(active)];
                world.trace(|| format!("stream down to {}", base.display()));
                merges.stream(Some(base), &control).await
            }
            _ => {
                world.trace(|| "stream everything".to_owned());
                merges.stream(None, &control).await
            }
        };
        world.trace(|| format!("merged: {merged:?}"));
        match merged {
            Ok(Merged::Done { dropped, .. }) => {
                let left = chain.layer_paths();
                assert_eq!(left.len() + dropped.len(), layers.len());
                assert!(dropped.iter().all(|layer| !left.contains(layer)));
                self.done.set(self.done.get() + 1);
            }
            Ok(Merged::Cancelled) => assert_eq!(chain.layer_paths(), layers),
            Err(error) => {
                // An internal snapshot would show something else.
                let is_refusal = matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Denied);
                assert!(is_refusal, "{error:?}");
                assert_eq!(chain.layer_paths(), layers);
            }
        }
    }
}

/// Steps at random moments.
struct Control<'a> {
    world: &'a World,
    cancel_one_in: u64,
}

impl MergeControl for Control<'_> {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        assert!(progress.done <= progress.total);
        Box::pin(async move {
            if self.world.random_below(3) == 0 {
                mica_rt::sleep(Duration::from_micros(self.world.random_below(2000))).await;
            }
            match self.cancel_one_in {
                0 => ControlFlow::Continue(()),
                one_in if self.world.random_below(one_in) == 0 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })
    }
}

impl Subject for Merging {
    fn open<'a>(
        &'a self,
        world: &'a World,
        mode: Mode,
    ) -> LocalFuture<'a, Result<Arc<dyn Manage>>> {
        Box::pin(async move {
            drop(self.open.take());
            let chain = self.chain(world, mode == Mode::Write).await?;
            if world.random_below(2) == 0 {
                let _ = chain.build_index(&mut |_| ControlFlow::Continue(())).await?;
            }
            *self.open.borrow_mut() = (mode == Mode::Write).then(|| chain.clone());
            Ok(Arc::new(chain) as Arc<dyn Manage>)
        })
    }

    fn check<'a>(&'a self, world: &'a World) -> LocalFuture<'a, std::result::Result<u64, String>> {
        Box::pin(async move {
            drop(self.open.take());
            let told = |error: mica_block::Error| format!("{error:?}");
            let chain = self.chain(world, false).await.map_err(told)?;
            let layers: Vec<PathBuf> = chain.layer_paths();
            drop(chain);
            let is_qcow2 =
                |layer: &&PathBuf| world.inspect(layer, |bytes| bytes.starts_with(b"QFI\xfb"));
            let mut leaks = 0;
            // The active layer is the last, and may have to be repaired.
            for layer in layers.iter().filter(is_qcow2) {
                leaks += self.subject(layer.clone()).check(world).await?;
            }
            Ok(leaks)
        })
    }

    fn outlives_the_process(&self) -> bool {
        self.top().outlives_the_process()
    }

    fn judge_elsewhere(&self, world: &World, model: &ModelDisk) {
        self.top().judge_elsewhere(world, model);
    }
}

async fn rounds(world: &World, ends: Ends<impl Fn() -> (Cut, Loss)>, pushes: bool) -> u32 {
    let layers = 2 + u32::try_from(world.random_below(6)).unwrap();
    let shape = Shape::random_of(world, layers);
    shape.put_in(world);
    let (model, sectors) = (shape.model(), shape.initial.len() as u64 / 512);
    let merging = Rc::new(Merging::new(shape));
    let mut crashes = Crashes::new(world, &*merging, model);
    let merge = async |number| {
        if pushes && world.random_below(2) == 0 {
            merging.push(world, number).await;
        }
        merging.merge(world).await;
    };
    beside::rounds(world, (&mut crashes, sectors), ends, merge).await;
    crashes.round(Cut::Never, Loss::Nothing, async |guest| guest.read_all().await).await;
    crashes.judge_elsewhere();
    merging.done.get()
}

#[test]
fn guest_notices_nothing_of_layers_that_are_merged() {
    scenario(20, |world| async move {
        rounds(&world, never(), true).await;
    });
}

#[test]
fn power_may_go_while_layers_are_merged() {
    scenario(20, |world| async move {
        let ends = Ends { cut: || cut_at_random(&world, 400), give_up_one_in: 10 };
        rounds(&world, ends, false).await;
    });
}

#[test]
fn process_may_die_while_layers_are_merged() {
    scenario(16, |world| async move {
        rounds(&world, death(&world, 60_000), false).await;
    });
}

/// Not one by one, as a chain may have an external data file, which is not written.
#[test]
fn merges_come_to_their_end() {
    let done = Rc::new(Cell::new(0));
    scenario(10, |world| {
        let done = Rc::clone(&done);
        async move {
            let more = rounds(&world, never(), false).await;
            done.set(done.get() + more);
        }
    });
    assert!(done.get() > 0);
}

/// A chain of two layers, the lower one written before.
struct Two(World);

impl Two {
    const DISK: u64 = 4 << 20;

    fn above() -> PathBuf {
        Path::new(crate::chain::FOLDER).join("above.qcow2")
    }

    /// Makes it, with a layer that is put on top of one that is written.
    async fn new(world: &World) -> (Self, Chain) {
        let image = Plain::new(world, &ImageWish::default(), Self::DISK).await;
        let chain = image.open(Mode::Write).await;
        write(&chain, 0, 7, 4096).await.unwrap();
        make_overlay(world, &Self::above(), &Plain::top(), Self::DISK).await.unwrap();
        let names = Marks::of(world, &Plain::top());
        chain.push(&Self::above(), &names, None).await.unwrap();
        (Self(world.clone()), chain)
    }

    async fn open(&self) -> Chain {
        let options = ChainOptions {
            cache: MapCache::new(CACHE_BYTES_MIN),
            writable: true,
            repair: Some(repair_for_opening),
            ..ChainOptions::default()
        };
        Chain::open(Arc::new(self.0.clone()), &Self::above(), &options).await.unwrap()
    }
}

/// Flushes the disk at each step.
struct Flushing(Chain);

impl MergeControl for Flushing {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(async {
            self.0.flush().await.unwrap();
            ControlFlow::Continue(())
        })
    }
}

async fn commit_active(chain: &Chain) {
    let layers = CommitLayers { top: None, base: None, active: ActiveAfter::Emptied };
    let merged = chain.commit(layers, &Flushing(chain.clone())).await.unwrap();
    assert!(matches!(merged, Merged::Done { .. }), "{merged:?}");
    assert_eq!(read(chain, 0, 4096).await.unwrap(), [7; 4096]);
    chain.close().await.unwrap();
}

/// The story: the first flush of a disk makes durable what an earlier process left in the layer
/// beneath, and that one could not be synced while it was merged into.
#[test]
fn disk_is_flushed_for_the_first_time_while_its_active_layer_is_merged() {
    scenario(4, |world| async move {
        let (two, chain) = Two::new(&world).await;
        chain.close().await.unwrap();
        drop(chain);
        commit_active(&two.open().await).await;
    });
}

/// The story: a layer that was frozen and closed named its log again after a power cut, and nothing
/// could be merged into it before it was repaired.
#[test]
fn layer_that_was_frozen_is_merged_into_after_a_power_cut() {
    scenario(4, |world| async move {
        let (two, chain) = Two::new(&world).await;
        drop(chain);
        world.cut_power(Loss::Everything);
        commit_active(&two.open().await).await;
    });
}

/// Ends the merge at its first step.
struct Refusing;

impl MergeControl for Refusing {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(std::future::ready(ControlFlow::Break(())))
    }
}

/// The length of the disk of the base of [`Two`], and its bitmaps.
async fn shape_of_base(world: &World) -> (u64, Vec<String>) {
    let info = inspect(world, &Plain::top()).await.unwrap();
    let names = info.bitmaps.into_iter().map(|entry| entry.name).collect();
    (info.header.disk_bytes(), names)
}

/// The story: a base that was shorter than what goes into it grew, and got bitmaps, before the
/// marks of the merge counted; a process that died then left nothing that said so.
#[test]
fn base_is_as_it_was_until_the_first_step_of_a_merge() {
    scenario(4, |world| async move {
        let (_two, chain) = Two::new(&world).await;
        chain.resize(2 * Two::DISK).await.unwrap();
        let top = Path::new(crate::chain::FOLDER).join("top.qcow2");
        make_overlay(&world, &top, &Two::above(), 2 * Two::DISK).await.unwrap();
        chain.push(&top, &Marks::of(&world, &Two::above()), None).await.unwrap();
        let add = vec![BitmapAction::Add(None)];
        chain.close().await.unwrap();
        drop(chain);
        edit_bitmap(&world, &Two::above(), "changes", add).await.unwrap();
        let before = (Two::DISK, Vec::new());
        assert_eq!(shape_of_base(&world).await, before);
        let above = Two::above();
        for into in [Some(&*above), None] {
            let options = ChainOptions {
                cache: MapCache::new(CACHE_BYTES_MIN),
                writable: true,
                ..ChainOptions::default()
            };
            let chain = Chain::open(Arc::new(world.clone()), &top, &options).await.unwrap();
            let base = Plain::top();
            let layers =
                CommitLayers { top: into, base: Some(&base), active: ActiveAfter::Emptied };
            let merged = chain.commit(layers, &Refusing).await.unwrap();
            assert_eq!(merged, Merged::Cancelled);
            chain.close().await.unwrap();
            drop(chain);
            assert_eq!(shape_of_base(&world).await, before, "into {into:?}");
            let chain = Chain::open(Arc::new(world.clone()), &top, &options).await.unwrap();
            assert_eq!(read(&chain, 0, 4096).await.unwrap(), [7; 4096]);
            chain.close().await.unwrap();
        }
    });
}

/// Cancels the merge once it has come this far.
struct UpTo(u64);

impl MergeControl for UpTo {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        let told = match progress.done < self.0 {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        };
        Box::pin(std::future::ready(told))
    }
}

/// The story: a commit was cancelled, and so was another one of fewer layers into the same base,
/// which had put down what is older over what the first had put there. The first went on where it
/// had been cancelled, and the older bytes stayed.
#[test]
fn commit_does_not_go_on_where_another_one_came_between() {
    const MIB: u64 = 1 << 20;
    scenario(4, |world| async move {
        let image = Plain::new(&world, &ImageWish::default(), 40 * MIB).await;
        let mut chain = image.open(Mode::Write).await;
        let mut paths = vec![Plain::top()];
        let written = [&[(0, 1)][..], &[(0, 2), (8 * MIB, 2)], &[(0, 3), (33 * MIB, 3)], &[]];
        for (layer, writes) in written.iter().enumerate() {
            if layer > 0 {
                let path = Path::new(crate::chain::FOLDER).join(format!("layer-{layer}.qcow2"));
                let beneath = paths.last().unwrap();
                make_overlay(&world, &path, beneath, 40 * MIB).await.unwrap();
                chain.close().await.unwrap();
                drop(chain);
                paths.push(path.clone());
                let options = ChainOptions { writable: true, ..ChainOptions::default() };
                chain = Chain::open(Arc::new(world.clone()), &path, &options).await.unwrap();
            }
            for (at, byte) in *writes {
                write(&chain, *at, *byte, 4096).await.unwrap();
            }
        }
        let commit = async |top: usize, end: u64| {
            let (top, base) = (Some(&*paths[top]), Some(&*paths[0]));
            let layers = CommitLayers { top, base, active: ActiveAfter::Emptied };
            chain.commit(layers, &UpTo(end)).await.unwrap()
        };
        assert_eq!(commit(2, 32 * MIB).await, Merged::Cancelled);
        assert_eq!(commit(1, 8 * MIB).await, Merged::Cancelled);
        let merged = commit(2, u64::MAX).await;
        assert!(matches!(merged, Merged::Done { .. }), "{merged:?}");
        for (at, byte) in [(0, 3), (8 * MIB, 2), (33 * MIB, 3)] {
            let shown = read(&chain, at, 4096).await.unwrap();
            assert!(shown.iter().all(|shown| *shown == byte), "at {at:#x}: {}", shown[0]);
        }
        chain.close().await.unwrap();
    });
}

/// Ends a merge when all is copied.
struct AtTheEnd;

impl MergeControl for AtTheEnd {
    fn step(&self, progress: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        let told = match progress.is_ending {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        Box::pin(std::future::ready(told))
    }
}

/// The story: a merge with nothing left to copy asked nobody, and so ended although it was paused.
#[test]
fn whoever_controls_a_merge_is_asked_when_all_is_copied_and_before_a_layer_leaves() {
    scenario(4, |world| async move {
        let (_two, chain) = Two::new(&world).await;
        for number in 0..3 {
            let beneath = chain.layer_paths().pop().unwrap();
            let path = Path::new(crate::chain::FOLDER).join(format!("more-{number}.qcow2"));
            make_overlay(&world, &path, &beneath, Two::DISK).await.unwrap();
            chain.push(&path, &Marks::of(&world, &beneath), None).await.unwrap();
            write(&chain, 0, 7, 4096).await.unwrap();
        }
        let layers = chain.layer_paths();
        let merges = Manage::chain(&chain).unwrap();
        let (base, active) = (Some(&*layers[1]), ActiveAfter::Emptied);
        let top = Some(&*layers[2]);
        let control = &AtTheEnd;
        let merged = [
            merges.raise(RaiseLayers { into: &layers[3], base }, control).await,
            merges.commit(CommitLayers { top, base, active }, control).await,
            merges.commit(CommitLayers { top: None, base, active }, control).await,
            merges.stream(base, control).await,
        ];
        assert_eq!(merged.map(Result::unwrap), [const { Merged::Cancelled }; 4]);
        assert_eq!(chain.layer_paths(), layers);
        assert_eq!(read(&chain, 0, 4096).await.unwrap(), [7; 4096]);
        chain.close().await.unwrap();
    });
}
