//! A merge of layers, from what is wanted to what is left to do when it is done: the one order of
//! steps that verbs and servers have in common. What happens in the chain and in its files is
//! described in `qcow2/src/chain/merge.rs`, the marks in `merged.rs`, and the notes in
//! `overlays/noted.rs`.
//!
//! ```text
//! Merge    ─▶ 1 marks ─▶ 2 who needs the layers? ─▶ 3 note of the base
//! Prepared ─▶ 4 the chain merges ─▶ 5 marks end ─▶ 6 marks, notes, files
//! Ended
//! ```
//!
//! | step | stream | commit | drop of a state |
//! |---|---|---|---|
//! | 1 marked are | none | the base, and the layers that leave | the state, as dropped |
//! | 2 must not be needed | none: they stay as is | the base, and those that leave | the state |
//! | 1 lower marks that name what moves | lead to the layer above | lead to the base | as stream |
//! | 3 noted of the base is | the layer above | as stream, unless that stays as is | as stream |
//! | 4 the data go | up, into the layer above | down, into the base; first the marks count | up |
//! | 5 the marks, if it is done | | that of a whole base goes, the others stay | stay |
//! | 5 the marks, if it is not | | go if nothing has changed, else stay | go |
//! | 6 the files of those that left | stay | stay | goes, and its mark with it |
//!
//! Invariants
//! - I1 Marks are durable before anybody is asked who needs the layers: of a merge and somebody who
//!   makes an image on one of them, at least one sees the other.
//! - I2 No byte of a layer changes, and none leaves the chain, unless steps 1 to 3 are done: only
//!   [`Prepared`] can be run, and nothing else makes one.
//! - I3 The base has the note of the layer above before the header of that names the base: whoever
//!   merges the base later finds it, whatever becomes of this process.
//! - I4 Step 6 is taken only for a merge that is done, and so durable, and all of it, whatever part
//!   of it fails: a failure undoes no merge.
//! - I5 The file of a state is removed last, and only if no mark leads to it, or through it.
//! - I6 A layer that left, and whose file stays, is the user's: nothing says that it was dropped.
//!
//! | the process dies | what is left | who settles that |
//! |---|---|---|
//! | before the chain's first step | marks of a commit that do not count | whoever meets them |
//! | before the merge is done | marks that count, of a commit | the same commit, once more |
//! | | the mark of a state | the next writer (`forget_drops`) |
//! | before step 5 is done | the mark of a base that is whole | the next writer (`ended.rs`) |
//! | before step 6 is done | marks through layers that left | the next writer (`above.rs`) |
//! | | the file of a state, with its mark | the next drop, or keep (`dropped.rs`) |
//! | | lines in notes | nobody has to: they are evidence of where to look only |
//!
//! Callers keep layers from coming and going meanwhile, and have asked before which kept states a
//! merge would change.

use crate::dropped::{self, Went, forget_drops};
use crate::merged::{FileMark, MergeMarks, NamedMarks, Until};
use crate::overlays::{check_no_overlays, settle_notes};
use crate::{GoneFiles, GoneImages, ImageOptions, note_overlay, position_of, settle_marks};
use mica_block::{
    ActiveAfter, CommitLayers, Error, ErrorKind, Manage, ManageChain, MergeControl, MergeLayers,
    Merged, RaiseLayers, Result,
};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

/// A merge that is wanted.
pub struct Merge {
    /// Beneath the layers that leave; none if everything does.
    base: Option<PathBuf>,
    /// Their data go, from the lowest. They leave the chain, unless the active layer is only copied
    /// down ([`ActiveAfter::Kept`]).
    leaving: Vec<PathBuf>,
    /// Stands on the base afterwards, if they leave.
    above: PathBuf,
    /// What lies beneath all that get another place, from the base of the chain.
    lower: Vec<PathBuf>,
    way: Way,
}

/// Where what the layers own goes.
enum Way {
    /// Up into the layer above, which is the active one.
    Up,
    /// Down into the base, that of the `active` layer, too, if that is said.
    Down { active: Option<ActiveAfter>, gone: GoneImages },
    /// Up into the layer above: the one that leaves keeps a state.
    Dropped(Box<Dropping>),
}

