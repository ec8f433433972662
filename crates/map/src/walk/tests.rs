use super::*;
use crate::testing::{Model, Nodes, Place, Random, versions};
use std::collections::HashSet;

fn walk(nodes: &mut Nodes, root: Root<Place>, keys: RangeInclusive<u64>) -> Vec<(u64, Place)> {
    let mut walk = Walk::new(root, keys);
    let mut leaves = Vec::new();
    loop {
        match walk.next_step() {
            WalkStep::Read(at) => {
                assert_eq!(walk.next_step(), WalkStep::Read(at), "it asks until it is fed");
                walk.feed(nodes.directory(at));
            }
            WalkStep::Leaf(key, leaf) => leaves.push((key, leaf)),
            WalkStep::Done => return leaves,
        }
    }
}

fn range_of(model: &Model, keys: RangeInclusive<u64>) -> Vec<(u64, Place)> {
    if keys.is_empty() {
        return Vec::new();
    }
    model.range(keys).map(|(key, leaf)| (*key, *leaf)).collect()
}

#[test]
fn walk_gives_the_leaves_of_a_range_in_order() {
    for seed in 0..20 {
        let (mut nodes, versions) = versions(seed, 12, 100);
        let mut random = Random(seed);
        for (root, model) in &versions {
            let (a, b) = (random.key(), random.key());
            for keys in [0..=u64::MAX, a..=b, b..=a, a..=a, 0..=0] {
                let expected = range_of(model, keys.clone());
                assert_eq!(walk(&mut nodes, *root, keys.clone()), expected, "seed {seed} {keys:?}");
            }
        }
    }
}

#[test]
fn walk_of_a_part_reads_no_more_than_the_way_there() {
    let (mut nodes, versions) = versions(7, 12, 100);
    let (root, _) = versions.last().unwrap();
    nodes.reads = 0;
    walk(&mut nodes, *root, 3..=3);
    assert!(nodes.reads <= usize::from(root.height), "{}", nodes.reads);
}

/// A mark: over all versions, each directory once.
#[test]
fn walk_that_skips_seen_directories_finds_everything_needed_once() {
    let (mut nodes, versions) = versions(3, 20, 100);
    let needed: HashSet<Place> =
        versions.iter().flat_map(|(_, model)| model.values().copied()).collect();
    let (mut seen, mut found) = (HashSet::new(), HashSet::new());
    nodes.reads = 0;
    for (root, _) in versions.iter().rev() {
        let mut walk = Walk::new(*root, 0..=u64::MAX);
        loop {
            match walk.next_step() {
                WalkStep::Read(at) if !seen.insert(at) => walk.skip(),
                WalkStep::Read(at) => walk.feed(nodes.directory(at)),
                WalkStep::Leaf(_, leaf) => drop(found.insert(leaf)),
                WalkStep::Done => break,
            }
        }
    }
    assert_eq!(found, needed);
    assert_eq!(nodes.reads, seen.len());
}
