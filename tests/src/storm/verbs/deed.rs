//! What verbs are for, and what they may leave.

use super::bitmaps::{By, Marking};
use super::look::{self, After};
use super::target::Target;
use crate::storm::chain::Chain;
use crate::storm::shape::Shape;
use crate::storm::stamp::Seq;
use crate::storm::state::{Layer, Snapshot};
use crate::storm::story::{Fault, Outcome, Wrong, trouble};
use std::fs;

/// Why a verb may be refused, and nothing is changed.
const REFUSALS: [&str; 10] = [
    "has internal snapshots",
    "needs version 3",
    "in version 2",
    "of version 2",
    "hides parts of its backing file with zeros",
    "in an external",
    "is inconsistent",
    "a v2 image which has snapshots",
    "shared more often than such refcounts count",
    // By an earlier commit, which left the layers above as they were.
    "was merged into",
];

/// What a verb makes of the disk.
#[derive(Clone, Debug)]
pub(super) enum Disk {
    Same,
    /// It has so many sectors then.
    Len(u64),
    /// It has this content.
    Content(Vec<Seq>),
}

/// A verb, and what it is to do.
#[derive(Clone, Debug)]
pub(super) struct Deed {
    pub(super) args: Vec<String>,
    /// Whether it has the options of those that open images.
    pub(super) takes_faults: bool,
    pub(super) disk: Disk,
    pub(super) layers: Option<Vec<Layer>>,
    /// The snapshots that it leaves, by name; a new one has the present content.
    pub(super) snapshots: Option<Vec<String>>,
    pub(super) bitmaps: Option<Vec<String>>,
    /// What it does to bitmaps.
    pub(super) marking: Option<Marking>,
    /// The active layer's shape then.
    pub(super) shape: Option<Shape>,
    target: Option<Target>,
    /// How it says that it was done already.
    pub(super) was_done: Option<&'static str>,
    /// It leaves no leaks.
    pub(super) mends: bool,
}

impl Deed {
    pub(super) fn new<S: Into<String>>(args: impl IntoIterator<Item = S>) -> Self {
        Self {
            args: args.into_iter().map(Into::into).collect(),
            takes_faults: true,
            disk: Disk::Same,
            layers: None,
            snapshots: None,
            bitmaps: None,
            marking: None,
            shape: None,
            target: None,
            was_done: None,
            mends: false,
        }
    }

    /// One that makes something elsewhere.
    pub(super) fn of_target<S: Into<String>>(
        args: impl IntoIterator<Item = S>,
        target: Target,
        was_done: &'static str,
    ) -> Self {
        Self { target: Some(target), was_done: Some(was_done), ..Self::new(args) }
    }

    /// One that opens no images.
    pub(super) fn without_image_options(self) -> Self {
        Self { takes_faults: false, ..self }
    }

    /// The same once more, of what the chain holds by now.
    pub(super) fn again(&self, chain: &Chain<'_>) -> Self {
        let mut again = self.clone();
        if let Some(target) = &mut again.target {
            target.follow(&chain.state.model);
        }
        again
    }

    /// What may be left where it came to its end.
    pub(super) fn after_end(&self) -> After {
        if self.mends { After::Repair } else { After::End }
    }

    /// What may be left where it was killed.
    pub(super) fn after_kill(&self) -> After {
        let counts = self.args.first().is_some_and(|verb| verb == "snapshot");
        if counts { After::KillAmidCounting } else { After::Kill }
    }

    /// What becomes of bitmaps.
    pub(super) fn by(&self) -> By {
        if self.marking == Some(Marking::End) { By::Broken } else { By::Recorded }
    }

    /// Whether it may say this, and do nothing.
    pub(super) fn may_be_refused(&self, said: &str) -> bool {
        self.was_done.is_some_and(|was_done| said.contains(was_done))
            || REFUSALS.iter().any(|why| said.contains(why))
    }

    /// Whether it was refused since it was done before.
    pub(super) fn was_done_says(&self, chain: &Chain<'_>) -> Outcome<bool> {
        let said = fs::read_to_string(chain.world.run.join("verb.log"))?;
        Ok(self.was_done.is_some_and(|was_done| said.contains(was_done)))
    }

    fn content(&self, now: &[Seq]) -> Vec<Seq> {
        match &self.disk {
            Disk::Same => now.to_vec(),
            Disk::Len(sectors) => {
                let mut content = now.to_vec();
                content.resize(usize::try_from(*sectors).expect("disks are small"), 0);
                content
            }
            Disk::Content(content) => content.clone(),
        }
    }

