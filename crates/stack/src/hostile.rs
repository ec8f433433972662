//! Untrusted bytes as each of the small files that this crate reads beside images, and as images in
//! folders. The fuzz targets in `fuzz/` pass random bytes, a test passes the corpus. Every function
//! here returns, whatever the bytes are, or the bytes have found a bug.

use crate::forest::{Forest, ScanOptions};
use crate::mark::name_in;
use crate::merged::is_merge_mark;
use crate::overlays::read_note;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Images that the bytes are cut into, at most.
const IMAGES_MAX: u8 = 4;

/// The mark of a frozen layer.
///
/// # Panics
/// If what it names is no name of a file.
pub fn above_mark(bytes: &[u8]) {
    if let Some(name) = name_in(bytes) {
        assert!(!name.is_empty() && !name.as_bytes().contains(&0), "{name:?}");
        assert_eq!([&b"above: "[..], name.as_bytes(), b"\n"].concat(), bytes);
    }
}

/// The mark of a layer that is merged.
///
/// # Panics
/// If it reads differently when it is written again.
pub fn merge_mark(bytes: &[u8]) {
    is_merge_mark(bytes);
}

/// The note of images that stand on a layer in other folders.
///
/// # Panics
/// If it reads differently when it is written again.
pub fn overlay_note(bytes: &[u8]) {
    read_note(bytes);
}

/// Images in `folder`, which is empty and stays so: the first byte says into how many the others
/// are cut.
///
/// # Panics
/// If what is found is no forest, or the folder cannot be written.
pub fn forest(folder: &Path, bytes: &[u8]) {
    let Some((count, bytes)) = bytes.split_first() else { return };
    let count = usize::from(count % IMAGES_MAX) + 1;
    let len = bytes.len().div_ceil(count).max(1);
    let names = ["a", "b", "c", "d"].map(|name| folder.join(name));
    let images: Vec<_> = names.iter().zip(bytes.chunks(len)).collect();
    for (path, bytes) in &images {
        std::fs::write(path, bytes).expect("written");
    }
    let places = [folder.to_owned()];
    let scanned = Forest::scan(&places, &ScanOptions::default(), |_| ControlFlow::Continue(()));
    for (path, _) in &images {
        std::fs::remove_file(path).expect("removed");
    }
    let forest = scanned.expect("bad images are left out");
    assert!(forest.images().len() <= images.len(), "no more than there are");
    for image in forest.images() {
        // Whatever they name, none stands on itself.
        assert!(image.depth < forest.images().len(), "{}", image.path().display());
        assert!(image.overlays.iter().all(|upper| upper.index() < forest.images().len()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::PathBuf;

    type Survive = fn(&[u8]);

    fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
        let seeds = fs::read_dir(folder).expect("seeds").map(|seed| seed.expect("a seed").path());
        let seeds: Vec<_> =
            seeds.map(|path| (path.clone(), fs::read(&path).expect("a seed"))).collect();
        assert!(!seeds.is_empty(), "{target} has seeds");
        seeds
    }

    fn in_a_folder(bytes: &[u8]) {
        let folder = tempfile::tempdir().expect("a folder");
        forest(folder.path(), bytes);
    }

    #[test]
    fn corpus_is_survived_also_with_random_faults() {
        let targets: [(&str, Survive); 4] = [
            ("above_mark", above_mark),
            ("merge_mark", merge_mark),
            ("overlay_note", overlay_note),
            ("forest", in_a_folder),
        ];
        let mut drawn = 0;
        let mut below = |bound: usize| {
            drawn += 1;
            usize::try_from(mica_units::random_at(1, drawn)).expect("64 bits") % bound
        };
        for (target, survive) in targets {
            for (path, seed) in corpus(target) {
                println!("{}", path.display());
                survive(&seed);
                for _ in 0..32 {
                    let mut bytes = seed.clone();
                    // Headers come first, and there the bits count.
                    let most = [64, 200, bytes.len()][below(3)].min(bytes.len());
                    for _ in 0..1 + below(4) {
                        if most > 0 {
                            bytes[below(most)] ^= 1 << below(8);
                        }
                    }
                    bytes.truncate(seed.len() - below(2) * below(seed.len().max(1)));
                    survive(&bytes);
                }
            }
        }
    }
}
