//! Collection: deletes what no volume names. Any number of collectors may run in a store at a time,
//! be slow, or die at any request.
//!
//! The order is that of the specification (model/README.md, *Collect*), and nothing else makes it
//! right:
//!
//! 1. list extents;
//! 2. read the highest head of every name;
//! 3. read them again, until there are no other volumes;
//! 4. find what the heads of 2 name (`mark`), and delete what was listed and is not among it, nor
//!    above a writer's checkpoint; and heads below those of 2.
//!
//! Boot records are listed with extents, and deleted with them if no head of 2 is of their image.
//!
//! When what heads name is looked up makes no difference, as none of it ever changes: what is
//! missing then was deleted by another collector, if there is a newer head; all begins again at 2.
//! Otherwise it is damage, and nothing is deleted: what hangs beneath it is unknown.
//!
//! Invariants
//! - I1 Nothing is deleted before everything was found that is named.
//! - I2 Fences, the highest head of each name, and what has no name of ours are never deleted.
//! - I3 Holes are punched only where the same proof holds as for a deletion: in what was listed, is
//!   not above a checkpoint, and in no block or node that was found.
//!
//! What it costs. Memory: 24 bytes for each extent that is listed; a bit for each block and about
//! 60 bytes for each node that is wanted of an older extent than the one being read, at the worst
//! moment; about 500 bytes for each name. Requests: one or two for each extent with nodes that are
//! named, a get for each name, and what is listed. Ten thousand clones of one image of 100 GiB
//! have one map: 12,800 extents are read as for one volume, with 3 MB of bits and the 1.9 million
//! nodes of a map that was written at random at most 110 MB, in sequence 1 MB; the names take 5
//! MB, 10,000 gets, and about 100 lists of a bucket or 20,000 of folders. 100,000 snapshots of a
//! volume, with one block changed between two: 100,000 extents of 8 to 16 KiB, a request and 24
//! bytes each; what is wanted at the worst moment is the records of all of them and a path for
//! each, 700,000 nodes or 42 MB.
//!
//! What is listed, always of the whole store, as extents have no volume in their names: a folder
//! of extents for each writer of which something is left, a fence included; the folders of claims
//! from the lowest boundary on, so those of the openings since the last collection; the heads of
//! each name, twice (to list the names alone is not enough for step 3: a volume may have been
//! deleted, and another made of its name). In a directory that is one request for each folder. A
//! bucket lists what is in many folders at once (`within`): one request for each thousand objects,
//! and one or two for each 256 folders.
//!
//! A pool lists by hashes, over all that it has, of whatever store, so that folders are listed one
//! by one there. It keeps those that are empty, as whoever puts something there just then may know
//! that their markers were there: 32 requests for each writer that there ever was whose extents
//! are all gone, and 33 and one for each extent for the others. To leave the former out, the store
//! would need a record of them that every collector trusts for ever, and what a slow request of
//! such a writer still puts there would never be freed.

mod areas;
mod boots;
mod claims;
pub(crate) mod client;
pub(crate) mod extents;
pub(crate) mod mark;
pub(crate) mod names;
pub(crate) mod owners;
pub(crate) mod plan;
mod sweep;
mod within;

pub use client::Speed;
pub use mark::Bytes;

use crate::names::VolumeName;
use crate::place::ExtentId;
use crate::volumes::Volumes;
use client::Client;
use extents::Listed;
use mark::{Damage, Mark};
use mica_block::{Error, ErrorKind, Result};
use names::Named;
use plan::Plan;
use std::collections::BTreeSet;
use std::ops::AddAssign;
use std::sync::Arc;

/// Times that a collector begins again, at most, because of what others deleted meanwhile.
const ROUNDS_MAX: usize = 32;

/// How to collect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CollectOptions {
    /// Whether it is only said what would be done.
    pub dry_run: bool,
    /// How fast it may be.
    pub speed: Speed,
    /// Whether parts of extents are given back that snapshots or several volumes need, where the
    /// store can do that.
    pub punch: bool,
}