    /// It was done.
    pub(super) fn judge_done(&self, chain: &mut Chain<'_>, what: &str) -> Outcome {
        let now = contents(chain)?;
        if let Some(layers) = &self.layers {
            chain.state.layers.clone_from(layers);
        }
        if let (Some(shape), Some(active)) = (self.shape, chain.state.layers.last_mut()) {
            active.shape = Some(shape);
        }
        look::content_is_one_of(chain, &[self.content(&now)], what)?;
        if let Some(names) = &self.snapshots {
            take_snapshots(&mut chain.state.snapshots, names, &now);
        }
        self.judge_names(chain, what)?;
        look::judge_snapshots(chain, &chain.state.snapshots, what)?;
        self.target.as_ref().map_or(Ok(()), |target| target.judge_done(chain, what))
    }

    /// It was refused, and nothing has changed.
    pub(super) fn judge_refused(&self, chain: &mut Chain<'_>, what: &str) -> Outcome {
        let now = contents(chain)?;
        look::content_is_one_of(chain, &[now], what)?;
        let (layers, snapshots, _) = look::names(chain)?;
        judge_list(&layers, &[layer_names(&chain.state.layers)], what)?;
        judge_list(&snapshots, &[snapshot_names(&chain.state.snapshots)], what)?;
        look::judge_snapshots(chain, &chain.state.snapshots, what)?;
        self.target.as_ref().map_or(Ok(()), |target| target.judge_killed(chain, what))
    }

    /// It was killed: all is as before, or done. Whether it is done.
    pub(super) fn judge_killed(&self, chain: &mut Chain<'_>, what: &str) -> Outcome<bool> {
        let now = contents(chain)?;
        let after = self.content(&now);
        let (layers, snapshots, bitmaps) = look::names(chain)?;
        let old = layer_names(&chain.state.layers);
        let new = self.layers.as_deref().map_or_else(|| old.clone(), layer_names);
        judge_list(&layers, &[old, new.clone()], what)?;
        if let Some(after) = self.layers.as_ref().filter(|_| layers == new) {
            chain.state.layers.clone_from(after);
        }
        let at = look::content_is_one_of(chain, &[after, now.clone()], what)?;
        let old = snapshot_names(&chain.state.snapshots);
        let new = self.snapshots.clone().unwrap_or_else(|| old.clone());
        judge_list(&snapshots, &[old, new.clone()], what)?;
        if snapshots == new {
            take_snapshots(&mut chain.state.snapshots, &new, &now);
        }
        look::judge_snapshots(chain, &chain.state.snapshots, what)?;
        if let Some(target) = &self.target {
            target.judge_killed(chain, what)?;
        }
        let has_bitmaps = self.bitmaps.as_ref().is_none_or(|wanted| *wanted == bitmaps);
        Ok(at == 0 && layers == layer_names(&chain.state.layers) && has_bitmaps)
    }

    fn judge_names(&self, chain: &Chain<'_>, what: &str) -> Outcome {
        let (layers, snapshots, bitmaps) = look::names(chain)?;
        judge_list(&layers, &[layer_names(&chain.state.layers)], what)?;
        judge_list(&snapshots, &[snapshot_names(&chain.state.snapshots)], what)?;
        match &self.bitmaps {
            Some(wanted) => judge_list(&bitmaps, std::slice::from_ref(wanted), what),
            None => Ok(()),
        }
    }
}

/// What the model says that the disk holds.
fn contents(chain: &Chain<'_>) -> Outcome<Vec<Seq>> {
    let model = &chain.state.model;
    let only = |sector| {
        let allowed = model.allowed(sector, crate::storm::model::View::Kept);
        match &allowed[..] {
            [seq] => Ok(*seq),
            _ => Err(trouble("a sector is not decided")),
        }
    };
    (0..model.len()).map(only).collect()
}

fn judge_list(is: &Vec<String>, wanted: &[Vec<String>], what: &str) -> Outcome {
    match wanted.contains(is) {
        true => Ok(()),
        false => Err(Fault::new(Wrong::Layers, format!("{what}: is {is:?}, not {wanted:?}"))),
    }
}

fn layer_names(layers: &[Layer]) -> Vec<String> {
    layers.iter().map(|layer| layer.name.clone()).collect()
}

pub(super) fn snapshot_names(snapshots: &[Snapshot]) -> Vec<String> {
    snapshots.iter().map(|snapshot| snapshot.name.clone()).collect()
}

/// The snapshots are those with these names; what is new has the content `now`.
fn take_snapshots(snapshots: &mut Vec<Snapshot>, names: &[String], now: &[Seq]) {
    snapshots.retain(|snapshot| names.contains(&snapshot.name));
    for name in names {
        if !snapshots.iter().any(|snapshot| snapshot.name == *name) {
            snapshots.push(Snapshot { name: name.clone(), content: now.to_vec() });
        }
    }
}
