//! Which images the index covers, by the seals of their sidecars.

use super::record::{FileStat, Opened};
use super::{Below, Forest, ImageId};
use crate::sidecars::{SidecarPlace, paths_of_sidecar};
use mica_block::SealState;
use mica_qcow2::{Seal, SealName};
use std::path::Path;

/// Marks the images that the index covers, together with all beneath them.
pub(super) fn judge(forest: &mut Forest, place: &SidecarPlace) {
    let mut next: Vec<(ImageId, Option<SealName>)> =
        forest.roots.iter().map(|root| (*root, None)).collect();
    while let Some((id, below)) = next.pop() {
        let Some(name) = name_of(forest, id, below, place) else { continue };
        let image = &mut forest.images[id.index()];
        image.is_indexed = true;
        next.extend(image.overlays.iter().map(|above| (*above, Some(name))));
    }
}

/// The name of the valid sidecar of `id`, which stands on an image whose sidecar is `below`.
fn name_of(
    forest: &Forest,
    id: ImageId,
    below: Option<SealName>,
    place: &SidecarPlace,
) -> Option<SealName> {
    let image = forest.get(id);
    if image.qcow2.is_none() {
        return Some(Seal::of_raw_base(image.virtual_bytes));
    }
    // What it stands on is not known, and may have an index or not.
    if matches!(image.below, Below::Lost { .. }) {
        return None;
    }
    let real = image.path().canonicalize().ok()?;
    let identity = FileStat::of(&real).ok()?.identity();
    let seal = paths_of_sidecar(place, &real)?.iter().find_map(|path| read(path))?;
    let state = seal.state(image.depth, image.virtual_bytes, &identity, below);
    (state == SealState::Sealed).then(|| seal.name())
}

fn read(path: &Path) -> Option<Seal> {
    let opened = Opened::open(path).ok()??;
    let len = opened.stat.len;
    Seal::decode(&opened.start(Seal::BYTES).ok()?).filter(|seal| seal.sidecar_len() == len)
}
