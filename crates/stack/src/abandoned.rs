//! What killed processes left beside layers: files that are not whole (`temporary.rs`), and marks
//! of merges that never began (`merged/planned.rs`). Each of them says when it may go.

use crate::merged::take_back_planned;
use crate::temporary::remove_beside;
use std::path::PathBuf;

/// Layers, from the uppermost, beside which is looked for what was left: a chain has thousands, and
/// what is beside others is replaced with the next merge of them.
const LAYERS_MAX: usize = 64;

/// Removes what killed processes left beside these `layers`, from the base to the active one, which
/// the caller has locked, and takes back what is said there of merges that never began. Returns
/// what was removed; what cannot be stays.
pub fn remove_abandoned(layers: &[PathBuf]) -> Vec<PathBuf> {
    let begun = layers.len().saturating_sub(LAYERS_MAX);
    // A server that starts does this for each of its disks: where a layer is is asked once.
    let real = layers[begun..].iter().map(|layer| layer.canonicalize().ok());
    let real: Vec<_> = real.collect();
    real.iter().flatten().for_each(|layer| take_back_planned(layer));
    remove_beside(&real)
}
