//! Reads the snapshots of a state.
//!
//! Invariants
//! - I1 A record is taken for a snapshot only under its own number.
//! - I2 What is read at once is bounded, and so is what is returned.

use crate::format::snapshot::Record;
use crate::place::Place;
use crate::state::Root;
use crate::tree::Tree;
use mica_block::{Error, ErrorKind, Result, Which, check_label};
use mica_map::{Directory, Walk, WalkStep};
use mica_rt::join_all;
use std::sync::Arc;

/// Snapshots of a volume that are listed, at most.
const LISTED_MAX: usize = 1 << 20;
/// Records that are read at the same time.
const READS_MAX: usize = 64;

/// All snapshots in the tree `root`, by number.
///
/// # Errors
/// If they cannot be read; `Limit` if there are more than anybody can look through.
pub(crate) async fn all(tree: &Tree, root: Root) -> Result<Vec<Arc<Record>>> {
    let places = places(tree, root).await?;
    let mut records = Vec::with_capacity(places.len());
    for some in places.chunks(READS_MAX) {
        let reads = some.iter().map(|(number, place)| numbered(tree, *number, *place));
        for record in join_all(reads.collect::<Vec<_>>()).await {
            records.push(record?);
        }
    }
    Ok(records)
}

/// How many snapshots there are in the tree `root`. Their records are not read.
///
/// # Errors
/// As [`all`].
pub(crate) async fn count(tree: &Tree, root: Root) -> Result<u64> {
    places(tree, root).await.map(|places| places.len() as u64)
}

/// The snapshot `which` in the tree `root`.
///
/// # Errors
/// As [`all`].
pub(crate) async fn find(tree: &Tree, root: Root, which: &Which) -> Result<Option<Arc<Record>>> {
    match which {
        Which::Number(number) => match tree.look_up(root, *number).await? {
            Some(place) => numbered(tree, *number, place).await.map(Some),
            None => Ok(None),
        },
        Which::Label(_) => {
            let all = all(tree, root).await?;
            Ok(all.into_iter().find(|record| which.is_of(&record.info)))
        }
    }
}

/// That a snapshot may get `label`, of which `others` are all that the volume has.
///
/// # Errors
/// `Invalid` if it may not.
pub(crate) fn check_new_label<'a>(
    label: &str,
    others: impl IntoIterator<Item = &'a str>,
) -> Result<()> {
    check_label(label)?;
    if !label.is_empty() && others.into_iter().any(|other| other == label) {
        let what = format!("there is a snapshot {label:?} already");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

/// The error: volume `name` has no snapshot `which`.
pub(crate) fn missing(name: &str, which: &Which) -> Error {
    Error::new(ErrorKind::NotFound, format!("volume {name} has no snapshot {which}"))
}

async fn places(tree: &Tree, root: Root) -> Result<Vec<(u64, Place)>> {
    let mut places = Vec::new();
    let mut walk = Walk::new(root, 0..=u64::MAX);
    loop {
        match walk.next_step() {
            WalkStep::Read(at) => walk.feed(Directory::clone(&*tree.node(at).await?)),
            WalkStep::Leaf(..) if places.len() == LISTED_MAX => {
                let what = format!("more than {LISTED_MAX} snapshots");
                return Err(Error::new(ErrorKind::Limit, what));
            }
            WalkStep::Leaf(number, place) => places.push((number, place)),
            WalkStep::Done => return Ok(places),
        }
    }
}

async fn numbered(tree: &Tree, number: u64, place: Place) -> Result<Arc<Record>> {
    let record = tree.record(place).await?;
    if record.info.number == number {
        return Ok(record);
    }
    let (extent, found) = (place.extent().name(), record.info.number);
    let what = format!("snapshot {number}: {extent} has the record of snapshot {found} there");
    Err(Error::new(ErrorKind::Corrupt, what))
}

#[cfg(test)]
mod clones;
#[cfg(test)]
mod costs;
#[cfg(test)]
mod groups;
#[cfg(test)]
mod in_flight;
#[cfg(test)]
mod tests;
