//! A store of nodes for tests, as volumes will have it: objects, each with blocks, of which a later
//! one may name all earlier ones.

use crate::{Directory, Editor, Reference, Root, Step, encode_node, open_node};
use std::collections::{BTreeMap, HashMap};

/// Where a node is: the number of its object, and the block there.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Place {
    pub(crate) extent: u64,
    pub(crate) block: u32,
}

impl Reference for Place {
    type Bytes = [u8; 12];
    const BYTES: usize = 12;

    fn to_bytes(self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&self.extent.to_be_bytes());
        bytes[8..].copy_from_slice(&self.block.to_be_bytes());
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (extent, block) = bytes.split_first_chunk::<8>()?;
        let extent = u64::from_be_bytes(*extent);
        Some(Self { extent, block: u32::from_be_bytes(block.try_into().ok()?) })
    }

    fn may_name(self, child: Self) -> bool {
        child < self
    }
}

/// The leaves of a version by key.
pub(crate) type Model = BTreeMap<u64, Place>;

/// All nodes of all versions.
#[derive(Default)]
pub(crate) struct Nodes {
    nodes: HashMap<Place, Vec<u8>>,
    extent: u64,
    block: u32,
    /// Directories that were read since this was last set to zero.
    pub(crate) reads: usize,
}

impl Nodes {
    pub(crate) fn put(&mut self, payload: &[u8]) -> Place {
        let at = Place { extent: self.extent, block: self.block };
        self.block += 1;
        let mut node = Vec::new();
        encode_node(&mut node, at, payload);
        self.nodes.insert(at, node);
        at
    }

    /// From now on nodes go to a new object.
    pub(crate) fn next_extent(&mut self) {
        (self.extent, self.block) = (self.extent + 1, 0);
    }

    pub(crate) fn directory(&mut self, at: Place) -> Directory<Place> {
        self.reads += 1;
        Directory::decode(open_node(&self.nodes[&at], at).unwrap(), at).unwrap()
    }

    pub(crate) fn load(&mut self, editor: &mut Editor<Place>, key: u64) {
        while let Some((slot, at)) = editor.missing(key) {
            editor.feed(slot, self.directory(at));
        }
    }

    pub(crate) fn write(&mut self, editor: &mut Editor<Place>) -> Root<Place> {
        let root = editor.write(|directory| self.put(&directory.encode()));
        self.next_extent();
        root
    }

    pub(crate) fn look_up(&mut self, root: Root<Place>, key: u64) -> Option<Place> {
        let mut step = root.look_up(key);
        loop {
            match step {
                Step::Read(at, look_up) => step = look_up.feed(&self.directory(at)),
                Step::Leaf(at) => return Some(at),
                Step::Absent => return None,
            }
        }
    }
}

/// Pseudo-random numbers from a seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % bound
    }

    /// Small ones more often than large ones, and now and then one of all 64 bits.
    pub(crate) fn key(&mut self) -> u64 {
        let bits = self.below(15);
        match self.below(400) {
            0 => u64::MAX - self.below(3),
            _ => self.below(1 << bits),
        }
    }
}

/// Versions of a map, each made from the previous one by some changes, and the expected content of
/// each.
pub(crate) fn versions(
    seed: u64,
    count: usize,
    limit: usize,
) -> (Nodes, Vec<(Root<Place>, Model)>) {
    let mut random = Random(seed);
    let mut nodes = Nodes::default();
    let mut model = Model::new();
    let mut editor = Editor::new(Root::default(), limit);
    let mut versions = vec![(Root::default(), Model::new())];
    for _ in 0..count {
        if random.below(6) == 0 {
            // A restart: nothing is held, everything has to be fed.
            editor = Editor::new(editor.root(), limit);
        }
        if random.below(8) == 0 {
            let first = random.key();
            let last = match random.below(3) {
                0 => u64::MAX,
                1 => first.saturating_add(random.below(40)),
                _ => random.key(),
            };
            nodes.load(&mut editor, first);
            nodes.load(&mut editor, last);
            editor.clear(first..=last);
            model.retain(|key, _| !(first..=last).contains(key));
        }
        for _ in 0..random.below(120) {
            let key = random.key();
            editor.grow_for(key);
            nodes.load(&mut editor, key);
            assert_eq!(editor.leaf(key), model.get(&key).copied(), "seed {seed} key {key}");
            if random.below(4) == 0 {
                editor.set(key, None);
                model.remove(&key);
            } else {
                let leaf = nodes.put(&key.to_le_bytes());
                editor.set(key, Some(leaf));
                model.insert(key, leaf);
            }
        }
        versions.push((nodes.write(&mut editor), model.clone()));
        let held = editor.held_len();
        let bound = limit.max(Editor::<Place>::LIMIT_MIN) + usize::from(crate::HEIGHT_MAX);
        assert!(held <= bound && editor.dirty_len() == 0, "seed {seed}: {held} are held");
    }
    (nodes, versions)
}
