//! Clocks that jump, stores that refuse for minutes, heads that point nowhere: nothing that was
//! acknowledged is lost, what cannot be read is named, and nothing else stops.

use super::*;
use crate::collect::CollectOptions;
use crate::place::{ExtentId, Place, Writer};
use crate::state::{Root, State};
use crate::testing::environment_at;
use mica_block::Which;
use mica_rt::{now, sleep};
use mica_store::object::Throttle;
use parking_lot::Mutex;

/// What a clock says that is set again and again: before, long after, and at the ends of time.
const TIMES: [u64; 6] =
    [1_700_000_000_000_000_000, 0, u64::MAX, 1, 1_600_000_000_000_000_000, 1 << 62];

/// Hosts whose clocks jump with each look at them.
async fn with_jumping_clock(objects: &MemoryObjects, host: &str, seed: u64) -> Volumes {
    let rng = Mutex::new(Rng::new(seed));
    let environment = environment_at(host, move || {
        let mut rng = rng.lock();
        TIMES[index(&mut rng, TIMES.len() as u64)]
    });
    let objects: Arc<dyn Objects> = Arc::new(objects.clone());
    Volumes::open_or_make(objects, environment, 1 << 20).await.expect("a store")
}

#[test]
fn clocks_that_jump_lose_nothing_and_confuse_no_snapshots() {
    for seed in 0..20 {
        run(seed, async {
            let objects = objects();
            let first = with_jumping_clock(&objects, "host-1", seed).await;
            first.create(&name("web"), LEN).await.expect("made");
            let (mut taken, mut last) = (Vec::new(), 0);
            for round in 0..6_u8 {
                let host = format!("host-{}", round % 2);
                let volumes = with_jumping_clock(&objects, &host, seed + u64::from(round)).await;
                let opened = volumes.open_volume(&name("web"), Claimed::TakeOver).await;
                let volume = opened.expect("open");
                assert_eq!(read(&volume, 0, 4096).await, [last; 4096], "seed {seed}");
                last = round + 1;
                write(&volume, 0, &[last; 4096]).await.expect("written");
                let snapshots = volume.snapshots().expect("a volume has them");
                let label = format!("s{round}");
                let info = snapshots.take(&label).await.expect("taken");
                taken.push((info.number, label, last));
                volume.flush().await.expect("flushed");
                // Nobody takes a difference of times for a long one, or fails over it.
                volume.volume().expect("it is one").figures();
                volume.weakness();
                if round % 3 == 0 {
                    volume.close().await.expect("closed");
                }
                let options = CollectOptions::default();
                volumes.collect(options, &mut |_| ()).await.expect("collected");
            }
            assert!(taken.is_sorted(), "numbers go on, whatever the time is");
            let judge = volumes(&objects, "judge").await;
            let listed = judge.snapshots(&name("web")).await.expect("listed");
            let listed = listed.iter().map(|info| (info.number, info.label.clone()));
            let wanted = taken.iter().map(|(number, label, _)| (*number, label.clone()));
            assert!(listed.eq(wanted), "seed {seed}");
            for (number, _, byte) in taken {
                let which = Which::Number(number);
                let snapshot = judge.open_snapshot(&name("web"), &which).await.expect("open");
                assert_eq!(read(&snapshot, 0, 4096).await, [byte; 4096], "seed {seed}");
            }
        });
    }
}

