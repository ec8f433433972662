//! Whether other images stand on the layers of a chain: asked before a layer is changed or leaves.

use crate::above::owner_of;
use crate::files::{folder_of, node_of};
use crate::forest::{ScanDepth, images_on};
use crate::mark::{Mark, cure};
use crate::merged::was_merged;
use mica_block::{Error, ErrorKind, Result};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Images that are named at most.
const NAMED_MAX: usize = 5;

/// An image, and the layer that it names as its backing file.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Overlay {
    /// The image.
    path: PathBuf,
    /// The layer.
    stands_on: PathBuf,
}

/// The images in the folders of `layers`, in the folder of `above`, and in those to which the marks
/// of `layers` lead, that name one of `layers` as their backing file, other than `layers`
/// themselves, and `above`. An image that was merged into another one and is not used any more is
/// none of them, but those that stand on it are. An image elsewhere is not found, nor one that
/// cannot be read.
///
/// # Errors
/// If a folder cannot be listed; `Denied` if a mark leads to nothing.
fn overlays_on(layers: &[PathBuf], above: &Path) -> Result<Vec<Overlay>> {
    let mut layers: Vec<_> = layers.iter().filter(|layer| layer.exists()).cloned().collect();
    let marked = marked_above(&layers)?;
    let places = layers.iter().chain(&marked).map(PathBuf::as_path);
    let folders = places.chain([above]).map(folder_of);
    let mut folders: Vec<_> = folders.map(Path::to_owned).collect();
    folders.sort();
    folders.dedup();
    let own = layers.iter().map(PathBuf::as_path).chain([above]).map(node_of);
    let mut own: HashSet<_> = own.collect();
    loop {
        let mut on = images_on(&layers, &folders, ScanDepth::OneLevel)?.found;
        on.retain(|(path, _)| !own.contains(&node_of(path)));
        let merged: Vec<_> = on.iter().map(|(path, _)| path).filter(|it| was_merged(it)).collect();
        if merged.is_empty() {
            let mut found: Vec<_> =
                on.into_iter().map(|(path, stands_on)| Overlay { path, stands_on }).collect();
            found.sort_by(|one, other| one.path.cmp(&other.path));
            return Ok(found);
        }
        // What stands on them stands on what is beneath them.
        own.extend(merged.iter().map(|path| node_of(path)));
        layers.extend(merged.into_iter().cloned());
    }
}

/// The layers in which the disks of these `layers` went on, as their marks say.
fn marked_above(layers: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for layer in layers {
        let Some(mark) = Mark::of(layer, owner_of(layer)?)? else { continue };
        if !mark.above().exists() {
            let what = format!(
                "{} is frozen: its disk went on in {}, which is missing; {}",
                layer.display(),
                mark.above().display(),
                cure(layer, mark.path())
            );
            return Err(Error::new(ErrorKind::Denied, what));
        }
        found.push(mark.above().to_owned());
    }
    Ok(found)
}

/// Makes sure that no other image in the folders of `layers` and of `above`, the one on top of
/// them, or where marks of `layers` lead, stands on one of `layers`, apart from images that were
/// merged away.
///
/// # Errors
/// `Denied`, with names of images that do, or if a mark leads to nothing; else if a folder cannot
/// be listed.
pub fn check_no_overlays(layers: &[PathBuf], above: &Path) -> Result<()> {
    let overlays = overlays_on(layers, above)?;
    if overlays.is_empty() {
        return Ok(());
    }
    let named = overlays.iter().take(NAMED_MAX).map(|overlay| {
        format!("{} stands on {}", overlay.path.display(), overlay.stands_on.display())
    });
    let mut named: Vec<_> = named.collect();
    if let more @ 1.. = overlays.len().saturating_sub(NAMED_MAX) {
        named.push(format!("and {more} more do"));
    }
    let what = format!("other images need these layers: {}", named.join(", "));
    Err(Error::new(ErrorKind::Denied, what))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MergeMarks;
    use mica_block::Merged;
    use mica_qcow2_format::{BackingName, Compression, Header, L2Format, Version};
    use mica_units::{ClusterBits, HostCluster};
    use std::fs;

    fn image(path: &Path, backing: Option<&str>) {
        let cluster_bits = ClusterBits::new(16).expect("64 KiB");
        let l2 = L2Format { cluster_bits, version: Version::V3, extended: false, data_file: false };
        let mut header = Header::new(l2, Compression::Deflate);
        header.refcount_table_offset = cluster_bits.start_of(HostCluster::new(1));
        header.refcount_table_clusters = 1;
        let named = |name: &str| BackingName { name: name.into(), format: None };
        header.backing = backing.map(named);
        fs::write(path, header.encode().expect("it fits")).expect("there is room");
    }

    #[test]
    fn images_that_stand_on_a_layer_are_found_by_what_they_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        image(&at("base"), None);
        image(&at("middle"), Some("base"));
        image(&at("active"), Some("middle"));
        let found = || overlays_on(&[at("base"), at("middle")], &at("active")).expect("listed");
        assert_eq!(found(), []);
        image(&at("clone"), Some(at("base").to_str().expect("UTF-8")));
        fs::write(at("else"), b"QFI\xfbgarbage").expect("there is room");
        fs::write(at("empty"), b"").expect("there is room");
        std::os::unix::fs::symlink("missing", at("broken")).expect("a link");
        image(&at("lost"), Some("nowhere"));
        assert_eq!(found(), [Overlay { path: at("clone"), stands_on: at("base") }]);
        // A second name of an own image is no other image.
        fs::remove_file(at("clone")).expect("it is there");
        fs::hard_link(at("active"), at("again")).expect("a link");
        assert_eq!(found(), []);
    }

    #[test]
    fn image_that_was_merged_does_not_count_and_what_stands_on_it_does() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = |name: &str| folder.path().join(name);
        image(&at("base"), None);
        image(&at("one"), Some("base"));
        image(&at("two"), Some("one"));
        image(&at("active"), Some("base"));
        let found = || overlays_on(&[at("base")], &at("active")).expect("listed");
        let named = |name: &str, below: &str| Overlay { path: at(name), stands_on: at(below) };
        assert_eq!(found(), [named("one", "base")]);
        let marks = MergeMarks::put(&at("base"), &[at("one"), at("two")]).expect("marked");
        marks.end(Some(&Merged::Done { dropped: Vec::new(), copied: 0 }));
        assert_eq!(found(), []);
        image(&at("clone"), Some("two"));
        assert_eq!(found(), [named("clone", "two")]);
        // One that is used again is no longer what was merged.
        fs::remove_file(at("clone")).expect("it is there");
        let later = fs::metadata(at("one")).expect("there").modified().expect("a time");
        let file = fs::OpenOptions::new().write(true).open(at("one")).expect("it opens");
        file.set_modified(later + std::time::Duration::from_nanos(1_000_000)).expect("set");
        assert_eq!(found(), [named("one", "base")]);
    }
}
