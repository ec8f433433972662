//! Dirty bitmaps that are kept true while a guest writes and the power goes: whatever differs from
//! the start is dirty afterwards, and what is nowhere near it is not.

use crate::chain::FOLDER;
use crate::plain::{Plain, range, read, write};
use crate::pushing::{Marks, make_overlay, mark_of};
use mica_block::{
    ActiveAfter, CommitLayers, Disk as _, ErrorKind, Images as _, LocalFuture, Manage as _,
    ManageBitmaps as _, ManageChain as _, MergeControl, MergeProgress, Result, Zeroes, read_exact,
};
use mica_qcow2::{CACHE_BYTES_MIN, Chain, ChainOptions, MapCache, read_header};
use mica_qcow2_format::{Version, decode_bitmap_directory};
use mica_qcow2_tools::bitmaps::{BitmapAction, edit_bitmap};
use mica_qcow2_tools::create::{ImageWish, Stores, create};
use mica_qcow2_tools::recover::repair_for_opening;
use mica_sim::crash::{Mode, until_power_cut};
use mica_sim::{ChangeFault, ENOSPC, Loss, Operation, World, scenario};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) const MIB: u64 = 1 << 20;
/// Six regions.
pub(crate) const DISK: u64 = 96 * MIB;
const GROWN: u64 = 117 * MIB;
/// Nothing is written there, nor in a region before it.
const QUIET: u64 = 52 * MIB;
const PLACE: u64 = 8 << 10;
/// What is there before, of `OLD`.
const FIRST: [u64; 2] = [5 * MIB, 70 * MIB];
const OLD: u8 = 7;

/// What a guest, or its host, does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Step {
    Write(u64),
    Zero(u64),
    Discard(u64),
    Flush,
    Grow,
    Push,
    Commit,
}

const PLAIN: [Step; 9] = [
    Step::Write(5 * MIB + 512),
    Step::Flush,
    Step::Write(20 * MIB),
    Step::Zero(70 * MIB + 4096),
    Step::Flush,
    Step::Write(6 * MIB),
    Step::Discard(70 * MIB),
    Step::Write(QUIET + 40 * MIB),
    Step::Flush,
];
const GROWING: [Step; 5] =
    [Step::Write(90 * MIB), Step::Grow, Step::Write(100 * MIB), Step::Write(5 * MIB), Step::Flush];
const LAYERS: [Step; 6] = [
    Step::Write(5 * MIB),
    Step::Push,
    Step::Write(20 * MIB),
    Step::Commit,
    Step::Write(70 * MIB),
    Step::Flush,
];

/// An image with two bitmaps that are enabled and one that is not.
pub(crate) struct Kept {
    world: World,
    pub(crate) image: Plain,
    granularity: u64,
}

impl Kept {
    pub(crate) async fn new(world: &World, cluster_bytes: u64, granularity: u64) -> Self {
        let wish = ImageWish { cluster_bytes: Some(cluster_bytes), ..ImageWish::default() };
        let image = Plain::new(world, &wish, DISK).await;
        let chain = image.open(Mode::Write).await;
        for at in FIRST {
            write(&chain, at, OLD, usize::try_from(2 * PLACE).unwrap()).await.unwrap();
        }
        chain.close().await.unwrap();
        drop(chain);
        let add = || BitmapAction::Add(Some(granularity));
        let path = Plain::top();
        edit_bitmap(world, &path, "still", vec![add(), BitmapAction::Disable]).await.unwrap();
        edit_bitmap(world, &path, "fine", vec![add()]).await.unwrap();
        let coarse = BitmapAction::Add(Some(MIB));
        edit_bitmap(world, &path, "coarse", vec![coarse]).await.unwrap();
        Self { world: world.clone(), image, granularity }
    }

    pub(crate) fn above() -> PathBuf {
        Path::new(FOLDER).join("above.qcow2")
    }

