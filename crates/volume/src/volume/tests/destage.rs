//! What is put, when, and what waits.

use super::*;
use crate::log::LogDevice;
use crate::opening::Opening;
use crate::segment::Cut;
use crate::shared::Durability;
use mica_rt::{join_all, sleep, timeout};
use mica_store::MemoryStore;

/// A snapshot waits for nothing; it is in a head soon, together with others of that moment.
#[test]
fn snapshots_are_in_one_extent_and_one_head_soon_after_they_were_taken() {
    run(1, async {
        let objects = objects().with_latency(Duration::from_millis(2));
        let volume = Arc::new(made(&objects, LEN).await);
        let tended = Arc::clone(&volume);
        drop(spawn(async move { tended.tend().await }));
        for number in 1..=3 {
            write(&volume, 0, &[number; 512]).await.expect("written");
            let (number, label) = (number.into(), String::new());
            let cut = Cut::Take { number, label, time_ns: 1, origin: None };
            volume.shared.change_once(Change::Cut(cut)).await.expect("taken");
        }
        assert_eq!(volume.write_stats().groups, 0, "nothing waited");
        sleep(Duration::from_millis(300)).await;
        assert_eq!(volume.write_stats().groups, 1);
        let head = volume.shared.heads.newest().await.expect("a head");
        assert_eq!((head.state.next_snapshot, head.number), (4, 2));
        volume.close().await.expect("closed");
        timeout(Duration::from_secs(1), volume.tend()).await.expect("it ends with the volume");
    });
}

/// The story: the guest's executor made all extents, and the processor beside it had nothing to do.
#[test]
fn extents_of_a_long_stream_are_made_by_the_executor_that_tends_the_volume() {
    let pool = || Executor::new(Backend::Pool).expect("an executor");
    let (guest, tender) = (pool(), pool());
    let long = vec![7; WEIGHT_MAX * BLOCK_BYTES];
    let objects = objects();
    let volume = guest.block_on(made(&objects, long.len() as u64));
    volume.shared.now().tender = Some(tender.handle());
    guest.block_on(write(&volume, 0, &long)).expect("written");
    let stored = guest.block_on(async {
        timeout(Duration::from_millis(50), volume.shared.destage_all()).await.is_ok()
    });
    assert!(!stored, "the guest's executor has put it");
    tender.block_on(async {
        volume.shared.destage_all().await.expect("stored");
        volume.shared.at_rest().await.expect("nothing is left to do");
    });
    assert_eq!(volume.write_stats().groups, 1);
    // What is short is not worth waking another thread up.
    guest.block_on(write(&volume, 0, &[8; BLOCK_BYTES])).expect("written");
    guest.block_on(volume.flush()).expect("stored");
    assert_eq!(volume.write_stats().groups, 2);
    guest.block_on(volume.close()).expect("closed");
}

/// The store is away for long. What is kept in memory has a bound; then the guest waits.
#[test]
fn guest_waits_when_the_batches_are_full() {
    run(2, async {
        let memory = objects();
        let len = 16 * (WEIGHT_MAX * BLOCK_BYTES) as u64;
        made(&memory, len).await.close().await.expect("closed");
        let options = FaultyOptions {
            only: Some(ObjectOperation::Put),
            latency: Duration::from_secs(100),
            ..FaultyOptions::default()
        };
        let objects: Arc<dyn Objects> = Arc::new(FaultyObjects::new(Arc::new(memory), options));
        let volumes = Volumes::open(objects, environment("host-1"), 1 << 20).await;
        let volumes = volumes.expect("a store");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let written = AtomicU64::new(0);
        let guest = async {
            let part = vec![7; 1 << 20];
            while written.load(Ordering::Relaxed) < len {
                let at = written.load(Ordering::Relaxed);
                write(&volume, at, &part).await.expect("written");
                written.store(at + part.len() as u64, Ordering::Relaxed);
            }
        };
        let mut guest = std::pin::pin!(guest);
        assert!(timeout(Duration::from_secs(90), &mut guest).await.is_err(), "it waits");
        let kept = written.load(Ordering::Relaxed) >> 20;
        assert!((64..=80).contains(&kept), "{kept} MiB are kept");
        // Four are put at once, and they are not the only ones.
        timeout(Duration::from_secs(1000), &mut guest).await.expect("it goes on");
        volume.flush().await.expect("flushed");
        let groups = volume.write_stats().groups;
        assert!((16..24).contains(&groups), "{groups} groups");
        assert_eq!(read(&volume, len - 512, 512).await, [7; 512]);
    });
}

