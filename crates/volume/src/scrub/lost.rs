//! Which volumes and snapshots have lost what, in extents that are known to be damaged.
//!
//! Invariants
//! - I1 A node is visited once, as far as a bounded memory goes, however many directories or
//!   snapshots name it: one beneath which something is lost as soon as nothing more is listed, and
//!   only counted. Nodes older than all of these extents are not visited.
//! - I2 What is read is what is in the store, past all caches.

use crate::check::Findings;
use crate::collect::names::Named;
use crate::place::{BLOCK_BYTES, ExtentId, Place};
use crate::snapshots;
use crate::state::Root;
use crate::tree::Tree;
use mica_block::{Error, ErrorKind, Result};
use mica_map::{Directory, FANOUT, FANOUT_BITS};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// Nodes of which it is known how much is lost beneath them, at most.
const NODES_MAX: usize = 1 << 20;
/// Blocks that are known to be sound or not, at most.
const BLOCKS_MAX: usize = 1 << 20;

/// Adds what `names` have lost in the extents `bad` to `findings`.
///
/// # Errors
/// What the store reports, unless it is damage.
pub(crate) async fn find(
    tree: &Tree,
    names: &[Arc<Named>],
    bad: &BTreeSet<ExtentId>,
    findings: &mut Findings,
) -> Result<()> {
    let Some(oldest) = bad.first() else { return Ok(()) };
    let (nodes, blocks) = (HashMap::new(), HashMap::new());
    let mut lost = Lost { tree, bad, oldest: *oldest, nodes, blocks, findings };
    for named in names.iter().filter(|named| named.is_alive() && !named.is_pinned()) {
        let (name, state) = (named.name.as_str(), &named.head.state);
        lost.walk(name, state.map).await?;
        match snapshots::all(tree, state.snapshots).await {
            Ok(records) => {
                for record in records {
                    let name = format!("{name}@{}", record.info.number);
                    lost.walk(&name, record.map).await?;
                }
            }
            Err(error) => {
                let what = |error: &Error| {
                    format!("{name}: some of its snapshots: {}", error.in_one_line())
                };
                lost.findings.note(Err::<(), _>(error), what)?;
            }
        }
    }
    Ok(())
}

struct Lost<'a> {
    tree: &'a Tree,
    bad: &'a BTreeSet<ExtentId>,
    oldest: ExtentId,
    /// How much is lost beneath each node.
    nodes: HashMap<Place, u64>,
    /// What was wrong with blocks in bad extents.
    blocks: HashMap<Place, Option<Error>>,
    findings: &'a mut Findings,
}

/// A directory on the current path.
struct Frame {
    at: Place,
    directory: Arc<Directory<Place>>,
    level: u8,
    prefix: u64,
    next: usize,
    /// How much is lost beneath it, as far as it was visited.
    lost: u64,
}

impl Frame {
    fn add(&mut self, lost: u64) {
        self.lost = self.lost.saturating_add(lost);
    }
}

impl Lost<'_> {
    /// Goes through the map `root` of `name`.
    async fn walk(&mut self, name: &str, root: Root) -> Result<()> {
        let mut frames: Vec<Frame> = Vec::new();
        let mut wanted = root.node.map(|node| (node, root.height, 0));
        loop {
            if let Some((at, level, prefix)) = wanted.take() {
                match self.enter(name, at, level, prefix).await? {
                    Entered::Known { lost } => {
                        frames.last_mut().into_iter().for_each(|frame| frame.add(lost));
                    }
                    Entered::Directory(frame) => frames.push(frame),
                }
            }
            let Some(frame) = frames.last_mut() else { return Ok(()) };
            let child = (frame.next..FANOUT)
                .find_map(|index| frame.directory.child(index).map(|child| (index, child)));
            match child {
                Some((index, child)) => {
                    frame.next = index + 1;
                    let prefix = frame.prefix << FANOUT_BITS | index as u64;
                    wanted = Some((child, frame.level - 1, prefix));
                }
                None => {
                    let (at, lost) = (frame.at, frame.lost);
                    if self.nodes.len() < NODES_MAX {
                        self.nodes.insert(at, lost);
                    }
                    frames.pop();
                    frames.last_mut().into_iter().for_each(|frame| frame.add(lost));
                }
            }
        }
    }

    /// Looks at a node, or at level 0 a block, which has the keys with this `prefix`.
    async fn enter(&mut self, name: &str, at: Place, level: u8, prefix: u64) -> Result<Entered> {
        if level == 0 {
            return self.look_at_block(name, at, prefix).await;
        }
        if at.extent() < self.oldest {
            return Ok(Entered::SOUND);
        }
        if let Some(&lost) = self.nodes.get(&at)
            && (lost == 0 || self.findings.is_full())
        {
            self.findings.count(lost);
            return Ok(Entered::Known { lost });
        }
        let node = self.tree.read_node(at).await;
        let what = |error: &Error| {
            let bits = u32::from(level) * FANOUT_BITS;
            let len = (BLOCK_BYTES as u64).checked_shl(bits).unwrap_or(u64::MAX);
            let start = prefix.saturating_mul(len);
            format!("{name}: up to {len} bytes at {start} of the disk: {}", error.in_one_line())
        };
        Ok(match self.findings.note(node, what)? {
            Some(directory) => {
                Entered::Directory(Frame { at, directory, level, prefix, next: 0, lost: 0 })
            }
            None => Entered::LOST,
        })
    }

    async fn look_at_block(&mut self, name: &str, at: Place, block: u64) -> Result<Entered> {
        if !self.bad.contains(&at.extent()) {
            return Ok(Entered::SOUND);
        }
        let known = match self.blocks.get(&at) {
            Some(known) => known.clone(),
            None => {
                let known = match self.tree.check_block(at).await {
                    Ok(()) => None,
                    Err(error) if error.kind() == ErrorKind::Corrupt => Some(error),
                    Err(error) => return Err(error),
                };
                if self.blocks.len() < BLOCKS_MAX {
                    self.blocks.insert(at, known.clone());
                }
                known
            }
        };
        let Some(error) = known else { return Ok(Entered::SOUND) };
        let start = block.saturating_mul(BLOCK_BYTES as u64);
        self.findings.add(|| {
            format!("{name}: {BLOCK_BYTES} bytes at {start} of the disk: {}", error.in_one_line())
        });
        Ok(Entered::LOST)
    }
}

enum Entered {
    /// So much is lost of it, or beneath it.
    Known {
        lost: u64,
    },
    Directory(Frame),
}

impl Entered {
    const SOUND: Self = Self::Known { lost: 0 };
    const LOST: Self = Self::Known { lost: 1 };
}
