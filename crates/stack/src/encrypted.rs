//! New overlays of encrypted images, which are encrypted, too: what a guest writes to an encrypted
//! disk is never in a file in plain form unless somebody chose that. And encrypted disks that are
//! shown as if they were not.

use crate::Format;
use mica_block::{Disk, Error, ErrorKind, Images, Result, Store, read_whole};
use mica_crypt::luks::{MAGIC, NewLuks, NewSlot, Wish};
use mica_qcow2::read_luks_header;
use mica_qcow2_format::{Encryption, Header};
use mica_qcow2_tools::create::ImagePlan;
use mica_units::{GuestOffset, GuestRange, SECTOR_BYTES};
use std::path::Path;

/// The plan of an overlay that will be at `path`, on an image with this `header`, whose file is
/// `store`: encrypted if that is, with a key of its own, the passphrase that the user named for it,
/// and as many iterations. Takes as long as opening the image.
///
/// # Errors
/// `Denied` if there is no passphrase for it; as for reading the image's own LUKS header.
pub async fn encrypted_as(
    images: &dyn Images,
    plan: ImagePlan,
    (header, store): (&Header, &dyn Store),
    path: &Path,
) -> Result<ImagePlan> {
    if header.encryption == Encryption::None {
        return Ok(plan);
    }
    let passphrase = images.passphrase(path)?.ok_or_else(|| no_secret(path))?;
    let mut wish = Wish::default();
    if let Some((luks, _)) = read_luks_header(header, store).await?
        && let Some((_, iterations)) = luks.active_slots().next()
    {
        wish.slot = NewSlot::Iterations(iterations);
    }
    plan.encrypted(NewLuks::make(wish, &passphrase)?)
}

/// The error: nobody named a passphrase for the image that will be at `path`.
pub(crate) fn no_secret(path: &Path) -> Error {
    let what = format!(
        "{} will be encrypted as the image beneath is, and no --secret is for it: add one, or leave \
         out the pattern of the one that there is",
        path.display()
    );
    Error::new(ErrorKind::Denied, what)
}

/// Warns if the `disk` of the image that the user `named` is shown as it is stored, which is as a
/// LUKS image: with the raw format nothing is decrypted.
pub async fn warn_of_luks(named: &Path, format: Format, disk: &dyn Disk) {
    if format != Format::Raw || disk.geometry().len < SECTOR_BYTES {
        return;
    }
    // What cannot be read is reported to who needs it.
    let first = GuestRange::new(GuestOffset::ZERO, SECTOR_BYTES).expect("a sector");
    let read = async || read_whole(disk, &disk.plan(first, Vec::new()).finish().await?).await;
    if read().await.is_ok_and(|first| first.starts_with(&MAGIC)) {
        tracing::warn!(
            "{} begins as a LUKS image does, and --format raw shows what is encrypted: to decrypt \
             it, use --format luks --secret FILE, unless it is the guest that does",
            named.display()
        );
    }
}
