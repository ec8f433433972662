//! Removes states from a folder, also such as others go on from.
//!
//! ```text
//! of each state that stays and goes on from one that does not:
//!   its step and those of the ones that go, made one ─▶ its manifest names that ─▶ the old data
//!   goes
//! of each state that goes, from the newest: its manifest is renamed ─▶ its data goes ─▶ that goes
//! ```
//!
//! Invariants
//! - P1 A state that stays is there at every instant, and goes on from states that are there: the
//!   manifest that names another base is durable before anything is removed.
//! - P2 A state that goes is there wholly, or it is not there. The newest of all stays: the next
//!   backup may go on from it.
//! - P3 What a kill leaves is no state, takes only space, and goes with the next call. What is left
//!   of a state that was being written may be gone on with, and stays until a later one is there.

use super::{DATA, Folder, GONE, NEW, Pending, Stored, data_path, failed, parse_key, sync_folder};
use crate::content::Content;
use crate::format::{BEGIN_BYTES, Begin, HEAD_BYTES, Manifest};
use crate::merge::merge_steps;
use crate::names::check_state;
use mica_block::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

/// What was removed.
#[derive(Clone, Default, Debug)]
pub struct Pruned {
    /// The states that are not there any more, from the oldest.
    pub removed: Vec<Stored>,
    /// Those that go on from another state now.
    pub merged: Vec<Stored>,
}

