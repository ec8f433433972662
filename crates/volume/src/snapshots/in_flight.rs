//! Snapshots that are taken while a guest writes.

use crate::heads::Claimed;
use crate::place::BLOCK_BYTES;
use crate::testing::{memory, name, read, run, volumes, write};
use crate::volume::Volume;
use mica_block::{Disk, Manage, Objects, Which};
use mica_rt::{join_all, sleep, spawn};
use mica_units::Rng;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const WRITERS: u64 = 4;
/// Blocks of each writer.
const BLOCKS: u64 = 7;
const WRITES: u64 = 120;

/// How far a writer is.
#[derive(Clone, Copy, Default, Debug)]
struct Progress {
    begun: u64,
    answered: u64,
}

/// Write number `n` of a writer goes into block `n % BLOCKS` of its own: so what a snapshot has
/// says up to where it has the writes.
async fn write_all(volume: Rc<Volume>, writer: u64, progress: Rc<Cell<Progress>>, seed: u64) {
    let mut rng = Rng::new(seed);
    for number in 1..=WRITES {
        progress.set(Progress { begun: number, ..progress.get() });
        let block = writer * BLOCKS + number % BLOCKS;
        let mut content = [0; BLOCK_BYTES];
        content[..8].copy_from_slice(&number.to_le_bytes());
        write(&volume, block * BLOCK, &content).await;
        progress.set(Progress { answered: number, ..progress.get() });
        match rng.below(20) {
            0 => volume.flush().await.expect("flushed"),
            1..4 => sleep(Duration::from_millis(rng.below(5))).await,
            _ => {}
        }
    }
}

/// Up to which write of `writer` all are in `volume`.
async fn last_of(volume: &Volume, writer: u64) -> u64 {
    let mut numbers = Vec::new();
    for block in 0..BLOCKS {
        let content = read(volume, (writer * BLOCKS + block) * BLOCK, BLOCK).await;
        numbers.push(u64::from_le_bytes(*content.first_chunk().expect("8 bytes")));
    }
    let last = *numbers.iter().max().expect("some");
    for (block, number) in (0..).zip(&numbers) {
        // The last write to this block that is not after `last`.
        let expected = (0..=last).rev().find(|n| n % BLOCKS == block).unwrap_or(0);
        assert_eq!(*number, expected, "writer {writer}, block {block}: no prefix: {numbers:?}");
    }
    last
}

/// What a snapshot may have: from what was answered before, to what was begun before the answer.
type Bounds = Vec<(u64, u64)>;

#[test]
fn snapshot_has_a_prefix_of_what_is_written_while_it_is_taken() {
    let mut in_between = 0;
    for seed in 0..30 {
        run(seed, async {
            let memory = memory().with_latency(Duration::from_millis(4));
            let objects: Arc<dyn Objects> = Arc::new(memory);
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), WRITERS * BLOCKS * BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            let volume = Rc::new(volume);
            let progress: Vec<Rc<Cell<Progress>>> = (0..WRITERS).map(|_| Rc::default()).collect();
            let taken: Rc<RefCell<Vec<(u64, Bounds)>>> = Rc::default();
            let writers = (0..WRITERS).zip(&progress).map(|(writer, progress)| {
                let (volume, progress) = (Rc::clone(&volume), Rc::clone(progress));
                write_all(volume, writer, progress, seed * 10 + writer)
            });
            let take = async {
                let mut rng = Rng::new(seed);
                for _ in 0..25 {
                    sleep(Duration::from_millis(rng.below(12))).await;
                    let before: Vec<_> = progress.iter().map(|p| p.get().answered).collect();
                    let snapshots = volume.snapshots().expect("a volume has them");
                    let number = snapshots.take("").await.expect("taken").number;
                    let after = progress.iter().map(|p| p.get().begun);
                    taken.borrow_mut().push((number, before.into_iter().zip(after).collect()));
                }
            };
            let (writers, take) = (join_all(writers.collect::<Vec<_>>()), take);
            mica_rt::join_all([
                Box::pin(async { drop(writers.await) }) as mica_block::LocalFuture<'_, ()>,
                Box::pin(take),
            ])
            .await;
            volume.close().await.expect("closed");
            for (number, bounds) in taken.take() {
                let opened = volumes.open_snapshot(&name("web"), &Which::Number(number)).await;
                let snapshot = opened.expect("open");
                for (writer, (least, most)) in (0..).zip(bounds) {
                    let last = last_of(&snapshot, writer).await;
                    assert!((least..=most).contains(&last), "{least} <= {last} <= {most}");
                    in_between += u64::from(0 < last && last < WRITES);
                }
            }
        });
    }
    assert!(in_between > 500, "snapshots were taken while writes were in flight: {in_between}");
}

/// Many who take labelled snapshots at the same time: each label is had once, and numbers are in
/// order.
#[test]
fn labels_stay_unique_if_many_take_snapshots_at_once() {
    for seed in 0..10 {
        run(seed, async {
            let memory = memory().with_latency(Duration::from_millis(3));
            let objects: Arc<dyn Objects> = Arc::new(memory);
            let volumes = volumes(&objects, "host-1").await;
            volumes.create(&name("web"), BLOCK).await.expect("made");
            let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
            let volume = Arc::new(volume);
            let takes = (0..40_u64).map(|taker| {
                let volume = Arc::clone(&volume);
                spawn(async move {
                    let snapshots = volume.snapshots().expect("a volume has them");
                    let label = format!("label {}", taker % 10);
                    let taken = snapshots.take(&label).await.map(|info| info.number);
                    let unnamed = snapshots.take("").await.expect("taken").number;
                    (taken, unnamed)
                })
            });
            let taken = join_all(takes.collect::<Vec<_>>()).await;
            let named: Vec<u64> =
                taken.iter().filter_map(|(named, _)| named.clone().ok()).collect();
            assert_eq!(named.len(), 10, "each label once");
            let list = volume.snapshots().expect("a volume has them").list().await;
            let list = list.expect("listed");
            let numbers: Vec<_> = list.iter().map(|info| info.number).collect();
            assert_eq!(numbers, (1..=50).collect::<Vec<_>>(), "no number is missing");
            volume.close().await.expect("closed");
            assert_eq!(volumes.snapshots(&name("web")).await.expect("listed"), list);
        });
    }
}
