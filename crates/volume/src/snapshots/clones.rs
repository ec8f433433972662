//! Clones and readers among others who change the source.

use crate::heads::Claimed;
use crate::place::BLOCK_BYTES;
use crate::properties::Properties;
use crate::state::State;
use crate::testing::{kind, memory, name, origin, read, run, volumes, write};
use mica_block::{Disk, ErrorKind, Manage, Objects, Which};
use mica_rt::{join_all, sleep, spawn};
use mica_store::object::{FaultyObjects, FaultyOptions, ObjectOperation, Throttle};
use mica_units::Rng;
use std::sync::Arc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// A snapshot is dropped while it is cloned: the clone has all of it, or there is none.
#[test]
fn clone_of_a_snapshot_that_is_being_dropped_is_whole_or_is_not_there() {
    let (mut made, mut refused) = (0, 0);
    for seed in 0..200 {
        run(seed, async {
            let memory = memory().with_latency(Duration::from_millis(4));
            let objects: Arc<dyn Objects> = Arc::new(memory);
            let (web, copy) = (name("web"), name("copy"));
            let here = volumes(&objects, "host-1").await;
            here.create_as(&web, 4 * BLOCK, kind(seed)).await.expect("made");
            let volume = here.open_volume(&web, Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[1; BLOCK_BYTES]).await;
            let snapshots = volume.snapshots().expect("a volume has them");
            let number = snapshots.take("base").await.expect("taken").number;
            write(&volume, 0, &[2; BLOCK_BYTES]).await;
            let mut rng = Rng::new(seed);
            let (drop_at, clone_at) = (rng.below(400), rng.below(40));
            let cloning = Arc::clone(&objects);
            let cloned = spawn(async move {
                let there = volumes(&cloning, "host-2").await;
                sleep(Duration::from_millis(clone_at)).await;
                there.clone_volume(&name("web"), Some(&Which::Number(number)), &name("copy")).await
            });
            sleep(Duration::from_millis(drop_at)).await;
            snapshots.remove(&Which::Number(number)).await.expect("dropped");
            let opened = match cloned.await {
                Ok(()) => {
                    made += 1;
                    here.open_volume(&copy, Claimed::Refuse).await.expect("open")
                }
                Err(error) => {
                    refused += 1;
                    let kinds = [ErrorKind::NotFound, ErrorKind::Denied];
                    assert!(kinds.contains(&error.kind()), "{error:?}");
                    let missing = here.open_volume(&copy, Claimed::Refuse).await.err();
                    assert_eq!(missing.expect("none").kind(), ErrorKind::NotFound);
                    // The name is free.
                    here.create(&copy, BLOCK).await.expect("made");
                    return;
                }
            };
            assert_eq!(read(&opened, 0, BLOCK).await, [1; BLOCK_BYTES]);
            assert_eq!(here.snapshots(&copy).await.expect("listed"), []);
        });
    }
    assert!(made > 20 && refused > 20, "{made} were made, {refused} refused");
}

/// A clone whose maker died: nobody opens or clones it; it can be deleted, and made again.
#[test]
fn clone_that_was_not_finished_is_opened_by_nobody_and_can_be_deleted() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        let (web, copy) = (name("web"), name("copy"));
        volumes.create(&web, BLOCK).await.expect("made");
        volumes
            .heads(&copy)
            .pin(State::empty(BLOCK), Properties::default(), origin(), async || ())
            .await
            .expect("pinned");
        let other = name("other");
        for refused in [
            volumes.open_volume(&copy, Claimed::Refuse).await.err(),
            volumes.open_volume(&copy, Claimed::TakeOver).await.err(),
            volumes.open_readable(&copy).await.err(),
            volumes.clone_volume(&copy, None, &other).await.err(),
            volumes.take_snapshot(&copy, "").await.err(),
            volumes.snapshots(&copy).await.err(),
        ] {
            let refused = refused.expect("it is not ready");
            assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
            assert!(refused.to_string().contains("not finished"), "{refused}");
        }
        let again = volumes.clone_volume(&web, None, &copy).await;
        assert_eq!(again.expect_err("there is one").kind(), ErrorKind::Invalid);
        let ready: Vec<_> = volumes.list().await.expect("listed");
        let ready: Vec<_> = ready.iter().map(|info| (info.name.as_str(), info.is_ready)).collect();
        assert_eq!(ready, [("copy", false), ("web", true)]);
        volumes.delete(&copy, Claimed::Refuse).await.expect("deleted");
        volumes.clone_volume(&web, None, &copy).await.expect("cloned");
        volumes.open_volume(&copy, Claimed::Refuse).await.expect("open");
    });
}

/// A pinned head that others deleted does not come back.
#[test]
fn clone_that_is_deleted_while_it_is_made_stays_deleted() {
    run(2, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        let copy = name("copy");
        let heads = volumes.heads(&copy);
        let pinned =
            heads.pin(State::empty(BLOCK), Properties::default(), origin(), async || ()).await;
        let (pinned, ()) = pinned.expect("pinned");
        volumes.delete(&copy, Claimed::Refuse).await.expect("deleted");
        let refused = heads.unpin(&pinned, true).await.expect_err("it was deleted");
        assert_eq!(refused.kind(), ErrorKind::NotFound);
        heads.unpin(&pinned, false).await.expect("it is gone in any case");
        // Not even if the name has another volume by then.
        volumes.create(&copy, 2 * BLOCK).await.expect("made");
        assert_eq!(heads.unpin(&pinned, true).await.unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(volumes.info(&copy).await.expect("there").state.len, 2 * BLOCK);
    });
}

