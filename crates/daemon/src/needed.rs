//! Whether a layer that is about to be changed is needed by others than the disk that it belongs
//! to. Locks keep other programs out, and disks of this process that have it open; this finds them
//! first, so that they can be named. Images that nobody has open the merge looks for itself. And
//! whether one that is to become a layer is one already.

use crate::served::Served;
use crate::shared::Shared;
use mica_block::{Error, ErrorKind, Result};
use mica_stack::forest::chain_of;
use mica_stack::node_of;
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Shared {
    /// Makes sure that no other disk than `served` needs one of these `layers`, which change or go.
    ///
    /// # Errors
    /// `Denied`, with the name of a disk that does.
    pub(crate) fn check_no_disk_needs(
        &self,
        served: &Arc<Served>,
        layers: &[PathBuf],
    ) -> Result<()> {
        let nodes: Vec<_> = layers.iter().filter_map(|layer| node_of(layer)).collect();
        let others = self.disks.all().into_iter().filter(|other| !Arc::ptr_eq(other, served));
        for other in others {
            let used = other.layer_paths().into_iter();
            let mut shared =
                used.filter(|layer| node_of(layer).is_some_and(|node| nodes.contains(&node)));
            if let Some(layer) = shared.next_back() {
                let what = format!(
                    "the disk {:?} needs {}, which would change or leave the chain",
                    other.name,
                    layer.display()
                );
                return Err(Error::new(ErrorKind::Denied, what));
            }
        }
        Ok(())
    }

    /// The refusal of a change of these `layers` of `served`, with the closed disks of this process
    /// that need them: the refusal itself names only their images.
    pub(crate) fn with_closed_disks(
        &self,
        refused: Error,
        served: &Arc<Served>,
        layers: &[PathBuf],
    ) -> Error {
        let nodes: Vec<_> = layers.iter().filter_map(|layer| node_of(layer)).collect();
        // Storage of a closed disk may hang, so it is looked at only if it can have to do with it.
        if refused.kind() != ErrorKind::Denied || nodes.is_empty() {
            return refused;
        }
        let needs = |other: &Served| {
            let chain = other.closed_image().and_then(|image| chain_of(&image).ok());
            let mut used = chain.into_iter().flatten().filter_map(|layer| node_of(&layer));
            used.any(|node| nodes.contains(&node))
        };
        let others = self.disks.all().into_iter().filter(|other| !Arc::ptr_eq(other, served));
        let names: Vec<_> =
            others.filter(|other| needs(other)).map(|other| format!("{:?}", other.name)).collect();
        let names = names.join(", ");
        match names.is_empty() {
            true => refused,
            false => {
                refused.wrap(format!("needed by disks of this server that are closed ({names})"))
            }
        }
    }

    /// Makes sure that what is to be taken as a new layer is none of a disk yet: locks would say no
    /// more than that somebody has it open.
    ///
    /// # Errors
    /// `Invalid`, with the name of a disk that has one of these `files`.
    pub(crate) fn check_are_no_layers<'a>(
        &self,
        files: impl Iterator<Item = &'a Path>,
    ) -> Result<()> {
        let files: Vec<_> = files.filter_map(|file| Some((file, node_of(file)?))).collect();
        if files.is_empty() {
            return Ok(());
        }
        for served in self.disks.all() {
            let layers = served.layer_paths();
            for (at, layer) in layers.iter().enumerate() {
                let node = node_of(layer);
                let Some((file, _)) = files.iter().find(|(_, of)| Some(*of) == node) else {
                    continue;
                };
                let which = if at + 1 == layers.len() { "the active layer" } else { "a layer" };
                let what = format!(
                    "{} is {which} of the disk {:?} of this server already: name another file",
                    file.display(),
                    served.name
                );
                return Err(Error::new(ErrorKind::Invalid, what));
            }
        }
        Ok(())
    }
}