/// A bucket answers 503 to everything for minutes, again and again.
#[test]
fn storm_of_refusals_for_minutes_makes_a_guest_wait_and_loses_nothing() {
    run(1, async {
        let (objects, elsewhere) = (objects(), objects());
        let throttle = Some(Throttle { served: 40, refused: 300 });
        let options = FaultyOptions { throttle, ..FaultyOptions::default() };
        let store = FaultyObjects::new(Arc::new(objects.clone()), options);
        let calm = volumes(&objects, "host-1").await;
        calm.create(&name("web"), LEN).await.expect("made");
        let stormy = Volumes::open(Arc::new(store.clone()), environment("host-1"), 1 << 20).await;
        let opened = stormy.expect("a store").open_volume(&name("web"), Claimed::Refuse).await;
        let volume = opened.expect("open");
        let other = made(&elsewhere, LEN).await;
        let (mut longest, mut quickest) = (Duration::ZERO, Duration::MAX);
        for byte in 1..=40_u8 {
            let start = now();
            let at = u64::from(byte % 8) * 4096;
            write(&volume, at, &[byte; 4096]).await.expect("written");
            volume.flush().await.expect("it waits, and is answered");
            let took = now().saturating_since(start);
            (longest, quickest) = (longest.max(took), quickest.min(took));
            // The guest of another store does not notice.
            let start = now();
            write(&other, at, &[byte; 4096]).await.expect("written");
            other.flush().await.expect("flushed");
            assert!(now().saturating_since(start) < Duration::from_secs(1));
            sleep(Duration::from_millis(10)).await;
        }
        assert!(longest > Duration::from_secs(120), "a storm was waited for: {longest:?}");
        assert!(quickest < Duration::from_secs(1), "and was over: {quickest:?}");
        assert!(volume.latch().is_none());
        // It is lost: what was flushed is in the store.
        drop(volume);
        let taken = calm.open_volume(&name("web"), Claimed::TakeOver).await.expect("open");
        for byte in 33..=40_u8 {
            let at = u64::from(byte % 8) * 4096;
            assert_eq!(read(&taken, at, 4096).await, [byte; 4096]);
        }
    });
}

/// A head of the right form, whose map is in an extent that never was.
#[test]
fn head_that_points_nowhere_is_named_and_stops_nothing_else() {
    run(1, async {
        let objects = objects();
        let volumes = volumes(&objects, "host-1").await;
        for (text, byte) in [("web", 1), ("mail", 2)] {
            volumes.create(&name(text), LEN).await.expect("made");
            let volume = volumes.open_volume(&name(text), Claimed::Refuse).await.expect("open");
            write(&volume, 0, &[byte; 4096]).await.expect("written");
            volume.close().await.expect("closed");
        }
        let heads = volumes.heads(&name("web"));
        let last = heads.newest().await.expect("a head");
        let writer = Writer::new(3).expect("a number");
        let nowhere = Place::new(ExtentId { writer, sequence: 77 }, 512, 7);
        let map = Root { node: Some(nowhere), height: last.state.map.height };
        let state = State { map, ..last.state };
        let pointing = crate::format::head::Head { number: last.number + 1, state, ..last };
        let (object, content) = heads.as_object(&pointing);
        objects.put_if_absent(&object, content).await.0.expect("put");

        let is_named = |error: Error| {
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.in_one_line().contains("0000000003/0000004d"), "{error}");
        };
        let volume = volumes.open_readable(&name("web")).await.expect("open");
        let planned = volume.plan(range(0, 4096), Vec::new()).finish().await;
        is_named(planned.map(drop).expect_err("it is nowhere"));
        let found = volumes.check(&name("web"), &mut |_| ()).await.expect("checked");
        assert!(found.damaged_count > 0, "{found:?}");
        let before = objects.contents().len();
        let collected = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
        is_named(collected.map(drop).expect_err("what it needs is unknown"));
        assert_eq!(objects.contents().len(), before, "nothing is deleted");
        // The other one is written on, and read.
        let mail = volumes.open_volume(&name("mail"), Claimed::Refuse).await.expect("open");
        assert_eq!(read(&mail, 0, 4096).await, [2; 4096]);
        write(&mail, 0, &[3; 4096]).await.expect("written");
        mail.close().await.expect("closed");
        volumes.delete(&name("web"), Claimed::TakeOver).await.expect("given up");
        let collected = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
        assert!(collected.expect("collected").freed_extents > 0);
        let mail = volumes.open_readable(&name("mail")).await.expect("open");
        assert_eq!(read(&mail, 0, 4096).await, [3; 4096]);
    });
}