    pub(crate) async fn open(&self, path: &Path, mode: Mode) -> Result<Chain> {
        let options = ChainOptions {
            cache: MapCache::new(CACHE_BYTES_MIN),
            writable: mode == Mode::Write,
            repair: Some(repair_for_opening),
            ..ChainOptions::default()
        };
        Chain::open(Arc::new(self.world.clone()), path, &options).await
    }

    /// Does `steps`, and closes the disk.
    pub(crate) async fn work(&self, chain: &Chain, steps: &[Step]) -> Result<()> {
        for step in steps {
            match *step {
                Step::Write(at) => write(chain, at, 9, usize::try_from(PLACE).unwrap()).await?,
                Step::Zero(at) => {
                    let how = Zeroes { may_unmap: true, fast: false };
                    chain.write_zeroes(range(at, PLACE), how).await?;
                }
                Step::Discard(at) => chain.discard(range(at, 2 * PLACE)).await?,
                Step::Flush => chain.flush().await?,
                Step::Grow => chain.resize(GROWN).await?,
                Step::Push => {
                    let len = chain.geometry().len;
                    make_overlay(&self.world, &Self::above(), &Plain::top(), len).await?;
                    let names = Marks::of(&self.world, &Plain::top());
                    chain.push(&Self::above(), &names, None).await?;
                }
                Step::Commit => {
                    let layers =
                        CommitLayers { top: None, base: None, active: ActiveAfter::Emptied };
                    chain.commit(layers, &Steady).await?;
                }
            }
        }
        chain.close().await
    }

    /// Every place that may differ, with what is there.
    pub(crate) async fn places(&self, chain: &Chain) -> Vec<(u64, Vec<u8>)> {
        let mut all = Vec::new();
        let places = [5, 6, 20, 70, 90, 92, 100].map(|mib| mib * MIB);
        for at in places.into_iter().filter(|at| *at < chain.geometry().len) {
            all.push((at, read(chain, at, 2 * PLACE).await.unwrap()));
        }
        all
    }

    /// Of each sector whether it is dirty.
    async fn dirty(&self, chain: &Chain, name: &str) -> Vec<bool> {
        let mut sectors = Vec::new();
        let len = chain.geometry().len;
        while (sectors.len() as u64) * 512 < len {
            let at = sectors.len() as u64 * 512;
            let runs = chain.dirty(name, range(at, len - at)).await.unwrap();
            for (len, is_dirty) in runs {
                sectors.extend((0..len / 512).map(|_| is_dirty));
            }
        }
        sectors
    }

    /// What differs from the start is dirty, and what is quiet is not.
    pub(crate) async fn expect_true(&self, top: &Path, before: &[(u64, Vec<u8>)], about: &str) {
        let chain = self.open(top, Mode::Read).await.unwrap();
        let now = self.places(&chain).await;
        let is_still = self.dirty(&chain, "still").await;
        assert!(!is_still.contains(&true), "{about}: a disabled one records nothing");
        for name in ["fine", "coarse"] {
            let dirty = self.dirty(&chain, name).await;
            for (at, bytes) in &now {
                let unknown = vec![0; bytes.len()];
                let known = before.iter().find(|(known, _)| known == at);
                let old = known.map_or(&unknown, |(_, bytes)| bytes);
                let sectors = bytes.chunks(512).zip(old.chunks(512));
                for ((now, old), sector) in sectors.zip(usize::try_from(at / 512).unwrap()..) {
                    assert!(now == old || dirty[sector], "{about}: {name}, sector {sector}");
                }
            }
            let quiet = usize::try_from(QUIET / 512).unwrap();
            assert!(!dirty[quiet..quiet + 4096].contains(&true), "{about}: {name}");
        }
    }