/// How a state is dropped.
struct Dropping {
    above: Above,
    /// How its file is opened, to find out whether anybody else has it open.
    options: ImageOptions,
    gone: GoneImages,
}

/// Which layer it is that another one goes up into.
#[derive(PartialEq, Eq)]
enum Above {
    Active,
    Frozen,
}

impl Merge {
    /// Of the chain with these `layers`, those above the one at position `base` go up into the
    /// active one; with no base all beneath it. Their files stay as they are.
    ///
    /// # Panics
    /// If there are no layers.
    #[must_use]
    pub fn stream(layers: &[PathBuf], base: Option<usize>) -> Self {
        let (above, beneath) = layers.split_last().expect("a chain has an active layer");
        // That the base is the active layer itself is refused by the chain.
        let leaving = beneath.get(base.map_or(0, |base| base + 1)..).unwrap_or_default();
        let lower = base.and_then(|base| beneath.get(..=base)).unwrap_or_default().to_vec();
        let base = base.map(|base| layers[base].clone());
        Self { base, leaving: leaving.to_vec(), above: above.clone(), lower, way: Way::Up }
    }

    /// Of the chain with these `layers`, those at positions `merged` but the first go down into
    /// that one. If the active layer is one of them it stays, and `active` says how. Images that
    /// stood on a layer and are `gone` count as the user says.
    ///
    /// # Panics
    /// If there are not at least two such layers.
    #[must_use]
    pub fn commit(
        layers: &[PathBuf],
        merged: RangeInclusive<usize>,
        active: ActiveAfter,
        gone: GoneImages,
    ) -> Self {
        let (base, top, last) = (*merged.start(), *merged.end(), layers.len() - 1);
        assert!(base < top && top <= last, "the base is beneath the top, and both are layers");
        let (above, active) = if top == last { (top, Some(active)) } else { (top + 1, None) };
        Self {
            base: Some(layers[base].clone()),
            leaving: layers[base + 1..above].to_vec(),
            above: layers[above].clone(),
            lower: layers[..base].to_vec(),
            way: Way::Down { active, gone },
        }
    }

    /// Of the chain with these `layers`, the frozen one at position `state` goes up into the one
    /// above, and its file is removed, which is opened with `options`. Images that stood on it and
    /// are `gone` count as the user says. What lies beneath stays as it is: images that nobody here
    /// knows may stand on that.
    ///
    /// # Panics
    /// If no frozen layer is there.
    #[must_use]
    pub fn drop_state(
        layers: &[PathBuf],
        state: usize,
        options: ImageOptions,
        gone: GoneImages,
    ) -> Self {
        let at = state + 1;
        assert!(at < layers.len(), "a state is kept in a frozen layer");
        let above = if at + 1 == layers.len() { Above::Active } else { Above::Frozen };
        Self {
            base: state.checked_sub(1).map(|base| layers[base].clone()),
            leaving: vec![layers[state].clone()],
            above: layers[at].clone(),
            lower: layers[..state].to_vec(),
            way: Way::Dropped(Box::new(Dropping { above, options, gone })),
        }
    }

