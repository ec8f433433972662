//! Images in memory whose snapshots are changed.

use super::*;
use crate::create::{ImageWish, Stores, create};
use mica_block::{Identity, ProofSlot};
use mica_rt::{Backend, Executor};
use mica_store::MemoryStore;

const CLUSTER_BYTES: u64 = 4096;

fn run(work: impl AsyncFnOnce()) {
    Executor::new(Backend::Sim { seed: 1 }).expect("an executor").block_on(work());
}

/// A new image with `count` snapshots, called 1, 2 and so on.
async fn with_snapshots(count: u32) -> SnapshotEditor {
    let wish = ImageWish { cluster_bytes: Some(CLUSTER_BYTES), ..ImageWish::default() };
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
            let refused = editor.apply("1").await.expect_err("refused");
            assert_eq!(refused.kind(), ErrorKind::Corrupt);
            assert!(refused.to_string().contains("too long, or off a cluster"), "{refused}");
            assert_eq!(editor.list().count(), 1, "nothing was changed");
        }
        let mut editor = with_snapshots(1).await;
        editor.apply("1").await.expect("a sound one is applied");
    });
}
