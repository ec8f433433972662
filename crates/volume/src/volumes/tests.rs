//! How many answers are waited for in sequence, where a store is far.

use super::*;
use crate::collect::CollectOptions;
use crate::testing::{environment, memory, name, read, run, write};
use mica_block::{Disk, Manage, Which};
use mica_rt::{now, sleep, spawn};
use mica_store::object::MemoryObjects;
use std::sync::atomic::{AtomicBool, Ordering};
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

/// The story: a verb, or a server, looked who had a volume, and its opening read the same head
/// again.
#[test]
fn opening_that_goes_on_from_a_head_which_was_seen_does_not_read_it_again() {
    run(4, async {
        let memory = memory();
        near(&memory).await.create(&name("web"), LEN).await.expect("made");
        let volumes = far(&memory).await;
        let ((info, seen), trips) = counted(volumes.look(&name("web"))).await;
        assert_eq!((info.head, trips), (0, 2), "the heads, and the newest of them");
        let opening = Opening { seen: Some(seen), ..Claimed::Refuse.into() };
        let (volume, trips) = counted(volumes.open_volume(&name("web"), opening)).await;
        assert_eq!(trips, 7 - 1, "the boundaries, the claims, the claim, and so on");
        volume.close().await.expect("closed");
        let ((), trips) =
            counted(async { volumes.take_snapshot(&name("web"), "").await.map(drop) }).await;
        // A look, an opening, the extent, and the last head with the look above it.
        assert_eq!(trips, 2 + (8 - 1) + 1 + 2);
    });
}

/// A head that somebody else has gone on from by now is no reason to refuse, and none to open.
#[test]
fn head_that_was_seen_is_only_a_guess() {
    run(5, async {
        let memory = memory();
        let (web, here) = (name("web"), near(&memory).await);
        here.create(&web, LEN).await.expect("made");
        let opening =
            |seen: &Seen, claimed: Claimed| Opening { seen: Some(seen.clone()), ..claimed.into() };
        let (_, closed) = here.look(&web).await.expect("there");
        let volume = here.open_volume(&web, Claimed::Refuse).await.expect("open");
        let (_, open) = here.look(&web).await.expect("there");
        let refused = here.open_volume(&web, opening(&closed, Claimed::Refuse)).await;
        assert_eq!(refused.map(drop).expect_err("it is open").kind(), ErrorKind::Denied);
        write(&volume, 0, &[7; 4096]).await;
        volume.close().await.expect("nobody has fenced it");
        let volume = here.open_volume(&web, opening(&open, Claimed::Refuse)).await;
        let volume = Arc::new(volume.expect("it is closed by now"));
        assert_eq!(read(&volume, 0, 4096).await, [7; 4096]);
        volume.close().await.expect("closed");
        here.delete(&web, Claimed::Refuse).await.expect("deleted");
        here.create(&web, LEN).await.expect("made");
        let volume = here.open_volume(&web, opening(&open, Claimed::TakeOver)).await;
        let volume = Arc::new(volume.expect("another one"));
        assert_eq!(read(&volume, 0, 4096).await, [0; 4096]);
        let (_, other) = here.look(&web).await.expect("there");
        here.create(&name("mail"), LEN).await.expect("made");
        let mail = here.open_volume(&name("mail"), opening(&other, Claimed::Refuse)).await;
        mail.expect("it is another volume").close().await.expect("closed");
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

/// The story: each step of a clone was waited for by itself, and the head of its source read again
/// that was the newest still.
#[test]
fn clone_looks_back_at_its_source_while_it_looks_at_its_own_head() {
    run(6, async {
        let memory = memory();
        let here = near(&memory).await;
        here.create(&name("web"), LEN).await.expect("made");
        let which =
            Which::Number(here.take_snapshot(&name("web"), "").await.expect("taken").number);
        let volumes = far(&memory).await;
        let (web, copy) = (name("web"), name("copy"));
        let ((), trips) = counted(volumes.clone_volume(&web, Some(&which), &copy)).await;
        // The source's heads, the newest of them, the snapshot in its map; the clone's heads, the
        // first, a look above it and at the source, the second, and a look above that.
        assert_eq!(trips, 2 + 2 + 5);
    });
}

/// The story: a clone of a volume in a slow store was refused, since its writer put heads faster
/// than anybody could look at one and then whether it was still the newest.
#[test]
fn what_counts_is_found_beside_a_writer_that_puts_heads_all_the_time() {
    run(9, async {
        let memory = memory();
        let here = near(&memory).await;
        here.create(&name("web"), LEN).await.expect("made");
        let volume = here.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let (volume, ends) = (Arc::new(volume), Arc::new(AtomicBool::new(false)));
        let writer = spawn({
            let (volume, ends) = (Arc::clone(&volume), Arc::clone(&ends));
            async move {
                for byte in (0..=u8::MAX).cycle() {
                    if ends.load(Ordering::Relaxed) {
                        break;
                    }
                    write(&volume, 0, &[byte; 4096]).await;
                    volume.flush().await.expect("put");
                    volume.checkpoint().await.expect("put");
                    sleep(LATENCY * 2).await;
                }
            }
        });
        let volumes = far(&memory).await;
        let heads = volumes.heads(&name("web"));
        for _ in 0..20 {
            sleep(LATENCY / 7).await;
            let put = volume.shared().now().state;
            let put = here.tree.look_up(put.map, 0).await.expect("there").expect("written");
            let (_, found) = heads.counting().await.expect("it comes to its end");
            let found = here.tree.look_up(found.map, 0).await.expect("there").expect("written");
            assert!(found.extent().sequence >= put.extent().sequence, "{found:?} {put:?}");
        }
        ends.store(true, Ordering::Relaxed);
        writer.await;
        volume.close().await.expect("closed");
    });
}
