//! Merges of a disk's layers while it is served.

use super::backup::state_names;
use super::{Served, State};
use crate::jobs::{Job, JobDisk, JobReport, PAST_MAX};
use crate::opened::is_raw;
use mica_block::{ActiveAfter, Error, ErrorKind, Manage, Result};
use mica_rt::{Backend, Executor};
use mica_stack::merge::{Merge, Prepared};
use mica_stack::{FileImages, GoneImages, position_of};
use parking_lot::MutexGuard;
use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What becomes of states that are kept in layers that leave a chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StatesInTheWay {
    /// Their layers stay: the merge is refused.
    Stay,
    /// They leave, too, and only their files stay.
    Leave,
}

/// The layers of a commit, as the user calls them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayersCalled<'a> {
    /// By default the active one.
    pub(crate) top: Option<&'a Path>,
    /// By default the one beneath the top.
    pub(crate) base: Option<&'a Path>,
}

impl Served {
    /// The paths of its layers, from the base; none while it is closed.
    pub(crate) fn layer_paths(&self) -> Vec<PathBuf> {
        let disk = self.opened().disk();
        disk.map(|disk| disk.layer_paths()).unwrap_or_default()
    }

    /// Its image, if it is a file that is not open.
    pub(crate) fn closed_image(&self) -> Option<Arc<Path>> {
        (self.is_file() && self.opened().disk().is_err()).then(|| self.image())
    }

    /// The merge that is under way, or the last one.
    pub(crate) fn job(&self) -> Option<Arc<Job>> {
        self.lock_job().clone()
    }

    /// The merge that is under way.
    pub(crate) fn job_under_way(&self) -> Option<Arc<Job>> {
        self.job().filter(|job| !job.has_ended())
    }

    /// The reports of earlier merges, oldest first.
    pub(crate) fn past_jobs(&self) -> Vec<JobReport> {
        self.lock_past_jobs().iter().cloned().collect()
    }

    /// Begins to merge the layers above the one that is called `base` into the active layer; all of
    /// them if none is. If `states` are kept in them, that decides.
    ///
    /// # Errors
    /// `Denied` if the disk is not served, a merge is under way, or states are in the way;
    /// `Invalid` if there is no such layer; as [`Job::start`].
    pub(crate) fn start_stream(
        &self,
        base: Option<&Path>,
        states: StatesInTheWay,
        rate: u64,
    ) -> Result<Arc<Job>> {
        self.start_merge(rate, |layers| {
            let base = base.map(|name| layer_called(layers, name)).transpose()?;
            if states == StatesInTheWay::Stay {
                let leaving = base.map_or(0, |base| base + 1)..layers.len().saturating_sub(1);
                self.check_states_stay(layers.get(leaving).unwrap_or_default())?;
            }
            Merge::stream(layers, base).prepare(|_| Ok(()))
        })
    }

    /// Makes sure that no state is kept in these `layers`, which are about to leave the chain.
    fn check_states_stay(&self, layers: &[PathBuf]) -> Result<()> {
        if layers.is_empty() {
            return Ok(());
        }
        let kept = self.kept_states()?;
        let leaving: Vec<_> = kept.iter().filter(|kept| layers.contains(&kept.file)).collect();
        let Some(last) = leaving.last() else { return Ok(()) };
        let names = state_names(leaving.iter().copied());
        Err(self.denied(&format!(
            "would no longer have the states {names}, and the next backup since one of them would \
             be a full one: --base {} keeps them, --drop-states lets them go",
            last.file.display()
        )))
    }

    /// Begins to merge the layers above the base of `called` up to its top into that base. `check`
    /// is asked as by [`Merge::prepare`]; images on the layers that are `gone` count as the user
    /// says.
    ///
    /// # Errors
    /// As [`Self::start_stream`], and [`Merge::prepare`].
    pub(crate) fn start_commit(
        &self,
        called: LayersCalled<'_>,
        gone: GoneImages,
        rate: u64,
        check: impl FnOnce(&[PathBuf]) -> Result<()>,
    ) -> Result<Arc<Job>> {
        self.start_merge(rate, |layers| {
            let active = layers.len().saturating_sub(1);
            let top = called.top.map_or(Ok(active), |name| layer_called(layers, name))?;
            let base = called.base.map(|name| layer_called(layers, name)).transpose()?;
            let invalid = |what: &str| Error::new(ErrorKind::Invalid, what);
            let base = match base {
                Some(base) => base,
                None => top.checked_sub(1).ok_or_else(|| invalid("no layer is beneath the top"))?,
            };
            if base >= top {
                return Err(invalid("the base is not beneath the top"));
            }
            self.check_no_state_changes(layers, base..=top)?;
            Merge::commit(layers, base..=top, ActiveAfter::Emptied, gone).prepare(check)
        })
    }