    /// What it is called.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self.way {
            Way::Up => "stream",
            Way::Down { .. } => "commit",
            Way::Dropped(_) => "drop",
        }
    }

    /// The lowest of the frozen layers that change, or whose files go, if there is one.
    fn lowest_changed(&self) -> Option<PathBuf> {
        // They are those that nobody else may need.
        self.needed().and_then(|(layers, _)| layers.into_iter().next())
    }

    /// Steps 1 to 3. `check` is asked for what only the caller knows of the layers that change, or
    /// whose files go, from the lowest: whether another disk of this process needs one.
    ///
    /// # Errors
    /// Those of `check`; `Denied` if an image needs one of the layers, or a merge of them is under
    /// way; what the system reports. No layer has changed then.
    pub fn prepare(self, check: impl FnOnce(&[PathBuf]) -> Result<()>) -> Result<Prepared> {
        let marks = self.put_marks()?;
        let named = self.lead_marks()?;
        if let Some((needed, gone)) = self.needed() {
            check(&needed)?;
            check_no_overlays(&needed, &self.above, gone)?;
        }
        if let Some(base) = self.base_of_above() {
            note_overlay(base, &self.above);
        }
        Ok(Prepared { merge: self, marks, named })
    }

    /// Has marks of lower layers that name those which get other places lead to where their data
    /// goes.
    fn lead_marks(&self) -> Result<NamedMarks> {
        let (into, goes_too) = match self.way {
            Way::Down { active: None, .. } => (self.base_of_commit(), None),
            Way::Down { active: Some(_), .. } => (self.base_of_commit(), Some(&self.above)),
            Way::Up | Way::Dropped(_) => (&*self.above, Some(&self.above)),
        };
        let layers: Vec<_> = self.leaving.iter().chain(goes_too).cloned().collect();
        NamedMarks::lead_to(into, &layers, &self.lower)
    }

    fn put_marks(&self) -> Result<MergeMarks> {
        match &self.way {
            Way::Up => Ok(MergeMarks::default()),
            Way::Down { active, .. } => {
                let until = self.until(*active)?;
                MergeMarks::put(self.base_of_commit(), &self.leaving, until)
            }
            Way::Dropped(_) => MergeMarks::put_dropped(&self.above, self.dropped_state()),
        }
    }

    /// Until when the base of a commit has only a part of what goes into it.
    fn until(&self, active: Option<ActiveAfter>) -> Result<Until> {
        let above = FileMark::at(&self.above)?;
        Ok(match active {
            // One that is empty right above shows what the base does, also if it was to stay.
            Some(ActiveAfter::Kept | ActiveAfter::Emptied) => Until::Empty(above),
            None => Until::Beneath(above),
        })
    }

    /// The layers that nobody else may need, from the lowest, and how images that are gone count.
    fn needed(&self) -> Option<(Vec<PathBuf>, GoneImages)> {
        let leaving = &self.leaving[..];
        match &self.way {
            Way::Up => None,
            Way::Down { gone, .. } => {
                Some(([&[self.base_of_commit().to_owned()], leaving].concat(), *gone))
            }
            Way::Dropped(dropping) => Some((leaving.to_vec(), dropping.gone)),
        }
    }

    /// What the layer above stands on afterwards, unless that is as it was.
    fn base_of_above(&self) -> Option<&Path> {
        match self.way {
            Way::Down { active: Some(ActiveAfter::Kept), .. } => None,
            _ => self.base.as_deref(),
        }
    }

    fn base_of_commit(&self) -> &Path {
        self.base.as_deref().expect("a commit has a base")
    }

    fn dropped_state(&self) -> &Path {
        self.leaving.first().expect("a state is in a layer")
    }

    /// Step 4.
    async fn run(
        &self,
        chain: &dyn ManageChain,
        marks: &MergeMarks,
        control: &dyn MergeControl,
    ) -> Result<Merged> {
        match self.layers() {
            MergeLayers::Commit(layers) => chain.commit(layers, &marks.watch(control)).await,
            MergeLayers::Raise(layers) => chain.raise(layers, control).await,
            MergeLayers::Stream(base) => chain.stream(base, control).await,
        }
    }

    /// What the chain is asked for.
    fn layers(&self) -> MergeLayers<'_> {
        let base = self.base.as_deref();
        match &self.way {
            Way::Down { active, .. } => {
                let top = if active.is_some() { None } else { self.leaving.last() };
                let top = top.map(PathBuf::as_path);
                let active = active.unwrap_or_default();
                MergeLayers::Commit(CommitLayers { top, base, active })
            }
            Way::Dropped(dropping) if dropping.above == Above::Frozen => {
                MergeLayers::Raise(RaiseLayers { into: &self.above, base })
            }
            Way::Up | Way::Dropped(_) => MergeLayers::Stream(base),
        }
    }

    /// Step 6, of a merge after which the chain has these `layers`, and no longer those that it
    /// `dropped`.
    fn settle(&self, layers: &[PathBuf], dropped: &[PathBuf]) -> Settled {
        let left = |layer: &PathBuf| position_of(&self.leaving, layer).is_some();
        debug_assert!(dropped.iter().all(left), "only layers leave that were to");
        let files = match self.way {
            Way::Dropped(_) => GoneFiles::Go,
            Way::Up | Way::Down { .. } => GoneFiles::Stay,
        };
        let marks = settle_marks(layers, dropped, files);
        let base = match self.way {
            Way::Down { .. } => self.base.as_deref(),
            Way::Up | Way::Dropped(_) => None,
        };
        settle_notes(layers, dropped, base);
        let Way::Dropped(dropping) = &self.way else {
            return Settled { marks, drops: forget_drops(dropped), file: None };
        };
        let path = self.dropped_state();
        let Dropping { options, gone, .. } = &**dropping;
        let went = Went { into: &self.above, layers };
        // If a mark may lead to the file it stays, with what says that it was dropped: the next
        // drop or keep tries it again. Another program may have made an image on it meanwhile.
        let removed =
            marks.clone().and_then(|()| dropped::remove_dropped_file(path, went, options, *gone));
        let drops = match (&marks, &removed) {
            (Ok(()), Err(_)) => forget_drops(dropped),
            _ => Ok(()),
        };
        let file = Some(StateFile { path: path.to_owned(), removed });
        Settled { marks, drops, file }
    }
}

