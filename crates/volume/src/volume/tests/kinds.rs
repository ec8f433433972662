//! Volumes that are compressed, encrypted, or both.

use super::*;
use crate::collect::{CollectOptions, Speed};
use crate::crypt::VolumeKey;
use crate::log::LogDevice;
use crate::opening::Opening;
use mica_block::{Store, Which, read_exact};
use mica_store::MemoryStore;
use mica_units::HostOffset;

const BLOCK: u64 = BLOCK_BYTES as u64;
const BOTH: u64 = 3;
const MARKER: &[u8] = b"what a guest wrote and nobody is to see";

/// Blocks that are full of the marker.
fn marked(blocks: u64) -> Vec<u8> {
    MARKER.iter().copied().cycle().take(bytes(blocks * BLOCK)).collect()
}

fn random(blocks: u64) -> Vec<u8> {
    let mut rng = Rng::new(1);
    (0..blocks * BLOCK).map(|_| byte(&mut rng)).collect()
}

fn has(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

async fn without_key(objects: &MemoryObjects) -> Volumes {
    volumes(objects, "host-2").await.with_key(None)
}

#[test]
fn nothing_of_a_guest_is_in_the_store_or_the_log_of_an_encrypted_volume() {
    for number in 0..4 {
        run(number, async {
            let objects = objects();
            let file = vec![0; 4096 + 64 * (16 << 10)];
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new_writable("log", file));
            let log_bytes = async || {
                let read = read_exact(&*store, HostOffset::ZERO, 64 * (16 << 10)).await;
                read.expect("read").to_vec()
            };
            let log = LogDevice::open(Arc::clone(&store), [7; 16]).await.expect("a log");
            let volumes = volumes(&objects, "host-1").await;
            let web = name("web");
            volumes.create_as(&web, LEN, kind(number)).await.expect("made");
            let opening = |log: &Arc<LogDevice>| Opening {
                log: Some(Arc::clone(log)),
                durability: Durability::Host,
                ..Opening::from(Claimed::Refuse)
            };
            let volume = volumes.open_volume(&web, opening(&log)).await.expect("open");
            write(&volume, 0, &marked(8)).await.expect("written");
            write(&volume, 20 * BLOCK + 512, MARKER).await.expect("written");
            volume.flush().await.expect("flushed");
            // It is killed, and its machine goes on.
            drop((volume, log));
            let is_encrypted = number & 2 != 0;
            assert_eq!(has(&log_bytes().await, MARKER), !is_encrypted, "{number}");
            let log = LogDevice::open(Arc::clone(&store), [8; 16]).await.expect("a log");
            let volume = volumes.open_volume(&web, opening(&log)).await.expect("open");
            assert_eq!(read(&volume, 0, 8 * BLOCK).await, marked(8));
            assert!(read(&volume, 20 * BLOCK + 512, 512).await.starts_with(MARKER));
            volume.close().await.expect("closed");
            let stored = objects.contents().into_values();
            let shows = stored.into_iter().any(|content| has(&content, MARKER));
            // What is compressed has the marker once, unless that is encoded, too.
            assert!(!is_encrypted || !shows, "{number}");
            assert!(number != 0 || shows, "the test sees what is there");
        });
    }
}

#[test]
fn missing_or_wrong_key_is_named_before_anything_is_done() {
    run(1, async {
        let objects = objects();
        let volume = made_as(&objects, LEN, kind(BOTH)).await;
        write(&volume, 0, &marked(4)).await.expect("written");
        volume.flush().await.expect("flushed");
        // Its writer is dead.
        drop(volume);
        let before = objects.contents();
        let other = VolumeKey::of_file("other.key", &[8; 32]).expect("a key");
        let wrong = volumes(&objects, "host-2").await.with_key(Some(Arc::new(other)));
        for (volumes, wanted) in
            [(without_key(&objects).await, "--volume-key"), (wrong, "and other.key has key ")]
        {
            let web = name("web");
            for refused in [
                volumes.open_volume(&web, Claimed::TakeOver).await.map(drop).expect_err("no"),
                volumes.open_readable(&web).await.map(drop).expect_err("no"),
            ] {
                assert_eq!(refused.kind(), ErrorKind::Denied);
                let what = refused.to_string();
                assert!(
                    what.contains(wanted) && what.contains(&key().name().to_string()),
                    "{what}"
                );
            }
        }
        assert_eq!(objects.contents(), before);
        let volumes = volumes(&objects, "host-2").await;
        let volume = volumes.open_volume(&name("web"), Claimed::TakeOver).await.expect("open");
        assert_eq!(read(&volume, 0, 4 * BLOCK).await, marked(4));
        volume.close().await.expect("closed");
        let made = volumes.with_key(None).create_as(&name("new"), LEN, kind(BOTH)).await;
        assert_eq!(made.expect_err("no key").kind(), ErrorKind::Invalid);
    });
}

