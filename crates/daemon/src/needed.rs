//! Whether a layer that is about to be changed is needed by others than the disk that it belongs
//! to. Locks keep other programs out, and disks of this process that have it open; this finds them
//! first, so that they can be named, and images that nobody has open.

use crate::served::Served;
use crate::shared::Shared;
use mica_block::{Error, ErrorKind, Result};
use mica_stack::{GoneImages, node_of};
use std::path::PathBuf;
use std::sync::Arc;

impl Shared {
    /// Makes sure that only `served` needs `layers`, from the lowest; the last of them is the one
    /// above those that change or go. Images that are `gone` count as the user says.
    ///
    /// # Errors
    /// `Denied`, with the names of disks and images that need one of them.
    pub(crate) fn check_nobody_needs(
        &self,
        served: &Arc<Served>,
        layers: &[PathBuf],
        gone: GoneImages,
    ) -> Result<()> {
        let Some((above, layers)) = layers.split_last() else { return Ok(()) };
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
        mica_stack::check_no_overlays(layers, above, gone)
    }
}
