use super::*;
use crate::index::slice::{Entry, EntryKind, Run, Runs, SLICE_SECTORS};
use mica_units::{HostOffset, LayerNumber};

/// A slice of `runs` runs of layer `layer`.
fn slice(layer: usize, runs: u32) -> Slice {
    let number = LayerNumber::new(layer).expect("small");
    let mut all = Runs::default();
    let step = SLICE_SECTORS / runs;
    for run in 0..runs {
        let host = HostOffset::new(u64::from(run) << 24);
        let entry = Entry::at_host(EntryKind::Data, number, host);
        all.push(Run { start: run * step, end: run * step + 1, entry });
    }
    all.slice_at(0)
}

/// Two chains with the same frozen layers.
fn clones(shared: &MapCache) -> [SliceCache; 2] {
    let frozen = shared.frozen(&[], 0, Sharing::WithClones);
    [(); 2].map(|()| SliceCache::new(shared.clone(), Arc::clone(&frozen)))
}

fn insert(cache: &SliceCache, number: u64, slice: Slice) {
    cache.insert_loaded(number, Loaded::Own(slice), cache.version(number));
}

#[test]
fn chains_together_hold_no_more_than_the_budget() {
    let shared = MapCache::new(CACHE_BYTES_MIN);
    let alone = || SliceCache::new(shared.clone(), shared.frozen(&[], 0, Sharing::WithClones));
    let chains: Vec<_> = (0..8).map(|_| alone()).collect();
    for number in 0..500 {
        chains.iter().for_each(|chain| insert(chain, number, slice(0, 8)));
        let held: u64 = chains.iter().map(SliceCache::held_bytes).sum();
        assert!(held <= CACHE_BYTES_MIN, "{held} bytes");
        assert_eq!(held, shared.0.slices.weight());
    }
    let used = chains.iter().filter(|chain| chain.held_bytes() > 0).count();
    assert_eq!(used, chains.len(), "none is crowded out");
}

#[test]
fn budget_grows_and_never_shrinks() {
    let shared = MapCache::new(0);
    assert_eq!(shared.budget_bytes(), CACHE_BYTES_MIN);
    shared.grow_to(1 << 20);
    shared.grow_to(1 << 18);
    assert_eq!(shared.budget_bytes(), 1 << 20);
}

#[test]
fn slices_of_a_chain_go_with_it() {
    let shared = MapCache::new(1 << 20);
    let chains = clones(&shared);
    for number in [0, 3, 1000] {
        chains.iter().for_each(|chain| insert(chain, number, slice(0, 2)));
        chains[0].insert_frozen(number, slice(0, 3));
    }
    let [first, second] = chains;
    assert_eq!(shared.0.slices.len(), 9);
    drop(first);
    assert_eq!(shared.0.slices.len(), 6);
    assert!(second.get(1000).is_some());
    drop(second);
    assert_eq!(shared.0.slices.len(), 0);
}

#[test]
fn clones_see_one_slice_until_one_of_them_changes_its_own() {
    let shared = MapCache::new(1 << 20);
    let [first, second] = clones(&shared);
    let common = first.insert_frozen(7, slice(0, 4));
    for chain in [&first, &second] {
        assert!(chain.get(7).is_none(), "nobody knows what its active layer owns");
        let version = chain.version(7);
        chain.insert_loaded(7, Loaded::OfFrozen(Arc::clone(&common)), version);
        assert!(chain.get(7).is_some_and(|found| Arc::ptr_eq(&found, &common)));
        assert_eq!(chain.held_bytes(), 0);
    }
    first.change(7, |found| {
        assert!(*found == slice(0, 4));
        Some(slice(1, 5))
    });
    assert!(first.get(7).is_some_and(|found| **found == slice(1, 5)));
    assert!(second.get(7).is_some_and(|found| Arc::ptr_eq(&found, &common)));
    second.change(7, |_| None);
    assert!(second.get(7).is_none());
}

#[test]
fn mark_of_a_slice_that_is_gone_is_loaded_again_and_not_changed() {
    let shared = MapCache::new(1 << 20);
    let [first, _second] = clones(&shared);
    let common = first.insert_frozen(7, slice(0, 4));
    let version = first.version(7);
    first.insert_loaded(7, Loaded::OfFrozen(common), version);
    shared.0.slices.remove(&first.frozen.owner.key(7));
    assert!(first.get(7).is_none());
    first.change(7, |_| unreachable!("there is nothing to change"));
    first.insert_frozen(7, slice(0, 4));
    assert!(first.get(7).is_none(), "the mark is gone: it knew nothing of the change");
}

/// I3.
#[test]
fn slice_that_was_loaded_before_a_change_is_not_kept() {
    let shared = MapCache::new(1 << 20);
    let [first, second] = clones(&shared);
    let common = second.insert_frozen(7, slice(0, 4));
    let before = first.version(7);
    first.change(7, |_| None);
    first.insert_loaded(7, Loaded::OfFrozen(common), before);
    first.insert_loaded(7, Loaded::Own(slice(0, 4)), before);
    assert!(first.get(7).is_none());
}
