//! Requests of any length yield to others: what one client asks for does not make another wait.
//! Turns are counted, not time.

use crate::plain::{Plain, range, write};
use mica_block::{Disk as _, LocalFuture, Manage as _, Result, Survey, Zeroes};
use mica_qcow2::{Chain, ChainOptions};
use mica_qcow2_tools::create::ImageWish;
use mica_sim::{World, scenario};
use mica_units::GuestRange;
use std::future::poll_fn;
use std::sync::Arc;

const CLUSTER: u64 = 512;
const MIB: u64 = 1 << 20;
/// Clusters that a request may process in one turn.
const PER_TURN_MAX: u64 = 1024;

async fn opened(world: &World, len: u64) -> Chain {
    let wish = ImageWish { cluster_bytes: Some(CLUSTER), ..ImageWish::default() };
    Plain::new(world, &wish, len).await;
    let options = ChainOptions { writable: true, ..ChainOptions::default() };
    Chain::open(Arc::new(world.clone()), &Plain::top(), &options).await.unwrap()
}

/// What happened beside a request.
struct Beside {
    turns: u64,
    /// The most clusters linked between two turns.
    linked_max: u64,
}

/// Runs `request` beside a task that always wants its turn.
async fn beside(chain: &Chain, mut request: LocalFuture<'_, Result<()>>) -> Beside {
    let linked = || chain.write_stats().linked_clusters;
    let mut beside = Beside { turns: 0, linked_max: 0 };
    let mut before = linked();
    poll_fn(|context| {
        beside.turns += 1;
        beside.linked_max = beside.linked_max.max(linked() - before);
        before = linked();
        context.waker().wake_by_ref();
        request.as_mut().poll(context)
    })
    .await
    .unwrap();
    beside
}

/// Loads the map of the whole disk, and marks the image as in use: what follows needs no I/O.
async fn warm(chain: &Chain, len: u64) {
    chain.discard(range(0, CLUSTER)).await.unwrap();
    drop(chain.plan(range(0, len), Vec::new()).finish().await.unwrap());
}

#[test]
fn zeros_where_nothing_is_let_others_have_their_turn() {
    const LEN: u64 = 64 * MIB;
    scenario(1, |world| async move {
        let chain = opened(&world, LEN).await;
        warm(&chain, LEN).await;
        for may_unmap in [false, true] {
            let reads = world.reads_of(Plain::top());
            let how = Zeroes { may_unmap, fast: true };
            let zeros = beside(&chain, chain.write_zeroes(range(0, LEN), how)).await;
            assert_eq!(world.reads_of(Plain::top()), reads, "it waits for nothing");
            assert!(zeros.turns >= LEN / CLUSTER / PER_TURN_MAX, "{} turns", zeros.turns);
        }
        let discard = beside(&chain, chain.discard(range(0, LEN))).await;
        assert!(discard.turns >= LEN / CLUSTER / PER_TURN_MAX, "{} turns", discard.turns);
        chain.close().await.unwrap();
    });
}

#[test]
fn clusters_that_are_emptied_let_others_have_their_turn() {
    const LEN: u64 = 2 * MIB;
    scenario(1, |world| async move {
        let chain = opened(&world, LEN).await;
        for is_discard in [false, true] {
            write(&chain, 0, 7, usize::try_from(LEN).unwrap()).await.unwrap();
            let how = Zeroes { may_unmap: true, fast: false };
            let request = match is_discard {
                true => chain.discard(range(0, LEN)),
                false => chain.write_zeroes(range(0, LEN), how),
            };
            let emptied = beside(&chain, request).await;
            assert!(emptied.linked_max > 0, "it was linked meanwhile");
            assert!(emptied.linked_max <= PER_TURN_MAX, "{} at once", emptied.linked_max);
        }
        chain.close().await.unwrap();
    });
}

/// The extents of `range`; each part of a survey has a bounded number.
async fn surveyed(chain: &Chain, range: GuestRange) -> Result<u64> {
    const EXTENTS_MAX: usize = 4096 + SLICE_CLUSTERS;
    const SLICE_CLUSTERS: usize = (4 * MIB / CLUSTER) as usize;
    let mut survey = Survey::new(chain, range);
    let (mut extents, mut parts) = (0, 0);
    while let Some(part) = survey.next().await? {
        assert!(part.len() <= EXTENTS_MAX, "{} extents at once", part.len());
        extents += part.len() as u64;
        parts += 1;
    }
    assert!(parts > 1, "more than one takes");
    Ok(extents)
}

#[test]
fn surveys_of_very_many_extents_let_others_have_their_turn() {
    const EXTENTS: u64 = 2 * 8192;
    scenario(1, |world| async move {
        let chain = opened(&world, EXTENTS * CLUSTER).await;
        let all = usize::try_from(EXTENTS * CLUSTER).unwrap();
        write(&chain, 0, 7, all).await.unwrap();
        // Zeros by their own entries: the layers beneath need not be consulted.
        let how = Zeroes { may_unmap: true, fast: true };
        for cluster in (1..EXTENTS).step_by(2) {
            chain.write_zeroes(range(cluster * CLUSTER, CLUSTER), how).await.unwrap();
        }
        let whole = range(0, EXTENTS * CLUSTER);
        assert_eq!(surveyed(&chain, whole).await.unwrap(), EXTENTS);
        let reads = world.reads_of(Plain::top());
        let counted =
            async { surveyed(&chain, whole).await.map(|extents| assert_eq!(extents, EXTENTS)) };
        let planned = beside(&chain, Box::pin(counted)).await;
        assert_eq!(world.reads_of(Plain::top()), reads, "it waits for nothing");
        assert!(planned.turns >= EXTENTS / PER_TURN_MAX, "{} turns", planned.turns);
        chain.close().await.unwrap();
    });
}
