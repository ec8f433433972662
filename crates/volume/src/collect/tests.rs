use super::*;
use crate::heads::Claimed;
use crate::place::BLOCK_BYTES;
use crate::testing::{environment, key, kind};
use crate::volume::Volume;
use mica_block::{Disk, Extent, Manage, ObjectName, Objects, read_whole};
use mica_rt::{Backend, Buf, Executor, sleep, spawn};
use mica_store::object::{FaultyObjects, FaultyOptions, MemoryObjects, Throttle};
use mica_units::{GuestOffset, GuestRange, Rng};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

mod clones;
mod lists;
mod races;
mod space;
mod speed;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BLOCKS: u64 = 40;
const LEN: u64 = BLOCKS * BLOCK;

/// A disk of so many blocks, by block.
fn blank(blocks: u64) -> Vec<u8> {
    vec![0; usize::try_from(blocks).expect("small")]
}

fn run<T>(seed: u64, test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed }).expect("a simulator").block_on(test)
}

fn name(text: &str) -> VolumeName {
    VolumeName::new(text).expect("a name")
}

async fn volumes_in(objects: Arc<dyn Objects>, host: &str) -> Volumes {
    let opened = Volumes::open_or_make(objects, environment(host), 1 << 20).await;
    opened.expect("a store").with_key(Some(key()))
}

async fn volumes(objects: &MemoryObjects, host: &str) -> Volumes {
    volumes_in(Arc::new(objects.clone()), host).await
}

async fn open(volumes: &Volumes, text: &str) -> Volume {
    volumes.open_volume(&name(text), Claimed::TakeOver).await.expect("open")
}

async fn write(volume: &Volume, block: u64, byte: u8) {
    let buf = Buf::from_slice(&[byte; BLOCK_BYTES]);
    volume.write(GuestOffset::new(block * BLOCK), buf).await.0.expect("written");
}

async fn read(volume: &Volume, block: u64, blocks: u64) -> Vec<u8> {
    let range = GuestRange::new(GuestOffset::new(block * BLOCK), blocks * BLOCK).expect("short");
    let plan: Vec<Extent> =
        volume.plan(range, Vec::new()).finish().await.expect("planned").to_vec();
    let whole = read_whole(volume, &plan).await.expect("read");
    whole.chunks_exact(BLOCK_BYTES).map(|block| block[0]).collect()
}

async fn collect(volumes: &Volumes) -> Collected {
    let collected = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
    collected.expect("collected")
}

fn names_in(objects: &MemoryObjects, folder: &str) -> Vec<String> {
    let names = objects.contents().into_keys();
    names.map(|name| name.as_str().to_owned()).filter(|name| name.starts_with(folder)).collect()
}

async fn copy_of(objects: &MemoryObjects) -> MemoryObjects {
    changed(objects, |_, _| ()).await
}

async fn changed(
    objects: &MemoryObjects,
    change: impl Fn(&ObjectName, &mut Vec<u8>),
) -> MemoryObjects {
    let copy = MemoryObjects::new("copy");
    for (name, content) in objects.contents() {
        let mut content = content.to_vec();
        change(&name, &mut content);
        copy.put_if_absent(&name, Buf::from_slice(&content)).await.0.expect("put");
    }
    copy
}

/// A store with a bit of everything: extents that are needed, partly needed, and not; old heads; a
/// fence; a volume that is deleted, one whose name was used again, one that a writer has open.
async fn lived_in(seed: u64) -> MemoryObjects {
    let objects = MemoryObjects::new("memory");
    let volumes = volumes(&objects, "host-1").await;
    let mut rng = Rng::new(seed);
    for (number, text) in (seed..).zip(["a", "b", "gone", "again"]) {
        volumes.create_as(&name(text), LEN, kind(number)).await.expect("made");
        for round in 0..3 {
            let volume = open(&volumes, text).await;
            for _ in 0..4 {
                for _ in 0..1 + rng.below(6) {
                    write(&volume, rng.below(BLOCKS), 10 + round).await;
                }
                volume.flush().await.expect("flushed");
            }
            if rng.percent(60) || text != "b" {
                volume.close().await.expect("closed");
            }
        }
    }
    for text in ["gone", "again"] {
        volumes.delete(&name(text), Claimed::Refuse).await.expect("deleted");
    }
    volumes.create(&name("again"), LEN).await.expect("made again");
    let volume = open(&volumes, "again").await;
    write(&volume, 3, 77).await;
    volume.flush().await.expect("flushed");
    objects
}

