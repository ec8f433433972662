//! Stores in pools of a small cluster of Ceph: what they promise, and what they say if it fails.

mod ceph;
mod failures;
mod promises;
mod takeover;

use mica_tests::tools::{CEPH, CEPH_MON, CEPH_OSD, present};

/// The cluster's programs; `None` if a test has to be skipped.
fn cluster() -> Option<ceph::Ceph> {
    present(&[CEPH_MON, CEPH_OSD, CEPH]).then(ceph::Ceph::start)
}
