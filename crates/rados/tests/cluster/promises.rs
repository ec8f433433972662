//! What a store promises.

use crate::cluster;
use mica_block::{Entry, LIST_MAX, ObjectName, Objects, Put};
use mica_rt::{Backend, Buf, Executor, join_all};
use mica_store::object::{probe, testing::conform};
use std::sync::Arc;

#[test]
fn namespace_of_a_pool_keeps_the_promises_of_a_store() {
    let Some(mut ceph) = cluster() else { return };
    ceph.add_daemons(1);
    ceph.make_pool("vol");
    let executor = Executor::new(Backend::Auto).expect("a backend");
    for namespace in [None, Some("in/it")] {
        let pool = ceph.open("vol", namespace);
        assert_eq!(pool.name(), format!("rados://vol/{}", namespace.unwrap_or_default()));
        executor.block_on(probe(&pool, 1)).expect("it passes the probe");
    }
    let pool = Arc::new(ceph.open("vol", Some("in/it")));
    conform(Backend::Auto, &(Arc::clone(&pool) as _));
    executor.block_on(async {
        listed_in_pages(&*pool, &ceph.open("vol", Some("in/it"))).await;
        read_into_a_guests_memory(&*pool).await;
        // Another namespace, and other programs' objects, are another's.
        let content = ceph.file("foreign", b"bytes");
        ceph.rados("vol", "in/it", &["put", "foreign", &content]);
        ceph.rados("vol", "in/it", &["--object-locator", ":00", "put", "rbd_ID.foreign", &content]);
        let top = pool.list(None, None).await.expect("listed");
        let names: Vec<_> = top.iter().map(|entry| entry.name().as_str()).collect();
        assert_eq!(names, ["guest", "pages"]);
        let other = ceph.open("vol", Some("in"));
        assert!(other.list(None, None).await.expect("listed").is_empty());
    });
}

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

/// A folder of several pages, to which another host adds objects meanwhile.
async fn listed_in_pages(objects: &dyn Objects, host: &dyn Objects) {
    const COUNT: usize = 2 * LIST_MAX + 500;
    let folder = name("pages");
    let object = |number: usize| name(&format!("pages/{:06}", 2 * number));
    for first in (0..COUNT).step_by(LIST_MAX) {
        let some = first..(first + LIST_MAX).min(COUNT);
        // All at once: more than there may be under way.
        let puts = some.map(|number| objects.put_if_absent(&object(number), Buf::new(3)));
        for (put, _) in join_all(puts).await {
            assert_eq!(put.expect("put"), Put::Done);
        }
    }
    let mut all: Vec<Entry> = Vec::new();
    let mut added = Vec::new();
    for expected in [LIST_MAX, LIST_MAX, 502] {
        let after = all.last().map(|entry| entry.name().clone());
        // Both a listing that goes on, and one that begins there.
        let page = objects.list(Some(&folder), after.as_ref()).await.expect("listed");
        assert!(host.list(Some(&folder), after.as_ref()).await.expect("listed") == page);
        assert_eq!(page.len(), expected);
        let last = page.last().expect("not empty").name().as_str();
        // Behind all that was listed, and before what was only looked at.
        let next = 1 + last.trim_start_matches("pages/").parse::<usize>().expect("a number");
        all.extend(page);
        added.push(name(&format!("pages/{next:06}")));
        host.put_if_absent(added.last().expect("just added"), Buf::new(3)).await.0.expect("put");
    }
    let mut expected: Vec<_> = (0..COUNT).map(object).chain(added).collect();
    expected.sort();
    // The last of them came after the last page.
    assert!(all.iter().map(Entry::name).eq(&expected[..all.len()]));
    assert_eq!(all.len(), COUNT + 2);
    assert!(all.iter().all(|entry| matches!(entry, Entry::Object { len: 3, .. })));
}

async fn read_into_a_guests_memory(objects: &dyn Objects) {
    let guest = name("guest");
    let bytes: Vec<u8> = (0..=255).cycle().take(200_000).collect();
    objects.put_if_absent(&guest, Buf::from_slice(&bytes)).await.0.expect("put");
    let object = objects.open(&guest);
    let (read, buf) = object.read_at(Buf::new(1000).into_foreign(), 199_500).await;
    read.expect("read");
    assert!(buf[..500] == bytes[199_500..] && buf[500..].iter().all(|byte| *byte == 0));
    let (end, buf) = object.read_end(Buf::new(100_000).into_foreign()).await;
    assert_eq!(end.expect("read"), 200_000);
    assert!(*buf == bytes[100_000..]);
    let (read, buf) = object.read_at(Buf::new(10).into_foreign(), u64::MAX).await;
    read.expect("read");
    assert!(buf.iter().all(|byte| *byte == 0));
}