    /// QEMU takes the bitmaps for what they are: nothing is flagged, and no bit is left that it
    /// does not know.
    pub(crate) async fn expect_settled(&self, path: &Path, about: &str) {
        let store = self.world.open(path).unwrap().store;
        let header = read_header(&*store).await.unwrap();
        assert_eq!(header.autoclear.unknown, 0, "{about}");
        let place = header.bitmaps.unwrap();
        let len = usize::try_from(place.directory_bytes).unwrap();
        let directory = read_exact(&*store, place.directory_offset, len).await.unwrap();
        let bits = header.cluster_bits;
        let all = decode_bitmap_directory(&directory, &place, bits, header.disk_bytes()).unwrap();
        assert!(all.iter().all(|entry| !entry.in_use), "{about}: {all:?}");
    }
}

/// A merge that nobody ends.
struct Steady;

impl MergeControl for Steady {
    fn step(&self, _: MergeProgress) -> LocalFuture<'_, ControlFlow<()>> {
        Box::pin(std::future::ready(ControlFlow::Continue(())))
    }
}

async fn cut_after_each(kind: (u64, u64, &[Step]), seed: u64, loss: Loss, stride: u64) {
    let (cluster_bytes, granularity, steps) = kind;
    let first = 1 + seed % stride;
    for operations in (first..).step_by(usize::try_from(stride).unwrap()) {
        let world = World::new(seed * 1000 + operations);
        let about = format!("{kind:?}, cut after {operations}, losing {loss:?}");
        let kept = Kept::new(&world, cluster_bytes, granularity).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        let before = kept.places(&chain).await;
        world.cut_power_after(operations, loss);
        let ended = until_power_cut(&world, kept.work(&chain, steps)).await;
        drop(chain);
        world.keep_power();
        let layers = [Kept::above(), Plain::top()];
        let is_layer = world.identify(&mark_of(&layers[1])).is_ok();
        let top = if is_layer { &layers[0] } else { &layers[1] };
        kept.expect_true(top, &before, &about).await;
        if let Some(done) = ended {
            done.unwrap();
            kept.expect_settled(top, &about).await;
            kept.expect_settled(&layers[1], &about).await;
            break;
        }
        if top == &layers[1] {
            kept.image.expect_uncorrupted(&about).await;
        }
        // Whoever writes next ends what the crash left, and goes on from there.
        let chain = kept.open(top, Mode::Write).await.unwrap();
        write(&chain, 6 * MIB, 3, 512).await.unwrap();
        chain.close().await.unwrap();
        drop(chain);
        kept.expect_settled(top, &about).await;
        kept.expect_true(top, &before, &about).await;
    }
}

fn survive(kind: (u64, u64, &'static [Step]), stride: u64) {
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        scenario(1, |world| async move {
            cut_after_each(kind, world.seed(), loss, stride).await;
        });
    }
}

#[test]
fn what_a_guest_changed_is_dirty_after_a_cut_after_every_operation() {
    survive((4096, 4096, &PLAIN), 5);
    survive((512, 512, &PLAIN), 61);
}

#[test]
fn what_a_guest_changed_is_dirty_when_the_power_goes_while_the_disk_grows() {
    survive((512, 512, &GROWING), 47);
    survive((65536, 65536, &GROWING), 5);
}

#[test]
fn what_a_guest_changed_is_dirty_when_the_power_goes_while_layers_come_and_go() {
    survive((4096, 4096, &LAYERS), 13);
}

#[test]
fn without_a_crash_a_bitmap_has_what_was_written_and_nothing_else() {
    scenario(1, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        kept.work(&chain, &PLAIN).await.unwrap();
        drop(chain);
        let chain = kept.open(&Plain::top(), Mode::Read).await.unwrap();
        let mut expected = vec![false; usize::try_from(DISK / 512).unwrap()];
        for step in PLAIN {
            let (at, len) = match step {
                Step::Write(at) | Step::Zero(at) => (at, PLACE),
                Step::Discard(at) => (at, 2 * PLACE),
                _ => continue,
            };
            let first = at / kept.granularity * kept.granularity / 512;
            let end = (at + len).next_multiple_of(kept.granularity) / 512;
            expected[usize::try_from(first).unwrap()..usize::try_from(end).unwrap()].fill(true);
        }
        assert!(kept.dirty(&chain, "fine").await == expected);
        drop(chain);
        kept.image.expect_sound().await;
    });
}

