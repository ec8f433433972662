//! The files that have the keys of volumes.

use mica_block::{Error, Result};
use mica_volume::VolumeKey;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// The key in the file at `path`.
///
/// # Errors
/// `Invalid` if it has none; otherwise those of the system.
pub fn read_volume_key(path: &Path) -> Result<Arc<VolumeKey>> {
    let name = path.display().to_string();
    let failed = |error| Error::from_io(format!("the key of a volume in {name}"), error);
    // Not on the heap of a growing vector: what that leaves behind is not erased.
    let mut content = [0; VolumeKey::FILE_BYTES_MAX + 1];
    let mut len = 0;
    let mut file = File::open(path).map_err(failed)?;
    while len < content.len() {
        match file.read(&mut content[len..]) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed(error)),
        }
    }
    let key = VolumeKey::of_file(name.clone(), &content[..len]);
    content.fill(0);
    key.map(Arc::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mica_block::ErrorKind;

    #[test]
    fn key_is_read_from_a_file_and_what_is_none_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("key");
        std::fs::write(&path, "0b".repeat(32) + "\n").expect("written");
        let of_digits = read_volume_key(&path).expect("a key").name();
        std::fs::write(&path, [11; 32]).expect("written");
        assert_eq!(read_volume_key(&path).expect("a key").name(), of_digits);
        std::fs::write(&path, vec![b'a'; 1 << 20]).expect("written");
        let refused = read_volume_key(&path).expect_err("none");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let missing = read_volume_key(&folder.path().join("none")).expect_err("none");
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
