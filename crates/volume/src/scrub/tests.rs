use super::*;
use crate::collect::CollectOptions;
use crate::environment::Environment;
use crate::format::extent::Header;
use crate::heads::Claimed;
use crate::place::{Place, Writer};
use crate::properties::{NewVolume, Properties};
use crate::state::{Root, State};
use crate::testing::{key, kind};
use mica_block::{Disk, Manage, ObjectName, Objects};
use mica_map::Reference;
use mica_rt::{Backend, Buf, Executor};
use mica_store::object::MemoryObjects;
use mica_units::GuestOffset;

fn run<T>(test: impl Future<Output = T>) -> T {
    Executor::new(Backend::Sim { seed: 1 }).expect("a simulator").block_on(test)
}

async fn volumes(objects: &MemoryObjects) -> Volumes {
    let id = std::cell::Cell::new(0);
    let next = std::sync::atomic::AtomicU8::new(id.get());
    let environment = Environment::new(
        "host",
        || 7,
        move || [next.fetch_add(1, std::sync::atomic::Ordering::Relaxed); 16],
    );
    let objects: Arc<dyn Objects> = Arc::new(objects.clone());
    let opened = Volumes::open_or_make(objects, environment, 1 << 20).await;
    opened.expect("a store")
}

/// Two volumes of a few extents each.
async fn store() -> MemoryObjects {
    store_as(NewVolume::default()).await
}

async fn store_as(new: NewVolume) -> MemoryObjects {
    let objects = MemoryObjects::new("memory");
    let volumes = volumes(&objects).await.with_key(Some(key()));
    for text in ["a", "b"] {
        let name = VolumeName::new(text).expect("a name");
        volumes.create_as(&name, 1 << 20, new).await.expect("made");
        let volume = volumes.open_volume(&name, Claimed::Refuse).await.expect("open");
        for block in [0, 3, 40, 3] {
            let at = GuestOffset::new(block * BLOCK_BYTES as u64);
            volume.write(at, Buf::from_slice(&[9; BLOCK_BYTES])).await.0.expect("written");
            volume.flush().await.expect("flushed");
        }
        volume.close().await.expect("closed");
    }
    objects
}

async fn scrub(objects: &MemoryObjects) -> Findings {
    let mut seen = 0;
    let volumes = volumes(objects).await;
    let found = volumes.scrub(Speed::default(), &mut |at| seen = at.extents.max(seen)).await;
    let found = found.expect("scrubbed");
    assert!(seen >= found.extents, "progress is reported");
    found
}

async fn changed(objects: &MemoryObjects, wanted: &ObjectName, at: usize) -> MemoryObjects {
    let copy = MemoryObjects::new("copy");
    for (name, content) in objects.contents() {
        let mut content = content.to_vec();
        if name == *wanted {
            content[at] ^= 1;
        }
        copy.put_if_absent(&name, Buf::from_slice(&content)).await.0.expect("put");
    }
    copy
}

/// Every byte of every extent, damaged: it is found, unless nothing needs it.
#[test]
fn damage_anywhere_is_found_and_named() {
    (0..4).for_each(|number| damage_is_found(kind(number)));
}

/// Without the key, if there is one.
fn damage_is_found(new: NewVolume) {
    run(async {
        let objects = store_as(new).await;
        let sound = scrub(&objects).await;
        assert_eq!((sound.blocks, sound.damaged_count), (6, 0), "{sound:?}");
        let contents = objects.contents();
        let extents = contents.iter().filter(|(name, _)| name.as_str().starts_with("extents/"));
        let mut names = BTreeSet::new();
        let (mut unneeded, mut count) = (0, 0);
        for (name, content) in extents {
            let header = Header::decode(content).expect("a header");
            let interesting = (0..512).step_by(61).chain((HEADER_BYTES..content.len()).step_by(97));
            for at in interesting {
                let found = scrub(&changed(&objects, name, at).await).await;
                count += 1;
                let is_frame = at < HEADER_BYTES || at >= header.table_at();
                if found.damaged_count == 0 {
                    assert!(!is_frame, "byte {at} of {name}");
                    unneeded += 1;
                }
                for line in &found.damaged {
                    assert!(line.contains(name.as_str()), "{line}");
                    let is_of_disk = line.contains(" of the disk");
                    assert_eq!(is_of_disk, !is_frame, "{at}: {line}");
                    names.extend(line.split(':').next().filter(|_| is_of_disk).map(str::to_owned));
                }
            }
        }
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["a", "b"]);
        // The block that was overwritten, and older nodes.
        assert!(unneeded > 0 && unneeded * 2 < count, "{unneeded} of {count}");
    });
}

