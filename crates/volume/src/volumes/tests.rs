//! How many answers are waited for in sequence, where a store is far.

use super::*;
use crate::collect::CollectOptions;
use crate::testing::{environment, memory, name, run, write};
use mica_block::{Disk, Manage};
use mica_rt::now;
use mica_store::object::MemoryObjects;
use std::time::Duration;

const LEN: u64 = 1 << 20;
const LATENCY: Duration = Duration::from_millis(30);

/// The volumes in `near`, as who is far sees them.
async fn far(near: &MemoryObjects) -> Volumes {
    let far: Arc<dyn Objects> = Arc::new(near.clone().with_exact_latency(LATENCY));
    let (volumes, trips) = counted(Volumes::open(far, environment("far"), 1 << 20)).await;
    assert_eq!(trips, 1, "which store it is");
    volumes
}

/// What `act` comes to, and how many answers it waits for in sequence.
async fn counted<T>(act: impl Future<Output = Result<T>>) -> (T, u128) {
    let begun = now();
    let done = act.await.expect("done");
    let took = now().saturating_since(begun).as_nanos();
    assert_eq!(took % LATENCY.as_nanos(), 0, "whole requests");
    (done, took / LATENCY.as_nanos())
}

async fn near(memory: &MemoryObjects) -> Volumes {
    crate::testing::volumes(&(Arc::new(memory.clone()) as Arc<dyn Objects>), "near").await
}

/// The story: nobody knew how long an opening takes in a bucket, and each look at something was
/// waited for by itself.
#[test]
fn opening_for_writing_waits_for_eight_answers_and_for_three_more_to_fence() {
    run(1, async {
        let memory = memory();
        near(&memory).await.create(&name("web"), LEN).await.expect("made");
        let volumes = far(&memory).await;
        let opened = async |claimed: Claimed| {
            let (volume, trips) = counted(volumes.open_volume(&name("web"), claimed)).await;
            (Arc::new(volume), trips)
        };
        // The heads, the newest of them, the claims, the claim, the boundaries, the head, and the
        // heads above it. The boundaries are looked at with the head.
        let (volume, trips) = opened(Claimed::Refuse).await;
        assert_eq!(trips, 7, "no claim was there");
        volume.close().await.expect("closed");
        let (volume, trips) = opened(Claimed::Refuse).await;
        assert_eq!(trips, 8, "claims are in folders");
        volume.close().await.expect("closed");
        near(&memory).await.collect(CollectOptions::default(), &mut |_| ()).await.expect("done");
        let (volume, trips) = opened(Claimed::Refuse).await;
        assert_eq!(trips, 7, "the claims were collected, and a boundary is there");
        write(&volume, 0, &[7; 4096]).await;
        volume.flush().await.expect("put");
        // Each extent since its checkpoint, the gap after them, and the fence.
        let (_, trips) = opened(Claimed::TakeOver).await;
        assert_eq!(trips, 8 + 3);
    });
}

#[test]
fn opening_for_reading_waits_for_two_answers_and_for_what_a_writer_put_since() {
    run(2, async {
        let memory = memory();
        let writes = near(&memory).await;
        writes.create(&name("web"), LEN).await.expect("made");
        let volumes = far(&memory).await;
        let (_, trips) = counted(volumes.open_readable(&name("web"))).await;
        assert_eq!(trips, 2, "the heads, and the newest");
        let volume = writes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        write(&volume, 0, &[7; 4096]).await;
        volume.flush().await.expect("put");
        let (_, trips) = counted(volumes.open_readable(&name("web"))).await;
        assert_eq!(trips, 2 + 3, "an extent, the gap after it, and the heads above");
    });
}

#[test]
fn making_a_volume_waits_for_three_answers_and_for_a_claim_if_content_follows() {
    run(3, async {
        let memory = memory();
        near(&memory).await;
        let volumes = far(&memory).await;
        let ((), trips) = counted(volumes.create(&name("web"), LEN)).await;
        assert_eq!(trips, 3, "the heads, the head, and the heads above it");
        let new = NewVolume::default();
        let (_, trips) = counted(volumes.create_unfinished(&name("copy"), LEN, new)).await;
        assert_eq!(trips, 3 + 4, "the boundaries, the claims, the claim, and the boundaries");
    });
}
