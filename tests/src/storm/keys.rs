//! Images that are encrypted, each with a key of its own: how QEMU and mica are told to open them.
//! The passphrase of all is a file among the images, which is there if any of them may be encrypted.

use super::foreign;
use super::story::{Outcome, trouble};
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

/// The options with which QEMU opens `image`, and what it calls it then.
pub(super) fn for_qemu(images: &Path, format: &str, image: &str) -> Outcome<(Vec<String>, String)> {
    if secret(images).is_none() {
        return Ok((["-f", format].map(str::to_owned).to_vec(), image.to_owned()));
    }
    let args = ["info", "-U", "-f", format, "--backing-chain", "--output", "json", image];
    let told: serde_json::Value =
        serde_json::from_str(&foreign::img(images, &args)?).map_err(trouble)?;
    let (mut prefix, mut name) = (String::new(), Vec::new());
    for layer in told.as_array().into_iter().flatten() {
        let [format, file] = ["format", "filename"].map(|key| layer[key].as_str().unwrap_or(""));
        name.push(format!("{prefix}driver={format},{prefix}file.filename={file}"));
        if layer["encrypted"] == true {
            let option = if format == "luks" { "key-secret" } else { "encrypt.key-secret" };
            name.push(format!("{prefix}{option}=key"));
        }
        prefix.push_str("backing.");
    }
    let options = OBJECT.iter().chain(&["--image-opts"]).map(|option| (*option).to_owned());
    Ok((options.collect(), name.join(",")))
}
