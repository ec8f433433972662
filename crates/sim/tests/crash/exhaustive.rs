//! All short sequences of requests, with a power cut after every operation.

use crate::chain::{ChainSubject, Shape};
use mica_block::Zeroes;
use mica_gen::{Feature, Features};
use mica_rt::{Backend, Executor};
use mica_sim::crash::{Crashes, Cut, Ending};
use mica_sim::{Guest, Loss, World, scenario};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// What a sequence is made of.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A sector in the middle of a cluster.
    WritePart,
    /// From the middle of that cluster to the middle of the next.
    WriteAcross,
    /// Two whole clusters.
    WriteWhole,
    /// All clusters of an L2 table and more.
    WriteLong,
    /// The first cluster is zeroed and its space freed.
    Unmap,
    /// Parts of two clusters are zeroed and keep their space.
    Zero,
    /// Two clusters are discarded.
    Discard,
    Flush,
}

const STEPS: [Step; 8] = [
    Step::WritePart,
    Step::WriteAcross,
    Step::WriteWhole,
    Step::WriteLong,
    Step::Unmap,
    Step::Zero,
    Step::Discard,
    Step::Flush,
];

/// Longest sequence.
const STEPS_MAX: u32 = 3;

async fn take(guest: &Guest, step: Step, unit: u64) {
    let result = match step {
        Step::WritePart => guest.write(unit / 2, 1).await,
        Step::WriteAcross => guest.write(unit / 2, unit).await,
        Step::WriteWhole => guest.write(0, 2 * unit).await,
        Step::WriteLong => guest.write(unit + 1, 20 * unit).await,
        Step::Unmap => guest.write_zeroes(0, unit, Zeroes { may_unmap: true, fast: false }).await,
        Step::Zero => guest.write_zeroes(unit / 2, unit, Zeroes::default()).await,
        Step::Discard => guest.discard(0, 2 * unit).await,
        Step::Flush => guest.flush().await,
    };
    result.expect("no fault was injected");
}

/// The sequence with this number; `None` if there are no more.
fn sequence(mut number: u64) -> Option<Vec<Step>> {
    let base = STEPS.len() as u64;
    for len in 1..=STEPS_MAX {
        let count = base.pow(len);
        if number < count {
            let digit = |place| usize::try_from(number / base.pow(place) % base).unwrap();
            return Some((0..len).map(|place| STEPS[digit(place)]).collect());
        }
        number -= count;
    }
    None
}

/// Cuts the power after each operation of the sequence that belongs to the world's seed. One sync
/// in `ignored_one_in` is not done, unless that is zero.
async fn cut_after_each(world: &World, shape: &Shape, ignored_one_in: u64) {
    let Some(steps) = sequence(world.seed()) else { return };
    let subject = ChainSubject { shape: shape.clone() };
    let unit = shape.cluster_bytes / 512;
    for loss in [Loss::Everything, Loss::Nothing, Loss::Earlier, Loss::Torn] {
        for operations in 1.. {
            let world = World::new(world.seed() * 1000 + operations);
            world.trace(|| format!("{steps:?}, cut after {operations}, losing {loss:?}"));
            shape.put_in(&world);
            world.ignore_syncs(ignored_one_in);
            let mut crashes = Crashes::new(&world, &subject, shape.model());
            let work = async |guest: &Guest| {
                for step in &steps {
                    take(guest, *step, unit).await;
                }
            };
            if crashes.round(Cut::After(operations), loss, work).await == Ending::Closed {
                break;
            }
        }
    }
}

fn features(list: &[Feature]) -> Features {
    list.iter().copied().collect()
}

/// Small clusters, so that a few requests need several tables.
#[test]
fn short_sequences_on_small_clusters_survive_a_cut_after_every_operation() {
    static SHAPE: OnceLock<Shape> = OnceLock::new();
    let shape = SHAPE.get_or_init(|| {
        Shape::small(
            512,
            96,
            0.7,
            features(&[Feature::Zero, Feature::ZeroPreallocated, Feature::Deflate]),
        )
    });
    scenario(72, |world| async move { cut_after_each(&world, shape, 0).await });
}

#[test]
fn short_sequences_on_subclusters_survive_a_cut_after_every_operation() {
    static SHAPE: OnceLock<Shape> = OnceLock::new();
    let shape = SHAPE.get_or_init(|| {
        Shape::small(16 << 10, 24, 0.7, features(&[Feature::ExtendedL2, Feature::Zero]))
    });
    scenario(72, |world| async move { cut_after_each(&world, shape, 0).await });
}

/// The image is empty, so that each first write makes a table, and few counts fit in a block.
#[test]
fn short_sequences_on_an_empty_image_survive_a_cut_after_every_operation() {
    static SHAPE: OnceLock<Shape> = OnceLock::new();
    let shape = SHAPE.get_or_init(|| {
        Shape::small(512, 96, 0.0, features(&[Feature::RefcountBits, Feature::RawBase]))
    });
    scenario(72, |world| async move { cut_after_each(&world, shape, 0).await });
}

/// Every sync is needed: some sequence has to notice when one in four is missing.
#[test]
fn missing_syncs_are_noticed() {
    let shape = Shape::small(512, 96, 0.7, features(&[Feature::Zero]));
    let noticed = (0..48).filter(|seed| {
        let run = AssertUnwindSafe(|| {
            let executor = Executor::new(Backend::Sim { seed: *seed }).unwrap();
            executor.block_on(cut_after_each(&World::new(*seed), &shape, 4));
        });
        catch_unwind(run).is_err()
    });
    let noticed = noticed.count();
    assert!(noticed >= 3, "only {noticed} of 48 sequences notice");
}
