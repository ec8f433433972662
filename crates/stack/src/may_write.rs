//! Leave to write an image. Without one nothing opens an image file for writing
//! ([`FileImages::to_write`](crate::FileImages::to_write)). The check for a mark gives it out; who
//! goes around that says by name what for: nobody writes a frozen layer unasked.
//!
//! | who | has it from |
//! |---|---|
//! | a verb that changes an image | [`MayWrite::check`]: a frozen layer is refused |
//! | a server | the layer in which the writing goes on (`above.rs`) |
//! | a repair or a change of keys, of which the disk shows nothing | [`MayWrite::to_repair`] |
//! | whoever makes a new file | [`MayWrite::new_file`] |
//! | whoever removes a file, so that nobody else opens it | [`MayWrite::to_remove`] |
//!
//! A merge writes a frozen layer through the chain that it belongs to, and that has leave to write
//! its active layer.
//!
//! Invariants
//! - I1 A layer that was frozen between the check and the opening is refused, too: a mark is put
//!   only by who has the image locked for writing, so it is looked for again under that lock. It
//!   is beside the name that the image has then: by any other one it would not have been opened.

use crate::mark::{Mark, cure_for};
use mica_block::{Error, ErrorKind, Result};
use std::path::Path;

/// Leave to write an image.
#[derive(Clone, Debug)]
pub struct MayWrite(Leave);

#[derive(Clone, Copy, Debug)]
enum Leave {
    /// An image without a mark.
    Unmarked,
    /// Whatever its mark says.
    Marked,
}

impl MayWrite {
    /// Leave for an image that was found to be the active layer.
    pub(crate) fn as_active() -> Self {
        Self(Leave::Unmarked)
    }

    /// Leave for a repair or a change of keys, which the user asks for, and which changes nothing
    /// that the disk shows.
    pub fn to_repair() -> Self {
        Self(Leave::Marked)
    }

    /// Leave for a file that the caller removes.
    pub(crate) fn to_remove() -> Self {
        Self(Leave::Marked)
    }

    /// Leave for a file that the caller creates: no layer is based on it.
    pub fn new_file() -> Self {
        Self(Leave::Unmarked)
    }

    /// Makes sure that it holds for the image at `path`, which is this `owner`'s file, and is open
    /// for writing now (I1).
    pub(crate) fn holds(&self, path: &Path, owner: u32) -> Result<()> {
        match self.0 {
            Leave::Marked => Ok(()),
            Leave::Unmarked => match Mark::of(path, owner)? {
                Some(mark) => Err(frozen(path, mark.above())),
                None => Ok(()),
            },
        }
    }
}

/// The error for one who would write the layer at `path`, whose disk is in `active`.
pub(crate) fn frozen(path: &Path, active: &Path) -> Error {
    let what = format!(
        "{} is frozen: a layer stands on it, and its disk is in {} now; {}",
        path.display(),
        active.display(),
        cure_for(path)
    );
    Error::new(ErrorKind::Denied, what)
}