/// Nodes of extents that are not there yet are not in the cache either, which is too small: they
/// are read from memory. It has room for two. Flushes that wait together share an extent.
#[test]
fn extents_under_way_are_gone_on_from() {
    run(3, async {
        let objects = objects().with_latency(Duration::from_millis(20));
        let len = 1 << 40;
        let shared: Arc<dyn Objects> = Arc::new(objects.clone());
        let volumes = Volumes::open_or_make(shared, environment("host-1"), 1200).await;
        let volumes = volumes.expect("a store");
        volumes.create(&name("web"), len).await.expect("made");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        let guests = (0..16_u64).map(|guest| {
            let volume = &volume;
            async move {
                for round in 0..20_u64 {
                    let at = ((guest * 7919 + round * 104_729) % (len >> 12)) << 12;
                    write(volume, at, &[1; 4096]).await.expect("written");
                    sleep(Duration::from_millis(guest)).await;
                    volume.flush().await.expect("flushed");
                    assert_eq!(read(volume, at, 4096).await, [1; 4096]);
                }
            }
        });
        join_all(guests.collect::<Vec<_>>()).await;
        let extents = volume.write_stats().groups;
        assert!((20..200).contains(&extents), "{extents} extents for 320 flushes");
        volume.close().await.expect("closed");
        let found = volumes.check(&name("web"), &mut |_| {}).await.expect("checked");
        assert_eq!((found.damaged_count, found.blocks), (0, 320), "{found:?}");
    });
}

/// What a survey sees is what a guest would: nothing is put for it.
#[test]
fn survey_shows_what_is_in_memory_over_what_is_in_the_store() {
    for seed in 0..50 {
        run(seed, async {
            let objects = objects();
            let volume = made(&objects, LEN).await;
            let (mut rng, mut model) = (Rng::new(seed), vec![false; bytes(LEN.div_ceil(4096))]);
            for _ in 0..40 {
                let block = rng.below(LEN / 4096);
                let (at, count) = (block * 4096, 1 + rng.below((LEN / 4096 - block).min(5)));
                let there = bytes(block)..bytes(block + count);
                match rng.below(5) {
                    0 => {
                        volume.discard(range(at, count * 4096)).await.expect("discarded");
                        model[there].fill(false);
                    }
                    1 => volume.flush().await.expect("flushed"),
                    _ => {
                        let new = vec![1; bytes(count * 4096)];
                        write(&volume, at, &new).await.expect("written");
                        model[there].fill(true);
                    }
                }
            }
            let puts = volume.write_stats().groups;
            let survey = volume.survey(range(0, LEN)).await.expect("surveyed");
            assert!(Extent::covers(&survey, range(0, LEN)));
            assert_eq!(volume.write_stats().groups, puts);
            for extent in survey {
                let (start, end) = (extent.start.bytes(), extent.start.bytes() + extent.len);
                let has_data = extent.kind == ExtentKind::Encoded;
                let blocks = bytes(start / 4096)..bytes(end.div_ceil(4096));
                assert!(model[blocks].iter().all(|model| *model == has_data), "seed {seed}");
            }
        });
    }
}

