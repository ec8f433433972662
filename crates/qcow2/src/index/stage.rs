//! Sidecars that are built and wait to be written, several at once: the file system makes many
//! files durable in little more time than one.
//!
//! Invariants
//! - I1 Memory is bounded: a few sidecars, and no more of them than [`BYTES_MAX`] and the last one.
//! - I2 A tree that names a staged sidecar belongs to the build alone. It is published when all its
//!   sidecars are in their places.

use crate::index::scan::Stop;
use crate::index::sidecar::Header;
use crate::index::tables::SealedTables;
use crate::index::{Sidecar, Tree};
use crate::layer::Layer;
use crate::map::Map;
use mica_block::NewSidecar;
use std::sync::Arc;

/// Sidecars, and bytes of them, after which they are written.
const SIDECARS_MAX: usize = 64;
const BYTES_MAX: usize = 8 << 20;

/// The sidecars that wait.
#[derive(Default)]
pub(super) struct Stage {
    waiting: Vec<Staged>,
    bytes: usize,
}

struct Staged {
    layer: Arc<Layer>,
    header: Header,
    content: Arc<Vec<u8>>,
}

impl Stage {
    /// Adds a sidecar with this `content`, which begins with `header`, to the tree.
    pub(super) fn push(
        &mut self,
        tree: &mut Tree,
        layer: &Arc<Layer>,
        header: Header,
        content: Vec<u8>,
    ) {
        let content = Arc::new(content);
        tree.push(header.root, header.id, Some(Sidecar::Staged(Arc::clone(&content))));
        self.bytes += content.len();
        self.waiting.push(Staged { layer: Arc::clone(layer), header, content });
    }

    /// Whether it is time to write them.
    pub(super) fn is_full(&self) -> bool {
        self.waiting.len() >= SIDECARS_MAX || self.bytes >= BYTES_MAX
    }
}

impl Map {
    /// Writes what is staged. From then on the tree reads it from the files, as everyone else will;
    /// it ends below the first that is not there; if any could not be written, below all of them.
    pub(super) async fn write_staged(
        &self,
        stage: &mut Stage,
        tree: &mut Tree,
    ) -> std::result::Result<(), Stop> {
        let Stage { waiting, .. } = std::mem::take(stage);
        let new: Vec<_> = waiting
            .iter()
            .map(|one| NewSidecar { path: &one.layer.path, content: &one.content })
            .collect();
        if new.is_empty() {
            return Ok(());
        }
        let mut outcome = self.images.sidecars().write_all(&new).await.map_err(Stop::from);
        for Staged { layer, header, .. } in &waiting {
            if outcome.is_ok() {
                self.index.trust(header.layer);
                // Another process that serves the same layers may have put its own there meanwhile.
                match self.read_seal(layer).await.filter(|(found, _)| found.id == header.id) {
                    Some((_, store)) => {
                        tree.keep(header.layer.into(), store);
                        SealedTables::prove(layer, header.digest);
                        continue;
                    }
                    None => outcome = Err(Stop::Changed),
                }
            }
            tree.cut(header.layer.into(), self.index.next_generation());
            break;
        }
        outcome
    }
}