/// The story: the bitmaps of the layer beneath could not go on in the new one, which was flushed to
/// undo what had been begun. The guest's first flush then found nothing to do there, and was
/// acknowledged before the layer beneath was durable.
#[test]
fn first_flush_above_a_layer_waits_for_that_also_if_its_bitmaps_end_there() {
    scenario(4, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        let at = FIRST[0];
        write(&chain, at, 8, 4096).await.unwrap();
        chain.flush().await.unwrap();
        write(&chain, at, 9, 4096).await.unwrap();
        // Images of version 2 have no bitmaps.
        let wish = ImageWish {
            version: Some(Version::V2),
            backing_name: Some(Plain::top().file_name().unwrap().to_owned()),
            backing_format: Some("qcow2".to_owned()),
            ..ImageWish::default()
        };
        world.put(Kept::above(), Vec::new());
        let image = world.open_writable(&Kept::above()).unwrap().store;
        create(wish.plan(DISK).unwrap(), Stores { image: &*image, data: None }).await.unwrap();
        drop(image);
        let names = Marks::of(&world, &Plain::top());
        let push: LocalFuture<'_, ()> = Box::pin(async {
            chain.push(&Kept::above(), &names, None).await.unwrap();
        });
        let flush: LocalFuture<'_, ()> = Box::pin(async {
            while chain.layer_count() == 1 {
                mica_rt::sleep(Duration::from_micros(1)).await;
            }
            chain.flush().await.unwrap();
            world.cut_power(Loss::Everything);
        });
        let ended = until_power_cut(&world, mica_rt::join_all([push, flush])).await;
        assert!(ended.is_none(), "the power went");
        drop(chain);
        let is_layer = world.identify(&mark_of(&Plain::top())).is_ok();
        let top = if is_layer { Kept::above() } else { Plain::top() };
        let chain = kept.open(&top, Mode::Write).await.unwrap();
        assert_eq!(read(&chain, at, 4096).await.unwrap(), [9; 4096], "it was flushed");
        chain.close().await.unwrap();
    });
}

/// The clusters that bits get were counted ahead: only the log could take them for unused.
#[test]
fn clusters_of_bits_belong_to_nobody_else_after_a_kill() {
    scenario(4, |world| async move {
        let kept = Kept::new(&world, 512, 512).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        for at in FIRST {
            chain.flush().await.unwrap();
            write(&chain, at, 9, 512).await.unwrap();
        }
        drop(chain);
        world.kill();
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        write(&chain, 20 * MIB, 9, usize::try_from(MIB).unwrap()).await.unwrap();
        chain.close().await.unwrap();
        drop(chain);
        kept.image.expect_sound().await;
        let chain = kept.open(&Plain::top(), Mode::Read).await.unwrap();
        let dirty = kept.dirty(&chain, "fine").await;
        assert!(FIRST.iter().all(|at| dirty[usize::try_from(at / 512).unwrap()]));
    });
}

fn third() -> PathBuf {
    Path::new(FOLDER).join("third.qcow2")
}

/// Merges the middle layer of three into the base.
async fn merge_middle(chain: &Chain) {
    let (top, base) = (Kept::above(), Plain::top());
    let layers = CommitLayers { top: Some(&top), base: Some(&base), active: ActiveAfter::Emptied };
    chain.commit(layers, &Steady).await.unwrap();
}

#[test]
fn bitmap_is_refused_where_a_layer_above_it_is_written_and_records_nothing() {
    scenario(1, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        make_overlay(&world, &Kept::above(), &Plain::top(), DISK).await.unwrap();
        let chain = kept.open(&Kept::above(), Mode::Read).await.unwrap();
        assert!(!kept.dirty(&chain, "fine").await.contains(&true));
        drop(chain);
        let chain = kept.open(&Kept::above(), Mode::Write).await.unwrap();
        let error = chain.dirty("fine", range(0, DISK)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(format!("{error:?}").contains("above.qcow2"), "{error:?}");
        // It has nothing to record.
        assert!(!kept.dirty(&chain, "still").await.contains(&true));
        chain.close().await.unwrap();
    });
}