impl Default for CollectOptions {
    fn default() -> Self {
        Self { dry_run: false, speed: Speed::default(), punch: true }
    }
}

/// What is being done.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Step {
    /// Extents are listed.
    #[default]
    List,
    /// It is found out what heads name.
    Mark,
    /// What nothing names is deleted.
    Free,
}

/// How far it is.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Progress {
    /// What is being done.
    pub step: Step,
    /// Names that were read.
    pub names: u64,
    /// Extents that were listed, found to be named, or read as a whole.
    pub extents: u64,
    /// How many there are, about.
    pub of_extents: u64,
    /// Nodes that were read.
    pub nodes: u64,
    /// Objects that were deleted.
    pub deleted: u64,
}

/// What a collection found and did; after a dry run, what it would have done.
#[derive(Clone, Default, Debug)]
pub struct Collected {
    /// Volumes.
    pub volumes: u64,
    /// Their snapshots.
    pub snapshots: u64,
    /// Nodes of their trees; those that several have count once.
    pub nodes: u64,
    /// Extents that were there, and their bytes.
    pub extents: u64,
    /// See `extents`.
    pub bytes: u64,
    /// Bytes of what volumes and snapshots name, and of what writers put since their checkpoints.
    pub live_bytes: u64,
    /// Of these, the latter.
    pub recent_bytes: u64,
    /// Extents that nothing names, and their bytes.
    pub freed_extents: u64,
    /// See `freed_extents`.
    pub freed_bytes: u64,
    /// Bytes that were given back within extents that stay. Zero after a dry run.
    pub punched_bytes: u64,
    /// Heads below the highest of their names.
    pub freed_heads: u64,
    /// Claims of writers' numbers, and boundaries of such.
    pub freed_claims: u64,
    /// Boot records of images that are gone, and older ones of those that are not.
    pub freed_boots: u64,
    /// Extents that stay, by the share of their bytes that is alive: below 10 %, below 20 %, ….
    pub shares: [u64; 10],
    /// What compaction can take.
    pub sparse: Vec<Sparse>,
    /// Objects that could not be deleted or given back; the next collection tries again.
    pub failed: u64,
    /// Why the first of them could not.
    pub failure: Option<Error>,
}

/// What another collection did after this one, which says what there is.
impl AddAssign for Collected {
    fn add_assign(&mut self, later: Self) {
        self.freed_extents += later.freed_extents;
        self.freed_bytes += later.freed_bytes;
        self.punched_bytes += later.punched_bytes;
        self.freed_heads += later.freed_heads;
        self.freed_claims += later.freed_claims;
        self.freed_boots += later.freed_boots;
        self.failed += later.failed;
        self.failure = self.failure.take().or(later.failure);
    }
}

/// Extents that hold little, which only what a volume is now needs: none of its snapshots, and no
/// other volume.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sparse {
    /// Which volume.
    pub name: VolumeName,
    /// The extents, in order.
    pub extents: Vec<ExtentId>,
    /// Their bytes.
    pub bytes: u64,
    /// What of it is alive.
    pub live_bytes: u64,
}