/// What all volumes of a store have.
async fn contents(objects: &MemoryObjects) -> Vec<(String, Vec<u8>)> {
    let volumes = volumes(&copy_of(objects).await, "judge").await;
    let mut all = Vec::new();
    for info in volumes.list().await.expect("listed") {
        let volume = open(&volumes, info.name.as_str()).await;
        all.push((info.name.as_str().to_owned(), read(&volume, 0, BLOCKS).await));
    }
    let found = volumes.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
    assert_eq!(found.damaged, Vec::<String>::new());
    all
}

#[test]
fn what_nothing_names_is_deleted_and_the_rest_stays() {
    for seed in 0..20 {
        run(seed, async {
            let objects = lived_in(seed).await;
            let before = contents(&objects).await;
            let volumes = volumes(&objects, "collector").await;
            let options = CollectOptions { dry_run: true, ..CollectOptions::default() };
            let dry = volumes.collect(options, &mut |_| ()).await.expect("collected");
            let was = objects.contents();
            let mut steps = BTreeSet::new();
            let wet = volumes
                .collect(CollectOptions::default(), &mut |at| {
                    steps.insert(format!("{:?}", at.step));
                })
                .await
                .expect("collected");
            assert_eq!(steps.len(), 3, "{steps:?}");
            let is = objects.contents();
            assert_eq!(wet.failed, 0, "{wet:?}");
            assert_eq!(dry.freed_extents, wet.freed_extents);
            assert_eq!(dry.freed_bytes, wet.freed_bytes);
            let freed = wet.freed_extents + wet.freed_heads + wet.freed_claims;
            assert_eq!(was.len() as u64 + 1 - freed, is.len() as u64, "a boundary came");
            assert!(wet.freed_extents > 10 && wet.freed_heads > 10 && wet.freed_claims > 5);
            assert_eq!(contents(&objects).await, before, "seed {seed}");
            // Each name has its highest head, and the fences are there.
            for (name, content) in &was {
                let is_fence = name.as_str().starts_with("extents/") && content.len() == 4096;
                assert!(!is_fence || is.contains_key(name), "{name}");
            }
            assert_eq!(names_in(&objects, "volumes/").len(), 4);
            assert_eq!(names_in(&objects, "writers/").len(), 0);
            assert_eq!(names_in(&objects, "boundaries/").len(), 1);
            let again = collect(&volumes).await;
            assert_eq!((again.freed_extents, again.freed_heads, again.freed_claims), (0, 0, 0));
            assert_eq!(again.live_bytes, wet.live_bytes);
            // Writers' numbers go on above the boundary.
            volumes.create(&name("new"), LEN).await.expect("made");
            let volume = open(&volumes, "new").await;
            write(&volume, 1, 1).await;
            volume.flush().await.expect("flushed");
        });
    }
}