/// A plan of what is cached is there at once, and so is one of what was just written.
#[test]
fn plans_of_what_is_in_memory_are_ready() {
    run(4, async {
        let objects = objects();
        let volume = made(&objects, LEN).await;
        let is_ready = |at, len| match volume.plan(range(at, len), Vec::new()) {
            Planned::Ready(plan) => plan.expect("planned").len(),
            Planned::Pending(_) => 0,
        };
        assert_eq!(is_ready(0, LEN), 1);
        write(&volume, 4096, &[1; 4096]).await.expect("written");
        assert_eq!(is_ready(0, LEN), 3);
        volume.flush().await.expect("flushed");
        assert_eq!(is_ready(0, LEN), 3, "its nodes were kept");
        volume.close().await.expect("closed");
        let other = volumes(&objects, "host-2").await;
        let volume = other.open_readable(&name("web")).await.expect("open");
        let planned = volume.plan(range(0, LEN), Vec::new());
        assert!(matches!(planned, Planned::Pending(_)));
        let hits = planned.finish().await.map(|_| volume.map_stats().hits).expect("planned");
        assert_eq!(read(&volume, 4096, 4096).await, [1; 4096]);
        let planned = volume.map_stats().hits;
        assert!(hits < planned);
        let plan = volume.plan(range(4096, 4096), Vec::new()).finish().await.expect("planned");
        read_whole(&volume, &plan).await.expect("read");
        assert_eq!(volume.map_stats().hits, planned, "it was asked before");
    });
}

/// Blocks that are beside each other share their path in the map.
#[test]
fn plan_of_a_mebibyte_asks_for_few_directories() {
    run(5, async {
        let volume = made(&objects(), 1 << 30).await;
        write(&volume, 0, &vec![1; 1 << 20]).await.expect("written");
        volume.flush().await.expect("flushed");
        let before = volume.map_stats().hits;
        drop(volume.plan(range(0, 1 << 20), Vec::new()).finish().await.expect("planned"));
        let asked = volume.map_stats().hits - before;
        assert!((16..=32).contains(&asked), "{asked} directories for 256 blocks in 2 levels");
    });
}

/// A write of many blocks lets others have their turn.
#[test]
fn small_write_does_not_wait_for_a_large_one() {
    run(6, async {
        let volume = made(&objects(), 64 << 20).await;
        let large = vec![1; 32 << 20];
        let mut large = std::pin::pin!(write(&volume, 0, &large));
        let mut small = std::pin::pin!(write(&volume, 40 << 20, &[2; 4096]));
        let first = std::future::poll_fn(|context| {
            if large.as_mut().poll(context).is_ready() {
                return std::task::Poll::Ready("large");
            }
            small.as_mut().poll(context).map(|_| "small")
        });
        assert_eq!(first.await, "small");
        large.await.expect("written");
    });
}

/// Most of what the log has was put into the store since it was written. A flush does not have the
/// device write it once more.
#[test]
fn flush_after_a_long_stream_leaves_the_log_alone() {
    run(5, async {
        const LOG: usize = 160 << 20;
        let objects = objects();
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), 256 << 20).await.expect("made");
        let file = Arc::new(MemoryStore::new_writable("log", vec![0; LOG]));
        let log = LogDevice::open(file, [1; 16]).await.expect("made");
        let (claimed, durability) = (Claimed::Refuse, Durability::Host);
        let opening = Opening { log: Some(log), durability, ..Opening::from(claimed) };
        let volume = volumes.open_volume(&name("web"), opening).await.expect("open");
        let unsynced = || volume.shared.log().expect("it has one").unsynced();
        let part = vec![7; 1 << 20];
        for at in 0..200 {
            write(&volume, at << 20, &part).await.expect("written");
        }
        let before = unsynced();
        // It went round without a sync of everything.
        assert!(before > 200 << 20, "{before} bytes");
        volume.shared.destage_all().await.expect("put");
        write(&volume, 0, &part).await.expect("written");
        let before = unsynced();
        volume.flush().await.expect("flushed");
        {
            let now = volume.shared.now();
            assert_eq!((now.state.records, unsynced()), (now.records, before));
        }
        // What comes then is small, and soon synced with the log.
        let mut flushes = 0;
        while unsynced() > 0 {
            write(&volume, 0, &[1; 4096]).await.expect("written");
            volume.flush().await.expect("flushed");
            sleep(Duration::from_millis(10)).await;
            flushes += 1;
            assert!(flushes < 10, "{} bytes", unsynced());
        }
    });
}