impl Volumes {
    /// Deletes everything in the store that no volume needs. Whatever else is done in the store
    /// meanwhile, also by other collectors, stays as it is.
    ///
    /// # Errors
    /// `Corrupt` if a head or a node of a map is damaged, `Unsupported` if only a newer version of
    /// mica can read it: then nothing was deleted. Otherwise what the store reports. What could not
    /// be deleted is no error, but counted.
    pub async fn collect(
        &self,
        options: CollectOptions,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Collected> {
        let client = Client::new(Arc::clone(&self.objects), options.speed);
        let punch = options.punch && sweep::can_punch(&client).await;
        let mut at = Progress::default();
        let listed = extents::list_extents(&client, |extents| {
            at = Progress { extents, ..at };
            progress(at);
        });
        let listed = listed.await?;
        let boots = boots::list(&client).await?;
        at = Progress { step: Step::Mark, extents: 0, of_extents: listed.len() as u64, ..at };
        let mark = |names: &[Arc<Named>]| Ok(Mark::new(&client, names));
        let marked = self.mark_all(&client, &listed, punch, mark, &mut at, progress).await?;
        let plan = marked.plan.finish(&marked.names, &marked.mark);
        let dead: BTreeSet<ExtentId> = plan.dead.iter().map(|listed| listed.id).collect();
        let kept = listed.iter().map(|listed| listed.id).filter(|id| !dead.contains(id)).collect();
        let (claims, boots) = (claims::find(&client).await?, boots.dead(&marked.names));
        at = Progress { step: Step::Free, ..at };
        progress(at);
        let swept = sweep::sweep(&client, options.dry_run, plan, (claims, boots), |deleted| {
            progress(Progress { deleted, ..at });
        });
        let swept = swept.await;
        self.tree.close_all_but(&kept);
        Ok(swept)
    }

    /// What is to be done about `listed`, by what `begin` begins to look for.
    pub(crate) async fn mark_all<'a>(
        &self,
        client: &Client,
        listed: &'a [Listed],
        punch: bool,
        begin: impl Fn(&[Arc<Named>]) -> Result<Mark>,
        at: &mut Progress,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<AllMarked<'a>> {
        for _ in 0..ROUNDS_MAX {
            let names = names::stable_names(client, self.store, &BTreeSet::new()).await;
            let names = names.map_err(without_head)?;
            at.names = names.len() as u64;
            let mut mark = begin(&names)?;
            let mut plan = Plan::new(listed, &names, punch);
            while let Some(marked) = mark.next().await? {
                if let Some(damage) = mark.damage.first() {
                    let named = &names[damage.via.name as usize];
                    if names::head_numbers(client, &named.name).await?.last()
                        == Some(&named.head.number)
                    {
                        return Err(damage_of(damage, named));
                    }
                    break;
                }
                plan.keep(marked, &mark.owners);
                (at.extents, at.nodes) = (plan.kept(), mark.nodes);
                progress(*at);
            }
            if mark.damage.is_empty() {
                return Ok(AllMarked { plan, names, mark });
            }
        }
        let what = format!("other hosts keep collecting in {}: try again", self.objects.name());
        Err(Error::new(ErrorKind::Io, what))
    }
}

/// Everything that heads name was found.
pub(crate) struct AllMarked<'a> {
    pub(crate) plan: Plan<'a>,
    pub(crate) names: Vec<Arc<Named>>,
    pub(crate) mark: Mark,
}

/// Why nothing is collected if a head cannot be read.
fn without_head(error: Error) -> Error {
    let so = match error.kind() {
        ErrorKind::Corrupt => "until then it is unknown what it needs, and nothing is deleted",
        ErrorKind::Unsupported => {
            "so it is unknown what its volume needs, and nothing may be deleted: use that version \
             of mica for this store"
        }
        _ => return error,
    };
    Error::new(error.kind(), format!("{}; {so}", error.in_one_line()))
}

/// Why nothing is collected.
fn damage_of(damage: &Damage, named: &Arc<Named>) -> Error {
    let snapshot = damage.via.snapshot.map_or(String::new(), |number| format!("@{number}"));
    let why = match damage.error.kind() {
        ErrorKind::NotFound => "the extent is missing".to_owned(),
        _ => damage.error.in_one_line(),
    };
    let what = format!(
        "volume {}{snapshot} is damaged at offset {} of {}, so that it is unknown what it needs, \
         and nothing was deleted: {why}; mica volume check says what was lost: restore that from a \
         copy, or delete what needs it",
        named.name.as_str(),
        damage.at.offset(),
        damage.at.extent().name(),
    );
    Error::new(ErrorKind::Corrupt, what)
}

#[cfg(test)]
mod tests;
