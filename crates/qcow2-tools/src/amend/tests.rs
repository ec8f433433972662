//! Images of version 2 with snapshots, which become images of version 3, or do not.

use super::*;
use crate::create::{ImageWish, Stores, create};
use futures_util::FutureExt;
use mica_block::{Identity, ProofSlot};
use mica_store::MemoryStore;
use std::future::Future;

/// Everything here is ready at once.
fn run<T>(future: impl Future<Output = Result<T>>) -> Result<T> {
    future.now_or_never().expect("a store of memory never waits")
}

/// An image of version 2 with a snapshot of an empty disk, whose entry states the disk's length or
/// not.
fn with_snapshot(disk_bytes: Option<u64>) -> (Arc<MemoryStore>, Header) {
    let wish = ImageWish { version: Some(Version::V2), ..ImageWish::default() };
    let store = Arc::new(MemoryStore::new_writable("image", Vec::new()));
    let plan = wish.plan(1 << 20).expect("a plan");
    run(create(plan, Stores { image: &*store, data: None })).expect("there is room");
    let table_at = HostOffset::new(store.len().expect("memory"));
    let entry = SnapshotEntry {
        id: "1".to_owned(),
        name: "old".to_owned(),
        l1_offset: HostOffset::ZERO,
        l1_entries: 0,
        date_seconds: 0,
        date_nanoseconds: 0,
        vm_clock_nanoseconds: 0,
        vm_state_bytes: 0,
        disk_bytes,
        icount: None,
        extra_bytes: 0,
        unknown_extra: Vec::new(),
    };
    let mut table = Vec::new();
    entry.encode(&mut table);
    table.resize(1 << 16, 0);
    run(write_all(&*store, Buf::from_slice(&table), table_at)).expect("memory");
    let mut header = header_in(&store);
    (header.snapshot_count, header.snapshots_offset) = (1, table_at);
    let bytes = header.encode().expect("it fits");
    run(write_all(&*store, Buf::from_slice(&bytes), HostOffset::ZERO)).expect("memory");
    let header = header_in(&store);
    (store, header)
}

fn header_in(store: &MemoryStore) -> Header {
    let bytes = run(read_exact(store, HostOffset::ZERO, 1 << 16)).expect("memory");
    Header::decode(&bytes, store.len().expect("memory")).expect("a header")
}

/// Makes version 3 of the image; returns the version that it has then.
fn newer((store, header): (Arc<MemoryStore>, Header)) -> (Result<Header>, Version) {
    let wanted = Amendment { version: Some(Version::V3), ..Amendment::default() };
    let next = wanted.applied_to(&header).expect("it can be said");
    let len = store.len().expect("memory");
    let identity = Identity { device: 1, inode: 1, len, mtime_ns: 1, ctime_ns: 1 };
    let image = OpenImage { store: store.clone(), identity, content: ProofSlot::default() };
    let amender = Amender { image, header };
    let amended = run(async {
        let checked = amender.check(&next).await?;
        amender.make(next, checked).await
    });
    (amended, header_in(&store).version)
}

#[test]
fn snapshots_that_say_too_little_for_version_3_keep_the_image_at_version_2() {
    let (amended, version) = newer(with_snapshot(None));
    let error = amended.expect_err("refused");
    assert_eq!((error.kind(), version), (ErrorKind::Unsupported, Version::V2));
    assert!(error.to_string().contains("\"old\""), "{error}");
    let (amended, version) = newer(with_snapshot(Some(1 << 20)));
    amended.expect("the snapshot says all");
    assert_eq!(version, Version::V3);
}
