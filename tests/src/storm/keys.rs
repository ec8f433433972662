//! Images that are encrypted, each with a key of its own, and what mica and QEMU are told of them.
//! The passphrase of all is a file among the images, if any of them may be encrypted.

use super::story::Outcome;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The file with the passphrase.
const SECRET: &str = "secret";
/// How QEMU gets it.
pub(super) const OBJECT: [&str; 2] = ["--object", "secret,id=key,file=secret"];
/// What QEMU makes an encrypted qcow2 image with, and a LUKS image. Opening it takes little.
pub(super) const OF_QCOW2: &str = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=10";
pub(super) const OF_LUKS: &str = "key-secret=key,iter-time=10";

/// From now on images in this folder may be encrypted.
pub(super) fn allow(images: &Path) -> Outcome {
    let file = images.join(SECRET);
    fs::write(&file, "the words")?;
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o600))?)
}

/// The passphrase of images in this folder, if some may be encrypted.
pub(super) fn secret(images: &Path) -> Option<PathBuf> {
    Some(images.join(SECRET)).filter(|file| file.exists())
}

/// The options with which mica opens them.
pub(super) fn options(images: &Path) -> Vec<String> {
    let secret = secret(images).map(|file| ["--secret".to_owned(), file.display().to_string()]);
    secret.into_iter().flatten().collect()
}