/// What only a snapshot has is read, too, and named with it.
#[test]
fn damage_of_a_snapshot_is_named_with_the_snapshot() {
    run(async {
        let objects = store().await;
        let volumes = volumes(&objects).await;
        let a = VolumeName::new("a").expect("a name");
        let taken = volumes.take_snapshot(&a, "before").await.expect("taken");
        let volume = volumes.open_volume(&a, Claimed::Refuse).await.expect("open");
        let old = objects.contents();
        let at = GuestOffset::new(40 * BLOCK_BYTES as u64);
        volume.write(at, Buf::from_slice(&[8; BLOCK_BYTES])).await.0.expect("written");
        volume.close().await.expect("closed");
        let sound = volumes.check(&a, &mut |_| ()).await.expect("checked");
        assert_eq!((sound.blocks, sound.snapshots, sound.damaged_count), (4, 1, 0));
        let mut lines = Vec::new();
        for (extent, content) in old.iter().filter(|(name, _)| name.as_str().contains("extents")) {
            if content.len() > HEADER_BYTES + BLOCK_BYTES {
                let bad = changed(&objects, extent, HEADER_BYTES).await;
                let found = self::volumes(&bad).await.check(&a, &mut |_| ()).await;
                lines.extend(found.expect("checked").damaged);
            }
        }
        let number = taken.number;
        let only = format!("a@{number}: 4096 bytes at {} of the disk", 40 * BLOCK_BYTES);
        assert!(lines.iter().any(|line| line.starts_with(&only)), "{lines:?}");
        let both = lines.iter().filter(|line| line.contains("4096 bytes at 0 of the disk"));
        assert_eq!(both.count(), 2, "the volume and its snapshot: {lines:?}");
    });
}

#[test]
fn missing_extent_is_found_with_all_that_it_had() {
    run(async {
        let objects = store().await;
        let a = VolumeName::new("a").expect("a name");
        let writer = volumes(&objects).await.info(&a).await.expect("known");
        let root = writer.state.map.node.expect("it has blocks");
        let gone = ExtentId { sequence: 1, ..root.extent() };
        let mut sound = Findings::default();
        for is_gone in [false, true] {
            if is_gone {
                objects.delete(&gone.name()).await.expect("deleted");
            }
            let volumes = volumes(&objects).await;
            let found = volumes.check(&a, &mut |_| ()).await.expect("checked");
            if !is_gone {
                assert_eq!((found.blocks, found.damaged_count), (3, 0));
                sound = found;
                continue;
            }
            // Its block was overwritten later, so that nothing needs it any more.
            assert_eq!(format!("{found:?}"), format!("{sound:?}"));
        }
        let gone = ExtentId { sequence: 2, ..root.extent() };
        objects.delete(&gone.name()).await.expect("deleted");
        let volumes = volumes(&objects).await;
        let found = volumes.check(&a, &mut |_| ()).await.expect("checked");
        assert!(found.damaged_count > 0, "{found:?}");
        assert!(found.damaged.iter().all(|line| line.contains("missing")), "{found:?}");
        let b = VolumeName::new("b").expect("a name");
        let found = volumes.check(&b, &mut |_| ()).await.expect("checked");
        assert_eq!(found.damaged_count, 0, "the other one is sound");
    });
}