/// A collector that is stopped at any of its requests has done no harm, and the next one does what
/// it has left.
#[test]
fn collector_that_dies_at_any_request_leaves_a_sound_store() {
    run(3, async {
        let objects = lived_in(3).await;
        let before = contents(&objects).await;
        let whole = copy_of(&objects).await;
        let faulty = FaultyObjects::new(Arc::new(whole.clone()), FaultyOptions::default());
        collect(&volumes_in(Arc::new(faulty.clone()), "collector").await).await;
        let count = faulty.requests();
        assert!(count > 100, "{count}");
        for served in 1..count {
            let copy = copy_of(&objects).await;
            let throttle = Some(Throttle { served, refused: u64::MAX });
            let options = FaultyOptions { throttle, ..FaultyOptions::default() };
            let faulty = Arc::new(FaultyObjects::new(Arc::new(copy.clone()), options));
            let volumes = volumes_in(faulty, "dying").await;
            let outcome = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
            assert!(outcome.map_or(true, |collected| collected.failed > 0), "request {served}");
            assert_eq!(contents(&copy).await, before, "request {served}");
            let volumes = self::volumes(&copy, "collector").await;
            collect(&volumes).await;
            let (left, all): (Vec<_>, Vec<_>) =
                (copy.contents().into_keys().collect(), whole.contents().into_keys().collect());
            assert_eq!(left, all, "request {served}");
        }
    });
}

/// Damage of what is needed stops everything; damage of what is not, nothing.
#[test]
fn damaged_node_or_head_stops_deletion_and_is_named() {
    run(5, async {
        let objects = lived_in(5).await;
        let volumes_of = volumes(&objects, "judge").await;
        let info = volumes_of.info(&name("a")).await.expect("known");
        let root = info.state.map.node.expect("it has blocks");
        let (at, extent) = (usize::try_from(root.offset()).expect("small"), root.extent().name());
        let bad = changed(&objects, |name, content| {
            if *name == extent {
                content[at + 12] ^= 1;
            }
        });
        let last_head = names_in(&objects, "volumes/a/").pop().expect("heads");
        let bad_head = changed(&objects, |name, content| {
            if name.as_str() == last_head {
                content[100] ^= 1;
            }
        });
        let gone = copy_of(&objects).await;
        gone.delete(&extent).await.expect("deleted");
        for (objects, wanted) in
            [(bad.await, extent.as_str()), (gone, extent.as_str()), (bad_head.await, &last_head)]
        {
            let volumes = volumes(&objects, "collector").await;
            let before = objects.contents();
            let error = volumes.collect(CollectOptions::default(), &mut |_| ()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
            assert!(error.to_string().contains(wanted), "{error}");
            assert!(error.to_string().contains("a"), "{error}");
            assert!(before == objects.contents(), "nothing was deleted");
        }
    });
}

/// The story: somebody made one object longer, and each server that collected the store ended, as
/// it had no memory for the bytes between what it had read and the nodes.
#[test]
fn extent_that_was_lengthened_is_named_and_not_read_as_a_whole() {
    run(7, async {
        let objects = lived_in(7).await;
        let info = volumes(&objects, "judge").await.info(&name("a")).await.expect("known");
        let root = info.state.map.node.expect("it has blocks");
        let extent = root.extent().name();
        let long = changed(&objects, |name, content| {
            if *name == extent {
                content.resize(content.len() + crate::format::extent::LEN_MAX + (1 << 20), 0);
            }
        });
        let long = long.await;
        let volumes = volumes(&long, "collector").await;
        let count = long.contents().len();
        let error = volumes.collect(CollectOptions::default(), &mut |_| ()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error:?}");
        let said = error.in_one_line();
        assert!(said.contains(extent.as_str()) && said.contains("its header says"), "{said}");
        assert_eq!(long.contents().len(), count, "nothing was deleted");
    });
}

#[test]
fn collector_goes_no_faster_than_it_may() {
    run(6, async {
        let objects = lived_in(6).await;
        let faulty = FaultyObjects::new(Arc::new(objects), FaultyOptions::default());
        let volumes = volumes_in(Arc::new(faulty.clone()), "collector").await;
        let (start, before) = (mica_rt::now(), faulty.requests());
        let speed = Speed { requests: Some(10), bytes: None };
        let options = CollectOptions { speed, ..CollectOptions::default() };
        volumes.collect(options, &mut |_| ()).await.expect("collected");
        let took = mica_rt::now().saturating_since(start).as_secs_f64();
        let requests = faulty.requests() - before;
        assert!(requests as f64 / took < 11.0, "{requests} in {took} s");
    });
}