    /// Begins to drop the kept `state`: its layer goes up into the one above, and its file is
    /// removed. `check` is asked as by [`Merge::prepare`]; images on the state that are `gone`
    /// count as the user says when its file is removed, too.
    ///
    /// # Errors
    /// `NotFound` if there is no such state; `Denied` if a backup is under way; as
    /// [`Self::start_stream`], and [`Merge::prepare`].
    pub(crate) fn start_drop(
        &self,
        state: &str,
        gone: GoneImages,
        rate: u64,
        check: impl FnOnce(&[PathBuf]) -> Result<()>,
    ) -> Result<Arc<Job>> {
        self.start_merge(rate, |layers| {
            self.check_no_backup()?;
            let freed = (gone == GoneImages::Removed).then_some(state);
            let left = self.remove_dropped(layers, freed);
            let kept = self.kept_states()?;
            let at = self.find(&kept, state).map_err(|error| error_but(error, &left))?.position;
            self.check_only_state(&layers[at])?;
            let options = self.images.image_options(Arc::clone(&self.resources.handles))?;
            Merge::drop_state(layers, at, options, gone).prepare(check)
        })
    }

    /// Removes files of states that were dropped from the chain with these `layers`, which a server
    /// that was killed left, and returns them. If that fails they are only in the way of states of
    /// the same name. Images that are gone and stood on the state `freed` were removed, as the user
    /// says.
    pub(super) fn remove_dropped(&self, layers: &[PathBuf], freed: Option<&str>) -> Vec<PathBuf> {
        // Without locks nobody knows who has a file open.
        if self.images.force_share {
            return Vec::new();
        }
        let disk = &self.name;
        let options = self.images.image_options(Arc::clone(&self.resources.handles));
        match options.and_then(|options| mica_stack::remove_dropped(layers, &options, freed)) {
            Ok(removed) => {
                for file in &removed {
                    let file = file.display();
                    tracing::info!(disk, %file, "removed what an interrupted drop had left");
                }
                removed
            }
            Err(error) => {
                tracing::warn!(
                    disk, %error,
                    "what an interrupted drop has left stays until `mica ctl backup drop` is \
                     repeated"
                );
                Vec::new()
            }
        }
    }

    /// Makes sure that nothing but a state goes with its `file`.
    fn check_only_state(&self, file: &Path) -> Result<()> {
        let options = self.images.image_options(Arc::clone(&self.resources.handles))?;
        let images = FileImages::new(&self.known_image(), options)?;
        let executor = Executor::new(Backend::Pool)
            .map_err(|error| Error::from_io("reading a header", error))?;
        executor.block_on(mica_stack::check_only_state(&images, file))
    }

    fn check_no_backup(&self) -> Result<()> {
        match self.backup() {
            None => Ok(()),
            Some(backup) => Err(self.denied(&format!(
                "has the backup {:?} under way, which reads its layers: end that first",
                backup.state
            ))),
        }
    }

    /// Makes sure that no state is kept in the layers that a commit is about to `merge`, and none
    /// exported that has one of them: both rely on layers that it changes.
    fn check_no_state_changes(
        &self,
        layers: &[PathBuf],
        merge: RangeInclusive<usize>,
    ) -> Result<()> {
        let exported = self.backup().and_then(|backup| position_of(layers, &backup.file));
        if exported.is_none_or(|exported| exported >= *merge.start()) {
            self.check_no_backup()?;
        }
        let layers = &layers[merge];
        let kept = self.kept_states()?;
        match kept.iter().find(|kept| layers.contains(&kept.file)) {
            Some(kept) => Err(self.denied(&format!(
                "keeps its state {:?} in {}, which the merge would change: name other layers, or \
                 stream, which leaves the state's file as it is",
                kept.state,
                kept.file.display()
            ))),
            None => Ok(()),
        }
    }

