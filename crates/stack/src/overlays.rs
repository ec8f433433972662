//! Which images stand on the layers of a chain, as far as their headers say so: before a layer is
//! changed that other chains may need.
//!
//! Invariants
//! - I1 Only regular files are opened, and only the first cluster of a qcow2 image is read.

use mica_block::{Error, Result};
use mica_qcow2_format::{HEADER_READ_BYTES, Header, parse_image_name};
use rustix::fs::OFlags;
use std::collections::HashSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Images that are named at most.
const NAMED_MAX: usize = 5;

type Node = (u64, u64);

/// An image, and the layer that it names as its backing file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Overlay {
    /// The image.
    pub path: PathBuf,
    /// The layer.
    pub stands_on: PathBuf,
}

/// Which file something is, even after its number was used again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct FileId {
    node: Node,
    /// When it was made, if the file system knows.
    made: Option<SystemTime>,
}

impl FileId {
    /// The file at `path`; `None` if there is none.
    pub fn of(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().map(|found| Self::of_metadata(&found))
    }

    fn of_metadata(found: &fs::Metadata) -> Self {
        Self { node: (found.dev(), found.ino()), made: found.created().ok() }
    }
}

/// The images in the folders of `layers`, and in the folder of `above`, that name one of `layers`
/// as their backing file, other than `layers` themselves, `above`, and images that are `gone`: that
/// nobody uses any more. An image elsewhere is not found, nor one that cannot be read.
///
/// # Errors
/// If a folder cannot be listed.
pub fn overlays_on(layers: &[PathBuf], above: &Path, gone: &[FileId]) -> Result<Vec<Overlay>> {
    let nodes: Vec<Option<Node>> = layers.iter().map(|layer| node_of(layer).ok()).collect();
    let own = nodes.iter().flatten().copied().chain(node_of(above).ok());
    let own: HashSet<Node> = own.collect();
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for layer in layers.iter().map(PathBuf::as_path).chain([above]) {
        let folder = layer.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let context = || format!("looking for images in {}", folder.display());
        let failed = |error| Error::from_io(context(), error);
        if !seen.insert(node_of(folder).map_err(failed)?) {
            continue;
        }
        for entry in fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            let Ok(Some((image, base))) = base_of(&path) else { continue };
            if own.contains(&image.node) || gone.contains(&image) {
                continue;
            }
            let at = nodes.iter().position(|layer| layer.is_some() && *layer == Some(base));
            if let Some(at) = at {
                found.push(Overlay { path, stands_on: layers[at].clone() });
            }
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

/// Makes sure that no image is found by [`overlays_on`].
///
/// # Errors
/// `Denied`, with names of images that are; else as [`overlays_on`].
pub fn check_no_overlays(layers: &[PathBuf], above: &Path, gone: &[FileId]) -> Result<()> {
    let overlays = overlays_on(layers, above, gone)?;
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
    Err(Error::new(mica_block::ErrorKind::Denied, what))
}

fn node_of(path: &Path) -> io::Result<Node> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// The image at `path` and its backing file; `None` if it is none, or has none.
fn base_of(path: &Path) -> io::Result<Option<(FileId, Node)>> {
    if !fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    // What has taken its place meanwhile must not hang us.
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    let Some(header) = header_of(file, metadata.len())? else { return Ok(None) };
    let Some(backing) = header.backing else { return Ok(None) };
    let Ok(name) = parse_image_name(&backing.name) else { return Ok(None) };
    let base = path.parent().unwrap_or(Path::new("")).join(name.path);
    match node_of(&base) {
        Ok(base) => Ok(Some((FileId::of_metadata(&metadata), base))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn header_of(mut file: File, len: u64) -> io::Result<Option<Header>> {
    let mut bytes = Vec::new();
    file.by_ref().take(4).read_to_end(&mut bytes)?;
    if bytes != *b"QFI\xfb" {
        return Ok(None);
    }
    let mut wanted = HEADER_READ_BYTES;
    loop {
        let more = wanted.saturating_sub(bytes.len()) as u64;
        let got = file.by_ref().take(more).read_to_end(&mut bytes)?;
        match Header::bytes_needed(&bytes) {
            Ok(needed) if needed > bytes.len() && got > 0 => wanted = needed,
            Ok(_) => return Ok(Header::decode_for_check(&bytes, len).ok()),
            Err(_) => return Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_qcow2_format::{BackingName, Compression, L2Format, Version};
    use mica_units::{ClusterBits, HostCluster};

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
        let found = |gone: &[FileId]| {
            overlays_on(&[at("base"), at("middle")], &at("active"), gone).expect("listed")
        };
        assert_eq!(found(&[]), []);
        image(&at("clone"), Some(at("base").to_str().expect("UTF-8")));
        fs::write(at("else"), b"QFI\xfbgarbage").expect("there is room");
        fs::write(at("empty"), b"").expect("there is room");
        std::os::unix::fs::symlink("missing", at("broken")).expect("a link");
        image(&at("lost"), Some("nowhere"));
        assert_eq!(found(&[]), [Overlay { path: at("clone"), stands_on: at("base") }]);
        assert_eq!(found(&[FileId::of(&at("clone")).expect("it is there")]), []);
        // A second name of an own image is no other image.
        fs::remove_file(at("clone")).expect("it is there");
        fs::hard_link(at("active"), at("again")).expect("a link");
        assert_eq!(found(&[]), []);
    }
}
