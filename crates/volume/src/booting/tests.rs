//! Boots of clones of one image, in a store that is far.

use super::BOOT_MAX;
use crate::boot::Boot;
use crate::collect::CollectOptions;
use crate::format::Id;
use crate::heads::Claimed;
use crate::names::VolumeName;
use crate::place::{BLOCK_BYTES, ExtentId, Place, Writer};
use crate::testing::{kind, memory, name, read, run, volumes, write};
use crate::tree::Tree;
use crate::volume::Volume;
use crate::volumes::Volumes;
use mica_block::{Manage, ManageVolume, Objects, Put, Which};
use mica_rt::{Buf, now, sleep, spawn};
use mica_store::object::MemoryObjects;
use mica_units::Rng;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const FAR: Duration = Duration::from_millis(30);
const MEMORY: u64 = 32 << 20;
/// Blocks of the image.
const BLOCKS: u64 = 2000;

/// A store that is far, with an image whose snapshot is called v1.
async fn gold(seed: u64) -> (MemoryObjects, Volumes) {
    let near = memory();
    let objects: Arc<dyn Objects> = Arc::new(near.clone());
    let here = volumes(&objects, "host-1").await;
    here.create_as(&name("gold"), BLOCKS * BLOCK, kind(seed)).await.expect("made");
    let volume = here.open_volume(&name("gold"), Claimed::Refuse).await.expect("open");
    let mut rng = Rng::new(seed);
    let content: Vec<u8> =
        (0..BLOCKS * BLOCK / 8).flat_map(|_| rng.next_u64().to_le_bytes()).collect();
    write(&volume, 0, &content).await;
    volume.snapshots().expect("has them").take("v1").await.expect("taken");
    volume.close().await.expect("closed");
    let objects: Arc<dyn Objects> = Arc::new(near.clone().with_latency(FAR));
    (near, volumes(&objects, "host-1").await)
}

/// What a boot reads: pieces here and there, the same for each.
fn boot_reads() -> Vec<(u64, u64)> {
    let mut rng = Rng::new(7);
    (0..60).map(|_| (rng.below(BLOCKS - 16) * BLOCK, (1 + rng.below(12)) * BLOCK)).collect()
}

async fn cloned(volumes: &Volumes, source: &str, target: &str) -> VolumeName {
    let which = Which::Label("v1".to_owned());
    volumes.clone_volume(&name(source), Some(&which), &name(target)).await.expect("cloned");
    name(target)
}

/// A volume that is open and tended, as a server has it.
async fn opened(volumes: &Volumes, name: &VolumeName) -> Arc<Volume> {
    let volumes = volumes.with_key(Some(crate::testing::key())).with_boot_fetch(MEMORY);
    let volume = volumes.open_volume(name, Claimed::Refuse).await.expect("open");
    let volume = Arc::new(volume);
    let tended = Arc::clone(&volume);
    drop(spawn(async move { tended.tend().await }));
    volume
}

/// Boots, and says how long that took.
async fn booted(volume: &Volume) -> (Duration, Vec<Vec<u8>>) {
    let start = now();
    let mut content = Vec::new();
    for (at, len) in boot_reads() {
        content.push(read(volume, at, len).await);
        // It does something with it.
        sleep(Duration::from_millis(2)).await;
    }
    (now().saturating_since(start), content)
}

#[test]
fn second_boot_of_an_image_waits_far_less_whatever_its_volumes_are() {
    for seed in 0..4 {
        run(seed, async {
            let (_, volumes) = gold(seed).await;
            let first = opened(&volumes, &cloned(&volumes, "gold", "first").await).await;
            let (cold, wanted) = booted(&first).await;
            assert_eq!(first.figures().boot.expect("booting").served_bytes, 0, "no record yet");
            first.close().await.expect("closed");
            let info = volumes.boot_record(&name("gold")).await.expect("read").expect("there");
            assert_eq!(info.boots, 1);
            // As on another host: nothing of the first boot is in memory.
            let elsewhere = crate::testing::volumes(&volumes.objects, "host-2").await;
            let second = opened(&elsewhere, &cloned(&elsewhere, "gold", "second").await).await;
            let (warm, content) = booted(&second).await;
            assert_eq!(content, wanted);
            assert!(warm * 4 < cold, "{warm:?} beside {cold:?}");
            let figures = second.figures().boot.expect("booting");
            assert_eq!((figures.record_bytes, figures.boots), (info.bytes, 1));
            assert!(figures.served_bytes > 0 && figures.fetched_bytes <= MEMORY);
            second.close().await.expect("closed");
            let again = volumes.boot_record(&name("second")).await.expect("read");
            assert_eq!(again, Some(info), "the same boot changes nothing");
        });
    }
}

#[test]
fn boot_ends_by_itself_and_gives_its_memory_back() {
    run(5, async {
        let (_, volumes) = gold(0).await;
        let web = cloned(&volumes, "gold", "web").await;
        let volume = opened(&volumes, &web).await;
        booted(&volume).await;
        sleep(BOOT_MAX + Duration::from_secs(1)).await;
        assert!(!volume.figures().boot.expect("it was recorded").is_booting);
        let info = volumes.boot_record(&web).await.expect("read").expect("there");
        // What is read later is not of the boot.
        read(&volume, 0, BLOCKS * BLOCK).await;
        volume.close().await.expect("closed");
        assert_eq!(volumes.boot_record(&web).await.expect("read"), Some(info));
    });
}

