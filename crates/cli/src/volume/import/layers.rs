//! The layers of a chain that is imported.

use crate::failure::Failure;
use crate::images::{ImageArgs, export_uri};
use mica_block::{Disk as _, LABEL_BYTES_MAX, Manage, wait_for_dead};
use mica_qcow2::IndexUse;
use mica_qcow2_tools::inspect;
use mica_serve::nbd::client::Uri;
use mica_stack::{FileImages, Format};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

/// A layer.
pub(super) struct Layer {
    path: PathBuf,
    format: Format,
    /// Length of the disk that it is the uppermost layer of.
    pub(super) len: u64,
    /// Of its snapshot.
    pub(super) label: String,
}

/// Most layers that become snapshots; more are copied as one.
const LAYERS_MAX: usize = 10_000;

impl Layer {
    /// The disk of it and the layers below.
    pub(super) async fn open(&self, images: &ImageArgs) -> Result<Arc<dyn Manage>, Failure> {
        let images = images.with_format(Some(self.format));
        images.open_source(&self.path, IndexUse::Read).await
    }
}

/// The layers of the chain of `image`, from the base; of an export of an NBD server, which is a
/// disk whatever its server makes it of, that one; only the uppermost if the disk became shorter
/// from one to the next: a snapshot would show what is beyond its end.
///
/// # Errors
/// If one of them cannot be opened.
pub(super) async fn layers(images: &ImageArgs, image: &Path) -> Result<Vec<Layer>, Failure> {
    if let Some(export) = images.open_export(image)? {
        let len = export.geometry().len;
        export.close().await?;
        let name = export_uri(image).and_then(|uri| Uri::from_str(uri).ok());
        let name = name.map(|uri| uri.export).filter(|name| !name.is_empty());
        let label = label_of(Path::new(name.as_deref().unwrap_or("export")), &BTreeSet::new());
        return Ok(vec![Layer { path: image.to_owned(), format: Format::Raw, len, label }]);
    }
    // Whatever prevents the chain from being opened is said first.
    images.open(image, IndexUse::Ignore).await?.close().await?;
    let format = images.format();
    let mut all = vec![Layer { path: image.to_owned(), format, len: 0, label: String::new() }];
    let files = FileImages::new(image, images.image_options()?)?;
    while let Some(last) = all.last_mut() {
        if last.format != Format::Qcow2 {
            last.len = last.open(images).await?.geometry().len;
            break;
        }
        let path = last.path.clone();
        // Its header alone: to open it would open all that are below.
        let info = wait_for_dead(async || inspect(&files, &path).await).await?;
        last.len = info.header.disk_bytes();
        let Some((path, format)) = info.backing(&files, &path)? else { break };
        let format = format.as_deref().unwrap_or("raw").parse()?;
        all.push(Layer { path, format, len: 0, label: String::new() });
        if all.len() > LAYERS_MAX {
            break;
        }
    }
    all.reverse();
    let why = match () {
        () if all.len() > LAYERS_MAX => Some("there are too many"),
        () if !all.is_sorted_by_key(|layer| layer.len) => {
            Some("a layer is shorter than the one beneath it, and a volume cannot shrink")
        }
        () => None,
    };
    if let Some(why) = why {
        tracing::warn!("only the uppermost layer of {} becomes a snapshot: {why}", image.display());
        all.drain(..all.len() - 1);
    }
    let mut taken = BTreeSet::new();
    for layer in &mut all {
        layer.label = label_of(&layer.path, &taken);
        taken.insert(layer.label.clone());
    }
    Ok(all)
}

/// A label that says which file it was, and that is not taken.
fn label_of(path: &Path, taken: &BTreeSet<String>) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let plain = |letter: char| if letter == '@' || letter.is_control() { '_' } else { letter };
    let mut label: String = name.chars().map(plain).collect();
    // Room for a number behind it.
    let mut end = label.len().min(LABEL_BYTES_MAX - 16);
    while !label.is_char_boundary(end) {
        end -= 1;
    }
    label.truncate(end);
    if label.bytes().all(|byte| byte.is_ascii_digit()) {
        label.insert_str(0, "layer ");
    }
    let numbered = (2..).map(|number| format!("{label} ({number})"));
    let mut all = std::iter::once(label.clone()).chain(numbered);
    all.find(|label| !taken.contains(label)).unwrap_or(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_names_of_files_as_far_as_labels_can_be() {
        let mut taken = BTreeSet::new();
        for (path, label) in [
            ("/a/base.qcow2", "base.qcow2"),
            ("/b/base.qcow2", "base.qcow2 (2)"),
            ("/c/base.qcow2", "base.qcow2 (3)"),
            ("/a@b", "a_b"),
            ("/17", "layer 17"),
        ] {
            let made = label_of(Path::new(path), &taken);
            assert_eq!(made, label);
            mica_block::check_label(&made).expect("a label");
            taken.insert(made);
        }
        let long = label_of(Path::new(&"ä".repeat(300)), &taken);
        mica_block::check_label(&long).expect("a label");
    }
}
