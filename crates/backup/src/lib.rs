//! Backups: states of disks, whole or as what changed since an older state, in a folder or as a
//! stream. Internal crate.
//!
//! ```text
//! Source ─▶ copy ─▶ StepWriter ─▶ a stream, or the data file of a state in a folder
//! StepReader, or the entries of a manifest ─▶ each piece verified ─▶ restore ─▶ Disk
//! ```
//!
//! | to know | see |
//! |---|---|
//! | the bytes | `format`, docs/formats/backup.md |
//! | what is copied, and what of it is left out | `copy` |
//! | when there is a state in a folder, and what a kill leaves | `folder` |
//! | of which bytes a state is, without reading them | `content` |
//! | whether a disk has a state that is in a folder | `compare` |
//! | how a state is put together again | `restore` |
//!
//! Nothing here knows formats of images, or NBD: a [`Source`] says what there is to copy.

mod compare;
mod content;
mod copy;
mod folder;
mod format;
mod merge;
mod names;
mod packing;
#[cfg(test)]
mod page;
mod reader;
mod restore;
#[cfg(test)]
mod testing;
mod verify;
mod writer;

pub use compare::has_state;
pub use content::Content;
pub use copy::{Run, Source, copy};
pub use folder::{Begun, Folder, Pending, Pruned, States, Stored};
pub use format::{Begin, Entry, Total};
pub use names::{STATE_BYTES_MAX, check_state, disk_name};
pub use packing::Packing;
pub use reader::StepReader;
pub use restore::{restore_state, restore_step};
pub use verify::{Damage, verify_state};
pub use writer::StepWriter;

/// Decodes what an enemy may have written, as a stream and as a manifest. For fuzzing.
pub fn decode_anything(input: &[u8]) {
    let mut stream = StepReader::new(input);
    while let Ok(Some(begin)) = stream.begin() {
        assert!(begin.len <= format::LEN_MAX, "what is decoded is bounded");
        while let Ok(Some(_)) = stream.next() {}
        if !stream.is_at_end() {
            break;
        }
    }
    if let Ok(manifest) = format::Manifest::decode(input) {
        let again = manifest.encode();
        assert_eq!(again, input, "a manifest has one form");
    }
}