fn chain_of(disk: &dyn Manage) -> Result<&dyn ManageChain> {
    disk.chain().ok_or_else(|| Error::new(ErrorKind::Denied, "the disk is closed"))
}

/// A merge that may begin. If it is dropped instead, its marks are taken back.
#[must_use = "the layers are marked until this is run or dropped"]
pub struct Prepared {
    merge: Merge,
    marks: MergeMarks,
    named: NamedMarks,
}

impl Prepared {
    /// As [`Merge::kind`].
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.merge.kind()
    }

    /// Whether the chain of `disk` would refuse it for what is known now. Nothing changes.
    ///
    /// # Errors
    /// `Denied` if the disk is closed; as [`ManageChain::check_merge`].
    pub async fn check(&self, disk: &dyn Manage) -> Result<()> {
        chain_of(disk)?.check_merge(self.merge.layers()).await
    }

    /// The lowest of the frozen layers that it changes, or whose files it removes, if there is one.
    #[must_use]
    pub fn lowest_changed(&self) -> Option<PathBuf> {
        self.merge.lowest_changed()
    }

    /// Steps 4 to 6, on the chain of `disk`. `control` is asked between the chain's steps.
    ///
    /// # Errors
    /// `Denied` if the disk is closed; those of the merge, as [`ManageChain`] says. The chain has
    /// the layers that it had then.
    pub async fn run(self, disk: &dyn Manage, control: &dyn MergeControl) -> Result<Ended> {
        let Self { merge, marks, named } = self;
        let chain = chain_of(disk)?;
        let merged = merge.run(chain, &marks, control).await;
        marks.end(merged.as_ref().ok());
        let merged = merged?;
        if let Merged::Done { .. } = &merged {
            named.keep();
        }
        let settled = match &merged {
            Merged::Done { dropped, .. } => merge.settle(&disk.layer_paths(), dropped),
            Merged::Cancelled => Settled { marks: Ok(()), drops: Ok(()), file: None },
        };
        Ok(Ended { merged, settled })
    }
}

/// A merge that has ended, and did not fail.
#[derive(Debug)]
pub struct Ended {
    /// How the chain ended it.
    pub merged: Merged,
    /// What became of what lies beside the layers.
    pub settled: Settled,
}

/// What became of what lies beside the layers of a merge that is done, and durable.
#[derive(Debug)]
pub struct Settled {
    /// Whether the marks of frozen layers lead past those that left. If not, the next process that
    /// opens the chain for writing tries it.
    pub marks: Result<()>,
    /// Whether no layer that left, and whose file stays, is said to be dropped. If not, the next
    /// drop may remove it.
    pub drops: Result<()>,
    /// The file of a state that was dropped.
    pub file: Option<StateFile>,
}

/// The file of a state that was dropped.
#[derive(Debug)]
pub struct StateFile {
    /// Where it is, or was.
    pub path: PathBuf,
    /// Whether it was removed, or why it is there still.
    pub removed: Result<()>,
}

#[cfg(test)]
mod tests;
