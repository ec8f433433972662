//! How a store is listed, and with how many requests.

use super::super::within::FOLDERS_OF_RANGE;
use super::*;
use mica_block::LIST_MAX;
use mica_store::object::ObjectOperation;

/// A store that counts its listings, and does not list folders at once if `by_folder`.
fn counting(objects: &MemoryObjects, by_folder: bool) -> FaultyObjects {
    let only = Some(ObjectOperation::List);
    let options = FaultyOptions { only, ..FaultyOptions::default() };
    let objects = if by_folder { objects.clone().by_folder() } else { objects.clone() };
    FaultyObjects::new(Arc::new(objects), options)
}

/// A thousand volumes, each of which was made, opened, written and closed: a writer for each, with
/// a claim and an extent, and three heads.
async fn thousand() -> MemoryObjects {
    let objects = MemoryObjects::new("memory");
    let volumes = volumes(&objects, "host-1").await;
    for number in 0..1000 {
        let text = format!("volume-{number}");
        volumes.create(&name(&text), LEN).await.expect("made");
        let volume = open(&volumes, &text).await;
        write(&volume, 0, 1).await;
        volume.close().await.expect("closed");
    }
    objects
}

/// The story: a collection of a bucket with a thousand volumes asked it for a list of each
/// volume's heads, twice, and of each writer's extents, which is what buckets take most money for.
#[test]
fn collection_of_a_thousand_volumes_takes_few_lists_where_folders_are_listed_at_once() {
    run(1, async {
        let objects = thousand().await;
        let mut counted = Vec::new();
        for by_folder in [true, false] {
            let store = counting(&objects, by_folder);
            let volumes = volumes_in(Arc::new(store.clone()), "collector").await;
            let before = store.requests();
            let options = CollectOptions { dry_run: true, ..CollectOptions::default() };
            let collected = volumes.collect(options, &mut |_| ()).await.expect("collected");
            assert_eq!((collected.volumes, collected.extents), (1000, 1000));
            assert_eq!(collected.freed_heads, 2000);
            counted.push(store.requests() - before);
        }
        // Two for each volume and one for each writer; and some for folders, claims, boundaries
        // and boot records.
        assert!((3000..3030).contains(&counted[0]), "{counted:?}");
        // A page for each thousand objects, and two for each range.
        assert!(counted[1] < 40, "{counted:?}");
    });
}

fn random_name(rng: &mut Rng) -> ObjectName {
    let mut part = |len: u64| -> String {
        let len = 1 + rng.below(len);
        (0..len)
            .map(|_| ["a", "-", ".", "0"][usize::try_from(rng.below(4)).expect("few")])
            .collect()
    };
    loop {
        let text = format!("f/{}/{}", part(5), part(2));
        if let Ok(name) = ObjectName::new(&text) {
            return name;
        }
    }
}

/// Whatever folders are called: of the names `a` and `a-`, `a/` comes behind `a-/`.
#[test]
fn all_objects_are_found_once_by_folders_and_at_once() {
    for seed in 0..12 {
        run(seed, async {
            let (mut rng, objects) = (Rng::new(seed), MemoryObjects::new("memory"));
            let mut expected = BTreeSet::new();
            let count = [0, 1, 30, 2000][usize::try_from(seed % 4).expect("few")];
            for _ in 0..count {
                let name = random_name(&mut rng);
                if objects.put_if_absent(&name, Buf::new(0)).await.0.is_ok() {
                    expected.insert(name);
                }
            }
            // One folder with several pages, and neighbours of the folder itself.
            for number in 0..if count > 30 { 2 * LIST_MAX + 5 } else { 0 } {
                let name = ObjectName::new(&format!("f/aa/{number:05}")).expect("a name");
                objects.put_if_absent(&name, Buf::new(0)).await.0.expect("put");
                expected.insert(name);
            }
            for name in ["e/a/b", "f-/a/b", "g/a/b"].map(ObjectName::new) {
                let put = objects.put_if_absent(&name.expect("a name"), Buf::new(0)).await;
                put.0.expect("put");
            }
            let folders: BTreeSet<_> =
                expected.iter().filter_map(|name| name.as_str().rsplit_once('/')).collect();
            assert_eq!(folders.len() > 2 * FOLDERS_OF_RANGE, count > 30, "{}", folders.len());
            for by_folder in [true, false] {
                let store = counting(&objects, by_folder);
                let client = Client::new(Arc::new(store), Speed::default());
                let folder = ObjectName::new("f").expect("a name");
                let pick = |entry: mica_block::Entry| Ok(Some(entry.name().clone()));
                let mut found = client.within(&folder, pick, |_| ()).await.expect("listed");
                found.sort();
                assert!(found.iter().eq(&expected), "seed {seed}, by folder: {by_folder}");
            }
        });
    }
}

/// What is no volume's, wherever it is, is said and not taken for nothing.
#[test]
fn stranger_among_heads_is_found_however_they_are_listed() {
    run(1, async {
        for stray in ["volumes/stray", "volumes/a/stray", "volumes/a/b/0000000000000001"] {
            let objects = MemoryObjects::new("memory");
            let made = volumes(&objects, "host-1").await;
            for text in ["a", "b", "c"] {
                made.create(&name(text), LEN).await.expect("made");
            }
            let stray = ObjectName::new(stray).expect("a name");
            objects.put_if_absent(&stray, Buf::new(0)).await.0.expect("put");
            for by_folder in [true, false] {
                let store = counting(&objects, by_folder);
                let volumes = volumes_in(Arc::new(store), "collector").await;
                let refused = volumes.collect(CollectOptions::default(), &mut |_| ()).await;
                let refused = refused.expect_err("it is unknown what that is");
                assert_eq!(refused.kind(), ErrorKind::Corrupt, "{stray}: {refused:?}");
            }
        }
    });
}