/// What a version that is to come has put is neither damage nor an obstacle; nothing is collected.
#[test]
fn volume_of_a_newer_version_is_named_and_keeps_what_it_needs() {
    run(async {
        let objects = store().await;
        let heads = objects.contents().into_keys();
        let head = heads.filter(|name| name.as_str().starts_with("volumes/a/")).max();
        let newer = made_newer(&objects, &head.expect("it has one")).await;
        let volumes = volumes(&newer).await;
        let found = scrub(&newer).await;
        assert_eq!(found.damaged_count, 0, "{:?}", found.damaged);
        let names: Vec<_> = found.newer.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a"]);
        let listed = volumes.list_with_damaged().await.expect("listed");
        assert_eq!((listed.volumes.len(), listed.damaged.len(), listed.newer.len()), (1, 0, 1));
        let (before, options) = (newer.contents().len(), CollectOptions::default());
        let refused = volumes.collect(options, &mut |_| ()).await.expect_err("a needs something");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.to_string().contains("nothing may be deleted"), "{refused}");
        assert_eq!(newer.contents().len(), before);
        // An extent of that version, which no volume that can be read needs.
        let extents = newer.contents().into_keys();
        let first = extents.filter(|name| name.as_str().starts_with("extents/")).min();
        let newer = made_newer(&newer, &first.expect("it has some")).await;
        assert_eq!(scrub(&newer).await.damaged_count, 0);
    });
}

/// A copy whose object `wanted` has another version.
async fn made_newer(objects: &MemoryObjects, wanted: &ObjectName) -> MemoryObjects {
    let copy = MemoryObjects::new("copy");
    for (name, content) in objects.contents() {
        let mut content = content.to_vec();
        if name == *wanted {
            content[8] = 99;
            let len = if name.as_str().starts_with("extents/") { 512 } else { content.len() };
            let sum = crc32c(&content[..len - 4]).to_le_bytes();
            content[len - 4..len].copy_from_slice(&sum);
        }
        copy.put_if_absent(&name, Buf::from_slice(&content)).await.0.expect("put");
    }
    copy
}

/// A store with a volume that has `state`, with a tree of sixteen nodes of one extent: each names
/// the one beneath it sixteen times, and the lowest has `lowest` as its payload.
async fn few_nodes(
    lowest: impl Fn(ExtentId) -> Vec<u8>,
    state: impl Fn(Root) -> State,
) -> (Volumes, VolumeName) {
    let objects = MemoryObjects::new("memory");
    let volumes = volumes(&objects).await;
    let extent = ExtentId { writer: Writer::FIRST, sequence: 0 };
    let mut content = vec![0; HEADER_BYTES + BLOCK_BYTES];
    let mut payload = lowest(extent);
    let mut root = Root { node: None, height: 0 };
    for height in 1..=16 {
        let at = Place::new(extent, content.len(), crc32c(&payload));
        mica_map::encode_node(&mut content, at, &payload);
        content.resize(content.len().next_multiple_of(Place::UNIT_BYTES), 0);
        root = Root { node: Some(at), height };
        payload = [0xFF; 2].into_iter().chain([at.to_bytes(); 16].into_iter().flatten()).collect();
    }
    objects.put_if_absent(&extent.name(), Buf::from_slice(&content)).await.0.expect("put");
    let name = VolumeName::new("a").expect("a name");
    volumes.heads(&name).create(state(root), Properties::default()).await.expect("made");
    (volumes, name)
}

/// The story: a store whose owner means harm had a tree of snapshots that has none. Whoever listed
/// them never came to an end.
#[test]
fn few_nodes_that_name_each_other_and_nothing_else_are_damage() {
    run(async {
        let (volumes, a) =
            few_nodes(|_| vec![0; 2], |root| State { snapshots: root, ..State::empty(1 << 20) })
                .await;
        let error = volumes.snapshots(&a).await.map(drop).expect_err("it is no tree");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let found = volumes.check(&a, &mut |_| ()).await.expect("checked");
        assert!(found.damaged_count > 0);
    });
}

/// As before, with a block that is lost at every place of the disk.
#[test]
fn what_few_nodes_have_lost_many_times_is_counted_and_not_visited_each_time() {
    run(async {
        let lost = |extent| {
            let block = Place::new(extent, HEADER_BYTES, 7).to_bytes();
            [0xFF; 2].into_iter().chain([block; 16].into_iter().flatten()).collect()
        };
        let (volumes, a) =
            few_nodes(lost, |root| State { map: root, ..State::empty(State::LEN_MAX) }).await;
        let found = volumes.check(&a, &mut |_| ()).await.expect("checked");
        assert_eq!((found.damaged.len(), found.damaged_count), (1000, u64::MAX));
    });
}
