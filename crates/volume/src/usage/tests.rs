//! Counts are compared with those of a model that knows which volume has which block.

use super::*;
use crate::collect::CollectOptions;
use crate::heads::Claimed;
use crate::place::BLOCK_BYTES;
use crate::testing::{memory, name, run, volumes, write};
use mica_block::{Manage as _, Objects, Which};
use std::collections::BTreeSet;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Writes `blocks` of a volume, each with bytes of its own.
async fn fill(volumes: &Volumes, volume: &str, blocks: std::ops::Range<u64>, byte: u8) {
    let volume = volumes.open_volume(&name(volume), Claimed::Refuse).await.expect("open");
    for block in blocks {
        write(&volume, block * BLOCK, &[byte; BLOCK_BYTES]).await;
    }
    volume.close().await.expect("closed");
}

async fn usage(volumes: &Volumes, of: Option<&str>) -> Usage {
    let of = of.map(name);
    volumes.usage(of.as_ref(), Speed::default(), &mut |_| ()).await.expect("counted")
}

/// A gold image of 100 blocks with a snapshot, a clone of it that changed 10 and added 5, and what
/// the image itself changed since.
async fn family(objects: &Arc<dyn Objects>) -> Volumes {
    let volumes = volumes(objects, "host-1").await;
    volumes.create(&name("gold"), 1 << 30).await.expect("made");
    fill(&volumes, "gold", 0..100, 1).await;
    volumes.take_snapshot(&name("gold"), "v1").await.expect("taken");
    fill(&volumes, "gold", 0..20, 2).await;
    volumes.take_snapshot(&name("gold"), "v2").await.expect("taken");
    fill(&volumes, "gold", 0..7, 3).await;
    let v1 = Which::Label("v1".to_owned());
    volumes.clone_volume(&name("gold"), Some(&v1), &name("web")).await.expect("cloned");
    fill(&volumes, "web", 90..105, 4).await;
    volumes
}

#[test]
fn what_each_volume_and_snapshot_needs_alone_is_counted_to_the_block() {
    run(1, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = family(&objects).await;
        let all = usage(&volumes, None).await;
        let names: Vec<_> = all.volumes.iter().map(|volume| volume.name.as_str()).collect();
        assert_eq!(names, ["gold", "web"]);
        let [gold, web] = &all.volumes[..] else { panic!("two volumes") };
        let data = |bytes: Bytes| bytes.data / BLOCK;
        let held = |volume: &VolumeUsage| data(volume.held.expect("there are few").bytes);
        assert_eq!((held(gold), held(web)), (100 + 20 + 7, 90 + 15));
        // The clone has those that nobody changed with the image, and 20 with its snapshot alone.
        assert_eq!((data(gold.only), data(web.only)), (10 + 20 + 7, 15));
        assert_eq!((data(gold.only_now), data(all.shared)), (7, 90));
        assert_eq!((gold.snapshot_count, web.snapshot_count), (2, 0));
        assert_eq!(data(all.needed), 127 + 15);
        assert!(gold.only.metadata > 0 && all.shared.metadata > 0);
        assert_eq!(all.needed.all(), all.collected.live_bytes, "as a collector counts it");
        assert!(gold.snapshots.is_empty(), "only of one that was asked for");

        let one = usage(&volumes, Some("gold")).await;
        let [gold] = &one.volumes[..] else { panic!("one volume") };
        let alone: Vec<_> = gold.snapshots.iter().map(|s| (&*s.info.label, data(s.only))).collect();
        assert_eq!(alone, [("v1", 0), ("v2", 7)], "the clone has all of v1's but ten");
        assert_eq!((held(gold), data(gold.only), data(gold.only_now)), (127, 37, 7));
        let extents = gold.held.expect("asked for").extents;
        assert!((3..=6).contains(&extents), "{extents} extents");

        // Without the clone, the first snapshot has what was changed since.
        volumes.delete(&name("web"), Claimed::Refuse).await.expect("deleted");
        let one = usage(&volumes, Some("gold")).await;
        let gold = &one.volumes[0];
        let alone: Vec<_> = gold.snapshots.iter().map(|s| data(s.only)).collect();
        assert_eq!(alone, [20, 7]);
        assert_eq!(gold.only, gold.held.expect("asked for").bytes);
        assert!(one.collected.freed_bytes >= 15 * BLOCK, "what the clone had can go");
        let missing = volumes.usage(Some(&name("web")), Speed::default(), &mut |_| ()).await;
        assert_eq!(missing.expect_err("deleted").kind(), ErrorKind::NotFound);
    });
}

/// What is counted is what a collection leaves, and dropping a snapshot frees what it had alone.
#[test]
fn dropping_a_snapshot_frees_what_it_was_said_to_have_alone() {
    run(2, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = family(&objects).await;
        volumes.collect(CollectOptions::default(), &mut |_| ()).await.expect("collected");
        let before = usage(&volumes, Some("gold")).await;
        let alone = before.volumes[0].snapshots[1].only;
        volumes.drop_snapshot(&name("gold"), &Which::Number(2)).await.expect("dropped");
        let after = usage(&volumes, Some("gold")).await;
        let gone = before.volumes[0].held.expect("known").bytes.data
            - after.volumes[0].held.expect("known").bytes.data;
        assert_eq!(gone, alone.data);
        assert_eq!(after.volumes[0].snapshots.len(), 1);
    });
}

/// More volumes than are told apart: what each has alone is known, and what all have is not.
#[test]
fn store_of_many_clones_is_counted_without_what_each_holds() {
    run(3, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("gold"), 1 << 30).await.expect("made");
        fill(&volumes, "gold", 0..50, 1).await;
        for number in 0..70 {
            let clone = format!("clone-{number:02}");
            volumes.clone_volume(&name("gold"), None, &name(&clone)).await.expect("cloned");
            fill(&volumes, &clone, 0..number % 3, 2).await;
        }
        let all = usage(&volumes, None).await;
        assert_eq!(all.volumes.len(), 71);
        assert_eq!(all.shared.data, 50 * BLOCK);
        let clones = all.volumes.iter().filter(|volume| volume.name.as_str() != "gold");
        let alone: BTreeSet<_> = clones.map(|volume| volume.only.data / BLOCK).collect();
        assert_eq!(alone, [0, 1, 2].into());
        assert!(all.volumes.iter().all(|volume| volume.held.is_none()));
        let one = usage(&volumes, Some("clone-02")).await;
        assert_eq!(one.volumes[0].held.expect("asked for").bytes.data, 50 * BLOCK);
    });
}

/// An open volume is counted by its last checkpoint, and what its writer put since as a whole.
#[test]
fn what_an_open_volume_put_since_its_checkpoint_is_said() {
    run(4, async {
        let objects: Arc<dyn Objects> = Arc::new(memory());
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), 1 << 30).await.expect("made");
        let volume = volumes.open_volume(&name("web"), Claimed::Refuse).await.expect("open");
        for block in 0..10 {
            write(&volume, block * BLOCK, &[1; BLOCK_BYTES]).await;
        }
        mica_block::Disk::flush(&volume).await.expect("flushed");
        let one = usage(&volumes, Some("web")).await;
        let web = &one.volumes[0];
        assert_eq!(web.open_on.as_deref(), Some("host-1"));
        assert!(web.recent_bytes >= 10 * BLOCK, "{web:?}");
        assert_eq!(web.recent_bytes, one.collected.recent_bytes);
        volume.close().await.expect("closed");
        let one = usage(&volumes, Some("web")).await;
        assert_eq!((one.volumes[0].recent_bytes, one.volumes[0].only.data), (0, 10 * BLOCK));
    });
}