#[test]
fn snapshots_clones_and_collection_need_no_key() {
    run(1, async {
        let objects = objects();
        let volume = made_as(&objects, LEN, kind(BOTH)).await;
        let (web, copy) = (name("web"), name("copy"));
        write(&volume, 0, &marked(30)).await.expect("written");
        volume.close().await.expect("closed");
        let locked = without_key(&objects).await;
        let first = locked.take_snapshot(&web, "first").await.expect("taken");
        let which = Which::Number(first.number);
        let keyed = volumes(&objects, "host-1").await;
        let volume = keyed.open_volume(&web, Claimed::Refuse).await.expect("open");
        write(&volume, 0, &random(20)).await.expect("written");
        volume.close().await.expect("closed");
        locked.label_snapshot(&web, &which, "v1").await.expect("labelled");
        locked.clone_volume(&web, Some(&which), &copy).await.expect("cloned");
        let infos = locked.list().await.expect("listed");
        let of = |info: &crate::VolumeInfo| (info.properties.compression, info.properties.key());
        assert!(infos.iter().all(|info| info.properties.key() == Some(key().name())));
        assert_eq!(of(&infos[0]), of(&infos[1]), "a clone is what its source is");
        let mut ranges = Vec::new();
        let sides = ((&web, None), (&copy, None));
        locked.diff(sides.0, sides.1, |range| ranges.push(range)).await.expect("compared");
        let differ: u64 = ranges.iter().map(|range| range.len()).sum();
        assert_eq!(differ, 20 * BLOCK);
        // A volume that was opened for its snapshots shows nothing, and takes nothing.
        let blind = locked.open_without_blocks(&copy, Claimed::Refuse).await.expect("open");
        let plan = blind.plan(range(0, BLOCK), Vec::new()).finish().await.expect("planned");
        let shown = read_whole(&blind, &plan).await.map(drop);
        assert_eq!(shown.expect_err("locked").kind(), ErrorKind::Denied);
        blind.close().await.expect("closed");
        let copied = keyed.open_volume(&copy, Claimed::Refuse).await.expect("open");
        assert_eq!(read(&copied, 0, 30 * BLOCK).await, marked(30));
        write(&copied, BLOCK, &random(1)).await.expect("written");
        copied.close().await.expect("closed");
        locked.rollback(&web, &which).await.expect("rolled back");
        let options = CollectOptions { punch: true, ..CollectOptions::default() };
        let collected = locked.collect(options, &mut |_| ()).await.expect("collected");
        assert!(collected.freed_extents > 0, "{collected:?}");
        for sparse in &collected.sparse {
            let opened = locked.open_volume(&sparse.name, Claimed::Refuse).await.map(drop);
            assert_eq!(opened.expect_err("no").kind(), ErrorKind::Denied);
        }
        let found = locked.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
        assert_eq!(found.damaged, Vec::<String>::new());
        let volume = keyed.open_readable(&web).await.expect("open");
        assert_eq!(read(&volume, 0, 30 * BLOCK).await, marked(30));
        let copied = keyed.open_readable(&copy).await.expect("open");
        assert_eq!(read(&copied, BLOCK, BLOCK).await, random(1));
        locked.hand_over(&web, "host-9").await.expect("handed over");
    });
}

/// What is read one block after the other is decompressed once, and read once.
#[test]
fn frame_is_read_once_for_all_of_its_blocks() {
    run(1, async {
        let objects = objects();
        let volume = made_as(&objects, 64 * BLOCK, kind(1)).await;
        write(&volume, 0, &marked(64)).await.expect("written");
        volume.close().await.expect("closed");
        let faulty = FaultyObjects::new(Arc::new(objects.clone()), FaultyOptions::default());
        let store: Arc<dyn Objects> = Arc::new(faulty.clone());
        let volumes = Volumes::open(store, environment("host-2"), 1 << 20).await.expect("a store");
        let volume = volumes.open_readable(&name("web")).await.expect("open");
        assert_eq!(read(&volume, 0, BLOCK).await, marked(1));
        let before = faulty.requests();
        let mut all = Vec::new();
        for block in 0..64 {
            all.extend(read(&volume, block * BLOCK, BLOCK).await);
        }
        assert_eq!(all, marked(64));
        // Three frames, and as many nodes.
        assert!(faulty.requests() - before <= 6, "{}", faulty.requests() - before);
    });
}

#[test]
fn what_saves_nothing_is_stored_as_it_is_and_the_rest_is_small() {
    for number in [1, BOTH] {
        run(1, async {
            let objects = objects();
            let volume = made_as(&objects, 4096 * BLOCK, kind(number)).await;
            write(&volume, 0, &random(1024)).await.expect("written");
            volume.flush().await.expect("flushed");
            let stored = objects.stored_bytes();
            assert!((1024 * BLOCK..1050 * BLOCK).contains(&stored), "{stored}");
            write(&volume, 2048 * BLOCK, &marked(1024)).await.expect("written");
            volume.flush().await.expect("flushed");
            let more = objects.stored_bytes() - stored;
            assert!(more < 40 * BLOCK, "{more}");
            let stats = volume.write_stats();
            assert_eq!(stats.linked_clusters, 2048);
            assert!(stats.metadata_bytes < 60 * BLOCK, "{stats:?}");
            assert_eq!(read(&volume, 0, 1024 * BLOCK).await, random(1024));
            assert_eq!(read(&volume, 2048 * BLOCK, 1024 * BLOCK).await, marked(1024));
        });
    }
}
