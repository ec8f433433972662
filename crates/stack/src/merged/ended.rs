//! Marks of bases that are whole: their commit was done, and its process died before it took the
//! mark away. Whoever opens the chain for writing next does; and removes marks that never got their
//! names, as far as nobody has them locked.
//!
//! Invariants
//! - I1 The mark goes only if nobody has it locked, and the chain itself proves that the commit was
//!   done: the very layer that was to stand on the base does ([`Until::Beneath`]), as its header
//!   names the base only then (a merge by which it gets there in another way changes the mark
//!   before, [`super::named`]); or the very layer that was to become empty is ([`Until::Empty`]),
//!   so that the base shows what the disk shows.
//! - I2 The caller has the chain open for writing, and nobody has written to it since.

use super::{Content, FileMark, PLANNED, SUFFIX, Until, planned};
use crate::above::has_data;
use crate::mark::open_trusted;
use crate::temporary::{NEW_MERGED, is_at, remove_mark_if_abandoned};
use crate::{FileImages, ImageOptions};
use mica_block::{Error, Result};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Layers, from the uppermost, that are looked at: a chain has thousands.
const LAYERS_MAX: usize = 64;

/// A base that has only a part of what goes into it, as far as anybody knows.
#[derive(Debug)]
pub(crate) struct Unended {
    /// The layer.
    pub(crate) base: PathBuf,
    /// What says so.
    pub(crate) mark: PathBuf,
}

/// Takes the marks of bases among these `layers` away that are whole (I1, I2), and returns those
/// that may not be. The images are opened with `options`.
pub(crate) async fn settle_bases(layers: &[PathBuf], options: &ImageOptions) -> Vec<Unended> {
    let mut unended = Vec::new();
    let first = layers.len().saturating_sub(LAYERS_MAX);
    for at in first..layers.len().saturating_sub(1) {
        let (base, above) = (&layers[at], &layers[at + 1]);
        let Ok(real) = base.canonicalize() else { continue };
        remove_unnamed_mark(&real);
        let mark = beside(&real, SUFFIX);
        if mark.symlink_metadata().is_err() {
            continue;
        }
        let is_active = at + 2 == layers.len();
        match settle_base((base, &mark), (above, is_active), options).await {
            Ok(Left::Nothing) => {}
            Ok(Left::Mark) => unended.push(Unended { base: base.clone(), mark }),
            Err(error) => {
                tracing::warn!("the mark {}: {}", mark.display(), error.in_one_line());
            }
        }
    }
    unended
}

/// Removes the mark of a commit that was killed before that had its name.
fn remove_unnamed_mark(layer: &Path) {
    if let Some(removed) = remove_mark_if_abandoned(beside(layer, NEW_MERGED)) {
        tracing::info!("removed {}, which a killed commit had left", removed.display());
    }
}

fn beside(layer: &Path, ending: &str) -> PathBuf {
    let mut name = layer.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// What is left of a commit that is not under way.
enum Left {
    Nothing,
    Mark,
}

async fn settle_base(
    (base, mark): (&Path, &Path),
    (above, is_active): (&Path, bool),
    options: &ImageOptions,
) -> Result<Left> {
    let found = |path: &Path| {
        let failed = |error| Error::from_io(path.display().to_string(), error);
        std::fs::metadata(path).map_err(failed)
    };
    let base_file = found(base)?;
    let Some(file) = open_trusted(mark, base_file.uid())? else { return Ok(Left::Nothing) };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        // It is under way, or somebody looks at it, too.
        Err(Errno::WOULDBLOCK) => return Ok(Left::Nothing),
        Err(_) => return Ok(Left::Mark),
    }
    let Some(until) = until_in(&file, &base_file) else { return Ok(Left::Nothing) };
    let is_it = |marked: FileMark| Ok::<_, Error>(marked == FileMark::of(&found(above)?));
    let is_whole = match until {
        Until::Unsaid => false,
        Until::Beneath(marked) => is_it(marked)?,
        Until::Empty(marked) => {
            is_active
                && is_it(marked)?
                && !has_data(&FileImages::new(above, options.clone())?, above).await?
        }
    };
    if !is_whole {
        return Ok(Left::Mark);
    }
    if is_at(mark, &file) {
        let failed = |error| Error::from_io("it cannot be removed", error);
        std::fs::remove_file(mark).map_err(failed)?;
        tracing::info!(
            "{} is taken away: its commit was done, and was killed before it could do that",
            mark.display()
        );
    }
    Ok(Left::Nothing)
}

/// Until when the base `found` has only a part, by the mark in `file`; `None` if that says nothing
/// of the kind which counts.
fn until_in(file: &File, found: &Metadata) -> Option<Until> {
    let bytes = planned::content_of(file).ok()?;
    if bytes.ends_with(PLANNED) {
        return None;
    }
    match Content::decode(&bytes)? {
        content @ Content::Base { until, .. } => content.is_for(found).then_some(until),
        Content::Source { .. } => None,
    }
}
