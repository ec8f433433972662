//! Images in memory whose snapshots are changed.

use super::*;
use crate::create::{ImageWish, Stores, create};
use mica_block::{Identity, ProofSlot};
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;

const CLUSTER_LEN: usize = 4096;

fn run(work: impl AsyncFnOnce()) {
    Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(work());
}

/// A new image with `count` snapshots, called 1, 2 and so on.
async fn with_snapshots(count: u32) -> SnapshotEditor {
    let wish = ImageWish { cluster_bytes: Some(CLUSTER_LEN as u64), ..ImageWish::default() };
    let store = Arc::new(MemoryStore::new_writable("image", Vec::new()));
    let plan = wish.plan(1 << 16).expect("a plan");
    create(plan, Stores { image: &*store, data: None }).await.expect("created");
    let header = read_header(&*store).await.expect("a header");
    let identity = Identity { device: 0, inode: 0, len: 0, mtime_ns: 0, ctime_ns: 0 };
    let image = OpenImage { store, identity, content: ProofSlot::default() };
    let mut editor = SnapshotEditor { image, header, snapshots: Vec::new() };
    for number in 1..=count {
        editor.create(&number.to_string(), 0).await.expect("made");
    }
    editor
}

fn called(name: &str) -> SnapshotSelector {
    SnapshotSelector::Name(name.to_owned())
}

/// The story: snapshots called "2" and "3" had IDs 1 and 2, and `mica snapshot -d 2` deleted "3".
#[test]
fn no_snapshot_gets_the_name_of_another_as_its_id() {
    run(async || {
        let mut editor = with_snapshots(0).await;
        for name in ["2", "3", "x"] {
            editor.create(name, 0).await.expect("made");
        }
        let ids: Vec<_> = editor.list().map(|entry| entry.id.clone()).collect();
        assert_eq!(ids, ["1", "3", "4"]);
        editor.delete(&SnapshotSelector::Any("2".to_owned())).await.expect("deleted");
        let names: Vec<_> = editor.list().map(|entry| entry.name.clone()).collect();
        assert_eq!(names, ["3", "x"]);
    });
}

/// The story: the ID was tried first, of images that QEMU made, too.
#[test]
fn word_that_means_two_snapshots_deletes_neither() {
    run(async || {
        let mut editor = with_snapshots(2).await;
        for (entry, name) in editor.snapshots.iter_mut().zip(["2", "3"]) {
            entry.entry.name = name.to_owned();
        }
        let wanted = SnapshotSelector::Any("2".to_owned());
        let refused = editor.delete(&wanted).await.expect_err("refused");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        assert_eq!(editor.apply(&wanted).await.expect_err("refused").kind(), ErrorKind::Invalid);
        assert_eq!(editor.list().count(), 2, "nothing was deleted");
        editor.delete(&SnapshotSelector::Name("2".to_owned())).await.expect("deleted");
        let names: Vec<_> = editor.list().map(|entry| entry.id.clone()).collect();
        assert_eq!(names, ["2"], "the one called so is gone");
    });
}

/// `mica snapshot -a` took the length of the table from the image, and asked for up to 34 GB.
#[test]
fn snapshot_whose_l1_table_is_too_long_or_off_its_cluster_is_not_read() {
    run(async || {
        let harms: [fn(&mut SnapshotEntry); 2] = [
            // 32 MiB and an entry.
            |entry| entry.l1_entries = (4 << 20) + 1,
            |entry| entry.l1_offset = HostOffset::new(entry.l1_offset.bytes() + 512),
        ];
        for harm in harms {
            let mut editor = with_snapshots(1).await;
            harm(&mut editor.snapshots[0].entry);
            let refused = editor.apply(&called("1")).await.expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::Corrupt);
            assert!(refused.to_string().contains("too long, or off a cluster"), "{refused}");
            assert_eq!(editor.list().count(), 1, "nothing was changed");
        }
        let mut editor = with_snapshots(1).await;
        editor.apply(&called("1")).await.expect("a sound one is applied");
    });
}

/// Which clusters of the file something names.
async fn named(editor: &SnapshotEditor) -> Vec<bool> {
    let (counted, _) = editor.count(&editor.header, Task::Keep).await.expect("counted");
    let all = HostCluster::ZERO.up_to(counted.references.end());
    all.map(|cluster| counted.references.get(cluster) > 0).collect()
}

/// Each change punched all of the file that was free, however much that was.
#[test]
fn only_what_a_change_frees_gives_its_space_back() {
    run(async || {
        let mut editor = with_snapshots(6).await;
        for wanted in ["1", "2", "3"] {
            editor.delete(&called(wanted)).await.expect("deleted");
        }
        let store = Arc::clone(&editor.image.store);
        let place = |number: usize| HostOffset::new((number * CLUSTER_LEN) as u64);
        let noise = [0xa5; CLUSTER_LEN];
        let before = named(&editor).await;
        for (number, _) in before.iter().enumerate().filter(|(_, is_named)| !**is_named) {
            write_all(&*store, Buf::from_slice(&noise), place(number)).await.expect("written");
        }
        editor.delete(&called("4")).await.expect("deleted");
        let (mut kept, mut emptied) = (0, 0);
        let after = named(&editor).await;
        for (number, (was_named, is_named)) in before.into_iter().zip(after).enumerate() {
            if is_named {
                continue;
            }
            let bytes = read_exact(&*store, place(number), noise.len()).await.expect("read");
            let is_empty = bytes.iter().all(|byte| *byte == 0);
            assert_eq!(is_empty, was_named, "cluster {number}");
            kept += u64::from(!was_named);
            emptied += u64::from(was_named);
        }
        assert!(kept > 0 && emptied > 0, "{kept} were free before, {emptied} are now");
    });
}
