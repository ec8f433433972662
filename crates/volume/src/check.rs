//! Reads everything that a volume has, and says what of it is damaged.
//!
//! Invariants
//! - I1 Nothing is changed.
//! - I2 Damage does not end the check: what is beneath a damaged node is unknown, and all the rest
//!   is read.
//! - I3 What is held grows with the extents of the volume and not with its blocks.

use crate::format::extent::{self, Kind};
use crate::place::{BLOCK_BYTES, ExtentId, Place};
use crate::put::{elsewhere, read_header};
use crate::state::Root;
use crate::tree::Tree;
use mica_block::{Error, ErrorKind, Objects, Result};
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::Buf;
use std::collections::BTreeSet;

/// Lines about damage that are kept; more are only counted.
const FINDINGS_MAX: usize = 1000;

/// What a check found.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Findings {
    /// Blocks with data.
    pub blocks: u64,
    /// Nodes of the map.
    pub nodes: u64,
    /// Extents that the map names something in.
    pub extents: u64,
    /// What is damaged: the first thousand.
    pub damaged: Vec<String>,
    /// How much is damaged.
    pub damaged_count: u64,
}

impl Findings {
    /// Keeps `outcome` in mind if it is damage.
    ///
    /// # Errors
    /// If it is something else: then nothing is known.
    fn note<T>(&mut self, outcome: Result<T>, what: impl FnOnce() -> String) -> Result<Option<T>> {
        match outcome {
            Ok(done) => Ok(Some(done)),
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                self.damaged_count += 1;
                if self.damaged.len() < FINDINGS_MAX {
                    self.damaged.push(format!("{}: {}", what(), error.in_one_line()));
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

/// Checks the map `root` and all that it names.
///
/// # Errors
/// If the store cannot be read; damage is no error.
pub(crate) async fn check_map(objects: &dyn Objects, tree: &Tree, root: Root) -> Result<Findings> {
    let mut findings = Findings::default();
    let mut extents = BTreeSet::new();
    let mut walk = Walk::new(root, 0..=u64::MAX);
    loop {
        match walk.next_step() {
            WalkStep::Read(at) => {
                extents.insert(at.extent());
                // Past the cache: what is in memory says nothing about the store.
                let node = tree.read_node(at).await;
                match findings.note(node, || "a part of the map".to_owned())? {
                    Some(node) => {
                        findings.nodes += 1;
                        walk.feed(Directory::clone(&node));
                    }
                    None => walk.skip(),
                }
            }
            WalkStep::Leaf(block, place) => {
                extents.insert(place.extent());
                findings.blocks += 1;
                check_block(tree, block, place, &mut findings).await?;
            }
            WalkStep::Done => break,
        }
    }
    findings.extents = extents.len() as u64;
    for id in extents {
        let checked = check_extent(objects, id).await;
        findings.note(checked, || "an extent".to_owned())?;
    }
    Ok(findings)
}

async fn check_block(tree: &Tree, block: u64, place: Place, findings: &mut Findings) -> Result<()> {
    let bytes = tree.read_blocks(place, [place], Buf::new(BLOCK_BYTES)).await;
    let at = block * BLOCK_BYTES as u64;
    findings.note(bytes, || format!("{BLOCK_BYTES} bytes at {at} of the disk"))?;
    Ok(())
}

/// What an extent says of itself: its header and its table.
async fn check_extent(objects: &dyn Objects, id: ExtentId) -> Result<()> {
    let name = id.name();
    let header = match read_header(objects, id).await? {
        Some(header) if header.kind == Kind::Extent => header,
        Some(_) => return Err(elsewhere(&name, objects)),
        None => {
            let what = format!("{name} of {}: it is missing", objects.name());
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
    };
    let table = Buf::new(header.entries * extent::ENTRY_BYTES);
    let (result, table) = objects.open(&name).read_at(table, header.table_at() as u64).await;
    result?;
    let decoded = extent::decode_table(&header, &table);
    decoded.map(drop).map_err(|why| why.explain(&name, objects).wrap("its table"))
}
