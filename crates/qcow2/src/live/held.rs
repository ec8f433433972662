//! Host clusters that are temporarily not written in place: the guest's data there is about to
//! become zeros.

use mica_units::HostCluster;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The clusters by number, with the number of holders of each.
#[derive(Default)]
pub(crate) struct HeldClusters {
    count: AtomicUsize,
    clusters: Mutex<HashMap<HostCluster, usize>>,
}

impl HeldClusters {
    /// From now on nobody writes to `clusters` in place, except for writes that have already found
    /// their place, until the returned value is dropped.
    pub(crate) fn hold(&self, clusters: Vec<HostCluster>) -> Held<'_> {
        let mut held = self.lock();
        for cluster in &clusters {
            *held.entry(*cluster).or_default() += 1;
        }
        self.count.store(held.len(), Ordering::SeqCst);
        drop(held);
        Held { of: self, clusters }
    }

    /// Whether the cluster `cluster` is held.
    pub(crate) fn has(&self, cluster: HostCluster) -> bool {
        self.count.load(Ordering::SeqCst) > 0 && self.lock().contains_key(&cluster)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HostCluster, usize>> {
        self.clusters.lock()
    }
}

/// Clusters that are held until this is dropped.
#[must_use = "they are held as long as this lives"]
pub(crate) struct Held<'a> {
    of: &'a HeldClusters,
    clusters: Vec<HostCluster>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let mut held = self.of.lock();
        for cluster in &self.clusters {
            if let Some(holders) = held.get_mut(cluster) {
                *holders -= 1;
                if *holders == 0 {
                    held.remove(cluster);
                }
            }
        }
        self.of.count.store(held.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::from_seeds;
    use mica_units::Rng;

    #[test]
    fn cluster_is_held_until_the_last_holder_lets_go() {
        let held = HeldClusters::default();
        let hold = |numbers: [u64; 2]| held.hold(numbers.map(HostCluster::new).into());
        let has = |number| held.has(HostCluster::new(number));
        let one = hold([1, 2]);
        let other = hold([2, 3]);
        assert!([1, 2, 3].into_iter().all(has) && !has(4));
        drop(one);
        assert!(!has(1) && has(2));
        drop(other);
        assert!(!has(2) && !has(3));
    }

    #[test]
    fn clusters_are_held_as_often_as_holders_name_them() {
        from_seeds(20, |seed| {
            let mut rng = Rng::new(seed);
            let held = HeldClusters::default();
            let mut holders: Vec<Held<'_>> = Vec::new();
            for _ in 0..500 {
                if rng.percent(50) || holders.is_empty() {
                    // A request may name a cluster twice.
                    let clusters =
                        (0..rng.below(5)).map(|_| HostCluster::new(rng.below(12))).collect();
                    holders.push(held.hold(clusters));
                } else {
                    let which = rng.below(holders.len() as u64);
                    drop(holders.swap_remove(usize::try_from(which).expect("few")));
                }
                for cluster in (0..12).map(HostCluster::new) {
                    let is_held = holders.iter().any(|holder| holder.clusters.contains(&cluster));
                    assert_eq!(held.has(cluster), is_held, "cluster {cluster}");
                }
            }
        });
    }
}