impl Folder {
    /// What [`Self::prune`] would do with the states called `unwanted`, without doing it; `merged`
    /// has the states as they are.
    ///
    /// # Errors
    /// `Corrupt` if a manifest is damaged: what its state goes on from is not known; `NotFound` if
    /// one of the states is not there, or what one that stays goes on from; `Invalid` if the newest
    /// is among them; why the folder cannot be read.
    pub fn prunable(&self, unwanted: &BTreeSet<String>) -> Result<Pruned> {
        let states = self.states()?;
        if let Some(damaged) = states.damaged.into_iter().next() {
            let what = "a state may be based on one that is to be removed: remove the damaged \
                        manifest, which is of no use";
            return Err(damaged.wrap(what));
        }
        for state in unwanted {
            self.find(state)?;
        }
        if let Some(newest) = states.whole.last().filter(|last| is_of(unwanted, last)) {
            let what = format!(
                "the state {:?} is the newest, on which the next backup will be based: it stays",
                newest.begin().state
            );
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let (removed, stay): (Vec<_>, Vec<_>) =
            states.whole.into_iter().partition(|stored| is_of(unwanted, stored));
        let goes_on_from_one = |stored: &Stored| {
            stored.begin().base.as_ref().is_some_and(|base| unwanted.contains(base))
        };
        let merged: Vec<_> = stay.into_iter().filter(goes_on_from_one).collect();
        for stored in &merged {
            self.line(&stored.begin().state)?;
        }
        Ok(Pruned { removed, merged })
    }

    /// Removes the states called `unwanted`. Those that stay and go on from one of them go on from
    /// the next that stays, or become whole. `at` is called with the state that is rewritten or
    /// removed, and with how far on the disk that is.
    ///
    /// # Errors
    /// `Denied` if a backup into the folder is under way; as [`Self::prunable`]; `Corrupt` if what
    /// is needed of a state is damaged; what the system reports. The states that stay are there,
    /// and those that were not removed yet.
    pub fn prune(
        &self,
        unwanted: &BTreeSet<String>,
        mut at: impl FnMut(&Begin, u64),
    ) -> Result<Pruned> {
        let lock = self.lock()?;
        let Pruned { removed, merged } = self.prunable(unwanted)?;
        self.clear_away()?;
        let mut rewritten = Vec::new();
        for stored in merged {
            rewritten.push(self.rewrite(&stored, unwanted, &lock, &mut at)?);
        }
        // Whatever goes on from one is gone before it.
        for stored in removed.iter().rev() {
            self.remove(stored, &mut at)?;
        }
        Ok(Pruned { removed, merged: rewritten })
    }

    /// Gives `stored` a step that goes on from none of the `unwanted`.
    fn rewrite(
        &self,
        stored: &Stored,
        unwanted: &BTreeSet<String>,
        lock: &File,
        at: &mut impl FnMut(&Begin, u64),
    ) -> Result<Stored> {
        let state = &stored.begin().state;
        let mut line = self.line(state)?;
        // The last of the line stays; those before it that go are merged with it.
        let stay = line[..line.len() - 1].iter().rposition(|below| !is_of(unwanted, below));
        line.drain(..stay.map_or(0, |stay| stay + 1));
        let base = line.first().and_then(|first| first.begin().base.clone());
        let begin = Begin { base, ..stored.begin().clone() };
        let keys: Vec<u8> = line.iter().flat_map(|step| step.head.key.to_le_bytes()).collect();
        let key = Content::lasting([b"merged", &*keys].concat()).key(&begin);
        let path = data_path(&self.path, state, key);
        // What an earlier try left may be of a disk that was cut off.
        File::create(&path).map_err(|error| failed("creating", &path, error))?;
        let (mut writer, _) = self.open_step(begin.clone(), key)?;
        merge_steps(&line, &mut writer, |position| at(&begin, position))?;
        let lock = lock.try_clone().map_err(|error| failed("locking", &self.path, error))?;
        let Manifest { number, content, .. } = stored.head;
        let folder = self.clone();
        let resumed_bytes = 0;
        let pending = Pending { folder, key, content, number, writer, resumed_bytes, _lock: lock };
        let complete = pending.complete()?;
        at(&begin, begin.len);
        self.remove_leftovers(state, key, true)?;
        Ok(complete)
    }

    fn remove(&self, stored: &Stored, at: &mut impl FnMut(&Begin, u64)) -> Result<()> {
        let state = &stored.begin().state;
        let (named, gone) = (self.manifest_path(state), format!("{state}{GONE}"));
        let renamed = fs::rename(&named, self.path.join(&gone));
        renamed.map_err(|error| failed("renaming", &named, error))?;
        sync_folder(&self.path)?;
        at(stored.begin(), stored.len());
        self.remove_data_of(state, &gone)
    }

    /// Removes what is left of states that are gone, and steps that were replaced.
    fn clear_away(&self) -> Result<()> {
        for name in self.names()? {
            if let Some(state) = state_before(GONE, &name) {
                self.remove_data_of(state, &name)?;
            }
        }
        let whole = self.states()?.whole;
        for stored in &whole {
            self.remove_leftovers(&stored.begin().state, stored.head.key, true)?;
        }
        self.remove_cut_off(whole.last())
    }

    /// Removes manifests that were being written, and the steps that were cut off before the
    /// `newest` state was begun: a state that is called after the time is not begun again.
    fn remove_cut_off(&self, newest: Option<&Stored>) -> Result<()> {
        let changed = |path: &Path| path.symlink_metadata().and_then(|found| found.modified());
        // It may have been made another step later, and has another manifest then.
        let begun = newest.map(|newest| UNIX_EPOCH + Duration::from_nanos(newest.begin().time_ns));
        for name in self.names()? {
            let path = self.path.join(&name);
            let is_left = match state_of_data(&name) {
                Some(state) => {
                    !self.has_manifest(state)?
                        && begun.is_some_and(|then| changed(&path).is_ok_and(|its| its < then))
                }
                None => state_before(NEW, &name).is_some(),
            };
            if is_left {
                fs::remove_file(&path).map_err(|error| failed("removing", &path, error))?;
            }
        }
        Ok(())
    }

    /// Removes the data of the state whose manifest is now called `gone`, and that, too.
    fn remove_data_of(&self, state: &str, gone: &str) -> Result<()> {
        let path = self.path.join(gone);
        let mut bytes = Vec::new();
        File::open(&path)
            .and_then(|file| file.take((HEAD_BYTES + BEGIN_BYTES) as u64).read_to_end(&mut bytes))
            .map_err(|error| failed("reading", &path, error))?;
        // Another state of this name may be there by now, or be on its way.
        if let Ok((head, _)) = Manifest::decode_head(&bytes)
            && !self.stored(state).is_ok_and(|there| there.head.key == head.key)
        {
            let data = data_path(&self.path, state, head.key);
            match fs::remove_file(&data) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(failed("removing", &data, error));
                }
                // Nothing would say that it is to go if it came back.
                _ => sync_folder(&self.path)?,
            }
        }
        fs::remove_file(&path).map_err(|error| failed("removing", &path, error))
    }
}

/// The state in the name of a data file.
fn state_of_data(name: &str) -> Option<&str> {
    let (state, key) = name.strip_suffix(DATA)?.rsplit_once('.')?;
    parse_key(key).filter(|_| check_state(state).is_ok()).map(|_| state)
}

/// The state in the `name` of a file with this `ending`.
fn state_before<'a>(ending: &str, name: &'a str) -> Option<&'a str> {
    name.strip_suffix(ending).filter(|state| check_state(state).is_ok())
}

fn is_of(names: &BTreeSet<String>, stored: &Stored) -> bool {
    names.contains(&stored.begin().state)
}

#[cfg(test)]
mod tests;
