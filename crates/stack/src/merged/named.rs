//! Marks of bases that name a layer which is about to get another place: it leaves, or takes over
//! what leaves. Then its place does not say any more that the commit into that base was done, and
//! the base is whole when that goes into it which has what the layer had.

use super::{Content, FileMark, NEW_MERGED, SUFFIX, Until, mark_of, planned};
use crate::files::sync_folder_of;
use crate::mark::place;
use crate::temporary::Locked;
use mica_block::{Error, Result};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Marks that say something else than before. Dropping this takes that back.
#[must_use = "the marks are as before when this is dropped"]
#[derive(Default, Debug)]
pub(crate) struct NamedMarks(Vec<(PathBuf, Content)>);

impl NamedMarks {
    /// Has those of `lower` layers that name one of `layers` say that they are whole when the one
    /// at `into` has gone down. Durable when this returns.
    ///
    /// # Errors
    /// What the system reports. All are as before then.
    pub(crate) fn lead_to(into: &Path, layers: &[PathBuf], lower: &[PathBuf]) -> Result<Self> {
        let mut marks = Self::default();
        let mut names = None;
        for layer in lower {
            let Ok(at) = place(layer, SUFFIX) else { continue };
            if at.symlink_metadata().is_err() {
                continue;
            }
            let names = match &mut names {
                Some(names) => names,
                none => {
                    let all = layers.iter().map(|layer| FileMark::at(layer));
                    none.insert(all.collect::<Result<Vec<_>>>()?)
                }
            };
            let until = Until::Empty(FileMark::at(into)?);
            // One of a dead process that changed nothing goes.
            mark_of(layer)?;
            let _locked = planned::lock_old(&at)?;
            let before = mark_of(layer)?;
            let Some(Content::Base { file, until: Until::Beneath(named) | Until::Empty(named) }) =
                before
            else {
                continue;
            };
            let next = Content::Base { file, until };
            if names.contains(&named)
                && let Some(before) = before.filter(|before| *before != next)
            {
                put(&at, &next)?;
                marks.0.push((at, before));
            }
        }
        Ok(marks)
    }

    /// The layers have their new places.
    pub(crate) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for NamedMarks {
    fn drop(&mut self) {
        for (at, before) in self.0.drain(..) {
            put_back(&at, &before);
        }
    }
}

/// Has the mark `at` say again what it said `before`.
pub(super) fn put_back(at: &Path, before: &Content) {
    if let Err(error) = put(at, before) {
        // It says that less was done than was.
        tracing::warn!("the mark {}: {}", at.display(), error.in_one_line());
    }
}

/// Has the mark `at` say this, durably.
fn put(at: &Path, content: &Content) -> Result<()> {
    let failed = |error| Error::from_io(format!("writing {}", at.display()), error);
    let new = Locked::write(&aside_of(at), &content.encode()).map_err(failed)?;
    new.rename_to(at)?;
    sync_folder_of(at)
}

/// Where what is to be the mark `at` is written.
fn aside_of(at: &Path) -> PathBuf {
    let bytes = at.as_os_str().as_bytes();
    let layer = bytes.strip_suffix(SUFFIX.as_bytes()).unwrap_or(bytes);
    OsString::from_vec([layer, NEW_MERGED.as_bytes()].concat()).into()
}