/// In the store they are as they were written.
#[test]
fn bytes_that_were_damaged_on_their_way_into_memory_are_read_again() {
    run(11, async {
        let near = memory();
        let tree = Tree::new(Arc::new(near.clone()), 1 << 20);
        let boot = Boot::new(Id::default(), MEMORY, &tree);
        let guest = boot.for_guests(&tree);
        let extent = ExtentId { writer: Writer::new(1).expect("a writer"), sequence: 0 };
        let (good, damaged) = ([7; BLOCK_BYTES], [8; BLOCK_BYTES]);
        let put = async |bytes: &[u8]| {
            let put = near.put_if_absent(&extent.name(), Buf::from_slice(bytes)).await;
            assert_eq!(put.0.expect("put"), Put::Done);
        };
        put(&damaged).await;
        assert!(guest.load(extent, &(0..BLOCK)).await.expect("loaded"));
        near.delete(&extent.name()).await.expect("deleted");
        put(&good).await;
        let place = Place::new(extent, 0, mica_map::crc32c(&good));
        let read = async || guest.read_blocks(place, [place], Buf::new(BLOCK_BYTES)).await;
        for _ in 0..3 {
            assert_eq!(read().await.expect("read again")[..], good);
        }
        assert_eq!(boot.chunks.fetched.load(Ordering::Relaxed), 2 * (16 << 10));
    });
}

/// Nobody would end it, and give the memory back.
#[test]
fn disk_that_is_only_read_does_not_boot() {
    run(10, async {
        let (_, volumes) = gold(0).await;
        let volumes = volumes.with_key(Some(crate::testing::key())).with_boot_fetch(MEMORY);
        let gold = volumes.open_readable(&name("gold")).await.expect("open");
        let snapshot = volumes.open_snapshot(&name("gold"), &Which::Number(1)).await.expect("open");
        let head = volumes.heads(&name("gold")).newest().await.expect("there");
        assert!(!volumes.tree.chunks_of(head.boot_image()).is_used());
        for volume in [gold, snapshot] {
            read(&volume, 0, BLOCK).await;
            volume.close().await.expect("closed");
        }
        assert_eq!(volumes.boot_record(&name("gold")).await.expect("read"), None);
    });
}

/// Two that boot at once, of clones of a clone: what one fetches the other has.
#[test]
fn boots_at_once_share_what_is_fetched() {
    run(6, async {
        let (near, volumes) = gold(0).await;
        let first = opened(&volumes, &cloned(&volumes, "gold", "first").await).await;
        let (_, wanted) = booted(&first).await;
        first.close().await.expect("closed");
        volumes.take_snapshot(&name("first"), "v1").await.expect("taken");
        let far: Arc<dyn Objects> = Arc::new(near.with_latency(FAR));
        let elsewhere = crate::testing::volumes(&far, "host-2").await;
        let mut boots = Vec::new();
        for target in ["one", "two", "three"] {
            let volume = opened(&elsewhere, &cloned(&elsewhere, "first", target).await).await;
            boots.push(spawn(async move {
                let (_, content) = booted(&volume).await;
                (volume, content)
            }));
        }
        let mut volumes = Vec::new();
        for boot in boots {
            let (volume, content) = boot.await;
            assert_eq!(content, wanted);
            volumes.push(volume);
        }
        let figures = volumes[0].figures().boot.expect("booting");
        assert!(figures.served_bytes > 2 * figures.record_bytes, "{figures:?}");
        assert!(figures.fetched_bytes < 2 * figures.record_bytes + (4 << 20), "{figures:?}");
        for volume in volumes {
            volume.close().await.expect("closed");
        }
    });
}

#[test]
fn damaged_or_foreign_record_is_no_obstacle_and_is_replaced() {
    run(8, async {
        let (near, volumes) = gold(0).await;
        let web = cloned(&volumes, "gold", "web").await;
        let first = opened(&volumes, &web).await;
        let (_, wanted) = booted(&first).await;
        first.close().await.expect("closed");
        let record = near.contents().into_keys().find(|name| name.as_str().starts_with("boots/"));
        let record = record.expect("there is one");
        for damage in [&b"MICABOT\n\x01"[..], b"", &[0xff; 300]] {
            near.delete(&record).await.expect("deleted");
            let put = near.put_if_absent(&record, mica_rt::Buf::from_slice(damage)).await;
            put.0.expect("put");
            let volume = opened(&volumes, &web).await;
            assert_eq!(booted(&volume).await.1, wanted);
            volume.close().await.expect("closed");
            let info = volumes.boot_record(&web).await.expect("read").expect("made again");
            assert_eq!(info.boots, 1);
            let all = near.contents().into_keys();
            let all: Vec<_> = all.filter(|name| name.as_str().starts_with("boots/")).collect();
            assert_eq!(all.len(), 1, "the damaged one is gone");
            near.delete(&all[0]).await.expect("deleted");
        }
    });
}

#[test]
fn record_goes_with_the_last_volume_of_its_image() {
    run(9, async {
        let (near, volumes) = gold(0).await;
        let web = cloned(&volumes, "gold", "web").await;
        let first = opened(&volumes, &web).await;
        booted(&first).await;
        first.close().await.expect("closed");
        let has_record =
            || near.contents().into_keys().any(|name| name.as_str().starts_with("boots/"));
        let collect = async || {
            let collected = volumes.collect(CollectOptions::default(), &mut |_| {}).await;
            collected.expect("collected").freed_boots
        };
        volumes.delete(&name("gold"), Claimed::Refuse).await.expect("deleted");
        assert_eq!((collect().await, has_record()), (0, true), "a clone needs it");
        volumes.delete(&web, Claimed::Refuse).await.expect("deleted");
        assert_eq!((collect().await, has_record()), (1, false));
    });
}