    /// No layer is put on top of what is merged: what leaves, and what is on top of that, was found
    /// out when the merge was asked for.
    ///
    /// # Errors
    /// `Denied` while layers are merged.
    pub(super) fn check_takes_layers(&self) -> Result<()> {
        match self.job_under_way() {
            Some(job) => {
                Err(self.refused_by(&job, "and the new layer would be on top of what is merged"))
            }
            None => Ok(()),
        }
    }

    /// What is refused because of `job`, and why.
    pub(super) fn refused_by(&self, job: &Job, why: &str) -> Error {
        self.denied(&format!(
            "has {} under way, {why}: wait for its end (`mica ctl jobs`), or cancel it (`mica ctl \
             cancel {}`)",
            job.name(),
            self.name
        ))
    }

    fn start_merge(
        &self,
        rate: u64,
        prepare: impl FnOnce(&[PathBuf]) -> Result<Prepared>,
    ) -> Result<Arc<Job>> {
        let _changes = self.lock_changes();
        if !matches!(&*self.lock(), State::Serving(_)) {
            return Err(self.denied("is not served"));
        }
        if self.job_under_way().is_some() {
            return Err(self.denied("is being merged already: `mica ctl jobs` shows how far"));
        }
        let disk: Arc<dyn Manage> = self.opened().disk()?;
        if is_raw(&*disk) {
            return Err(self.denied("is a raw image, on top of which there are no layers"));
        }
        if disk.chain().is_none() {
            let what = format!("the disk {:?} is not a writable image chain", self.name);
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let merge = prepare(&disk.layer_paths())?;
        check(&merge, &*disk)?;
        let of = JobDisk { name: self.name.clone(), named: self.first_image.clone(), disk };
        // Nobody finds that there is none when it has begun.
        let mut job = self.lock_job();
        let started = Job::start(of, merge, rate)?;
        if let Some(last) = job.replace(Arc::clone(&started)) {
            let mut past = self.lock_past_jobs();
            past.push_back(last.report());
            let spare = past.len().saturating_sub(PAST_MAX);
            past.drain(..spare);
        }
        Ok(started)
    }

    /// The merge that is under way.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub(crate) fn present_job(&self) -> Result<Arc<Job>> {
        self.job_under_way().ok_or_else(|| {
            let what = format!("no layers of the disk {:?} are being merged", self.name);
            Error::new(ErrorKind::NotFound, what)
        })
    }

    /// Stops the merge, if one is running.
    pub(super) fn stop_job(&self) {
        if let Some(job) = self.job() {
            job.stop();
        }
    }

    fn lock_past_jobs(&self) -> MutexGuard<'_, VecDeque<JobReport>> {
        self.past_jobs.lock()
    }

    fn lock_job(&self) -> MutexGuard<'_, Option<Arc<Job>>> {
        self.job.lock()
    }
}

/// Refuses a `merge` that would fail as soon as it has begun: who does not wait for its end learns
/// of that now.
fn check(merge: &Prepared, disk: &dyn Manage) -> Result<()> {
    let context = |error| Error::from_io("starting a merge", error);
    Executor::new(Backend::Pool).map_err(context)?.block_on(merge.check(disk))
}

/// The `error` of one who repeats a drop that was cut short, and which files that had `left` are
/// removed now.
fn error_but(error: Error, left: &[PathBuf]) -> Error {
    let Some(file) = left.first() else { return error };
    let what =
        format!("an interrupted drop had left {}, which is now removed; {error}", file.display());
    Error::new(error.kind(), what)
}

/// The position of the layer that the user calls `name`: a path, or a name that only one has.
fn layer_called(layers: &[PathBuf], name: &Path) -> Result<usize> {
    if let Some(position) = position_of(layers, name) {
        return Ok(position);
    }
    let mut named =
        (0..layers.len()).filter(|at| layers[*at].file_name() == Some(name.as_os_str()));
    match (named.next(), named.next()) {
        (Some(position), None) => Ok(position),
        _ => {
            let what = format!("{} is not a layer of the chain", name.display());
            Err(Error::new(ErrorKind::Invalid, what))
        }
    }
}
