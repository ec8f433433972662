//! What clones that are not ready, and fences, do not keep a collector from.

use super::*;
use crate::known::Change;
use crate::properties::Properties;
use crate::segment::Cut;
use crate::snapshots::find;
use mica_block::Which;

/// Blocks of a disk with several pages of nodes.
const DISK: u64 = 1500;

/// The story: a clone was begun of a snapshot that was dropped, and collected, before the clone's
/// first head was there; then its maker died. Some of the nodes that it names begin in a page that
/// stays and end in one that was given back, and these were taken for damage.
#[test]
fn clone_that_died_over_what_was_given_back_does_not_stop_collection() {
    for seed in 0..24 {
        run(seed, async {
            let objects = MemoryObjects::new("memory");
            let volumes = volumes(&objects, "host-1").await;
            let (web, first) = (name("web"), Which::Number(1));
            volumes.create(&web, DISK * BLOCK).await.expect("made");
            let fill = async |from: u64, to: u64, byte: u8| {
                let volume = open(&volumes, "web").await;
                for block in from..to {
                    write(&volume, block, byte).await;
                }
                volume.close().await.expect("closed");
            };
            fill(0, DISK, 1).await;
            volumes.take_snapshot(&web, "").await.expect("taken");
            let heads = volumes.heads(&web);
            let root = heads.newest().await.expect("there is a head").state.snapshots;
            let found = find(&volumes.tree, root, &first).await.expect("read");
            let origin = found.expect("it was taken").first_state();
            let from = 100 + seed * 16;
            fill(from, from + 700, 2).await;
            volumes.take_snapshot(&web, "").await.expect("taken");
            volumes.drop_snapshot(&web, &first).await.expect("dropped");
            let given_back = collect(&volumes).await;
            assert!(given_back.punched_bytes > 0, "{given_back:?}");
            volumes
                .heads(&name("copy"))
                .pin(origin, Properties::default(), crate::testing::origin(), async || ())
                .await
                .expect("pinned");
            let collector = self::volumes(&objects, "collector").await;
            collect(&collector).await;
            let volume = open(&collector, "web").await;
            let read = read(&volume, 0, DISK).await;
            for (block, byte) in (0..).zip(read) {
                let is_second = (from..from + 700).contains(&block);
                assert_eq!(byte, if is_second { 2 } else { 1 }, "block {block}");
            }
            let found = collector.scrub(Speed::default(), &mut |_| ()).await.expect("scrubbed");
            assert_eq!(found.damaged, Vec::<String>::new());
        });
    }
}

/// The story: a snapshot was dropped by two at once. The extent of the second had nothing in it,
/// was as long as a fence, and stayed for ever.
#[test]
fn extent_in_which_nothing_was_done_is_no_fence() {
    run(1, async {
        let objects = MemoryObjects::new("memory");
        let volumes = volumes(&objects, "host-1").await;
        volumes.create(&name("web"), LEN).await.expect("made");
        let volume = open(&volumes, "web").await;
        write(&volume, 1, 1).await;
        volume.flush().await.expect("flushed");
        let before = names_in(&objects, "extents/").len();
        let shared = volume.shared();
        let dropped = shared.change_once(Change::Cut(Cut::Drop { number: 9 })).await;
        dropped.expect("done");
        volume.flush().await.expect("flushed");
        volume.close().await.expect("closed");
        assert_eq!(names_in(&objects, "extents/").len(), before + 1);
        volumes.delete(&name("web"), Claimed::Refuse).await.expect("deleted");
        collect(&volumes).await;
        assert_eq!(names_in(&objects, "extents/"), Vec::<String>::new());
    });
}
