//! Marks of bases that name a layer which is about to get another place: it leaves, or takes over
//! what leaves. Then its place does not say any more that the commit into that base was done, and
//! the base is whole when that goes into it which has what the layer had.
//!
//! Invariants
//! - N1 Before a layer gets another place, every mark of a lower base that counts and names it
//!   waits for the layer that has its data then ([`Until::Empty`]), durably: no base counts as
//!   whole because a layer came to stand on it in another way than by its commit.
//! - N2 Nothing else of a mark changes, and no other mark does. Each is locked meanwhile.
//! - N3 Unless the layers have their new places ([`NamedMarks::keep`]), each mark says again what
//!   it said before. If this process dies, or that fails, it waits for a layer that is in the chain
//!   still: the base counts as whole later than it is, and never sooner.

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
            let into = FileMark::at(into)?;
            // One of a dead process that changed nothing goes.
            mark_of(layer)?;
            let _locked = planned::lock_old(&at)?;
            let before = mark_of(layer)?;
            if let Some(before) = before
                && let Some(next) = led_to(into, &before, names)
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

/// What a mark says that said `before`, if it names one of the layers `named`, and their data goes
/// to the layer `into` (N1, N2). None if it says that already, or is about something else.
fn led_to(into: FileMark, before: &Content, named: &[FileMark]) -> Option<Content> {
    let Content::Base { file, until: Until::Beneath(layer) | Until::Empty(layer) } = *before else {
        return None;
    };
    let next = Content::Base { file, until: Until::Empty(into) };
    (named.contains(&layer) && next != *before).then_some(next)
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
    assert!(matches!(content, Content::Base { .. }), "other marks stay as they are (N2)");
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

#[cfg(test)]
mod tests {
    use super::super::tests::{begin, mark_base, world_of};
    use super::*;

    fn said(layer: &Path) -> Option<Until> {
        match mark_of(layer).expect("it can be read") {
            Some(Content::Base { file, until }) => {
                assert_eq!(file, FileMark::at(layer).expect("it is there"), "N2");
                Some(until)
            }
            _ => None,
        }
    }

    /// Four layers, from the base: the lower two wait for the third, or for the fourth.
    fn marked() -> (tempfile::TempDir, [PathBuf; 4]) {
        let (folder, layers) = world_of(["base", "one", "two", "three"]);
        for (layer, until) in
            [(0, Until::Beneath(at(&layers[2]))), (1, Until::Empty(at(&layers[3])))]
        {
            let marks = mark_base(&layers[layer], until);
            begin(&marks);
            marks.forget_for_test();
        }
        (folder, layers)
    }

    fn at(layer: &Path) -> FileMark {
        FileMark::at(layer).expect("it is there")
    }

    #[test]
    fn mark_that_names_a_layer_waits_for_what_takes_over_its_data() {
        let (_folder, layers) = marked();
        let [base, one, two, three] = &layers;
        let led = NamedMarks::lead_to(three, std::slice::from_ref(two), &layers[..2]);
        led.expect("marked").keep();
        let then = Until::Empty(at(three));
        assert_eq!((said(base), said(one)), (Some(then), Some(then)), "N1, N2");
        // What says so already stays, and so does what names no layer that moves.
        let led = NamedMarks::lead_to(three, std::slice::from_ref(three), &layers[..2]);
        assert!(led.expect("marked").0.is_empty());
        let led = NamedMarks::lead_to(base, std::slice::from_ref(two), &layers[1..2]);
        assert!(led.expect("marked").0.is_empty());
    }

    #[test]
    fn marks_say_again_what_they_said_if_the_layers_stay_where_they_are() {
        let (_folder, layers) = marked();
        let [base, one, two, three] = &layers;
        let before = (said(base), said(one));
        let led = NamedMarks::lead_to(one, &layers[2..], &layers[..2]).expect("marked");
        assert_eq!(said(base), Some(Until::Empty(at(one))));
        drop(led);
        assert_eq!((said(base), said(one)), before, "N3");
        // Another process has the second one, and is about to change it.
        let held = planned::lock_old(&place(one, SUFFIX).expect("a name")).expect("locked");
        assert!(held.is_some(), "there is a mark");
        let refused = NamedMarks::lead_to(base, &[two.clone(), three.clone()], &layers[..2]);
        assert_eq!(refused.map(drop).expect_err("locked").kind(), mica_block::ErrorKind::Denied);
        assert_eq!((said(base), said(one)), before, "N3");
    }
}
