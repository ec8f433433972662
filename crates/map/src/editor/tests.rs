//! The tree against a plain map, over many versions, from a seed.

use super::*;
use crate::directory_bytes_max;
use crate::testing::{Nodes, Place, Random, versions};

#[test]
fn every_version_reads_as_it_was_written_whatever_came_later() {
    for seed in 0..30_u8 {
        // From an editor that holds next to nothing to one that holds everything.
        let (mut nodes, versions) =
            versions(seed.into(), 25, [0, 100, 1 << 20][usize::from(seed % 3)]);
        let mut random = Random(seed.into());
        for (root, model) in &versions {
            let strangers = (0..200).map(|_| random.key()).collect::<Vec<_>>();
            for key in model.keys().copied().chain(strangers) {
                let expected = model.get(&key).copied();
                assert_eq!(nodes.look_up(*root, key), expected, "seed {seed} key {key} {root:?}");
            }
        }
    }
}

#[test]
fn version_costs_what_changed() {
    let mut nodes = Nodes::default();
    let mut editor = Editor::new(Root::default(), usize::MAX);
    for key in 0..4096 {
        editor.grow_for(key);
        editor.set(key, Some(nodes.put(b"leaf")));
    }
    nodes.write(&mut editor);
    let leaf = nodes.put(b"other");
    editor.set(77, Some(leaf));
    assert_eq!(editor.dirty_len(), 3);
    let mut written = 0;
    editor.write(|directory| {
        let bytes = directory.encode();
        written += bytes.len();
        nodes.put(&bytes)
    });
    assert!(written < 3 * directory_bytes_max::<Place>(), "{written}");
    // And a version in which nothing changed costs nothing.
    let root = editor.root();
    assert_eq!(editor.write(|_| unreachable!("nothing changed")), root);
}

#[test]
fn editor_that_sees_a_large_map_holds_no_more_than_its_limit() {
    const KEYS: u64 = 200_000;
    let mut nodes = Nodes::default();
    let mut editor = Editor::new(Root::default(), usize::MAX);
    for key in 0..KEYS {
        editor.grow_for(key);
        editor.set(key, Some(nodes.put(&[])));
    }
    let root = nodes.write(&mut editor);
    let mut editor = Editor::new(root, 200);
    let mut random = Random(1);
    for _ in 0..20_000 {
        let key = random.below(KEYS);
        nodes.load(&mut editor, key);
        assert!(editor.leaf(key).is_some());
        assert!(editor.held_len() <= 200 + 16, "{}", editor.held_len());
    }
}

#[test]
fn root_is_the_last_version_until_the_next_is_written() {
    let mut nodes = Nodes::default();
    let mut editor = Editor::new(Root::default(), 0);
    editor.grow_for(5);
    editor.set(5, Some(nodes.put(b"five")));
    let first = nodes.write(&mut editor);
    editor.grow_for(1 << 40);
    assert_eq!(editor.root(), first);
}