#[test]
fn whole_volume_is_cloned_only_if_nobody_has_it_open() {
    run(3, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        let (web, copy) = (name("web"), name("copy"));
        volumes.create(&web, 2 * BLOCK).await.expect("made");
        let volume = volumes.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&volume, 0, &[1; BLOCK_BYTES]).await;
        let refused = volumes.clone_volume(&web, None, &copy).await.expect_err("it is open");
        assert_eq!(refused.kind(), ErrorKind::Denied);
        volume.close().await.expect("closed");
        volumes.clone_volume(&web, None, &copy).await.expect("cloned");
        let clone = volumes.open_volume(&copy, Claimed::Refuse).await.expect("open");
        write(&clone, BLOCK, &[2; BLOCK_BYTES]).await;
        clone.close().await.expect("closed");
        let mut differs = Vec::new();
        let diff = volumes.diff((&web, None), (&copy, None), |range| differs.push(range));
        diff.await.expect("compared");
        assert_eq!(differs, [crate::testing::range(BLOCK, BLOCK)]);
        let volume = volumes.open_readable(&web).await.expect("open");
        assert_eq!(read(&volume, BLOCK, BLOCK).await, [0; BLOCK_BYTES]);
    });
}

/// Readers see all that was flushed before they looked, and disturb nobody.
#[test]
fn reader_of_an_open_volume_sees_what_was_flushed_and_the_writer_goes_on() {
    for seed in 0..20 {
        run(seed, async {
            let memory = memory().with_latency(Duration::from_millis(3));
            let objects: Arc<dyn Objects> = Arc::new(memory);
            let here = volumes(&objects, "host-1").await;
            let web = name("web");
            here.create(&web, BLOCK).await.expect("made");
            let volume = here.open_volume(&web, Claimed::Refuse).await.expect("open");
            let flushed = Arc::new(std::sync::atomic::AtomicU64::new(0));
            let readers = (0..3).map(|reader| {
                let (objects, flushed) = (Arc::clone(&objects), Arc::clone(&flushed));
                spawn(async move {
                    let there = volumes(&objects, &format!("host-{reader}")).await;
                    for _ in 0..15 {
                        sleep(Duration::from_millis(7 * reader + 11)).await;
                        let before = flushed.load(std::sync::atomic::Ordering::Relaxed);
                        let seen = there.open_readable(&name("web")).await.expect("open");
                        let content = read(&seen, 0, BLOCK).await;
                        let seen = u64::from_le_bytes(*content.first_chunk().expect("8 bytes"));
                        assert!(seen >= before, "{seen} is older than {before}");
                        let listed = there.snapshots(&name("web")).await.expect("listed").len();
                        assert!(listed as u64 >= before / 10);
                    }
                })
            });
            let readers: Vec<_> = readers.collect();
            for number in 1..=120_u64 {
                let mut content = [0; BLOCK_BYTES];
                content[..8].copy_from_slice(&number.to_le_bytes());
                write(&volume, 0, &content).await;
                volume.flush().await.expect("flushed");
                if number.is_multiple_of(10) {
                    let snapshots = volume.snapshots().expect("a volume has them");
                    snapshots.take("").await.expect("taken");
                }
                flushed.store(number, std::sync::atomic::Ordering::Relaxed);
            }
            join_all(readers).await;
            volume.close().await.expect("nobody fenced it");
        });
    }
}

/// Power fails at each put of a clone, in a store that keeps what was put early only with what
/// follows: a clone that was answered is there, and one that was not is whole, or can be made
/// again.
#[test]
fn clone_that_was_answered_outlives_a_power_cut() {
    let (mut answered, mut failed) = (0, 0);
    for served in 0..6 {
        run(served, async {
            let memory = memory();
            let objects: Arc<dyn Objects> = Arc::new(memory.clone());
            let (web, copy) = (name("web"), name("copy"));
            let here = volumes(&objects, "host-1").await;
            here.create_as(&web, 4 * BLOCK, kind(served)).await.expect("made");
            let volume = here.open_volume(&web, Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[1; BLOCK_BYTES]).await;
            volume.close().await.expect("closed");
            let options = FaultyOptions {
                only: Some(ObjectOperation::Put),
                throttle: Some(Throttle { served, refused: u64::MAX }),
                ..FaultyOptions::default()
            };
            let faulty: Arc<dyn Objects> = Arc::new(FaultyObjects::new(objects.clone(), options));
            let dying = volumes(&faulty, "host-1").await.for_verbs();
            let cloned = dying.clone_volume(&web, None, &copy).await;
            memory.cut_power();
            drop((here, dying));
            let here = volumes(&objects, "host-1").await;
            match cloned {
                Ok(()) => answered += 1,
                Err(_) => {
                    failed += 1;
                    let left = here.list().await.expect("listed");
                    if left.iter().any(|volume| volume.name == copy) {
                        here.delete(&copy, Claimed::TakeOver).await.expect("deleted");
                    }
                    here.clone_volume(&web, None, &copy).await.expect("cloned");
                }
            }
            let opened = here.open_volume(&copy, Claimed::Refuse).await.expect("open");
            assert_eq!(read(&opened, 0, BLOCK).await, [1; BLOCK_BYTES]);
        });
    }
    assert!(answered > 0 && failed > 1, "{answered} were answered, {failed} failed");
}
