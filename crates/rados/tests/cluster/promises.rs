//! What a store promises, in one daemon.

use crate::cluster;
use mica_block::Objects;
use mica_rt::{Backend, Executor};
use mica_store::object::{probe, testing::conform};
use std::sync::Arc;

#[test]
fn namespace_of_a_pool_keeps_the_promises_of_a_store() {
    let t = std::time::Instant::now();
    let Some(mut ceph) = cluster() else { return };
    eprintln!("{:?} mon", t.elapsed());
    ceph.add_daemons(1);
    eprintln!("{:?} osd", t.elapsed());
    ceph.make_pool("vol");
    eprintln!("{:?} pool", t.elapsed());
    let executor = Executor::new(Backend::Auto).expect("a backend");
    for namespace in [None, Some("in/it")] {
        let pool = ceph.open("vol", namespace);
        assert_eq!(pool.name(), format!("rados://vol/{}", namespace.unwrap_or_default()));
        executor.block_on(probe(&pool, 1)).expect("it passes the probe");
    }
    eprintln!("{:?} probed", t.elapsed());
    conform(Backend::Auto, &(Arc::new(ceph.open("vol", Some("in/it"))) as _));
    eprintln!("{:?} conform", t.elapsed());
    drop(ceph);
    eprintln!("{:?} end", t.elapsed());
}
