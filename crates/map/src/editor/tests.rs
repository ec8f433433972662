//! The tree against a plain map, over many versions, from a seed.

use super::*;
use crate::node::{node_len, open_node};
use crate::{Root, Step};
use std::collections::BTreeMap as Model;

/// All files of all versions, and what a reader does with them.
#[derive(Default)]
struct Files(Vec<Vec<u8>>);

impl Files {
    fn payload(&self, at: NodeRef) -> Vec<u8> {
        let start = usize::try_from(at.offset()).unwrap();
        open_node(&self.0[usize::from(at.file())][start..], at).unwrap().to_vec()
    }

    fn read(&self, root: Root, key: u64) -> Option<Vec<u8>> {
        let mut step = root.look_up(key);
        loop {
            match step {
                Step::Read(at, look_up) => {
                    step = look_up.feed(&Directory::decode(&self.payload(at), at).unwrap());
                }
                Step::Leaf(at) => return Some(self.payload(at)),
                Step::Absent => return None,
            }
        }
    }

    fn load(&self, editor: &mut Editor, key: u64) {
        while let Some((slot, at)) = editor.missing(key) {
            editor.feed(slot, Directory::decode(&self.payload(at), at).unwrap());
        }
    }
}

fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

#[test]
fn every_version_reads_as_it_was_written_whatever_came_later() {
    for seed in 0..40 {
        let mut random = seed;
        let mut files = Files::default();
        let mut model = Model::new();
        let mut versions = Vec::new();
        let mut editor = Editor::new(Root::default());
        for version in 0..30_u16 {
            let mut file = vec![0; 64];
            if next(&mut random).is_multiple_of(4) {
                // A restart: nothing is held, all has to be fed.
                editor = Editor::new(editor.root());
            }
            if next(&mut random).is_multiple_of(8) {
                let first = next(&mut random) % 5000;
                files.load(&mut editor, first);
                editor.truncate(first);
                model.retain(|key, _| *key < first);
            }
            for _ in 0..next(&mut random) % 12 {
                let key = next(&mut random) % (1 << (next(&mut random) % 14));
                let leaf = format!("{version}/{key}").into_bytes();
                editor.grow_for(key);
                files.load(&mut editor, key);
                let at = NodeRef::new(version, file.len() as u64).unwrap();
                encode_node(&mut file, at, &leaf);
                editor.set(key, Some(at));
                model.insert(key, leaf);
            }
            let root = editor.write(version, &mut file);
            files.0.push(file);
            versions.push((root, model.clone()));
        }
        for (root, model) in &versions {
            for key in (0..5000).chain([9000, 16383, 1 << 40]) {
                assert_eq!(
                    files.read(*root, key),
                    model.get(&key).cloned(),
                    "seed {seed} key {key} root {root:?}"
                );
            }
        }
    }
}

#[test]
fn node_at_another_place_is_refused() {
    let at = NodeRef::new(3, 0).unwrap();
    let mut file = Vec::new();
    encode_node(&mut file, at, b"leaf");
    assert_eq!(node_len(&file), Some(file.len()));
    assert!(open_node(&file, at).is_ok());
    assert_eq!(open_node(&file, NodeRef::new(4, 0).unwrap()), Err(crate::NodeError::Checksum));
}

#[test]
fn directory_that_names_itself_or_a_later_node_is_refused() {
    let at = NodeRef::new(3, 500).unwrap();
    for child in [at, NodeRef::new(3, 501).unwrap(), NodeRef::new(4, 0).unwrap()] {
        let mut directory = Directory::default();
        directory.set_child(2, Some(child));
        let payload = directory.encode();
        assert_eq!(Directory::decode(&payload, at), Err(crate::NodeError::Malformed));
    }
}

#[test]
fn version_costs_what_changed() {
    let mut editor = Editor::new(Root::default());
    let mut base = vec![0; 64];
    for key in 0..4096 {
        editor.grow_for(key);
        let at = NodeRef::new(0, base.len() as u64).unwrap();
        encode_node(&mut base, at, &[0; 100]);
        editor.set(key, Some(at));
    }
    editor.write(0, &mut base);
    let mut next = vec![0; 64];
    let at = NodeRef::new(1, 64).unwrap();
    encode_node(&mut next, at, &[1; 100]);
    editor.set(77, Some(at));
    editor.write(1, &mut next);
    assert!(next.len() < 64 + 108 + 3 * crate::DIRECTORY_BYTES_MAX + 1, "{}", next.len());
}
