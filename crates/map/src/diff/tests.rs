use super::*;
use crate::testing::{Model, Nodes, Place as At, Random, versions};
use crate::{Editor, Root};

fn diff(
    nodes: &mut Nodes,
    before: Root<At>,
    after: Root<At>,
    keys: RangeInclusive<u64>,
) -> Vec<Change<At>> {
    let mut diff = Diff::new(before, after, keys);
    let mut changes = Vec::new();
    loop {
        match diff.next_step() {
            DiffStep::Read(at) => {
                assert_eq!(diff.next_step(), DiffStep::Read(at), "it asks until it is fed");
                diff.feed(nodes.directory(at));
            }
            DiffStep::Changed(change) => changes.push(change),
            DiffStep::Done => return changes,
        }
    }
}

/// The naive way: every key of both.
fn compare(before: &Model, after: &Model, within: &RangeInclusive<u64>) -> Vec<Change<At>> {
    let mut keys: Vec<u64> = before.keys().chain(after.keys()).copied().collect();
    keys.sort_unstable();
    keys.dedup();
    let changes = keys.into_iter().filter(|key| within.contains(key)).map(|key| Change {
        key,
        before: before.get(&key).copied(),
        after: after.get(&key).copied(),
    });
    changes.filter(|change| change.before != change.after).collect()
}

#[test]
fn diff_of_any_two_versions_is_the_keys_that_differ() {
    for seed in 0..12 {
        let (mut nodes, versions) = versions(seed, 10, 100);
        let mut random = Random(seed);
        for (before, old) in &versions {
            for (after, new) in &versions {
                let (a, b) = (random.key(), random.key());
                for keys in [0..=u64::MAX, a.min(b)..=a.max(b)] {
                    let found = diff(&mut nodes, *before, *after, keys.clone());
                    assert_eq!(found, compare(old, new, &keys), "seed {seed} {before:?} {after:?}");
                }
            }
        }
    }
}

#[test]
fn what_two_versions_share_is_not_read() {
    let mut nodes = Nodes::default();
    let mut editor = Editor::new(Root::default(), usize::MAX);
    for key in 0..65_536 {
        editor.grow_for(key);
        editor.set(key, Some(nodes.put(&[])));
    }
    let before = nodes.write(&mut editor);
    editor.set(77, Some(nodes.put(b"other")));
    let same_height = nodes.write(&mut editor);
    editor.grow_for(1 << 30);
    nodes.load(&mut editor, 1 << 30);
    editor.set(1 << 30, Some(nodes.put(b"far")));
    let higher = nodes.write(&mut editor);

    nodes.reads = 0;
    assert_eq!(diff(&mut nodes, before, before, 0..=u64::MAX), []);
    assert_eq!(nodes.reads, 0);
    assert_eq!(diff(&mut nodes, before, same_height, 0..=u64::MAX).len(), 1);
    assert_eq!(nodes.reads, 2 * usize::from(before.height));
    nodes.reads = 0;
    // What the tree grew above is still shared.
    assert_eq!(diff(&mut nodes, same_height, higher, 0..=u64::MAX).len(), 1);
    // Only what was added above it, and the path to the new key.
    assert_eq!(nodes.reads, 4 + 7);
}
