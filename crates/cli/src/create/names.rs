//! The names that a new image gives to other files, and whether it may be opened with them.

use super::beside;
use crate::failure::Failure;
use crate::images::{ImageArgs, is_old_export};
use mica_block::Images;
use mica_qcow2_tools::create::ImageWish;
use mica_stack::{FileImages, looks_like_protocol, shell_word};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

/// What exports are called.
const EXPORT: &str = "nbd://HOST:PORT/EXPORT";

/// Writes the names of files that look like protocols as paths: a:b as ./a:b.
pub(crate) fn plain_names(image: &Path, wish: &mut ImageWish) {
    // A data file is created, a backing file is there. Without one the name may be a protocol.
    wish.backing_name.iter_mut().for_each(|name| plain_backing(image, name));
    wish.data_file.iter_mut().for_each(|name| plain(name, |_| true));
}

/// Writes the name of a backing file that looks like a protocol, and is there, as a path.
pub(crate) fn plain_backing(image: &Path, name: &mut OsString) {
    plain(name, |name| beside(image, name).exists());
}

/// # Errors
/// If what a new image names as its `backing` file is an export or the like, and no file.
pub(crate) fn refuse_protocol(backing: &OsStr) -> Result<(), Failure> {
    if !looks_like_protocol(backing.as_bytes()) {
        return Ok(());
    }
    let name = backing.display();
    let what = match backing.as_bytes().starts_with(b"nbd") {
        true => {
            let uri = match is_old_export(Path::new(backing)) {
                true => EXPORT.to_owned(),
                false => shell_word(Path::new(backing)),
            };
            format!("is an export of a server: `mica convert {uri} base.qcow2` copies it into one")
        }
        false => "names a protocol, which mica does not open".to_owned(),
    };
    Err(Failure::new(format!("a backing file must be a file, and {name} {what}")))
}

fn plain(name: &mut OsString, is_file: impl Fn(&Path) -> bool) {
    if looks_like_protocol(name.as_bytes()) && is_file(Path::new(name)) {
        let mut path = OsString::from("./");
        path.push(&*name);
        *name = path;
    }
}

/// Warns if the new image at `image` names files that it may not, so that nothing will open it as
/// it is.
pub(crate) fn warn_if_refused(
    image: &Path,
    wish: &ImageWish,
    images: &ImageArgs,
) -> Result<(), Failure> {
    let names = [&wish.backing_name, &wish.data_file];
    let names: Vec<&OsStr> = names.into_iter().flatten().map(OsString::as_os_str).collect();
    warn_of_names(image, &names, images)
}

/// As [`warn_if_refused`], of an image that gives these `names`.
pub(crate) fn warn_of_names(
    image: &Path,
    names: &[&OsStr],
    images: &ImageArgs,
) -> Result<(), Failure> {
    if names.is_empty() {
        return Ok(());
    }
    let files = FileImages::new(image, images.image_options()?)?;
    for name in names {
        if let Err(error) = files.resolve(image, Path::new(name)) {
            tracing::warn!("{} will be refused when it is opened: {error}", image.display());
        }
    }
    Ok(())
}