#[test]
fn all_of_a_disk_is_dirty_when_a_layer_leaves_whose_bitmap_is_not_true() {
    scenario(1, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
        kept.work(&chain, &[Step::Push]).await.unwrap();
        drop(chain);
        let store = world.open(&Kept::above()).unwrap().store;
        let header = read_header(&*store).await.unwrap();
        let at = usize::try_from(header.bitmaps.unwrap().directory_offset.bytes()).unwrap();
        drop(store);
        // The flags of the first one: in use.
        world.change(Kept::above(), |file| file[at + 15] |= 1);
        make_overlay(&world, &third(), &Kept::above(), DISK).await.unwrap();
        let chain = kept.open(&third(), Mode::Write).await.unwrap();
        let error = chain.dirty("fine", range(0, DISK)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        merge_middle(&chain).await;
        chain.close().await.unwrap();
        drop(chain);
        let chain = kept.open(&third(), Mode::Read).await.unwrap();
        assert!(!kept.dirty(&chain, "fine").await.contains(&false));
        assert!(!kept.dirty(&chain, "coarse").await.contains(&true));
    });
}

#[test]
fn bitmap_that_is_merged_into_a_shorter_base_keeps_what_is_behind_its_end() {
    scenario(1, |world| async move {
        let kept = Kept::new(&world, 4096, 4096).await;
        make_overlay(&world, &Kept::above(), &Plain::top(), DISK).await.unwrap();
        let path = Kept::above();
        edit_bitmap(&world, &path, "b", vec![BitmapAction::Add(None)]).await.unwrap();
        let chain = kept.open(&path, Mode::Write).await.unwrap();
        kept.work(&chain, &[Step::Grow]).await.unwrap();
        drop(chain);
        edit_bitmap(&world, &path, "b", vec![BitmapAction::Disable]).await.unwrap();
        make_overlay(&world, &third(), &path, GROWN).await.unwrap();
        let chain = kept.open(&third(), Mode::Write).await.unwrap();
        let before = kept.dirty(&chain, "b").await;
        assert!(before.contains(&true));
        merge_middle(&chain).await;
        chain.close().await.unwrap();
        drop(chain);
        let chain = kept.open(&third(), Mode::Read).await.unwrap();
        assert!(kept.dirty(&chain, "b").await == before);
    });
}

/// The story: the table of one bitmap had got a new place when there was no space for the next one,
/// and kept it, though nothing named it.
#[test]
fn growth_that_finds_no_space_for_a_bitmap_leaks_nothing() {
    scenario(1, |world| async move {
        let mut failed = 0;
        for nth in 1.. {
            let world = World::new(world.seed() * 1000 + nth);
            let kept = Kept::new(&world, 512, 512).await;
            let chain = kept.open(&Plain::top(), Mode::Write).await.unwrap();
            write(&chain, FIRST[0], 9, 512).await.unwrap();
            chain.flush().await.unwrap();
            let (operation, errno) = (Operation::Write, ENOSPC);
            world.inject_change(ChangeFault { operation, nth, lasting: false, errno });
            let grown = chain.resize(GROWN).await;
            if !world.heal_changes() {
                grown.unwrap();
                break;
            }
            failed += u64::from(grown.is_err());
            let closed = chain.close().await;
            drop(chain);
            match (grown, closed) {
                (Err(_), Ok(())) => kept.image.expect_sound().await,
                // The header may be anything.
                (_, Err(_)) => kept.image.expect_uncorrupted("not closed").await,
                // What had the old length may be left behind.
                (Ok(()), Ok(())) => kept.image.expect_uncorrupted("grown").await,
            }
        }
        assert!(failed > 3, "{failed}");
    });
}
