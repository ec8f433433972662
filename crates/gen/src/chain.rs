//! Writes a whole chain: plan, then layer by layer from the base up.

use crate::expand::expand;
use crate::image::{self, Image};
use crate::manifest::{LayerEntry, Manifest};
use crate::owner::OwnerMap;
use crate::plan::{self, ChainPlan};
use crate::sink::check_unused;
use crate::spec::{ChainSpec, Feature};
use mica_block::{Error, ErrorKind, Result};
use mica_units::Rng;
use std::fs;
use std::path::Path;

/// Name of the link to the active layer.
const TOP_LINK: &str = "top.qcow2";

/// Makes the chain that `spec` describes. After each layer `progress` is called with the number of
/// layers made so far. Layers that were in the folder under the same names are replaced, but none
/// of them if another program uses one.
///
/// # Errors
/// `Invalid` if `spec` is; `Denied` if a layer to replace is in use; otherwise what the system
/// reports.
pub fn generate(spec: &ChainSpec, mut progress: impl FnMut(u32)) -> Result<Manifest> {
    spec.validate()?;
    let cluster_bits = spec
        .cluster_bits()
        .ok_or_else(|| Error::new(ErrorKind::Invalid, "the cluster size is not a power of two"))?;
    fs::create_dir_all(&spec.dir)
        .map_err(|error| Error::from_io(format!("creating {}", spec.dir.display()), error))?;

    let ChainPlan { shapes, unit_bytes, cluster_bits, held } = plan::plan(spec, cluster_bits);
    let names: Vec<_> = shapes.iter().map(LayerEntry::describe).collect();
    for file in names.iter().flat_map(LayerEntry::files) {
        check_unused(&spec.dir.join(file))?;
    }
    let mut owners = OwnerMap::new(spec.disk_bytes, unit_bytes);
    let mut below: Option<&LayerEntry> = None;
    for ((shape, entry), held) in shapes.iter().zip(&names).zip(&held) {
        let number = shape.number.index() as u64;
        let mut rng = Rng::for_part(spec.seed, 2 << 32 | number);
        let entries = expand(shape, held, cluster_bits, spec.features, &mut rng, &mut owners);
        image::write(&Image {
            dir: &spec.dir,
            shape,
            names: entry,
            below,
            plan_bits: cluster_bits,
            entries: &entries,
            data: spec.data,
            order: spec.features.has(Feature::Shuffled).then_some(rng),
        })?;
        below = Some(entry);
        progress(u32::from(shape.number.as_u16()) + 1);
    }
    owners.save(&spec.dir)?;
    let manifest = Manifest::describe(spec, &shapes, unit_bytes);
    manifest.save(&spec.dir)?;
    link_top(&spec.dir, &manifest)?;
    Ok(manifest)
}

/// Links `top.qcow2` to the active layer, which is never a raw one.
fn link_top(dir: &Path, manifest: &Manifest) -> Result<()> {
    let link = dir.join(TOP_LINK);
    let failed = |error| Error::from_io(format!("linking {}", link.display()), error);
    match fs::remove_file(&link) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    std::os::unix::fs::symlink(&manifest.top, &link).map_err(failed)
}

#[cfg(test)]
mod tests;
